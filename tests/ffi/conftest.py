"""Fixtures of the FFI tests: the built library, and pools of both kinds of host memory."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _ffi, hostmem

DEVICE = jax.devices("cpu")[0]


@pytest.fixture
def library():
    """The library is there. Where a compiler is, its absence is a failure and not a reason to skip."""
    reason = _ffi.why_unavailable("cpu")
    if reason is None:
        return
    if any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.fail(f"there is a C++ compiler, but no library: {reason}")
    pytest.skip(reason)


@pytest.fixture(params=list(hostmem.HostMemory), ids=lambda memory: memory.value)
def memory(request):
    """Each kind of host memory; the pinned one where the library is."""
    if request.param is hostmem.HostMemory.PINNED:
        request.getfixturevalue("library")
    return request.param


@pytest.fixture
def pool_of(memory):
    """Makes a host pool of the given NumPy array in `memory`, by the library's own way in."""

    def make(values: np.ndarray) -> jax.Array:
        pool = hostmem.create_pool(values.shape, values.dtype, memory, DEVICE)
        rows = np.arange(values.shape[1], dtype=np.int32)
        return jax.jit(hostmem.write_back, donate_argnums=0)(pool, on_device(values), on_device(rows))

    return make


def on_device(values) -> jax.Array:
    """`values`, committed as every array of a step is, and in memory of its own: donation is in place."""
    return jax.device_put(jnp.array(values, copy=True), DEVICE)
