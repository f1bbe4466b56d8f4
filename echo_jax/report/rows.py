"""Rows of `echo-jax replay`, read and put in order: a section for each trace, in it a line for each setting.

Knows the form of the rows and what may stand side by side: numbers of one trace, counted over the same steps of the
same layers. Knows no figure, and not how the numbers came about.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_jax import eviction, threshold

SCHEMA_VERSION = 1
"""Of the rows that are understood here. Others are refused."""

SETTING = ("policy", "eviction", "rule", "form", "cap", "pool", "slots_per_request")
"""What a setting consists of; all other entries of a row's key say what it was tried on."""

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """One setting on one trace: a row for each layer, and the steps of those layers whose series was kept."""

    setting: Mapping[str, Any]  # SETTING -> value
    rows: tuple[Row, ...]  # ascending by layer
    series: Mapping[int, Row]  # by layer

    @property
    def slots(self) -> int:
        return self.setting["slots_per_request"]

    @property
    def is_echo(self) -> bool:
        """The exact set is attended and a threshold decides what is copied ahead; otherwise a rival."""
        return self.setting["rule"] == "exact"

    @property
    def is_bound(self) -> bool:
        """It knows the future: what no policy can beat, and no policy itself."""
        words = re.split("[:,]", self.setting["policy"]) + re.split("[:,]", self.setting["eviction"])
        return not {*threshold.REPLAY_ONLY, *eviction.REPLAY_ONLY}.isdisjoint(words)

    def mean(self, *path: str) -> float:
        """The mean over layers of the number at that path in each row; NaN where no layer has one."""
        return mean(number(row, *path) for row in self.rows)

    def highest(self, *path: str) -> float:
        """The same, of the worst layer."""
        found = [value for row in self.rows if not math.isnan(value := number(row, *path))]
        return max(found, default=math.nan)

    def per_step(self, name: str) -> float:
        """A count of a row, per layer-step of the whole batch."""
        return mean(number(row, name) / row["counted_steps"] for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Section:
    """Everything about one trace that was counted in the same way."""

    head: Mapping[str, Any]  # what all keys have in common: trace, top_k, requests, ...
    lines: tuple[Line, ...]
    layers: tuple[int, ...]  # those that every line has; no other is in a mean
    left_out: int  # layers that only some lines have

    @property
    def name(self) -> str:
        return self.head["trace"]

    @property
    def costs(self) -> tuple[str, ...]:
        """Cost models, by name."""
        return tuple(self.lines[0].rows[0]["cost"])

    def kinds(self) -> list[str]:
        """The archetype of each layer."""
        return [row["key"]["archetype"] for row in self.lines[0].rows]

    def label(self, line: Line, *without: str) -> str:
        """What tells this line from the others of the section, those parts of a setting left out that `without` says.
        A rival goes by its own name, and what only rivals vary tells no others apart."""
        peers = [one for one in self.lines if one.is_echo == line.is_echo]
        varying = [name for name in SETTING if name not in without and len({one.setting[name] for one in peers}) > 1]
        if line.is_echo:
            parts = [_words(name, line.setting[name]) for name in varying]
            return ", ".join(parts) or line.setting["policy"]
        rival = line.setting["rule"] + (" (idealised)" if line.setting["form"] == "idealised" else "")
        return rival + (f", {line.slots:,} slots" if "slots_per_request" in varying else "")

    def usual_slots(self) -> int:
        """The pool size to compare at: the one that most settings were tried at, of several the middle one."""
        sizes = sorted({line.slots for line in self.lines})
        counts = {size: sum(line.slots == size for line in self.lines) for size in sizes}
        usual = [size for size in sizes if counts[size] == max(counts.values())]
        return usual[(len(usual) - 1) // 2]

    def at(self, slots: int) -> tuple[Line, ...]:
        """The lines of one pool size, and rivals that choose their own."""
        tried = {line.setting["rule"] for line in self.lines if line.slots == slots}
        return tuple(line for line in self.lines if line.slots == slots or line.setting["rule"] not in tried)


def _words(name: str, value: Any) -> str:
    if name == "slots_per_request":
        return f"{value:,} slots"
    return f"{value} pool" if name == "pool" else f"cap {value}" if name == "cap" else str(value)


def read(paths: Sequence[Path]) -> list[Section]:
    """The sections of all rows of all files, in the order in which they are met.

    Raises OSError for a file that cannot be read; ValueError, naming the place, for what is no row of a replay, for
    another schema than this version reads, for no rows at all, and for settings without a layer in common.
    """
    rows: list[Row] = []
    first = None
    for path in paths:
        for place, row in _rows_of(path):
            _check_schema(row, place, first)
            first = first or place
            rows.append(row)
    if not any(row["row"] == "replay" for row in rows):
        named = ", ".join(str(path) for path in paths)
        raise ValueError(f"0 rows of replays in {named}; write some with `echo-jax replay TRACE --output FILE`")
    return sections(rows)


def sections(rows: Iterable[Row]) -> list[Section]:
    """The sections of rows as `replay` gives them. A row that is there twice counts once. A section's lines are cut to
    the layers that all of them have, so that an interrupted replay gives means that compare; ValueError for none."""
    found: dict[str, Row] = {}
    series: dict[str, Row] = {}
    for row in rows:
        (series if row["row"] == "series" else found).setdefault(json.dumps(row["key"], sort_keys=True), row)
    grouped: dict[str, list[Row]] = {}
    for row in found.values():
        grouped.setdefault(json.dumps(_head(row), sort_keys=True), []).append(row)
    return [_section(some, series) for some in grouped.values()]


def _rows_of(path: Path) -> Iterable[tuple[str, Row]]:
    for count, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        place = f"{path}:{count}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is no JSON row ({error}); give files of `echo-jax replay --output`") from None
        if not isinstance(row, dict) or row.get("row") not in ("replay", "series") or "key" not in row:
            kind = f"a row {row['row']!r}" if isinstance(row, dict) and "row" in row else "no row"
            raise ValueError(f"{place} is {kind}, not one of a replay; give files of `echo-jax replay --output`")
        yield place, row


def _check_schema(row: Row, place: str, first: str | None) -> None:
    schema = row.get("schema")
    if schema == SCHEMA_VERSION:
        return
    if first is not None:
        raise ValueError(
            f"{place} has schema {schema} but {first} has {SCHEMA_VERSION}; rows of two schemas do not compare: "
            "replay the older ones again"
        )
    raise ValueError(f"{place} has schema {schema} but this version reads {SCHEMA_VERSION}; replay the trace again")


def _head(row: Row) -> dict[str, Any]:
    own = (*SETTING, "layer", "kind", "archetype", "own_classes", "cost_models")
    return {name: value for name, value in row["key"].items() if name not in own} | {
        "cost_models": sorted(row["key"]["cost_models"])
    }


def _section(rows: list[Row], series: Mapping[str, Row]) -> Section:
    """Rows that share a head -> a section."""
    settings: dict[str, dict[int, Row]] = {}
    for row in rows:
        key = row["key"]
        # A user's class that has changed is another setting, though its name is the same.
        text = json.dumps([[key[name] for name in SETTING], key["own_classes"]], sort_keys=True)
        settings.setdefault(text, {})[key["layer"]] = row
    everywhere = sorted(set.intersection(*(set(layers) for layers in settings.values())))
    anywhere = set().union(*settings.values())
    head = _head(rows[0])
    if not everywhere:
        raise ValueError(
            f"the {len(settings)} settings tried on {head['trace']} have no layer in common, of {len(anywhere)} layers "
            "in all; finish the replay that was interrupted"
        )
    lines = []
    for by_layer in settings.values():
        kept = tuple(by_layer[layer] for layer in everywhere)
        steps = {
            row["key"]["layer"]: series[text]
            for row in kept
            if (text := json.dumps(row["key"], sort_keys=True)) in series
        }
        lines.append(Line({name: kept[0]["key"][name] for name in SETTING}, kept, steps))
    return Section(head, tuple(lines), tuple(everywhere), len(anywhere) - len(everywhere))


def number(row: Row, *path: str) -> float:
    """The number at that path, NaN where there is none: JSON has null for NaN and words for infinities."""
    value: Any = row
    for name in path:
        value = value[name]
    return as_number(value)


def as_number(value: Any) -> float:
    """null -> NaN, "inf" and "-inf" -> what they say."""
    return math.nan if value is None else float(value)


def mean(values: Iterable[float]) -> float:
    """Of the numbers among them; NaN if there is none."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def distinct(lines: Iterable[Line], of: Callable[[Line], Any]) -> list[Line]:
    """The first line for each value of `of`."""
    seen: dict[Any, Line] = {}
    for line in lines:
        seen.setdefault(of(line), line)
    return list(seen.values())
