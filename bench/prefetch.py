"""Index scores with prefetch on an H200: what overlapping scores and copies gains, beside what the limit allows.

    python -m bench.prefetch [check] [stress] [bench] [tune] [once] [options]      (none: check, stress, bench)

check   every case of `pallas_kernels.indexer_prefetch.cases` with a pinned pool, and a long one whose every staged
        record is read again by the library; about 60 s
stress  1,000 calls over 64K positions with changing lengths, caps and thresholds: counts hold, nothing hangs; 15 s
bench   the claims D.speedup_*, D.gain_*, D.zero_candidates_ratio; other caps; the ways of the whole road; writes rows.
        Claims are written when a format is measured, and again, with the worse of both, after the next
tune    who fetches, and how, at 16 x 131,072, FP8 records; prints only
once    a few calls of each format and nothing else, for a profiler

    --seats 16 --lengths 131072 --pages in-order,scattered --hits 0.5,0.9 --records fp8,bf16 --roads short,whole
    --repeats 30

The default is 16 x 131,072; `--seats 1,8,16,32 --lengths 32768,65536,98304,131072 --repeats 12` is the whole grid,
whose claims still come from 16 x 131,072 (D.speedup_hit50_best is computed over the rows by bench/claims.py). Caps are
swept where that shape is alone, which takes as long as the others together.

It knows shapes and claims. What is measured at a shape stands in `prefetch_roads`, whether the kernel is right in
`prefetch_checks`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Beyond XLA's limit, said before it starts, the library pins pools, and only what they need: XLA would pin the next
# power of two, 16 GiB for each of 9, which takes 7 s where the library takes 4.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "8")

import jax
import jax.numpy as jnp

from bench import gpu_timing, harness, prefetch_checks
from bench import prefetch_calls as calls
from bench import prefetch_timing as timing
from bench.prefetch_calls import FORMATS, K, misses_at
from bench.prefetch_checks import FILE, Watchdog
from bench.prefetch_jobs import STAGING, Compiling, jobs_of
from bench.prefetch_roads import METHOD, Bound, Point, short_road, spread, sweep_caps, timeline, whole_road
from echo_jax.types import NO_SLOT
from pallas_kernels import dispatch
from pallas_kernels.indexer_prefetch.shape import Tuning

MAIN = (16, 131_072)
HITS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    seats: tuple[int, ...]
    lengths: tuple[int, ...]
    hits: tuple[float, ...]
    records: tuple[str, ...]
    roads: tuple[str, ...]
    repeats: int
    threads: int
    pages: tuple[str, ...]  # how they lie; the first is the claims'

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The claims' shape first."""
        found = [(seats, length) for seats in self.seats for length in self.lengths]
        return sorted(found, key=lambda shape: shape != MAIN)

    @property
    def host_rows(self) -> int:
        return max(seats * length for seats, length in self.shapes)

    def repeats_at(self, seats: int, length: int) -> int:
        return max(30, self.repeats) if (seats, length) == MAIN else self.repeats


# ---- bench -----------------------------------------------------------------------------------------------------------


def bench(options: Options) -> None:
    with Watchdog("bench", 580):
        clock, compiling, points = timing.Clock(), Compiling(options.threads), []
        for seats, length in options.shapes:
            for records in options.records:
                pool = calls.pool_shape(records, options.host_rows)
                jobs = jobs_of(seats, length, records, pool, "whole" in options.roads)
                if records != options.records[0]:
                    del jobs["resident"]  # the scores alone know nothing of records
                compiling.add((seats, length, records), jobs)
                if (seats, length, records) == (*MAIN, options.records[0]):
                    add_unmarked(compiling, (seats, length, records), jobs["fused"])
        pools = {}
        for records in options.records:
            pools[records] = calls.unwritten_pool_of(records, options.host_rows)
            clock.lap(f"pool of {records} records, {pools[records].nbytes / 2**30:.1f} GiB")
        for seats, length in options.shapes:
            for pages in options.pages:
                points += bench_shape(seats, length, pages, pools, compiling, options, clock)
                clock.lap(f"{seats} x {length}")
        if options.shapes != [MAIN]:
            claims([point for point in points if point.hit == 0.5], options)


