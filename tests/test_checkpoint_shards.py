"""The index decides which tensor counts, a tensor may lie in any shard, and what is no shard is called by its name."""

import gzip
import io
import json
import zipfile

import ml_dtypes
import numpy as np
import pytest

from echo_jax.checkpoints import load_folder
from echo_jax.checkpoints.notes import CheckpointNote
from tests.checkpoint_support import (
    HUB_FP8,
    INDEX,
    SINGLE,
    V32_TINY,
    assert_same,
    copy_folder,
    read_index,
    reshard,
    store,
    stored,
    write_index,
)

EMBED = "model.embed_tokens.weight"
WEIGHT = "model.layers.0.self_attn.q_a_proj.weight"


def test_a_scale_may_lie_in_another_shard_than_its_weight(tmp_path):
    """Released DeepSeek-V3 folders are cut between a weight and its scale. This was refused as a missing scale."""
    folder = copy_folder(HUB_FP8, tmp_path)
    reshard(folder, lambda name: "scales.safetensors" if name.endswith("_scale_inv") else "weights.safetensors")
    assert not any(name.endswith("_scale_inv") for name in stored(folder / "weights.safetensors"))
    assert_same(load_folder(folder)[1], load_folder(HUB_FP8)[1])


def test_every_tensor_may_have_a_shard_of_its_own(tmp_path):
    folder = copy_folder(HUB_FP8, tmp_path)
    reshard(folder, lambda name: f"part/{name}.safetensors")
    assert_same(load_folder(folder)[1], load_folder(HUB_FP8)[1])


def fused_fp8(folder):
    """The experts of layer 1 fused and in FP8, each with another scale. Returns codes and scales of gate_up_proj."""
    tensors = stored(folder / SINGLE)
    draw = np.random.default_rng(3)
    prefix = "model.layers.1.mlp.experts."
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]
    for part, shape in (("gate_up_proj", (4, 32, 32)), ("down_proj", (4, 32, 16))):
        codes = draw.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        scales = draw.uniform(0.5, 2, (4, 1, 1)).astype(np.float32)
        tensors[prefix + part] = ("F8_E4M3", list(shape), codes.tobytes())
        tensors[f"{prefix}{part}_scale_inv"] = ("F32", [4, 1, 1], scales.tobytes())
        if part == "gate_up_proj":
            kept = codes, scales
    store(folder / SINGLE, tensors)
    return kept


def test_scales_of_fused_experts_may_lie_in_another_shard(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path, quantization_config={"quant_method": "fp8"})
    codes, scales = fused_fp8(folder)
    together = load_folder(folder)[1]
    reshard(folder, lambda name: "a.safetensors" if name.endswith("_scale_inv") else "b.safetensors")
    _, apart = load_folder(folder)
    assert_same(together, apart)
    gate = np.asarray(apart["layers"][1]["moe"]["gate"])
    for expert in range(4):
        np.testing.assert_array_equal(
            gate[expert], (codes[expert, :16].astype(np.float32) * scales[expert]).T, err_msg=f"expert {expert}"
        )


