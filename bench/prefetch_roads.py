"""The two roads of the prefetch benches, measured at one shape and one record format: points, other caps, a timeline.

It knows how a program is compiled and called for a point, what is printed and which rows are written. It knows no
claim. What a call is stands in `prefetch_calls`, how long it takes in `prefetch_timing`.

The limit of a gain is (indexer + link) / max(indexer, link): both alone, in this run, by the same clock. Without
overlap is the faster of the two in turn and of the sum of both alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from bench import harness
from bench import prefetch_calls as calls
from bench import prefetch_timing as timing
from bench.harness import Measurement
from bench.prefetch_calls import FORMATS, SLOTS, Inputs, K, Shared, Start, misses_at
from bench.prefetch_checks import FILE
from echo_jax import threshold
from echo_jax.types import SlotMaps

CAPS = (0, 16, 32, 64, 128, 192, 256, 384, 512, 1024)
STAGING = {"short": 1024, "whole": 512}  # places of a seat
WAYS = ("resident", "in turn", "fused", "second stream")
REPEATS_OF_MANY = 14  # where many values stand in a line
MIDDLE = 2  # the mark between scores and recall, where they are timed apart
METHOD = (
    "CUDA events around a call, {repeats} calls, median; L2 overwritten before each; queries, maps and rows change "
    "from call to call, layer after layer of a pinned pool; FP8 keys, 64 heads"
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One hit rate at one shape, the short road; us."""

    seats: int
    length: int
    records: str
    hit: float
    cap: int  # the rule's
    indexer: Measurement
    link: Measurement
    in_turn: Measurement
    fused: Measurement
    ahead: Measurement  # every miss staged, and nothing after it

    @property
    def without(self) -> float:
        """A run without overlap, the faster way to count it: measured in turn, or the sum of its parts."""
        return min(self.indexer.median + self.link.median, self.in_turn.median)

    @property
    def bound(self) -> float:
        return max(self.indexer.median, self.link.median)

    @property
    def limit(self) -> float:
        return (self.indexer.median + self.link.median) / self.bound

    @property
    def ratio(self) -> float:
        return self.without / self.fused.median

    @property
    def gain(self) -> float:
        return (self.ratio - 1) / (self.limit - 1)

    @property
    def shapes(self) -> dict[str, Any]:
        sizes = dict(seats=self.seats, length=self.length, records=self.records, hit=self.hit)
        parts = dict(indexer_us=round(self.indexer.median, 2), link_us=round(self.link.median, 2))
        return sizes | dict(misses=misses_at(self.hit)) | parts

    def notes(self) -> str:
        return (
            f"{self.records} records: indexer alone {self.indexer.median:.1f} us, recall alone {self.link.median:.1f} "
            f"us, in turn {self.in_turn.median:.1f} us, fused {self.fused.median:.1f} us with cap {self.cap}; every "
            f"miss staged, and no recall, {self.ahead.median:.1f} us; ratio {self.ratio:.3f}, limit {self.limit:.3f}, "
            f"gain {self.gain:.3f}"
        )


# ---- what is compiled ------------------------------------------------------------------------------------------------


