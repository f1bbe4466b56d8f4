"""The two roads of the prefetch benches, measured at one shape and one record format: points, other caps, a timeline.

It knows how often a program is called for a point, what is printed and which rows are written. It knows no claim. What
a call is stands in `prefetch_calls`, what is compiled in `prefetch_jobs`, how long it takes in `prefetch_timing`.

The limit of a gain is (indexer + link) / max(indexer, link): both alone, in this run, by the same clock. Without
overlap is the faster of the two in turn and of the sum of both alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench import harness
from bench import prefetch_calls as calls
from bench import prefetch_timing as timing
from bench.harness import Measurement
from bench.prefetch_calls import FORMATS, SLOTS, Inputs, K, misses_at
from bench.prefetch_checks import FILE
from bench.prefetch_jobs import MIDDLE, STAGING, WAYS
from echo_jax import threshold
from echo_jax.types import SlotMaps

CAPS = (0, 32, 64, 96, 128, 160, 192, 256, 384, 512, 1024)
PROBED = (0, 64, 96, 128, 160)  # caps below the missing rows at a hit rate of 0.9; the rule's lies between two of them
BEHIND = (384, 768)  # caps that prefetch reaches when scores are long made
SLACK = 0.1  # of the scores' time: what prefetch may take longer than they do
REPEATS_OF_MANY = 14  # where many values stand in a line
METHOD = (
    "CUDA events around a call, {repeats} calls, median; L2 overwritten before each; queries, maps and rows change "
    "from call to call, layer after layer of a pinned pool; FP8 keys, 64 heads"
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One hit rate at one shape, the short road; us."""

    seats: int
    length: int
    pages: str  # how they lie
    records: str
    hit: float
    cap: int  # the rule's
    indexer: Measurement
    link: Measurement
    in_turn: Measurement
    fused: Measurement
    ahead: Measurement  # scores and prefetch of every miss, and nothing after it
    disordered: Measurement  # the recall alone, of the same rows in no order

    @property
    def where(self) -> str:
        return f"{self.seats} x {self.length}, {self.records} records, hit rate {self.hit}"

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
        sizes = dict(seats=self.seats, length=self.length, pages=self.pages, records=self.records, hit=self.hit)
        parts = dict(indexer_us=round(self.indexer.median, 2), link_us=round(self.link.median, 2))
        return sizes | dict(misses=misses_at(self.hit)) | parts

    def notes(self) -> str:
        return (
            f"{self.records} records: indexer alone {self.indexer.median:.1f} us, recall alone {self.link.median:.1f} "
            f"us and {self.disordered.median:.1f} us in no order, in turn {self.in_turn.median:.1f} us, fused "
            f"{self.fused.median:.1f} us with cap {self.cap}; every "
            f"miss staged, and no recall, {self.ahead.median:.1f} us; ratio {self.ratio:.3f}, limit {self.limit:.3f}, "
            f"gain {self.gain:.3f}"
        )


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
        is_ordered: bool = True,
    ) -> Measurement:
        """us of a program of the short road."""
        maps = self.maps(misses)
        wanted = calls.lists(self.given, misses, cap, STAGING["short"])
        wanted = wanted if is_ordered else [calls.disordered(one) for one in wanted]
        changing = [
            (self.starts["short"], one.query, one.threshold, of.slot_of, asked)
            for one, of, asked in zip(self.given.sets, maps, wanted, strict=True)
        ]
        return self._time(compiled, changing, cap, repeats or self.repeats, keep)

    def time_parts(self, compiled: Any, misses: int, cap: int, repeats: int) -> tuple[Measurement, Measurement]:
        """us of scores with prefetch, and of the recall behind them: an event between the two."""
        spans: list[tuple[float, float]] = []

        def read(state: Any) -> None:
            self.held[0] = state
            spans.append((timing.elapsed_us(timing.BEGIN, MIDDLE), timing.elapsed_us(MIDDLE, timing.END)))

        self.time(compiled, misses, cap, repeats, keep=read)
        first, second = zip(*spans[-repeats:], strict=True)
        return harness.summarise(list(first)), harness.summarise(list(second))

    def time_whole(self, compiled: Any, misses: int, cap: int) -> Measurement:
        """us of a program of the whole road; every call has maps of its own, as the misses of a pool are its own."""
        changing = [
            (self.starts["whole"], one.query, one.threshold, one.bound, maps)
            for one, maps in zip(self.given.sets, self.maps(misses), strict=True)
        ]
        return self._time(compiled, changing, cap, self.repeats)

    def _time(self, compiled: Any, changing: list[Any], cap: int, repeats: int, keep: Any = None) -> Measurement:
        """`keep` is given each call's state, and keeps it in `held`, as is done without one."""
        return timing.time_calls(
            compiled,
            lambda call: self.held[0],
            changing,
            calls.shared_of(self.given, self.pool, cap),
            self.pool.shape[0],
            repeats,
            keep=keep or (lambda state: self.held.__setitem__(0, state)),
        )

    def maps(self, misses: int) -> list[SlotMaps]:
        if self._misses != misses:
            self._misses, self._maps = misses, calls.missing(self.given, misses, self.pool.shape[1])
        return self._maps


