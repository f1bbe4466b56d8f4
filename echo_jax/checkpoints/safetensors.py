"""Hugging Face folders: `config.json` and safetensors files, read into a params pytree and written from one.

Knows the order of things: all headers are read and checked before the first weight is; then tensor by tensor, each
converted and put on its device before the next is read. The largest thing held on the way is one parameter, experts
stacked, so a model never exists twice. What names mean is in `layout`, what the config says in `hf_config`, what lies
in the files in `files`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from echo_jax.checkpoints.files import (
    FLOATS,
    FP8,
    INDEX_FILE,
    SCALE_DTYPES,
    SCALE_SUFFIX,
    SINGLE_FILE,
    Entry,
    open_weights,
    read_tensor,
    with_single_experts,
)
from echo_jax.checkpoints.hf_config import check_quantization, config_from_hf, config_to_hf
from echo_jax.checkpoints.layout import StoredTensor, is_never_narrowed, stored_tensors
from echo_jax.models.config import FULL, DsaConfig
from echo_jax.models.dsa import Params

Shardings = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None
"""One sharding for every parameter, or a function of its path ("layers/3/moe/gate") and shape. None: default device."""

_TARGETS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_NO_PARAMETER = re.compile(r"\.rotary_emb\.inv_freq$")
"""Constants that old exports stored beside the weights."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder. FileNotFoundError without the folder or the file, ValueError for bad JSON."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder {str(folder)!r} does not exist; give the path of a Hugging Face folder")
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
        raise FileNotFoundError(
            f"{str(folder)!r} has no config.json (it holds {found}); give the folder that has config.json beside the "
            "safetensors files"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error}); fetch it again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{str(file)!r} holds a {type(raw).__name__}, not an object of settings; fetch it again")
    return raw


def load_folder(
    path: str | Path, *, dtype: str | None = "float32", sharding: Shardings = None, allow_extra: bool = False
) -> tuple[DsaConfig, Params]:
    """The model in a Hugging Face folder: its config, and its parameters on their devices.

    dtype: "float32" or "bfloat16" for parameters and activations; None keeps the stored dtype of each parameter and the
        config's own activations. FP8 weights are multiplied by their block scales in f32; with None they become what
        config.json calls its dtype. Router, its bias and the indexer's head weights are never narrowed.
    sharding: where parameters go; see `Shardings`.
    allow_extra: do not refuse tensors that this model has no place for.

    Layers from num_hidden_layers on (multi-token prediction) are skipped, and indexer weights in a shared layer. Raises
    FileNotFoundError for a missing folder, config or shard and ValueError for whatever does not fit, before any weight
    is read.
    """
    if dtype not in ("float32", "bfloat16", None):
        raise ValueError(f"dtype {dtype!r} is not supported; use 'float32', 'bfloat16' or None (as stored)")
    raw = read_config(path)
    config = config_from_hf(raw)
    block = check_quantization(raw)
    tensors = list(stored_tensors(config))
    files = with_single_experts(open_weights(Path(path)))
    _check(tensors, files, config, block, allow_extra)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    target = _TARGETS[config.dtype] if dtype is None else _TARGETS[dtype]

    def place(leaf: str, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, sharding(leaf, value.shape) if callable(sharding) else sharding)

    params: dict[str, jax.Array] = {}
    stacks: dict[str, np.ndarray] = {}
    for tensor in tensors:
        stored = read_tensor(tensor.name, files, block)
        is_quantised = files[tensor.name].dtype == FP8
        for leaf, value in zip(tensor.leaves, tensor.to_params(stored), strict=True):
            keep = stored.dtype if dtype is None and not is_quantised else target
            if is_never_narrowed(leaf):
                keep = stored.dtype if stored.dtype.itemsize > keep.itemsize else keep
            if tensor.expert is None:
                params[leaf] = place(leaf, np.array(value, dtype=keep, order="C"))
                continue
            stack = stacks.setdefault(leaf, np.empty(0, keep))
            if not stack.size:
                stack = stacks[leaf] = np.empty(tensor.leaf_shape(leaf), keep)
            stack[tensor.expert] = value
            if tensor.expert == tensor.expert_count - 1:
                params[leaf] = place(leaf, stacks.pop(leaf))
    return config, nest(params)


def nest(params: dict[str, Any]) -> Params:
    """Paths ("layers/3/attention/q_b") -> the nested pytree of `dsa`, its layers a tuple."""
    tree: dict[str, Any] = {}
    for path, value in params.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    layers = tree["layers"]
    tree["layers"] = tuple(layers[str(index)] for index in range(len(layers)))
    return tree


