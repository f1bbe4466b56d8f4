"""What a report draws of a section: five questions, each with a chart, a sentence and the lines it shows.

Knows which numbers of a row answer which question. Does not know how a chart is drawn or where it is put.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from echo_jax.report import svg
from echo_jax.report.rows import Line, Section, as_number, distinct
from echo_jax.report.svg import Series

SHOWN = svg.COLOURS
"""Most lines of a chart, of a table none is left out."""

STEPS_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Figure:
    """A chart and what is said of it."""

    name: str  # for a file
    title: str
    chart: str  # one <svg> element
    caption: str
    lines: tuple[Line, ...]  # whose numbers it shows


def figures(section: Section) -> list[Figure]:
    """All figures that the rows of a section give. One is left out where its rows are missing (a pool size to compare
    with, the numbers of every step)."""
    made = [_speed(section, cost) for cost in section.costs]
    made.append(useful_and_wasted(section))
    made.append(threshold_error(section))
    if len(section.layers) > 1:
        made.append(hit_rate(section))
    if len(section.at(section.usual_slots())) > 1:
        made += [pareto(section, cost) for cost in section.costs]
    return [figure for figure in made if figure is not None]


def _speed(section: Section, cost: str) -> Figure | None:
    """Speed against pool size. Lines are those settings that were tried at more than one size."""
    sizes = sorted({line.slots for line in section.lines})
    groups: dict[str, list[Line]] = {}
    for line in sorted(section.lines, key=lambda line: line.slots):
        groups.setdefault(_name(section, line, "slots_per_request"), []).append(line)
    groups = {name: lines for name, lines in groups.items() if len(lines) > 1}
    if not groups:
        return None
    usual = section.usual_slots()

    def time(line: Line) -> float:
        return line.mean("cost", cost, "indexer_us") + line.mean("cost", cost, "with_overlap_us", "mean")

    def at_usual(name: str) -> float:
        return min((time(line) for line in groups[name] if line.slots == usual), default=math.inf)

    chosen = sorted(sorted(groups, key=at_usual)[:SHOWN], key=list(groups).index)
    series = [
        Series(name, [(line.slots, time(line)) for line in groups[name]], place, place)
        for place, name in enumerate(chosen)
    ]
    shown = [line for name in chosen for line in groups[name]]
    times = [y for one in series for _, y in one.points]
    x = svg.log_axis("device slots per request", [size for size in sizes if any(line.slots == size for line in shown)])
    title = f"Speed against pool size ({cost})"
    left = f" The {SHOWN} fastest of {len(groups)} settings." if len(groups) > SHOWN else ""
    return Figure(
        f"speed-{cost}",
        title,
        svg.line_chart(title, x, svg.axis("us per layer", times, from_zero=True), series),
        f"Index scores and the copies that nobody hides, in microseconds of a layer by the cost model {cost}; mean "
        f"over {_count(len(section.layers), 'layer')} and all counted steps. Lower is faster; attention and experts "
        f"come on top.{left}",
        tuple(shown),
    )


def useful_and_wasted(section: Section) -> Figure:
    """Rows that were copied ahead and used, recalled in the open, copied in vain."""
    slots = section.usual_slots()
    lines = section.at(slots)[: 3 * SHOWN]
    names = [_name(section, line, "slots_per_request") for line in lines]
    parts = [
        Series(what, [(place, line.per_step(name)) for place, line in enumerate(lines)], colour)
        for what, name, colour in (
            ("copied ahead and used", "useful", 2),
            ("recalled", "recalled", 0),
            ("copied in vain", "wasted", 1),
        )
    ]
    totals = [sum(part.points[place][1] for part in parts) for place in range(len(lines))]
    title = "Useful, recalled and wasted rows"
    return Figure(
        "useful",
        title,
        svg.bar_chart(title, svg.axis("rows per layer-step of the batch", totals, from_zero=True), parts, names),
        f"Rows that crossed the link in a layer-step of the whole batch of {section.head['requests']}, at {slots:,} "
        f"slots per request; mean over {_count(len(section.layers), 'layer')}."
        f"{_left_out(len(lines), len(section.at(slots)))}",
        lines,
    )


def threshold_error(section: Section) -> Figure | None:
    """The k-th score and what was predicted, step by step, in the layer whose predictions are worst."""
    own = [
        line for line in section.lines if line.series and line.is_echo and line.highest("threshold_error", "rank") > 0
    ]
    own = distinct(own, lambda line: line.setting["policy"])
    if not own:
        return None
    first, rest = own[0], own[1:]
    errors = {
        row["key"]["layer"]: as_number(row["threshold_error"]["rank"])
        for row in first.rows
        if row["key"]["layer"] in first.series
    }
    layer = max(errors, key=lambda one: -math.inf if math.isnan(errors[one]) else errors[one])
    kind = next(row["key"]["archetype"] for row in first.rows if row["key"]["layer"] == layer)
    chosen = [first, *(line for line in rest if layer in line.series)][: SHOWN - 4]
    steps = len(first.series[layer]["kth_score"])
    skip = max(0, steps - STEPS_SHOWN)

    def points(line: Line, name: str) -> list[tuple[float, float]]:
        values = line.series[layer][name]
        return [(step, as_number(value)) for step, value in enumerate(values) if step >= skip]

    series = [Series("k-th score", points(first, "kth_score"), 7, has_points=False, width=3.5)]
    series += [
        Series(line.setting["policy"], points(line, "predicted"), place, place, has_points=False, width=1.5)
        for place, line in enumerate(chosen)
    ]
    truth = [y for _, y in series[0].points if math.isfinite(y)]
    room = (max(truth) - min(truth)) if truth else 1.0
    # A prediction far outside would flatten everything else; the table has its error.
    inside = [y for one in series for _, y in one.points if truth and min(truth) - room <= y <= max(truth) + room]
    y = svg.axis("score", inside)
    clipped = [
        dataclasses.replace(one, points=[(a, b if y.low <= b <= y.high else math.nan) for a, b in one.points])
        for one in series
    ]
    title = f"The k-th score and its prediction, layer {layer} ({kind})"
    cut = f" The last {STEPS_SHOWN} of {steps} steps." if skip else ""
    return Figure(
        "threshold",
        title,
        svg.line_chart(title, svg.axis("step", [skip, steps - 1], least_step=1), y, clipped),
        f"Request 0 in the layer whose k-th score {first.setting['policy']} predicts worst: its threshold admits "
        f"{errors[layer]:.0%} more or fewer rows than k in the mean.{cut}{_left_out(len(chosen), len(own))}",
        tuple(chosen),
    )


def hit_rate(section: Section) -> Figure:
    """How much of the selected set was resident, layer by layer. What is copied ahead does not change it."""

    def decides(line: Line) -> tuple:
        rival = "" if line.is_echo else line.setting["rule"]
        return (rival, line.setting["eviction"], line.setting["pool"], line.slots)

    lines = distinct(section.lines, decides)
    chosen = lines[:SHOWN]
    series = []
    for place, line in enumerate(chosen):
        points = [(row["key"]["layer"], 100 * as_number(row["hit_rate"])) for row in line.rows]
        name = "every setting" if len(lines) == 1 else _name(section, line, "policy", "cap")
        series.append(Series(name, points, place, place))
    rates = [y for one in series for _, y in one.points]
    x = svg.axis("layer", section.layers, count=8, least_step=1)
    title = "Hit rate by layer"
    kinds = section.kinds()
    said = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return Figure(
        "hits",
        title,
        svg.line_chart(title, x, svg.axis("% resident", [*rates, 100.0]), series),
        f"Share of the selected rows that had a slot before the step; layers: {said}."
        f"{_left_out(len(chosen), len(lines))}",
        tuple(chosen),
    )


def pareto(section: Section, cost: str) -> Figure:
    """Wasted bytes against exposed time, and the settings that nothing beats in both."""
    slots = section.usual_slots()
    lines = section.at(slots)
    points = {line: _waste_and_time(line, cost) for line in lines}
    best = set(front_of({line: point for line, point in points.items() if not line.is_bound}))
    front = sorted(points[line] for line in best)
    series = [Series("not beaten in both", front, 7, 2, has_points=False)]
    for place, line in enumerate(sorted(lines, key=lambda line: (line not in best, points[line]))):
        name = _name(section, line, "slots_per_request") + (" (bound)" if line.is_bound else "")
        colour = place % 7 if line in best else 7
        series.append(Series(name, [points[line]], colour, has_line=False, is_labelled=True))
    title = f"Wasted bytes against exposed time ({cost})"
    return Figure(
        f"pareto-{cost}",
        title,
        svg.line_chart(
            title,
            svg.axis("KB copied in vain per layer-step", [x for x, _ in points.values()], from_zero=True),
            svg.axis("exposed us per layer", [y for _, y in points.values()]),
            series,
        ),
        f"At {slots:,} slots per request, mean over {_count(len(section.layers), 'layer')}; time that copies add to a "
        f"layer by the cost model {cost}. Lower and further left is better; what nothing beats in both is coloured. "
        "A bound knows the future.",
        lines,
    )


def _waste_and_time(line: Line, cost: str) -> tuple[float, float]:
    return line.mean("wasted_bytes_per_step") / 1000, line.mean("cost", cost, "with_overlap_us", "mean")


def front_of[T](points: dict[T, tuple[float, float]]) -> list[T]:
    """Those that no other one equals or beats in both numbers while being better in one."""

    def is_beaten(one: tuple[float, float]) -> bool:
        return any(x <= one[0] and y <= one[1] and (x, y) != one for x, y in points.values())

    return [key for key, one in points.items() if not is_beaten(one)]


def _left_out(shown: int, all: int) -> str:
    return f" {shown} of {all} are drawn; the table has all." if shown < all else ""


def _name(section: Section, line: Line, *without: str) -> str:
    """A label for a chart: of a user's class, only the class."""
    return re.sub(r"[\w.]+:(?=[A-Z_])", "", section.label(line, *without))


