"""What a folder may not hold without a word: more layers than its config says, NaN and infinities in a weight."""

import json

import ml_dtypes
import numpy as np
import pytest

from echo_jax.checkpoints import load_folder, restore_params, save_params
from echo_jax.checkpoints.files import nonfinite
from echo_jax.checkpoints.notes import CheckpointNote
from tests.checkpoint_support import (
    HUB_FP8,
    SINGLE,
    SMALL,
    V32_TINY,
    assert_same,
    copy_folder,
    random_params,
    read_index,
    rewrite,
    store,
    stored,
)

EMBED = "model.embed_tokens.weight"

# ---- layers ------------------------------------------------------------------------------------------------------


def test_fewer_layers_than_the_folder_has_are_refused(tmp_path):
    """They were taken for layers of multi-token prediction, whatever the config said, and left out without a word."""
    two = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "layer_types": None}
    folder = copy_folder(V32_TINY, tmp_path, **two)
    with pytest.raises(ValueError) as caught:
        load_folder(folder)
    for word in ("layers 0..2", "num_hidden_layers is 2", "num_nextn_predict_layers is 0", "allow-extra"):
        assert word in str(caught.value)
    config, params = load_folder(folder, allow_extra=True)
    assert config.num_layers == len(params["layers"]) == 2


def test_declared_prediction_layers_look_like_some(tmp_path):
    """One layer too few, beside a declared layer of prediction that the folder does not have: the counts agree."""
    two = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "layer_types": None}
    folder = copy_folder(V32_TINY, tmp_path, **two, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 2 and layer 2 has no eh_proj.weight"):
        load_folder(folder)


def test_more_prediction_layers_than_declared_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"layers 0..3 .*num_hidden_layers is 3 and num_nextn_predict_layers is 0"):
        load_folder(copy_folder(HUB_FP8, tmp_path, num_nextn_predict_layers=0))


def test_more_layers_than_the_folder_has_are_refused_with_both_numbers(tmp_path):
    four = {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "layer_types": None}
    with pytest.raises(ValueError, match=r"the files have 3 layers but num_hidden_layers is 4"):
        load_folder(copy_folder(V32_TINY, tmp_path, **four))


# ---- NaN and infinities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nonfinite_values_are_counted_by_loops(dtype):
    """In the first, the last and the block after the first; the largest finite values are none."""
    value = np.random.default_rng(0).normal(size=(5, 2**18 // 4)).astype(dtype)
    largest = ml_dtypes.finfo(dtype).max
    value[0, 1:5] = [largest, -largest, ml_dtypes.finfo(dtype).smallest_subnormal, -0.0]
    assert nonfinite(value) == 0
    for count, (place, odd) in enumerate([((0, 0), np.nan), ((4, 7), np.inf), ((-1, -1), -np.inf)], start=1):
        value[place] = odd
        assert nonfinite(value) == count
        assert nonfinite(value[4:]) == sum(not np.isfinite(np.float32(one)) for one in value[4, [7, -1]])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [EMBED, "model.norm.weight", "model.layers.2.mlp.experts.3.down_proj.weight"])
def test_nan_and_infinity_are_reported_by_name(tmp_path, name, odd):
    folder = copy_folder(V32_TINY, tmp_path)

    def change(tensors):
        tensors[name].reshape(-1)[-1] = odd

    rewrite(folder, change)
    for dtype in ("float32", "bfloat16", None):
        with pytest.raises(
            ValueError, match=rf"^{name} in .*{SINGLE}' holds 1 NaN or infinite values; .*allow-nonfinite"
        ):
            load_folder(folder, dtype=dtype)
    with pytest.warns(CheckpointNote, match=rf"1 tensors with NaN or infinities were loaded: {name} in"):
        _, params = load_folder(folder, allow_nonfinite=True)
    assert sum(nonfinite(np.asarray(leaf)) for leaf in (params["embed"], params["final_norm"])) == (
        name[:9] != "model.lay"
    )


def spoil(folder, name, index, byte):
    """Writes one byte of a tensor in a sharded folder."""
    file = folder / read_index(folder)[name]
    tensors = stored(file)
    dtype, shape, content = tensors[name]
    content = bytearray(content)
    content[index] = byte
    store(file, tensors | {name: (dtype, shape, bytes(content))})


FP8 = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_an_fp8_code_that_is_nan_is_reported(tmp_path, code):
    folder = copy_folder(HUB_FP8, tmp_path)
    spoil(folder, FP8, 5, code)
    with pytest.raises(ValueError, match=rf"^{FP8} in .* holds 1 NaN or infinite values"):
        load_folder(folder)


@pytest.mark.parametrize("high", [0x7F, 0xFF])
def test_an_fp8_scale_that_is_not_finite_is_reported(tmp_path, high):
    folder = copy_folder(HUB_FP8, tmp_path)
    name = f"{FP8}_scale_inv"
    for index, byte in ((2, 0x80), (3, high)):  # exponent bits of one little-endian f32
        spoil(folder, name, index, byte)
    with pytest.raises(ValueError, match=rf"^{name} in .* holds 1 NaN or infinite scales of {FP8}"):
        load_folder(folder)


def test_fused_experts_are_named_as_stored(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path)
    prefix = "model.layers.1.mlp.experts."

    def change(tensors):
        parts = {part: [tensors.pop(f"{prefix}{x}.{part}_proj.weight") for x in range(4)] for part in ("gate", "up")}
        fused = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        fused[3, 17, 0] = np.nan
        tensors[f"{prefix}gate_up_proj"] = fused

    rewrite(folder, change)
    with pytest.raises(ValueError, match=rf"^{prefix}gate_up_proj \(expert 3\) in .* holds 1 NaN"):
        load_folder(folder)


def test_skipped_layers_are_not_read(tmp_path):
    """A layer of prediction is not part of the model, whatever it holds."""
    folder = copy_folder(HUB_FP8, tmp_path)
    spoil(folder, "model.layers.3.eh_proj.weight", 0, 0x7F)
    assert_same(load_folder(folder)[1], load_folder(HUB_FP8)[1])


def test_restored_parameters_are_looked_at_too(tmp_path):
    params = random_params(SMALL)
    params["layers"][1]["moe"]["down"][2, 0, 1] = np.inf
    save_params(tmp_path / "model", params, SMALL)
    with pytest.raises(
        ValueError, match="1 parameters in .* hold NaN or infinities: layers/1/moe/down; .*allow_nonfin"
    ):
        restore_params(tmp_path / "model")
    with pytest.warns(CheckpointNote, match="layers/1/moe/down"):
        _, again = restore_params(tmp_path / "model", allow_nonfinite=True)
    assert_same(params, again)


def test_the_fixture_has_a_prediction_layer():
    assert "model.layers.3.eh_proj.weight" in read_index(HUB_FP8)
    assert json.loads((HUB_FP8 / "config.json").read_text())["num_nextn_predict_layers"] == 1
