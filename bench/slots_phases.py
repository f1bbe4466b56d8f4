"""Where a launch of the slot manager spends its time, point by point, and what its parts cost by themselves.

    JAX_PLATFORMS=cuda,cpu python -m bench.slots_phases [phases] [costs]        (about 25 s on an H200, nvcc included)

phases  the kernels of ffi/src once more, with a clock at each of their named points (bench/slots_phases.cu)
costs   launches, barriers, scattered loads and stores, marks in another SM's shared memory, a straight line of
        instructions in its first and its second turn: one small kernel each

It knows the loads of bench.slots, compiles the instrumented kernels on the spot and reads their stamps. The library
itself has no clocks: the points are empty there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from bench import on_the_spot, slots
from bench.gpu_timing import kernel_times, run_parts
from bench.harness import Measurement, record, summarise
from echo_jax import _ffi, pool

FILE = "slots_phases.jsonl"
FFI = on_the_spot.BENCH.parent / "ffi"
BLOCKS, WARPS = 16, 32
CALLS = 8

LOADS = (
    "B 1, nothing at all",
    "B 1, new row alone",
    "B 16, nothing at all",
    "B 16, new rows alone",
    "300K slots, 40 missing",
    "B 16, 1000 missing",
    "B 32, 2078 missing",
)


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles and registers the instrumented kernels and the small ones; RuntimeError without nvcc."""
    flags = ("-O3", "-split-compile=0", '-DECHO_CUDA_ARCHITECTURES="90a"', f"-I{FFI / 'include'}", f"-I{FFI / 'src'}")
    targets = {"bench_phases_allocate": "EchoAllocateCuda", "bench_slots_cost": "SlotsCostCuda"}
    opened = on_the_spot.build("slots_phases.cu", targets, *flags)
    opened.BenchPhaseNames.restype = ctypes.c_char_p
    opened.BenchPhaseStamps.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    opened.BenchCyclesOfMicrosecond.restype = ctypes.c_double
    return opened


# ---- phases ----------------------------------------------------------------------------------------------------------


@functools.cache
def phase_names() -> tuple[str, ...]:
    return tuple(library().BenchPhaseNames().decode().split())


def read_stamps() -> np.ndarray:
    """u32[BLOCKS, WARPS, phases]: cycles of each SM's own clock in the last launch, 0 where a warp did not come by."""
    stamps = np.zeros((BLOCKS, WARPS, len(phase_names())), np.uint32)
    if library().BenchPhaseStamps(stamps.ctypes.data, stamps.nbytes) != 0:
        raise RuntimeError("the stamps cannot be read back")
    return stamps


def allocate(maps, rows, priority, staged, *, per_seat: int, new_per_seat: int):
    """As pool.allocate by the library, of the instrumented kernels."""
    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    given = pool.leaves(maps)
    lists, scratch = (numbers(rows.shape),) * 5, numbers((_ffi.allocate_scratch(rows.shape[0]),))
    results = (*map(jax.typeof, given), *lists, *(numbers(()),) * 6, scratch)
    call = jax.ffi.ffi_call("bench_phases_allocate", results, input_output_aliases={i: i for i in range(4)})
    sizes = {"per_seat": np.int64(per_seat), "new_per_seat": np.int64(new_per_seat), "blocks": np.int64(BLOCKS)}
    slot_of, host_of, updated, free, *others = call(*given, rows, priority, staged, **sizes)
    return maps.replace(slot_of=slot_of, host_of=host_of, priority=updated, free=free), others[5:11]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="per_seat")
def step(maps, new, selected, number, per_seat: int):
    rows = jnp.concatenate([new, selected], axis=1).reshape(-1)
    priority, staged = jnp.broadcast_to(number, rows.shape), jnp.zeros((0,), jnp.int32)
    return allocate(maps, rows, priority, staged, per_seat=per_seat, new_per_seat=1)


@dataclasses.dataclass(frozen=True)
class Stamped:
    """Microseconds f64[BLOCKS, WARPS, phases] since the first warp began, NaN where a warp did not come by; and what
    CUPTI has for the look and for this kernel."""

    times: np.ndarray
    look_us: float
    kernel_us: float


