"""Movement: which rows are copied ahead, and where `require` takes each record from.

Whole histories are in test_pool_machine.py. Here one layer-step at a time is set up by hand, and the three sources of a
record (this step's own, staging, the host) hold different bytes for one row, so that the source shows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import pool, recall
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.recall import StepView
from echo_jax.threshold import Never
from echo_jax.types import LayerState, Staging
from tests.oracles import counting, indexer
from tests.oracles.pool import OraclePool
from tests.oracles.words import NO_POSITION, NO_ROW

SEATS, T, K, P, LAYERS, HOST_ROWS, SLOTS, S = 3, 2, 4, 64, 2, 256, 40, 5
NAN, INF = float("nan"), float("inf")

CONFIG = CacheConfig(
    layer_kinds=("full",) * LAYERS,
    records=RecordFormat("f32", 4, 2),
    keys=KeyFormat("f32", 4),
    threshold=Never(),
    eviction=Lru(),
    seats=SEATS,
    capacity=P,
    host_rows=HOST_ROWS,
    device_slots=SLOTS,
    top_k=K,
    tokens_per_step=T,
    staging=S,
)

require = jax.jit(recall.require, static_argnums=0)
prefetch = jax.jit(recall.prefetch, static_argnums=0)
read_ahead = jax.jit(recall.read_ahead, static_argnums=0)

# A record of a row, by where it is read from. No two are alike.
ON_HOST, NEW, STAGED, IN_SLOT = 1.0, 2.0, 3.0, 4.0


def record(source, row, layer=0):
    return np.array([[source, row, layer, source * 1000 + row, -row, 7.0]], np.float32)


def host_pool():
    rows = np.stack([np.stack([record(ON_HOST, row, layer) for row in range(HOST_ROWS)]) for layer in range(LAYERS)])
    return jnp.asarray(rows)


HOST = host_pool()


def layer_state(resident):
    """A layer in which the rows of the list sit in slots 0, 1, ... with priorities 1, 2, ..."""
    maps = pool.initial(HOST_ROWS, SLOTS)
    slots = jnp.arange(len(resident), dtype=jnp.int32)
    rows = jnp.asarray(resident, jnp.int32)
    maps = maps.replace(
        slot_of=maps.slot_of.at[rows].set(slots), host_of=maps.host_of.at[slots].set(rows),
        priority=maps.priority.at[slots].set(slots + 1), free=maps.free.at[slots].set(False),
    )  # fmt: skip
    records = np.zeros((SLOTS, *CONFIG.records.shape), np.float32)
    for slot, row in enumerate(resident):
        records[slot] = record(IN_SLOT, row)
    return LayerState(slots=maps, records=jnp.asarray(records), index_keys=None, threshold=())


def view_of(lengths, rows=None, idle=()):
    """Seats whose row of position p is 64 * seat + p, or as given; seats that are idle write and see nothing."""
    lengths = np.asarray(lengths, np.int32)
    rows = np.arange(SEATS * P, dtype=np.int32).reshape(SEATS, P) if rows is None else np.asarray(rows, np.int32)
    positions = lengths[:, None] + np.arange(T, dtype=np.int32)[None]
    new_rows = np.take_along_axis(rows, np.minimum(positions, P - 1), axis=1)
    new_rows = np.where(positions < P, new_rows, NO_ROW)
    new_rows[list(idle)] = NO_ROW
    visible = np.where(new_rows == NO_ROW, 0, positions + 1)
    return StepView(*(jnp.asarray(x, jnp.int32) for x in (rows, lengths, positions, new_rows, visible, 9)))


# Prefetch


def check_prefetch(score, threshold, lengths, resident, config=CONFIG, layer=0, rows=None):
    """Against the oracle, the bytes of every staged record included; returns the staging."""
    view = view_of(lengths, rows)
    state = layer_state(resident)
    got = prefetch(
        config, state, HOST, jnp.int32(layer), view, np.asarray(score, np.float32), np.asarray(threshold, np.float32)
    )
    for seat in range(SEATS):
        rows_of_seat = np.asarray(view.rows[seat]).tolist()
        is_resident = [row in resident for row in rows_of_seat]
        cap = config.cap(int(lengths[seat]))
        found = indexer.candidates_of_one(score[seat], float(threshold[seat]), int(lengths[seat]), is_resident, cap)
        expected = [rows_of_seat[position] for position in found.positions]
        padding = got.rows.shape[1] - len(expected)
        assert np.asarray(got.rows[seat]).tolist() == expected + [NO_ROW] * padding
        # Without any staging prefetch is off: nobody looks for candidates, so none is turned away.
        assert int(got.refused[seat]) == (found.refused if config.staging else 0)
        for place, row in enumerate(expected):
            np.testing.assert_array_equal(got.records[seat, place], record(ON_HOST, row, layer))
    return got


def random_scores(seed):
    random = np.random.default_rng(seed)
    score = random.normal(size=(SEATS, T, P)).astype(np.float32).round(1)
    odd = random.random(score.shape) < 0.05
    return np.where(odd, random.choice([NAN, INF, -INF, -0.0], score.shape), score).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [1.0, -0.5, 0.0, INF, -INF, NAN], ids=str)
def test_candidates(seed, threshold):
    lengths = [[10, 0, 62], [64, 63, 1], [30, 31, 32], [5, 4, 3]][seed]
    resident = np.random.default_rng(seed).choice(SEATS * P, 30, replace=False).tolist()
    thresholds = [threshold, -threshold, threshold]
    check_prefetch(random_scores(seed), thresholds, lengths, resident, layer=seed % LAYERS)


@pytest.mark.parametrize("staging", [0, 1, S], ids=lambda staging: f"cap_{staging}")
def test_caps_of_staging(staging):
    config = dataclasses.replace(CONFIG, staging=staging)
    got = check_prefetch(random_scores(1), [-INF] * SEATS, [40, 3, 0], [0, 2], config)
    assert got.rows.shape == (SEATS, staging) and got.records.shape == (SEATS, staging, 1, 6)


@pytest.mark.parametrize("per_position", [0.0, 0.03125, 0.125, 1.0])
def test_caps_that_grow_with_the_context(per_position):
    config = dataclasses.replace(CONFIG, prefetch_per_position=per_position)
    got = check_prefetch(np.ones((SEATS, T, P)), [0.0] * SEATS, [32, 31, 8], [], config)
    counts = (np.asarray(got.rows) != NO_ROW).sum(axis=1).tolist()
    assert counts == [min(S, int(per_position * length)) for length in (32, 31, 8)]


def test_a_score_equal_to_the_threshold_is_no_candidate():
    got = check_prefetch(
        np.full((SEATS, T, P), 2.0), [2.0, np.nextafter(np.float32(2), np.float32(0)), 3.0], [9] * 3, []
    )
    assert (np.asarray(got.rows) != NO_ROW).sum(axis=1).tolist() == [0, S, 0]


def test_rows_of_this_step_are_never_staged():
    """They score high and are not resident, and the host does not have them."""
    score = np.zeros((SEATS, T, P), np.float32)
    score[:, :, 10:12] = 9
    got = check_prefetch(score, [1.0] * SEATS, [10, 10, 12], [])
    assert np.asarray(got.rows)[:, 0].tolist() == [NO_ROW, NO_ROW, 2 * P + 10]


def test_either_query_makes_a_candidate():
    score = np.zeros((SEATS, T, P), np.float32)
    score[0, 0, 3], score[0, 1, 5], score[1, 1, 0] = 2, 2, NAN
    got = check_prefetch(score, [1.0] * SEATS, [20] * SEATS, [])
    assert np.asarray(got.rows)[0, :3].tolist() == [3, 5, NO_ROW]


def check_read_ahead(selected, lengths, resident, staging=S, rows=None):
    """Against a loop over the lists, i32[SEATS, queries, K]; returns the staging."""
    view, selected = view_of(lengths, rows), np.asarray(selected, np.int32)
    config = dataclasses.replace(CONFIG, staging=staging)
    # Two layers of the host pool share the list; of the second, what the first has not is there.
    others = [row for row in range(SEATS * P) if row not in resident][:SLOTS]
    got = read_ahead(config, {1: layer_state(resident), 0: layer_state(others)}, HOST, view, selected, after=3)
    check_staged(got[0], selected, lengths, others, view, staging, layer=0)
    check_staged(got[1], selected, lengths, resident, view, staging, layer=1)
    return got[1]


def check_staged(got, selected, lengths, resident, view, staging, layer):
    for seat in range(SEATS):
        wanted = sorted({int(p) for p in selected[seat].reshape(-1) if p != NO_POSITION and p < lengths[seat]})
        rows_of_seat = np.asarray(view.rows[seat])[wanted].tolist()
        missing = [row for row in rows_of_seat if row != NO_ROW and row not in resident]
        expected = missing[:staging]
        assert np.asarray(got.rows[seat]).tolist() == expected + [NO_ROW] * (staging - len(expected))
        assert int(got.refused[seat]) == len(missing) - len(expected)
        for place, row in enumerate(expected):
            np.testing.assert_array_equal(got.records[seat, place], record(ON_HOST, row, layer=layer))


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_known_list_is_read_ahead(seed, queries):
    """Of lists that overlap, some shorter than K, with positions of this step among them: what was written before and
    is not resident, once each."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, P - 4, SEATS)
    selected = np.full((SEATS, queries, K), NO_POSITION)
    for seat in range(SEATS):
        for query in range(queries):
            among = min(12, int(lengths[seat]) + query + 1)  # few, so that queries meet
            count = int(random.integers(0, min(K, among) + 1))
            last = int(lengths[seat]) + query
            selected[seat, query, :count] = np.sort(last - random.choice(among, count, replace=False))
    resident = random.choice(SEATS * P, 30, replace=False).tolist()
    for staging in (1, 3, 16):
        check_read_ahead(selected, lengths, resident, staging)


