"""The ECHO paper's figures beside this project's rows: measures those that need no GPU, writes the table of a page.

    python -m bench.paper measure    record what a CPU can answer in bench/results/paper.jsonl; replays whose rows are
                                     missing under bench/results/paper/ take 2 minutes, the rest seconds
    python -m bench.paper write      write table and plots of docs/paper.md from paper.toml and the recorded rows

It knows which row stands beside which figure (paper.toml) and how rows are found. It measures no kernel, and no number
of ours is typed in: where there is no row, the page says so. `make figures` does both. Plots are in paper_figures.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import harness
from echo_jax.report.rows import Section, read

FIGURES = Path(__file__).resolve().parent / "paper.toml"
PAGE = harness.ROOT / "docs" / "paper.md"
REPLAYS = harness.RESULTS / "paper"
"""Replays behind the figures that a replay answers, a file for each."""

CANDIDATES = {
    "synthetic median layer": "synth:median,requests=1,steps=192,context=20480,top_k=2048",
    "echo-tiny-manual": "echo-tiny-manual",
}
HIT_RATES, HIT_RATE_SLOTS = "synth:echo-fig17", 10  # slots a request, in units of k
FILE = "paper.jsonl"
NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True)
class Plot:
    """How a figure is drawn: bars, or a function of paper_figures.py by name.

    A bar is (label, number) for what the paper says, (label, row) for ours, (label, row, row) for a ratio of ours.
    """

    axis: str = ""
    bars: tuple[tuple[str | float, ...], ...] = ()
    field: str = "value"  # of the rows: or fraction_of_limit
    by: str = ""
    note: str = ""

    def __post_init__(self):
        if bool(self.bars) == bool(self.by):
            raise ValueError("a plot has either bars or the name of a function that draws it")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of the paper; the fields are those of paper.toml, texts as they are shown."""

    figure: str
    what: str
    theirs: str
    rows: tuple[tuple[str, str], ...] = ()  # (label, claim or name)
    ratio: tuple[tuple[str, str, str], ...] = ()  # (label, dividend, divisor)
    command: str = ""
    why: str = ""
    cannot: str = ""
    plot: Plot | None = None

    def __post_init__(self):
        is_rebuilt = bool(self.rows or self.ratio)
        if is_rebuilt == bool(self.cannot) or is_rebuilt != bool(self.command and self.why):
            raise ValueError(
                f"figure {self.figure} must have rows or a ratio with a command and why they differ, or else say in "
                "`cannot` what is missing"
            )


def read_figures(path: Path = FIGURES) -> list[Figure]:
    """In the order of the file; ValueError names what is wrong with it."""
    known = {field.name for field in dataclasses.fields(Figure)}
    figures = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["figure"]:
        if unknown := sorted(set(entry) - known):
            raise ValueError(f"{path.name}: figure {entry.get('figure')} has the unknown field {unknown[0]!r}")
        lists: dict[str, Any] = {name: tuple(map(tuple, entry[name])) for name in ("rows", "ratio") if name in entry}
        if plot := entry.get("plot"):
            lists["plot"] = Plot(**plot | {"bars": tuple(map(tuple, plot.get("bars", ())))})
        figures.append(Figure(**entry | lists))
    return figures


def latest(rows: list[tuple[harness.Row, str]]) -> dict[str, harness.Row]:
    """The newest row of every claim and, where a row has none, of every name."""
    found: dict[str, harness.Row] = {}
    for row, _ in rows:
        key = row.claim or row.name
        if key not in found or row.when() >= found[key].when():
            found[key] = row
    return found


