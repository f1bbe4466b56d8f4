"""Plots of the ECHO paper's figures from this project's rows: what stands between the `plots` markers of docs/paper.md.

It knows how each figure is drawn, and nothing of how a row is measured. A figure whose rows are missing is not drawn
and says which are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench import harness, paper
from echo_jax.replay import cost
from echo_jax.report import svg
from echo_jax.report.svg import Series

FOLDER = "figures"
THEIRS, OURS = 7, 0
"""Colours."""

POOL = 200_000
"""Slots of a layer in the figure of tokens."""

Rows = Mapping[str, harness.Row]


class Drawn(NamedTuple):
    """A chart, or the reason why there is none; and rows that it lacks."""

    chart: str | None
    missing: tuple[str, ...] = ()


def plots(figures: Sequence[paper.Figure], rows: Rows) -> tuple[str, dict[str, str]]:
    """The Markdown of all plots, and their files by name."""
    parts, files = [], {}
    for figure in figures:
        if (plot := figure.plot) is None:
            continue
        title = f"Figure {figure.figure}: {figure.what}"
        drawn = FUNCTIONS[plot.by](title, rows) if plot.by else bars(title, plot, rows)
        parts.append(f"### {title}")
        if drawn.chart is not None:
            name = f"paper-{re.sub(r'[^a-z0-9]+', '-', figure.figure)}.svg"
            files[name] = svg.standalone(drawn.chart)
            parts.append(f"![{title}]({FOLDER}/{name})")
        said = [plot.note] if plot.note and drawn.chart else []
        if drawn.missing:
            said.append(f"Not measured and not drawn: {'; '.join(drawn.missing)}.")
        parts += [" ".join(said)] if said else []
        lines = [*(command.strip() for command in figure.command.split(";")), "python -m bench.paper write"]
        parts.append("\n".join(["```sh", *lines, "```"]))
    return "\n\n".join(parts), files


def bars(title: str, plot: paper.Plot, rows: Rows) -> Drawn:
    """Theirs and ours below each other; nothing where nothing of ours is recorded."""
    names, theirs, ours, missing = [], [], [], []
    for label, *keys in plot.bars:
        value = _value(keys, rows, plot.field)
        if value is None:
            missing.append(str(label))
            continue
        is_theirs = isinstance(keys[0], int | float)
        names.append(f"{label}: {value:.3g}")
        theirs.append((len(theirs), value if is_theirs else math.nan))
        ours.append((len(ours), math.nan if is_theirs else value))
    if all(math.isnan(value) for _, value in ours):
        return Drawn(None, tuple(missing))
    parts = [Series("here", ours, OURS)]
    if not all(math.isnan(value) for _, value in theirs):
        parts.append(Series("ECHO's paper", theirs, THEIRS))
    x = svg.axis(plot.axis, [value for _, value in [*theirs, *ours]], from_zero=True)
    return Drawn(svg.bar_chart(title, x, parts, names), tuple(missing))


def _value(keys: Sequence[str | float], rows: Rows, field: str) -> float | None:
    if isinstance(keys[0], int | float):
        return float(keys[0])
    some = [rows.get(str(key)) for key in keys]
    found = [getattr(row, field) for row in some if row is not None]
    if len(found) != len(keys) or None in found:
        return None
    return found[0] if len(found) == 1 else found[0] / found[1]


def tokens(title: str, rows: Rows) -> Drawn:
    """Tokens against the memory that is left for the cache."""
    names = ("token, resident", "token, offloaded, its slots apart", "slot in every layer")
    keys = [f"paper: device bytes of a {name}" for name in names]
    if lacking := tuple(key for key in keys if key not in rows):
        return Drawn(None, lacking)
    resident, offloaded, slot = (rows[key].value for key in keys)
    sizes = range(10, 81, 5)
    least = POOL * slot / 1e9
    lines = [
        Series("resident", [(size, size * 1e3 / resident) for size in sizes], OURS, has_points=False),
        Series(
            f"offloaded, {POOL:,} slots",
            [(size, (size - least) * 1e3 / offloaded) for size in (least, *sizes) if size >= least],
            1,
            has_points=False,
        ),
        Series("ECHO: 511K without offload", [(511e3 * resident / 1e9, 0.511)], THEIRS, has_line=False),
    ]
    x = svg.axis("GB for the cache", [0, sizes[-1]])
    y = svg.axis("million tokens", [value for line in lines for _, value in line.points], from_zero=True)
    return Drawn(svg.line_chart(title, x, y, lines))


def candidates(title: str, rows: Rows) -> Drawn:
    """Step by step: the synthetic layer, and the least and most predictable layers of the small model."""
    found = paper.candidates()
    (synthetic,) = found["synthetic median layer"]
    layers = found["echo-tiny-manual"]
    spread = [sum(abs(share - 1) for share in layer) for layer in layers]
    lines = [_steps("synthetic median layer", synthetic, OURS)]
    for which, name in ((min, "closest"), (max, "furthest")):
        layer = spread.index(which(spread))
        lines.append(_steps(f"echo-tiny, layer {layer}, {name} to k", layers[layer], len(lines)))
    x = svg.axis("decode step, the first quarter left out", [0, max(len(line.points) for line in lines)])
    y = svg.axis("candidates over k", [value for line in lines for _, value in line.points], from_zero=True)
    return Drawn(svg.line_chart(title, x, y, lines))


def _steps(name: str, shares: Sequence[float], colour: int) -> Series:
    return Series(name, list(enumerate(shares)), colour, has_points=False)


def hit_rates(title: str, rows: Rows) -> Drawn:
    """Every layer, and the two that the paper singles out."""
    rates = paper.hit_rates()
    ours = Series("here", [(layer, 100 * rate) for layer, rate in rates.items()], OURS, has_line=False)
    theirs = Series("ECHO, layers 12 and 17", [(12, 95.0), (17, 88.0)], 1, has_line=False)
    values = [value for _, value in [*ours.points, *theirs.points]]
    chart = svg.line_chart(title, svg.axis("layer", [0, 60]), svg.axis("% resident", [*values, 100.0]), [ours, theirs])
    return Drawn(chart)


def gains(title: str, rows: Rows) -> Drawn:
    """What overlapping gains against the hit rate, at the paper's batch and context."""
    sizes = {"requests": 16, "context": 131_072, "top_k": 2048}
    lines = []
    for name, colour in (("h20", THEIRS), ("h200", 3)):
        model = cost.load(name)
        points = [
            (hit / 100, cost.gain(model, **sizes, bytes_per_row=1152, hit_rate=hit / 100)) for hit in range(50, 100)
        ]
        lines.append(Series(f"{name.upper()}, cost model", points, colour, 1, has_points=False))
    theirs = [(point["hit_rate"], point["gain"]) for point in cost.load("h20").measured["gain"]]
    lines.append(Series("ECHO's best, H20", theirs, THEIRS, has_line=False))
    missing = []
    for place, records in enumerate(("bf16", "fp8")):
        found = []
        for name, row in rows.items():
            if not name.startswith(f"scores and recall, 16 x 131072, {records} records, hit rate "):
                continue
            turned = rows.get(name.removesuffix("fused") + "in turn")
            if name.endswith(": fused") and turned is not None:
                apart = min(row.shapes["indexer_us"] + row.shapes["link_us"], turned.value)
                found.append((float(row.shapes["hit"]), apart / row.value))
        if found:
            lines.append(Series(f"H200, {records} records", sorted(found), place))
        else:
            missing.append(f"{records} records")
    x = svg.axis("hit rate", [0.5, 1.0])
    y = svg.axis("without overlap over with it", [1.0, *(value for line in lines for _, value in line.points)])
    return Drawn(svg.line_chart(title, x, y, lines), tuple(missing))


FUNCTIONS = {"tokens": tokens, "candidates": candidates, "hit_rates": hit_rates, "gains": gains}