def test_nothing_is_read_ahead_where_nothing_is_selected_or_all_is_there():
    nothing = np.full((SEATS, T, K), NO_POSITION)
    assert (np.asarray(check_read_ahead(nothing, [40, 0, 12], []).rows) == NO_ROW).all()
    first_four = np.broadcast_to(np.arange(K), (SEATS, T, K))
    there = [seat * P + position for seat in range(SEATS) for position in range(K)]
    assert (np.asarray(check_read_ahead(first_four, [40, 20, 12], there).rows) == NO_ROW).all()


def test_no_layer_and_no_staging_read_nothing_ahead():
    view, selected = view_of([40, 20, 12]), jnp.zeros((SEATS, T, K), jnp.int32)
    assert read_ahead(CONFIG, {}, HOST, view, selected) == {}
    config = dataclasses.replace(CONFIG, staging=0)
    assert read_ahead(config, {1: layer_state([])}, HOST, view, selected)[1].rows.shape == (SEATS, 0)


def test_pages_without_a_row_are_not_read_ahead():
    rows = np.arange(SEATS * P).reshape(SEATS, P)
    rows[1, 2:] = NO_ROW
    first_four = np.broadcast_to(np.arange(K), (SEATS, T, K))
    check_read_ahead(first_four, [40, 20, 12], [], rows=rows)


