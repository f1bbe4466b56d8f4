"""Folders come back as they were saved, FP8 becomes what its scales say, one parameter at a time."""

import dataclasses
import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from echo_jax.checkpoints import load_folder, save_folder
from echo_jax.checkpoints import safetensors as folders
from echo_jax.checkpoints.files import dequantise
from echo_jax.checkpoints.layout import stored_tensors
from echo_jax.models.dsa import init_params
from echo_jax.models.presets import TINY
from tests.checkpoint_support import (
    GLM_SHARED,
    HUB_FP8,
    INDEX,
    SINGLE,
    SMALL,
    V32_TINY,
    assert_same,
    copy_folder,
    experts_apart,
    four_devices,
    random_params,
    rewrite,
)


def test_layout_is_that_of_the_params_pytree():
    config = dataclasses.replace(TINY, tie_word_embeddings=False)
    shapes = folders.flatten(jax.eval_shape(lambda: init_params(jax.random.key(0), config)))
    asked = {leaf: one.leaf_shape(leaf) for one in stored_tensors(config) for leaf in one.leaves}
    assert asked == {leaf: value.shape for leaf, value in shapes.items()}


@pytest.mark.parametrize("dialect", ["hub", "rope_parameters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["one_file", "sharded"])
def test_saved_and_loaded_is_the_same_to_the_bit(tmp_path, dtype, shard_bytes, dialect):
    config = dataclasses.replace(SMALL, dtype=dtype)
    params = random_params(config, dtype)
    save_folder(tmp_path / "model", params, config, max_shard_bytes=shard_bytes, dialect=dialect)
    again_config, again = load_folder(tmp_path / "model", dtype=None)
    assert again_config == config
    assert_same(params, again)
    files = sorted(file.name for file in (tmp_path / "model").iterdir())
    assert (SINGLE in files) != (INDEX in files) and (shard_bytes == 10**9) == (SINGLE in files)
    assert all(file.stat().st_mode & 0o044 for file in (tmp_path / "model").iterdir()), "readable by others"
    if SINGLE not in files:
        sizes = [file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")]
        largest = max(int(np.prod(one.shape)) * 4 for one in stored_tensors(config))
        assert len(sizes) > 5 and max(sizes) < max(shard_bytes, largest) + 10_000  # the header of a shard


def test_tied_embeddings_and_no_shared_expert(tmp_path):
    config = dataclasses.replace(SMALL, tie_word_embeddings=True, num_shared_experts=0)
    params = random_params(config)
    save_folder(tmp_path / "model", params, config)
    again_config, again = load_folder(tmp_path / "model")
    assert again_config == config and "lm_head" not in again and "shared" not in again["layers"][1]["moe"]
    assert_same(params, again)


def test_dtype_is_that_of_parameters_and_activations(tmp_path):
    params = random_params(SMALL)
    save_folder(tmp_path / "model", params, SMALL, dtype="float16")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float16"
    for dtype in ("float32", "bfloat16"):
        config, loaded = load_folder(tmp_path / "model", dtype=dtype)
        assert config.dtype == dtype
        for leaf, value in folders.flatten(loaded).items():
            original = folders.flatten(params)[leaf]
            if leaf.endswith(("/router", "/bias", "indexer/weights")):  # read in f32, so never narrowed
                assert value.dtype == np.float32 and np.array_equal(value, original), leaf
            else:
                assert value.dtype == dtype, leaf
                expected = original.astype(np.float16).astype(value.dtype)
                assert np.asarray(value).tobytes() == expected.tobytes(), leaf
    with pytest.raises(ValueError, match="dtype 'float64' is not supported; use 'float32', 'bfloat16' or None"):
        load_folder(tmp_path / "model", dtype="float64")
    with pytest.raises(ValueError, match="dtype 'int8' cannot be stored"):
        save_folder(tmp_path / "other", params, SMALL, dtype="int8")


def test_a_stored_linear_weight_is_used_transposed():
    """By loops over one fixture: no shared code, every rearrangement once."""
    config, params = load_folder(V32_TINY)
    stored = load_file(V32_TINY / SINGLE)
    attention, head = params["layers"][1]["attention"], config.qk_nope_head_dim + config.qk_rope_head_dim
    q_b, kv_b = (stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in ("q_b", "kv_b"))
    o, nope = stored["model.layers.1.self_attn.o_proj.weight"], config.qk_nope_head_dim
    for h in range(config.num_heads):
        for d in range(head):
            np.testing.assert_array_equal(attention["q_b"][:, h, d], q_b[h * head + d])
        for d in range(nope):
            np.testing.assert_array_equal(attention["kv_b_k"][:, h, d], kv_b[h * (nope + config.v_head_dim) + d])
        for d in range(config.v_head_dim):
            row = h * (nope + config.v_head_dim) + nope + d
            np.testing.assert_array_equal(attention["kv_b_v"][:, h, d], kv_b[row])
            np.testing.assert_array_equal(attention["o"][h, d], o[:, h * config.v_head_dim + d])
    for expert in range(config.num_experts):
        for part in ("gate", "up", "down"):
            expected = stored[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"].T
            np.testing.assert_array_equal(params["layers"][1]["moe"][part][expert], expected)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((128, 128), (128, 128)),
        ((1, 1), (128, 128)),
        ((129, 257), (128, 128)),
        ((300, 100), (128, 128)),
        ((7, 9), (4, 2)),
    ],
)
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_fp8_blocks_by_loops(shape, block, scale_dtype):
    draw = np.random.default_rng(1)
    codes = draw.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scales = np.exp2(draw.integers(-4, 4, grid)).astype(np.float32)
    if scale_dtype == np.float32:
        scales *= 1.3
    scales = scales.astype(scale_dtype)
    out = dequantise(codes, scales, block)
    assert out.dtype == np.float32
    for row in range(shape[0]):
        for column in range(shape[1]):
            scale = np.float32(scales[row // block[0], column // block[1]])
            assert out[row, column] == np.float32(codes[row, column]) * scale


def test_fp8_folder_in_each_dtype():
    """f32 is the product itself; None means the dtype that config.json states for quantised weights."""
    config, exact = load_folder(HUB_FP8, dtype="float32")
    stated, stored = load_folder(HUB_FP8, dtype=None)
    assert (config.dtype, stated.dtype) == ("float32", "bfloat16")
    narrowed = jax.tree.map(lambda value: np.asarray(value).astype(ml_dtypes.bfloat16), exact["layers"][0]["attention"])
    assert_same({"layers": (narrowed,)}, {"layers": (stored["layers"][0]["attention"],)})
    assert stored["layers"][1]["moe"]["bias"].dtype == np.float32
    assert stored["layers"][1]["moe"]["router"].dtype == ml_dtypes.bfloat16, "kept as stored"
    assert exact["layers"][1]["moe"]["router"].dtype == np.float32


def fuse(tensors, layer, experts=4):
    """Stacks the experts of one layer, as some exports have them: gate_up_proj [X, 2I, E] and down_proj [X, E, I]."""
    prefix = f"model.layers.{layer}.mlp.experts."
    gate, up, down = (
        np.stack([tensors.pop(f"{prefix}{x}.{part}_proj.weight") for x in range(experts)])
        for part in ("gate", "up", "down")
    )
    tensors[f"{prefix}gate_up_proj"], tensors[f"{prefix}down_proj"] = np.concatenate([gate, up], axis=1), down


def test_fused_experts_are_the_same_model(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path)
    config, params = load_folder(folder)

    def change(tensors):
        fuse(tensors, 1)
        fuse(tensors, 2)

    rewrite(folder, change)
    again_config, again = load_folder(folder)
    assert again_config == config
    assert_same(params, again)


def test_fused_fp8_experts_and_another_block_size(tmp_path):
    """Blocks of 12 x 8 straddle gate and up (16 rows each): the scales belong to the stack, not to its parts."""
    folder = copy_folder(V32_TINY, tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [12, 8]})
    name = "model.layers.1.mlp.experts.gate_up_proj"
    draw = np.random.default_rng(2)
    codes = draw.normal(size=(4, 32, 32)).astype(ml_dtypes.float8_e4m3fn)
    scales = draw.uniform(0.5, 2, (4, 3, 4)).astype(np.float32)

    def change(tensors):
        fuse(tensors, 1)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales

    rewrite(folder, change)
    _, params = load_folder(folder)
    moe = params["layers"][1]["moe"]
    for expert in range(4):
        for row in range(32):
            for column in range(32):
                value = np.float32(codes[expert, row, column]) * scales[expert, row // 12, column // 8]
                assert moe["gate" if row < 16 else "up"][expert].shape == (32, 16)
                part = np.asarray(moe["gate" if row < 16 else "up"])
                assert part[expert, column, row % 16] == value


def test_predicted_layers_and_unused_indexers_are_skipped(tmp_path):
    index = json.loads((HUB_FP8 / INDEX).read_text())
    assert any(name.startswith("model.layers.3.") for name in index["weight_map"]), "the fixture has an MTP layer"
    assert len(load_folder(HUB_FP8)[1]["layers"]) == 3
    folder = copy_folder(GLM_SHARED, tmp_path)
    _, params = load_folder(folder)
    rewrite(
        folder, lambda tensors: tensors | {"model.layers.2.self_attn.indexer.wk.weight": np.ones((3, 3), np.float32)}
    )
    assert_same(params, load_folder(folder)[1])
    assert "indexer" not in params["layers"][2]


def test_one_parameter_at_a_time(tmp_path, monkeypatch):
    """Whatever the model's size: host memory beside the placed parameters never exceeds a few of the largest one."""
    config = dataclasses.replace(SMALL, hidden_size=128, moe_intermediate_size=256, num_experts=16)
    save_folder(tmp_path / "model", random_params(config, "bfloat16"), config)
    sizes = []

    def place(value, sharding):
        sizes.append(value.nbytes)
        return np.zeros(())

    monkeypatch.setattr(folders.jax, "device_put", place)
    tracemalloc.start()
    load_folder(tmp_path / "model", dtype="float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # An expert fills its gate, up and down by turns, so the stacks of three parameters are open together.
    assert peak < 3.5 * max(sizes) + 500_000 < 0.65 * sum(sizes)


def test_parameters_go_where_they_are_told():
    mesh = four_devices()
    _, params = load_folder(V32_TINY, sharding=experts_apart(mesh))
    assert params["layers"][1]["moe"]["gate"].sharding.spec == PartitionSpec("x")
    assert params["layers"][1]["moe"]["gate"].addressable_shards[0].data.shape == (1, 32, 16)
    assert len(params["embed"].sharding.device_set) == 4
    assert_same(params, load_folder(V32_TINY)[1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    assert load_folder(V32_TINY, sharding=everywhere)[1]["final_norm"].sharding == everywhere


def test_overwriting_keeps_what_is_no_weight_and_is_asked_for(tmp_path):
    path = tmp_path / "model"
    save_folder(path, random_params(SMALL), SMALL, max_shard_bytes=20_000, extra_config={"eos_token_id": 3})
    (path / "README.md").write_text("a card")
    with pytest.raises(FileExistsError, match="not an empty folder; pass overwrite=True"):
        save_folder(path, random_params(SMALL), SMALL)
    bfloat16 = random_params(SMALL, "bfloat16")
    save_folder(path, bfloat16, SMALL, overwrite=True)
    assert sorted(file.name for file in path.iterdir()) == ["README.md", "config.json", SINGLE]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert_same(load_folder(path, dtype=None)[1], bfloat16)
