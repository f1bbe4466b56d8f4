"""What the benches of moving rows share: pinned pools, lists of rows, programs of many launches, and their times.

It knows how a decode step visits a pool: every launch takes the next layer of a layer-first pool, with rows that no
launch asked for before, so address translations are as cold as they are there, and lists ascend as the slot manager's
do. It does not know the claims. Every time is in microseconds and is the GPU's own, of the moving kernel alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_timing, harness
from echo_jax import hostmem
from echo_jax.types import SOURCE_HOST

LINK = 54e9  # bytes/s of a large host-to-device copy on the H200 machine
LAYERS, HOST_ROWS, SLOTS = 16, 900_000, 65_536
CALLS = 16  # launches in one program, a layer each
WRITES = 4  # the same for write-backs, which take all layers at once
SETS = 8  # programs with rows of their own: CALLS * SETS launches are measured
MOVING_KERNELS = ("MoveRows", "PlainGather", "PlainScatter")


@functools.cache
def made_pool(record_bytes: int, layers: int = LAYERS, rows: int = HOST_ROWS) -> list[jax.Array]:
    """[pool], so that whoever writes to it can put the result back."""
    started = time.perf_counter()
    shape = (layers, rows, record_bytes // 4)
    pool = jax.block_until_ready(hostmem.create_pool(shape, jnp.uint32, hostmem.HostMemory.PINNED))
    print(f"pool {shape} u32, {pool.nbytes / 2**30:.1f} GiB: {time.perf_counter() - started:.1f} s", flush=True)
    return [pool]


@dataclasses.dataclass(frozen=True)
class Lists:
    """Rows and slots i32[CALLS][M] of one program, the rows of each launch ascending."""

    rows: tuple[jax.Array, ...]
    slots: tuple[jax.Array, ...]


def lists_of(draw: Callable[[np.random.Generator], np.ndarray], count: int) -> Iterator[Lists]:
    """SETS programs' lists over and over; `draw` gives one launch's rows, `count` of them."""
    generator = np.random.default_rng(0)
    made = [
        Lists(
            tuple(jnp.asarray(draw(generator), jnp.int32) for _ in range(CALLS)),
            tuple(jnp.asarray(generator.permutation(SLOTS)[:count], jnp.int32) for _ in range(CALLS)),
        )
        for _ in range(SETS)
    ]
    return itertools.cycle(made)


def spread(count: int, rows: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Uniform over the pool, without repetition, ascending."""

    def draw(generator):
        drawn = np.unique(generator.integers(0, rows, count + count // 8 + 8))
        return np.sort(generator.permutation(drawn)[:count])

    return draw


def clustered(count: int, rows: int, mean_run: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Runs of neighbours of geometric length around `mean_run`, spread uniformly over 128K positions, ascending."""

    def draw(generator):
        lengths = generator.geometric(1 / mean_run, count)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), count) + 1]
        window = 131_072
        gaps = generator.multinomial(window - lengths.sum(), np.full(len(lengths) + 1, 1 / (len(lengths) + 1)))
        starts = np.cumsum(gaps[:-1]) + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        found = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
        return found[:count] + generator.integers(0, rows - window)

    return draw


def recall_program(move: Callable, layers: int) -> Callable:
    """(records, pool, lists) -> records; every launch waits for the one before, as the layers of a step do."""

    def run(records, pool, rows, slots):
        for call in range(CALLS):
            records = move(records, pool, jnp.int32(call * layers // CALLS), rows[call], slots[call])
        return records

    return jax.jit(run, donate_argnums=0)


def library_recall(records, pool, layer, rows, slots):
    nothing = jnp.zeros((0, *records.shape[1:]), records.dtype)
    source = jnp.full(rows.shape, SOURCE_HOST, jnp.int32)
    return hostmem.recall(records, pool, layer, jnp.int32(rows.shape[0]), rows, slots, source, nothing, nothing)


def time_recall(move: Callable, pool: jax.Array, lists: Iterator[Lists]) -> harness.Measurement:
    """us of the moving kernel, over CALLS * SETS launches."""
    run = recall_program(move, pool.shape[0])
    records = [jnp.zeros((SLOTS, *pool.shape[2:]), pool.dtype)]

    def call():
        chosen = next(lists)
        records[0] = run(records[0], pool, chosen.rows, chosen.slots)
        return records[0]

    return moving_time(call)


def time_write_back(move: Callable, holder: list[jax.Array], lists: Iterator[Lists], records: jax.Array):
    """us of the moving kernel that writes records [L, M, record] to rows of every layer."""

    def run(pool, records, rows):
        for call in range(WRITES):
            pool = move(pool, records, rows[call])
        return pool

    program = jax.jit(run, donate_argnums=0)

    def call():
        holder[0] = program(holder[0], records, next(lists).rows[:WRITES])
        return holder[0]

    return moving_time(call)


def moving_time(call: Callable[[], jax.Array]) -> harness.Measurement:
    """us of one moving kernel: median and percentiles over all launches of SETS programs."""
    times = gpu_timing.kernel_times(call, repeats=SETS, sweep=False, warmup=1)
    moving = [timed for name, timed in times.kernels if any(kernel in name for kernel in MOVING_KERNELS)]
    if not moving:
        names = sorted({name for name, _ in times.kernels})
        raise RuntimeError(f"none of {MOVING_KERNELS} was launched, only {names}; was the library built with CUDA?")
    medians = harness.summarise([timed.median for timed in moving])
    return harness.Measurement(
        medians.median, min(timed.p10 for timed in moving), max(timed.p90 for timed in moving), len(moving) * SETS
    )


def plain_grids(rows: int) -> list[int]:
    """Grids a plain kernel may be given: a warp for each row, or half the SMs and a loop; the better one counts."""
    return sorted({min(-(-rows // 32), 2048), min(-(-rows // 32), 66)})


def best_plain(measure: Callable[[int], harness.Measurement], rows: int) -> harness.Measurement:
    return min((measure(blocks) for blocks in plain_grids(rows)), key=lambda timed: timed.median)


def gigabytes(rows: int, record_bytes: int, timed: harness.Measurement) -> float:
    return rows * record_bytes / timed.median / 1e3