def test_two_seats_that_share_a_prefix_stage_it_each():
    rows = np.arange(SEATS * P).reshape(SEATS, P)
    rows[1, :32] = rows[0, :32]
    got = check_prefetch(np.ones((SEATS, T, P)), [0.0] * SEATS, [32, 40, 0], [1], rows=rows)
    assert np.asarray(got.rows).tolist() == [[0, 2, 3, 4, 5], [0, 2, 3, 4, 5], [NO_ROW] * S]


# Require


class Step:
    """One `require` with everything it needs, against the oracles of maps and counts and by source of every record."""

    def __init__(self, selected, lengths=(20, 20, 20), resident=(), staged=((), (), ()), rows=None, idle=(), layer=0):
        self.view = view_of(lengths, rows, idle)
        self.layer, self.before = layer, list(resident)
        self.selected = np.full((SEATS, T, K), NO_POSITION, np.int32)
        for seat, lists in enumerate(selected):
            for t, positions in enumerate(lists):
                self.selected[seat, t, : len(positions)] = positions
        self.staged = np.full((SEATS, S), NO_ROW, np.int32)
        for seat, of_seat in enumerate(staged):
            self.staged[seat, : len(of_seat)] = of_seat
        self.run()

    def run(self):
        state = layer_state(self.before)
        new_rows = np.asarray(self.view.new_rows)
        new = np.stack([np.stack([record(NEW, row) for row in of_seat]) for of_seat in new_rows])
        staged = np.stack([np.stack([record(STAGED, row) for row in of_seat]) for of_seat in self.staged])
        scores = np.zeros(self.selected.shape, np.float32)
        staging = Staging(jnp.asarray(self.staged), jnp.asarray(staged), jnp.array([1, 2, 4], jnp.int32))
        arguments = (jnp.int32(self.layer), self.view, new, self.selected, scores, staging)
        after, self.slots, self.moved = require(CONFIG, state, HOST, *arguments)

        oracle = OraclePool(HOST_ROWS, SLOTS)
        for slot, row in enumerate(self.before):
            oracle.slot_of[row], oracle.host_of[slot], oracle.priority[slot] = slot, row, slot + 1
        rows = np.asarray(self.view.rows)
        lists = []
        for seat in range(SEATS):
            positions = self.selected[seat].reshape(-1)
            lists.append([NO_ROW if p == NO_POSITION else int(rows[seat, p]) for p in positions])
        done = oracle.require(lists, new_rows.tolist(), 9, lambda *given: 9)
        assert np.asarray(self.slots).reshape(SEATS, -1).tolist() == done.slots
        for got, expected in zip(dataclasses.astuple(after.slots), oracle.maps(), strict=True):
            np.testing.assert_array_equal(got, expected)

        event = counting.LayerStep(frozenset(self.before), lists, new_rows.tolist(), self.staged.tolist())
        counts = counting.count(event, CONFIG.records.bytes_per_row)
        moved = {name: int(value) for name, value in dataclasses.asdict(self.moved).items()}
        copies = int((self.staged != NO_ROW).sum())
        assert moved == {
            "hits": counts.hit, "useful": counts.useful, "recalled": counts.recall, "staged": copies, "refused": 7,
            "evicted": len(done.evicted), "written": int((new_rows != NO_ROW).sum()),
        }  # fmt: skip
        assert copies - moved["useful"] == counts.wasted

        # Where each slot's record came from; a slot that nobody filled keeps its bytes.
        fresh = {int(row) for row in new_rows.reshape(-1) if row != NO_ROW}
        filled = {row for row, _ in done.placed}
        for row, slot in oracle.slot_of.items():
            if row in fresh:
                expected = record(NEW, row)
            elif row not in filled:
                expected = record(IN_SLOT, row)
            elif row in self.staged:
                expected = record(STAGED, row)
            else:
                expected = record(ON_HOST, row, self.layer)
            np.testing.assert_array_equal(after.records[slot], expected, err_msg=f"row {row}")
        untouched = np.setdiff1d(np.arange(SLOTS), list(oracle.host_of))
        np.testing.assert_array_equal(after.records[untouched,], state.records[untouched,])


