"""From the counts of a pass to rows: what one setting did in one layer, in numbers that compare.

Knows what the counts mean. Does not know how they came about, nor where rows are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echo_jax.replay.cost import CostModel, Exposed
from echo_jax.replay.counts import Record, SharedRecord
from echo_jax.replay.run import Counts
from echo_jax.replay.settings import RESELECT_WINDOW, Plan
from echo_jax.stats import Moved, Totals


def rows_of(
    plan: Plan, counts: Counts, bytes_per_row: int, costs: Sequence[CostModel] = (), skip: int = 0
) -> list[dict[str, Any]]:
    """One row per setting of the plan; the first `skip` steps are left out of every number.

    Rates are means over steps; "per step" means per layer-step of the whole batch. A number that nothing stands behind
    is NaN. ValueError where `skip` leaves no step.
    """
    steps = len(counts.shared.positions)
    if not 0 <= skip < steps:
        raise ValueError(f"skipping {skip} of {steps} steps leaves nothing to count; skip fewer")
    kept = Counts(SharedRecord(*_cut(counts.shared, skip)), Record(*_cut(counts.each, skip)))
    return [_row(plan, kept, place, bytes_per_row, costs) for place in range(len(plan.settings))]


def _cut(part: Any, skip: int) -> list[Any]:
    def cut(value: Any) -> Any:
        if isinstance(value, Moved):
            return Moved(**{name: cut(getattr(value, name)) for name in vars(value)})
        return value[skip:]

    return [cut(value) for value in part]


def _row(plan: Plan, counts: Counts, place: int, bytes_per_row: int, costs: Sequence[CostModel]) -> dict[str, Any]:
    shared, each, setting = counts.shared, counts.each, plan.settings[place]
    steps = len(shared.positions)
    moved = Moved(**{name: np.asarray(values)[:, place : place + 1] for name, values in vars(each.moved).items()})
    totals = Totals(bytes_per_row)
    totals.add(moved)
    sums = totals.total()

    def total(values: Any) -> float:
        return float(np.asarray(values, np.float64)[:, place].sum())

    predictions, missing = total(each.predictions), sums["useful"] + sums["recalled"]
    candidates = total(each.candidates) / max(1, plan.top_k)
    row: dict[str, Any] = {"counted_steps": steps, "queries": int(shared.queries.sum())}
    row |= {name: sums[name] for name in ("hit_rate", "hits", "useful", "recalled", "staged", "wasted", "refused")}
    row |= {name: sums[name] for name in ("evicted", "written", "host_to_device_bytes")}
    row |= {
        "prefetched_share": _ratio(sums["useful"], missing),
        "recalled_per_step": sums["recalled"] / steps,
        "recalled_bytes_per_step": sums["recalled"] * bytes_per_row / steps,
        "staged_bytes_per_step": sums["staged"] * bytes_per_row / steps,
        "wasted_bytes_per_step": sums["wasted"] * bytes_per_row / steps,
        "candidates_per_k": _ratio(candidates, float(shared.predictable.sum())),
        "threshold_error": {
            "predictions": int(predictions),
            "relative": _ratio(total(each.relative_error), predictions),
            "rank": _ratio(total(each.rank_error), predictions),
            "absolute": _ratio(total(each.absolute_error), predictions),
            "signed": _ratio(total(each.error), predictions),
            "above_share": _ratio(total(each.above), predictions),
            "below_band": int(total(each.below_floor)),
        },
        "reselected": int(total(each.reselected)),
        "reselected_per_eviction": _ratio(total(each.reselected), sums["evicted"]),
        "reselect_window": RESELECT_WINDOW,
        "missed_share": _ratio(total(each.missed), float(shared.exact.sum())),
        "deferred_share": _ratio(total(each.deferred), float(shared.queries.sum())),
        "nan_scores": int(shared.nan_scores.sum()),
    }
    row["cost"] = {}
    for model in costs:
        exposed = Exposed(
            model,
            bytes_per_row,
            np.asarray(shared.positions) * (plan.kind == "full"),
            np.asarray(each.moved.useful)[:, place],
            np.asarray(each.moved.recalled)[:, place],
            np.asarray(each.moved.staged)[:, place],
            setting.rule.hides_behind,
        )
        row["cost"][model.name] = exposed.row()
    return row


def series_of(plan: Plan, counts: Counts, place: int) -> dict[str, list[float]]:
    """Step by step: request 0's k-th score and its prediction, and what the batch's candidates and moves were."""
    each = counts.each
    return {
        "kth_score": np.asarray(counts.shared.kth_score, float).tolist(),
        "predicted": np.asarray(each.predicted[:, place], float).tolist(),
        "candidates": np.asarray(each.candidates[:, place]).tolist(),
        "hits": np.asarray(each.moved.hits)[:, place].tolist(),
        "useful": np.asarray(each.moved.useful)[:, place].tolist(),
        "staged": np.asarray(each.moved.staged)[:, place].tolist(),
        "recalled": np.asarray(each.moved.recalled)[:, place].tolist(),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
