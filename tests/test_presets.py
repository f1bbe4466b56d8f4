"""Presets have the sizes of the models that they are named after."""

import math

import pytest

from echo_jax.checkpoints.layout import stored_tensors
from echo_jax.models.config import SHARED
from echo_jax.models.presets import PRESETS, parameter_count, preset


def test_v32_has_the_released_parameters():
    """DeepSeek-V3 has 671,026,419,200 without its MTP layer (its paper: 671B); V3.2 adds an indexer to each layer."""
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    assert parameter_count(preset("v32")) == 671_026_419_200 + 61 * indexer


def test_glm5_has_the_released_parameters():
    """zai-org states 744B for GLM-5; GLM-5.2 saves the indexers of 57 layers."""
    assert round(parameter_count(preset("glm5")) / 1e9) == 744
    shared = preset("glm5.2").layer_kinds.count(SHARED)
    assert shared == 57
    indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
    assert parameter_count(preset("glm5")) - parameter_count(preset("glm5.2")) == shared * indexer


def test_records_of_the_large_presets_are_those_of_the_kernels():
    for name in ("small", "v32", "glm5", "glm5.2"):
        config = preset(name)
        assert (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim) == (512, 64, 128), name


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_stored_tensors(name):
    """Two lists of the same parameters, made apart: shapes of random ones, and names of stored ones."""
    assert parameter_count(PRESETS[name]) == sum(math.prod(one.shape) for one in stored_tensors(PRESETS[name]))


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match=r"preset 'v3\.2' is unknown; the nearest is 'v32'; there are: 'tiny'"):
        preset("v3.2")
    assert set(PRESETS) >= {"tiny", "small", "v32", "glm5"}