def test_every_source_at_once():
    """Of seat 0's rows 1 is resident, 2 staged, 3 on the host, 20 and 21 are new."""
    step = Step([[[1, 2, 3, 20], [2, 3, 20, 21]], [[0, 1], [19]], []], resident=[1, 64], staged=[[2, 9], [70], []])
    assert int(step.moved.hits) == 2 and int(step.moved.useful) == 1 and int(step.moved.recalled) == 3


def test_a_layer_reads_its_own_rows():
    Step([[[1, 2]], [], []], layer=1)


def test_nothing_selected_and_nobody_writes():
    step = Step([[], [], []], resident=[5, 6], staged=[[7], [], []], idle=[0, 1, 2])
    assert int(step.moved.staged) == 1 and int(step.moved.evicted) == 0


def test_an_idle_seat_between_two_others():
    Step([[[1]], [], [[4, 5]]], idle=[1])


def test_the_last_token_of_a_full_seat():
    Step([[[62, 63], []], [[1]], []], lengths=[63, 64, 0], idle=[1, 2])


def test_a_row_that_three_seats_select_is_taken_from_whoever_staged_it():
    rows = np.arange(SEATS * P).reshape(SEATS, P)
    rows[1, :10] = rows[2, :10] = rows[0, :10]
    selected = [[[3, 4, 5]], [[3, 5, 6]], [[4, 6, 7]]]
    step = Step(selected, staged=[[], [5, 6], [6, 7]], rows=rows)
    assert int(step.moved.useful) == 3 and int(step.moved.recalled) == 2