def jobs_of(seats: int, length: int, records: str, pool: Any, is_whole: bool) -> dict[str, timing.Job]:
    """Every program of a shape and a format, by name; of arrays only shapes and types are needed."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    form, host_rows, slots = FORMATS[records], pool.shape[1], seats * SLOTS
    held = array(slots, *form.shape, dtype=form.dtype)
    maps = SlotMaps(array(host_rows), array(slots), array(slots), array(slots, dtype=bool))
    pages = array(seats * length // calls.PAGE, calls.PAGE * (calls.WIDTH + 4), dtype=jnp.uint8)
    shared = Shared(
        *(array(seats, 1, calls.HEADS, dtype=jnp.float32), pages, array(seats, length // calls.PAGE)),
        *(array(seats, length), array(seats), array(seats), pool),
    )
    query = array(seats, 1, calls.HEADS, calls.WIDTH, dtype=jnp.float8_e4m3fn)
    limits = array(seats, dtype=jnp.float32)
    entry = array(seats * calls.MOST_MISSES)

    def start(road: str) -> Start:
        return Start(array(seats, 1), (array(seats), array(seats, STAGING[road])))

    found = {}
    changing = (start("short"), query, limits, array(host_rows), calls.Lists(entry, entry, entry, array()))
    sized = dict(staging=STAGING["short"])
    for name, program in (
        *(("resident", calls.resident), ("link", calls.link), ("in turn", calls.in_turn)),
        *(("fused", functools.partial(calls.fused, **sized)), ("ahead", functools.partial(calls.ahead, **sized))),
        ("timeline", functools.partial(calls.fused, **sized, middle=MIDDLE)),
    ):
        found[name] = timing.Job(program, held, changing, shared)
    if is_whole:
        config = calls.config_of(seats, length, records, host_rows, STAGING["whole"])
        for way in WAYS:
            program = functools.partial(calls.whole, config=config, way=way)
            found[f"whole {way}"] = timing.Job(program, held, (start("whole"), query, limits, limits, maps), shared)
    return found


class Compiling:
    """Programs on their way, compiled side by side while pools are made; `result` waits for one."""

    def __init__(self, threads: int):
        timing.build()
        self.executor = ThreadPoolExecutor(threads)
        self.futures: dict[Any, Future[Any]] = {}

    def add(self, key: Any, jobs: dict[str, timing.Job]) -> None:
        for name, job in jobs.items():
            self.futures[key, name] = self.executor.submit(timing.compile_one, job)

    def result(self, key: Any, name: str) -> Any:
        return self.futures.pop((key, name)).result()


# ---- measured --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bound:
    """A shape and a format with their arrays on the device, and how often each call is made."""

    given: Inputs
    records: str
    pool: Any
    repeats: int

    def __post_init__(self):
        form, self._misses = FORMATS[self.records], -1
        self.held = [jnp.zeros((self.given.seats * SLOTS, *form.shape), form.dtype)]
        self.starts = {road: calls.start_of(self.given, staging) for road, staging in STAGING.items()}

    def time(
        self,
        compiled: Any,
        misses: int,
        cap: int,
        repeats: int | None = None,
        keep: Callable[[Any], None] | None = None,
    ) -> Measurement:
        """us of a program of the short road."""
        maps = self.maps(misses)
        wanted = calls.lists(self.given, misses, cap, STAGING["short"])
        changing = [
            (self.starts["short"], one.query, one.threshold, of.slot_of, asked)
            for one, of, asked in zip(self.given.sets, maps, wanted, strict=True)
        ]
        return timing.time_calls(
            compiled,
            lambda call: self.held[0],
            changing,
            calls.shared_of(self.given, self.pool, cap),
            self.pool.shape[0],
            repeats or self.repeats,
            keep=keep or (lambda state: self.held.__setitem__(0, state)),
        )

    def time_whole(self, compiled: Any, misses: int, cap: int) -> Measurement:
        """us of a program of the whole road; every call has maps of its own, as the misses of a pool are its own."""
        changing = [
            (self.starts["whole"], one.query, one.threshold, one.bound, maps)
            for one, maps in zip(self.given.sets, self.maps(misses), strict=True)
        ]
        return timing.time_calls(
            compiled,
            lambda call: self.held[0],
            changing,
            calls.shared_of(self.given, self.pool, cap),
            self.pool.shape[0],
            self.repeats,
            keep=lambda state: self.held.__setitem__(0, state),
        )

    def maps(self, misses: int) -> list[SlotMaps]:
        if self._misses != misses:
            self._misses, self._maps = misses, calls.missing(self.given, misses, self.pool.shape[1])
        return self._maps


def short_road(bound: Bound, programs: Callable[[str], Any], hits: tuple[float, ...], in_full: bool) -> list[Point]:
    """Measures and records every hit rate; `in_full` other caps and the timeline as well."""
    given, records = bound.given, bound.records
    compiled = {name: programs(name) for name in ("resident", "link", "in turn", "fused", "ahead")}
    indexer = bound.time(compiled["resident"], 0, 0)
    # The rate of a long recall, for the cap rule.
    most = bound.time(compiled["link"], calls.MOST_MISSES, 0)
    rate = given.seats * calls.MOST_MISSES / most.median
    each = threshold.rows_per_position(indexer.median, rate, given.seats * given.length)
    cap = int(each * given.length)
    print(f"\n{given.seats} x {given.length}, {records} records, FP8 keys; us: indexer {spread(indexer)}", flush=True)
    print(f"    cap rule: {rate:.1f} rows a us, c = {each:.5f}, cap {cap}")
    print("     hit     link  in turn    fused                 all staged  ratio  limit   gain")
    points = []
    for hit in hits:
        misses = misses_at(hit)
        link = most if misses == calls.MOST_MISSES else bound.time(compiled["link"], misses, 0)
        turned = bound.time(compiled["in turn"], misses, 0)
        ours, staged = bound.time(compiled["fused"], misses, cap), bound.time(compiled["ahead"], misses, K)
        sizes = (given.seats, given.length, records, hit, cap)
        points.append(Point(*sizes, indexer, link, turned, ours, staged))
        report(points[-1], bound.repeats)
    if in_full:
        sweep_caps(bound, compiled["fused"], points)
        timeline(bound, programs("timeline"), points)
    return points


def report(point: Point, repeats: int) -> None:
    print(
        f"    {point.hit:4.2f} {point.link.median:8.1f} {point.in_turn.median:8.1f} {spread(point.fused):28} "
        f"{point.ahead.median:8.1f} {point.ratio:6.2f} {point.limit:6.2f} {point.gain:6.2f}",
        flush=True,
    )
    where = f"{point.seats} x {point.length}, {point.records} records, hit rate {point.hit}"
    method = METHOD.format(repeats=repeats)
    ways = {"resident": point.indexer, "link": point.link, "in turn": point.in_turn, "fused": point.fused}
    for way, value in ways.items():
        harness.record(
            value=value,
            unit="us",
            file=FILE,
            name=f"scores and recall, {where}: {way}",
            shapes=point.shapes | dict(road="short", way=way, cap=point.cap if way == "fused" else 0),
            method=method,
            fraction_of_limit=round(point.bound / value.median, 4) if way == "fused" else None,
            notes=point.notes() if way == "fused" else "",
        )
    harness.record(
        value=point.ahead,
        unit="us",
        file=FILE,
        name=f"scores with prefetch, {where}",
        shapes=point.shapes | dict(way="ahead", cap=misses_at(point.hit)),
        method=method,
        fraction_of_limit=round(point.bound / point.ahead.median, 4),
        notes=point.notes(),
    )


def sweep_caps(bound: Bound, compiled: Any, points: list[Point]) -> None:
    """Other caps than the rule's, each hit rate in a line."""
    caps = sorted({*CAPS, points[0].cap})
    print("    cap      " + "".join(f"{cap:8}" for cap in caps) + "   (us; the rule's is " + f"{points[0].cap})")
    for point in points:
        misses, times = misses_at(point.hit), {}
        for cap in caps:
            # More than there are to stage is the same again.
            if cap <= misses or not times or max(times) < misses:
                times[cap] = bound.time(compiled, misses, cap, repeats=REPEATS_OF_MANY)
        print(f"    {point.hit:4.2f}     " + "".join(f"{time.median:8.1f}" for time in times.values()), flush=True)
        best = min(times, key=lambda cap: times[cap].median)
        for cap, value in times.items():
            harness.record(
                value=value,
                unit="us",
                file=FILE,
                name=f"cap {cap}, {point.seats} x {point.length}, {point.records} records, hit rate {point.hit}",
                shapes=point.shapes | dict(road="short", way="fused", cap=cap),
                method=METHOD.format(repeats=REPEATS_OF_MANY),
                notes=f"the rule's cap is {point.cap}; the best of this line is {best}",
            )