def test_a_missing_scale_is_named_as_it_would_be_stored(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path, quantization_config={"quant_method": "fp8"})
    fused_fp8(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    store(folder / SINGLE, {key: one for key, one in stored(folder / SINGLE).items() if key != f"{name}_scale_inv"})
    with pytest.raises(ValueError, match=rf"{name} in .* is FP8 but {name}_scale_inv is missing in all files"):
        load_folder(folder)


@pytest.mark.parametrize("stale", ["a.safetensors", "z.safetensors"])
def test_a_tensor_in_two_shards_counts_where_the_index_says(tmp_path, stale):
    """The shard that came last in the alphabet used to win, or the folder was refused."""
    folder = copy_folder(HUB_FP8, tmp_path)
    reshard(folder, lambda name: stale if name == "model.norm.weight" else "m.safetensors")
    other = stored(folder / "m.safetensors")
    kept = other | {EMBED: (*other[EMBED][:2], bytes(len(other[EMBED][2])))}
    store(folder / stale, stored(folder / stale) | {EMBED: kept[EMBED]})
    assert read_index(folder)[EMBED] == "m.safetensors"
    assert_same(load_folder(folder)[1], load_folder(HUB_FP8)[1])
    write_index(folder, read_index(folder) | {EMBED: stale})
    assert not np.asarray(load_folder(folder)[1]["embed"]).any()


def test_tensors_that_the_index_does_not_name_are_refused_or_ignored(tmp_path):
    folder = copy_folder(HUB_FP8, tmp_path)
    shard = read_index(folder)[EMBED]
    odd = {"model.layers.0.stray.weight": ("F32", [1], bytes(4)), "another": ("F32", [1], bytes(4))}
    store(folder / shard, stored(folder / shard) | odd)
    with pytest.raises(ValueError, match=r"does not name 2 tensors of its shards, first another in .*allow-unindexed"):
        load_folder(folder)
    with pytest.warns(CheckpointNote, match="does not name 2 tensors .* they are ignored"):
        _, params = load_folder(folder, allow_unindexed=True)
    assert_same(params, load_folder(HUB_FP8)[1])


@pytest.mark.parametrize("name", [EMBED, f"{WEIGHT}_scale_inv"])
def test_a_needed_tensor_that_the_index_does_not_name(tmp_path, name):
    folder = copy_folder(HUB_FP8, tmp_path)
    weight_map = read_index(folder)
    shard = weight_map.pop(name)
    write_index(folder, weight_map)
    with pytest.raises(ValueError, match=rf"{INDEX} does not name {name}, which is in .*{shard}.*add it"):
        load_folder(folder, allow_unindexed=True)


def test_shards_in_a_subfolder(tmp_path):
    folder = copy_folder(HUB_FP8, tmp_path)
    reshard(folder, lambda name: "deep/er/one.safetensors" if "layers" in name else "./two.safetensors")
    assert_same(load_folder(folder)[1], load_folder(HUB_FP8)[1])


@pytest.mark.parametrize(
    "shard", ["../{name}", "deep/../../{name}", "{folder}/{name}", "", ".", 7, None, ["a"]], ids=repr
)
def test_a_shard_outside_the_folder_is_refused(tmp_path, shard):
    folder = copy_folder(HUB_FP8, tmp_path)
    weight_map = read_index(folder)
    name = weight_map[EMBED]
    (tmp_path / name).write_bytes((folder / name).read_bytes())
    (folder / "deep").mkdir()
    shard = shard.format(name=name, folder=folder) if isinstance(shard, str) else shard
    write_index(folder, weight_map | {EMBED: shard})
    with pytest.raises(ValueError, match=rf"places {EMBED} in .*; a shard is a file in the folder of the index"):
        load_folder(folder)


def zipped(*names):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, "content")
    return stream.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4302348072\n"
NO_SHARDS = {
    "lfs": (POINTER, ["is a Git LFS pointer to a file of 4,302,348,072 bytes", "git lfs pull"]),
    "html": (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", ["is an HTML page", "download"]),
    "html_late": (b"\n  <!-- cached --><HTML lang=en>", ["is an HTML page"]),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ["is an XML document"]),
    "gzip": (gzip.compress(b"x" * 100), ["is gzip data", "decompress"]),
    "zip": (zipped("model.safetensors"), ["is a zip archive", "unpack"]),
    "torch": (zipped("archive/data.pkl", "archive/data/0"), ["is a PyTorch file", "convert the weights"]),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", ["is a PyTorch pickle", "convert the weights"]),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(40), ["is a GGUF model"]),
}


