"""Tables and figures of docs/findings.md, made from the rows of bench/findings.py and from nothing else.

    python -m bench.findings write

Between `<!-- findings:begin NAME -->` and `<!-- findings:end -->` stands what a function of BLOCKS returns; all other
text of the page is left as it is. Knows what a page looks like. How the answers are computed is in findings_rows.py.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench import findings, harness
from bench.findings_rows import (
    at_equal_waste,
    best_rule,
    curve,
    exposed,
    geometric_mean,
    missing,
    pick,
    plain,
    sections,
    short,
    wasted,
)
from bench.paper import latest
from echo_jax.report import svg
from echo_jax.report.rows import Line, as_number, mean
from echo_jax.report.svg import Series

PAGE = harness.ROOT / "docs" / "findings.md"
FIGURES = PAGE.parent / "figures"

_BLOCK = re.compile(r"(<!-- findings:begin ([a-z-]+) -->\n).*?(<!-- findings:end -->)", re.DOTALL)


# ---- tables and figures ----------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def figure(name: str, title: str, chart: str, files: dict[str, str]) -> str:
    """The Markdown that shows a chart; its file goes to `files`."""
    files[f"{name}.svg"] = svg.standalone(chart)
    return f"![{title}](figures/{name}.svg)"


def commands(*questions: str) -> str:
    return f"```sh\npython -m bench.findings run {' '.join(questions)}\npython -m bench.findings write\n```"


def block_ema(files: dict[str, str]) -> str:
    rows = []
    for section in sections("ema"):
        never, ema, last, future = (
            pick(section, policy=name, slots=4) for name in ("never", "ema", "last", "clairvoyant")
        )
        covered = (exposed(never) - exposed(ema)) / (exposed(never) - exposed(future))
        rows.append(
            [
                short(section), share(ema.mean("hit_rate")), share(ema.mean("threshold_error", "rank")),
                share(ema.mean("threshold_error", "above_share")), share(ema.mean("prefetched_share")),
                f"{ema.per_step('wasted') / missing(ema):.2f}", f"{exposed(never):.1f}", f"{exposed(ema):.1f}",
                f"{exposed(last):.1f}", f"{exposed(future):.1f}", share(covered),
            ]
        )  # fmt: skip
    columns = ["trace, 4 k slots", "hit", "off by", "too high", "found", "wasted per miss", "never us", "EMA us"]
    made = table([*columns, "last us", "clairvoyant us", "of the way"], rows)
    bars = [
        Series(what, [(place, value(pair)) for place, pair in enumerate(_ema_pairs())], colour)
        for what, value, colour in (
            ("clairvoyant", lambda pair: exposed(pair[2]), 2),
            ("EMA adds", lambda pair: exposed(pair[1]) - exposed(pair[2]), 0),
            ("never adds", lambda pair: exposed(pair[0]) - exposed(pair[1]), 7),
        )
    ]
    x = svg.axis(
        "exposed us per layer", [sum(part.points[n][1] for part in bars) for n in range(len(rows))], from_zero=True
    )
    title = "Copies that nobody hides: clairvoyant, EMA 0.5, no prefetch (4 k slots)"
    chart = svg.bar_chart(title, x, bars, [row[0] for row in rows])
    return "\n\n".join([figure("findings-ema", title, chart, files), made, commands("ema")])


def _ema_pairs() -> list[tuple[Line, Line, Line]]:
    names = ("never", "ema", "clairvoyant")
    return [tuple(pick(section, policy=name, slots=4) for name in names) for section in sections("ema")]  # type: ignore[misc]


def block_jumps(files: dict[str, str]) -> str:
    """Errors and misses by steps since the last jump."""
    (section,) = sections("jumps")
    (line,) = section.lines
    every = int(re.search(r"jump_every=(\d+)", section.name)[1])  # type: ignore[index]
    errors: dict[int, list[float]] = {}
    misses: dict[int, list[float]] = {}
    for row in line.series.values():
        for step in range(every, section.head["steps"]):
            guess, truth = as_number(row["predicted"][step]), as_number(row["kth_score"][step])
            errors.setdefault(step % every, []).append(abs(guess - truth))
            misses.setdefault(step % every, []).append(
                (row["useful"][step] + row["recalled"][step]) / section.head["top_k"]
            )
    error = [(since, mean(errors[since])) for since in range(every)]
    missed = [(since, mean(misses[since])) for since in range(every)]
    title = "After a topic jump: share of the selected rows that miss, and error of EMA 0.5"
    series = [
        Series("missing share of k", missed, 1, has_points=False),
        Series("|prediction - k-th score|", error, 0, 1, has_points=False),
    ]
    y = svg.axis("share; score", [value for _, value in [*error, *missed]], from_zero=True)
    chart = svg.line_chart(title, svg.axis("steps since the jump", [0, every - 1]), y, series)
    late = range(every // 2, every)
    rows = [
        [what, *(f"{points[since][1]:.3f}" for since in (0, 1, 2, 5, 10)), f"{mean(points[n][1] for n in late):.3f}"]
        for what, points in (("missing share of k", missed), ("error of EMA 0.5", error))
    ]
    columns = ["steps since the jump", "0", "1", "2", "5", "10", f"{late[0]}-{late[-1]}"]
    return "\n\n".join([figure("findings-jumps", title, chart, files), table(columns, rows), commands("jumps")])


def block_rules(files: dict[str, str]) -> str:
    tuned, unseen = at_equal_waste(sections("rules")), at_equal_waste(sections("unseen"))
    best = best_rule(sections("rules"))
    return "\n\n".join(
        [
            f"Chosen on the tuning traces: **`{_rule(best)}`**.",
            _ratios("tuning trace", tuned),
            _ratios("trace that no rule was chosen on", unseen),
            _curves(files),
            commands("rules", "unseen"),
        ]
    )


def _rule(rule: str) -> str:
    return rule.replace(findings.OWN, "reverting")


def _ratios(title: str, ratios: Mapping[str, Mapping[str, float]]) -> str:
    rules = [rule for rule in next(iter(ratios.values())) if rule != "ema"]
    rows = [[trace, *(_ratio(by_rule[rule]) for rule in rules)] for trace, by_rule in ratios.items()]
    means = [geometric_mean(by_rule[rule] for by_rule in ratios.values()) for rule in rules]
    return table([title, *map(_rule, rules)], [*rows, ["geometric mean", *map(_ratio, means)]])


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _curves(files: dict[str, str]) -> str:
    """Waste against time on the tuning trace whose layers churn least but are not hot."""
    section = next(one for one in sections("rules") if short(one) == "median")
    shown = ("ema", "last", "quantile", "trend", f"{findings.OWN}:0.5")
    series = [Series(_rule(rule), curve(section, rule), place, place) for place, rule in enumerate(shown)]
    title = "Each rule, shifted up and down, on a median layer (4 k slots)"
    points = [point for one in series for point in one.points]
    x, y = svg.axis("KB wasted per layer-step", [x for x, _ in points]), svg.axis("exposed us", [y for _, y in points])
    return figure("findings-rules", title, svg.line_chart(title, x, y, series), files)


def block_eviction(files: dict[str, str]) -> str:
    rows, misses = [], []
    for section in sections("slots"):
        names = [name for name in findings.EVICTIONS if any(line.setting["eviction"] == name for line in section.lines)]
        for slots in (2, 4, 8):
            rates = {name: pick(section, eviction=name, slots=slots).mean("hit_rate") for name in names}
            spared = 1 - (1 - rates["belady"]) / (1 - rates["lru"]) if rates["lru"] < 1 else math.nan
            cells = [share(rates[name]) if name in rates else "" for name in findings.EVICTIONS]
            rows.append([f"{short(section)}, {slots} k", *cells, share(spared)])
            if slots == 2:
                misses.append((short(section), 100 * (1 - rates["belady"]), 100 * (rates["belady"] - rates["lru"])))
    parts = [
        Series(what, [(place, one[column]) for place, one in enumerate(misses)], colour)
        for what, column, colour in (("Belady", 1, 2), ("LRU adds", 2, 0))
    ]
    x = svg.axis("% of the selected rows that miss", [known + more for _, known, more in misses], from_zero=True)
    title = "Misses under LRU and under Belady (2 k slots)"
    chart = svg.bar_chart(title, x, parts, [name for name, *_ in misses])
    made = table(["trace, slots", *findings.EVICTIONS, "misses spared"], rows)
    return "\n\n".join([figure("findings-eviction", title, chart, files), made, commands("slots")])


def block_slots(files: dict[str, str]) -> str:
    series, rows = [], []
    some = [section for section in sections("slots") if section.name not in findings.RECORDED]
    for place, section in enumerate(some):
        top_k = section.head["top_k"]
        lines = sorted((one for one in section.lines if one.setting["eviction"] == "lru"), key=lambda one: one.slots)
        points = [(line.slots / top_k, 100 * line.mean("hit_rate")) for line in lines]
        series.append(Series(short(section), points, place, place))
        most = points[-1][1]
        within = {gap: next(size for size, rate in points if most - rate <= gap) for gap in (5, 1)}
        rows.append(
            [short(section), *(f"{rate:.1f} %" for _, rate in points), *(f"{within[gap]:g} k" for gap in (5, 1))]
        )
    sizes = [size for size, _ in series[0].points]
    title = "Hit rate against slots per request, LRU, context 16 k"
    x, y = (
        svg.log_axis("slots per request, in units of k", sizes),
        svg.axis("% resident", [v for s in series for _, v in s.points]),
    )
    columns = ["kind of layer", *(f"{size:g} k" for size in sizes), f"within 5 points of {sizes[-1]:g} k", "within 1"]
    chart = svg.line_chart(title, x, y, series)
    return "\n\n".join([figure("findings-slots", title, chart, files), table(columns, rows), commands("slots")])


def block_adversaries(files: dict[str, str]) -> str:
    rows, times = [], []
    for section in sections("adversaries"):
        for slots in (2, 4):
            for pool in ("shared", "split"):
                line = pick(section, slots=slots, pool=pool)
                times.append((f"{short(section)}, {slots} k, {pool}", exposed(line)))
                rows.append(
                    [
                        f"{short(section)}, {slots} k, {pool}", share(line.mean("hit_rate")), f"{missing(line):.0f}",
                        share(line.mean("threshold_error", "rank")), share(line.mean("prefetched_share")),
                        f"{wasted(line):.0f}", f"{exposed(line):.1f}",
                    ]
                )  # fmt: skip
    columns = ["trace, slots, pool", "hit", "missing rows", "off by", "found", "KB wasted", "exposed us"]
    parts = [
        Series(f"{pool} pool", [(n, us if name.endswith(pool) else math.nan) for n, (name, us) in enumerate(times)], c)
        for pool, c in (("shared", 0), ("split", 1))
    ]
    title = "Copies that nobody hides, with and without an adversary"
    x = svg.axis("exposed us per layer", [us for _, us in times], from_zero=True)
    drawn = figure("findings-adversaries", title, svg.bar_chart(title, x, parts, [name for name, _ in times]), files)
    return "\n\n".join([drawn, table(columns, rows), commands("adversaries")])


def block_caps(files: dict[str, str]) -> str:
    rows, series = [], []
    for place, section in enumerate(sections("caps")):
        fixed = sorted(
            (int(line.setting["cap"]), exposed(line)) for line in section.lines if line.setting["cap"].isdigit()
        )
        series.append(Series(f"{short(section)}, fixed cap", fixed, place, place))
        for line in section.lines:
            slots = line.slots / section.head["top_k"]
            rows.append(
                [
                    f"{short(section)}, {slots:g} k, {line.setting['cap']}", f"{missing(line):.0f}",
                    share(line.mean("prefetched_share")), f"{line.per_step('refused'):.0f}", f"{wasted(line):.0f}",
                    f"{plain(line):.1f}", f"{exposed(line):.1f}",
                ]
            )  # fmt: skip
    columns = ["trace, slots, cap", "missing rows", "found", "refused", "KB wasted", "no overlap us", "exposed us"]
    title = "Copies that nobody hides against the cap on rows copied ahead"
    points = [point for one in series for point in one.points]
    x = svg.log_axis("most rows copied ahead per request", [cap for cap, _ in points])
    y = svg.axis("exposed us per layer", [us for _, us in points], from_zero=True)
    drawn = figure("findings-caps", title, svg.line_chart(title, x, y, series), files)
    return "\n\n".join([drawn, table(columns, rows), commands("caps")])


def block_rivals(files: dict[str, str]) -> str:
    """What each lossy rival loses in answers, from the newest rows of bench/rivals_quality.py."""
    rows = latest([(row, at) for row, at in harness.read_rows() if row.name.startswith("rivals: ")])
    known = {name.removeprefix("rivals: "): row for name, row in rows.items()}
    exact, answered = known["bits per byte, exact"], known["passkeys answered, exact"]
    added = "bits per byte over exact, "
    names = [name.removeprefix(added) for name in known if name.startswith(added)]
    cells = [["exact top-k", "0.0 %", f"{exact.value:.3f} in all", "", "0.0 %", share(answered.value)]]
    series = []
    for place, name in enumerate(names):
        row, missed = known[added + name], known[f"share missed in documents, {name}"]
        low, high = row.spread or (math.nan, math.nan)
        cells.append(
            [
                name, share(missed.value), f"{row.value:+.3f}", f"{low:+.3f} to {high:+.3f}",
                share(known[f"share missed in passkeys, {name}"].value),
                share(known[f"passkeys answered, {name}"].value),
            ]
        )  # fmt: skip
        point = [(100 * missed.value, max(row.value, 0.0))]
        series.append(Series(name, point, place, has_line=False))
    shapes, samples = exact.shapes, answered.shapes["samples"]
    said = (
        f"`{shapes['model']}` (weights {shapes['weights']}), k {shapes['top_k']} of {shapes['context']:,} bytes; "
        f"{shapes['texts']} pieces of held-out documentation of which {shapes['new']} bytes each are decoded, "
        f"{samples} passkeys."
    )
    x = svg.axis("% of the exact set missed", [point[0] for one in series for point in one.points], from_zero=True)
    y = svg.axis("bits per byte added", [point[1] for one in series for point in one.points], from_zero=True)
    title = "What a selection misses, and what that costs in bits per byte"
    columns = ["selection", "missed", "bits a byte", "p10 to p90 of pieces", "missed, passkeys", "passkeys"]
    drawn = figure("findings-rivals", title, svg.line_chart(title, x, y, series), files)
    command = "```sh\npython -m bench.rivals_quality\npython -m bench.findings write\n```"
    return "\n\n".join([said, drawn, table(columns, cells), command])


BLOCKS = {
    "ema": block_ema,
    "jumps": block_jumps,
    "rules": block_rules,
    "eviction": block_eviction,
    "slots": block_slots,
    "adversaries": block_adversaries,
    "caps": block_caps,
    "rivals": block_rivals,
}


def rewrite(text: str) -> tuple[str, dict[str, str]]:
    """The page with every block made anew, and its figures by file name. ValueError for a block that is unknown or
    missing."""
    named = [match[2] for match in _BLOCK.finditer(text)]
    if set(named) != set(BLOCKS):
        raise ValueError(f"the page has blocks {sorted(named)} but there are {sorted(BLOCKS)}")
    files: dict[str, str] = {}
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]](files)}\n\n{match[3]}", text), files


def write(page: Path = PAGE) -> None:
    """Writes the page and its figures."""
    text, files = rewrite(page.read_text(encoding="utf-8"))
    FIGURES.mkdir(exist_ok=True)
    for name, chart in files.items():
        (FIGURES / name).write_text(chart, encoding="utf-8")
    page.write_text(text, encoding="utf-8")