def short_road(
    bound: Bound, programs: Callable[[str], Any], indexer: Measurement, hits: tuple[float, ...]
) -> list[Point]:
    """Measures and records every hit rate; `indexer` is what the scores alone take, whatever the records are."""
    given, records = bound.given, bound.records
    compiled = {name: programs(name) for name in ("link", "in turn", "fused", "timeline")}
    shape = f"{given.seats} x {given.length}, {given.pages_lie} pages, {records} records, FP8 keys"
    print(f"\n{shape}; us: indexer {spread(indexer)}", flush=True)
    rule = rates(bound, compiled["timeline"], compiled["link"], indexer)
    print("     hit     link no order  in turn  cap    fused                 all staged  ratio  limit   gain")
    points = []
    for hit in hits:
        misses = misses_at(hit)
        cap = rule.cap(given, misses)
        times = dict(
            link=bound.time(compiled["link"], misses, 0),
            in_turn=bound.time(compiled["in turn"], misses, 0),
            fused=bound.time(compiled["fused"], misses, cap),
            ahead=bound.time_parts(compiled["timeline"], misses, K, bound.repeats)[0],
            disordered=bound.time(compiled["link"], misses, 0, REPEATS_OF_MANY, is_ordered=False),
        )
        points.append(Point(given.seats, given.length, given.pages_lie, records, hit, cap, indexer, **times))
        report(given, points[-1], bound.repeats)
    return points


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the rule of the cap is made of."""

    scoring_us: float
    beside: float  # rows that the prefetch role fetches while scores are made, a us
    behind: float  # and when they are made
    recall: float  # rows that a recall fetches, a us

    def cap(self, given: Inputs, misses: int) -> int:
        """Of each seat; `misses` of its rows are expected to be missing."""
        missing = given.seats * misses if self.behind >= self.recall else 0
        of_all = threshold.rows_per_position(self.scoring_us, self.beside, given.seats * given.length, missing)
        return round(of_all * given.length)


def rates(bound: Bound, timeline: Any, link: Any, indexer: Measurement) -> Rates:
    """By times with a tenth and with half of the selected rows missing."""
    given, few, many = bound.given, misses_at(0.9), calls.MOST_MISSES

    def time_to(cap: int, misses: int) -> float:
        return bound.time_parts(timeline, misses, cap, REPEATS_OF_MANY)[0].median

    times = {cap: time_to(cap, few) for cap in (*PROBED, few)}
    beside = given.seats * max(largest_cap(times, SLACK), 1.0) / indexer.median
    behind = given.seats * (BEHIND[1] - BEHIND[0]) / max(time_to(BEHIND[1], many) - time_to(BEHIND[0], many), 1e-3)
    recall = given.seats * many / bound.time(link, many, 0, REPEATS_OF_MANY).median
    found = Rates(indexer.median, beside, behind, recall)
    print("    scores and prefetch by cap " + "  ".join(f"{cap}: {time:.1f}" for cap, time in times.items()))
    print(
        f"    rows a us: {beside:.1f} while scores are made, {behind:.1f} behind them, {recall:.1f} by a recall; caps "
        f"{found.cap(given, few)} with {few} missing, {found.cap(given, many)} with {many}",
        flush=True,
    )
    return found


def largest_cap(times: dict[int, float], slack: float) -> float:
    """The cap at which scores with prefetch take 1 + slack of their time without; straight lines between the `times`
    us of caps in ascending order, from 0 on. Where all of them fit, the last."""
    allowed, caps = times[0] * (1 + slack), list(times)
    for low, high in zip(caps, caps[1:], strict=False):
        if times[high] > allowed:
            return low + (high - low) * (allowed - times[low]) / (times[high] - times[low])
    return caps[-1]


def report(given: Inputs, point: Point, repeats: int) -> None:
    print(
        f"    {point.hit:4.2f} {point.link.median:8.1f} {point.disordered.median:8.1f} {point.in_turn.median:8.1f} "
        f"{point.cap:4} {spread(point.fused):28} "
        f"{point.ahead.median:8.1f} {point.ratio:6.2f} {point.limit:6.2f} {point.gain:6.2f}",
        flush=True,
    )
    where = point.where
    method = METHOD.format(repeats=repeats)
    ways = {"resident": point.indexer, "link": point.link, "in turn": point.in_turn, "fused": point.fused}
    for way, value in ways.items():
        harness.record(
            value=value,
            unit="us",
            file=FILE,
            name=given.named(f"scores and recall, {where}: {way}"),
            shapes=point.shapes | dict(road="short", way=way, cap=point.cap if way == "fused" else 0),
            method=method,
            fraction_of_limit=round(point.bound / value.median, 4) if way == "fused" else None,
            notes=point.notes() if way == "fused" else "",
        )
    harness.record(
        value=point.disordered,
        unit="us",
        file=FILE,
        name=given.named(f"recall of rows in no order, {where}"),
        shapes=point.shapes | dict(way="disordered"),
        method=METHOD.format(repeats=REPEATS_OF_MANY),
        notes=f"in the order of their addresses {point.link.median:.1f} us",
    )
    harness.record(
        value=point.ahead,
        unit="us",
        file=FILE,
        name=given.named(f"scores with prefetch, {where}"),
        shapes=point.shapes | dict(way="ahead", cap=misses_at(point.hit)),
        method=method + "; to an event behind the kernel",
        fraction_of_limit=round(point.bound / point.ahead.median, 4),
        notes=point.notes(),
    )


def sweep_caps(bound: Bound, compiled: Any, points: list[Point]) -> None:
    """Other caps than the rule's, each hit rate in a line."""
    print(f"    {bound.records} records, us\n    cap      " + "".join(f"{cap:8}" for cap in CAPS))
    for point in points:
        misses, times = misses_at(point.hit), {}
        for cap in CAPS:
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
                name=bound.given.named(f"cap {cap}, {point.where}"),
                shapes=point.shapes | dict(road="short", way="fused", cap=cap),
                method=METHOD.format(repeats=REPEATS_OF_MANY),
                notes=f"the rule's cap is {point.cap}; the best of this line is {best}",
            )


