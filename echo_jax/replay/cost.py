"""What a layer's copies would take on some machine, and how much of it nobody hides.

A cost model is a few numbers in a TOML file; `origin` says where they come from. Knows counts and microseconds. It
models one layer of one device: no contention between the indexer and the copies, no queueing between layers.

    copy(n)   = 0 if n = 0, else launch + n * (row + bytes / link)
    exposed   = without overlap: copy(all missing rows), after the scores
                with overlap:    max(0, stream(staged rows) - window) + copy(recalled rows)

stream is a copy without its launch: inside the scoring kernel there is none. The window is what early copies hide
behind: this layer's scoring (ECHO), or one whole layer. Copies that are known a whole step ahead have no more than that
either: one link serves the early copies of all layers.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_jax.replay.rules import INDEXER


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Times of one device, in microseconds."""

    name: str
    origin: str  # where the numbers come from
    launch_us: float  # of one copy, however small
    link_bytes_per_us: float
    row_us: float  # of each row, besides its bytes
    indexer_launch_us: float
    indexer_position_us: float  # of each visible position of each query
    layer_us: float  # of a layer besides its scores and its copies
    measured: Mapping[str, Sequence[Mapping[str, float]]] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.name in ("name", "origin", "measured"):
                continue
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (field.name == "link_bytes_per_us" and value == 0):
                raise ValueError(f"cost model {self.name!r}: {field.name} is {value!r} but must be a positive number")

    def stream_us(self, rows: Any, bytes_per_row: int) -> np.ndarray:
        """Of rows that travel inside a kernel which runs anyway."""
        return np.asarray(rows, np.float64) * (self.row_us + bytes_per_row / self.link_bytes_per_us)

    def copy_us(self, rows: Any, bytes_per_row: int) -> np.ndarray:
        """Of a copy of its own."""
        return np.where(np.asarray(rows) > 0, self.launch_us, 0.0) + self.stream_us(rows, bytes_per_row)

    def indexer_us(self, positions: Any) -> np.ndarray:
        """Of the scores of so many positions, all queries together."""
        positions = np.asarray(positions, np.float64)
        return np.where(positions > 0, self.indexer_launch_us, 0.0) + positions * self.indexer_position_us


class Exposed:
    """Microseconds of each layer-step that nobody hides; arrays of equal shapes in, arrays out."""

    def __init__(
        self,
        model: CostModel,
        bytes_per_row: int,
        positions: np.ndarray,
        useful: np.ndarray,
        recalled: np.ndarray,
        staged: np.ndarray,
        hides_behind: str = INDEXER,
    ):
        self.indexer_us = model.indexer_us(positions)
        window = self.indexer_us if hides_behind == INDEXER else self.indexer_us + model.layer_us
        self.without_overlap_us = model.copy_us(useful + recalled, bytes_per_row)
        late = np.maximum(0.0, model.stream_us(staged, bytes_per_row) - window)
        self.with_overlap_us = late + model.copy_us(recalled, bytes_per_row)

    def row(self) -> dict[str, Any]:
        """Mean, P50 and P99 of both."""
        return {
            "indexer_us": float(np.mean(self.indexer_us)),
            "without_overlap_us": _spread(self.without_overlap_us),
            "with_overlap_us": _spread(self.with_overlap_us),
        }


def _spread(values: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}


def gain(
    model: CostModel,
    *,
    requests: int,
    context: int,
    top_k: int,
    bytes_per_row: int,
    hit_rate: float,
    found: float = 1.0,
    wasted: float = 0.0,
) -> float:
    """Scores and recall one after the other, over scores with prefetch and what is left to recall (figure 18 of ECHO).

    found: share of the missing rows that the threshold finds; wasted: rows copied in vain, per missing row. At most as
    many rows are copied ahead as the scoring has time for, which is what a cap proportional to the context does.
    """
    missing = requests * top_k * (1 - hit_rate)
    scoring = float(model.indexer_us(requests * context))
    one_row = float(model.stream_us(1, bytes_per_row))
    staged = min(missing * (found + wasted), scoring / one_row)
    useful = staged * found / (found + wasted) if staged else 0.0
    apart = scoring + float(model.copy_us(missing, bytes_per_row))
    together = max(scoring, staged * one_row) + float(model.copy_us(missing - useful, bytes_per_row))
    return apart / together


# ---- files -----------------------------------------------------------------------------------------------


def packaged() -> list[str]:
    """Names of the cost models of this package."""
    folder = importlib.resources.files("echo_jax").joinpath("data", "costs")
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def load(name: str) -> CostModel:
    """The cost model of this package with that name, or of the TOML file at that path.

    Raises ValueError for an unknown name, a file that is no TOML, and a missing, unknown or impossible number.
    """
    if name in packaged():
        text = importlib.resources.files("echo_jax").joinpath("data", "costs", f"{name}.toml").read_text("utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text("utf-8")
    else:
        raise ValueError(f"cost model {name!r} is neither a file nor one of: {', '.join(packaged())}")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"cost model {name!r} is no TOML: {error}") from None
    fields = {field.name for field in dataclasses.fields(CostModel)}
    if unknown := sorted(set(data) - fields):
        raise ValueError(f"cost model {name!r}: {unknown[0]!r} is unknown; a model has {', '.join(sorted(fields))}")
    if missing := sorted(fields - set(data) - {"measured"}):
        raise ValueError(f"cost model {name!r}: {missing[0]!r} is missing; see the files of this package for examples")
    return CostModel(**data)
