"""Index scores with prefetch on an H200: right, then what overlapping them gains, beside what the limit allows.

    python -m bench.prefetch [check] [stress] [bench] [once]      (none: check, stress, bench)

check   every case of `pallas_kernels.indexer_prefetch.cases` with a pinned pool, and a long one whose every staged
        record is read again by the library; about 50 s
stress  1,000 calls over 64K positions with changing lengths, caps and thresholds: counts hold, nothing hangs; 10 s
bench   the claims D.speedup_*, D.gain_*, D.zero_candidates_ratio; about 140 s; writes rows
once    a few calls of each format and nothing else, for a profiler

It knows shapes, claims and what is compared with what. How a hit rate is made, and what a call is, stands in
prefetch_calls.py; how time is taken in `events` and `gpu_timing`, how a row is written in `harness`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# XLA's own pool of pinned memory ends at 64 GB unless told otherwise, before it starts.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import gpu_timing, harness
from bench.prefetch_calls import (
    BYTES,
    HOST_ROWS,
    SETS,
    Inputs,
    K,
    fill_time,
    fused,
    in_turn,
    inputs,
    missing,
    pool_of,
    recall,
    score,
    separate,
    timed,
)
from echo_jax import hostmem
from pallas_kernels import indexer_prefetch, indexer_scores
from pallas_kernels.indexer_prefetch import cases, reference

MAIN = (16, 131_072)
STRESSED = (8, 65_536)
OTHERS = ((1, 98_304), (8, 98_304), (32, 98_304))
HITS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99)
FILE = "prefetch.jsonl"
METHOD = (
    "CUDA events around a call, median of 16; L2 overwritten before each; queries, maps and rows change from call to "
    "call, layer after layer of a pinned pool; FP8 keys, 64 heads"
)


class Watchdog:
    """Ends the process, and says where, if a part takes longer than `seconds`: a hang must not cost a machine."""

    def __init__(self, what: str, seconds: float):
        self.timer = threading.Timer(seconds, self.bark, (what, seconds))

    @staticmethod
    def bark(what: str, seconds: float) -> None:
        print(f"{what} did not end within {seconds:.0f} s", flush=True)
        os._exit(3)

    def __enter__(self) -> None:
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *failure: object) -> None:
        self.timer.cancel()


# ---- check -----------------------------------------------------------------------------------------------------------


any_scores = jax.jit(functools.partial(indexer_scores, implementation="mosaic_gpu"))
any_prefetch = jax.jit(functools.partial(indexer_prefetch, implementation="mosaic_gpu"), static_argnames="staging")


def check() -> None:
    """Exits unless every promise is kept."""
    with Watchdog("check", 150):
        on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        for case in cases.CORNERS + cases.FAR:
            started = time.perf_counter()
            made = cases.make(case)
            arguments = [jax.device_put(array) for array in made.arguments]
            arguments[9] = jax.device_put(made.host_pool, on_host)
            scores = np.asarray(any_scores(*arguments[:5]))
            for _ in range(3):
                totals = made.judge(any_prefetch(*arguments, staging=made.staging), scores)
            seconds = time.perf_counter() - started
            print(f"  {cases.identifier(case):45} {sum(totals):7} candidates {seconds:6.1f} s", flush=True)
        for records in BYTES:
            started = time.perf_counter()
            differing = check_long(records)
            seconds = time.perf_counter() - started
            print(f"  {MAIN[0]} x {MAIN[1]}, {records} records: {differing} differ {seconds:6.1f} s", flush=True)
            if differing:
                sys.exit(1)


def check_long(records: str) -> int:
    """At the measured shape, what staged records, lists, counts and scores are not as they should be."""
    given, pool, misses = inputs(*MAIN), pool_of(records)[0], K // 2
    maps, rows = missing(given, misses)
    differing = 0
    for number, cap in ((0, K), (1, misses), (2, 100)):
        staging = min(cap, misses)
        caps = jnp.full((given.seats,), cap, jnp.int32)
        shared = (given.weights, given.pages, given.numbers, given.lengths, caps, pool)
        one, layer = given.sets[number], jnp.int32(number % pool.shape[0])
        found = fused(given.visible, (one.query, one.threshold, maps[number]), shared, layer, staging)
        wanted = score(given.visible, (one.query,), shared, layer)
        again = jax.jit(hostmem.read_rows)(pool, layer, found.rows.reshape(-1))
        bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
        differing += int(jnp.sum(bits(found.scores) != bits(wanted)))
        differing += int(jnp.sum(again != found.records.reshape(again.shape)))
        listed, asked = np.asarray(found.rows), np.asarray(rows[number]).reshape(given.seats, misses)
        for seat in range(given.seats):
            differing += len(set(listed[seat].tolist()) - set(asked[seat].tolist()))
            differing += abs(len(set(listed[seat].tolist())) - staging)
        differing += int(np.sum(np.asarray(found.count) != staging))
        differing += int(np.sum(np.asarray(found.refused) != misses - staging))
    return differing


def stress() -> None:
    """[D.stress]: 1,000 calls; what is counted each time must be what the scores say."""
    (seats, length), calls, staging = STRESSED, 1000, 256
    given, pool = inputs(seats, length), pool_of("fp8")[0]
    maps, _ = missing(given, K // 2)
    of_position = reference.host_rows(given.numbers)

    @jax.jit
    def broken(number, query, threshold, slot_of, shared):
        weights, pages, numbers, pool = shared
        random = functools.partial(jax.random.uniform, jax.random.fold_in(jax.random.key(1), number), (seats,))
        lengths = (random() * (length - 1)).astype(jnp.int32)
        kind = number % 5
        limits = jnp.array([jnp.nan, -jnp.inf, jnp.inf], jnp.float32)
        threshold = jnp.where(kind < 3, limits[jnp.minimum(kind, 2)], threshold)
        cap = (random(maxval=1.5) * staging).astype(jnp.int32)
        visible = lengths[:, None] + 1
        found = fused(
            *(visible, (query, threshold, slot_of)),
            *((weights, pages, numbers, lengths, cap, pool), number % pool.shape[0], staging),
        )
        is_old = jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]
        passes = (found.scores[:, 0] > threshold[:, None]) & is_old & (slot_of[of_position] < 0)
        total = jnp.sum(passes, axis=1, dtype=jnp.int32)
        wanted = jnp.minimum(total, jnp.minimum(cap, staging))
        listed = jnp.sum(found.rows >= 0, axis=1, dtype=jnp.int32)
        again = hostmem.read_rows(pool, number % pool.shape[0], found.rows.reshape(-1))
        is_staged = (found.rows >= 0).reshape(-1, 1)
        same = jnp.where(is_staged, again == found.records.reshape(again.shape), True)
        ordered = jnp.sort(found.rows, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        counts = (found.count != wanted) | (found.refused != total - wanted) | (listed != wanted)
        return jnp.sum(counts) + jnp.sum(~same) + jnp.sum(twice)

    shared, total = (given.weights, given.pages, given.numbers, pool), jnp.int32(0)
    with Watchdog("stress", 100):
        for number in range(calls):
            one = given.sets[number % SETS]
            total += broken(jnp.int32(number), one.query, one.threshold, maps[number % SETS], shared)
        count = int(total)
    print(f"stress: {count} broken counts, lists or records in {calls} calls", flush=True)
    harness.record(
        "D.stress",
        value=count,
        unit="",
        file=FILE,
        shapes=dict(seats=seats, length=length, calls=calls, staging=staging, records="fp8"),
        method="calls of the kernel, not of a model's step; lengths, caps and thresholds (NaN, both infinities, a k-th "
        "score) change from call to call; counts, lists and records are compared with what the scores say",
    )


# ---- bench -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """One hit rate at one shape; us."""

    seats: int
    length: int
    records: str
    hit: float
    indexer: float
    link: float
    fused: harness.Measurement
    fill: float
    in_turn: float

    @property
    def without(self) -> float:
        """A run without overlap, the faster way to count it: measured in turn, where it is, or the sum of its parts."""
        return min(self.indexer + self.link, self.in_turn)  # which is NaN where it was not measured

    @property
    def limit(self) -> float:
        return (self.indexer + self.link) / max(self.indexer, self.link)

    @property
    def kernel_ratio(self) -> float:
        return self.without / self.fused.median

    @property
    def ratio(self) -> float:
        """With staged records moved to their slots, which a run without overlap does not pay."""
        return self.without / (self.fused.median + self.fill)

    @property
    def gain(self) -> float:
        return (self.ratio - 1) / (self.limit - 1)


def measure(seats: int, length: int, records: str, hits: tuple[float, ...], indexer: float) -> list[Point]:
    given, pool = inputs(seats, length), pool_of(records)[0]
    points, layers = [], pool.shape[0]
    cap = jnp.full((seats,), K, jnp.int32)
    shared = (given.weights, given.pages, given.numbers, given.lengths, cap, pool)
    for hit in hits:
        misses = round((1 - hit) * K)
        maps, rows = missing(given, misses)
        queries = [(one.query,) for one in given.sets]
        asked = [(one.query, one.threshold, of) for one, of in zip(given.sets, maps, strict=True)]
        link = timed(recall, jnp.zeros((1,), jnp.int32), [(row,) for row in rows], (pool,), layers)
        both = [(*query, row) for query, row in zip(queries, rows, strict=True)]
        in_both = timed(in_turn, given.visible, both, shared, layers).median if (seats, length) == MAIN else math.nan
        ours = timed(functools.partial(fused, staging=misses), given.visible, asked, shared, layers)
        fill = fill_time(records, seats * misses)
        point = Point(
            *(seats, length, records, hit, indexer, link.median, ours, fill.median, in_both),
        )
        points.append(point)
        report(point)
        if (seats, length) == MAIN and hit in (0.5, 0.9):
            other = timed(functools.partial(separate, staging=misses), given.visible, asked, shared, layers)
            print(f"      the library's separate path: {other.median:.1f} us", flush=True)
            harness.record(
                value=other,
                unit="us",
                file=FILE,
                name=f"scores, then prefetch by running sums: {seats} x {length}, {records} records, hit rate {hit}",
                shapes=shapes(point),
                method=METHOD,
            )
    return points


def report(point: Point) -> None:
    spread = f"[{point.fused.p10:.1f} {point.fused.p90:.1f}]"
    print(
        f"{point.seats:3} x {point.length:6} {point.records:5} {point.hit:5.2f} {point.indexer:8.1f} {point.link:8.1f} "
        f"{point.in_turn:8.1f} {point.fused.median:8.1f} {spread:16} {point.fill:6.1f} {point.kernel_ratio:6.2f} "
        f"{point.ratio:6.2f} {point.limit:6.2f} {point.gain:6.2f}",
        flush=True,
    )
    harness.record(
        value=point.fused,
        unit="us",
        file=FILE,
        name=f"scores with prefetch, {point.seats} x {point.length}, {point.records} records, hit rate {point.hit}",
        shapes=shapes(point),
        method=METHOD,
        fraction_of_limit=round(max(point.indexer, point.link) / point.fused.median, 4),
        notes=notes(point),
    )


def shapes(point: Point) -> dict[str, Any]:
    misses = round((1 - point.hit) * K)
    return dict(seats=point.seats, length=point.length, records=point.records, hit=point.hit, misses=misses)


def notes(point: Point) -> str:
    return (
        f"{point.records} records: indexer alone {point.indexer:.1f} us, recall alone {point.link:.1f} us, in turn "
        f"{point.in_turn:.1f} us, fused {point.fused.median:.1f} us, then to slots {point.fill:.1f} us; ratio "
        f"{point.ratio:.3f} (to staging {point.kernel_ratio:.3f}), limit {point.limit:.3f}, gain {point.gain:.3f}"
    )


def bench() -> None:
    with Watchdog("bench", 400):
        names = ("hit", "indexer", "recall", "in turn", "fused", "", "fill", "ratio", "+ fill", "limit", "gain")
        print(" " * 19 + "{:>5} {:>8} {:>8} {:>8} {:>8} {:16} {:>6} {:>6} {:>6} {:>6} {:>6}".format(*names))
        points: list[Point] = []
        for seats, length in (MAIN, *OTHERS):
            given = inputs(seats, length)
            shared = (given.weights, given.pages, given.numbers)
            alone = timed(score, given.visible, [(one.query,) for one in given.sets], shared, 1)
            if (seats, length) == MAIN or seats == 1:
                zero_candidates(given)
            hits = HITS if (seats, length) == MAIN else (0.5, 0.9)
            for records in BYTES:
                points += measure(seats, length, records, hits, alone.median)
            inputs.cache_clear()
            del given, shared
        claims(points)


def zero_candidates(given: Inputs) -> None:
    """[D.zero_candidates_ratio], and the same by events."""
    pool = pool_of("fp8")[0]
    cap = jnp.full((given.seats,), K, jnp.int32)
    shared = (given.weights, given.pages, given.numbers, given.lengths, cap, pool)
    never = jnp.full((given.seats,), jnp.inf, jnp.float32)
    nobody = jnp.full((HOST_ROWS,), reference.NO_SLOT, jnp.int32)
    asked = [(one.query, never, nobody) for one in given.sets]
    ours = timed(functools.partial(fused, staging=64), given.visible, asked, shared, pool.shape[0])
    theirs = timed(score, given.visible, [(one.query,) for one in given.sets], shared, 1)
    kernels = []
    for function, changing in ((functools.partial(fused, staging=64), asked[0]), (score, asked[0][:1])):
        times = gpu_timing.kernel_times(function, given.visible, changing, shared, jnp.int32(0))
        kernels.append(next(each for name, each in times.kernels if "indexer" in name))
    ratio = kernels[0].median / kernels[1].median
    text = (
        f"kernels {kernels[0].median:.1f} and {kernels[1].median:.1f} us; by events {ours.median:.1f} and "
        f"{theirs.median:.1f} us, {ours.median / theirs.median:.3f}"
    )
    print(f"threshold +inf, {given.seats} x {given.length}: {ratio:.3f} ({text})", flush=True)
    harness.record(
        "D.zero_candidates_ratio" if (given.seats, given.length) == MAIN else None,
        value=ratio,
        unit="ratio",
        file=FILE,
        name=f"threshold +inf over the plain indexer, {given.seats} x {given.length}",
        shapes=dict(seats=given.seats, length=given.length),
        method="kernel times (CUPTI), median of 30; L2 overwritten before each call",
        notes=text,
    )


def claims(points: list[Point]) -> None:
    main = [point for point in points if (point.seats, point.length) == MAIN]
    rules: tuple[tuple[str, Point, Callable[[Point], float]], ...] = (
        ("D.speedup_hit90", min((p for p in main if p.hit == 0.9), key=lambda p: p.ratio), lambda p: p.ratio),
        (
            "D.gain_fraction_80_97",
            min((p for p in main if 0.8 <= p.hit <= 0.97), key=lambda p: p.gain),
            lambda p: p.gain,
        ),
        ("D.gain_fraction_50", min((p for p in main if p.hit == 0.5), key=lambda p: p.gain), lambda p: p.gain),
        ("D.speedup_hit50_best", max((p for p in points if p.hit == 0.5), key=lambda p: p.ratio), lambda p: p.ratio),
    )
    for claim, point, value in rules:
        print(
            f"{claim} {value(point):.3f} ({point.seats} x {point.length}, {point.records}, hit {point.hit})", flush=True
        )
        harness.record(
            claim,
            value=value(point),
            unit="ratio",
            file=FILE,
            shapes=shapes(point),
            method=f"{METHOD}; without overlap: the faster of both in turn and the sum of both alone; with it, staged "
            "records are moved to slots too; every miss is staged, so no recall is left"
            + ("" if "best" in claim else "; the worse record format"),
            notes=notes(point),
        )


def once() -> None:
    for records in BYTES:
        given, pool = inputs(*MAIN), pool_of(records)[0]
        maps, _ = missing(given, 205)
        shared = (given.weights, given.pages, given.numbers, given.lengths, jnp.full((MAIN[0],), K, jnp.int32), pool)
        for one, slot_of in zip(given.sets[:3], maps, strict=False):
            jax.block_until_ready(
                fused(given.visible, (one.query, one.threshold, slot_of), shared, jnp.int32(0), staging=205)
            )
    print("called three times for each format")


PARTS = {"check": check, "stress": stress, "bench": bench, "once": once}


def main() -> None:
    wanted = sys.argv[1:] or ["check", "stress", "bench"]
    if unknown := sorted(set(wanted) - set(PARTS)):
        sys.exit(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    if jax.default_backend() != "gpu":
        sys.exit(f"this needs an NVIDIA GPU; jax sees {jax.devices()[0].platform}")
    for name in wanted:
        started = time.perf_counter()
        PARTS[name]()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
