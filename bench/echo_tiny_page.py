"""Tables and figures of docs/echo-tiny.md and of the model card, made from recorded rows and from nothing else.

    python -m bench.echo_tiny_page

Between `<!-- echo-tiny:begin NAME -->` and `<!-- echo-tiny:end -->` stands what a function of BLOCKS returns; all other
text is left as it is. Rows come from examples/evaluate_small_dsa.py (EVALUATED) and bench/predictability.py; of rows
that say the same the newest counts. It knows what the pages look like, and how shares are averaged.
"""

import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import harness, predictability
from bench.findings_page import share, table
from echo_jax.report import svg
from echo_jax.report.svg import Series
from echo_jax.threshold import Ema

PAGE = harness.ROOT / "docs" / "echo-tiny.md"
CARD = harness.ROOT / "echo_jax" / "data" / "echo-tiny" / "MODEL_CARD.md"
FIGURES = PAGE.parent / "figures"
EVALUATED, TRAINED = "gpu_echo_tiny.jsonl", "training.jsonl"
MISSING = "Not measured."

MULTIPLES = ("1", "2", "4", "8", "16")
STEPS_SHOWN = 100
DRAWN_LAYERS = (1, 4)
"""Whose k-th scores are drawn: the steadiest and the least steady."""

_BLOCK = re.compile(r"(<!-- echo-tiny:begin ([a-z-]+) -->\n).*?(<!-- echo-tiny:end -->)", re.DOTALL)


class Drawing:
    """Figures of one page, by file name."""

    def __init__(self, page: Path):
        self.page = page
        self.files: dict[str, str] = {}

    def figure(self, name: str, title: str, chart: str) -> str:
        self.files[f"{name}.svg"] = svg.standalone(chart)
        return f"![{title}]({os.path.relpath(FIGURES, self.page.parent)}/{name}.svg)"


def newest(file: str, *keys: str) -> list[harness.Row]:
    """Of a file's rows that have these keys in `shapes` and agree in them, the newest; in order of first appearance."""
    found: dict[tuple, harness.Row] = {}
    for row, place in harness.read_rows():
        if place.startswith(f"{file}:") and all(key in row.shapes for key in keys):
            key = tuple(row.shapes[name] for name in keys)
            if key not in found or row.when() >= found[key].when():
                found[key] = row
    return list(found.values())


def distinct(rows: Iterable[harness.Row], key: str) -> list:
    return list(dict.fromkeys(row.shapes[key] for row in rows))


# ---- the model card: what the evaluation says ------------------------------------------------------------


def held_out() -> list[harness.Row]:
    return newest(EVALUATED, "group", "form", "context")


def block_bits(drawing: Drawing) -> str:
    """Bits per byte by group and context, dense and sparse; and of the last weights whose training rows have them."""
    if not (rows := held_out()):
        return MISSING
    earlier = newest(TRAINED, "group", "form", "context")
    before = {tuple(row.shapes[key] for key in ("group", "form", "context")): f"{row.value:.3f}" for row in earlier}
    cells = []
    for context in distinct(rows, "context"):
        for group in distinct(rows, "group"):
            found = {r.shapes["form"]: r for r in rows if (r.shapes["group"], r.shapes["context"]) == (group, context)}
            if found:
                dense, sparse = found["dense"].value, found["sparse"].value
                windows = str(found["dense"].shapes["windows"])
                values = [f"{dense:.3f}", f"{sparse:.3f}", f"{sparse / dense:.3f}"]
                values.append(before.get((group, "sparse", context), ""))
                cells.append([f"{group}, {context:,}", windows, *values])
    return table(["group, context", "windows", "dense", "sparse", "sparse over dense", "sparse, before"], cells)


def block_positions(drawing: Drawing) -> str:
    """Bits per byte by position of the longest context; dense and sparse are too close to draw both."""
    if not (rows := held_out()):
        return MISSING
    rows = [row for row in rows if row.shapes["context"] == max(distinct(rows, "context"))]
    ranges = list(rows[0].shapes["bpb_by_position"])
    cells, lines = [], []
    for place, group in enumerate(distinct(rows, "group")):
        for form in ("dense", "sparse"):
            (row,) = (r for r in rows if (r.shapes["group"], r.shapes["form"]) == (group, form))
            values = [row.shapes["bpb_by_position"][one] for one in ranges]
            cells.append([f"{group}, {form}", *(f"{value:.3f}" for value in values)])
            if form == "sparse":
                points = list(zip((int(one.split("-")[1]) for one in ranges), values, strict=True))
                lines.append(Series(group, points, place, place))
    x = svg.log_axis("position in the window, end of its range", [x for x, _ in lines[0].points])
    y = svg.axis("bits per byte", [value for line in lines for _, value in line.points], from_zero=True)
    title = "Held-out bits per byte by position, sparse"
    drawn = drawing.figure("echo-tiny-positions", title, svg.line_chart(title, x, y, lines))
    return "\n\n".join([drawn, table(["group, form", *ranges], cells)])


