"""The schedules of `examples/schedules.py` on an H200: the same values, real stages, one captured graph each.

    python -m bench.prefetch_schedules [--hit 0.9] [--repeats 20] [--streams 2]        (about 60 s on an H200)

What `examples.pipelining` runs on a CPU and costs by a model is run here over one layer of 16 requests of 98,304
positions with FP8 keys and records (four layers where a schedule runs over layers), and beside it the fused kernel in
its order. Every line must select the same sets and attend to the same bits, or the exit status is 1.

Beside each time stands what `schedules.timeline` says of it, with every stage's time measured in this run, in turn and
with nothing beside it. The model has one engine for kernels and one for the link; "prefetch", and "require" behind it,
are on the latter whole, with the kernels that find candidates and slots. All items are taken to last as long.

It knows lines, clocks and rows. The stages are in `prefetch_stages`, programs of them in `prefetch_programs`, schedules
in `examples/schedules.py`, hit rates in `prefetch_calls`, and how a program is compiled and timed in `prefetch_timing`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Beyond XLA's limit, said before it starts, the library pins the pool, and only what it needs.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "8")

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_timing, harness, prefetch_calls
from bench import prefetch_timing as timing
from bench.harness import Measurement
from bench.prefetch_calls import PAGE, Inputs
from bench.prefetch_checks import Watchdog
from bench.prefetch_jobs import Compiling
from bench.prefetch_programs import FINISH, job_of, marks_of, names_of, state_of
from bench.prefetch_stages import FUSED, RECORDS, Changing, Line, Output, Part, Shared, Sizes, lines_of
from echo_jax import hostmem
from echo_jax.types import SlotMaps
from examples.schedules import LAYERS, REQUESTS, timeline

FILE = "gpu_prefetch_schedules.jsonl"
DISTINCT = 4096  # records; which row holds which differs from layer to layer
SETS = 6  # of queries, maps and rows that the timed calls take in turn
GUESS = 0.2  # of a query's length: how far off its guess is


@dataclasses.dataclass
class Calls:
    """Everything the lines are called with: the arrays of `Inputs`, cut and filled in their ways."""

    sizes: Sizes
    given: Inputs
    host_pool: jax.Array
    misses: int  # of a seat

    def __post_init__(self):
        seats = self.sizes.seats
        shape = (seats, 1, self.sizes.heads, RECORDS.width)
        random = np.random.default_rng(11)
        self.attending = jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16)
        self.guesses = [_near(one.query, random) for one in self.given.sets]
        self.shared = Shared(self.given.pages, self.host_pool, jnp.full((seats,), self.sizes.cap, jnp.int32))
        self.maps = functools.cache(self._maps)

    def changing(self, line: Line, number: int) -> Changing:
        """Of the set `number`; of a cross-layer schedule, its layers take that one and those behind it."""
        numbers = [(number + index) % len(self.given.sets) for index in range(line.layers)]
        cut = [_cut(line, self.whole(one)) for one in numbers]
        seats = self.sizes.seats // (line.count if line.over == REQUESTS else 1)
        groups = range(0, self.sizes.seats, seats)
        maps = [self.maps(first, first + seats)[one] for one in numbers for first in groups]
        return Changing(tuple(item for items in cut for item in items), self.whole(number), tuple(maps))

    def whole(self, number: int) -> Part:
        given, one = self.given, self.given.sets[number]
        fixed = given.weights, given.numbers, given.lengths[:, None], given.rows, self.attending
        return Part(one.query, self.guesses[number], one.threshold, *fixed)

    def _maps(self, first: int, last: int) -> list[SlotMaps]:
        """For each set, of a pool for these seats; the other rows in it may be anybody's."""
        some = [dataclasses.replace(one, top=one.top[first:last]) for one in self.given.sets]
        of_some = dataclasses.replace(self.given, seats=last - first, sets=tuple(some))
        return prefetch_calls.missing(of_some, self.misses, self.sizes.host_rows)

    def filled(self, changing: Changing, line: Line, layer: int) -> tuple[jax.Array, ...]:
        """Pools whose slots hold what the maps say."""
        layers = self.host_pool.shape[0]
        numbers = [layer + index if line.over == LAYERS else layer for index in range(len(changing.maps))]
        return tuple(
            _read(self.host_pool, jnp.int32(number % layers), maps.host_of)
            for number, maps in zip(numbers, changing.maps, strict=True)
        )


_read = jax.jit(hostmem.read_rows)