@pytest.mark.parametrize("place", ["shard", "single", "index", "config"])
@pytest.mark.parametrize("case", NO_SHARDS)
def test_a_file_of_another_kind_is_called_that(tmp_path, case, place):
    content, words = NO_SHARDS[case]
    folder = copy_folder(V32_TINY if place == "single" else HUB_FP8, tmp_path)
    name = {"shard": "model-00002-of-00003.safetensors", "single": SINGLE, "index": INDEX, "config": "config.json"}
    (folder / name[place]).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_folder(folder)
    for word in (name[place], *words):
        assert word in str(caught.value)
    assert "truncated" not in str(caught.value)


def test_an_error_message_in_place_of_a_shard_is_shown(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path)
    (folder / SINGLE).write_bytes(b"Invalid username or password.\n")
    with pytest.raises(ValueError, match="is text that starts 'Invalid username or password.', not safetensors"):
        load_folder(folder)


def test_weights_in_another_form_or_without_their_index_are_named(tmp_path):
    folder = copy_folder(V32_TINY, tmp_path)
    (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(FileNotFoundError, match="holds model-00001-of-00001.safetensors .*; fetch the index"):
        load_folder(folder)
    (folder / "model-00001-of-00001.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="holds pytorch_model.bin; convert the weights"):
        load_folder(folder)


def test_json_that_is_not_utf8_without_a_mark_is_read(tmp_path):
    """Editors on Windows write a byte order mark, or UTF-16."""
    folder = copy_folder(V32_TINY, tmp_path)
    text = (folder / "config.json").read_text()
    for encoding in ("utf-8-sig", "utf-16"):
        (folder / "config.json").write_text(text, encoding=encoding)
        assert load_folder(folder)[0] == load_folder(V32_TINY)[0]
    (folder / "config.json").write_text(json.dumps(json.loads(text) | {"rms_norm_eps": float("nan")}))
    with pytest.raises(ValueError, match=r"config.json' is not JSON \(NaN is no number"):
        load_folder(folder)


@pytest.mark.parametrize("case", ["overlap", "gap", "longer", "negative"])
def test_data_that_the_header_does_not_tile_is_refused(tmp_path, case):
    folder = copy_folder(V32_TINY, tmp_path)
    spans = {
        "overlap": ([0, 8], [4, 12]),
        "gap": ([0, 8], [12, 20]),
        "longer": ([0, 8], [8, 16]),
        "negative": ([-8, 0],),
    }
    header = {f"t{i}": {"dtype": "F32", "shape": [2], "data_offsets": one} for i, one in enumerate(spans[case])}
    text = json.dumps(header).encode()
    size = {"overlap": 12, "gap": 20, "longer": 17, "negative": 0}[case]
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    words = {
        "overlap": "t1 .* begins at byte 4 of the data but the tensor before it ends at 8",
        "gap": "t1 .* begins at byte 12 of the data but the tensor before it ends at 8",
        "longer": rf"end with its last tensor: {25 + len(text)} bytes, but its header promises {24 + len(text)}",
        "negative": "has no safetensors header .*t0 lies at -8..0",
    }
    with pytest.raises(ValueError, match=words[case]):
        load_folder(folder)


@pytest.mark.parametrize("length", [0x0280 + 0x10000, 0x8B1F], ids=["pickle", "gzip"])
def test_a_header_length_with_the_bytes_of_another_format_is_one(tmp_path, length):
    """The first bytes of a safetensors file are a number, which may be the mark of a pickle or of gzip."""
    folder = copy_folder(V32_TINY, tmp_path)
    data = (folder / SINGLE).read_bytes()
    old = int.from_bytes(data[:8], "little")
    (folder / SINGLE).write_bytes(length.to_bytes(8, "little") + data[8 : 8 + old].ljust(length) + data[8 + old :])
    assert (folder / SINGLE).read_bytes()[:2] in (b"\x80\x02", b"\x1f\x8b")
    assert_same(load_folder(folder)[1], load_folder(V32_TINY)[1])
