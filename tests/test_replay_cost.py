"""Cost models against what was measured, and rows against numbers worked out by hand."""

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest

from bench import harness
from bench import replay as bench_replay
from echo_jax import eviction
from echo_jax.replay import cost, summary
from echo_jax.replay.cost import CostModel, Exposed
from echo_jax.replay.rules import INDEXER, LAYER
from echo_jax.replay.run import run_layer
from echo_jax.replay.settings import Setting, plan
from tests import test_replay_counts
from tests.test_replay_counts import INFO, PAIRS, RECORDS, STEPS, history

ROUND = CostModel("round", "", 5.0, 100.0, 0.5, 10.0, 0.01, 40.0)
"""A row of 150 bytes takes 2 us."""


@pytest.mark.parametrize("name", cost.packaged())
def test_a_model_holds_what_was_measured(name):
    """Within the share that its file states for what this project measured, and 15 % for what the paper did."""
    model = cost.load(name)
    for point in model.measured.get("copy", ()):
        assert abs(float(model.copy_us(point["rows"], int(point["bytes"]))) / point["us"] - 1) < 0.13
    for point in model.measured.get("indexer", ()):
        assert abs(float(model.indexer_us(point["positions"])) / point["us"] - 1) < 0.13
    for point in model.measured.get("gain", ()):
        for found, wasted in ((1.0, 0.0), (0.8, 0.2)):
            gain = cost.gain(
                model,
                requests=int(point["requests"]),
                context=int(point["context"]),
                top_k=int(point["top_k"]),
                bytes_per_row=int(point["bytes"]),
                hit_rate=point["hit_rate"],
                found=found,
                wasted=wasted,
            )
            assert abs(gain / point["gain"] - 1) < 0.15


def test_the_measured_machine_and_the_paper_have_points_to_hold():
    assert len(cost.load("h200").measured["copy"]) == 8 and len(cost.load("h200").measured["indexer"]) == 9
    assert [point["gain"] for point in cost.load("h20").measured["gain"]] == [1.51, 1.29]


def test_exposed_time_by_hand():
    steps = {
        "positions": [1000, 1000, 0, 6000],
        "useful": [3, 0, 0, 40],
        "recalled": [2, 0, 0, 0],
        "staged": [9, 30, 0, 40],
    }
    given = {name: np.array(values) for name, values in steps.items()}
    inside = Exposed(ROUND, 150, hides_behind=INDEXER, **given)
    assert inside.indexer_us.tolist() == [20, 20, 0, 70]
    assert inside.without_overlap_us.tolist() == [15, 0, 0, 85]  # 5 + 2 * 5 rows; nothing; nothing; 5 + 2 * 40
    assert inside.with_overlap_us.tolist() == [9, 40, 0, 10]  # a recall of 2; 60 us of staging in 20; -; 80 in 70
    behind = Exposed(ROUND, 150, hides_behind=LAYER, **given)
    assert behind.with_overlap_us.tolist() == [9, 0, 0, 0]
    assert inside.row()["with_overlap_us"] == {"mean": 14.75, "p50": 9.5, "p99": pytest.approx(39.1)}