def table(figures: list[Figure], rows: Mapping[str, harness.Row]) -> str:
    lines = [
        "| figure | what | theirs | ours | command | why they differ |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for figure in figures:
        parts = [f"{label}: {_shown(rows.get(key))}" for label, key in figure.rows]
        parts += [f"{label}: {_ratio(rows.get(above), rows.get(below))}" for label, above, below in figure.ratio]
        ours = "<br>".join(parts) or "cannot be rebuilt here"
        command = "<br>".join(f"`{one.strip()}`" for one in figure.command.split(";") if one) or "-"
        cells = (figure.figure, figure.what, figure.theirs, ours, command, figure.why or figure.cannot)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def rewrite(text: str, block: str, body: str) -> str:
    """The text with what stands between the markers of a block replaced; ValueError where there are none."""
    pattern = re.compile(rf"(<!-- {block}:begin -->\n).*?(<!-- {block}:end -->)", re.DOTALL)
    renewed, count = pattern.subn(lambda match: f"{match[1]}\n{body}\n\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"{count} pairs of <!-- {block}:begin --> and <!-- {block}:end -->, but there must be one")
    return renewed


def _shown(row: harness.Row | None) -> str:
    """Value, spread, fraction of the limit, and where it was measured."""
    if row is None:
        return NOT_MEASURED
    text = _number(row.value, row.unit)
    if row.spread is not None:
        text += f" ({_number(row.spread[0], '')} to {_number(row.spread[1], '')})"
    if row.fraction_of_limit is not None:
        text += f", {row.fraction_of_limit:.0%} of the limit"
    return f"{text}, {_machine(row)}"


def _ratio(above: harness.Row | None, below: harness.Row | None) -> str:
    if above is None or below is None:
        return NOT_MEASURED
    if above.machine != below.machine or above.unit != below.unit:
        return f"{NOT_MEASURED} on one machine in one unit"
    return f"{above.value / below.value:.2f}x, {_machine(below)}"


def _machine(row: harness.Row) -> str:
    """The GPU where there is one, and else the processor."""
    gpus = re.findall(r"\d+ x (?:NVIDIA )?(.+)", row.machine.split(", ")[-1])
    return f"{gpus[0] if gpus else row.machine.split(', ')[0]}, {row.when().date().isoformat()}"


def _number(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    text = f"{value:,.0f}" if abs(value) >= 1e4 or value == int(value) else f"{value:.3g}"
    return text + {"ratio": "", "": ""}.get(unit, f" {unit}")


# ---- what a CPU can answer -------------------------------------------------------------------------------


def measure(results: Path | None = None) -> None:
    """Every row that a table needs and that needs no GPU."""
    for measure_one in (_token_bytes, _metadata, _candidates, _hit_rates):
        measure_one(_recorder(results))


def _recorder(results: Path | None) -> Callable[..., None]:
    def record(name: str, value: Any, unit: str, **fields: Any) -> None:
        row = harness.record(
            name=f"paper: {name}",
            value=value,
            unit=unit,
            file=FILE,
            results=results,
            command="python -m bench.paper measure",
            **fields,
        )
        print(f"{row.name}: {_shown(row)}", flush=True)

    return record


def _token_bytes(record: Callable[..., None]) -> None:
    """Figure 1: what one more token costs on the device, from the configuration's own bill."""
    from echo_jax.config import CacheConfig
    from echo_jax.eviction import Lru
    from echo_jax.formats import KeyFormat, RecordFormat
    from echo_jax.threshold import Ema

    layers, tokens = 61, 64
    config = CacheConfig(
        layer_kinds=("full",) * layers,
        records=RecordFormat("bf16", 512, 64),
        keys=KeyFormat("fp8", 128),
        threshold=Ema(),
        eviction=Lru(),
        seats=1,
        capacity=tokens,
        host_rows=tokens,
        device_slots=tokens,
        top_k=1,
    )
    shapes = {"layers": layers, "records": "bf16", "keys": "fp8"}
    method = "the configuration's device bytes, over tokens"
    bill = dataclasses.replace(config, offload=False).device_bytes()
    record("device bytes of a token, resident", sum(bill.values()) / tokens, "B", shapes=shapes, method=method)
    offloaded = config.bytes_per_position()
    record("device bytes of a token, offloaded, its slots apart", offloaded, "B", shapes=shapes, method=method)
    twice = dataclasses.replace(config, device_slots=2 * tokens).device_bytes()
    slot = (sum(twice.values()) - sum(config.device_bytes().values())) / tokens
    record("device bytes of a slot in every layer", slot, "B", shapes=shapes, method=method.replace("tokens", "slots"))


def _metadata(record: Callable[..., None]) -> None:
    """In the text: bytes of the integer arrays that a layer keeps, counted over their shapes."""
    import jax

    from echo_jax import pool

    host_rows, slots = 2_000_000, 200_000
    maps = jax.eval_shape(lambda: pool.initial(host_rows, slots))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(maps))
    shapes = {"N_H": host_rows, "N_G": slots}
    record(f"metadata of a layer, N_H {host_rows:,}, N_G {slots:,}", size, "B", shapes=shapes, method="sum of leaves")


def _replay(question: str, traces: Iterable[str], slots: int, *, series: bool = False) -> None:
    """Appends what is missing of a question's rows: EMA 0.5, LRU, that many slots a request in units of k. With the
    numbers of every step, the first quarter is left out."""
    from echo_jax.replay.job import Job
    from echo_jax.replay.rows import RowFile
    from echo_jax.replay.settings import Setting
    from echo_jax.traces import open_trace

    REPLAYS.mkdir(parents=True, exist_ok=True)
    rows = RowFile(REPLAYS / f"{question}.jsonl")
    for name in traces:
        trace = open_trace(name)
        some = [Setting(slots * trace.info.top_k)]
        skip = trace.info.steps // 4 if series else 0
        Job(trace, name, {"full": some, "shared": some}, series=series, skip=skip).run(rows)


def _section(question: str, trace: str) -> Section:
    """The recorded rows of a trace; of several under one name, the ones recorded last."""
    some = [section for section in read([REPLAYS / f"{question}.jsonl"]) if section.name == trace]
    if not some:
        raise ValueError(f"no row of {trace} in {REPLAYS / question}.jsonl; run `python -m bench.paper measure`")
    return some[-1]


def candidates() -> dict[str, list[list[float]]]:
    """Figures 7 and 8: of each trace, for each layer, positions above EMA 0.5's prediction over k, step by step, the
    first quarter left out."""
    found = {}
    for label, trace in CANDIDATES.items():
        section = _section("candidates", trace)
        skip, top_k = section.head["skip"], section.head["top_k"]
        (line,) = section.lines
        found[label] = [[count / top_k for count in row["candidates"][skip:]] for row in line.series.values()]
    return found


def hit_rates() -> dict[int, float]:
    """Figure 17: of each layer."""
    (line,) = _section("hit-rates", HIT_RATES).lines
    return {row["key"]["layer"]: row["hit_rate"] for row in line.rows}


def _candidates(record: Callable[..., None]) -> None:
    _replay("candidates", CANDIDATES.values(), 4, series=True)
    for label, layers in candidates().items():
        shares = [share for layer in layers for share in layer]
        record(
            f"candidates over k under EMA 0.5, {label}",
            harness.summarise(shares),
            "ratio",
            shapes={"trace": CANDIDATES[label], "layers": len(layers), "steps": len(layers[0])},
            method="positions above the prediction over k: median, p10 and p90 over steps and layers",
        )


def _hit_rates(record: Callable[..., None]) -> None:
    """In the layers that the figure singles out, and the others."""
    _replay("hit-rates", [HIT_RATES], HIT_RATE_SLOTS)
    rates = hit_rates()
    fields: dict[str, Any] = {
        "shapes": {"trace": HIT_RATES, "slots_per_request": f"{HIT_RATE_SLOTS} k", "layers": len(rates)},
        "method": "selected rows that were resident, over all selected; LRU, from a cold pool on",
    }
    for layer in (12, 17):
        record(f"hit rate at 10 k slots, echo-fig17, layer {layer}", rates[layer], "share", **fields)
    lowest = min(rate for layer, rate in rates.items() if layer not in (12, 17))
    record("hit rate at 10 k slots, echo-fig17, lowest of the other layers", lowest, "share", **fields)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=(__doc__ or "").partition("\n")[0])
    from bench import paper_figures

    parser.add_argument("do", choices=("measure", "write"))
    if parser.parse_args(arguments).do == "measure":
        measure()
        return 0
    try:
        figures, rows = read_figures(), latest(harness.read_rows())
        text = PAGE.read_text(encoding="utf-8")
        plots, files = paper_figures.plots(figures, rows)
        renewed = rewrite(rewrite(text, "figures", table(figures, rows)), "plots", plots)
    except (ValueError, OSError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    folder = PAGE.parent / paper_figures.FOLDER
    folder.mkdir(exist_ok=True)
    for name, chart in files.items():
        (folder / name).write_text(chart, encoding="utf-8")
    PAGE.write_text(renewed, encoding="utf-8")
    print(f"{PAGE.name}: {'already up to date' if renewed == text else 'table and plots written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
