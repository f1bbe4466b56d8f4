"""How long a jitted function takes on the GPU: its kernels one by one, calls that follow each other, and copies.

It knows CUPTI as jax's Mosaic GPU profiler reaches it, the size of the L2, and the clock. It does not know what is
timed or what becomes of the numbers (bench/harness.py). Every duration is in microseconds. Importing it needs no GPU.

Three questions, three functions:

    kernel_times    what the GPU spends in each kernel of one call, launches and gaps left out
    chain_time      what one call costs among calls that follow each other without a wait, launches and gaps included
    graph_time      the same inside one CUDA graph: many calls in one program, less the program without them

Before each call of `kernel_times` and `graph_time` the L2 is overwritten with other data, as a decode step's other
layers would. The lines that are left in it are dirty; a memory-bound kernel pays for writing them back, in the same way
as under the usual `zero_()` of a large buffer.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench.harness import Measurement, summarise

L2_BYTES = 60 * 2**20  # H200
SWEPT_BYTES = 4 * L2_BYTES
REPEATS = 30


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """The GPU's time in the kernels of one call, us.

    total      the sum over the kernels of a call: median and percentiles over the calls
    kernels    (name, its own median and percentiles) in order of launch; copies by the copy engine are no kernels
    """

    total: Measurement
    kernels: tuple[tuple[str, Measurement], ...]


def kernel_times(
    function: Callable[..., Any], *arguments: Any, repeats: int = REPEATS, sweep: bool = True, warmup: int = 2
) -> KernelTimes:
    """Times each kernel of function(*arguments), a jitted function that donates nothing, with CUPTI.

    `sweep` overwrites the L2 before each call. CUPTI has one subscriber in a process: not under ncu, nsys or
    compute-sanitizer (RuntimeError).
    """
    swept = _sweep_buffer() if sweep else None
    for _ in range(warmup):
        if swept is not None:
            swept = _overwrite(swept)
        jax.block_until_ready(function(*arguments))
    before = 0
    if swept is not None:
        with _Cupti() as cupti:
            swept = jax.block_until_ready(_overwrite(swept))
        before = len(cupti.launches)
    with _Cupti() as cupti:
        for _ in range(repeats):
            if swept is not None:
                swept = _overwrite(swept)
            # Waiting keeps the results of one call only, which may be large; kernels are timed on the GPU all the same.
            jax.block_until_ready(function(*arguments))
    return _per_call(cupti.launches, repeats, before)


def chain_time(
    step: Callable[[Any], Any], carry: Any, *, calls: int = 30, repeats: int = REPEATS, warmup: int = 2
) -> Measurement:
    """Wall clock per call, us, of carry = step(carry) repeated `calls` times and waited for once; `step` may donate.

    What a decode loop sees: where the GPU is slower than the dispatch it is the GPU's time with its launches.
    """
    for _ in range(warmup):
        carry = jax.block_until_ready(step(carry))
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            carry = step(carry)
        jax.block_until_ready(carry)
        durations.append((time.perf_counter() - started) / calls)
    return summarise(durations).scaled(1e6)


def graph_time(
    function: Callable[..., Any], *arguments: Any, calls: int = 10, repeats: int = REPEATS, warmup: int = 3
) -> Measurement:
    """Time per call, us, inside one CUDA graph: `calls` times (overwrite the L2, call), less as many overwrites alone.

    The median is the difference of the two programs' median wall clocks over `calls`; p10 and p90 are those of the
    longer program, less the same median. `kernel_times` has a kernel's own time; this one shows what gaps add to it.
    """

    medians = []
    for number in (0, calls):
        run = jax.jit(repeated(function, number, calls))
        for _ in range(warmup):
            jax.block_until_ready(run(arguments))
        durations = []
        for _ in range(repeats):
            started = time.perf_counter()
            jax.block_until_ready(run(arguments))
            durations.append((time.perf_counter() - started) * 1e6 / calls)
        medians.append(summarise(durations))
    without, full = medians
    return Measurement(full.median - without.median, full.p10 - without.median, full.p90 - without.median, full.repeats)


def repeated(function: Callable[..., Any], calls: int, sweeps: int) -> Callable[..., Any]:
    """arguments -> numbers: `sweeps` times overwrites the L2, after each of the first `calls` calls `function`.

    What must follow something reads from it: the smallest argument has a 0 added that comes from the buffer just
    written, and the next overwrite takes the result as an operand. Optimisation barriers would not do: XLA drops them
    and then merges equal calls. The overwriting is a kernel that XLA cannot look into. With calls and without, one
    tiny kernel stands after each overwrite: an addition, or what takes its place.
    """

    def run(arguments):
        leaves, tree = jax.tree.flatten(arguments)
        smallest = min(range(len(leaves)), key=lambda index: leaves[index].size)
        number = jnp.zeros((1,), jnp.uint32)
        before = number
        for index in range(sweeps):
            before = overwrite(number, before)[:1] >> 31
            if index < calls:
                leaves[smallest] = leaves[smallest] + before[0].astype(leaves[smallest].dtype)
                before = jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))[0]
        return leaves[smallest], before

    return run


@jax.jit
def overwrite(number: jax.Array, before: jax.Array) -> jax.Array:
    """u32[1] -> u32[SWEPT_BYTES // 4] of it, after `before` is there: replaces whatever was in the L2."""
    chunk, blocks = 8192, 1056
    step = chunk * blocks

    def fill(number, before, out):
        del before  # an operand, so that XLA waits for it
        values = plgpu.layout_cast(
            jnp.full((chunk,), number[0], jnp.uint32), plgpu.Layout.WG_STRIDED((chunk,), vec_size=4)
        )

        @pl.loop(0, pl.cdiv(out.shape[0], step))
        def _(index):
            start = index * step + lax.axis_index("block") * chunk

            @pl.when(start < out.shape[0])
            def _():
                out[pl.ds(start, chunk)] = values

    return plgpu.kernel(
        fill,
        out_type=jax.ShapeDtypeStruct((SWEPT_BYTES // 4 // chunk * chunk,), jnp.uint32),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(number, before)


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Device memory, bytes/s, measured over a buffer far larger than the L2."""

    copy: float  # bytes read and bytes written, both counted
    read: float  # bytes read by a sum


def device_bandwidth(megabytes: int = 1024, repeats: int = 30) -> Bandwidth:
    """What XLA's own element-wise copy and sum reach now on this GPU: the limit a memory-bound kernel is held to."""
    source = jnp.zeros((megabytes * 2**18,), jnp.uint32)
    copy = kernel_times(jax.jit(lambda x: x ^ jnp.uint32(1)), source, repeats=repeats, sweep=False).total
    read = kernel_times(jax.jit(lambda x: jnp.max(x)), source, repeats=repeats, sweep=False).total
    return Bandwidth(copy=2 * source.nbytes / (copy.median * 1e-6), read=source.nbytes / (read.median * 1e-6))


def refuses(known: Collection[str], wanted: Sequence[str]) -> bool:
    """Whether a bench of the known parts cannot run the wanted ones here, and says why: one is unknown, or no GPU."""
    if unknown := [part for part in wanted if part not in known]:
        print(f"{unknown[0]!r} is none of {', '.join(known)}", file=sys.stderr)
        return True
    if jax.devices()[0].platform != "gpu":
        print(f"needs an NVIDIA GPU; jax sees {jax.devices()[0].platform}", file=sys.stderr)
        return True
    return False


def run_parts(known: Mapping[str, Callable[[], None]], wanted: Sequence[str]) -> int:
    """Runs the wanted parts of a bench in turn, "check" and "bench" if none is named; its exit status: 0, or 2 with the
    reason for a part that is unknown or a machine without a GPU."""
    if refuses(known, wanted):
        return 2
    for part in wanted or ["check", "bench"]:
        started = time.perf_counter()
        known[part]()
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
    return 0


def _per_call(launches: Sequence[tuple[str, float]], repeats: int, before: int) -> KernelTimes:
    """(name, ms) of every launch, `before` launches of each repeat being the overwriting of the L2."""
    per_repeat, rest = divmod(len(launches), repeats)
    if rest or per_repeat <= before:
        raise RuntimeError(
            f"CUPTI saw {len(launches)} kernels in {repeats} calls with {before} before each, which is not a whole "
            "number a call; is the function jitted, compiled, and does it run on the GPU?"
        )
    calls = [launches[index * per_repeat + before : (index + 1) * per_repeat] for index in range(repeats)]
    names = [name for name, _ in calls[0]]
    for call in calls:
        if [name for name, _ in call] != names:
            raise RuntimeError(f"one call launched {names}, another {[name for name, _ in call]}; time them apart")
    microseconds = [[milliseconds * 1e3 for _, milliseconds in call] for call in calls]
    return KernelTimes(
        total=summarise([sum(call) for call in microseconds]),
        kernels=tuple((name, summarise([call[i] for call in microseconds])) for i, name in enumerate(names)),
    )


class _Cupti:
    """Collects (kernel name, milliseconds) of everything launched inside a `with`."""

    launches: list[tuple[str, float]]

    def __enter__(self) -> _Cupti:
        from jax.experimental.mosaic.gpu import profiler

        library: Any = profiler.mosaic_gpu_lib  # pyright: ignore[reportPrivateImportUsage]
        if library is None:
            raise RuntimeError("kernel times need jax's CUDA plug-in, whose Mosaic extension reaches CUPTI")
        self._extension = library._mosaic_gpu_ext
        self._extension._cupti_init()
        self.launches = []
        return self

    def __exit__(self, *failure: object) -> None:
        timings = self._extension._cupti_get_timings(True)
        self.launches = [(str(name), float(milliseconds)) for name, milliseconds in timings or ()]


def _sweep_buffer() -> jax.Array:
    return jnp.zeros((SWEPT_BYTES // 4,), jnp.uint32)


def _add_one(buffer: jax.Array) -> jax.Array:
    return buffer + jnp.uint32(1)


_overwrite = jax.jit(_add_one, donate_argnums=0)