def timeline(bound: Bound, compiled: Any, points: list[Point]) -> None:
    """When scores with prefetch end and what the recall behind them takes: an event between the two."""
    for point in points:
        spans: list[tuple[float, float]] = []

        def read(state: Any, spans: list[tuple[float, float]] = spans) -> None:
            bound.held[0] = state
            spans.append((timing.elapsed_us(timing.BEGIN, MIDDLE), timing.elapsed_us(MIDDLE, timing.END)))

        bound.time(compiled, misses_at(point.hit), point.cap, repeats=REPEATS_OF_MANY, keep=read)
        said = []
        for part, values in zip(("scores and prefetch", "recall"), zip(*spans[2:], strict=True), strict=True):
            value = harness.summarise(list(values))
            said.append(f"{part} {spread(value)}")
            harness.record(
                value=value,
                unit="us",
                file=FILE,
                name=f"timeline, {point.seats} x {point.length}, {point.records} records, hit rate {point.hit}: {part}",
                shapes=point.shapes | dict(road="short", way="fused", cap=point.cap),
                method=METHOD.format(repeats=REPEATS_OF_MANY) + "; an event between the two kernels",
            )
        print(f"    hit {point.hit}: {', '.join(said)}", flush=True)


def whole_road(bound: Bound, programs: Callable[[str], Any], hits: tuple[float, ...], cap: int) -> None:
    """The same with top-k and slot management, each way beside the others."""
    given, cap = bound.given, min(cap, STAGING["whole"])
    where = f"{given.seats} x {given.length}"
    compiled = {}
    for way in WAYS:
        try:
            compiled[way] = programs(f"whole {way}")
            bound.time_whole(compiled[way], misses_at(hits[0]), cap)
        except jax.errors.JaxRuntimeError as error:  # the other ways have times all the same
            compiled.pop(way, None)
            print(f"    {way} does not run: {str(error).splitlines()[0]}", flush=True)
    print(f"    whole road, {bound.records}, cap {cap}: " + "  ".join(f"{way:>24}" for way in compiled), flush=True)
    for hit in hits:
        misses = misses_at(hit)
        times = {way: bound.time_whole(program, misses, cap) for way, program in compiled.items()}
        print(
            f"    {hit:4.2f}                " + "  ".join(f"{spread(value):>24}" for value in times.values()),
            flush=True,
        )
        for way, value in times.items():
            harness.record(
                value=value,
                unit="us",
                file=FILE,
                name=f"scores to filled slots, {where}, {bound.records} records, hit rate {hit}: {way}",
                shapes=dict(seats=given.seats, length=given.length, records=bound.records, hit=hit, misses=misses)
                | dict(road="whole", way=way, cap=cap if way in ("fused", "second stream") else 0),
                method=METHOD.format(repeats=bound.repeats) + f"; {SLOTS} slots a seat, exact top-k, slot manager of "
                "the library",
                notes=f"over the resident run {value.median / times['resident'].median:.3f}, in turn over this "
                f"{times['in turn'].median / value.median:.3f}",
            )


def spread(value: Measurement) -> str:
    return f"{value.median:.1f} [{value.p10:.1f} {value.p90:.1f}]"