def in_microseconds(stamps: np.ndarray, cycles: float) -> np.ndarray:
    """The clocks of SMs differ: those of a cluster are put together at its first barrier, which all leave at once, and
    where nobody waits for one, as if all had begun at once."""
    met = stamps[:, :, phase_names().index("AllTold")]
    if not met.any():
        met = stamps[:, :, 0]
    since = (stamps - met.min(axis=1)[:, None, None]).astype(np.int32) / cycles
    times = np.where(stamps == 0, np.nan, since)
    return times - np.nanmin(times)


def stamped(load: slots.Load, cycles: float, sweep: bool) -> tuple[list[Stamped], list[int]]:
    """CALLS launches, the L2 overwritten before each with `sweep`; and the counts of the last."""
    maps = jax.device_put(slots.full_maps(load, 0))
    made, counts = [], None
    for number in range(1, CALLS + 3):
        new, selected = slots.draw_lists(maps, jax.random.key(number), load, 1)
        arguments = jax.block_until_ready((new[0], selected[0], jnp.int32(number)))

        def call(*arguments):
            nonlocal maps, counts
            maps, counts = step(maps, *arguments, per_seat=slots.TOP_K + 1)
            return counts

        times = kernel_times(call, *arguments, repeats=1, sweep=sweep, warmup=0)
        look, kernel = (slots.time_of(times, name) for name in ("LookKernel", "AllocateKernel"))
        if number > 2:
            made.append(Stamped(in_microseconds(read_stamps(), cycles), look, kernel))
    return made, [int(count) for count in jax.device_get(counts)]


def at_phase(made: list[Stamped], index: int) -> np.ndarray:
    """f64[CALLS, BLOCKS, WARPS], or an empty array where no warp came by."""
    at = np.stack([one.times[:, :, index] for one in made])
    return at[:0] if np.isnan(at).all() else at


def report(load: slots.Load, cycles: float) -> None:
    (made, counts), (warm, _) = (stamped(load, cycles, sweep) for sweep in (True, False))
    for what, of_calls in (("L2 swept", made), ("warm", warm)):
        look, kernel = (summarise([getattr(one, name) for one in of_calls]) for name in ("look_us", "kernel_us"))
        print(f"{load.name}, {what}: look {look.median:.2f}, then {kernel.median:.2f} us by CUPTI")
    print(f"  counts {counts}")
    print(f"  {'until the last warp of a block is at':<38}{'min':>7}{'median':>8}{'max':>7}   {'last':>6}{'warm':>8}")
    before, warm_before = np.zeros((CALLS, BLOCKS)), np.zeros((CALLS, BLOCKS))
    for index, name in enumerate(phase_names()):
        at, warm_at = at_phase(made, index), at_phase(warm, index)
        if not at.size or not warm_at.size:
            continue
        last, warm_last = np.nanmax(at, axis=2), np.nanmax(warm_at, axis=2)  # [calls, blocks]
        took, warm_took = last - before, warm_last - warm_before
        before, warm_before = last, warm_last
        low, middle, high = (statistics.median(of(took, axis=1)) for of in (np.min, np.median, np.max))
        end, warm_middle = statistics.median(last.max(axis=1)), statistics.median(np.median(warm_took, axis=1))
        print(f"  {name:<38}{low:7.2f}{middle:8.2f}{high:7.2f}   {end:6.2f}{warm_middle:8.2f}")
        record(
            name=f"slot manager: {load.name}, until {name}",
            value=summarise([float(np.median(of_call)) for of_call in took]),
            unit="us",
            file=FILE,
            shapes={"B": load.seats, "N_H": load.host_rows, "N_G": load.slots, "missing": load.missing},
            method=f"clocks in the kernel, from the last warp of a block at the point before to its last warp here; "
            f"median over {BLOCKS} blocks, then over {CALLS} calls; L2 overwritten before each",
            notes=f"{warm_middle:.2f} us without that",
        )
    for what, of_calls in (("L2 swept", made), ("warm", warm)):
        outside = [one.kernel_us - float(np.nanmax(one.times)) for one in of_calls]
        print(f"  {'outside of what is stamped, ' + what:<38}{'':7}{statistics.median(outside):8.2f}", flush=True)


def phases() -> None:
    cycles = library().BenchCyclesOfMicrosecond()
    print(f"{cycles:.0f} cycles a microsecond; below are us, medians over {CALLS} calls")
    by_name = {load.name: load for load in slots.LOADS}
    for name in LOADS:
        report(by_name[name], cycles)


# ---- costs -----------------------------------------------------------------------------------------------------------

