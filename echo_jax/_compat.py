"""The border to JAX itself: what its versions name differently, and what it does not publish.

Knows the names of memory kinds, where a type says in which memory it lives, how a value is marked as varying
over the axes of a `shard_map`, and the version of XLA's FFI. Knows nothing of caches. No other file of the
library names a memory kind, a private module of JAX or a JAX version; written against jax 0.11.2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core
from jax._src.array import ArrayImpl

# Host memory that the device can reach. A CPU device has the name too, for ordinary memory.
HOST_KIND = "pinned_host"

type Device = Any  # jax.Device is a variable to type checkers


def is_in_host_memory(array: Any) -> bool:
    """Whether `array` (traced or not) is typed as host memory, which jnp cannot index."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def on_host(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same placement, in host memory."""
    return sharding.with_memory_kind(HOST_KIND)


def allocated_on_host(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """In a jitted function: an array in host memory whose contents say nothing, allocated there and nowhere else.

    XLA gives the result of a call host memory only where the call aliases an operand that has it; elsewhere it makes
    the result on the device and copies. What it does allocate on the host is the operand of a `dynamic_update_slice`
    there: a broadcast becomes an uninitialised buffer, and only the small update is written (jax 0.11.2; a compile test
    holds it). On a CPU all memory is one and the zeros are simply made.
    """

    def zeros_on_host(sizes: tuple[int, ...]) -> jax.Array:
        return jax.device_put(jnp.zeros(sizes, dtype), jax.memory.Space.Host)

    corner = zeros_on_host((1,) * (len(shape) - 1) + shape[-1:])
    return jax.lax.dynamic_update_slice(zeros_on_host(shape), corner, (0,) * len(shape))


def adopt_on_host(tensor: Any, on_host: jax.sharding.Sharding) -> jax.Array:
    """A DLPack tensor in pinned host memory (kDLCUDAHost) as an array of one GPU: the same bytes, committed and typed.

    `jax.dlpack.from_dlpack` places such a tensor in host memory and types it as device memory, and XLA ends the process
    when that is used; so the array is built again around the same buffer.
    """
    array: Any = jax.dlpack.from_dlpack(tensor)
    if array.sharding.memory_kind != HOST_KIND:
        raise RuntimeError(f"jax took pinned host memory for {array.sharding.memory_kind!r}; use a jax of 0.11.2")
    host_type = core.ShapedArray(array.shape, array.dtype, memory_space=jax.memory.Space.Host)
    return ArrayImpl(host_type, on_host, array._arrays, committed=True)


def same_buffers(array: jax.Array) -> jax.Array:
    """Another array of the same memory, to be read and dropped.

    An array keeps the NumPy view that it once gave, and with it a reference that forbids donation (jaxlib 0.11.2);
    this one takes the view along when it goes.
    """
    given: Any = array
    return ArrayImpl(given.aval, given.sharding, given._arrays, committed=given.committed)


def zeros(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Zeros in device memory, placed by `sharding`, committed, and JAX's own: NumPy's memory is copied when donated."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


def varying_like(array: jax.Array, operands: Sequence[Any]) -> jax.Array:
    """`array`, marked as varying over every `shard_map` axis that any operand varies over; same value.

    The result type of an FFI call is stated by its caller, and a stated type varies over nothing: without the
    mark, `check_vma` would take per-device results for equal ones. Outside `shard_map` nothing happens.
    """
    varying = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    missing = tuple(sorted(varying - jax.typeof(array).manual_axis_type.varying))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def choose_products_without_timing() -> None:
    """Called before JAX's backend starts: XLA then takes a fixed algorithm for each matrix product.

    On a GPU it otherwise times several and takes the fastest, for every program anew: two programs, as the offloaded
    and the resident step, may then add in different orders and differ in their last bits. Nothing is changed on a CPU,
    or where XLA_FLAGS says something of autotuning already.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("JAX_PLATFORMS") != "cpu" and "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def xla_ffi_api_version() -> tuple[int, int] | None:
    """(major, minor) of the FFI that the installed jaxlib speaks, from its headers; None without them."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number.group(1)) if number else None for number in numbers)
    return None if major is None or minor is None else (major, minor)
