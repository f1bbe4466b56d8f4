"""Totals of a run against the counting oracle: sums by layer, and what is derived from them."""

import dataclasses
import math

import numpy as np

from echo_jax.stats import Moved, Totals
from tests.oracles import counting

RECORD_BYTES = 1152
LAYERS = 3


def event(random):
    """A layer-step with hits, useful and wasted copies, recalls, and rows several seats want."""
    selected = [random.choice(40, 6, replace=False).tolist() for _ in range(2)]
    staged = [random.choice(40, 3, replace=False).tolist() for _ in range(2)]
    resident = frozenset(random.choice(40, 12, replace=False).tolist())
    return counting.LayerStep(resident, selected, [[50], [51]], staged)


def moved_of(events):
    """What the library's step would have counted for one event a layer."""
    counts = [counting.count(one, RECORD_BYTES) for one in events]
    copies = [sum(len(seat) for seat in one.staged) for one in events]
    rows = {
        "hits": [count.hit for count in counts], "useful": [count.useful for count in counts],
        "recalled": [count.recall for count in counts], "staged": copies, "refused": [1, 2, 3], "evicted": [4, 5, 6],
        "written": [2] * LAYERS,
    }  # fmt: skip
    return Moved(**{name: np.array(values, np.int32) for name, values in rows.items()})


def check(row, counts):
    assert (row["hits"], row["useful"], row["recalled"]) == (counts.hit, counts.useful, counts.recall)
    assert row["wasted"] == counts.wasted
    assert row["host_to_device_bytes"] == counts.host_to_device_bytes
    assert row["device_to_host_bytes"] == counts.device_to_host_bytes
    assert row["hit_rate"] == counts.hit / (counts.hit + counts.useful + counts.recall)


def test_totals_by_layer_and_over_all():
    random = np.random.default_rng(1)
    history = [[event(random) for _ in range(LAYERS)] for _ in range(10)]
    totals = Totals(RECORD_BYTES)
    for events in history[:4]:
        totals.add(moved_of(events))
    several = [moved_of(events) for events in history[4:]]
    rows = [dataclasses.astuple(moved) for moved in several]
    totals.add(Moved(*(np.stack(values) for values in zip(*rows, strict=True))))
    assert totals.steps == 10
    for layer, row in enumerate(totals.by_layer()):
        assert row["layer"] == layer
        check(row, counting.total([events[layer] for events in history], RECORD_BYTES))
        assert (row["refused"], row["evicted"], row["written"]) == (10 * (layer + 1), 10 * (layer + 4), 20)
    check(totals.total(), counting.total([one for events in history for one in events], RECORD_BYTES))


def test_sums_do_not_overflow():
    """i32 counts of a long run: 2^31 rows are reached within an hour of a large batch."""
    totals = Totals(RECORD_BYTES)
    large = Moved(*[np.full((4, 1), 2**30, np.int32)] * 7)
    totals.add(large)
    assert totals.total()["recalled"] == 2**32
    assert totals.total()["device_to_host_bytes"] == 2**32 * RECORD_BYTES


def test_a_run_that_needed_nothing_has_no_hit_rate():
    totals = Totals(RECORD_BYTES)
    totals.add(Moved(*[np.zeros(2, np.int32)] * 7))
    assert math.isnan(totals.total()["hit_rate"])
    assert totals.total()["host_to_device_bytes"] == 0
