"""Whether the tensors of a folder are those of its config: all there, of the right shape and dtype, and no others.

Knows headers and configs. Reads no weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from echo_jax.checkpoints.files import FLOATS, FP8, INDEX_FILE, SCALE_DTYPES, SCALE_SUFFIX, Entry, nonfinite
from echo_jax.checkpoints.layout import StoredTensor
from echo_jax.checkpoints.notes import note
from echo_jax.models.config import FULL, DsaConfig

_NO_PARAMETER = re.compile(r"\.rotary_emb\.inv_freq$")
"""Constants that old exports stored beside the weights."""

_PREDICTOR = "eh_proj.weight"
"""The projection that every layer of multi-token prediction has and no other layer."""


def check_tensors(
    tensors: Sequence[StoredTensor],
    files: Mapping[str, Entry],
    unindexed: Mapping[str, Entry],
    config: DsaConfig,
    block: tuple[int, int],
    predicted: int,
    allow_extra: bool,
) -> None:
    """Every tensor is there, of a known dtype and the right shape, with its scales; and nothing else is.

    unindexed: tensors of the shards that the index does not name; they are not part of the model.
    predicted: layers of multi-token prediction that the config declares.
    """
    layers = _layers(files)
    used: set[str] = set()
    for tensor in tensors:
        entry = files.get(tensor.name)
        if entry is None:
            raise ValueError(_missing(tensor, config, unindexed, layers))
        where = f"{entry.name} in {str(entry.file)!r}"
        if entry.dtype not in (*FLOATS, FP8):
            raise ValueError(
                f"{where} has dtype {entry.dtype}; supported: {', '.join((*FLOATS, FP8))}; convert it to one of them"
            )
        if entry.used_shape() != tensor.shape:
            raise ValueError(
                f"{where} has shape {list(entry.used_shape())} but config.json asks for {list(tensor.shape)}; "
                "config and weights are of different models, correct config.json or fetch both again"
            )
        used.add(tensor.name)
        if entry.dtype == FP8:
            used.add(_check_scale(entry, files, unindexed, block, where))
    _check_layers(files, layers, config, predicted, allow_extra)
    extra = sorted(name for name in files if name not in used and not _is_skipped(name, config))
    if extra and not allow_extra:
        raise ValueError(
            f"{len(extra)} tensors have no place in this model, first {extra[0]} in {str(files[extra[0]].file)!r}; "
            "without them it would give other answers than its authors'; check config.json, or pass "
            "allow_extra=True (--allow-extra) to drop them"
        )


def _check_scale(
    entry: Entry, files: Mapping[str, Entry], unindexed: Mapping[str, Entry], block: tuple[int, int], where: str
) -> str:
    """The name of the block scales of an FP8 weight; they fit it."""
    if entry.scale is None:
        name = entry.name + SCALE_SUFFIX
        if name in unindexed:
            raise ValueError(f"{where} is FP8 but {_not_named(name, unindexed)}")
        raise ValueError(f"{where} is FP8 but {name} is missing in all files; fetch the folder again")
    scale = files[entry.scale]
    asked = (*entry.shape[:-2], *(-(-size // part) for size, part in zip(entry.shape[-2:], block, strict=True)))
    if scale.shape != asked or scale.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{entry.scale} in {str(scale.file)!r} has {scale.dtype} {list(scale.shape)} but {list(entry.shape)} in "
            f"blocks of {list(block)} needs {', '.join(SCALE_DTYPES)} {list(asked)}; check weight_block_size in "
            "quantization_config"
        )
    return entry.scale


def check_unindexed(unindexed: Mapping[str, Entry], allow: bool) -> None:
    """The rule for tensors that no entry of the index names: refused, or ignored with a note."""
    if not unindexed:
        return
    first = min(unindexed)
    text = f"{INDEX_FILE} does not name {len(unindexed)} tensors of its shards, first {first} in "
    text += repr(str(unindexed[first].file))
    if not allow:
        raise ValueError(
            f"{text}; the index decides what the model is: fetch it again, or pass allow_unindexed=True "
            "(--allow-unindexed) to ignore them"
        )
    note(f"{text}; they are ignored")


def describe_nonfinite(entry: Entry, files: Mapping[str, Entry], count: int) -> str:
    """Which stored tensor brought `count` NaN or infinite elements."""
    part = "" if entry.index is None else f" (expert {entry.index})"
    if entry.dtype == FP8 and entry.scale and (odd := nonfinite(files[entry.scale].read().astype(np.float32))):
        scale = files[entry.scale]
        return f"{entry.scale} in {str(scale.file)!r} holds {odd} NaN or infinite scales of {entry.name}{part}"
    return f"{entry.name}{part} in {str(entry.file)!r} holds {count} NaN or infinite values"


def _not_named(name: str, unindexed: Mapping[str, Entry]) -> str:
    return (
        f"{INDEX_FILE} does not name {name}, which is in {str(unindexed[name].file)!r}; add it to weight_map, or "
        "fetch the index again"
    )


def _missing(tensor: StoredTensor, config: DsaConfig, unindexed: Mapping[str, Entry], layers: Mapping[int, str]) -> str:
    if tensor.name in unindexed:
        return _not_named(tensor.name, unindexed)
    text = f"tensor {tensor.name} {list(tensor.shape)} is missing"
    if (match := _LAYER.match(tensor.name)) and int(match[1]) not in layers:
        return (
            f"{text}: the files have {len(layers)} layers but num_hidden_layers is {config.num_layers}; correct "
            "config.json, or fetch all files"
        )
    if "/indexer/" in tensor.leaves[0]:
        layer = int(tensor.leaves[0].split("/")[1])
        assert config.layer_kinds[layer] == FULL
        return (
            f"{text}, but layer {layer} is a full layer and needs its own indexer; call it 'shared' in indexer_types, "
            "or fetch the weights again"
        )
    if tensor.name == "lm_head.weight":
        return f"{text}, but tie_word_embeddings is false; set it true if the model shares its embedding"
    return f"{text}; config.json describes another model, or a file is missing: fetch both again"


_LAYER = re.compile(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?")


def _layers(files: Mapping[str, Entry]) -> dict[int, str]:
    """Number of each layer in the files -> the name of one of its tensors."""
    return {int(match[1]): name for name in files if (match := _LAYER.match(name))}


def _check_layers(
    files: Mapping[str, Entry], layers: Mapping[int, str], config: DsaConfig, predicted: int, allow_extra: bool
) -> None:
    """Layers behind the last one are declared layers of multi-token prediction and look like them."""
    for layer in sorted(layers):
        is_declared = layer < config.num_layers + predicted
        if layer < config.num_layers or allow_extra:
            continue
        if is_declared and f"model.layers.{layer}.{_PREDICTOR}" in files:
            continue
        why = (
            f"layer {layer} has no {_PREDICTOR}, so it is no layer of multi-token prediction"
            if is_declared
            else f"num_nextn_predict_layers is {predicted}"
        )
        raise ValueError(
            f"the files hold layers 0..{max(layers)} ({layers[layer]} in {str(files[layers[layer]].file)!r}) but "
            f"num_hidden_layers is {config.num_layers} and {why}; correct config.json, or pass allow_extra=True "
            "(--allow-extra) to leave the layers out"
        )


def _is_skipped(name: str, config: DsaConfig) -> bool:
    if match := _LAYER.match(name):
        layer = int(match[1])
        if layer >= config.num_layers or (match[2] and config.layer_kinds[layer] != FULL):
            return True
    return bool(_NO_PARAMETER.search(name)) or (name == "lm_head.weight" and config.tie_word_embeddings)