def block_tasks(drawing: Drawing) -> str:
    """Whole answers right, by task and length."""
    if not (rows := newest(EVALUATED, "task", "form", "length")):
        return MISSING
    lengths = sorted(distinct(rows, "length"))
    known = {(row.shapes["task"], row.shapes["form"], row.shapes["length"]): row for row in rows}
    cells, lines = [], []
    for place, task in enumerate(distinct(rows, "task")):
        for form in ("dense", "sparse"):
            found = [known.get((task, form, length)) for length in lengths]
            cells.append([f"{task}, {form}", *("" if row is None else share(row.value) for row in found)])
            if form == "sparse":
                points = [(row.shapes["length"], 100 * row.value) for row in found if row is not None]
                lines.append(Series(task, points, place, place))
    x = svg.log_axis("length of the window in bytes", lengths)
    y = svg.axis("% of the answers right", [0, 100])
    title = "Whole answers right, sparse attention to 256 positions"
    drawn = drawing.figure("echo-tiny-tasks", title, svg.line_chart(title, x, y, lines))
    counts = " or ".join(str(count) for count in sorted(distinct(rows, "count")))
    said = f"{counts} windows of each kind and length."
    return "\n\n".join([said, drawn, table(["task, form", *(f"{length:,}" for length in lengths)], cells)])


def block_mass(drawing: Drawing) -> str:
    """Share of dense attention inside the selected set, by layer."""
    if not (rows := [row for row in held_out() if row.shapes["form"] == "dense"]):
        return MISSING
    cells, lines = [], []
    for row in rows:
        mass = row.shapes["mass"]
        name = f"{row.shapes['group']}, {row.shapes['context']:,}"
        cells.append([name, *(f"{value:.2f}" for value in mass), f"{statistics.median(mass):.2f}"])
    longest = max(distinct(rows, "context"))
    for place, row in enumerate(row for row in rows if row.shapes["context"] == longest):
        lines.append(Series(row.shapes["group"], list(enumerate(row.shapes["mass"])), place, place))
    layers = range(len(rows[0].shapes["mass"]))
    x, y = svg.axis("layer", [layers[0], layers[-1]]), svg.axis("share of dense attention", [0.0, 1.0])
    title = f"Dense attention inside the selected set, {longest:,} bytes"
    drawn = drawing.figure("echo-tiny-mass", title, svg.line_chart(title, x, y, lines))
    return "\n\n".join([drawn, table(["group, context", *(f"layer {layer}" for layer in layers), "median"], cells)])


# ---- the page: how local its selections are --------------------------------------------------------------


def described() -> list[harness.Row]:
    return newest(predictability.FILE, "document", "kind", "top_k", "layer")


def own_k() -> int:
    """The model's k: the middle of the trained indexer's three."""
    return int(statistics.median({row.shapes["top_k"] for row in described() if row.shapes["kind"] == "trained"}))


def block_locality(drawing: Drawing) -> str:
    """The trained indexer at the model's own k, by document and layer."""
    cells = []
    for row in described():
        found = row.shapes
        if (found["kind"], found["top_k"]) != ("trained", own_k()):
            continue
        cells.append(
            [
                f"{found['document']}, {found['layer']}", share(row.value),
                *(share(found["lru_miss"][m]) for m in MULTIPLES), share(found["first_use"]),
                *(f"{value:.2f}" for value in found["candidates"]), f"{found['kth_score']:.2f}",
                f"{found['kth_deviation']:.2f}", f"{found['kth_error_rms']:.2f}",
            ]
        )  # fmt: skip
    columns = ["document, layer", "overlap", *(f"LRU {m}k" for m in MULTIPLES), "first use", "cand. p10", "p50", "p90"]
    return table([*columns, "k-th score", "deviation", "EMA off by"], cells)


def block_kth(drawing: Drawing) -> str:
    """The k-th score and its prediction, step by step, in two layers."""
    parts = []
    for layer in DRAWN_LAYERS:
        (row,) = (
            row for row in described()
            if (row.shapes["kind"], row.shapes["layer"]) == ("trained", layer) and "kth" in row.shapes
        )  # fmt: skip
        truth = row.shapes["kth"]
        rule, guessed = Ema(0.5), []
        memory = rule.init()
        for score in truth:
            guessed.append(float(rule.value(memory)))
            memory = rule.update(memory, score)
        first = len(truth) - STEPS_SHOWN
        lines = [
            Series(name, list(enumerate(values[first:])), colour, colour, has_points=False)
            for colour, (name, values) in enumerate((("k-th score", truth), ("EMA 0.5 of those before", guessed)))
        ]
        y = svg.axis("score", [value for line in lines for _, value in line.points])
        title = f"k-th score and its prediction, layer {layer}, {row.shapes['document']}"
        chart = svg.line_chart(title, svg.axis("step", [0, STEPS_SHOWN]), y, lines)
        parts.append(drawing.figure(f"echo-tiny-kth-{layer}", title, chart))
    return "\n\n".join(parts)