def timeline(bound: Bound, compiled: Any, points: list[Point]) -> None:
    """When scores with prefetch end and what the recall behind them takes."""
    for point in points:
        said = []
        found = bound.time_parts(compiled, misses_at(point.hit), point.cap, REPEATS_OF_MANY)
        for part, value in zip(("scores and prefetch", "recall"), found, strict=True):
            said.append(f"{part} {spread(value)}")
            harness.record(
                value=value,
                unit="us",
                file=FILE,
                name=bound.given.named(f"timeline, {point.where}: {part}"),
                shapes=point.shapes | dict(road="short", way="fused", cap=point.cap),
                method=METHOD.format(repeats=REPEATS_OF_MANY) + "; an event between the two kernels",
            )
        print(f"    {point.records} records, hit {point.hit}: {', '.join(said)}", flush=True)


def whole_road(bound: Bound, programs: Callable[[str], Any], caps: dict[float, int]) -> None:
    """The same with top-k and slot management, each way beside the others; `caps` of the hit rates."""
    given, hits = bound.given, tuple(caps)
    where = f"{given.seats} x {given.length}"
    compiled = {}
    for way in WAYS:
        try:
            compiled[way] = programs(f"whole {way}")
            bound.time_whole(compiled[way], misses_at(hits[0]), caps[hits[0]])
        except jax.errors.JaxRuntimeError as error:  # the other ways have times all the same
            compiled.pop(way, None)
            print(f"    {way} does not run: {str(error).splitlines()[0]}", flush=True)
    print(f"    whole road, {bound.records}: " + " " * 8 + "  ".join(f"{way:>24}" for way in compiled), flush=True)
    for hit, cap in caps.items():
        misses, cap = misses_at(hit), min(cap, STAGING["whole"])
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
                name=given.named(f"scores to filled slots, {where}, {bound.records} records, hit rate {hit}: {way}"),
                shapes=dict(
                    seats=given.seats,
                    length=given.length,
                    pages=given.pages_lie,
                    records=bound.records,
                    hit=hit,
                    misses=misses,
                )
                | dict(road="whole", way=way, cap=cap if way in ("fused", "second stream") else 0),
                method=METHOD.format(repeats=bound.repeats) + f"; {SLOTS} slots a seat, exact top-k, slot manager of "
                "the library",
                notes=f"over the resident run {value.median / times['resident'].median:.3f}, in turn over this "
                f"{times['in turn'].median / value.median:.3f}",
            )


def spread(value: Measurement) -> str:
    return f"{value.median:.1f} [{value.p10:.1f} {value.p90:.1f}]"
