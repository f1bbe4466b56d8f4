"""Fixtures of the FFI tests: the built library, the devices it serves, and pools of both kinds of host memory.

The same tests run on a GPU: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/ffi
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _ffi, hostmem

CPU = jax.devices("cpu")[0]


@pytest.fixture
def library():
    """The library is there. Where a compiler is, its absence is a failure and not a reason to skip."""
    _needs_library("cpu", ("c++", "g++", "clang++"))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Each device that a test runs on: its arrays are there, those of `on_device` and those that nobody placed."""
    device = jax.devices(request.param)[0]
    with jax.default_device(device):
        yield device


@pytest.fixture(params=list(hostmem.HostMemory), ids=lambda memory: memory.value)
def memory(request, device):
    """Each kind of host memory of the device; the pinned one where the library is."""
    if request.param is hostmem.HostMemory.PINNED:
        _needs_library(device.platform, ("nvcc",) if device.platform == "gpu" else ("c++", "g++", "clang++"))
    return request.param


@pytest.fixture(params=list(hostmem.HostMemory), ids=lambda memory: memory.value)
def memory_of_four(request):
    """The same for the four CPU devices that tests of `shard_map` run on."""
    if request.param is hostmem.HostMemory.PINNED:
        request.getfixturevalue("library")
    return request.param


@pytest.fixture
def pool_of(memory, device):
    """Makes a host pool of the given NumPy array in `memory`, by the library's own way in."""

    def make(values: np.ndarray) -> jax.Array:
        pool = hostmem.create_pool(values.shape, values.dtype, memory, device)
        rows = np.arange(values.shape[1], dtype=np.int32)
        return jax.jit(hostmem.write_back, donate_argnums=0)(pool, on_device(values), on_device(rows))

    return make


def on_device(values) -> jax.Array:
    """`values`, committed as every array of a step is, and in memory of its own: donation is in place.

    On the device of the test, or the CPU. That device is JAX's own setting and no variable of this module: pytest has
    this module twice, once as a plugin and once imported by the tests.
    """
    return jax.device_put(jnp.array(values, copy=True), jax.config.jax_default_device or CPU)


def _needs_library(platform: str, compilers: tuple[str, ...]) -> None:
    reason = _ffi.why_unavailable(platform)
    if reason is None:
        return
    if any(shutil.which(compiler) for compiler in compilers):
        pytest.fail(f"there is a compiler, but no library: {reason}")
    pytest.skip(reason)


def check_choices(calls_library: Callable[[str], bool]) -> None:
    """Of an operation that the library and jnp both have, in a process without a GPU: `calls_library(implementation)`
    says whether its trace holds a call of the library."""
    assert calls_library("auto") and calls_library("ffi") and not calls_library("jnp")
    with pytest.raises(ValueError, match="'rdma' but must be one of auto, ffi, cuda, jnp"):
        calls_library("rdma")
    with pytest.raises(RuntimeError, match="'cuda' is not available: it needs a CUDA device but runs on 'cpu'"):
        calls_library("cuda")


def check_choices_without_the_library(calls_library: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_JAX_FFI", "0")
    assert not calls_library("auto")
    with pytest.raises(RuntimeError, match="'ffi' is not available: switched off by ECHO_JAX_FFI=0"):
        calls_library("ffi")