def bench_shape(
    seats: int,
    length: int,
    pages: str,
    pools: dict[str, Any],
    compiling: Compiling,
    options: Options,
    clock: timing.Clock,
) -> list[Point]:
    """The short road in every format, with the claims as they are by then; what explains them; and the whole road."""
    is_main = (seats, length, pages) == (*MAIN, calls.USUALLY)
    given, points = calls.inputs(seats, length, pages), []
    clock.lap("queries and thresholds")
    repeats = options.repeats_at(seats, length)
    bounds = {records: Bound(given, records, pool, repeats) for records, pool in pools.items()}
    programs = {}
    for records in bounds:
        compiling.wait((seats, length, records))
        programs[records] = functools.partial(compiling.result, (seats, length, records))
    clock.lap("compilers")
    first = options.records[0]
    indexer = bounds[first].time(programs[first]("resident"), 0, 0)
    for records, bound in bounds.items():
        points += short_road(bound, programs[records], indexer, options.hits)
        if is_main:
            claims(points, options)
    for records, bound in bounds.items() if options.shapes == [MAIN] else ():
        of_format = [point for point in points if point.records == records]
        sweep_caps(bound, programs[records]("fused"), of_format)
        timeline(bound, programs[records]("timeline"), of_format)
    if is_main:
        zero_candidates(bounds[first], programs[first])
    if "whole" in options.roads:
        for records, bound in bounds.items():
            whole_road(bound, programs[records], {p.hit: p.cap for p in points if p.records == records})
    if len(options.shapes) > 1:
        calls.inputs.cache_clear()
    return points


VARIANTS: dict[str, dict[str, Any]] = {
    "as tuned": {},
    "2 records together": dict(together=2),
    "1 warpgroup": dict(fetchers=1),
    "runs of 4": dict(run=4),
}
TUNED_AT = ((1.0, 0), (0.95, 160), (0.9, 160), (0.9, 256), (0.8, 256), (0.5, 160), (0.5, 512))  # hit rates and caps


