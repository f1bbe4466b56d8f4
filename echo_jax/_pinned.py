"""How a host pool comes into pinned memory: zeroed, once, and never through another memory.

Knows whose memory it is and what a failure means. Does not know what a pool is for. Two owners, one kind of array:

XLA       the pool is the result of a jitted function that allocates it there and writes zeros where it lies. XLA's
          pinned memory has a limit that is set before its backend starts (64 GiB, or the variable
          XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB), is taken from the machine in powers of two, and is kept until the process
          ends.
library   the shared library pins exactly the bytes asked for and JAX adopts them as a DLPack tensor; they go back to
          the machine with the last array that uses them. One GPU a pool.

XLA's is used as far as its limit reaches, the library's beyond it. Either may be donated at every step and stays where
it is; what forbids it is a NumPy view that the array keeps (hostmem.as_numpy leaves none).

Pinning is slow, 0.43 s for a GiB on the H200 machine; it is done once, here, and a failure leaves nothing pinned.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from echo_jax import _compat, _ffi, pinning

# DLPack's (code, bits) of an element type; others stay with XLA.
_DLPACK_TYPES = {"float32": (2, 32), "bfloat16": (4, 16), "float16": (2, 16), "uint32": (1, 32), "uint8": (1, 8)}
_DLPACK_CUDA_HOST = 3


def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """Zeros in pinned host memory, placed by `sharding` (whatever its kind of memory), committed and typed as such.

    The caller has asked whether the library serves the platform. MemoryError, with the bytes asked for and those that
    the machine says it has, where the memory is short or cannot be pinned.
    """
    on_host = _compat.on_host(sharding)
    devices = on_host.device_set
    needed = math.prod(on_host.shard_shape(shape)) * dtype.itemsize
    is_gpu = next(iter(devices)).platform != "cpu"
    try:
        if is_gpu and len(devices) == 1 and needed > xla_limit_bytes() and dtype.name in _DLPACK_TYPES:
            return from_library(shape, dtype, on_host)
        return from_xla(shape, dtype, on_host)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        available = pinning.available_bytes()
        limit = (
            f", XLA's limit is {xla_limit_bytes()} ({pinning.LIMIT_VARIABLE}, read when jax starts)" if is_gpu else ""
        )
        raise MemoryError(
            f"a host pool of {needed} bytes a device cannot be had ({error}); the machine says "
            f"{'nothing of its memory' if available is None else f'{available} bytes are available'}{limit}; "
            "lower host_rows, or free host memory"
        ) from error


def from_xla(shape: tuple[int, ...], dtype: np.dtype, on_host: jax.sharding.Sharding) -> jax.Array:
    """Memory that XLA owns."""
    return program(shape, dtype, on_host)()


def program(shape: tuple[int, ...], dtype: np.dtype, on_host: jax.sharding.Sharding) -> Any:
    """The jitted function that makes `from_xla`'s array; each device makes its own part."""

    def make() -> jax.Array:
        return _ffi.zeros(_compat.allocated_on_host(on_host.shard_shape(shape), dtype))

    if isinstance(on_host, NamedSharding):
        mesh, spec = on_host.mesh, on_host.spec
        return jax.jit(
            jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False), out_shardings=on_host
        )
    return jax.jit(make, out_shardings=on_host)


def from_library(shape: tuple[int, ...], dtype: np.dtype, on_host: jax.sharding.Sharding) -> jax.Array:
    """Memory that the library owns, adopted by JAX; for one GPU and the element types of the record formats."""
    (device,) = on_host.device_set
    return _compat.adopt_on_host(_Pinned(shape, dtype, device.local_hardware_id), on_host)


def held_by_library() -> int:
    """Bytes that the library has pinned and not given back."""
    library = _ffi.opened()
    if isinstance(library, str):
        return 0
    library.EchoPinnedBytes.restype = ctypes.c_int64
    return library.EchoPinnedBytes()


def xla_limit_bytes() -> int:
    """What XLA's pinned memory may grow to in this process, if its backend started with the environment as it is."""
    return pinning.limit_gb() * 2**30


class _Pinned:
    """The library's tensor on its way to JAX, by the protocol of DLPack; given back if nobody takes it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, device: int):
        library: Any = _ffi.opened()
        library.EchoPinnedCreate.restype = ctypes.c_void_p
        library.EchoPinnedError.restype = ctypes.c_char_p
        code, bits = _DLPACK_TYPES[dtype.name]
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        self._library, self._device = library, device
        self._tensor = library.EchoPinnedCreate(sizes, len(shape), code, bits, device)
        if self._tensor is None:
            raise MemoryError(f"CUDA says {library.EchoPinnedError().decode()!r}")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DLPACK_CUDA_HOST, self._device)

    def __dlpack__(self, **_: Any) -> Any:
        """Hands the tensor over: from here on the capsule's taker gives it back."""
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype, new_capsule.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        tensor, self._tensor = self._tensor, None
        return new_capsule(tensor, b"dltensor", None)

    def __del__(self) -> None:
        if getattr(self, "_tensor", None) is not None:
            self._library.EchoPinnedRelease(ctypes.c_void_p(self._tensor))
