"""Hugging Face folders: `config.json` and safetensors files, read into a params pytree and written from one.

Knows files, stored dtypes and FP8 block scales. What the names mean is in `layout`, what the config says in
`hf_config`. All headers are read and checked before the first weight is; then tensor by tensor: each is converted and
put on its device before the next is read. The largest thing held on the way is one parameter, experts stacked, so a
model never exists twice.

The files are read here and not through the safetensors package, which has no NumPy form of FP8 (0.8.0).
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

from echo_jax.checkpoints.hf_config import FP8_BLOCK, check_quantization, config_from_hf, config_to_hf
from echo_jax.checkpoints.layout import StoredTensor, is_never_narrowed, stored_tensors
from echo_jax.models.config import FULL, DsaConfig
from echo_jax.models.dsa import Params

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"

Shardings = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None
"""One sharding for every parameter, or a function of its path ("layers/3/moe/gate") and shape; None: the default device."""

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_FLOATS, _FP8 = ("F32", "BF16", "F16"), "F8_E4M3"
_TARGETS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_NO_PARAMETER = re.compile(r"\.rotary_emb\.inv_freq$")


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
    FileNotFoundError for a missing folder, config or shard, ValueError for whatever does not fit, before any weight is read.
    """
    if dtype not in ("float32", "bfloat16", None):
        raise ValueError(f"dtype {dtype!r} is not supported; use 'float32', 'bfloat16' or None (as stored)")
    raw = read_config(path)
    config = config_from_hf(raw)
    block = check_quantization(raw)
    tensors = list(stored_tensors(config))
    files = _with_single_experts(_open_weights(Path(path)))
    _check(tensors, files, config, block, allow_extra)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    target = _TARGETS[config.dtype] if dtype is None else _TARGETS[dtype]

    def place(leaf: str, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, sharding(leaf, value.shape) if callable(sharding) else sharding)

    params: dict[str, jax.Array] = {}
    stacks: dict[str, np.ndarray] = {}
    for tensor in tensors:
        stored = _read(tensor.name, files, block)
        is_quantised = files[tensor.name].dtype == _FP8
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


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where one tensor lies. `index` and `rows` pick a matrix out of a stack of fused experts."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    index: int | None = None
    rows: tuple[int, int] | None = None
    scale: str | None = None  # name of the tensor of its block scales

    def read(self) -> np.ndarray:
        whole = np.memmap(self.file, _DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)
        return whole if self.index is None else whole[self.index]

    def used_shape(self) -> tuple[int, ...]:
        if self.index is None:
            return self.shape
        return (self.rows[1] - self.rows[0], self.shape[2]) if self.rows else self.shape[1:]


