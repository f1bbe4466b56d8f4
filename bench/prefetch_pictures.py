"""Plots of what prefetch gains, from the rows of `python -m bench.prefetch` and `bench.prefetch_policies`.

    python -m bench.prefetch_pictures [folder for the pictures, default docs/figures]

It knows the rows' shapes and which of them make a picture. It measures nothing; a picture without its rows is not
drawn, and said to be missing. Rows are read from bench/results, or from the folder that ECHO_RESULTS names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import harness
from echo_jax.report import svg
from echo_jax.report.svg import Series

MAIN = (16, 131_072)
FOLDER = harness.ROOT / "docs" / "figures"

type Rows = Iterable[harness.Row]


def newest(rows: Rows) -> list[harness.Row]:
    """One row of each name."""
    found: dict[str, harness.Row] = {}
    for row in rows:
        if "hit" in row.shapes and "pages" not in row.shapes:
            continue  # of before both ways in which pages lie were measured
        if row.name and (row.name not in found or row.when() >= found[row.name].when()):
            found[row.name] = row
    return list(found.values())


def values(rows: Rows, axis: str, **wanted: Any) -> dict[Any, float]:
    """The values of the rows whose shapes are as wanted, by the shape `axis`."""
    chosen = [row for row in rows if all(row.shapes.get(name) == value for name, value in wanted.items())]
    return {row.shapes[axis]: row.value for row in chosen if axis in row.shapes}


def _quotient(above: Mapping[Any, float], below: Mapping[Any, float]) -> list[tuple[float, float]]:
    return sorted((place, above[place] / below[place]) for place in above.keys() & below.keys())


def against_hit_rate(rows: list[harness.Row]) -> str | None:
    """Gain over both in turn, measured and allowed, for each record format."""
    series, (seats, length) = [], MAIN
    grid = [row for row in rows if row.name.startswith("scores and recall")]
    for number, records in enumerate(("fp8", "bf16")):
        of = dict(seats=seats, length=length, records=records)
        ways = {way: values(grid, "hit", way=way, **of) for way in ("resident", "link", "in turn", "fused")}
        if measured := _quotient(ways["in turn"], ways["fused"]):
            series.append(Series(f"{records} records", measured, number))
            both = {hit: ways["resident"][hit] + link for hit, link in ways["link"].items()}
            longer = {hit: max(ways["resident"][hit], link) for hit, link in ways["link"].items()}
            limit = _quotient(both, longer)
            series.append(Series(f"{records}: (scores + link) / max of both", limit, number, dash=1, has_points=False))
    if not series:
        return None
    x = svg.axis("hit rate", [place for one in series for place, _ in one.points])
    y = svg.axis("in turn over together", [1.0, *(ratio for one in series for _, ratio in one.points)])
    return svg.line_chart(
        f"Scores with prefetch and recall, {seats} x {length:,}: gain over both in turn", x, y, series
    )


def against_context(rows: list[harness.Row]) -> str | None:
    """The same at a hit rate of 0.9, for each number of seats."""
    series = []
    grid = [row for row in rows if row.name.startswith("scores and recall")]
    for number, seats in enumerate(sorted({row.shapes["seats"] for row in grid})):
        of = dict(seats=seats, hit=0.9, records="fp8")
        if points := _quotient(values(grid, "length", way="in turn", **of), values(grid, "length", way="fused", **of)):
            series.append(Series(f"{seats} seats", points, number))
    if not any(len(one.points) > 1 for one in series):
        return None
    x = svg.axis("context", [place for one in series for place, _ in one.points], from_zero=True)
    y = svg.axis("in turn over together", [1.0, *(ratio for one in series for _, ratio in one.points)])
    return svg.line_chart("Gain of prefetch at a hit rate of 0.9, FP8 records", x, y, series)


def against_cap(rows: list[harness.Row]) -> str | None:
    """Time by cap, a line a hit rate."""
    sweep = [row for row in rows if row.name.startswith("cap ") and row.shapes.get("records") == "fp8"]
    series = []
    for number, hit in enumerate(sorted({row.shapes["hit"] for row in sweep})):
        points = sorted(values(sweep, "cap", hit=hit).items())
        series.append(Series(f"hit rate {hit}", points, number))
    if not series:
        return None
    x = svg.axis("most rows that a seat stages", [cap for one in series for cap, _ in one.points], from_zero=True)
    y = svg.axis("us", [time for one in series for _, time in one.points], from_zero=True)
    return svg.line_chart("Scores, prefetch and recall by cap, FP8 records, 16 x 131,072", x, y, series)


def of_a_layer(rows: list[harness.Row]) -> str | None:
    """Where the time of scores and recall goes, one after the other and together."""
    seats, length = MAIN
    of, names, scores, recall = dict(seats=seats, length=length, records="fp8"), [], [], []
    grid = [row for row in rows if row.name.startswith("scores and recall")]
    alone, link = values(grid, "hit", way="resident", **of), values(grid, "hit", way="link", **of)
    timeline = [row for row in rows if row.name.startswith("timeline")]
    first = values([row for row in timeline if row.name.endswith("prefetch")], "hit", **of)
    second = values([row for row in timeline if row.name.endswith("recall")], "hit", **of)
    for hit in sorted(alone.keys() & first.keys() & second.keys()):
        names += [f"hit rate {hit}: in turn", f"hit rate {hit}: together"]
        scores += [(0.0, alone[hit]), (0.0, first[hit])]
        recall += [(0.0, link[hit]), (0.0, second[hit])]
    if not names:
        return None
    parts = [Series("scores, with prefetch where together", scores, 0), Series("recall into slots", recall, 1)]
    x = svg.axis("us", [a[1] + b[1] for a, b in zip(scores, recall, strict=True)], from_zero=True)
    return svg.bar_chart(f"One layer's scores and recall, {seats} x {length:,}, FP8 records", x, parts, names)


def of_policies(rows: list[harness.Row]) -> str | None:
    """What each threshold policy copies for a seat and step, and what is left to recall."""
    found = [row for row in rows if row.name.startswith("threshold policy") and row.shapes.get("wanted_hit") == 0.9]
    if not found:
        return None
    parts = [
        Series(name, [(0.0, row.shapes[name]) for row in found], number)
        for number, name in enumerate(("useful", "wasted", "recalled"))
    ]
    total = [sum(part.points[place][1] for part in parts) for place in range(len(found))]
    names = [f"{row.shapes['policy']}: {row.value:.1f} us" for row in found]
    x = svg.axis("rows of a seat in a step", total, from_zero=True)
    return svg.bar_chart("Threshold policies at a hit rate of 0.9", x, parts, names)


PICTURES: dict[str, Callable[[list[harness.Row]], str | None]] = {
    "prefetch-hit-rate": against_hit_rate,
    "prefetch-context": against_context,
    "prefetch-cap": against_cap,
    "prefetch-layer": of_a_layer,
    "prefetch-policies": of_policies,
}


def draw(rows: list[harness.Row], folder: Path) -> list[str]:
    """Writes every picture whose rows are there; the names of those that are not drawn."""
    missing = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        if (chart := picture(newest(rows))) is None:
            missing.append(name)
        else:
            (folder / f"{name}.svg").write_text(svg.standalone(chart), encoding="utf-8")
    return missing


def main() -> None:
    results = Path(os.environ.get("ECHO_RESULTS", harness.RESULTS))
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    missing = draw([row for row, place in harness.read_rows(results) if "prefetch.jsonl" in place], folder)
    print(f"{len(PICTURES) - len(missing)} pictures in {folder}" + "".join(f"; no rows for {name}" for name in missing))


if __name__ == "__main__":
    main()
