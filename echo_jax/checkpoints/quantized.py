"""Bytes of the weights that a config.json describes, quantised or not, without the weights.

Knows how AWQ, GPTQ, FP8, NVFP4 (modelopt), MXFP4 and compressed-tensors store a linear weight: its bits, its scales and
zero points, and which modules they leave alone. Computes no value: `load_folder` reads FP8 with block scales only.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from echo_jax.checkpoints.hf_config import config_from_hf, quantization_of
from echo_jax.checkpoints.layout import is_never_narrowed, stored_tensors

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1}
_REMEDY = "give the bytes with --weight-memory, or convert the weights to bfloat16"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a linear weight of `rows` outputs and `columns` inputs is stored."""

    bits: int  # of one element
    block: tuple[int | None, int | None] = (None, None)  # rows and columns that share a scale; None: all of them
    scale_bytes: int = 2
    zero_bits: int = 0  # of the zero point of a block
    column_bytes: int = 0  # for each input, such as the group index of GPTQ
    tensor_bytes: int = 0  # for the whole weight, such as a global scale

    def bytes(self, rows: int, columns: int) -> int:
        blocks = math.ceil(rows / (self.block[0] or rows)) * math.ceil(columns / (self.block[1] or columns))
        bits = rows * columns * self.bits + blocks * (8 * self.scale_bytes + self.zero_bits)
        return math.ceil(bits / 8) + columns * self.column_bytes + self.tensor_bytes


_NVFP4 = Form(4, (1, 16), scale_bytes=1, tensor_bytes=8)
"""FP8 scales of 16 values, and two f32 scales of the whole tensor: of the weight and of its input."""

FormOf = Callable[[str], Form | None]
"""The form of a module by name ("model.layers.3.mlp.experts.0.up_proj"); None where it is not quantised."""


def weight_bytes(raw: Mapping[str, Any]) -> int:
    """Bytes of all weights as the folder of this `config.json` stores them, those of predicted layers left out.

    What is not quantised has the dtype that the config states, and four bytes where this library never narrows it.
    Raises ValueError for a way to quantise whose sizes are not known here.
    """
    config = config_from_hf(raw, any_quantization=True)
    form_of = _form_of(quantization_of(raw))
    total = 0
    for tensor in stored_tensors(config):
        if is_never_narrowed(tensor.leaves[0]):
            total += 4 * math.prod(tensor.shape)
            continue
        form = form_of(tensor.name.removesuffix(".weight")) if tensor.is_linear else None
        if form is None:
            total += _ITEM_BYTES[config.dtype] * math.prod(tensor.shape)
        else:
            total += form.bytes(*tensor.shape)
    return total


def _form_of(stated: Mapping[str, Any] | None) -> FormOf:
    if stated is None:
        return lambda module: None
    method = str(stated.get("quant_method")).lower().replace("_", "-")
    maker = _METHODS.get(method)
    if maker is None:
        raise ValueError(
            f"the size of weights quantised by {method!r} is not known; known: {', '.join(sorted(_METHODS))}; {_REMEDY}"
        )
    return maker(stated)