PARTS = ("nothing", "barriers", "loads", "stores", "marks", "marks of two", "atomics", "grid meets", "code")
SHARED = 155 * 1024  # what a block of 300,000 slots asks for
SCATTERED = 2**21


@dataclasses.dataclass(frozen=True)
class Cost:
    """A small kernel: `many` times its part in each thread of so many blocks."""

    part: str
    blocks: int
    threads: int
    many: int = 0
    shared: int = 0
    is_cluster: bool = False

    def __str__(self) -> str:
        where = f"{self.blocks} x {self.threads}" + (", cluster" if self.is_cluster else "")
        return f"{self.part}, {self.many} a thread, {where}" + (f", {self.shared >> 10} KiB" if self.shared else "")


COSTS = (
    Cost("nothing", 1, 32),
    Cost("nothing", 16, 1024),
    Cost("nothing", 16, 1024, shared=SHARED),
    Cost("nothing", 16, 1024, is_cluster=True),
    Cost("nothing", 16, 256, is_cluster=True),
    Cost("nothing", 16, 1024, shared=SHARED, is_cluster=True),
    Cost("nothing", 8, 1024, is_cluster=True),
    Cost("nothing", 128, 256),
    Cost("barriers", 16, 1024, 1, is_cluster=True),
    Cost("barriers", 16, 1024, 11, is_cluster=True),
    Cost("barriers", 16, 256, 11, is_cluster=True),
    Cost("barriers", 8, 1024, 11, is_cluster=True),
    Cost("grid meets", 64, 256, 1),
    Cost("grid meets", 64, 256, 11),
    Cost("grid meets", 128, 256, 11),
    Cost("loads", 16, 128, 1),
    Cost("loads", 64, 32, 1),
    Cost("loads", 16, 1024, 2),
    Cost("loads", 128, 256, 1),
    Cost("stores", 16, 128, 1),
    Cost("stores", 16, 1024, 2),
    Cost("stores", 128, 256, 1),
    Cost("atomics", 16, 1024, 2),
    Cost("atomics", 128, 256, 1),
    Cost("marks", 16, 128, 1, 4096, is_cluster=True),
    Cost("marks", 16, 1024, 0, 4096, is_cluster=True),
    Cost("marks", 16, 1024, 2, 4096, is_cluster=True),
    Cost("marks of two", 16, 1024, 2, 4096, is_cluster=True),
    # The first turn through a straight line of instructions, and what another one adds.
    *(Cost("code", 16, threads, turns) for threads in (32, 256, 1024) for turns in (0, 1, 2)),
)


def cost_of(cost: Cost, words: jax.Array, places: jax.Array, sweep: bool) -> Measurement:
    sizes = {"blocks": cost.blocks, "threads": cost.threads, "many": cost.many, "shared_bytes": cost.shared}
    attributes = {name: np.int64(size) for name, size in {"part": PARTS.index(cost.part), **sizes}.items()}

    @jax.jit
    def run(words, places):
        call = jax.ffi.ffi_call("bench_slots_cost", jax.ShapeDtypeStruct((1,), jnp.int32), has_side_effect=True)
        return call(words, places, **attributes, is_cluster=np.bool_(cost.is_cluster))

    return kernel_times(run, words, places, repeats=CALLS, sweep=sweep).total


def costs() -> None:
    """us by CUPTI, the L2 overwritten before each call and not: small kernels, to think with."""
    library()
    random = np.random.default_rng(0)
    words = jax.device_put(np.zeros(SCATTERED, np.int32))
    places = jax.device_put(random.permutation(SCATTERED)[:65536].astype(np.int32))
    print(f"  {'one kernel, us':<56}{'L2 swept':>10}{'warm':>8}")
    for cost in COSTS:
        cold, warm = (cost_of(cost, words, places, sweep) for sweep in (True, False))
        print(f"  {str(cost):<56}{cold.median:10.2f}{warm.median:8.2f}", flush=True)
        record(
            name=f"slot manager's parts: {cost}",
            value=cold,
            unit="us",
            file=FILE,
            shapes=dataclasses.asdict(cost),
            method="CUPTI time of the kernel, L2 overwritten before each call",
            notes=f"{warm.median:.2f} us without that",
        )


def main() -> int:
    known = {"phases": phases, "costs": costs}
    return run_parts(known, sys.argv[1:] or list(known))


if __name__ == "__main__":
    sys.exit(main())
