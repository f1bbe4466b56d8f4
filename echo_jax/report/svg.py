"""Line, point and bar charts as SVG text: readable in light and dark, on paper and on a phone, without a dependency.

Knows axes, marks and where text goes. Does not know what a number means. A chart is one `<svg>` element whose colours
are CSS variables: `STYLE` gives them their values, once for a page; `standalone` puts it into the file itself.

Text is set for a width of 480 units, which a phone shows at about three quarters of their size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

WIDTH, PLOT_HEIGHT = 480, 250
LEFT, RIGHT, TOP, UNDER = 56, 14, 14, 44
"""Room around the plot; UNDER holds the ticks and the name of the x axis."""

LETTER = 6.7
"""About how wide a letter of 13 units is; long texts are cut and legends broken by it."""

COLOURS = 8
"""Series that can be told apart; charts of more say how many they leave out."""

DASHES = ("", "7 3", "2 3", "9 3 2 3")

_LIGHT = ("#0b62b8", "#c2410c", "#15803d", "#9333ea", "#a16207", "#0e7490", "#be185d", "#57606a")
_DARK = ("#6cb6ff", "#ff9d5c", "#5fd38a", "#c79bff", "#e3c04f", "#4fd1d9", "#ff8fc0", "#adbac7")


def _variables(colours: Sequence[str], paper: str, ink: str, faint: str, grid: str) -> str:
    series = " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))
    return f"--paper: {paper}; --ink: {ink}; --faint: {faint}; --grid: {grid}; {series}"


PALETTE = f"""\
:root {{ color-scheme: light dark; {_variables(_LIGHT, "#ffffff", "#1f2328", "#59636e", "#d8dee4")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK, "#12161c", "#e6edf3", "#9aa5b1", "#333b45")} }} }}
"""

STYLE = f"""\
{PALETTE}.chart {{ width: 100%; max-width: 40rem; height: auto; display: block; font: 13px system-ui, sans-serif; }}
.chart .paper {{ fill: var(--paper); }} .chart text {{ fill: var(--ink); }} .chart .tick {{ fill: var(--faint); }}
.chart .grid {{ stroke: var(--grid); stroke-width: 1; }} .chart .line {{ fill: none; stroke-width: 2; }}
.chart .edge {{ stroke: var(--paper); stroke-width: 1; }}
"""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A range of numbers and where its ticks stand. `is_log`: equal factors are equally far apart."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        value = math.log(value) if self.is_log else value
        return (value - low) / (high - low)


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of one name. `colour` and `dash` are indices; `points` may hold NaN, where the line breaks."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dash: int = 0
    has_line: bool = True
    has_points: bool = True
    is_labelled: bool = False  # the name stands beside the points, not in the legend
    width: float = 2.0


def axis(
    label: str, values: Sequence[float], *, from_zero: bool = False, count: int = 5, least_step: float = 0.0
) -> Axis:
    """A linear axis that holds all finite values; its ends are ticks, at least `least_step` apart."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-300):
        low, high = (0.0, high) if high > 0 else (low - 1.0, high + 1.0)
    step = _round_step(max((high - low) / count, least_step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = tuple((place * step, f"{place * step:,.{digits}f}") for place in range(first, last + 1))
    return Axis(label, first * step, last * step, ticks)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis with the values themselves for ticks, those that have room."""
    ordered = sorted(set(values))
    low, high = ordered[0], ordered[-1]
    if low == high:
        low, high = low / 1.5, high * 1.5
    made = Axis(label, low, high, (), is_log=True)
    ticks: list[tuple[float, str]] = []
    for value in ordered:
        text = f"{value:,g}"
        if not ticks or (made.share(value) - made.share(ticks[-1][0])) * (WIDTH - LEFT) > LETTER * (len(text) + 1.5):
            ticks.append((value, text))
    return dataclasses.replace(made, ticks=tuple(ticks))


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Lines and points in a frame, and a legend below it."""
    right, bottom = WIDTH - RIGHT, TOP + PLOT_HEIGHT

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + x.share(point[0]) * (right - LEFT), bottom - y.share(point[1]) * PLOT_HEIGHT

    parts = []
    for value, text in y.ticks:
        height = at((x.low, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(_text(LEFT - 6, height + 4.5, text, "tick", anchor="end"))
    for value, text in x.ticks:
        place = at((value, y.low))[0]
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        anchor = "end" if place > right - LETTER * len(text) / 2 else "middle"
        parts.append(_text(place, bottom + 18, text, "tick", anchor=anchor))
    parts.append(_text((LEFT + right) / 2, bottom + 37, x.label, anchor="middle"))
    turned = f"rotate(-90 13 {TOP + PLOT_HEIGHT / 2})"
    parts.append(_text(13, TOP + PLOT_HEIGHT / 2, y.label, anchor="middle", more=f'transform="{turned}"'))
    taken: list[tuple[float, float, float]] = []
    for one in series:
        parts += _drawn(one, at)
    for one in series:
        if one.is_labelled:
            parts += _label_beside(one, at, taken)
    legend, height = _legend([one for one in series if not one.is_labelled], bottom + UNDER)
    return _document(title, height, [*parts, *legend])


def bar_chart(title: str, x: Axis, parts: Sequence[Series], names: Sequence[str]) -> str:
    """Horizontal bars, one for each name, of parts stacked in order; part n of bar m is `parts[n].points[m][1]`."""
    right, row = WIDTH - RIGHT, 36
    bottom = TOP + row * len(names)

    def at(value: float) -> float:
        return 12 + x.share(value) * (right - 12)

    drawn = []
    for value, text in x.ticks:
        drawn.append(f'<line class="grid" x1="{at(value):.1f}" x2="{at(value):.1f}" y1="{TOP}" y2="{bottom + 4}"/>')
        anchor = "start" if value == x.low else "end" if value == x.high else "middle"
        drawn.append(_text(at(value), bottom + 18, text, "tick", anchor=anchor))
    for number, name in enumerate(names):
        top, done = TOP + row * number, 0.0
        drawn.append(_text(12, top + 13, _cut(name, WIDTH - 24)))
        for part in parts:
            value = part.points[number][1]
            value = 0.0 if math.isnan(value) else value
            width = max(0.0, at(done + value) - at(done))
            drawn.append(
                f'<rect class="edge" x="{at(done):.1f}" y="{top + 17}" width="{width:.1f}" '
                f'height="14" style="fill: var(--c{part.colour})"><title>{escape(name)}: {value:,.4g} '
                f"{escape(part.name)}</title></rect>"
            )
            done += value
    drawn.append(_text((12 + right) / 2, bottom + 37, x.label, anchor="middle"))
    legend, height = _legend(parts, bottom + UNDER, is_filled=True)
    return _document(title, height, [*drawn, *legend])


def standalone(chart: str) -> str:
    """A chart as a file of its own."""
    head, rest = chart.split(">", 1)
    return f"{head}>\n<style>\n{STYLE}</style>{rest}\n"


# ---- parts -----------------------------------------------------------------------------------------------


def _document(title: str, height: float, parts: Sequence[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'aria-label={quoteattr(title)}>\n<title>{escape(title)}</title>\n<rect class="paper" width="{WIDTH}" '
        f'height="{height:.0f}"/>\n{inner}\n</svg>'
    )


def _drawn(one: Series, at) -> list[str]:
    colour, parts = f"var(--c{one.colour % COLOURS})", []
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in one.points:
        if all(map(math.isfinite, point)):
            pieces[-1].append(at(point))
        elif pieces[-1]:
            pieces.append([])
    if one.has_line:
        dash = DASHES[one.dash % len(DASHES)]
        for piece in pieces:
            if len(piece) > 1:
                path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece)
                style = f"stroke: {colour}; stroke-width: {one.width:g}" + (
                    f"; stroke-dasharray: {dash}" if dash else ""
                )
                parts.append(f'<path class="line" d="{path}" style="{style}"/>')
    if one.has_points:
        for point in one.points:
            if all(map(math.isfinite, point)):
                x, y = at(point)
                said = f"{one.name}: {point[0]:,.4g}, {point[1]:,.4g}"
                parts.append(
                    f'<circle class="edge" cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: {colour}">'
                    f"<title>{escape(said)}</title></circle>"
                )
    return parts


def _label_beside(one: Series, at, taken: list[tuple[float, float, float]]) -> list[str]:
    """The name at the first point, where it meets no other name; else nothing, since the point has a title."""
    x, y = at(one.points[0])
    name = _cut(one.name, 200)
    length = LETTER * len(name)
    for left, shift in ((x + 7, 4.5), (x - 7 - length, 4.5), (x + 7, 18), (x - 7 - length, -9), (x + 7, -9)):
        place = (left, left + length, y + shift)
        inside = left >= LEFT and left + length <= WIDTH - 4 and TOP + 8 < place[2] < TOP + PLOT_HEIGHT
        if inside and not any(place[0] < b and a < place[1] and abs(place[2] - h) < 13 for a, b, h in taken):
            taken.append(place)
            return [_text(left, place[2], name)]
    return []


def _legend(series: Sequence[Series], top: float, *, is_filled: bool = False) -> tuple[list[str], float]:
    """Names beside a piece of their line, broken into rows; and the height down to its end."""
    parts, x, y = [], 12.0, top + 14
    for one in series:
        name = _cut(one.name, WIDTH - 60)
        length = 34 + LETTER * len(name)
        if x > 12 and x + length > WIDTH - 8:
            x, y = 12.0, y + 19
        colour = f"var(--c{one.colour % COLOURS})"
        if is_filled or not one.has_line:
            parts.append(f'<rect x="{x + 6:.1f}" y="{y - 9:.1f}" width="10" height="10" style="fill: {colour}"/>')
        else:
            dash = DASHES[one.dash % len(DASHES)]
            style = f"stroke: {colour}; stroke-width: {one.width:g}" + (f"; stroke-dasharray: {dash}" if dash else "")
            parts.append(f'<path class="line" d="M{x:.1f} {y - 4:.1f}h22" style="{style}"/>')
        parts.append(_text(x + 27, y, name))
        x += length + 10
    return parts, (y + 12 if series else top)


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", more: str = "") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}{" " + more if more else ""}>{escape(text)}</text>'


def _cut(text: str, width: float) -> str:
    room = int(width / LETTER)
    return text if len(text) <= room else text[: room - 1] + "…"