def _check(
    tensors: list[StoredTensor], files: dict[str, Entry], config: DsaConfig, block: tuple[int, int], allow_extra: bool
) -> None:
    """Every tensor is there, of a known dtype and the right shape, with its scales; and nothing else is."""
    used: set[str] = set()
    for tensor in tensors:
        entry = files.get(tensor.name)
        if entry is None:
            raise ValueError(_missing(tensor, config))
        where = f"{tensor.name} in {str(entry.file)!r}"
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
        if entry.dtype != FP8:
            continue
        if entry.scale is None:
            raise ValueError(f"{where} is FP8 but {tensor.name}{SCALE_SUFFIX} is missing; fetch the file again")
        scale = files[entry.scale]
        asked = (*entry.shape[:-2], *(-(-size // part) for size, part in zip(entry.shape[-2:], block, strict=True)))
        if scale.shape != asked or scale.dtype not in SCALE_DTYPES:
            raise ValueError(
                f"{entry.scale} has {scale.dtype} {list(scale.shape)} but {list(entry.shape)} in blocks of "
                f"{list(block)} needs {', '.join(SCALE_DTYPES)} {list(asked)}; check weight_block_size in "
                "quantization_config"
            )
        used.add(entry.scale)
    extra = sorted(name for name in files if name not in used and not _is_skipped(name, config))
    if extra and not allow_extra:
        raise ValueError(
            f"{len(extra)} tensors have no place in this model, first {extra[0]} in {str(files[extra[0]].file)!r}; "
            "without them it would give other answers than its authors'; check config.json, or pass "
            "allow_extra=True to drop them"
        )


def _missing(tensor: StoredTensor, config: DsaConfig) -> str:
    text = f"tensor {tensor.name} {list(tensor.shape)} is missing"
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


def _is_skipped(name: str, config: DsaConfig) -> bool:
    if match := re.match(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?", name):
        layer = int(match[1])
        if layer >= config.num_layers or (match[2] and config.layer_kinds[layer] != FULL):
            return True
    return bool(_NO_PARAMETER.search(name)) or (name == "lm_head.weight" and config.tie_word_embeddings)


def save_folder(
    path: str | Path,
    params: Params,
    config: DsaConfig,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    dialect: str = "rope_parameters",
    extra_config: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a Hugging Face folder that `load_folder` and transformers read: one tensor per expert, in one file of at
    most `max_shard_bytes`, else sharded with an index.

    dtype: "float32", "bfloat16" or "float16"; None keeps each parameter's own. Router, its bias and the indexer's head
        weights are never narrowed. Values are copied exactly where the dtype allows.
    extra_config: further keys of config.json, such as eos_token_id; they win.
    overwrite: replace an existing folder. Files that are no weights (tokenizer, model card) move to the new one.

    The folder appears whole or not at all: everything is written beside it and renamed. Raises FileExistsError for a
    folder that holds something, ValueError for a wrong shape or dtype, OSError when it cannot be written.
    """
    path = Path(path).absolute()
    if dtype is not None and dtype not in _TARGETS:
        raise ValueError(f"dtype {dtype!r} cannot be stored; use {', '.join(map(repr, _TARGETS))} or None")
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
        raise FileExistsError(f"{str(path)!r} exists and is not an empty folder; pass overwrite=True or another path")
    leaves = flatten(params)
    tensors = list(stored_tensors(config))
    raw = config_to_hf(config, dialect=dialect, stored_dtype=dtype or str(leaves["embed"].dtype)) | (extra_config or {})
    _check_leaves(tensors, leaves)
    with _new_folder(path) as temporary:
        shards = _plan_shards(tensors, leaves, dtype, max_shard_bytes)
        weight_map, total = {}, 0
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            held = {tensor.name: _to_stored(tensor, leaves, dtype) for tensor in shard}
            save_file(held, temporary / name, metadata={"format": "pt"})
            (temporary / name).chmod(0o666 & ~_umask())  # written for its owner only
            weight_map |= dict.fromkeys(held, name)
            total += sum(value.nbytes for value in held.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (temporary / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        (temporary / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def flatten(params: Params) -> dict[str, Any]:
    """The inverse of `nest`."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf for path, leaf in paths}


def _check_leaves(tensors: list[StoredTensor], leaves: dict[str, Any]) -> None:
    asked = {leaf: tensor.leaf_shape(leaf) for tensor in tensors for leaf in tensor.leaves}
    if odd := sorted(asked.keys() ^ leaves.keys()):
        side = "lack" if odd[0] in asked else "have no place for"
        raise ValueError(
            f"the parameters {side} {odd[0]} ({len(odd)} differ from the config); save them with their config"
        )
    for leaf, shape in asked.items():
        if tuple(leaves[leaf].shape) != shape:
            raise ValueError(
                f"parameter {leaf} has shape {list(leaves[leaf].shape)} but the config asks for {list(shape)}; save "
                "the parameters with their own config"
            )


def _stored_dtype(leaf: str, value: Any, dtype: str | None) -> np.dtype:
    own = np.dtype(value.dtype)
    target = own if dtype is None else _TARGETS[dtype]
    return own if is_never_narrowed(leaf) and own.itemsize > target.itemsize else target


def _plan_shards(
    tensors: list[StoredTensor], leaves: dict[str, Any], dtype: str | None, max_shard_bytes: int
) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    held = 0
    for tensor in tensors:
        leaf = tensor.leaves[0]
        size = math.prod(tensor.shape) * _stored_dtype(leaf, leaves[leaf], dtype).itemsize
        if shards[-1] and held + size > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += size
    return shards


def _to_stored(tensor: StoredTensor, leaves: dict[str, Any], dtype: str | None) -> np.ndarray:
    parts = []
    for leaf in tensor.leaves:
        value = leaves[leaf] if tensor.expert is None else leaves[leaf][tensor.expert]
        parts.append(np.asarray(value).astype(_stored_dtype(leaf, value, dtype)))
    return tensor.to_stored(parts)


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if not path.exists():
            os.rename(temporary, path)
            return
        for old in path.iterdir():
            if old.suffix != ".safetensors" and old.name not in (INDEX_FILE, "config.json"):
                (shutil.copytree if old.is_dir() else shutil.copy2)(old, temporary / old.name)
        replaced = temporary.with_suffix(".replaced")
        os.rename(path, replaced)
        os.rename(temporary, path)
        shutil.rmtree(replaced)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
