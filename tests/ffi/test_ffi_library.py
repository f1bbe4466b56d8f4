"""The library as a thing that may be absent, old or misused: every answer names the reason and the remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _compat, _ffi, hostmem
from echo_jax.hostmem import HostMemory
from echo_jax.types import SOURCE_HOST
from tests.ffi.conftest import CPU
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
RECORD = (4,)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


# ---- absent ----------------------------------------------------------------------------------------------


def test_importing_loads_and_compiles_nothing():
    code = """
import sys, echo_jax._ffi, echo_jax.hostmem
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing started a backend"
assert echo_jax._ffi.opened.cache_info().currsize == 0, "importing loaded the library"
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("ECHO_JAX_FFI", "0")
    assert not _ffi.is_available()
    assert "ECHO_JAX_FFI=0" in str(_ffi.why_unavailable())
    assert hostmem.choose() is HostMemory.ORDINARY
    with pytest.raises(RuntimeError, match="'ffi' is not available: switched off by ECHO_JAX_FFI=0"):
        hostmem.choose(implementation="ffi")


def test_a_pinned_pool_is_refused_where_the_library_has_gone(library, monkeypatch):
    pool = hostmem.create_pool((1, 4, *RECORD), jnp.uint32, HostMemory.PINNED, CPU)
    monkeypatch.setenv("ECHO_JAX_FFI", "0")
    with pytest.raises(RuntimeError, match="only the library moves: switched off"):
        hostmem.read_rows(pool, 0, jnp.zeros((1,), jnp.int32))


def test_not_built(monkeypatch):
    """As after an install without a compiler: a reason and a command, and jnp does the work."""
    monkeypatch.setattr(_ffi, "library_path", lambda: None)
    monkeypatch.setattr(_ffi, "opened", _ffi.opened.__wrapped__)
    monkeypatch.setattr(_ffi, "_register", _ffi._register.__wrapped__)
    reason = str(_ffi.why_unavailable("cpu"))
    assert "was not built" in reason and "pip install" in reason
    assert hostmem.choose("cpu") is HostMemory.ORDINARY
    with pytest.raises(RuntimeError, match="pip install"):
        hostmem.choose("cpu", "ffi")


def test_a_platform_without_handlers():
    assert "'tpu'" in str(_ffi.why_unavailable("tpu"))
    assert hostmem.choose("tpu") is HostMemory.ORDINARY


def test_choices(library):
    assert hostmem.choose("cpu") is HostMemory.PINNED
    assert hostmem.choose("cpu", "ffi") is HostMemory.PINNED
    assert hostmem.choose("cpu", "jnp") is HostMemory.ORDINARY
    with pytest.raises(ValueError, match="'rdma' but must be one of auto, ffi, cuda, jnp"):
        hostmem.choose("cpu", "rdma")


# ---- old or foreign --------------------------------------------------------------------------------------


