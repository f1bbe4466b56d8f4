"""The CUDA half of the library on a machine without a GPU: it compiles, loads, registers, and keeps pools in place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax import _ffi, _pinned, hostmem
from tests.aot import compile as aot
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "ffi" / "src").glob("*.cu")), *sorted((ROOT / "bench").glob("*.cu"))]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which is not on PATH")


@pytest.fixture(scope="module")
def cuda_library():
    aot.need_cuda_handlers()


# ---- compiled --------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_kernels_compile_without_warnings_or_spills(source, tmp_path):
    """The GPU's half of a source, warnings being errors; the library's kernels keep what they move in registers.

    The host's half is compiled by the install, and takes three times as long: XLA's headers are in it.
    """
    command = [
        *("nvcc", "-std=c++17", "-O3", "-arch=sm_90a", '-DECHO_CUDA_ARCHITECTURES="90a"', "-Xptxas=-v"),
        *("-I", str(ROOT / "ffi" / "include"), "-I", str(ROOT / "ffi" / "src"), "-isystem", jax.ffi.include_dir()),
        *("--Werror=all-warnings", "-cubin", str(source), "-o", str(tmp_path / "kernels.cubin")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    if source.parent.name == "src":
        assert spilled and max(spilled) == 0, done.stderr


@needs_nvcc
def test_an_nvcc_that_cannot_compile_does_not_break_the_install(tmp_path):
    """CMake ends the build where its own test of a compiler fails, so a compiler is tried before CMake meets it."""
    cmake = shutil.which("cmake") or shutil.which(str(Path(sys.executable).parent / "cmake"))
    if cmake is None:
        pytest.skip("needs cmake, which is neither on PATH nor in the environment")
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'Unsupported gpu architecture compute_90a' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = subprocess.run(
        [cmake, "-S", str(ROOT / "ffi"), "-B", str(tmp_path / "build"), f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, "CUDACXX": str(broken)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert f"{broken} cannot compile for sm_90a (Unsupported gpu architecture compute_90a" in said
    assert "building the CPU handlers only" in said and "set CUDACXX" in said


# ---- loaded ----------------------------------------------------------------------------------------------


def test_registers_without_a_gpu(cuda_library):
    """What ahead-of-time compiles rely on; the library holds code for the GPU it is meant for."""
    assert _ffi.why_unavailable("gpu") is None and _ffi.why_unavailable("cuda") is None
    library = _ffi.opened()
    assert not isinstance(library, str) and _ffi.cuda_architectures(library) == ("90a",)


def gpu(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="some GPU")


@pytest.mark.parametrize(
    "architectures, capability, runs",
    [
        (("90a",), "9.0", True),
        (("90a",), "8.0", False),
        (("90a",), "10.0", False),  # an architecture with a letter runs nowhere else, later generations included
        (("90a", "100a"), "10.0", True),
        (("80",), "8.6", True),
        (("86",), "8.0", False),
        (("80",), "9.0", False),
        (("80-real",), "8.9", True),
    ],
)
def test_another_gpu_is_refused(architectures, capability, runs):
    reason = _ffi._why_other_gpu(architectures, [gpu(capability)])
    assert (reason is None) == runs
    if reason is not None:
        number = capability.replace(".", "")
        assert f"built for sm_{architectures[0]}" in reason and f"this GPU is sm_{number} (some GPU)" in reason
        assert f"ECHO_CUDA_ARCHITECTURES={number}" in reason


def test_one_other_gpu_among_several_is_refused():
    assert "sm_80" in str(_ffi._why_other_gpu(("90a",), [gpu("9.0"), gpu("8.0")]))
    assert _ffi._why_other_gpu(("90a",), jax.devices("cpu")) is None


def test_cuda_by_name_needs_a_cuda_device(library):
    with pytest.raises(
        RuntimeError, match="host memory 'cuda' is not available: it needs a CUDA device but runs on 'cpu'"
    ):
        hostmem.choose("cpu", "cuda")


def test_cuda_by_name_is_the_library(cuda_library):
    assert hostmem.choose("gpu", "cuda") is hostmem.HostMemory.PINNED
    assert hostmem.choose("gpu", "auto") is hostmem.HostMemory.PINNED


def test_built_without_cuda(monkeypatch):
    """As where nvcc was not found: the command that builds the handlers, and jnp does the work."""

    class Library:
        EchoCudaArchitectures = type("Function", (), {"restype": None, "__call__": lambda self: b""})()

    monkeypatch.setattr(_ffi, "opened", Library)
    monkeypatch.setattr(_ffi, "_register", _ffi._register.__wrapped__)
    reason = str(_ffi.why_unavailable("gpu"))
    assert "built without CUDA handlers, as where no nvcc is found" in reason and "export CUDACXX=" in reason
    assert hostmem.choose("gpu") is hostmem.HostMemory.ORDINARY
    with pytest.raises(RuntimeError, match="CUDACXX"):
        hostmem.choose("gpu", "cuda")


# ---- compiled for an H200 --------------------------------------------------------------------------------

LAYERS, HOST_ROWS, SLOTS, RECORD = 4, 4096, 512, (3, 192)
needs_plugin = pytest.mark.skipif(aot.why_not() is not None, reason=aot.why_not() or "")


def numbers(*shape):
    return aot.device(shape, jnp.int32)


def on_device(*shape):
    return aot.device((*shape, *RECORD), jnp.bfloat16)


POOL = aot.host((LAYERS, HOST_ROWS, *RECORD), jnp.bfloat16)
POOL_BYTES = LAYERS * HOST_ROWS * 1152
CALLS = {
    "recall": (
        hostmem.recall,
        (on_device(SLOTS), POOL, numbers(), numbers(), *(numbers(64),) * 3, on_device(8), on_device(0)),
        (SLOTS * 1152, 0),
    ),
    "write_back": (hostmem.write_back, (POOL, on_device(LAYERS, 16), numbers(16)), (0, POOL_BYTES)),
    "copy_rows": (hostmem.copy_rows, (POOL, numbers(16), numbers(16)), (0, POOL_BYTES)),
}


def copies_a_pool(text: str) -> bool:
    return re.search(rf"\[{LAYERS},{HOST_ROWS},[0-9,]*\]\S* copy", text) is not None


@needs_plugin
@pytest.mark.parametrize("function, arguments, aliased", CALLS.values(), ids=CALLS.keys())
def test_in_place(cuda_library, function, arguments, aliased):
    compiled = aot.compile_for_h200(function, *arguments, donate_argnums=0)
    memory = compiled.memory
    assert (memory.alias_size_in_bytes, memory.host_alias_size_in_bytes) == aliased
    assert memory.temp_size_in_bytes < 1024 and memory.host_temp_size_in_bytes == 0
    assert not copies_a_pool(compiled.text)


@needs_plugin
@pytest.mark.parametrize("read_ahead", [False, True])
def test_a_step_is_one_graph(cuda_library, read_ahead):
    """Recalls of all layers and one tied write: everything in one command buffer, and no pool is copied."""

    def step(records, pool, count, rows, slots, source, new):
        none = new[:0]
        filled = tuple(
            hostmem.recall(records[layer], pool, layer, count, rows, slots, source, new, none)
            for layer in range(LAYERS)
        )
        ahead = hostmem.read_rows(pool, 1, rows) if read_ahead else new
        pool, filled, ahead = jax.lax.optimization_barrier((pool, filled, ahead))
        made = jnp.stack([layer_records[:8] + ahead[:8] for layer_records in filled])
        return filled, hostmem.write_back(pool, made, rows[:8])

    records = tuple(on_device(SLOTS) for _ in range(LAYERS))
    compiled = aot.compile_for_h200(
        step, records, POOL, numbers(), *(numbers(64),) * 3, on_device(8), donate_argnums=(0, 1)
    )
    assert compiled.thunks.count("kCommandBuffer") == 1
    outside = [
        line for line in compiled.thunks.splitlines() if re.match(r"\d+:", line) and "kCommandBuffer" not in line
    ]
    assert outside == [], compiled.thunks
    assert compiled.memory.host_temp_size_in_bytes == 0 and not copies_a_pool(compiled.text)
    assert compiled.memory.host_alias_size_in_bytes == POOL_BYTES


@needs_plugin
@pytest.mark.parametrize("devices", [1, 2])
def test_a_pool_is_made_on_the_host_alone(cuda_library, devices):
    """90 GiB with neither a copy on the device nor a second one on the host."""
    mesh = aot.cpu_mesh(devices)
    placements = {
        1: jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host"),
        2: NamedSharding(mesh, PartitionSpec(None, "x"), memory_kind="pinned_host"),
    }
    rows = 1_376_256
    make = _pinned.program((61, rows, *RECORD), jnp.dtype(jnp.bfloat16), placements[devices])
    memory = aot.compile_for_h200(make, devices=devices).memory
    assert memory.host_output_size_in_bytes == 61 * rows * 1152 // devices
    assert memory.host_temp_size_in_bytes == 0 and memory.temp_size_in_bytes < 64 * 1024
