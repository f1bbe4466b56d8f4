"""Where the bytes live: creates the host pool and moves rows between it and the device.

Knows two kinds of host memory and picks between two forms of each movement. Does not know what a record
means, which rows are wanted, or who owns a row; row and slot numbers arrive as lists with negative entries
for "nothing here".

PINNED    the pool is one `pinned_host` array and the shared library moves rows in place. jnp cannot index
          such an array.
ORDINARY  the pool is an ordinary array of the device and jnp moves rows: slower, available everywhere, and
          equal bit for bit.

Which form a traced function uses follows from the type of the pool it is given, so a choice is made once, in
`create_pool`, and cannot be contradicted later.

In place. Every function that returns the pool or the records writes in place when its first argument is
donated, under `jax.jit`, in a `lax.scan` carry and under `shard_map`. A donated pool keeps its pointer.
`out_shardings` is not needed: the result of `write_back` and `copy_rows` carries the memory space of its
operand in its type, the jitted function therefore returns it to `pinned_host`, and calling again with the
result does not compile again (jax 0.11.2, with and without a mesh).

Order. A pool that is read and written in one jitted step must be written once, tied behind every read with
`lax.optimization_barrier`, or XLA copies all of it. The caller ties; nothing here can know what else reads
the pool.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from echo_jax import _compat, _ffi, _pinned
from echo_jax.types import NO_ROW, SOURCE_HOST

IMPLEMENTATIONS = _ffi.IMPLEMENTATIONS

# Records are moved as whole words on every platform.
WORD_BYTES = 4


class HostMemory(enum.Enum):
    """Where a host pool lives; see the module."""

    PINNED = "pinned"
    ORDINARY = "ordinary"


def choose(platform: str | None = None, implementation: str = "auto") -> HostMemory:
    """The host memory to use on `platform` ("cpu", "gpu"; default: the default backend).

    PINNED where `implementation` (_ffi.serves) means the shared library: "auto" where it can serve the platform, "ffi"
    and "cuda" always, or RuntimeError with the reason and the remedy. "jnp" is ORDINARY.
    """
    return HostMemory.PINNED if _ffi.serves("host memory", implementation, platform) else HostMemory.ORDINARY


def create_pool(
    shape: Sequence[int],
    dtype: DTypeLike,
    memory: HostMemory,
    device: _compat.Device | jax.sharding.Sharding | None = None,
) -> jax.Array:
    """A zeroed pool [L, N_H, *record], committed to `device` (a device, a sharding or the default device).

    The first donation is in place already. Making a pool takes its own size once, and nothing of a pinned pool passes
    through the memory of a GPU (`_pinned` says whose memory it is). ValueError for a shape that is no pool or a record
    that is not whole words, MemoryError for more than can be pinned, RuntimeError where a pinned pool is asked for and
    the library does not serve the device.
    """
    shape = tuple(int(size) for size in shape)
    dtype = jnp.dtype(dtype)
    _check_pool(shape, dtype)
    sharding = jax.devices()[0] if device is None else device
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    if memory is HostMemory.ORDINARY:
        return _compat.zeros(shape, dtype, sharding)
    reason = _ffi.why_unavailable(next(iter(sharding.device_set)).platform)
    if reason is not None:
        raise RuntimeError(f"a pinned host pool is made by the library only: {reason}")
    return _pinned.zeros(shape, dtype, sharding)


def memory_of(host_pool: jax.Array) -> HostMemory:
    """Where this pool (traced or not) lives."""
    return HostMemory.PINNED if _compat.is_in_host_memory(host_pool) else HostMemory.ORDINARY


def as_numpy(host_pool: jax.Array) -> np.ndarray:
    """The pool as a NumPy array, shared where it can be; the pool may be donated again once that array is gone.

    np.asarray of a host pool in bf16 or FP8, jax.device_get and printing leave a reference to the memory in the jax
    array itself, as long as it lives. Donating it is then an error on a GPU ("buffer with external reference") and a
    silent copy of the whole pool on a CPU.
    """
    return np.asarray(_compat.same_buffers(host_pool))


# ---- movement --------------------------------------------------------------------------------------------
# Shapes and types are refused here, whoever moves the rows: while tracing, before anything is launched. That is not
# for convenience alone: a handler that refuses a call on a GPU ends the process (jax 0.11.2, segmentation fault).
# Numbers outside the pool are refused by the shared library on a CPU, as an error of the call. jnp and a GPU cannot
# refuse what only the device knows: there they read zeros and write nothing.


def read_rows(host_pool: jax.Array, layer: jax.Array | int, rows: jax.Array) -> jax.Array:
    """The records of `rows` in one layer, or of a list in each of several, in device memory; zeros where a row is
    negative.

    host_pool: [L, N_H, *record]    layer: i32[]     rows: i32[M]       returns [M, *record]
                                    layer: i32[G]    rows: i32[G, M]    returns [G, M, *record]
    """
    layer, rows = jnp.asarray(layer, jnp.int32), jnp.asarray(rows)
    if layer.ndim == 0:
        _check_lists(rows=rows)
    elif layer.ndim > 1 or rows.ndim != 2 or rows.shape[0] != layer.shape[0] or rows.dtype != jnp.int32:
        raise ValueError(
            f"layer has shape {list(layer.shape)} but rows is {rows.dtype.name}{list(rows.shape)}; give one layer and "
            "a list, int32[M], or a list of G layers and int32[G, M]"
        )
    if uses_library(host_pool):
        return _ffi.read_rows(host_pool, layer, rows)
    wanted = _outside_if(rows < 0, rows, host_pool.shape[1])
    of_layer = _outside_if(layer < 0, layer, host_pool.shape[0])
    of_layer = of_layer[:, None] if layer.ndim else of_layer
    return host_pool.at[of_layer, wanted].get(mode="fill", fill_value=0)


def recall(
    records: jax.Array,
    host_pool: jax.Array,
    layer: jax.Array | int,
    count: jax.Array,
    host_rows: jax.Array,
    slots: jax.Array,
    source: jax.Array,
    new: jax.Array,
    staged: jax.Array,
) -> jax.Array:
    """`records` with slots filled; every other slot keeps its bytes.

    For each m < count with host_rows[m] >= 0 and slots[m] >= 0, slot slots[m] receives host_pool[layer, host_rows[m]]
    where source[m] is SOURCE_HOST, and record source[m] of new and staged, one after the other, elsewhere. Active slots
    are distinct (the caller's promise).

    records: [N_G, *record]  one layer's device pool; donated, it is filled in place
    host_pool: [L, N_H, *record]    layer: i32[]
    count: i32[]  entries that are looked at    host_rows, slots, source: i32[M]
    new: [E_new, *record], staged: [E_staged, *record]  records that are on the device already; either may be empty
    """
    layer, count = jnp.asarray(layer, jnp.int32), jnp.asarray(count, jnp.int32)
    _check_scalars(layer=layer, count=count)
    _check_lists(host_rows=host_rows, slots=slots, source=source)
    _check_records(host_pool, 1, records=records, new=new, staged=staged)
    if uses_library(host_pool):
        return _ffi.recall(records, host_pool, layer, count, host_rows, slots, source, new, staged)
    is_active = (host_rows >= 0) & (slots >= 0) & (jnp.arange(slots.shape[0], dtype=jnp.int32) < count)
    is_from_host = source == SOURCE_HOST
    filled = read_rows(host_pool, layer, jnp.where(is_active & is_from_host, host_rows, NO_ROW))
    extra = jnp.concatenate([new, staged])
    if extra.shape[0] > 0:
        given = extra.at[_outside_if(is_from_host, source, extra.shape[0])].get(mode="fill", fill_value=0)
        filled = jnp.where(_over_record(is_from_host, filled), filled, given)
    return records.at[_outside_if(~is_active, slots, records.shape[0])].set(filled, mode="drop", unique_indices=True)


def write_back(host_pool: jax.Array, records: jax.Array, rows: jax.Array) -> jax.Array:
    """`host_pool` with records[l, m] in row rows[m] of every layer l; negative rows are skipped.

    One call a step. Active rows are distinct. The caller ties this write behind every read of the step (see
    the module).

    host_pool: [L, N_H, *record]    records: [L, M, *record], device memory    rows: i32[M]
    """
    _check_lists(rows=rows)
    _check_records(host_pool, 2, records=records)
    wanted = (host_pool.shape[0], rows.shape[0])
    if records.shape[:2] != wanted:
        raise ValueError(
            f"records are [{records.shape[0]} layers, {records.shape[1]} rows] but host_pool has {wanted[0]} layers "
            f"and rows has length {wanted[1]}; give one record for each layer and entry of rows"
        )
    if uses_library(host_pool):
        return _ffi.write_back(host_pool, records, rows)
    written = _outside_if(rows < 0, rows, host_pool.shape[1])
    return host_pool.at[:, written].set(records, mode="drop", unique_indices=True)


def copy_rows(host_pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """`host_pool` with row source[m] copied to row target[m] in every layer, unless either is negative.

    Active targets are distinct and none is the source of another entry: the order of copies cannot matter.
    The shared library refuses a call that breaks this.

    host_pool: [L, N_H, *record]    source, target: i32[M]
    """
    _check_lists(source=source, target=target)
    if uses_library(host_pool):
        return _ffi.copy_rows(host_pool, source, target)
    rows = host_pool.shape[1]
    is_skipped = (source < 0) | (target < 0)
    copied = host_pool.at[:, _outside_if(is_skipped, source, rows)].get(mode="fill", fill_value=0)
    return host_pool.at[:, _outside_if(is_skipped, target, rows)].set(copied, mode="drop", unique_indices=True)


def _check_pool(shape: tuple[int, ...], dtype: np.dtype) -> None:
    if len(shape) < 3:
        raise ValueError(f"pool shape {shape} has {len(shape)} axes but needs layers, rows and a record shape")
    record_bytes = math.prod(shape[2:]) * dtype.itemsize
    if record_bytes % WORD_BYTES != 0:
        raise ValueError(
            f"a record of shape {shape[2:]} and type {dtype.name} has {record_bytes} bytes, not a multiple "
            f"of {WORD_BYTES}; pad the record"
        )


def _check_scalars(**numbers: jax.Array) -> None:
    for name, number in numbers.items():
        if number.shape != ():
            raise ValueError(f"{name} has shape {list(number.shape)} but must be a scalar")


def _check_lists(**lists: jax.Array) -> None:
    """Lists of int32, all of one length."""
    (first, length) = next((name, numbers.shape) for name, numbers in lists.items())
    for name, numbers in lists.items():
        if numbers.ndim != 1 or numbers.dtype != jnp.int32:
            raise ValueError(f"{name} is {numbers.dtype.name}{list(numbers.shape)} but must be a list, int32[M]")
        if numbers.shape != length:
            raise ValueError(
                f"{first} has length {length[0]} but {name} has length {numbers.shape[0]}; lists that are read side by "
                "side are equally long"
            )


def _check_records(host_pool: jax.Array, leading: int, **arrays: jax.Array) -> None:
    """Arrays whose records, behind `leading` axes, are those of the pool."""
    for name, array in arrays.items():
        if array.dtype != host_pool.dtype or array.ndim < leading or array.shape[leading:] != host_pool.shape[2:]:
            raise ValueError(
                f"{name} is {array.dtype.name}{list(array.shape)}, records behind {leading} axes, but host_pool is "
                f"{host_pool.dtype.name}{list(host_pool.shape)}, records behind 2; the records must be the same"
            )


def uses_library(host_pool: jax.Array) -> bool:
    """Whether the library moves this pool's rows; RuntimeError where it should and has gone."""
    if memory_of(host_pool) is HostMemory.ORDINARY:
        return False
    reason = _ffi.why_unavailable()
    if reason is not None:
        raise RuntimeError(f"the host pool is in pinned memory, which only the library moves: {reason}")
    _check_pool(host_pool.shape, host_pool.dtype)  # whoever made it
    return True


def _outside_if(is_outside: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """`index`, with a number past the end where `is_outside`: jnp would count a negative number from the end.

    The numbers past the end differ from entry to entry, so that distinct indices stay distinct.
    """
    past_the_end = size + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    return jnp.where(is_outside, past_the_end, index)


def _over_record(mask: jax.Array, records: jax.Array) -> jax.Array:
    """bool[M] spread over the record axes of [M, *record]."""
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (records.ndim - 1)), records.shape)