def build_impostor(folder: Path, version: int, major: int, minor: int) -> Path:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler to build a library of the wrong version")
    source, library = folder / "impostor.cc", folder / "impostor.so"
    source.write_text(
        'extern "C" {\n'
        f"int EchoLibraryVersion() {{ return {version}; }}\n"
        f"int EchoXlaFfiApiMajor() {{ return {major}; }}\n"
        f"int EchoXlaFfiApiMinor() {{ return {minor}; }}\n}}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=HANG_S)
    return library


def test_wrong_library_version_is_refused(tmp_path):
    path = build_impostor(tmp_path, _ffi.LIBRARY_VERSION + 6, 0, 1)
    wrong, right = _ffi.LIBRARY_VERSION + 6, _ffi.LIBRARY_VERSION
    with pytest.raises(RuntimeError, match=f"is version {wrong} but this echo_jax needs version {right}; rebuild"):
        _ffi.open_library(path)


@pytest.mark.parametrize("step", [(1, 0), (0, 1)], ids=["other_major", "newer_minor"])
def test_wrong_xla_ffi_version_is_refused(tmp_path, step):
    installed = _compat.xla_ffi_api_version()
    assert installed is not None
    major, minor = installed[0] + step[0], installed[1] + step[1]
    path = build_impostor(tmp_path, _ffi.LIBRARY_VERSION, major, minor)
    with pytest.raises(RuntimeError, match=rf"XLA FFI {major}\.{minor} but .* {installed[0]}\.{installed[1]}; rebuild"):
        _ffi.open_library(path)


def test_a_refused_library_is_a_reason_not_a_crash(tmp_path, monkeypatch):
    path = build_impostor(tmp_path, _ffi.LIBRARY_VERSION + 1, 0, 1)
    monkeypatch.setattr(_ffi, "library_path", lambda: path)
    monkeypatch.setattr(_ffi, "opened", _ffi.opened.__wrapped__)
    monkeypatch.setattr(_ffi, "_register", _ffi._register.__wrapped__)
    assert "rebuild it with" in str(_ffi.why_unavailable("cpu"))
    assert hostmem.choose("cpu") is HostMemory.ORDINARY


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libecho_ffi.so"
    path.write_bytes(b"not a library")
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        _ffi.open_library(path)


def test_installed_library_matches_the_sources(library):
    """The header and the Python border hold the same numbers; a change of one alone fails here."""
    header = (ROOT / "ffi" / "include" / "echo_ffi" / "targets.h").read_text()
    assert f"kLibraryVersion = {_ffi.LIBRARY_VERSION};" in header
    assert f"kSourceHost = {SOURCE_HOST};" in header
    path = _ffi.library_path()
    assert path is not None
    opened = _ffi.open_library(path)
    assert (opened.EchoXlaFfiApiMajor(), opened.EchoXlaFfiApiMinor()) == _compat.xla_ffi_api_version()


# ---- misused ---------------------------------------------------------------------------------------------
# The library is called on ordinary arrays here: its handlers do not care where a buffer lies.

POOL = np.arange(2 * 6 * 4, dtype=np.uint32).reshape(2, 6, 4)
RECORDS = np.zeros((3, 4), np.uint32)
EXTRA = np.zeros((2, 4), np.uint32)


def numbers(*values):
    return jnp.asarray(values, jnp.int32)


def recall(
    records=RECORDS,
    pool=POOL,
    layer=0,
    count=1,
    host_rows=(1,),
    slots=(1,),
    source=(-1,),
    new=EXTRA[:1],
    staged=EXTRA[1:],
):
    return _ffi.recall(
        jnp.asarray(records),
        jnp.asarray(pool),
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(count, jnp.int32),
        numbers(*host_rows),
        numbers(*slots),
        numbers(*source),
        jnp.asarray(new),
        jnp.asarray(staged),
    )


WRONG_RECALLS = {
    "layer_too_high": (dict(layer=2), "layer is 2 but host_pool holds layers 0 to 1"),
    "layer_negative": (dict(layer=-1), "layer is -1 but host_pool holds layers 0 to 1"),
    "layer_not_scalar": (dict(layer=[0, 1]), "layer has shape [2] but must be a scalar"),
    "row_too_high": (dict(host_rows=(6,)), "host_rows[0] is 6 but host_pool holds 6 rows"),
    "row_of_a_skipped_entry": (
        dict(host_rows=(6,), slots=(-1,)),
        "host_rows[0] is 6 but host_pool holds 6 rows",
    ),
    "slot_too_high": (dict(slots=(3,)), "slots[0] is 3 but records holds 3 rows"),
    "count_too_high": (dict(count=2), "count is 2 but the lists hold 1 entries"),
    "count_not_scalar": (dict(count=[1, 1]), "count has shape [2] but must be a scalar"),
    "source_too_high": (dict(source=(2,)), "source[0] is 2 but new and staged hold 2 rows"),
    "source_negative": (dict(source=(-2,)), "source[0] is -2 but new and staged hold 2 rows"),
    "source_of_nothing": (
        dict(source=(0,), new=EXTRA[:0], staged=EXTRA[:0]),
        "source[0] is 0 but new and staged hold 0 rows",
    ),
    "lists_of_two_lengths": (dict(slots=(1, 2)), "host_rows has length 1 but slots has length 2"),
    "source_length": (dict(source=(-1, -1)), "host_rows has length 1 but source has length 2"),
    "record_shapes": (dict(records=np.zeros((3, 2, 2), np.uint32)), "record shapes must be equal"),
    "new_shape": (dict(new=np.zeros((2, 8), np.uint32)), "record shapes must be equal"),
    "staged_shape": (dict(staged=np.zeros((2, 8), np.uint32)), "record shapes must be equal"),
    "record_types": (dict(records=RECORDS.view(np.float32)), "element type"),
    "no_record": (dict(records=np.zeros((3,), np.uint32)), "needs 1 leading dimensions and a record shape"),
    "pool_of_two_axes": (dict(pool=POOL[0]), "needs 2 leading dimensions and a record shape"),
    "half_words": (
        dict(
            records=np.zeros((3, 3), np.uint16),
            pool=np.zeros((2, 6, 3), np.uint16),
            new=np.zeros((2, 3), np.uint16),
            staged=np.zeros((2, 3), np.uint16),
        ),
        "has 6 bytes, not a multiple of 4",
    ),
}


@pytest.mark.parametrize("arguments, message", WRONG_RECALLS.values(), ids=WRONG_RECALLS.keys())
def test_recall_refuses(library, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        recall(**arguments).block_until_ready()
    assert "INVALID_ARGUMENT" in str(caught.value) and "echo_recall: " in str(caught.value)
    assert message in str(caught.value)


def test_recall_accepts_what_is_right(library):
    """The arguments that the wrong ones differ from by one thing each."""
    np.testing.assert_array_equal(np.asarray(recall())[1], POOL[0, 1])


pool = jnp.asarray
WRONG_CALLS = {
    "read_row": (lambda: _ffi.read_rows(pool(POOL), jnp.int32(0), numbers(0, 6)), "rows[1] is 6"),
    "read_layer": (lambda: _ffi.read_rows(pool(POOL), jnp.int32(9), numbers(0)), "layer is 9"),
    "read_second_layer": (
        lambda: _ffi.read_rows(pool(POOL), numbers(0, -1), numbers(0, 1).reshape(2, 1)),
        "layer[1] is -1 but host_pool holds layers 0 to 1",
    ),
    "read_uneven": (
        lambda: _ffi.read_rows(pool(POOL), numbers(0, 1), numbers(0, 1, 2)),
        "rows has length 3 but layer has length 2",
    ),
    "read_no_layer": (
        lambda: _ffi.read_rows(pool(POOL), numbers(), numbers(0)),
        "rows has length 1 but layer has length 0",
    ),
    "write_row": (
        lambda: _ffi.write_back(pool(POOL), jnp.zeros((2, 1, 4), jnp.uint32), numbers(6)),
        "rows[0] is 6 but host_pool holds 6 rows",
    ),
    "write_layers": (
        lambda: _ffi.write_back(pool(POOL), jnp.zeros((3, 1, 4), jnp.uint32), numbers(0)),
        "axis 0 of records has length 3 but axis 0 of host_pool has length 2",
    ),
    "write_length": (
        lambda: _ffi.write_back(pool(POOL), jnp.zeros((2, 2, 4), jnp.uint32), numbers(0)),
        "axis 1 of records has length 2 but rows has length 1",
    ),
    "copy_target": (lambda: _ffi.copy_rows(pool(POOL), numbers(0), numbers(6)), "target[0] is 6"),
    "copy_source": (lambda: _ffi.copy_rows(pool(POOL), numbers(7), numbers(0)), "source[0] is 7"),
    "copy_lengths": (lambda: _ffi.copy_rows(pool(POOL), numbers(0, 1), numbers(2)), "source has length 2"),
    "copy_target_twice": (
        lambda: _ffi.copy_rows(pool(POOL), numbers(0, 1), numbers(3, 3)),
        "row 3 is a target twice",
    ),
    "copy_chain": (
        lambda: _ffi.copy_rows(pool(POOL), numbers(0, 1), numbers(1, 2)),
        "row 1 is both a source and a target",
    ),
}


@pytest.mark.parametrize("call, message", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_calls_refuse(library, call, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call().block_until_ready()
    assert "INVALID_ARGUMENT" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        ((2, 6), jnp.float32, "has 2 axes but needs layers, rows and a record shape"),
        ((2, 6, 3), jnp.bfloat16, r"has 6 bytes, not a multiple of 4"),
    ],
    ids=["no_record", "half_words"],
)
def test_create_pool_refuses(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        hostmem.create_pool(shape, dtype, HostMemory.ORDINARY)


def zeros(*shape: int, dtype: Any = jnp.uint32) -> Any:
    return np.zeros(shape, dtype)


AT_THE_DOOR = {  # of a pool u32[2, 6, 4]
    "recall_records": (
        lambda pool: hostmem.recall(
            zeros(3, 5), pool, 0, jnp.int32(1), numbers(1), numbers(1), numbers(1), zeros(1, 4), zeros(1, 4)
        ),
        r"records is uint32[3, 5], records behind 1 axes, but host_pool is uint32[2, 6, 4]",
    ),
    "recall_type": (
        lambda pool: hostmem.recall(
            zeros(3, 4),
            pool,
            0,
            jnp.int32(1),
            numbers(1),
            numbers(1),
            numbers(1),
            zeros(1, 4, dtype=float),
            zeros(1, 4),
        ),
        r"new is float64[1, 4], records behind 1 axes, but host_pool is uint32[2, 6, 4]",
    ),
    "recall_lists": (
        lambda pool: hostmem.recall(
            zeros(3, 4), pool, 0, jnp.int32(1), numbers(1), numbers(1), numbers(1, 2), zeros(1, 4), zeros(1, 4)
        ),
        "host_rows has length 1 but source has length 2",
    ),
    "recall_count": (
        lambda pool: hostmem.recall(
            zeros(3, 4), pool, 0, numbers(1), numbers(1), numbers(1), numbers(1), zeros(1, 4), zeros(1, 4)
        ),
        "count has shape [1] but must be a scalar",
    ),
    "read_layer": (
        lambda pool: hostmem.read_rows(pool, numbers(0, 1), numbers(1)),
        "layer has shape [2] but rows is int32[1]; give one layer and a list",
    ),
    "read_layers": (
        lambda pool: hostmem.read_rows(pool, numbers(0, 1), numbers(1, 2, 3).reshape(3, 1)),
        "layer has shape [2] but rows is int32[3, 1]",
    ),
    "read_list": (
        lambda pool: hostmem.read_rows(pool, 0, jnp.zeros((1,), jnp.uint32)),
        "rows is uint32[1] but must be a list, int32[M]",
    ),
    "write_layers": (
        lambda pool: hostmem.write_back(pool, zeros(3, 1, 4), numbers(0)),
        "records are [3 layers, 1 rows] but host_pool has 2 layers and rows has length 1",
    ),
    "write_length": (
        lambda pool: hostmem.write_back(pool, zeros(2, 2, 4), numbers(0)),
        "records are [2 layers, 2 rows] but host_pool has 2 layers and rows has length 1",
    ),
    "copy_lengths": (
        lambda pool: hostmem.copy_rows(pool, numbers(0, 1), numbers(2)),
        "source has length 2 but target has length 1",
    ),
}


@pytest.mark.parametrize("call, message", AT_THE_DOOR.values(), ids=AT_THE_DOOR.keys())
def test_shapes_are_refused_before_anything_is_launched(memory, device, call, message):
    """A refusal that reached XLA from a handler on a GPU ended the process there."""
    pool = hostmem.create_pool((2, 6, 4), jnp.uint32, memory, device)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(call)(pool)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(pool)


def test_a_foreign_pool_of_half_words_is_refused(library):
    """One that create_pool did not make."""
    on_host = jax.sharding.SingleDeviceSharding(CPU, memory_kind="pinned_host")
    pool = jax.device_put(np.zeros((2, 6, 3), np.uint16), on_host)
    with pytest.raises(ValueError, match="has 6 bytes, not a multiple of 4; pad the record"):
        hostmem.read_rows(pool, 0, numbers(1))


def test_create_pool_is_zero_and_committed(memory, device):
    made = hostmem.create_pool((2, 3, 4), jnp.bfloat16, memory, device)
    assert made.committed and made.devices() == {device} and hostmem.memory_of(made) is memory
    assert not np.asarray(made).view(np.uint16).any()
