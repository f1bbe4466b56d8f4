"""Compiles a jitted function for an H200 on a machine that has none: all of XLA's GPU passes, Mosaic, ptxas.

It knows the CUDA plug-in's device-less client, the two environments it listens to, and how to read what ptxas says.
It does not know what is compiled. Two clients take part: the function is lowered for the CPU client, which knows
`pinned_host`, and compiled by the H200's, whose devices know no kinds of memory.

There is no GEMM autotuning and no CUB without a device, so nothing here says how fast the result is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

# Where the Makefile puts the CUDA plug-in; tests/conftest.py does the same for pytest, before jax starts.
_PLUGIN = os.path.join(sys.prefix, "compile-only")
if os.path.isdir(_PLUGIN) and _PLUGIN not in sys.path:
    sys.path.append(_PLUGIN)

TARGET = Path(__file__).resolve().parent / "h200.txtpb"


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """What ptxas gave one Mosaic kernel."""

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int  # as launched, dynamic shared memory included


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One executable for the H200.

    text      the optimised HLO; host memory shows as layout {..:S(5)}
    memory    jaxlib's CompiledMemoryStats: alias_size_in_bytes, temp_size_in_bytes, host_temp_size_in_bytes, ...
    kernels   the Mosaic kernels in it
    thunks    XLA's thunk sequences after its passes, the command buffers' contents included; empty if no command
              buffer was formed (the HLO text does not mention them)
    files     name -> text of everything that was dumped: .ptx, .ptxas, HLO
    """

    text: str
    memory: Any
    kernels: tuple[KernelResources, ...]
    thunks: str
    files: Mapping[str, str]
    executable: Any

    def assert_no_spills(self) -> None:
        """Fails, with the numbers, if a Mosaic kernel spills; prints registers and shared memory of each."""
        assert self.kernels, "no Mosaic kernel was compiled"
        for kernel in self.kernels:
            print(f"{kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared memory")
            spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
            assert spilled == 0, f"{kernel.name} spills {spilled} bytes at {kernel.registers} registers"


def why_not() -> str | None:
    """Why nothing can be compiled for the H200 here, or None: the reason for a test to skip."""
    if not _is_installed("jax_plugins.xla_cuda13"):
        return "needs the CUDA plug-in (jax-cuda13-plugin, jax-cuda13-pjrt; --no-deps is enough)"
    if shutil.which("ptxas") is None:
        return "needs ptxas of CUDA 13 on PATH"
    return None


def _is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it. `find_spec` raises where its package is absent, too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def need_cuda_handlers() -> None:
    """The library's CUDA handlers, without which XLA does not know whether a call may join a graph. Where a CUDA
    compiler is, their absence is a failure and not a reason to skip."""
    import pytest

    from echo_jax import _ffi

    try:
        _ffi.register_for("gpu")
    except RuntimeError as error:
        if shutil.which("nvcc"):
            pytest.fail(f"there is a CUDA compiler, but no handlers: {error}")
        pytest.skip(str(error))


def device(shape: Sequence[int], dtype: Any, mesh: jax.sharding.Mesh | None = None) -> jax.ShapeDtypeStruct:
    """An argument in device memory; with a mesh of `cpu_mesh`, replicated over it."""
    sharding = NamedSharding(mesh or cpu_mesh(1), PartitionSpec())
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def host(shape: Sequence[int], dtype: Any, mesh: jax.sharding.Mesh | None = None) -> jax.ShapeDtypeStruct:
    """An argument in pinned host memory."""
    sharding = NamedSharding(mesh or cpu_mesh(1), PartitionSpec(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


@functools.cache
def cpu_mesh(devices: int, axis: str = "x") -> jax.sharding.Mesh:
    """The mesh to lower on: as many CPU devices as GPUs are meant."""
    return jax.make_mesh((devices,), (axis,), axis_types=(jax.sharding.AxisType.Auto,), devices=_cpus(devices))


def compile_for_h200(
    function: Callable[..., Any],
    *arguments: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    out_shardings: Any = None,
    devices: int = 1,
    flags: Mapping[str, Any] | None = None,
) -> Compiled:
    """`jax.jit(function)` for these arguments, compiled for sm_90a; raises what XLA, Mosaic or ptxas raise.

    `arguments` are pytrees of arrays or shape structs; those without a sharding are taken to be in device memory. A
    function that is jitted already is taken as it is. `flags` are XLA's, as {"xla_gpu_graph_level": 0}.
    """
    from jax._src import compiler

    arguments = tuple(
        argument if index in _numbers(static_argnums) else jax.tree.map(_placed, argument)
        for index, argument in enumerate(arguments)
    )
    if not hasattr(function, "trace"):
        placed = {} if out_shardings is None else {"out_shardings": out_shardings}
        function = jax.jit(function, donate_argnums=donate_argnums, static_argnums=static_argnums, **placed)
    lowered: Any = function.trace(*arguments).lower(lowering_platforms=("cuda",))  # pyright: ignore
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **(flags or {})}
        options = compiler.get_compile_options(num_replicas=1, num_partitions=devices, env_options_overrides=dumps)
        with _environment(MOSAIC_GPU_DUMP_TO=folder, MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1"):
            executable = _compile(lowered.compiler_ir("stablehlo"), options, devices)
        files = {
            path.name: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(Path(folder).iterdir())
            if path.is_file()
        }
    thunks = "\n".join(text for name, text in files.items() if name.endswith("thunk_sequence_after_thunk_passes.txt"))
    return Compiled(
        text=executable.hlo_modules()[0].to_string(),
        memory=executable.get_compiled_memory_stats(),
        kernels=_kernels(files),
        thunks=thunks,
        files=files,
        executable=executable,
    )


def _compile(module: Any, options: Any, devices: int) -> Any:
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    chosen = _topology(devices).devices[:devices]
    return chosen[0].client.compile(module, xla_client.DeviceList(tuple(chosen)), options)


@functools.cache
def _topology(devices: int) -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(encoding="utf-8"), topology=f"1x1x{devices}"
    )


def _placed(argument: Any) -> Any:
    if isinstance(getattr(argument, "sharding", None), NamedSharding):
        return argument
    return device(argument.shape, argument.dtype)


def _cpus(count: int) -> list[Any]:
    return jax.devices("cpu")[:count]


def _numbers(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _kernels(files: Mapping[str, str]) -> tuple[KernelResources, ...]:
    """From ptxas's report; the shared memory of the launch from the first form of the kernel's MLIR."""
    found = []
    for name, text in files.items():
        if name.endswith(".ptxas"):
            report = re.search(
                r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
                text,
                re.DOTALL,
            )
            if report is None:
                raise ValueError(f"{name} is no report of ptxas: {text!r}")
            passes = files.get(name.removesuffix(".ptxas") + ".mlir-passes.log", "")
            kernel, stores, loads, registers = report.groups()
            shared = _shared_bytes(passes)
            found.append(KernelResources(kernel, int(registers), int(stores), int(loads), shared))
    return tuple(found)


def _shared_bytes(passes: str) -> int:
    launch = re.search(r"gpu\.launch.*dynamic_shared_memory_size (%\w+)", passes)
    if launch is None:
        return 0
    constant = re.search(rf"{re.escape(launch[1])} = arith\.constant (\d+)", passes)
    return int(constant[1]) if constant else 0


class _environment:
    """Environment variables for the length of a `with`; Mosaic reads them at each compile."""

    def __init__(self, **variables: str):
        self.variables = variables
        self.before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