def _open_weights(folder: Path) -> dict[str, _Entry]:
    """The headers of all weight files of a folder."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the weights, or convert them to "
                "safetensors"
            )
        return _read_header(folder / SINGLE_FILE)
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(index)!r} has no usable weight_map ({error!r}); fetch it again") from None
    entries: dict[str, _Entry] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            count = sum(where == shard for where in weight_map.values())
            raise FileNotFoundError(
                f"{INDEX_FILE} places {count} tensors in {shard}, which is not in {str(folder)!r}; fetch the shard"
            )
        entries |= _read_header(folder / shard)
    lost = sorted(name for name, shard in weight_map.items() if name not in entries or entries[name].file.name != shard)
    if lost:
        raise ValueError(
            f"{INDEX_FILE} places {lost[0]} in {weight_map[lost[0]]}, where it is not ({len(lost)} such tensors); index "
            "and shards are of different checkpoints, fetch both again"
        )
    return entries


def _read_header(file: Path) -> dict[str, _Entry]:
    """Names, dtypes, shapes and places: 8 bytes of header length, a JSON header, then the data without gaps."""
    size = file.stat().st_size
    again = "fetch the file again"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{str(file)!r} is truncated: {size} bytes, but the header alone needs {8 + length}; {again}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            spans = [one["data_offsets"] for one in header.values()]
            needed = 8 + length + max((end for _, end in spans), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(file)!r} has no safetensors header ({error!r}); {again}") from None
    if size < needed:
        raise ValueError(f"{str(file)!r} is truncated: {size} bytes, but its header promises {needed}; {again}")
    entries = {}
    for name, one in header.items():
        begin, end = one["data_offsets"]
        dtype, shape = one["dtype"], tuple(one["shape"])
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            raise ValueError(
                f"{name} in {str(file)!r} has {end - begin} bytes but {dtype} {list(shape)} needs "
                f"{math.prod(shape) * _DTYPES[dtype].itemsize}; {again}"
            )
        entries[name] = _Entry(file, dtype, shape, 8 + length + begin)
    for name, entry in entries.items():
        if name + SCALE_SUFFIX in entries:
            entries[name] = dataclasses.replace(entry, scale=name + SCALE_SUFFIX)
    return entries


def _with_single_experts(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """Fused experts (`gate_up_proj` [X, 2I, E], `down_proj` [X, E, I]) seen as one tensor per expert and projection."""
    single: dict[str, _Entry] = {}
    for name, entry in entries.items():
        prefix, fused, part = name.rpartition(".mlp.experts.")
        if not fused or part not in ("gate_up_proj", "down_proj") or len(entry.shape) != 3:
            single.setdefault(name, entry)
            continue
        if entry.scale:
            single.pop(entry.scale, None)
        half = entry.shape[1] // 2
        parts = {"gate": (0, half), "up": (half, 2 * half)} if part == "gate_up_proj" else {"down": None}
        for expert in range(entry.shape[0]):
            for projection, rows in parts.items():
                each = f"{prefix}{fused}{expert}.{projection}_proj.weight"
                single[each] = dataclasses.replace(entry, index=expert, rows=rows)
    scales = {entry.scale: entries[entry.scale] for entry in single.values() if entry.scale}
    return single | scales


def _read(name: str, files: dict[str, _Entry], block: tuple[int, int]) -> np.ndarray:
    """One tensor: as stored, or f32 where it was FP8."""
    entry = files[name]
    stored = entry.read()
    if entry.dtype == _FP8:
        scales = dataclasses.replace(files[entry.scale or ""], index=entry.index).read()
        stored = dequantise(stored, scales, block)
    return stored if entry.rows is None else stored[slice(*entry.rows)]


def dequantise(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] = FP8_BLOCK) -> np.ndarray:
    """f32[R, C] = codes * the scale of their block; the last blocks may be ragged.

    codes float8_e4m3fn[R, C], scales [ceil(R / block rows), ceil(C / block columns)].
    """
    rows, columns = codes.shape
    out = np.empty((rows, columns), np.float32)
    for index, start in enumerate(range(0, rows, block[0])):
        scale = np.repeat(scales[index].astype(np.float32), block[1])[:columns]
        np.multiply(codes[start : start + block[0]].astype(np.float32), scale[None], out=out[start : start + block[0]])
    return out


def _check(
    tensors: list[StoredTensor], files: dict[str, _Entry], config: DsaConfig, block: tuple[int, int], allow_extra: bool
) -> None:
    """Every tensor is there, of a known dtype and the right shape, with its scales; and nothing else is."""
    used: set[str] = set()
    for tensor in tensors:
        entry = files.get(tensor.name)
        if entry is None:
            raise ValueError(_missing(tensor, config))
        where = f"{tensor.name} in {str(entry.file)!r}"
        if entry.dtype not in (*_FLOATS, _FP8):
            raise ValueError(
                f"{where} has dtype {entry.dtype}; supported: {', '.join((*_FLOATS, _FP8))}; convert it to one of them"
            )
        if entry.used_shape() != tensor.shape:
            raise ValueError(
                f"{where} has shape {list(entry.used_shape())} but config.json asks for {list(tensor.shape)}; config and "
                "weights are of different models, correct config.json or fetch both again"
            )
        used.add(tensor.name)
        if entry.dtype != _FP8:
            continue
        if entry.scale is None:
            raise ValueError(f"{where} is FP8 but {tensor.name}{SCALE_SUFFIX} is missing; fetch the file again")
        scale = files[entry.scale]
        asked = (*entry.shape[:-2], *(-(-size // part) for size, part in zip(entry.shape[-2:], block, strict=True)))
        if scale.shape != asked or scale.dtype not in ("F32", "BF16", "F8_E8M0"):
            raise ValueError(
                f"{entry.scale} has {scale.dtype} {list(scale.shape)} but {list(entry.shape)} in blocks of {list(block)} "
                f"needs F32, BF16 or F8_E8M0 {list(asked)}; check weight_block_size in quantization_config"
            )
        used.add(entry.scale)
    extra = sorted(name for name in files if name not in used and not _is_skipped(name, config))
    if extra and not allow_extra:
        raise ValueError(
            f"{len(extra)} tensors have no place in this model, first {extra[0]} in {str(files[extra[0]].file)!r}; without "
            "them it would give other answers than its authors'; check config.json, or pass allow_extra=True to drop them"
        )


def _missing(tensor: StoredTensor, config: DsaConfig) -> str:
    text = f"tensor {tensor.name} {list(tensor.shape)} is missing"
    if "/indexer/" in tensor.leaves[0]:
        layer = int(tensor.leaves[0].split("/")[1])
        assert config.layer_kinds[layer] == FULL
        return (
            f"{text}, but layer {layer} is a full layer and needs its own indexer; call it 'shared' in indexer_types, or "
            "fetch the weights again"
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
    """Writes a Hugging Face folder that `load_folder` and transformers read: one tensor per expert, sharded with an index
    when it does not fit into one file of `max_shard_bytes`.

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
        raise ValueError(f"the parameters {side} {odd[0]} ({len(odd)} differ from the config); save them with their config")
    for leaf, shape in asked.items():
        if tuple(leaves[leaf].shape) != shape:
            raise ValueError(
                f"parameter {leaf} has shape {list(leaves[leaf].shape)} but the config asks for {list(shape)}; save the "
                "parameters with their own config"
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
