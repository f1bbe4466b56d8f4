"""Tensors in safetensors files: what the headers promise, and one tensor read at a time, FP8 included.

Knows files, stored dtypes and block scales; not what a tensor means. A tensor is mapped, not read into a buffer, so
reading one costs its conversion only. Files are read here and not through the safetensors package because that has no
NumPy form of FP8 (0.8.0).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from echo_jax.checkpoints.hf_config import FP8_BLOCK

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
FLOATS, FP8 = ("F32", "BF16", "F16"), "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclasses.dataclass(frozen=True)
class Entry:
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


def open_weights(folder: Path) -> dict[str, Entry]:
    """The headers of all weight files of a folder."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the weights, or convert them to "
                "safetensors"
            )
        return read_header(folder / SINGLE_FILE)
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(index)!r} has no usable weight_map ({error!r}); fetch it again") from None
    entries: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            count = sum(where == shard for where in weight_map.values())
            raise FileNotFoundError(
                f"{INDEX_FILE} places {count} tensors in {shard}, which is not in {str(folder)!r}; fetch the shard"
            )
        entries |= read_header(folder / shard)
    lost = sorted(name for name, shard in weight_map.items() if name not in entries or entries[name].file.name != shard)
    if lost:
        raise ValueError(
            f"{INDEX_FILE} places {lost[0]} in {weight_map[lost[0]]}, where it is not ({len(lost)} such tensors); "
            "index and shards are of different checkpoints, fetch both again"
        )
    return entries


def read_header(file: Path) -> dict[str, Entry]:
    """Names, dtypes, shapes and places: 8 bytes of header length, a JSON header, then the data without gaps."""
    size = file.stat().st_size
    again = "fetch the file again"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{str(file)!r} is truncated: {size} bytes, but the header alone needs {8 + length}; {again}"
            )
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
        entries[name] = Entry(file, dtype, shape, 8 + length + begin)
    for name, entry in entries.items():
        if name + SCALE_SUFFIX in entries:
            entries[name] = dataclasses.replace(entry, scale=name + SCALE_SUFFIX)
    return entries


def with_single_experts(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Fused experts (`gate_up_proj` [X, 2I, E], `down_proj` [X, E, I]) seen as one tensor per expert and projection."""
    single: dict[str, Entry] = {}
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


def read_tensor(name: str, files: dict[str, Entry], block: tuple[int, int]) -> np.ndarray:
    """One tensor: as stored, or f32 where it was FP8."""
    entry = files[name]
    stored = entry.read()
    if entry.dtype == FP8:
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