def _whole(stated: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of the keys that is given, a whole number."""
    value = next((stated[key] for key in keys if stated.get(key) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value == 0:
        raise ValueError(f"{keys[0]} of the quantisation is {value!r} but must be a whole number; {_REMEDY}")
    return value


def _groups(size: int) -> tuple[int, int | None]:
    """A block of one output and a group of inputs; -1 says all inputs."""
    return 1, size if size > 0 else None


def _awq(stated: Mapping[str, Any]) -> FormOf:
    bits = _whole(stated, "bits", "w_bit")
    zero_bits = bits if stated.get("zero_point", True) else 0
    form = Form(bits, _groups(_whole(stated, "group_size", "q_group_size", default=128)), zero_bits=zero_bits)
    return _except(["lm_head", *(stated.get("modules_to_not_convert") or ())], form)


def _gptq(stated: Mapping[str, Any]) -> FormOf:
    bits = _whole(stated, "bits")
    form = Form(bits, _groups(_whole(stated, "group_size", default=128)), zero_bits=bits, column_bytes=4)
    left = [] if stated.get("lm_head") else ["lm_head"]
    # Keys of `dynamic` are regular expressions; "-:" leaves the modules alone, "+:" or nothing changes their settings.
    rules = dict(stated.get("dynamic") or {})
    if changed := [rule for rule in rules if not rule.startswith("-:")]:
        raise ValueError(f"GPTQ with settings of its own for {changed[0]!r} has no known size; {_REMEDY}")
    return _except([*left, *(f"re:{rule[2:]}" for rule in rules)], form)


def _fp8(stated: Mapping[str, Any]) -> FormOf:
    block = stated.get("weight_block_size")
    form = Form(8, tuple(block), scale_bytes=4) if block else Form(8, tensor_bytes=4, scale_bytes=4)
    return _except(["lm_head", *(stated.get("modules_to_not_convert") or ())], form)


def _mxfp4(stated: Mapping[str, Any]) -> FormOf:
    left = stated.get("modules_to_not_convert") or ()
    return _except(["lm_head", *left], Form(4, (1, 32), scale_bytes=1))


_MODELOPT: dict[str, Callable[[int | None], Form]] = {
    "NVFP4": lambda size: dataclasses.replace(_NVFP4, block=(1, size or 16)),
    "NVFP4_AWQ": lambda size: dataclasses.replace(_NVFP4, block=(1, size or 16)),
    "FP8": lambda size: Form(8, scale_bytes=4, tensor_bytes=4),
    "FP8_PB_WO": lambda size: Form(8, (128, 128), scale_bytes=4),
    "MXFP8": lambda size: Form(8, (1, size or 32), scale_bytes=1),
    "W4A16_AWQ": lambda size: Form(4, (1, size or 128)),
    "INT4_AWQ": lambda size: Form(4, (1, size or 128)),
    "W4A8_AWQ": lambda size: Form(4, (1, size or 128), tensor_bytes=8),
}


def _modelopt(stated: Mapping[str, Any]) -> FormOf:
    left = [*(stated.get("ignore") or ()), *(stated.get("exclude_modules") or ())]

    def form(algorithm: Any, size: Any) -> Form:
        if algorithm not in _MODELOPT:
            raise ValueError(
                f"the size of weights quantised by modelopt's {algorithm!r} is not known; known: "
                f"{', '.join(_MODELOPT)}; {_REMEDY}"
            )
        return _MODELOPT[algorithm](size)

    if each := stated.get("quantized_layers"):
        forms = {name: form(one.get("quant_algo"), one.get("group_size")) for name, one in each.items()}
        return forms.get
    if stated.get("quant_algo") is not None:
        return _except(left, form(stated["quant_algo"], stated.get("group_size")))
    return _by_groups({**stated, "ignore": left})


def _by_groups(stated: Mapping[str, Any]) -> FormOf:
    """compressed-tensors: groups of modules, each with its own weights; a name is stronger than a pattern, a pattern
    than the class Linear, to which every module of this kind belongs."""
    if (sparse := stated.get("sparsity_config")) and sparse.get("format", "dense") != "dense":
        raise ValueError(f"the size of weights with sparsity format {sparse['format']!r} is not known; {_REMEDY}")
    groups = dict(stated.get("config_groups") or {})
    if not groups:
        raise ValueError(f"quantization_config has no config_groups, so the size of weights is not known; {_REMEDY}")
    ignored = _matcher(stated.get("ignore") or ())
    rules: list[tuple[Callable[[str], bool], Form | None]] = []
    for of_class in (False, True):
        for group in groups.values():
            targets = [one for one in group.get("targets") or ("Linear",) if (one == "Linear") == of_class]
            if not targets:
                continue
            is_meant = (lambda module: True) if of_class else _matcher(targets)
            rules.append((is_meant, _form_of_group(group, group.get("format") or stated.get("format") or "")))

    def form_of(module: str) -> Form | None:
        if ignored(module):
            return None
        return next((form for is_meant, form in rules if is_meant(module)), None)

    return form_of


def _form_of_group(group: Mapping[str, Any], form: str) -> Form | None:
    weights = group.get("weights")
    if not weights:
        return None
    bits, strategy = _whole(weights, "num_bits"), weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "group" if size else "tensor"
    is_float4 = weights.get("type") == "float" and bits == 4
    if is_float4 and ("nvfp4" in form or strategy == "tensor_group" or size == 16):
        return dataclasses.replace(_NVFP4, block=(1, size or 16))
    if is_float4:
        return Form(4, (1, size or 32), scale_bytes=1)
    scale_dtype = str(weights.get("scale_dtype") or "bfloat16").removeprefix("torch.")
    blocks = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": _groups(size or -1),
        "block": tuple(weights.get("block_structure") or (128, 128)),
    }
    if strategy not in blocks or scale_dtype not in _SCALE_BYTES:
        raise ValueError(
            f"the size of weights with strategy {strategy!r}, scales {scale_dtype} is not known; {_REMEDY}"
        )
    return Form(
        bits,
        blocks[strategy],
        scale_bytes=_SCALE_BYTES[scale_dtype],
        zero_bits=0 if weights.get("symmetric", True) else bits,
        tensor_bytes=16 if form == "pack-quantized" else 0,  # the shape before packing, two i64
    )


_METHODS: dict[str, Callable[[Mapping[str, Any]], FormOf]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "compressed-tensors": _by_groups,
}


def _except(left: Iterable[str], form: Form) -> FormOf:
    is_left = _matcher(left)
    return lambda module: None if is_left(module) else form


def _matcher(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of the names means a module: "re:" and a regular expression from its start, a name with "*" as in a
    shell, or whole parts of its dotted name ("mlp", "model.layers.0")."""
    names = list(names)
    plain = {name.strip(".") for name in names if "*" not in name and not name.startswith("re:")}
    shell = [fnmatch.translate(name) for name in names if "*" in name and not name.startswith("re:")]
    patterns = [f"(?:{name[3:]})" for name in names if name.startswith("re:")] + shell
    try:
        pattern = re.compile("|".join(patterns)) if patterns else None
    except re.error as error:
        raise ValueError(f"the quantisation names modules by {patterns[0]!r}, which is no pattern ({error})") from None

    def is_meant(module: str) -> bool:
        parts = module.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return not plain.isdisjoint(runs) or (pattern is not None and pattern.match(module) is not None)

    return is_meant