@functools.partial(jax.jit, static_argnums=0)
def _cut(line: Line, whole: Part) -> tuple[Part, ...]:
    """The line's items of one layer."""
    if line.over == REQUESTS:
        pieces = [jnp.split(leaf, line.count) for leaf in whole]
        return tuple(Part(*leaves) for leaves in zip(*pieces, strict=True))
    if line.over == LAYERS:
        return (whole,)
    each = whole.rows.shape[1] // line.count
    return tuple(
        whole._replace(
            numbers=whole.numbers[:, first // PAGE : (first + each) // PAGE],
            visible=jnp.clip(whole.visible - first, 0, each),
            rows=whole.rows[:, first : first + each],
        )
        for first in range(0, each * line.count, each)
    )


def _near(query: jax.Array, random: np.random.Generator) -> jax.Array:
    noise = random.standard_normal(query.shape, np.float32)
    return jnp.asarray(np.asarray(query, np.float32) + GUESS * noise, query.dtype)


def filled_host_pool(host_pool: jax.Array) -> jax.Array:
    """`host_pool`, which is donated, with DISTINCT records in rows and layers that differ from their neighbours'."""
    drawn = np.random.default_rng(5).standard_normal((DISTINCT, RECORDS.width), np.float32)
    records, layers = jax.jit(RECORDS.encode)(drawn), jnp.arange(host_pool.shape[0], dtype=jnp.int32)
    return prefetch_calls.filled(host_pool, lambda row: records[(row[None] + 37 * layers[:, None]) % DISTINCT])


# ---- what is compared and measured -----------------------------------------------------------------------------------

type Programs = Callable[[Line, bool], Any]
"""The compiled program of a line, or the one that takes its stages in turn between events."""


def output_of(calls: Calls, programs: Programs, line: Line, number: int) -> Output:
    """Of one call with the set and the layer `number`, from pools that hold what their maps say."""
    changing = calls.changing(line, number)
    state = calls.filled(changing, line, number), state_of(calls.sizes, line)[1]
    found = programs(line, False)(state, changing, calls.shared, jnp.int32(number))
    return jax.tree.map(np.asarray, found[1])


def differences(calls: Calls, programs: Programs) -> dict[Line, int]:
    """Words of lists and attended values that are not those of the first line."""
    first, *others = lines_of(calls.sizes)
    expected = [output_of(calls, programs, first, number) for number in range(calls.sizes.layers)]
    for one in expected:
        if not np.isfinite(one.attended).all() or np.unique(one.attended).size < one.attended.size // 2:
            raise RuntimeError("what is attended is no answer at all, so nothing can be compared with it")
    found = {}
    for line in others:
        made = output_of(calls, programs, line, 0)
        wanted = expected[: line.layers]
        found[line] = sum(
            differing(getattr(made, name), np.concatenate([getattr(one, name) for one in wanted]))
            for name in ("positions", "attended")
        )
        hits, useful, recalled = made.moved.sum(axis=0).tolist()
        print(
            f"    {line.describe():32} {found[line]} words differ; {hits:,} hits, {useful:,} rows from staging, "
            f"{recalled:,} recalled",
            flush=True,
        )
        if hits + useful + recalled != line.layers * calls.sizes.seats * prefetch_calls.K:
            raise RuntimeError(
                f"{line}: of {line.layers * calls.sizes.seats * prefetch_calls.K} selected rows moved {made.moved}"
            )
    return found


def differing(one: np.ndarray, other: np.ndarray) -> int:
    """Words; the same rows in the same order, in groups of any size."""
    return int((one.reshape(-1).view(np.uint32) != other.reshape(-1).view(np.uint32)).sum())


class Clocked:
    """Times lines one call at a time; what they hold is handed over from call to call."""

    def __init__(self, calls: Calls, programs: Programs, repeats: int):
        self.calls, self.programs, self.repeats = calls, programs, repeats
        self.held: Any = None

    def line(self, line: Line) -> Measurement:
        """us of a layer."""
        return self._time(line, False, lambda: None).scaled(1 / line.layers)

    def stages(self, line: Line) -> dict[str, Measurement]:
        """us of every stage, in turn: of the last item, which is as large as the others."""
        spans: dict[str, list[float]] = {name: [] for name in names_of(line)}

        def read() -> None:
            for number, times in enumerate(spans.values()):
                times.append(timing.elapsed_us(*marks_of(number)))

        self._time(line, True, read)
        return {name: harness.summarise(times[-self.repeats :]) for name, times in spans.items()}

    def _time(self, line: Line, is_marked: bool, read: Callable[[], None]) -> Measurement:
        self.held = state_of(self.calls.sizes, line)

        def keep(state: Any) -> None:
            self.held = state
            read()

        return timing.time_calls(
            self.programs(line, is_marked),
            lambda call: self.held,
            [self.calls.changing(line, number) for number in range(SETS)],
            self.calls.shared,
            self.calls.host_pool.shape[0],
            self.repeats,
            keep=keep,
        )


def model_us(line: Line, alone: dict[str, float]) -> float:
    """us of a layer by `schedules.timeline`, every item's stages taking what they take alone."""
    durations = {name: [us] * line.count for name, us in alone.items()}
    return (timeline(line.schedule, line.count, durations) + alone.get(FINISH, 0.0)) / line.layers


def measure(clocked: Clocked, wrong: Mapping[Line, int]) -> None:
    """Prints and records every line; `wrong` words of it are not the first line's, which its row says."""
    print("    us of a layer                    measured                    model  gain   stages in turn")
    alone: dict[tuple[str, int], dict[str, float]] = {}
    first: Measurement | None = None
    for line in lines_of(clocked.calls.sizes):
        key = (line.over, line.count)
        if line.name != FUSED and key not in alone:
            alone[key] = {name: value.median for name, value in clocked.stages(line).items()}
        measured = clocked.line(line)
        first = first or measured
        model, told = None, "one kernel scores and copies"
        if line.name != FUSED:
            model, told = model_us(line, alone[key]), ", ".join(f"{name} {us:.1f}" for name, us in alone[key].items())
        if wrong.get(line):
            told += f"; {wrong[line]} WORDS DIFFER from the first line"
        report(clocked, line, measured, first, model, alone.get(key, {}), told)


def report(clocked: Clocked, line: Line, measured: Measurement, first: Measurement, model, alone, told: str) -> None:
    sizes = clocked.calls.sizes
    spread = f"{measured.median:.1f} [{measured.p10:.1f}, {measured.p90:.1f}]"
    said, gain = "-" if model is None else f"{model:.1f}", first.median / measured.median
    print(f"    {line.describe():32} {spread:24} {said:>8} {gain:5.2f}   {told}", flush=True)
    shapes = dict(seats=sizes.seats, length=sizes.length, records="fp8", misses=clocked.calls.misses)
    shapes |= dict(schedule=line.name, over=line.over, items=line.count, streams=sizes.streams)
    if model is not None:
        shapes |= dict(model_us=round(model, 2)) | {f"{name}_us": round(us, 2) for name, us in alone.items()}
    harness.record(
        value=measured,
        unit="us",
        file=FILE,
        name=f"schedule {line.describe()}, {sizes.seats} x {sizes.length}, fp8 records, {clocked.calls.misses} misses",
        shapes=shapes,
        method=METHOD.format(repeats=clocked.repeats),
        notes=f"{gain:.3f} times as fast as {lines_of(sizes)[0].describe()}; {told}"
        + ("" if model is None else f"; the model says {model:.1f} us, {model / measured.median - 1:+.1%}"),
    )


METHOD = (
    "CUDA events around a call, {repeats} calls, median, over its layers; L2 overwritten before each; queries and maps "
    "change from call to call, layer after layer of a pinned pool; FP8 keys, 64 index heads, 128 attention heads; "
    "stages in turn: events around each, all in a row, nothing beside; model: timeline() of those"
)


def compile_all(compiling: Compiling, sizes: Sizes, host_pool: Any) -> Programs:
    """Starts the compilers; the result waits for one program."""
    turns: dict[tuple[str, int], Line] = {}
    for line in lines_of(sizes):
        jobs = {"": job_of(sizes, line, host_pool)}
        if line.name != FUSED and turns.setdefault((line.over, line.count), line) == line:
            jobs["marked"] = job_of(sizes, line, host_pool, is_marked=True)
        compiling.add(line, jobs)

    def program(line: Line, is_marked: bool) -> Any:
        if is_marked:
            return compiling.result(turns[line.over, line.count], "marked")
        return compiling.result(line, "")

    return program


def bench(hit: float, repeats: int, streams: int, threads: int) -> int:
    """Words that differ."""
    sizes, clock, compiling = Sizes(streams=streams), timing.Clock(), Compiling(threads)
    shape = prefetch_calls.pool_shape("fp8", sizes.host_rows)
    programs = compile_all(compiling, sizes, shape)
    host_pool = hostmem.create_pool(shape.shape, shape.dtype, hostmem.HostMemory.PINNED)
    host_pool = filled_host_pool(host_pool)
    clock.lap(f"pool of {host_pool.nbytes / 2**30:.1f} GiB")
    made = Calls(sizes, prefetch_calls.inputs(sizes.seats, sizes.length), host_pool, prefetch_calls.misses_at(hit))
    clock.lap("queries and thresholds")
    for line in lines_of(sizes):
        compiling.wait(line)
    clock.lap("compilers")
    wrong = differences(made, programs)
    clock.lap("every line compared with the first")
    measure(Clocked(made, programs, repeats), wrong)
    clock.lap("times")
    return sum(wrong.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hit", type=float, default=0.9, help="share of the selected rows that have a slot")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--streams", type=int, choices=(1, 2), default=2, help="whether copies have one of their own")
    parser.add_argument("--threads", type=int, default=8, help="programs compiled side by side")
    flags = parser.parse_args(argv)
    if not 0 <= flags.hit <= 1:
        parser.error(f"--hit is {flags.hit} but must be from 0 to 1: it is a share of the selected rows")
    if gpu_timing.refuses((), ()):
        return 2
    with Watchdog("schedules", 180):
        wrong = bench(**vars(flags))
    print(f"{wrong} words differ from the first line")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