def test_what_was_staged_in_vain_goes_nowhere():
    Step([[[1, 2]], [[0]], [[9]]], resident=[2], staged=[[2, 3], [130, 131], [64]])


def test_every_slot_is_taken_and_the_oldest_go():
    """36 rows are free or old enough to go; 30 are needed, and those selected stay although they are the oldest."""
    resident = [200 + i for i in range(36)] + [0, 1, 64, 128]
    selected = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    step = Step(selected, resident=resident[::-1], staged=[[2], [66, 67], []])
    assert int(step.moved.evicted) == 26 and int(step.moved.hits) == 4


@pytest.mark.parametrize("seed", range(8))
def test_any_step(seed):
    random = np.random.default_rng(seed)
    rows = np.arange(SEATS * P).reshape(SEATS, P)
    lengths = random.integers(12, 62, SEATS)
    if seed % 2:
        rows[1, :12] = rows[2, :12] = rows[0, :12]
    resident = random.choice(np.unique(np.r_[rows[:, :12].reshape(-1), 200:256]), random.integers(0, 41), False)
    selected = []
    for seat in range(SEATS):
        pick = [random.choice(lengths[seat] + t + 1, random.integers(0, K + 1), False) for t in range(T)]
        selected.append([sorted(positions.tolist()) for positions in pick])
    staged = [random.choice(rows[seat, : lengths[seat]], random.integers(0, S + 1), False) for seat in range(SEATS)]
    staged = [[row for row in of_seat if row not in resident] for of_seat in staged]
    idle = [1] if seed == 3 else []
    for seat in idle:
        selected[seat] = []
    Step(selected, lengths, resident.tolist(), staged, rows, idle, layer=seed % LAYERS)


def test_no_staging_is_a_staging_of_no_places():
    staging = recall.no_staging(CONFIG, SEATS)
    assert staging.rows.shape == (SEATS, 0) and staging.records.shape == (SEATS, 0, 1, 6)
    state, view = layer_state([]), view_of([20] * SEATS)
    selected = jnp.full((SEATS, T, K), NO_POSITION, jnp.int32).at[0, 0, 0].set(3)
    new = jnp.zeros((SEATS, T, *CONFIG.records.shape))
    arguments = (jnp.int32(0), view, new, selected, jnp.zeros(selected.shape), staging)
    after, slots, moved = require(CONFIG, state, HOST, *arguments)
    assert int(moved.recalled) == 1 and int(moved.staged) == int(moved.refused) == 0
    np.testing.assert_array_equal(after.records[slots[0, 0, 0]], record(ON_HOST, 3))


def test_rows_at():
    rows = jnp.arange(10, 30, dtype=jnp.int32).reshape(2, 10).at[1, 9].set(NO_ROW)
    positions = jnp.array([[0, NO_POSITION, 9], [9, 0, NO_POSITION]], jnp.int32)
    assert np.asarray(recall.rows_at(rows, positions)).tolist() == [[10, NO_ROW, 19], [NO_ROW, 20, NO_ROW]]
