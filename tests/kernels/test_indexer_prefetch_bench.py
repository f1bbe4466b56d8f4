"""What the bench of prefetch takes for granted where there is no GPU: its maps, its lists, its cap and its pictures."""

import dataclasses
import xml.etree.ElementTree as ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

from bench import harness, prefetch_pictures, prefetch_roads
from bench import prefetch_calls as calls
from bench.prefetch_calls import SLOTS, Inputs, K, Set
from echo_jax import threshold
from echo_jax.types import FREE_PRIORITY, NO_ROW, NO_SLOT, SOURCE_HOST

SEATS, LENGTH, MISSES = 2, 8192, 300
HOST_ROWS = SEATS * LENGTH + 64


@pytest.fixture(scope="module")
def given():
    """Inputs of which only the host rows of the best matter."""
    random, nothing = np.random.default_rng(0), jnp.zeros((1,))
    tops = [
        random.permuted(np.arange(SEATS * LENGTH, dtype=np.int32).reshape(SEATS, LENGTH), axis=1) for _ in range(10)
    ]
    sets = tuple(Set(nothing, nothing, nothing, top[:, :K].copy()) for top in tops)
    return Inputs(SEATS, LENGTH, nothing, nothing, nothing, nothing, nothing, sets)


def test_as_many_of_the_best_are_missing_as_are_wanted(given):
    """And the maps are a pool's: inverse to each other, free where nobody lives."""
    for one, maps in zip(given.sets, calls.missing(given, MISSES, HOST_ROWS), strict=True):
        slot_of, host_of, priority, free = map(np.asarray, (maps.slot_of, maps.host_of, maps.priority, maps.free))
        is_missing = slot_of[one.top] == NO_SLOT
        assert is_missing[:, :MISSES].all() and not is_missing[:, MISSES:].any()
        assert host_of.size == SEATS * SLOTS and 0.5 < (~free).mean()
        np.testing.assert_array_equal(free, host_of == NO_ROW)
        np.testing.assert_array_equal(free, priority == FREE_PRIORITY)
        live = np.flatnonzero(~free)
        np.testing.assert_array_equal(slot_of[host_of[live]], live)
        assert (slot_of != NO_SLOT).sum() == live.size


@pytest.mark.parametrize(("cap", "staging"), [(0, 512), (100, 512), (1024, 512), (1024, 64)])
def test_a_list_takes_from_staging_what_the_cap_lets_in(given, cap, staging):
    for one, wanted in zip(given.sets, calls.lists(given, MISSES, cap, staging), strict=True):
        rows, slots, source = (np.asarray(part)[: SEATS * MISSES] for part in wanted[:3])
        assert int(wanted.count) == SEATS * MISSES and (np.asarray(wanted.rows)[SEATS * MISSES :] == NO_ROW).all()
        assert len(set(slots.tolist())) == SEATS * MISSES and slots.max() < SEATS * SLOTS
        staged = min(cap, MISSES, staging)
        for seat in range(SEATS):
            mine = slice(seat * MISSES, (seat + 1) * MISSES)
            np.testing.assert_array_equal(rows[mine], np.sort(one.top[seat, :MISSES]))
            places = source[mine][source[mine] != SOURCE_HOST]
            assert sorted(places.tolist()) == list(range(seat * staging, seat * staging + staged))


def test_the_cap_is_what_crosses_while_scores_are_made():
    """80 us at 40 rows a us are 3,200 rows: 200 for each of 16 seats, whatever the context is counted in."""
    each = threshold.rows_per_position(80.0, 40.0, 16 * 131_072)
    assert int(each * 131_072) == 200 and int(each * 65_536) == 100
    wrong: tuple
    for wrong in ((0.0, 40.0, 1), (80.0, float("nan"), 1), (80.0, 40.0, 0), (80.0, 40.0, 1, -1.0)):
        with pytest.raises(ValueError, match="measure the rates"):
            threshold.rows_per_position(*wrong)


def test_the_cap_is_half_of_the_missing_where_that_is_more():
    """If prefetch behind the scores is as fast as a recall. 3,200 rows cross while scores are made."""
    assert int(threshold.rows_per_position(80.0, 40.0, 2**21, missing=2000) * 2**17) == 200
    assert int(threshold.rows_per_position(80.0, 40.0, 2**21, missing=8000) * 2**17) == 250
    nothing = jnp.zeros((1,))
    given = Inputs(16, 2**17, nothing, nothing, nothing, nothing, nothing, ())
    fast, slow = (prefetch_roads.Rates(80.0, 40.0, behind, recall=50.0) for behind in (50.0, 49.0))
    assert [rule.cap(given, misses) for rule in (fast, slow) for misses in (100, 500)] == [200, 250, 200, 200]


def test_the_largest_cap_that_scores_hide():
    """Between caps on a straight line: 88 us are reached half way from 82 to 94."""
    times = {0: 80.0, 64: 82.0, 128: 94.0, 192: 85.0}
    assert prefetch_roads.largest_cap(times, 0.1) == 96
    assert prefetch_roads.largest_cap(times, 0.5) == 192
    assert prefetch_roads.largest_cap({0: 80.0, 64: 120.0}, 0.1) == 64 / 5


def test_rows_in_no_order_are_the_same_rows(given):
    wanted = calls.lists(given, MISSES, 100, 512)[0]
    mixed, count = calls.disordered(wanted), SEATS * MISSES
    first, second = (np.asarray(each.rows) for each in (wanted, mixed))
    np.testing.assert_array_equal(np.sort(first[:count]), np.sort(second[:count]))
    assert (np.diff(second[:count]) < 0).mean() > 0.3
    np.testing.assert_array_equal(first[count:], second[count:])
    assert (np.asarray(mixed.source) == SOURCE_HOST).all() and mixed.count == count


def row(name, value, notes="", **shapes):
    common = dict(seats=16, length=131_072, pages="in-order", records="fp8") | shapes
    return harness.Row(value, "us", "2026-01-01T00:00:00+00:00", "none", {}, name=name, shapes=common, notes=notes)


def test_pictures_are_drawn_from_rows_and_the_others_are_named(tmp_path):
    times = {"resident": 80.0, "link": 80.0, "in turn": 150.0, "fused": 100.0}
    rows = [
        row(
            f"scores and recall, 16 x {length}, fp8 records, hit rate {hit}: {way}",
            time,
            length=length,
            hit=hit,
            way=way,
        )
        for length in (65_536, 131_072)
        for hit in (0.5, 0.9)
        for way, time in times.items()
    ]
    assert prefetch_pictures.draw(rows, tmp_path) == ["prefetch-cap", "prefetch-layer", "prefetch-policies"]
    drawn = (tmp_path / "prefetch-hit-rate.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "16 x 131,072" in drawn and "fp8 records" in drawn and "bf16" not in drawn
    older = dataclasses.replace(rows[-1], shapes={"hit": 0.9, "way": "fused"})
    assert older not in prefetch_pictures.newest([*rows, older])
    assert prefetch_pictures._quotient({0.5: 150.0, 0.9: 3.0}, {0.5: 100.0}) == [(0.5, 1.5)]
    assert prefetch_pictures.draw([], tmp_path) == list(prefetch_pictures.PICTURES)
