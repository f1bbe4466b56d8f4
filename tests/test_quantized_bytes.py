"""Bytes of quantised weights against loops over the tensors of a stored folder, one rule of storage at a time."""

import json
import math
import re

import pytest

from echo_jax.checkpoints import load_folder, read_config
from echo_jax.checkpoints.hf_config import config_from_hf
from echo_jax.checkpoints.quantized import weight_bytes
from tests.checkpoint_support import SINGLE, V32_TINY, copy_folder, stored

SHAPES = {name: shape for name, (_, shape, _) in stored(V32_TINY / SINGLE).items()}
WIDE = re.compile(r"mlp\.gate\.|indexer\.weights_proj")  # never narrowed: four bytes, never quantised
LINEAR = re.compile(r"(proj|proj_with_mqa|wq_b|wk|lm_head)\.weight$")


def config(quantization=None, **changes):
    raw = json.loads((V32_TINY / "config.json").read_text()) | {"dtype": "bfloat16"} | changes
    return raw | ({} if quantization is None else {"quantization_config": quantization})


def by_loops(is_quantised, bytes_of):
    """2 bytes a value, 4 where never narrowed, `bytes_of(rows, columns)` for each quantised linear weight."""
    total = 0
    for name, shape in SHAPES.items():
        if WIDE.search(name):
            total += 4 * math.prod(shape)
        elif LINEAR.search(name) and is_quantised(name):
            total += bytes_of(*shape)
        else:
            total += 2 * math.prod(shape)
    return total


def groups(size, of_each):
    return lambda rows, columns: rows * columns / 2 + rows * -(-columns // size) * of_each


def no_head(name):
    return name != "lm_head.weight"


def packed(bits, size, symmetric=True, **more):
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights | more}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


NVFP4_GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def nvfp4(rows, columns):
    return rows * columns / 2 + rows * -(-columns // 16) + 8


def is_mlp(name):
    return ".mlp." in name


CASES = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True},
        no_head,
        groups(8, 2.5),
    ),
    "awq_left_alone": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 8, "modules_to_not_convert": ["self_attn", "mlp.gate"]},
        lambda name: no_head(name) and "self_attn" not in name,
        groups(8, 2.5),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"-:.*self_attn.*": {}}},
        lambda name: no_head(name) and is_mlp(name),
        lambda rows, columns: groups(8, 2.5)(rows, columns) + 4 * columns,
    ),
    "gptq_8_whole": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True},
        lambda name: True,
        lambda rows, columns: rows * columns + 3 * rows + 4 * columns,
    ),
    "packed": (
        packed(4, 8) | {"ignore": ["lm_head", "re:.*self_attn.*", "model.layers.0.mlp.up_proj"]},
        lambda name: is_mlp(name) and name != "model.layers.0.mlp.up_proj.weight",
        lambda rows, columns: groups(8, 2)(rows, columns) + 16,
    ),
    "packed_zero_points": (
        packed(4, 8, symmetric=False),
        lambda name: True,
        lambda rows, columns: groups(8, 2.5)(rows, columns) + 16,
    ),
    "fp8_channel_beside_packed": (
        packed(4, 8)
        | {
            "config_groups": packed(4, 8)["config_groups"]
            | {"group_1": {"targets": ["re:.*self_attn.*"], "weights": FP8_CHANNEL, "format": "float-quantized"}}
        },
        lambda name: True,
        None,
    ),
    "tensors_nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": NVFP4_GROUPS},
        lambda name: True,
        nvfp4,
    ),
    "modelopt_nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.self_attn*"]},
        is_mlp,
        nvfp4,
    ),
    "modelopt_groups": (
        {"quant_method": "modelopt", "config_groups": NVFP4_GROUPS, "exclude_modules": ["*self_attn*", "lm_head"]},
        is_mlp,
        nvfp4,
    ),
    "modelopt_layers": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}},
        },
        lambda name: name == "model.layers.0.mlp.up_proj.weight",
        nvfp4,
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        no_head,
        lambda rows, columns: rows * columns / 2 + rows * -(-columns // 32),
    ),
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 8]},
        no_head,
        lambda rows, columns: rows * columns + 4 * -(-rows // 16) * -(-columns // 8),
    ),
    "fp8_tensor": ({"quant_method": "fp8"}, no_head, lambda rows, columns: rows * columns + 8),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_each_way_to_quantise(case):
    quantization, is_quantised, bytes_of = CASES[case]
    if case == "fp8_channel_beside_packed":
        expected = 0
        for name, (rows, *rest) in SHAPES.items():
            size = math.prod([rows, *rest])
            if WIDE.search(name) or not LINEAR.search(name):
                expected += (4 if WIDE.search(name) else 2) * size
            else:
                expected += size + 2 * rows if "self_attn" in name else groups(8, 2)(rows, *rest) + 16
    else:
        expected = by_loops(is_quantised, bytes_of)
    assert weight_bytes(config(quantization)) == expected


def test_bytes_without_quantisation():
    assert weight_bytes(config()) == by_loops(lambda name: False, None)
    assert weight_bytes(config(dtype="float32")) == 4 * sum(map(math.prod, SHAPES.values()))


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"fp8_blocks", "fp8_tensor"}))
def test_loading_stays_refused_with_the_remedy(tmp_path, case):
    folder = copy_folder(V32_TINY, tmp_path, quantization_config=CASES[case][0])
    with pytest.raises(ValueError, match="quantisation method '.*' is not supported.*convert the weights to bfloat16"):
        load_folder(folder)


def test_every_place_that_says_it_is_quantised_is_read(tmp_path):
    """`compression_config` is the older name; modelopt writes hf_quant_config.json beside config.json."""
    with pytest.raises(ValueError, match="'compressed-tensors' is not supported"):
        config_from_hf(config(compression_config=packed(4, 8)))
    assert weight_bytes(config(compression_config=packed(4, 8))) == weight_bytes(config(packed(4, 8)))
    folder = copy_folder(V32_TINY, tmp_path)
    stated = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": stated}))
    with pytest.raises(ValueError, match="quantisation method 'modelopt' is not supported"):
        load_folder(folder)
    assert weight_bytes(read_config(folder) | {"dtype": "bfloat16"}) == by_loops(no_head, nvfp4)


UNKNOWN = {
    "method": ({"quant_method": "squeeze"}, ["'squeeze' is not known", "awq", "--weight-memory"]),
    "text": ("awq", ["quantization_config is 'awq' but must be an object"]),
    "bits": ({"quant_method": "awq", "bits": "four"}, ["bits", "'four'", "whole number"]),
    "algorithm": ({"quant_method": "modelopt", "quant_algo": "INT2"}, ["'INT2'", "NVFP4", "--weight-memory"]),
    "no_groups": ({"quant_method": "compressed-tensors"}, ["no config_groups"]),
    "dynamic": ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, ["'+:x'"]),
    "pattern": (packed(4, 8) | {"ignore": ["re:(", "lm_head"]}, ["no pattern"]),
    "sparse": (packed(4, 8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["'sparse-24-bitmask'"]),
    "strategy": (packed(4, 8, strategy="odd"), ["strategy 'odd'"]),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_sizes_that_are_not_known_are_refused(case):
    quantization, words = UNKNOWN[case]
    with pytest.raises(ValueError) as caught:
        weight_bytes(config(quantization))
    for word in words:
        assert word in str(caught.value)
