"""What does not fit is refused before a weight is read or a byte is left behind, by name and with a remedy."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from echo_jax import checkpoints
from echo_jax.checkpoints import load_folder, resolve_model, save_folder
from echo_jax.checkpoints import safetensors as folders
from echo_jax.models.config import FULL
from tests.checkpoint_support import (
    GLM_SHARED,
    HUB_FP8,
    INDEX,
    SINGLE,
    SMALL,
    V32_TINY,
    assert_same,
    copy_folder,
    random_params,
    rewrite,
)


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def put(name, value):
    return lambda tensors: tensors | {name: value}


INDEXER = "model.layers.1.self_attn.indexer.wk.weight"
EMBED = "model.embed_tokens.weight"
SPOILT = {
    "missing": (drop("model.norm.weight"), ["model.norm.weight [32] is missing", "fetch both again"]),
    "missing_indexer": (drop(INDEXER), [INDEXER, "layer 1 is a full layer", "'shared' in indexer_types"]),
    "missing_head": (drop("lm_head.weight"), ["lm_head.weight [128, 32]", "tie_word_embeddings is false; set it true"]),
    "shape": (put(EMBED, np.ones((128, 31), np.float32)), [EMBED, SINGLE, "[128, 31]", "asks for [128, 32]"]),
    "dtype": (put(EMBED, np.ones((128, 32), np.int32)), [EMBED, "has dtype I32", "F32, BF16, F16, F8_E4M3"]),
    "extra": (put("model.layers.0.self_attn.q_a_proj.bias", np.ones(24, np.float32)), ["q_a_proj.bias", "allow_extra"]),
    "no_scale": (put(EMBED, np.ones((128, 32), ml_dtypes.float8_e4m3fn)), [f"{EMBED}_scale_inv is missing"]),
    "scale_shape": (
        lambda tensors: (
            tensors
            | {EMBED: np.ones((128, 32), ml_dtypes.float8_e4m3fn), f"{EMBED}_scale_inv": np.ones((2, 1), np.float32)}
        ),
        ["F32 [2, 1]", "[128, 32] in blocks of [128, 128]", "[1, 1]", "weight_block_size"],
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_weights_that_do_not_fit_are_refused_before_any_is_read(tmp_path, case, monkeypatch):
    change, words = SPOILT[case]
    folder = copy_folder(V32_TINY, tmp_path)
    rewrite(folder, change)
    monkeypatch.setattr(folders, "read_tensor", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError) as caught:
        load_folder(folder)
    for word in words:
        assert word in str(caught.value)


def test_extra_tensors_can_be_allowed(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path)
    rewrite(folder, put("model.something.weight", np.ones(2, np.float32)))
    assert_same(load_folder(folder, allow_extra=True)[1], load_folder(V32_TINY)[1])


@pytest.mark.parametrize("kept", [0, 5, 900, -1])
def test_truncated_files_are_refused(tmp_path, kept):
    folder = copy_folder(V32_TINY, tmp_path)
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:kept])
    with pytest.raises(ValueError, match=rf"{SINGLE}' is truncated: {len(data[:kept])} bytes, but .* [0-9]+; fetch"):
        load_folder(folder)


def test_files_that_are_no_safetensors_are_refused(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path)
    (folder / SINGLE).write_bytes((20).to_bytes(8, "little") + b"this is not a header")
    with pytest.raises(ValueError, match="has no safetensors header"):
        load_folder(folder)
    header = json.dumps({EMBED: {"dtype": "F32", "shape": [128, 32], "data_offsets": [0, 8]}}).encode()
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"12345678")
    with pytest.raises(ValueError, match=rf"{EMBED} .* has 8 bytes but F32 \[128, 32\] needs 16384"):
        load_folder(folder)


def test_folders_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give the path of a Hugging Face folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config.json \(it holds nothing\)"):
        load_folder(tmp_path)
    folder = copy_folder(V32_TINY, tmp_path)
    (folder / SINGLE).unlink()
    with pytest.raises(FileNotFoundError, match=f"has neither {SINGLE} nor {INDEX}"):
        load_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_folder(folder)


def test_index_and_shards_must_agree(tmp_path):
    folder = copy_folder(HUB_FP8, tmp_path)
    shard = "model-00002-of-00003.safetensors"
    kept = (folder / shard).read_bytes()
    (folder / shard).unlink()
    with pytest.raises(FileNotFoundError, match=rf"places [0-9]+ tensors in {shard}, which is not in"):
        load_folder(folder)
    (folder / shard).write_bytes(kept)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"places lm_head.weight in {shard}, where it is not \(1 such"):
        load_folder(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="has no usable weight_map"):
        load_folder(folder)


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    params, writes = random_params(SMALL), []

    def full_disk(*arguments, **options):
        writes.append(arguments)
        if len(writes) == 3:
            raise OSError("No space left on device")
        save_file(*arguments, **options)

    monkeypatch.setattr(folders, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_folder(tmp_path / "model", params, SMALL, max_shard_bytes=20_000)
    assert len(writes) == 3 and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_folder(tmp_path / "file" / "model", random_params(SMALL), SMALL)


def test_params_of_another_config_are_not_saved(tmp_path):
    params = random_params(SMALL)
    with pytest.raises(ValueError, match=r"parameter embed has shape \[40, 64\] but the config asks for \[41, 64\]"):
        save_folder(tmp_path / "model", params, dataclasses.replace(SMALL, vocab_size=41))
    with pytest.raises(ValueError, match="the parameters have no place for lm_head"):
        save_folder(tmp_path / "model", params, dataclasses.replace(SMALL, tie_word_embeddings=True))
    with pytest.raises(ValueError, match="the parameters lack layers/1/indexer/k "):
        save_folder(tmp_path / "model", params, dataclasses.replace(SMALL, layer_kinds=(FULL,) * 3))
    assert list(tmp_path.iterdir()) == []


def test_models_by_name_and_by_folder(tmp_path, monkeypatch):
    assert resolve_model(V32_TINY) == V32_TINY
    assert resolve_model(str(V32_TINY)) == V32_TINY
    monkeypatch.setattr(checkpoints, "packaged_models", lambda: {"echo-tiny": V32_TINY, "other": GLM_SHARED})
    assert resolve_model("echo-tiny") == V32_TINY
    with pytest.raises(
        ValueError, match="the nearest is 'echo-tiny'; give a Hugging Face folder or one of: echo-tiny, other"
    ):
        resolve_model("ehco-tiny")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        resolve_model("./nowhere/at-all")
    (tmp_path / "weights.safetensors").write_text("")
    with pytest.raises(ValueError, match="is a file; give the folder"):
        resolve_model(tmp_path / "weights.safetensors")
    monkeypatch.setattr(checkpoints, "packaged_models", dict)
    with pytest.raises(ValueError, match="this installation has no packaged models"):
        resolve_model("echo-tiny")


def test_packaged_models_are_loadable_folders():
    """An editable install, with its two package roots, once hid them all."""
    assert "echo-tiny" in checkpoints.packaged_models()
    for name, folder in checkpoints.packaged_models().items():
        assert resolve_model(name) == folder and (folder / "config.json").is_file()
