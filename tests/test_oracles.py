"""The oracles themselves, on cases small enough to work out by hand.

Every number on the right of an `==` was found with pencil and paper, or comes from a second source that the
test names.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tests.oracles import attention, counting, formats, hub, indexer, model, select, threshold
from tests.oracles.pool import OraclePool, check_maps
from tests.oracles.tables import OracleTables
from tests.oracles.words import FREE_PRIORITY, NO_PAGE, NO_POSITION, NO_ROW, NO_SLOT

NAN, INF = math.nan, math.inf


# Tables


def test_pages_are_taken_lowest_first_and_come_back():
    tables = OracleTables(seats=3, capacity=256, pages=8)
    assert tables.admit(0, 130) == [0, 1, 2]
    assert tables.admit(1, 64) == [3]
    assert tables.append(1, 2) == [192, 193]
    assert tables.release(0) == list(range(192))
    assert tables.admit(2, 65) == [0, 1]
    assert tables.admit(0, 256) == [2, 4, 5, 6]
    assert tables.page_table.tolist() == [
        [2, 4, 5, 6],
        [3, NO_PAGE, NO_PAGE, NO_PAGE],
        [0, 1, NO_PAGE, NO_PAGE],
    ]
    assert tables.page_count.tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert tables.lengths.tolist() == [0, 2, 0]
    assert tables.append(0, 65)[-2:] == [2 * 64 + 63, 4 * 64]
    assert tables.row_of(0, 200) == 6 * 64 + 8
    tables.check()


def test_full_pages_are_kept_shared_and_protected_from_rollback():
    tables = OracleTables(seats=3, capacity=256, pages=6)
    tables.admit(0, 200)
    tables.append(0, 130)
    # Pages 0 and 1 are full and kept; page 2 holds two rows and page 3 none. All four lost their last
    # reference.
    assert tables.release(0, keep_pages=True) == list(range(256))
    assert tables.page_cached.tolist() == [True, True, False, False, False, False]
    tables.check()

    assert tables.admit(1, 200, shared_pages=[0, 1]) == [0, 1, 2, 3]
    assert not tables.page_cached.any()
    assert tables.lengths[1] == 128
    assert tables.admit(2, 129, shared_pages=[0, 1]) == [0, 1, 4]
    assert tables.page_count.tolist() == [2, 2, 1, 1, 1, 0]
    assert tables.append(1, 5) == [128, 129, 130, 131, 132]
    assert tables.rollback(1, 130) == [130, 131, 132]
    with pytest.raises(ValueError, match="drops rows of page 1, which 2 seats share; roll back to 128"):
        tables.rollback(1, 127)
    assert tables.lengths[1] == 130
    tables.check()

    assert tables.release(2) == list(range(4 * 64, 5 * 64))
    assert tables.rollback(1, 127) == [127, 128, 129]
    assert tables.release(1, keep_pages=True) == list(range(256))
    assert tables.page_cached.tolist() == [True, False, False, False, False, False]  # page 1 holds 63 rows
    tables.uncache([0])
    assert tables.free_pages() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="page 0 is not cached"):
        tables.uncache([0])


def test_a_fork_shares_full_pages_and_copies_the_partial_one():
    tables = OracleTables(seats=3, capacity=192, pages=6)
    tables.admit(0, 100)
    tables.append(0, 66)
    assert tables.fork(0, 1, 140) == [(64, 128), (65, 129)]
    assert tables.page_table.tolist() == [[0, 1, NO_PAGE], [0, 2, 3], [NO_PAGE, NO_PAGE, NO_PAGE]]
    assert tables.page_count.tolist() == [2, 1, 1, 1, 0, 0]
    assert tables.append(0, 1) == [66]
    assert tables.append(1, 1) == [130]
    tables.rollback(0, 64)
    assert tables.fork(0, 2, 64) == []  # nothing partial, nothing own
    assert tables.page_count.tolist() == [3, 1, 1, 1, 0, 0]
    tables.check()
    assert tables.rows_of(2) == list(range(64))
    assert tables.release(0) == list(range(64, 128))


def test_tables_refuse_with_numbers_and_change_nothing():
    tables = OracleTables(seats=3, capacity=256, pages=5)
    tables.admit(0, 192)
    tables.append(0, 100)
    before = [array.copy() for array in vars(tables).values() if isinstance(array, np.ndarray)]
    for refused, call in [
        ("3 pages are needed but 2 are free", lambda: tables.admit(1, 129)),
        ("3 pages are needed but 2 are free", lambda: tables.fork(0, 1, 256)),
        ("257 tokens must lie in 1..256", lambda: tables.admit(1, 257)),
        ("0 tokens must lie in 1..256", lambda: tables.admit(1, 0)),
        ("page 4 is free", lambda: tables.admit(1, 100, [4])),
        ("page 1 of seat 0 holds 36 of 64 rows", lambda: tables.admit(1, 129, [0, 1])),
        ("name a page twice", lambda: tables.admit(1, 256, [0, 0])),
        ("1 shared pages leave none of the 1 pages", lambda: tables.admit(1, 64, [0])),
        ("seat 0 already holds", lambda: tables.admit(0, 64)),
        ("capacity 99 is below the parent's 100", lambda: tables.fork(0, 1, 99)),
        ("seat 1 holds no request to fork", lambda: tables.fork(1, 2, 64)),
        ("100 positions and 93 more pass its reserved 192", lambda: tables.append(0, 93)),
        ("a rollback to 101 must lie in 0..100", lambda: tables.rollback(0, 101)),
        ("seat 2 holds no request to release", lambda: tables.release(2)),
        ("position 192 of seat 0 has no page", lambda: tables.row_of(0, 192)),
    ]:
        with pytest.raises(ValueError, match=refused):
            call()
        after = [array for array in vars(tables).values() if isinstance(array, np.ndarray)]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), refused


@pytest.mark.parametrize(
    "field, index, value",
    [
        ("page_count", 0, 2),
        ("page_count", 3, 1),
        ("page_cached", 0, True),
        ("lengths", 0, 129),
        ("active", 0, False),
    ],
)
def test_the_check_of_the_tables_can_fail(field, index, value):
    tables = OracleTables(seats=2, capacity=128, pages=4)
    tables.admit(0, 128)
    tables.check()
    getattr(tables, field)[index] = value
    with pytest.raises(AssertionError):
        tables.check()


# Pool


def least_recently_used(priority: int, was_free: bool, step: int, score: float) -> int:
    return step


def test_missing_rows_take_slots_by_seat_and_list_order_each_once():
    pool = OraclePool(host_rows=10, slots=6)
    done = pool.require([[3, 1, 3, NO_ROW], [1, 2, 8]], [[7], [8]], step=4, touch=least_recently_used)
    assert done.placed == [(7, 0), (3, 1), (1, 2), (8, 3), (2, 4)]
    assert done.slots == [[1, 2, 1, NO_SLOT], [2, 4, 3]]
    assert (done.hits, done.missing, done.evicted) == (0, 3, [])  # rows 7 and 8 are new: neither hit nor miss
    slot_of, host_of, priority, free = pool.maps()
    assert slot_of.tolist() == [NO_SLOT, 2, 4, 1, NO_SLOT, NO_SLOT, NO_SLOT, 0, 3, NO_SLOT]
    assert host_of.tolist() == [7, 3, 1, 8, 2, NO_ROW]
    assert priority.tolist() == [4, 4, 4, 4, 4, FREE_PRIORITY]
    assert free.tolist() == [False] * 5 + [True]
    pool.check()


def test_exactly_the_shortage_is_evicted_and_never_a_protected_row():
    pool = OraclePool(host_rows=10, slots=5)
    pool.require([[0]], [[]], step=1, touch=least_recently_used)  # slot 0
    pool.require([[1, 2]], [[]], step=2, touch=least_recently_used)  # slots 1, 2
    pool.require([[3]], [[]], step=3, touch=least_recently_used)  # slot 3; slot 4 stays free
    # Needed: 9, 5, 6 and 0. The free slot goes first, to row 9. Row 0 is the oldest but protected, so the
    # victims are rows 1 and 2 (equal priority, lower slot first), and row 3 stays.
    done = pool.require([[0, 5, 6]], [[9]], step=4, touch=least_recently_used)
    assert done.placed == [(9, 4), (5, 1), (6, 2)]
    assert done.evicted == [(1, 1), (2, 2)]
    assert (done.hits, done.missing) == (1, 2)
    assert pool.maps()[1].tolist() == [0, 5, 6, 3, 9]
    assert pool.maps()[2].tolist() == [4, 4, 4, 3, 4]
    pool.check()


def test_victims_go_by_priority_before_slot():
    pool = OraclePool(host_rows=9, slots=4)
    pool.require([[0, 1, 2, 3]], [[]], 0, lambda p, f, t, score: int(score), [[7.0, 5.0, 6.0, 5.0]])
    done = pool.require([[4, 5, 6]], [[]], 1, least_recently_used)
    assert done.evicted == [(1, 1), (3, 3), (2, 2)]
    assert done.placed == [(4, 1), (5, 3), (6, 2)]


def test_the_policy_sees_each_used_slot_once():
    pool = OraclePool(host_rows=9, slots=3)
    pool.require([[0, 1, 2]], [[]], 0, lambda p, f, t, s: 10)
    seen = {}

    def touch(priority, was_free, step, score):
        seen[score] = (priority, was_free, step)
        return priority + 1 if not was_free else 50

    # Row 1 stays, with the better of two scores (a NaN is no better); row 4 is new and nobody's choice; row 5
    # takes the slot of a victim, whose priority is gone.
    pool.require([[1, 1, 5]], [[4]], 7, touch, [[NAN, 2.0, 3.0]])
    assert seen == {-INF: (FREE_PRIORITY, True, 7), 2.0: (10, False, 7), 3.0: (FREE_PRIORITY, True, 7)}
    assert pool.maps()[1].tolist() == [4, 1, 5]
    assert pool.maps()[2].tolist() == [50, 11, 50]
    pool.rebase(lambda priority, shift: priority - shift, 9)
    assert pool.maps()[2].tolist() == [41, 2, 41]


def test_released_rows_leave_free_slots_and_absent_ones_nothing():
    pool = OraclePool(host_rows=9, slots=3)
    pool.require([[5, 6, 7]], [[]], 1, least_recently_used)
    pool.release([6, 0])
    pool.check()
    assert pool.maps()[1].tolist() == [5, NO_ROW, 7]
    assert pool.require([[8]], [[]], 2, least_recently_used).placed == [(8, 1)]


def test_a_new_row_is_no_hit_even_where_it_is_resident():
    pool = OraclePool(host_rows=9, slots=3)
    pool.require([[5, 6]], [[]], 1, least_recently_used)
    done = pool.require([[5, 6]], [[5]], 2, least_recently_used)
    assert (done.hits, done.missing, done.placed, done.slots) == (1, 0, [], [[0, 1]])


def test_one_slot_short_is_refused_and_changes_nothing():
    pool = OraclePool(host_rows=9, slots=3)
    pool.require([[5]], [[]], 1, least_recently_used)
    before = [array.tolist() for array in pool.maps()]
    with pytest.raises(ValueError, match="holds 3 rows but the step needs 4"):
        pool.require([[1, 2, 3]], [[4]], 2, least_recently_used)
    with pytest.raises(ValueError, match="host row 9 lies outside 0..8"):
        pool.require([[9]], [[]], 2, least_recently_used)
    assert [array.tolist() for array in pool.maps()] == before
    assert len(pool.require([[1, 2]], [[4]], 2, least_recently_used).evicted) == 1


@pytest.mark.parametrize(
    "array, index, value", [(0, 5, 1), (0, 2, 0), (1, 1, 5), (1, 0, NO_ROW), (2, 1, 0), (3, 0, True)]
)
def test_the_check_of_the_maps_can_fail(array, index, value):
    pool = OraclePool(host_rows=6, slots=2)
    pool.require([[5]], [[]], 1, least_recently_used)
    maps = pool.maps()
    check_maps(*maps)
    maps[array][index] = value
    with pytest.raises(AssertionError):
        check_maps(*maps)


# Thresholds


def test_the_average_learns_only_from_real_kth_scores():
    ema = threshold.EMA(0.5)
    assert ema.value() == INF
    ema.observe(9.0, visible=4, top_k=4)  # all four are selected: no k-th score
    assert ema.value() == INF
    ema.observe(4.0, visible=5, top_k=4)
    assert ema.value() == 4.0
    ema.observe(NAN, visible=6, top_k=4)
    assert ema.value() == 4.0
    ema.observe(2.0, visible=7, top_k=4)
    ema.observe(-5.0, visible=8, top_k=4)  # 0.5 * -5 + 0.5 * 3
    assert ema.value() == -1.0
    ema.observe(-INF, visible=9, top_k=4)
    assert ema.value() == -INF
    ema.observe(6.0, visible=10, top_k=4)  # nothing can be averaged with an infinity: as if it were the first
    assert ema.value() == 6.0
    ema.reset()
    assert ema.value() == INF
    slow = threshold.EMA(0.25)
    for score in (8.0, 4.0):
        slow.observe(score, 5, 4)
    assert slow.value() == 7.0  # a quarter of the new, three quarters of the old


def test_the_other_policies():
    last = threshold.Last()
    assert last.value() == INF
    history = [(3.0, 9, 3.0), (1.0, 9, 1.0), (NAN, 9, 1.0), (7.0, 2, 1.0), (-INF, 9, -INF)]
    for score, visible, expected in history:
        last.observe(score, visible, top_k=2)
        assert last.value() == expected
    fixed = threshold.Fixed(0.1)
    for policy, expected in [(fixed, np.float32(0.1)), (threshold.Never(), INF), (threshold.Always(), -INF)]:
        policy.observe(3.0, 9, 2)
        assert policy.value() == expected
        policy.reset()
        assert policy.value() == expected


# Selection


@pytest.mark.parametrize(
    "scores, length, k, positions, kth",
    [
        ([1, 5, 3, 4], 4, 2, [1, 3], 4),
        ([1, 5, 3, 4], 3, 2, [1, 2], 3),  # position 3 is not visible, whatever its score
        ([1, 2, 3, 9], 3, 3, [0, 1, 2], 1),
        ([1, 2, 3, 9], 2, 3, [0, 1], 1),
        ([7, 7, 7, 7, 7], 5, 3, [0, 1, 2], 7),
        ([1, 7, 7, 8, 7], 5, 3, [1, 2, 3], 7),
        ([-0.0, 0.0, -0.0, 0.0], 4, 2, [0, 1], 0),
        ([0.0, -0.0, 1.0], 3, 2, [0, 2], 0),
        ([NAN, -INF, NAN, 5], 4, 2, [1, 3], -INF),
        ([NAN, -INF, NAN, 5], 4, 3, [0, 1, 3], NAN),
        ([NAN, NAN, NAN], 3, 2, [0, 1], NAN),
        ([5, 6], 0, 2, [], NAN),
        ([INF, 5, INF], 3, 1, [0], INF),
    ],
)
def test_selection_by_the_order_of_scores(scores, length, k, positions, kth):
    chosen, score = select.top_k(np.array(scores, np.float32), length, k)
    assert chosen == positions
    assert score == kth or (math.isnan(score) and math.isnan(kth))


def test_the_gap_and_the_padding():
    assert select.kth_gap([1, 5, 3, 4.5], 4, 2) == 1.5
    assert select.kth_gap([1, 5, 5, 5], 4, 2) == 0
    assert select.kth_gap([1, 5], 2, 2) == INF
    assert select.padded([2, 5], 4).tolist() == [2, 5, NO_POSITION, NO_POSITION]


# Formats


def test_codes_by_hand():
    cases = {
        0.0: 0x00, 1.0: 0x38, -1.0: 0xB8, 448.0: 0x7E, 2.0**-9: 0x01, 2.0**-6: 0x08, 7 * 2.0**-9: 0x07,
        1.0625: 0x38,  # half way from 1 (even) to 1.125
        1.1875: 0x3A,  # half way from 1.125 (odd) to 1.25
        2.0**-10: 0x00, 3 * 2.0**-10: 0x02, -(2.0**-10): 0x80, 15 * 2.0**-10: 0x08,
        432.0: 0x7E, 431.9: 0x7D, 464.0: 0x7E, 1e30: 0x7E, INF: 0x7E, -INF: 0xFE,
    }  # fmt: skip
    codes = formats.to_e4m3(np.array(list(cases), np.float32))
    assert codes.tolist() == list(cases.values())
    assert formats.to_e4m3(np.array([NAN, -0.0], np.float32)).tolist() == [0x7F, 0x80]
    assert [formats.CODE_VALUES[code] for code in (0x38, 0x7E, 0xFE, 0x01)] == [1.0, 448.0, -448.0, 2.0**-9]


def test_codes_against_ml_dtypes():
    """Every code, every midpoint between codes with its two neighbours, and random values, all within 448."""
    values = formats.from_e4m3(np.arange(256, dtype=np.uint8))
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(values, expected, equal_nan=True)
    positive = values[:0x7F]
    middles = (positive[1:] + positive[:-1]) / np.float32(2)
    edges = [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1000)), positive]
    random = np.random.default_rng(1).uniform(-448, 448, 1000).astype(np.float32)
    tested = np.concatenate([*edges, *(-edge for edge in edges), random, random / np.float32(1e4)])
    assert np.array_equal(formats.to_e4m3(tested), tested.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_bf16_by_hand_and_against_ml_dtypes():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x80000000], np.uint32)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x7F80, 0x8000]
    assert formats.to_bf16(bits.view(np.float32)).tolist() == expected
    nans = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(formats.from_bf16(formats.to_bf16(nans))).all()
    random = np.random.default_rng(2).integers(0, 2**32, 20_000, dtype=np.uint32)
    random[::2] = (random[::2] & 0xFFFF0000) | 0x8000  # every second one is a tie
    values = random.view(np.float32)
    values = values[~np.isnan(values)]
    assert np.array_equal(formats.to_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    back = formats.from_bf16(formats.to_bf16(values))
    assert np.array_equal(back, values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert formats.bf16_record(np.zeros(576, np.float32)).shape == (3, 192)
    assert formats.f32_record(np.zeros(24, np.float32)).shape == (1, 24)


def test_an_fp8_record_byte_by_byte():
    values = np.zeros(256 + 2, np.float32)
    values[[0, 1, 127]] = [448.0, -1.0, 0.1]  # block 0: scale 1
    values[[128, 255]] = [-896.0, 2.0]  # block 1: scale 2
    values[256:] = [1.0, -2.0]
    words = formats.fp8_record(values, latent=256)
    assert words.dtype == np.uint32 and words.shape == (67,)
    content = words.astype("<u4").tobytes()
    assert content[:3] == bytes([0x7E, 0xB8, 0x00])
    assert content[127] == 0x1D  # 0.1 lies between 0.09375 (0x1C) and 0.1015625 (0x1D), nearer to the second
    assert (content[128], content[255]) == (0xFE, 0x38)
    assert content[256:264] == bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x40])
    assert content[264:] == bytes([0x80, 0x3F, 0x00, 0xC0])
    back = formats.read_fp8_record(words, latent=256)
    assert back[[0, 1, 127, 128, 255, 256, 257]].tolist() == [448.0, -1.0, 0.1015625, -896.0, 2.0, 1.0, -2.0]


def test_an_fp8_record_of_the_real_geometry_is_656_bytes_and_near():
    values = (np.random.default_rng(3).normal(size=576) * 3).astype(np.float32)
    words = formats.fp8_record(values, latent=512)
    assert words.nbytes == 656
    back = formats.read_fp8_record(words, latent=512)
    for block in range(4):
        here = slice(block * 128, block * 128 + 128)
        # Half the distance of codes near 448 is 16; a third decimal of it for the scale's own rounding.
        assert np.abs(back[here] - values[here]).max() <= 16.001 * np.abs(values[here]).max() / 448
    assert np.array_equal(back[512:], values[512:].astype(ml_dtypes.bfloat16).astype(np.float32))
    zero = formats.fp8_record(np.zeros(576, np.float32), latent=512)
    assert zero[128:132].view(np.float32).tolist() == [np.float32(1e-4) / np.float32(448)] * 4
    assert not zero[:128].any() and not zero[132:].any()


@pytest.mark.parametrize(
    "amax, scale",
    [
        (448.0, 1.0),
        (np.nextafter(np.float32(448), np.float32(500)), 2.0),
        (np.nextafter(np.float32(448), np.float32(0)), 1.0),
        (-1.0, 2.0**-8),
        (1.75, 2.0**-8),
        (np.nextafter(np.float32(1.75), np.float32(2)), 2.0**-7),
        (0.875, 2.0**-9),
        (0.0, 2.0**-22),
        (1e-5, 2.0**-22),
        (900.0, 4.0),
    ],
)
def test_power_of_two_scales(amax, scale):
    # 448 = 1.75 * 2^8, so 1 / 448 lies between 2^-9 and 2^-8; 1e-4 / 448 = 2.2e-7 between 2^-23 and 2^-22.
    assert formats.power_of_two_scale(np.array([0.0, amax, 0.0], np.float32)) == scale


def test_an_index_key_page():
    keys = np.zeros((64, 128), np.float32)
    keys[0, 0], keys[1, 5], keys[63, 127] = 448.0, 1.75, -900.0
    page = formats.index_key_page(keys)
    assert page.dtype == np.uint8 and page.shape == (8448,)
    # -900 / 4 = -225, which takes the code of -224.
    assert page[[0, 128 + 5, 63 * 128 + 127]].tolist() == [0x7E, 0x7E, 0xF6]
    assert page[8192:].view("<f4").tolist() == [1.0, 2.0**-8, *[2.0**-22] * 61, 4.0]
    back = formats.read_index_key_page(page)
    assert (back[0, 0], back[1, 5], back[63, 127], np.count_nonzero(back)) == (448.0, 1.75, -896.0, 3)


def test_a_quantised_index_query():
    query = np.array([[448.0, -224.0], [3.5, 0.0]], np.float32)
    codes, weights = formats.quantised_index_query(query, np.array([2.0, -1.0], np.float32))
    assert codes.tolist() == [[0x7E, 0xF6], [0x7E, 0x00]]  # 3.5 / 2^-7 = 448
    assert weights.tolist() == [2.0, -(2.0**-7)]


def test_the_hadamard_rotation():
    assert formats.hadamard(np.array([1.0, 2.0, 3.0, 4.0])).tolist() == [5.0, -1.0, -2.0, 0.0]
    assert formats.hadamard(np.array([7.0])).tolist() == [7.0]
    values = np.random.default_rng(4).normal(size=128)
    twice = formats.hadamard(formats.hadamard(values))
    assert np.allclose(twice, values, rtol=0, atol=1e-13)  # it is its own inverse
    with pytest.raises(ValueError, match="got 96"):
        formats.hadamard(np.zeros(96))


def test_formats_take_float32_only():
    with pytest.raises(TypeError, match="float64"):
        formats.to_bf16(np.zeros(2))


# Indexer


def test_index_scores_by_hand():
    query = np.array([[[1, 2], [0, -1]], [[-1, 0], [1, 1]]], np.float32)
    weights = np.array([[2, -3], [1, 0.5]], np.float32)
    keys = np.array([[1, 1], [1, -2], [-3, 0]], np.float32)
    # Query 0: dots (3, -1), (-3, 2), (-3, 0). Query 1: (-1, 2), (-1, -1), (3, -3).
    assert indexer.scores(query, weights, keys).tolist() == [[6, -6, 0], [1, 0, 3]]
    keys[1, 0] = NAN
    assert np.isnan(indexer.scores(query, weights, keys)).tolist() == [[False, True, False]] * 2


def test_prefetch_candidates_by_hand():
    scores = np.array([[[5, 1, 9, NAN, 2, 8, 8], [0, 3, 0, NAN, 0, 8, 8]]], np.float32)
    resident = [[False, False, True, False, False, False, False]]

    def found(threshold, cap, length=5):
        return indexer.prefetch_candidates(scores, [threshold], [length], resident, cap)[0]

    assert found(2.0, 9) == ([0, 1], 0)  # 2 is resident, 3 a NaN, 4 not above, 5 and 6 are made in this step
    assert found(1.9, 2) == ([0, 1], 1)
    assert found(-1.0, 0) == ([], 3)
    assert found(-INF, 9) == ([0, 1, 4], 0)
    assert found(INF, 9) == found(NAN, 9) == found(-INF, 9, length=0) == ([], 0)
    two = indexer.prefetch_candidates(np.concatenate([scores, -scores]), [1.9, -4.0], [5, 2], resident * 2, 2)
    assert two == [([0, 1], 1), ([0, 1], 0)]  # of -5 and 0, -1 and -3, the better one is above -4


# Attention


def test_attention_by_hand():
    query = np.array([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    # Head 0 sees the first value, head 1 the last: scale 2 makes their logits 0 and ln 3, and 0 and 0.
    records = np.array([[0.0, 4.0, 7.0], [9.0, 9.0, 9.0], [math.log(3) / 2, 8.0, 7.0]])
    output = attention.attend(query, records, np.array([[0, 2, -1]]), scale=2.0, latent=2)
    assert output.shape == (1, 2, 2)
    assert np.allclose(output[0, 0], [0.75 * math.log(3) / 2, 7.0], rtol=1e-15)
    assert np.allclose(output[0, 1], [0.5 * math.log(3) / 2, 6.0], rtol=1e-15)
    twice = attention.attend(query, records, np.array([[0, 2, 2]]), 2.0, 2)
    assert np.allclose(twice[0, 1, 1], (4 + 8 + 8) / 3, rtol=1e-15)
    assert attention.attend(query, records, np.array([[-1, -1, -1]]), 2.0, 2).tolist() == [[[0, 0], [0, 0]]]
    assert np.isfinite(attention.attend(query * 1e6, records, np.array([[0, 1]]), 2.0, 2)).all()


# Counting


def test_counts_by_hand():
    event = counting.LayerStep(
        resident_before=frozenset({1, 2, 3}),
        selected=[[1, 4, 5, 20], [1, 2, 5, 6, NO_ROW]],
        new_rows=[[20], [21]],
        staged=[[4, 5, 8], [5, 9, NO_ROW]],
    )
    # Needed: 1 2 4 5 6. Hits 1 2; staged and missing 4 5; recalled 6. Five copies were staged, two were
    # consumed: 8, 9 and the second copy of 5 are waste.
    expected = counting.Counts(2, 2, 1, 3, host_to_device_bytes=(3 + 3) * 10, device_to_host_bytes=2 * 10)
    assert counting.count(event, record_bytes=10) == expected
    assert counting.total([event, event], 10) == counting.Counts(4, 4, 2, 6, 120, 40)
    # A copy of a row that was resident, or is made in this step, serves nobody.
    idle_copies = counting.LayerStep(frozenset({1}), [[1, 20]], [[20]], [[1, 20]])
    assert counting.count(idle_copies, 10) == counting.Counts(1, 0, 0, 2, 20, 10)
    idle = counting.LayerStep(frozenset(), [[]], [[NO_ROW]], [[NO_ROW]])
    assert counting.count(idle, 10) == counting.Counts()


# Model

PLAIN = SimpleNamespace(kind="default", theta=10000.0)
YARN = SimpleNamespace(
    kind="yarn", theta=math.e, factor=4.0, original_max_positions=2 * math.pi * math.exp(1.1), beta_fast=1.0,
    beta_slow=math.exp(-0.4), mscale=2.0, mscale_all_dim=1.0,
)  # fmt: skip


def test_rotations_by_hand():
    x = np.array([1.0, 0.0, 0.0, 2.0])
    fast, slow = 3.0, 3.0 * 10000.0**-0.5
    c, s, d, t = math.cos(fast), math.sin(fast), math.cos(slow), math.sin(slow)
    assert np.allclose(model.rotate(x, 3, PLAIN, interleave=True), [c, s, -2 * t, 2 * d], rtol=0, atol=1e-15)
    assert np.allclose(model.rotate(x, 3, PLAIN, interleave=False), [c, -2 * t, s, 2 * d], rtol=0, atol=1e-15)
    assert model.rotate(x, 0, PLAIN, interleave=True).tolist() == x.tolist()


def test_yarn_by_hand():
    # width 4, theta e: a pair turns `times` times at number 2 * (1.1 - ln times). So low = floor(2.2) = 2 and
    # high = ceil(3.0) = 3, above both pairs: nothing is stretched.
    assert np.allclose(model.frequencies(4, YARN), [1.0, math.exp(-0.5)], rtol=1e-15)
    # Width 8: number 4 * (1.1 - ln times). With beta_fast e (number 0.4: low 0) and beta_slow e^0.6 (number
    # 2: high 2) pairs 0, 1, 2, 3 are stretched by 0, 1/2, 1 and 1; half a stretch by 4 is a factor 1/8 + 1/2.
    rope = SimpleNamespace(**{**vars(YARN), "beta_fast": math.e, "beta_slow": math.exp(0.6 + 1e-12)})
    plain = [math.exp(-i / 4) for i in range(4)]
    expected = [plain[0], plain[1] * 0.625, plain[2] / 4, plain[3] / 4]
    assert np.allclose(model.frequencies(8, rope), expected, rtol=1e-15)
    assert math.isclose(model.rotary_factor(YARN), (1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4)))
    config = SimpleNamespace(qk_nope_head_dim=12, qk_rope_head_dim=4, rope=YARN)
    assert math.isclose(model.attention_scale(config), 0.25 * (1 + 0.1 * math.log(4)) ** 2)


@pytest.mark.parametrize(
    "groups, kept, normalise, bias, chosen",
    [
        (1, 1, False, [0.0, 0.0, 0.05, 0.0], {1: 0.6, 0: 0.5}),
        (1, 1, True, [0.0, 0.0, 0.15, 0.0], {1: 0.6, 2: 0.4}),
        # Groups: 0.2 + 0.6 against 0.49 + 0.48. The second wins, although expert 1 is the best.
        (2, 1, True, [-0.3, 0.0, 0.09, 0.18], {2: 0.4 / 0.7, 3: 0.3 / 0.7}),
        (2, 2, True, [0.0, 0.0, 0.05, 0.1], {1: 0.6 / 1.1, 0: 0.5 / 1.1}),
        # A group that was not kept stays out even when all of the kept one is below zero.
        (2, 1, False, [-2.0, -2.0, -9.0, 0.0], {1: 0.6, 0: 0.5}),
    ],
)
def test_routing_by_hand(groups, kept, normalise, bias, chosen):
    """Groups are judged by the sum of their two best; the bias takes part in the choice only."""
    scores = np.array([0.5, 0.6, 0.4, 0.3])
    moe = {"router": np.log(scores / (1 - scores))[None], "bias": np.array(bias)}
    config = SimpleNamespace(
        num_experts=4, expert_groups=groups, expert_groups_kept=kept, experts_per_token=2,
        normalise_expert_weights=normalise, routed_scaling_factor=2.0,
    )  # fmt: skip
    weights = model.route(np.array([1.0]), moe, config)
    assert list(weights) == list(chosen)
    assert np.allclose(list(weights.values()), [2 * weight for weight in chosen.values()], rtol=1e-12)


def tiny_model(layer_kinds=("full", "shared", "full")):
    """A random model with every part, and sizes that all differ."""
    config = SimpleNamespace(
        num_heads=3, kv_lora_rank=5, qk_nope_head_dim=7, qk_rope_head_dim=4, rope_interleave=True, rope=PLAIN,
        index_heads=2, index_head_dim=6, index_topk=3, index_rope_interleave=False, index_norm_eps=1e-6,
        num_experts=4, expert_groups=2, expert_groups_kept=1, experts_per_token=2, routed_scaling_factor=1.5,
        normalise_expert_weights=True, rms_norm_eps=1e-6, latent_norm_eps=1e-6, layer_kinds=layer_kinds,
    )  # fmt: skip
    random = np.random.default_rng(5)

    def w(*shape):
        return random.normal(size=shape) * 0.5

    def mlp(*lead):
        return {"gate": w(*lead, 8, 9), "up": w(*lead, 8, 9), "down": w(*lead, 9, 8)}

    layers = []
    for number, kind in enumerate(layer_kinds):
        layer = {
            "input_norm": 1 + w(8),
            "post_norm": 1 + w(8),
            "attention": {
                "q_a": w(8, 10), "q_a_norm": 1 + w(10), "q_b": w(10, 3, 11), "kv_a": w(8, 9),
                "kv_a_norm": 1 + w(5), "kv_b_k": w(5, 3, 7), "kv_b_v": w(5, 3, 2), "o": w(3, 2, 8),
            },
        }  # fmt: skip
        if kind == "full":
            layer["indexer"] = {
                "q_b": w(10, 2, 6), "k": w(8, 6), "k_norm_weight": 1 + w(6), "k_norm_bias": w(6),
                "weights": w(8, 2),
            }  # fmt: skip
        if number == 0:
            layer["mlp"] = mlp()
        else:
            layer["moe"] = {"router": w(8, 4), "bias": w(4), **mlp(4), "shared": mlp()}
        layers.append(layer)
    params = {"embed": w(20, 8), "final_norm": 1 + w(8), "lm_head": w(8, 20), "layers": tuple(layers)}
    return params, config


def test_a_position_depends_on_earlier_ones_only_and_a_shared_layer_on_its_full_one():
    params, config = tiny_model()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    logits, selected, gap = model.forward(params, config, tokens)
    shorter, selected_before, gap_before = model.forward(params, config, tokens[:6])
    assert np.array_equal(logits[:6], shorter)
    assert [layer[:6] for layer in selected] == selected_before and np.array_equal(gap[:, :6], gap_before)
    assert selected[1] == selected[0] != selected[2]
    assert [len(positions) for positions in selected[0]] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert np.isinf(gap[:, :3]).all() and np.isfinite(gap[:, 3:]).all()
    assert not np.array_equal(model.forward(params, config, [3, 1, 4, 1, 5, 9, 3, 6])[0][7], logits[7])
    del params["lm_head"]
    tied = model.forward(params, config, tokens)[0]
    assert tied.shape == (8, 20) and not np.array_equal(tied, logits)


def test_the_first_token_attends_to_itself():
    """One visible position has weight 1, so the attention is the value of that position, through W_o."""
    params, config = tiny_model(("full",))
    layer, at = params["layers"][0], params["layers"][0]["attention"]
    x = params["embed"][3]

    def norm(v, weight):
        return v / np.sqrt((v**2).mean() + 1e-6) * weight

    latent = norm((norm(x, layer["input_norm"]) @ at["kv_a"])[:5], at["kv_a_norm"])
    x = x + np.einsum("r,rhv,hve->e", latent, at["kv_b_v"], at["o"])
    m, z = layer["mlp"], norm(x, layer["post_norm"])
    gate = z @ m["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (z @ m["up"])) @ m["down"]
    expected = norm(x, params["final_norm"]) @ params["lm_head"]
    assert np.allclose(model.forward(params, config, [3])[0][0], expected, rtol=0, atol=1e-12)


def test_the_expanded_and_the_absorbed_attention_agree():
    params, config = tiny_model(("full",))
    at = params["layers"][0]["attention"]
    random = np.random.default_rng(6)
    hidden, query_latents = random.normal(size=(6, 8)), random.normal(size=(6, 10))
    selected = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [0, 2, 4], [3, 4, 5]]
    expanded = model._attention(at, config, hidden, query_latents, selected)
    records = []
    for position, x in enumerate(hidden @ at["kv_a"]):
        latent = x[:5] / np.sqrt((x[:5] ** 2).mean() + 1e-6) * at["kv_a_norm"]
        records.append(np.concatenate([latent, model.rotate(x[5:], position, PLAIN, True)]))
    for position in range(6):
        heads = np.einsum("q,qhd->hd", query_latents[position], at["q_b"])
        query = []
        for h in range(3):
            rotated = model.rotate(heads[h, 7:], position, PLAIN, True)
            query.append(np.concatenate([at["kv_b_k"][:, h] @ heads[h, :7], rotated]))
        mixed = attention.attend_one(np.stack(query), np.stack(records), selected[position], 11**-0.5, 5)
        absorbed = np.einsum("hr,rhv,hve->e", mixed, at["kv_b_v"], at["o"])
        assert np.allclose(absorbed, expanded[position], rtol=0, atol=1e-12)


def test_the_models_selection_agrees_with_the_indexer_oracle():
    params, config = tiny_model(("full",))
    at, ix = params["layers"][0]["attention"], params["layers"][0]["indexer"]
    tokens = [3, 1, 4, 1, 5, 9]
    full = model.forward_in_full(params, config, tokens)
    x = params["embed"][tokens]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["layers"][0]["input_norm"]
    latent = x @ at["q_a"]
    latent = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6) * at["q_a_norm"]
    keys = x @ ix["k"]
    keys = (keys - keys.mean(-1, keepdims=True)) / np.sqrt(keys.var(-1, keepdims=True) + 1e-6)
    keys = keys * ix["k_norm_weight"] + ix["k_norm_bias"]
    queries = np.einsum("pq,qgd->pgd", latent, ix["q_b"])
    for position in range(6):
        keys[position, :4] = model.rotate(keys[position, :4], position, PLAIN, False)
        for head in range(2):
            queries[position, head, :4] = model.rotate(queries[position, head, :4], position, PLAIN, False)
    scores = indexer.scores(queries, x @ ix["weights"] * (2 * 6) ** -0.5, keys)
    visible = np.tril(np.ones((6, 6), bool))
    assert np.allclose(full.index_scores[0][visible], scores[visible], rtol=0, atol=1e-12)
    assert np.isneginf(full.index_scores[0][~visible]).all()
    for position in range(6):
        assert full.selected[0][position] == select.top_k(scores[position], position + 1, 3)[0]


FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("name", ["dev-v32-tiny", "glm-shared-tiny", "hub-fp8-tiny"])
@pytest.mark.parametrize("request_number", [0, 1])
def test_the_model_gives_the_known_answers(name, request_number):
    """The answers are those of `transformers` in float32, for FP8 weights and shared layers too.

    Its distance from another float64 computation is recorded beside them (`max_abs_hf_minus_float64`), and is all
    that the logits may differ by. Sets and greedy tokens are equal.
    """
    folder = FIXTURES / name
    params, config = hub.load(folder)
    known = np.load(folder / "logits.npz")
    meta = json.loads((folder / "meta.json").read_text())["requests"][request_number]
    prompt, greedy, prefill, decode, bits, gap, kth_score, index_scores = (
        known[f"r{request_number}_{field}"]
        for field in (
            "prompt_ids", "greedy_ids", "prefill_logits", "decode_logits", "selected_bits", "topk_gap", "kth_score",
            "decode_index_scores",
        )
    )  # fmt: skip
    tokens = np.concatenate([prompt, greedy[:-1]])
    full = model.forward_in_full(params, config, tokens)

    selected = np.unpackbits(bits, axis=-1, bitorder="little")[..., : len(tokens)]
    for layer in range(len(selected)):
        for position in range(len(tokens)):
            assert full.selected[layer][position] == np.flatnonzero(selected[layer, position]).tolist()
    assert np.argmax(full.logits[len(prompt) - 1 :], axis=-1).tolist() == greedy.tolist()
    distance = np.abs(full.logits - np.concatenate([prefill, decode])).max()
    assert distance <= meta["max_abs_hf_minus_float64"] * 1.000001

    # A shared layer has no scores of its own, so only full layers are compared. These are of order 1, and float32 in
    # three to six layers leaves 1e-5 of them uncertain; a wrong scale or weight shows in the first digit.
    own = [number for number, kind in enumerate(config.layer_kinds) if kind == "full"]
    is_strict = np.isfinite(gap[own])
    assert is_strict.any()
    assert np.array_equal(np.isfinite(full.gap[own]), is_strict)
    assert np.allclose(full.gap[own][is_strict], gap[own][is_strict], rtol=0, atol=1e-5)
    assert np.allclose(full.kth_score[own][is_strict], kth_score[own][is_strict], rtol=0, atol=1e-5)
    scores = full.index_scores[own, len(prompt) :]
    is_visible = np.isfinite(index_scores[own])
    assert np.array_equal(np.isfinite(scores), is_visible)
    assert np.allclose(scores[is_visible], index_scores[own][is_visible], rtol=0, atol=1e-5)
