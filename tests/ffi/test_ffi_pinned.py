"""Pinned memory: whose it is, what a failure says, and that nothing stays behind. What needs a GPU is marked."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _ffi, _pinned, hostmem, pinning
from echo_jax.hostmem import HostMemory
from tests.ffi.conftest import CPU
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SHAPE, DTYPE = (2, 6, 4), np.dtype(np.uint32)


def refuse(*_):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1234567 bytes.")


def test_short_memory_is_refused_with_numbers(library, monkeypatch):
    monkeypatch.setattr(_pinned, "from_xla", refuse)
    monkeypatch.setattr(pinning, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError) as caught:
        hostmem.create_pool(SHAPE, DTYPE, HostMemory.PINNED, CPU)
    said = str(caught.value)
    assert "host pool of 192 bytes" in said and "says 1000 bytes are available" in said
    assert "allocating 1234567 bytes" in said and "lower host_rows" in said and "XLA's limit" not in said


def test_more_than_any_machine_has(library):
    """The real thing: XLA's refusal arrives as ours, and the process goes on."""
    with pytest.raises(MemoryError, match="lower host_rows, or free host memory"):
        hostmem.create_pool((4, 2**36, 256), DTYPE, HostMemory.PINNED, CPU)
    assert not np.asarray(hostmem.create_pool(SHAPE, DTYPE, HostMemory.PINNED, CPU)).any()


def test_another_error_stays_itself(library, monkeypatch):
    def fail(*_):
        raise RuntimeError("INTERNAL: something else")

    monkeypatch.setattr(_pinned, "from_xla", fail)
    with pytest.raises(RuntimeError, match="INTERNAL: something else"):
        hostmem.create_pool(SHAPE, DTYPE, HostMemory.PINNED, CPU)


def test_a_pinned_pool_needs_the_library(monkeypatch):
    monkeypatch.setenv("ECHO_JAX_FFI", "0")
    with pytest.raises(RuntimeError, match="made by the library only: switched off"):
        hostmem.create_pool(SHAPE, DTYPE, HostMemory.PINNED, CPU)


class Gpu:
    platform, local_hardware_id = "gpu", 0


class OnGpu:
    """A placement on so many GPUs, as far as `zeros` looks at it."""

    def __init__(self, count: int):
        self.device_set = {Gpu() for _ in range(count)}

    def with_memory_kind(self, _kind: str) -> OnGpu:
        return self

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


@pytest.mark.parametrize(
    "gib, limit, gpus, dtype, owner",
    [
        (64, None, 1, "uint32", "xla"),  # as far as XLA's memory reaches by itself
        (65, None, 1, "uint32", "library"),
        (65, "70", 1, "uint32", "xla"),
        (3, "2", 1, "bfloat16", "library"),
        (65, None, 2, "uint32", "xla"),  # the library pins for one GPU
        (65, None, 1, "float8_e4m3fn", "xla"),  # and for the types that DLPack has
    ],
)
def test_whose_memory(monkeypatch, gib, limit, gpus, dtype, owner):
    if limit is None:
        monkeypatch.delenv(pinning.LIMIT_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(pinning.LIMIT_VARIABLE, limit)
    monkeypatch.setattr(_pinned, "from_xla", lambda *_: "xla")
    monkeypatch.setattr(_pinned, "from_library", lambda *_: "library")
    dtype = jnp.dtype(dtype)
    shape = (1, gib * 2**20 // dtype.itemsize, 1024)
    placement: jax.sharding.Sharding = OnGpu(gpus)  # pyright: ignore[reportAssignmentType]
    assert _pinned.zeros(shape, dtype, placement) == owner


def test_the_library_fails_cleanly_without_a_gpu():
    if not hasattr(_ffi.opened(), "EchoPinnedCreate"):
        pytest.skip("the library was built without CUDA")
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(MemoryError, match="CUDA says"):
        _pinned._Pinned(SHAPE, DTYPE, 0)
    assert _pinned.held_by_library() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "uint32", "float32"])
def test_memory_of_the_library(name):
    """Exactly the bytes asked for; in place through donations; given back with the last array."""
    device, shape = jax.devices("gpu")[0], (4, 1000, 64)
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    held = _pinned.held_by_library()
    pool = _pinned.from_library(shape, jnp.dtype(name), on_host)
    size = pool.nbytes
    assert _pinned.held_by_library() == held + size
    assert hostmem.memory_of(pool) is HostMemory.PINNED and pool.committed and pool.sharding == on_host
    assert not hostmem.as_numpy(pool).any()
    pointer = pool.unsafe_buffer_pointer()
    write = jax.jit(lambda *arguments: hostmem.write_back(*arguments), donate_argnums=0)  # a compile count of its own
    for step in range(20):
        records = jnp.full((4, 1, 64), step + 1, pool.dtype)
        pool = write(pool, records, np.asarray([step], np.int32))
        assert pool.unsafe_buffer_pointer() == pointer
    assert write._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    expected = np.zeros(shape, np.float32)
    expected[:, :20] = np.arange(1, 21, dtype=np.float32)[None, :, None]
    np.testing.assert_array_equal(hostmem.as_numpy(pool).astype(np.float32), expected)
    assert _pinned.held_by_library() == held + size
    jax.block_until_ready(pool)
    del pool
    # XLA lets go of a buffer on a thread of its own, after the last program that had it. What such a thread drops of
    # Python's, jaxlib keeps until Python's collector runs, and a sleep alone never runs it.
    deadline = time.monotonic() + HANG_S
    gc.collect()
    while _pinned.held_by_library() != held and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    assert _pinned.held_by_library() == held, f"held after its arrays have gone; {holders_of(shape)}"


def holders_of(shape: tuple[int, ...]) -> str:
    """Which arrays of a shape are still there, and what kind of Python object has each."""
    found = [array for array in jax.live_arrays() if array.shape == shape]
    kinds = [sorted({type(by).__name__ for by in gc.get_referrers(array) if by is not found}) for array in found]
    return f"JAX's arrays of its shape: {kinds}" if found else "no array of JAX has its shape: a buffer below them"


@pytest.mark.gpu
def test_what_cannot_be_pinned_leaves_nothing_pinned():
    on_host = jax.sharding.SingleDeviceSharding(jax.devices("gpu")[0], memory_kind="pinned_host")
    held = _pinned.held_by_library()
    with pytest.raises(MemoryError, match="CUDA says 'out of memory'"):
        _pinned.from_library((4, 2**36, 256), DTYPE, on_host)
    assert _pinned.held_by_library() == held
    assert not np.asarray(_pinned.from_library(SHAPE, DTYPE, on_host)).any()


@pytest.mark.gpu
def test_no_crash_at_exit():
    """Arrays that are alive when Python ends: their deleter is called after Python has gone."""
    code = """
import jax, numpy as np
from echo_jax import _ffi, _pinned
assert _ffi.why_unavailable("gpu") is None
on_host = jax.sharding.SingleDeviceSharding(jax.devices("gpu")[0], memory_kind="pinned_host")
kept = _pinned.from_library((2, 64, 64), np.dtype(np.uint32), on_host)
on_its_way = _pinned._Pinned((2, 3, 4), np.dtype(np.uint32), 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
