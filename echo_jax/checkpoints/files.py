"""Tensors in safetensors files: what the headers promise, and one tensor read at a time, FP8 included.

Knows files, the index over them, stored dtypes and block scales; not what a tensor means. A tensor is mapped, not read
into a buffer, so reading one costs its conversion only. Files are read here and not through the safetensors package
because that has no NumPy form of FP8 (0.8.0).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path, PurePosixPath

import ml_dtypes
import numpy as np

from echo_jax.checkpoints.contents import is_text, read_object, what_is_wrong
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

    name: str  # as stored
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


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a folder by name, and those that its shards hold but its index does not name."""

    entries: dict[str, Entry]
    unindexed: dict[str, Entry] = dataclasses.field(default_factory=dict)


def open_weights(folder: Path) -> Weights:
    """The headers of all weight files of a folder, each FP8 weight with its scale, in whatever files they lie.

    Where there is an index, it decides: a tensor is read from the shard that `weight_map` names, and what other shards
    hold under the same name does not count. Without an index there is one file.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise FileNotFoundError(_no_weights(folder))
        return Weights(_with_scales(read_header(folder / SINGLE_FILE)))
    weight_map = _read_index(index)
    entries: dict[str, Entry] = {}
    unindexed: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            count = sum(where == shard for where in weight_map.values())
            raise FileNotFoundError(
                f"{INDEX_FILE} places {count} tensors in {shard}, which is not in {str(folder)!r}; fetch the shard"
            )
        for name, entry in read_header(folder / shard).items():
            if weight_map.get(name) == shard:
                entries[name] = entry
            elif name not in weight_map:
                unindexed[name] = entry
    lost = sorted(weight_map.keys() - entries.keys())
    if lost:
        raise ValueError(
            f"{INDEX_FILE} places {lost[0]} in {weight_map[lost[0]]}, where it is not ({len(lost)} such tensors); "
            "index and shards are of different checkpoints, fetch both again"
        )
    return Weights(_with_scales(entries), unindexed)


def _no_weights(folder: Path) -> str:
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    others = sorted(file.name for end in ("bin", "pth", "pt", "gguf") for file in folder.glob(f"*.{end}"))
    text = f"{str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if shards:
        return f"{text}, though it holds {shards[0]} ({len(shards)} such files); fetch the index"
    if others:
        return f"{text}, though it holds {others[0]}; convert the weights to safetensors"
    return f"{text}; fetch the weights, or convert them to safetensors"


def _read_index(index: Path) -> dict[str, str]:
    """Name of each tensor -> path of its shard inside the folder."""
    weight_map = read_object(index, "weights").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{str(index)!r} has no usable weight_map ({weight_map!r:.60}); fetch it again")
    for name, shard in weight_map.items():
        path = PurePosixPath(shard) if isinstance(shard, str) else None
        if path is None or not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"{str(index)!r} places {name} in {shard!r}; a shard is a file in the folder of the index or below it, "
                "so correct weight_map"
            )
    return weight_map


def read_header(file: Path) -> dict[str, Entry]:
    """Names, dtypes, shapes and places: 8 bytes of header length, a JSON header, then the data without gaps."""
    size = file.stat().st_size
    again = "fetch the file again"
    if wrong := what_is_wrong(file):
        raise ValueError(f"{str(file)!r} {wrong}")
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if length > size - 8 and is_text(first):
            words = (first + stream.read(52)).decode("ascii", "replace").split("\n")[0]
            raise ValueError(f"{str(file)!r} is text that starts {words!r}, not safetensors; {again}")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{str(file)!r} is truncated: {size} bytes, but the header alone needs {8 + length}; {again}"
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries, spans = {}, {}
            for name, one in header.items():
                begin, end = spans[name] = tuple(map(int, one["data_offsets"]))
                entries[name] = Entry(name, file, str(one["dtype"]), tuple(map(int, one["shape"])), 8 + length + begin)
                if not 0 <= begin <= end:
                    raise ValueError(f"{name} lies at {begin}..{end}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(file)!r} has no safetensors header ({error!r}); {again}") from None
    needed = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != needed:
        what = "is truncated" if size < needed else "does not end with its last tensor"
        raise ValueError(f"{str(file)!r} {what}: {size} bytes, but its header promises {needed}; {again}")
    for name, entry in entries.items():
        given = spans[name][1] - spans[name][0]
        if entry.dtype in _DTYPES and (asked := math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize) != given:
            raise ValueError(
                f"{name} in {str(file)!r} has {given} bytes but {entry.dtype} {list(entry.shape)} needs {asked}; "
                f"{again}"
            )
    reached = 0
    for name in sorted(spans, key=spans.__getitem__):
        begin, end = spans[name]
        if begin != reached:
            raise ValueError(
                f"{name} in {str(file)!r} begins at byte {begin} of the data but the tensor before it ends at "
                f"{reached}; {again}"
            )
        reached = end
    return entries


def _with_scales(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Each weight knows its block scales, which may lie in another shard."""
    return {
        name: dataclasses.replace(entry, scale=name + SCALE_SUFFIX) if name + SCALE_SUFFIX in entries else entry
        for name, entry in entries.items()
    }


def with_single_experts(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Fused experts (`gate_up_proj` [X, 2I, E], `down_proj` [X, E, I]) seen as one tensor per expert and projection."""
    single: dict[str, Entry] = {}
    for name, entry in entries.items():
        prefix, fused, part = name.rpartition(".mlp.experts.")
        if not fused or part not in ("gate_up_proj", "down_proj") or len(entry.shape) != 3:
            single.setdefault(name, entry)
            continue
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


def nonfinite(value: np.ndarray) -> int:
    """How many elements are NaN or infinite: one pass, a block at a time, without a second array of this size."""
    whole = {2: np.uint16, 4: np.uint32}[value.dtype.itemsize]
    infinity = np.array(np.inf, value.dtype).view(whole)  # all exponent bits and no other
    bits = np.ascontiguousarray(value).view(whole).reshape(-1)
    blocks = (bits[start : start + 2**18] for start in range(0, bits.size, 2**18))
    return sum(int(np.count_nonzero((block & infinity) == infinity)) for block in blocks)


def dequantise(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] = FP8_BLOCK) -> np.ndarray:
    """f32[R, C] = codes * the scale of their block; the last blocks may be ragged.

    codes float8_e4m3fn[R, C], scales [ceil(R / block rows), ceil(C / block columns)].
    """
    rows, columns = codes.shape
    out = np.empty((rows, columns), np.float32)
    for index, start in enumerate(range(0, rows, block[0])):
        part = slice(start, start + block[0])
        scale = np.repeat(scales[index].astype(np.float32), block[1])[:columns]
        with np.errstate(invalid="ignore", over="ignore"):  # the caller looks for NaN and infinities, by name
            np.multiply(codes[part].astype(np.float32), scale[None], out=out[part])
    return out