COLUMNS = ("setting", "hit", "ahead", "wasted", "recalled", "KB in", "off by", "cand./k", "missed")


def table(section: Section) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and a row for each setting; what the columns mean is `COLUMN_NOTES`."""
    columns = [*COLUMNS]
    for cost in section.costs:
        columns += [f"{cost} plain", cost, f"{cost} P99"]
    rows = []
    for line in section.lines:
        cells = [section.label(line), percent(line.mean("hit_rate")), percent(line.mean("prefetched_share"))]
        cells += [f"{line.per_step('wasted'):.1f}", f"{line.per_step('recalled'):.1f}"]
        cells += [f"{line.per_step('host_to_device_bytes') / 1000:,.0f}", percent(line.mean("threshold_error", "rank"))]
        cells += [f"{line.mean('candidates_per_k'):.2f}", percent(line.mean("missed_share"))]
        for cost in section.costs:
            cells.append(f"{line.mean('cost', cost, 'without_overlap_us', 'mean'):.1f}")
            cells.append(f"{line.mean('cost', cost, 'with_overlap_us', 'mean'):.1f}")
            cells.append(f"{line.highest('cost', cost, 'with_overlap_us', 'p99'):.1f}")
        rows.append(cells)
    return columns, rows


COLUMN_NOTES = (
    "Means over layers. hit: selected rows that had a slot; ahead: missing rows that were copied ahead; wasted and "
    "recalled: rows of a layer-step of the batch; KB in: host to device in a layer-step; off by: how many places the "
    "threshold is off, over k; cand./k: older rows above the threshold; missed: of the exact set, not attended. The "
    "columns of a cost model are microseconds of copies that nobody hides, in a layer: plain if no copy overlapped the "
    "scores, P99 that of the worst layer."
)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def percent(value: float) -> str:
    """0.5 -> "50.0 %", NaN -> "-"."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def notes(section: Section) -> Sequence[str]:
    """What a reader must know before comparing."""
    head = section.head
    said = [
        f"{_count(len(section.layers), 'layer')}, {_count(head['requests'], 'request')} of up to {head['capacity']:,} "
        f"positions, k {head['top_k']:,}, {head['steps']} steps of which the first {head['skip']} are not counted, "
        f"{head['record_bytes']:,} bytes a record."
    ]
    if section.left_out:
        said.append(f"{section.left_out} layers that only some settings have are left out: a replay was not finished.")
    if idealised := sorted({x.setting["rule"] for x in section.lines if x.setting["form"] == "idealised"}):
        said.append(f"Idealised, in the rival's favour, since the trace lacks what it needs: {', '.join(idealised)}.")
    nan = sum(row["nan_scores"] for row in section.lines[0].rows)
    if nan:
        said.append(f"{nan:,} visible scores are NaN; they rank below every number.")
    return said
