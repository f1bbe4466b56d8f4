"""What moved: counts of one layer-step, and their totals over a run.

A row is a *hit* if it was resident before the layer-step; otherwise it is a *miss*, and then either a *useful
prefetch* (taken from staging) or a *recall*. A staged row that was not consumed is *wasted*, a second staging of the
same row included. Rows that several seats select are counted once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from flax import struct


class Moved(struct.PyTreeNode):
    """Counts of one layer-step, i32[] each; with a leading axis `[L]` for a whole step."""

    hits: Any  # selected rows that were resident
    useful: Any  # missing rows taken from staging
    recalled: Any  # missing rows read from the host by `require`
    staged: Any  # rows copied ahead
    refused: Any  # candidates the cap turned away
    evicted: Any  # rows that lost their slot
    written: Any  # new rows, written to the host at the step's end


@dataclasses.dataclass
class Totals:
    """Sums over steps, per layer, in Python's unbounded integers."""

    bytes_per_row: int
    steps: int = 0
    counts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # i64[L] each

    def add(self, moved: Moved) -> None:
        """Adds the counts of one step, arrays i32[L]; or of several, i32[N, L]."""
        for field in dataclasses.fields(moved):
            values = np.asarray(getattr(moved, field.name), np.int64)
            values = values.reshape(-1, values.shape[-1])
            self.counts[field.name] = self.counts.get(field.name, 0) + values.sum(axis=0)
        self.steps += values.shape[0]

    def by_layer(self) -> list[dict[str, float]]:
        """One row a layer: the counts, the wasted rows, the hit rate and the bytes that crossed the link."""
        rows = []
        for layer in range(len(self.counts["hits"])):
            row: dict[str, float] = {name: int(values[layer]) for name, values in self.counts.items()}
            rows.append({"layer": layer} | self._derived(row))
        return rows

    def total(self) -> dict[str, float]:
        """The same summed over layers."""
        return self._derived({name: int(values.sum()) for name, values in self.counts.items()})

    def _derived(self, row: dict[str, float]) -> dict[str, float]:
        missing = row["useful"] + row["recalled"]
        wasted = row["staged"] - row["useful"]
        wanted = row["hits"] + missing
        return row | {
            "wasted": wasted,
            "hit_rate": row["hits"] / wanted if wanted else float("nan"),
            "host_to_device_bytes": (missing + wasted) * self.bytes_per_row,
            "device_to_host_bytes": row["written"] * self.bytes_per_row,
        }