def cases() -> dict[str, list[harness.Row]]:
    """Rows by what scores and how many are selected."""
    found: dict[str, list[harness.Row]] = {}
    for row in described():
        found.setdefault(f"{row.shapes['kind']}, k {row.shapes['top_k']}", []).append(row)
    return found


def chance(row: harness.Row) -> float:
    """Overlap of two sets drawn at random: k of the positions that the middle query sees."""
    found = row.shapes
    return found["top_k"] / (found["context"] - found["steps"] / 2)


def block_indexer(drawing: Drawing) -> str:
    """Every kind of score: means over documents and layers, candidates and error as medians of them."""
    cells, bars = [], []
    for name, rows in cases().items():
        of = [row.shapes for row in rows]
        overlap = statistics.fmean(row.value for row in rows)
        by_chance = statistics.fmean(map(chance, rows))
        misses = [statistics.fmean(one["lru_miss"][m] for one in of) for m in ("1", "2", "4", "8")]
        candidates = [statistics.median(one["candidates"][n] for one in of) for n in range(3)]
        error = statistics.median(one["kth_error_rms"] / one["kth_deviation"] for one in of)
        cells.append(
            [name, share(overlap), share(by_chance), *map(share, misses), *(f"{c:.2f}" for c in candidates),
             f"{error:.2f}"]
        )  # fmt: skip
        bars.append((name, 100 * by_chance, 100 * (overlap - by_chance)))
    # Sets of attention and of its logarithm are the same sets.
    bars = [bar for bar in bars if not bar[0].startswith("log")]
    parts = [
        Series(what, [(n, one[column]) for n, one in enumerate(bars)], colour)
        for what, column, colour in (("by chance", 1, 7), ("more than that", 2, 0))
    ]
    title = "Share of a selected set that was selected a step before"
    x = svg.axis("% of the set", [0, 100])
    drawn = drawing.figure("echo-tiny-overlap", title, svg.bar_chart(title, x, parts, [name for name, *_ in bars]))
    columns = ["scores", "overlap", "by chance", *(f"LRU {m}k" for m in (1, 2, 4, 8)), "cand. p10", "p50", "p90"]
    made = table([*columns, "EMA off by, over deviation"], cells)
    return "\n\n".join([drawn, made, _misses(drawing), _by_document()])


def _misses(drawing: Drawing) -> str:
    lines = []
    for name, rows in cases().items():
        if not name.startswith("log") and rows[0].shapes["top_k"] == own_k():
            points = [(int(m), 100 * statistics.fmean(r.shapes["lru_miss"][m] for r in rows)) for m in MULTIPLES]
            lines.append(Series(name, points, len(lines), len(lines)))
    x = svg.log_axis("slots, in units of k", [x for x, _ in lines[0].points])
    y = svg.axis("% of the selected rows that miss", [y for line in lines for _, y in line.points], from_zero=True)
    title = "Misses of an LRU cache by what scores the positions"
    return drawing.figure("echo-tiny-misses", title, svg.line_chart(title, x, y, lines))


def _by_document() -> str:
    """Overlap by document, mean over layers."""
    documents = distinct(described(), "document")
    cells = []
    for name, rows in cases().items():
        if not name.startswith("log"):
            of = [[row.value for row in rows if row.shapes["document"] == one] for one in documents]
            cells.append([name, *(share(statistics.fmean(values)) if values else share(math.nan) for values in of)])
    return table(["overlap", *documents], cells)


BLOCKS = {
    PAGE: {"locality": block_locality, "kth": block_kth, "indexer": block_indexer},
    CARD: {"bits": block_bits, "positions": block_positions, "tasks": block_tasks, "mass": block_mass},
}


def rewrite(page: Path, text: str) -> tuple[str, dict[str, str]]:
    """A page with every block made anew, and its figures by file name; ValueError for unknown or missing blocks."""
    blocks = BLOCKS[page]
    named = [match[2] for match in _BLOCK.finditer(text)]
    if set(named) != set(blocks):
        raise ValueError(f"{page.name} has blocks {sorted(named)} but there are {sorted(blocks)}")
    drawing = Drawing(page)
    made = _BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]](drawing)}\n\n{match[3]}", text)
    return made, drawing.files


def main(pages: Sequence[Path] = tuple(BLOCKS)) -> None:
    for page in pages:
        text, files = rewrite(page, page.read_text(encoding="utf-8"))
        for name, chart in files.items():
            (FIGURES / name).write_text(chart, encoding="utf-8")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