def tune(options: Options) -> None:
    (seats, length), host_rows = MAIN, MAIN[0] * MAIN[1]
    pool = calls.pool_shape("fp8", host_rows)
    usual = Tuning.of(dispatch.tuned(True, seats * length // calls.PAGE, "indexer_prefetch"))
    variants = {name: dataclasses.replace(usual, **change) for name, change in VARIANTS.items()}
    compiling, jobs = Compiling(options.threads), jobs_of(seats, length, "fp8", pool, False)
    compiling.add(MAIN, {"resident": jobs["resident"]})
    for name, tuning in variants.items():
        program = functools.partial(calls.fused, staging=STAGING["short"], tuning=tuning)
        compiling.add(MAIN, {name: dataclasses.replace(jobs["fused"], program=program)})
    calls.inputs(*MAIN, options.pages[0])  # compiles too
    held = calls.unwritten_pool_of("fp8", host_rows)
    compiling.wait(MAIN)
    programs = functools.partial(compiling.result, MAIN)
    for pages in options.pages:
        given = calls.inputs(*MAIN, pages)
        tune_at(Bound(given, "fp8", held, options.repeats), variants, programs)


def tune_at(bound: Bound, variants: dict[str, Tuning], programs: Callable[[str], Any]) -> None:
    print(f"indexer alone {spread(bound.time(programs('resident'), 0, 0))}")
    print(f"us of scores, prefetch and recall, by hit rate and cap; {bound.given.pages_lie} pages")
    print(" " * 28 + "".join(f"{f'{hit}, {cap}':>20}" for hit, cap in TUNED_AT))
    for name in variants:
        times = [bound.time(programs(name), misses_at(hit), cap) for hit, cap in TUNED_AT]
        print(f"    {name:24}" + "".join(f"{spread(value):>20}" for value in times), flush=True)


def add_unmarked(compiling: Compiling, key: Any, job: timing.Job) -> None:
    """What `zero_candidates` calls: the two kernels as they are."""
    start, query, threshold, slot_of, _ = job.changing
    fused = functools.partial(calls.prefetch, staging=STAGING["short"])
    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiling.add_unmarked(key, "fused, unmarked", fused, start, query, threshold, slot_of, job.shared, number)
    compiling.add_unmarked(key, "resident, unmarked", calls.score, start, query, job.shared)


def zero_candidates(bound: Bound, programs: Callable[[str], Any]) -> None:
    """[D.zero_candidates_ratio]"""
    given, number = bound.given, jnp.int32(0)
    shared, start = calls.shared_of(given, bound.pool, K), bound.starts["short"]
    never = jnp.full((given.seats,), jnp.inf, jnp.float32)
    nobody = jnp.full((bound.pool.shape[1],), NO_SLOT, jnp.int32)
    query = given.sets[0].query
    kernels = []
    for name, arguments in (
        ("fused, unmarked", (start, query, never, nobody, shared, number)),
        ("resident, unmarked", (start, query, shared)),
    ):
        times = gpu_timing.kernel_times(programs(name), *arguments)
        kernels.append(next(each for name, each in times.kernels if "indexer" in name))
    ratio = kernels[0].median / kernels[1].median
    text = f"kernels {kernels[0].median:.1f} and {kernels[1].median:.1f} us"
    print(f"threshold +inf, {given.seats} x {given.length}: {ratio:.3f} ({text})", flush=True)
    harness.record(
        "D.zero_candidates_ratio",
        value=ratio,
        unit="ratio",
        file=FILE,
        shapes=dict(seats=given.seats, length=given.length),
        method="kernel times (CUPTI), median of 30; L2 overwritten before each call",
        notes=text,
    )


def claims(points: list[Point], options: Options) -> None:
    """Those that these points answer."""
    main = [point for point in points if (point.seats, point.length, point.pages) == (*MAIN, calls.USUALLY)]
    for claim, point, value in _answers(main):
        print(f"{claim} {value:.3f} ({point.seats} x {point.length}, {point.records}, hit {point.hit})", flush=True)
        harness.record(
            claim,
            value=value,
            unit="ratio",
            file=FILE,
            shapes=point.shapes | dict(cap=point.cap),
            method=METHOD.format(repeats=options.repeats_at(point.seats, point.length))
            + f"; {calls.USUALLY} pages; scores, and one recall that fills slots from staging and from the host; "
            "without overlap: the faster of both in turn and the sum of both alone; the recall's list is known "
            "beforehand; the worse record format",
            notes=point.notes(),
        )


def _answers(main: list[Point]) -> Iterator[tuple[str, Point, float]]:
    def at(low: float, high: float) -> list[Point]:
        return [point for point in main if low <= point.hit <= high]

    if found := at(0.9, 0.9):
        point = min(found, key=lambda point: point.ratio)
        yield "D.speedup_hit90", point, point.ratio
    if len({point.hit for point in at(0.8, 0.97)}) == 4:
        point = min(at(0.8, 0.97), key=lambda point: point.gain)
        yield "D.gain_fraction_80_97", point, point.gain
    if found := at(0.5, 0.5):
        point = min(found, key=lambda point: point.gain)
        yield "D.gain_fraction_50", point, point.gain


def once(options: Options) -> None:
    fused = jax.jit(functools.partial(calls.prefetch, staging=256))
    for records in options.records:
        given, host_rows = calls.inputs(*MAIN), MAIN[0] * MAIN[1]
        pool, start = calls.pool_of(records, host_rows)[0], calls.start_of(given, 256)
        maps, shared = calls.missing(given, misses_at(0.9), host_rows), calls.shared_of(given, pool, K)
        for one, of in zip(given.sets[:3], maps, strict=False):
            jax.block_until_ready(fused(start, one.query, one.threshold, of.slot_of, shared, jnp.int32(0)))
    print("called three times for each format")


def parse(arguments: list[str]) -> tuple[list[str], Options]:
    def several(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
        return lambda text: tuple(kind(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="check, stress, bench, tune, once")
    parser.add_argument("--seats", type=several(int), default=MAIN[:1])
    parser.add_argument("--lengths", type=several(int), default=MAIN[1:])
    parser.add_argument("--hits", type=several(float), default=HITS)
    parser.add_argument("--records", type=several(str), default=tuple(FORMATS))
    parser.add_argument("--roads", type=several(str), default=("short", "whole"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled side by side")
    parser.add_argument("--pages", type=several(str), default=(calls.USUALLY,), help="in-order, scattered")
    given = vars(parser.parse_args(arguments))
    return given.pop("parts") or ["check", "stress", "bench"], Options(**given)


def main() -> None:
    wanted, options = parse(sys.argv[1:])
    parts = {"check": prefetch_checks.check, "stress": prefetch_checks.stress}
    parts |= {"bench": functools.partial(bench, options), "tune": functools.partial(tune, options)}
    parts |= {"once": functools.partial(once, options)}
    if unknown := sorted(set(wanted) - set(parts)):
        sys.exit(f"no part is called {unknown[0]!r}; there are {', '.join(parts)}")
    if jax.default_backend() != "gpu":
        sys.exit(f"this needs an NVIDIA GPU; jax sees {jax.devices()[0].platform}")
    for name in wanted:
        started = time.perf_counter()
        parts[name]()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
