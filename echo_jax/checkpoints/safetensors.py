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
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from echo_jax.checkpoints.checks import check_tensors, check_unindexed, describe_nonfinite
from echo_jax.checkpoints.contents import read_object
from echo_jax.checkpoints.files import (
    FP8,
    INDEX_FILE,
    SINGLE_FILE,
    nonfinite,
    open_weights,
    read_tensor,
    with_single_experts,
)
from echo_jax.checkpoints.hf_config import (
    check_quantization,
    config_from_hf,
    config_to_hf,
    predicted_layers,
    quantization_of,
)
from echo_jax.checkpoints.layout import StoredTensor, is_never_narrowed, stored_tensors
from echo_jax.checkpoints.notes import note
from echo_jax.models.config import DsaConfig
from echo_jax.models.dsa import Params

Shardings = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None
"""One sharding for every parameter, or a function of its path ("layers/3/moe/gate") and shape. None: default device."""

QUANTIZATION_FILE = "hf_quant_config.json"
_TARGETS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder, with the quantisation that modelopt writes into a file of its own.

    FileNotFoundError without the folder or the file, ValueError for what is not JSON.
    """
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
    raw = read_object(file, "settings")
    if quantization_of(raw) is None and (folder / QUANTIZATION_FILE).is_file():
        stated = read_object(folder / QUANTIZATION_FILE, "settings").get("quantization")
        raw["quantization_config"] = {"quant_method": "modelopt"} | (stated if isinstance(stated, dict) else {})
    return raw


def load_folder(
    path: str | Path,
    *,
    dtype: str | None = "float32",
    sharding: Shardings = None,
    allow_extra: bool = False,
    allow_unindexed: bool = False,
    allow_nonfinite: bool = False,
) -> tuple[DsaConfig, Params]:
    """The model in a Hugging Face folder: its config, and its parameters on their devices.

    dtype: "float32" or "bfloat16" for parameters and activations; None keeps the stored dtype of each parameter and the
        config's own activations. FP8 weights are multiplied by their block scales in f32; with None they become what
        config.json calls its dtype. Router, its bias and the indexer's head weights are never narrowed.
    sharding: where parameters go; see `Shardings`.
    allow_extra: do not refuse tensors that this model has no place for.
    allow_unindexed: ignore tensors that a shard holds and the index does not name, instead of refusing the folder. They
        are never read: the index decides what the model is.
    allow_nonfinite: load NaN and infinities, with a `CheckpointNote` that names the tensors, instead of refusing.

    Layers of multi-token prediction (`num_nextn_predict_layers` of them, from num_hidden_layers on) are skipped, and
    indexer weights in a shared layer. Raises FileNotFoundError for a missing folder, config or shard and ValueError for
    whatever does not fit, before any weight is read; NaN and infinities are found as each tensor is read.
    """
    if dtype not in ("float32", "bfloat16", None):
        raise ValueError(f"dtype {dtype!r} is not supported; use 'float32', 'bfloat16' or None (as stored)")
    raw = read_config(path)
    config = config_from_hf(raw)
    block = check_quantization(raw)
    tensors = list(stored_tensors(config))
    weights = open_weights(Path(path))
    files = with_single_experts(weights.entries)
    check_tensors(tensors, files, weights.unindexed, config, block, predicted_layers(raw), allow_extra)
    check_unindexed(weights.unindexed, allow_unindexed)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    target = _TARGETS[config.dtype] if dtype is None else _TARGETS[dtype]

    def place(leaf: str, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, sharding(leaf, value.shape) if callable(sharding) else sharding)

    params: dict[str, jax.Array] = {}
    stacks: dict[str, np.ndarray] = {}
    odd: list[str] = []
    for tensor in tensors:
        stored = read_tensor(tensor.name, files, block)
        if count := nonfinite(stored):
            odd.append(describe_nonfinite(files[tensor.name], files, count))
            if not allow_nonfinite:
                raise ValueError(f"{odd[0]}; fetch the file again, or pass allow_nonfinite=True (--allow-nonfinite)")
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
    if odd:
        note(f"{len(odd)} tensors with NaN or infinities were loaded: {'; '.join(odd[:3])}{'; ...' * (len(odd) > 3)}")
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