def test_gain_by_hand():
    """80 rows are missing: 165 us alone, of which the scores' 110 us hide 55 rows."""
    given: dict[str, Any] = dict(requests=10, context=1000, top_k=16, bytes_per_row=150, hit_rate=0.5)
    assert cost.gain(ROUND, **given) == pytest.approx((110 + 165) / (110 + 5 + 2 * 25))
    assert cost.gain(ROUND, **given, found=0.5) == pytest.approx((110 + 165) / (110 + 5 + 2 * 40))
    assert cost.gain(ROUND, **given, found=0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda text: text.replace("launch_us = 7.0", "launch_us = -1", 1), "launch_us is -1"),
        (lambda text: text.replace("row_us", "row_ms"), "'row_ms' is unknown"),
        (lambda text: text.replace("layer_us = 112.0", ""), "'layer_us' is missing"),
        (lambda text: text.replace("link_bytes_per_us = 54300.0", "link_bytes_per_us = 0"), "link_bytes_per_us is 0"),
        (lambda text: text.replace('name = "h200"', "name = h200"), "no TOML"),
    ],
)
def test_a_file_that_is_no_model_is_refused(change, says, tmp_path):
    import importlib.resources

    text = importlib.resources.files("echo_jax").joinpath("data", "costs", "h200.toml").read_text("utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert cost.load(str(path)) == cost.load("h200")
    path.write_text(change(text))
    with pytest.raises(ValueError, match=says):
        cost.load(str(path))
    with pytest.raises(ValueError, match="'h2000' is neither a file nor one of: gh200, h20, h200"):
        cost.load("h2000")


# ---- rows ------------------------------------------------------------------------------------------------


@functools.cache
def replayed():
    made = plan(INFO, "full", [Setting(6, eviction=eviction.Lfu()), PAIRS["small_cap"].setting], RECORDS)
    return made, run_layer(made, history()[0], STEPS, chunk=STEPS)


def test_a_row_is_the_sum_of_its_steps():
    made, counts = replayed()
    skip, place = 7, made.settings.index(PAIRS["small_cap"].setting)
    row = summary.rows_of(made, counts, 1152, [ROUND], skip)[place]
    moved = {name: values[skip:, place].astype(int) for name, values in vars(counts.each.moved).items()}
    total = {name: int(values.sum()) for name, values in moved.items()}
    missing = total["useful"] + total["recalled"]
    assert row["counted_steps"] == STEPS - skip
    assert row["hit_rate"] == total["hits"] / (total["hits"] + missing)
    assert row["wasted"] == total["staged"] - total["useful"] and row["refused"] == total["refused"]
    assert row["prefetched_share"] == total["useful"] / missing
    assert row["recalled_bytes_per_step"] == total["recalled"] * 1152 / (STEPS - skip)
    assert row["wasted_bytes_per_step"] == (total["staged"] - total["useful"]) * 1152 / (STEPS - skip)
    assert row["host_to_device_bytes"] == (missing + row["wasted"]) * 1152
    each, shared = counts.each, counts.shared
    predictions = each.predictions[skip:, place].sum()
    assert row["threshold_error"]["predictions"] == predictions > 0
    assert row["threshold_error"]["signed"] == pytest.approx(each.error[skip:, place].sum() / predictions, rel=1e-5)
    assert row["threshold_error"]["above_share"] == each.above[skip:, place].sum() / predictions
    assert (
        row["candidates_per_k"]
        == each.candidates[skip:, place].sum() / test_replay_counts.K / shared.predictable[skip:].sum()
    )
    assert (
        row["reselected"] == each.reselected[skip:, place].sum() and row["nan_scores"] == shared.nan_scores[skip:].sum()
    )
    exposed = Exposed(
        ROUND, 1152, np.asarray(shared.positions)[skip:], moved["useful"], moved["recalled"], moved["staged"]
    ).row()
    assert row["cost"] == {"round": exposed}
    json.dumps(row)


def test_skipping_everything_is_refused():
    made, counts = replayed()
    with pytest.raises(ValueError, match=f"skipping {STEPS} of {STEPS}"):
        summary.rows_of(made, counts, 1152, skip=STEPS)


def test_a_pool_too_small_for_the_batch_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"device pool holds 15 rows but B\*T\*\(K\+1\) = 3\*1\*\(5\+1\) needs 18"):
        plan(INFO, "full", [Setting(5)], RECORDS)
    with pytest.raises(ValueError, match=r"holds 5 rows but B\*T\*\(K\+1\) = 1\*1\*\(5\+1\) needs 6"):
        plan(INFO, "full", [Setting(5, pool="split")], RECORDS)


# ---- against recorded rows -------------------------------------------------------------------------------


def grid(way: str, **shapes: Any) -> harness.Row:
    sizes = {"seats": 2, "length": 500, "pages": "in-order", "records": "fp8", "hit": 0.9, "misses": 4, "way": way}
    sizes = sizes | {"cap": 0} | shapes
    name = f"scores and recall, 2 x 500, fp8 records, hit rate 0.9: {way}"
    return harness.Row(50.0, "us", "2026-01-02", "a machine", {}, name=name, shapes=sizes)


def test_predictions_of_a_grid_by_hand():
    """2 seats of 500 positions take 20 us to score; of n rows of 656 bytes a copy takes 5 + n * 7.06."""
    rows = [grid("resident"), grid("link"), grid("in turn"), grid("fused", cap=3), grid("ahead", cap=9)]
    found = list(bench_replay.compared(ROUND, rows))
    assert [one.way for one in found] == ["resident", "link", "in turn", "fused", "ahead"]
    late, left = 6 * 7.06, 5 + 2 * 7.06  # six rows travel while 20 us pass, two are recalled
    wanted = [20.0, 5 + 8 * 7.06, 25 + 8 * 7.06, late + left, 8 * 7.06]
    assert [one.predicted for one in found] == pytest.approx(wanted)
    assert found[0].error == pytest.approx(20 / 50 - 1) and found[0].measured == 50
    timeline = dataclasses.replace(rows[3], name="timeline, 2 x 500, fp8 records, hit rate 0.9: scores")
    older = dataclasses.replace(
        rows[0], shapes={name: size for name, size in rows[0].shapes.items() if name != "pages"}
    )
    assert not list(bench_replay.compared(ROUND, [timeline, older, dataclasses.replace(rows[0], shapes={})]))


def test_recorded_grids_can_be_predicted():
    rows = [row for row, _ in harness.read_rows() if row.name.startswith("scores and recall, ")]
    rows = [row for row in rows if "pages" in row.shapes]
    found = list(bench_replay.compared(cost.load("h200"), rows))
    assert len(found) == len(rows) and all(0.2 < one.predicted / one.measured < 5 for one in found)
