"""One setting under two names in a config.json: they agree, one counts by a stated rule, or the file is refused."""

import warnings

import pytest

from echo_jax.checkpoints.hf_config import config_from_hf
from echo_jax.checkpoints.notes import CheckpointNote
from echo_jax.models.config import DENSE, FULL, MOE, SHARED
from echo_jax.models.presets import GLM5, V32
from tests.test_hf_config import RELEASED_GLM5, RELEASED_V32, without

YARN = RELEASED_V32["rope_scaling"]
NO_THETA = without(RELEASED_V32, "rope_theta")


def noted(raw, words):
    """The config, read with exactly one note."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = config_from_hf(raw)
    assert [one.category for one in caught] == [CheckpointNote]
    for word in words:
        assert word in str(caught[0].message)
    return config


# ---- rope_scaling and rope_parameters; their values are held against transformers in test_rope_table.py ----------


def test_rope_scaling_replaces_rope_parameters_whole():
    """It was dropped without a word. Not even a key that it lacks is taken from the other dictionary."""
    lost = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "rope_theta": 10000, "beta_fast": 99}
    words = ["rope_scaling replaces rope_parameters whole", "factor 40 for 8.0", "attention_factor 'absent' for 1.5"]
    assert noted(RELEASED_V32 | {"rope_parameters": lost}, words) == V32


def test_two_dictionaries_that_agree_need_no_note():
    same = without(YARN, "type") | {"rope_type": "yarn", "rope_theta": 10000.0, "attention_factor": None}
    assert config_from_hf(RELEASED_V32 | {"rope_parameters": same}) == V32
    assert config_from_hf(RELEASED_V32 | {"rope_parameters": {}}) == V32
    assert config_from_hf(RELEASED_GLM5 | {"rope_scaling": None}) == GLM5
    assert config_from_hf(RELEASED_GLM5 | {"rope_scaling": {}, "rope_theta": 1000000}) == GLM5


def test_theta_may_stand_in_the_dictionary_alone():
    assert config_from_hf(NO_THETA | {"rope_scaling": YARN | {"rope_theta": 10000}}) == V32
    own = NO_THETA | {"rope_scaling": YARN | {"rope_theta": 10000}, "rope_parameters": {"rope_theta": 500}}
    assert noted(own, ["rope_theta 10000 for 500"]) == V32


CONTRADICTIONS = {
    "scaling": (
        RELEASED_V32 | {"rope_scaling": YARN | {"rope_theta": 50000}},
        ["rope_theta is 10000 in config.json but 50000 in its rope_scaling", "keep the one"],
    ),
    "parameters": (
        RELEASED_GLM5 | {"rope_theta": 10000},
        ["rope_theta is 10000 in config.json but 1000000 in its rope_parameters"],
    ),
    "lost_parameters": (
        RELEASED_V32 | {"rope_parameters": {"rope_theta": 50000, "rope_type": "default"}},
        ["rope_theta is 10000 in config.json but 50000 in its rope_parameters"],
    ),
    "only_in_the_lost": (
        NO_THETA | {"rope_parameters": {"rope_theta": 50000, "rope_type": "default"}},
        ["rope_theta is 50000 in rope_parameters, which rope_scaling replaces", "10000.0", "into rope_scaling"],
    ),
    "nowhere": (NO_THETA, ["lacks rope_theta"]),
    "original": (
        RELEASED_V32 | {"original_max_position_embeddings": 8192},
        ["original_max_position_embeddings is 8192 in config.json but 4096 in its rotary settings"],
    ),
    "no_object": (RELEASED_V32 | {"rope_scaling": "yarn"}, ["rope_scaling is 'yarn' but must be an object"]),
    "experts": (
        RELEASED_V32 | {"num_local_experts": 128},
        ["n_routed_experts 256, num_local_experts 128", "keep one of them"],
    ),
    "head": (RELEASED_GLM5 | {"qk_head_dim": 128}, ["qk_head_dim 128", "qk_nope_head_dim 192", "qk_rope_head_dim 64"]),
    "quantisation": (
        RELEASED_V32 | {"compression_config": {"quant_method": "compressed-tensors"}},
        ["quantization_config ('fp8') and compression_config ('compressed-tensors')", "differ"],
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused_with_both_values(case):
    raw, words = CONTRADICTIONS[case]
    with pytest.raises(ValueError) as caught:
        config_from_hf(raw)
    for word in words:
        assert word in str(caught.value)


# ---- further settings with two names -----------------------------------------------------------------------------


def test_dtype_counts_before_torch_dtype():
    assert config_from_hf(RELEASED_V32 | {"dtype": "bfloat16"}) == V32
    config = noted(RELEASED_V32 | {"dtype": "float32"}, ["dtype 'float32' and torch_dtype 'bfloat16'", "dtype counts"])
    assert config.dtype == "float32"


def test_a_list_of_mlp_layers_counts_before_a_number():
    agreeing = RELEASED_GLM5 | {"first_k_dense_replace": 3, "moe_layer_freq": 1}
    assert config_from_hf(agreeing) == GLM5
    words = [
        "mlp_layer_types and first_k_dense_replace",
        "first on layer 1 ('dense' and 'moe')",
        "mlp_layer_types counts",
    ]
    assert noted(RELEASED_GLM5 | {"first_k_dense_replace": 1}, words) == GLM5
    every = noted(agreeing | {"moe_layer_freq": 2}, ["first on layer 3 ('moe' and 'dense')"])
    assert noted(RELEASED_GLM5 | {"moe_layer_freq": 2}, ["mlp_layer_types counts"]) == GLM5
    assert every.mlp_kinds == (DENSE,) * 3 + (MOE,) * 75


def test_a_list_of_indexers_counts_before_a_pattern_and_that_before_a_frequency():
    base = RELEASED_GLM5 | {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4}
    kinds = (FULL, SHARED, FULL, SHARED)
    as_list = {"indexer_types": ["full", "shared", "full", "shared"]}
    assert config_from_hf(base | as_list | {"index_topk_pattern": "FSFS"}).layer_kinds == kinds
    words = ["indexer_types and index_topk_pattern", "first on layer 1 ('shared' and 'full')", "indexer_types counts"]
    assert noted(base | as_list | {"index_topk_pattern": "FFFS"}, words).layer_kinds == kinds
    frequency = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    assert config_from_hf(base | as_list | frequency).layer_kinds == kinds
    words = ["index_topk_pattern and index_topk_freq", "first on layer 1 ('full' and 'shared')"]
    assert noted(base | frequency | {"index_topk_pattern": "FFFS"}, words).layer_kinds == (FULL, FULL, FULL, SHARED)


def test_experts_under_another_name():
    for name in ("num_local_experts", "num_experts"):
        assert config_from_hf(without(RELEASED_V32, "n_routed_experts") | {name: 256}) == V32
        assert config_from_hf(RELEASED_V32 | {name: 256}) == V32


def test_head_dims_that_are_not_used():
    assert config_from_hf(RELEASED_GLM5 | {"qk_head_dim": 256, "head_dim": 64}) == GLM5
    assert config_from_hf(RELEASED_GLM5 | {"head_dim": 256}) == GLM5
    assert noted(RELEASED_GLM5 | {"head_dim": 96}, ["head_dim 96", "not used", "256 dims"]) == GLM5


def test_the_model_type_counts_before_the_architecture():
    words = ["'GlmMoeDsaForCausalLM'", "'deepseek_v32'", "model_type counts"]
    assert noted(RELEASED_V32 | {"architectures": ["GlmMoeDsaForCausalLM"]}, words) == V32


def test_the_original_context_may_stand_outside_the_dictionary():
    outside = RELEASED_V32 | {
        "rope_scaling": without(YARN, "original_max_position_embeddings"),
        "original_max_position_embeddings": 4096,
    }
    assert config_from_hf(outside) == V32
