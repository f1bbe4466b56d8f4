"""The slot maps against loops, bit for bit: lookup, allocation, eviction, release. By jnp and by the shared library.

The oracle works on seats' lists; `pool` on one list of rows. Here a step has one seat and no new rows, so both are the
same list. What recall adds to this (new rows, staging, bytes) is in test_recall.py; whole histories with requests that
come and go are in test_pool_machine.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _ffi, pool
from echo_jax.eviction import HIGHEST, LOWEST, Lru
from tests.oracles.pool import OraclePool, check_maps
from tests.oracles.words import FREE_PRIORITY, NO_ROW, NO_SLOT

SOURCE_HOST = -1

HOST_ROWS, SLOTS = 40, 8


@functools.partial(jax.jit, static_argnames="implementation")
def step(maps, rows, when, *, implementation):
    """What `recall.require` does to the maps, with the least recently used policy."""
    told = pool.before_touch(maps, rows)
    priority = Lru().touch(*told, when, jnp.zeros(rows.shape))
    return *pool.allocate(maps, rows, priority, implementation=implementation), told


release = jax.jit(pool.release, static_argnames="implementation")


class Both:
    """Our pool and the oracle, driven together; a difference fails at once."""

    implementation = "jnp"

    def __init__(self, slots=SLOTS, length=SLOTS):
        self.maps = pool.initial(HOST_ROWS, slots)
        self.oracle = OraclePool(HOST_ROWS, slots)
        self.length = length
        self.when = 0
        self.agree()

    def require(self, rows, when=None):
        """Pads the list to one shape, so that everything here compiles once; returns the library's allocation."""
        self.when = self.when + 1 if when is None else when
        padded = np.array([*rows, *[NO_ROW] * (self.length - len(rows))], np.int32)
        told = []

        def touch(priority, was_free, when, score):
            told.append((priority, was_free))
            return when

        expected = self.oracle.require([padded.tolist()], [[]], self.when, touch)
        self.maps, got, (old_priority, is_absent) = step(
            self.maps, padded, np.int32(self.when), implementation=self.implementation
        )
        self.agree()
        assert np.asarray(got.slots).tolist() == expected.slots[0]
        self.check_fills(got, padded, expected.placed)
        assert int(got.evicted) == len(expected.evicted)
        assert int(got.hits) == expected.hits
        # The policy is told the same of every row, in the order of first mentions.
        first = [padded.tolist().index(row) for row in dict.fromkeys(padded.tolist()) if row != NO_ROW]
        assert [(int(old_priority[m]), bool(is_absent[m])) for m in first] == told
        return got

    def check_fills(self, got, padded, placed):
        """Every row that got a slot, in order, from the host; then padding."""
        fills, count = got.fills, len(placed)
        assert int(fills.count) == int(got.recalled) == count
        assert (
            list(zip(np.asarray(fills.rows).tolist(), np.asarray(fills.slots).tolist(), strict=True))[:count] == placed
        )
        assert np.asarray(fills.mention)[:count].tolist() == [padded.tolist().index(row) for row, _ in placed]
        assert np.asarray(fills.source).tolist() == [SOURCE_HOST] * len(padded)
        for name in ("rows", "slots", "mention"):
            assert np.asarray(getattr(fills, name))[count:].tolist() == [-1] * (len(padded) - count)

    def release(self, rows):
        self.oracle.release(rows)
        dropped = np.zeros(HOST_ROWS, bool)
        dropped[rows] = True
        self.maps = release(self.maps, dropped, implementation=self.implementation)
        self.agree()

    def agree(self):
        ours = (self.maps.slot_of, self.maps.host_of, self.maps.priority, self.maps.free)
        for name, got, expected in zip(
            ("slot_of", "host_of", "priority", "free"), ours, self.oracle.maps(), strict=True
        ):
            assert np.asarray(got).dtype == expected.dtype
            np.testing.assert_array_equal(got, expected, err_msg=name)
        check_maps(*(np.asarray(array) for array in ours))


@pytest.fixture(autouse=True, params=["jnp", "ffi"])
def implementation(request, monkeypatch):
    """Every test runs by each; `Both` knows by which."""
    if request.param == "ffi" and (reason := _ffi.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(Both, "implementation", request.param)
    return request.param


def test_an_empty_pool():
    both = Both()
    assert np.asarray(both.maps.priority).tolist() == [FREE_PRIORITY] * SLOTS
    assert np.asarray(pool.lookup(both.maps, jnp.array([0, 39, NO_ROW], jnp.int32))).tolist() == [NO_SLOT] * 3


def test_all_padding_changes_nothing():
    both = Both()
    both.require([3, 1])
    both.require([])
    assert np.asarray(both.maps.host_of).tolist() == [3, 1] + [NO_ROW] * 6


def test_row_zero_and_the_last_row_are_rows():
    """Padding is looked up and scattered through index 0 or past the end; the rows there must not notice."""
    both = Both()
    both.require([0, 39])
    both.require([5])
    both.require([39, NO_ROW, 0])
    assert np.asarray(pool.lookup(both.maps, jnp.array([[0, NO_ROW], [39, 5]], jnp.int32))).tolist() == [
        [0, NO_SLOT],
        [1, 2],
    ]


def test_pool_exactly_full_of_protected_rows():
    both = Both()
    both.require(range(8))
    got = both.require(range(8))
    assert int(got.evicted) == 0 and int(got.fills.count) == 0
    both.require(range(20, 28))  # everyone leaves
    assert np.asarray(both.maps.host_of).tolist() == list(range(20, 28))
    got = both.require([27, 30, 26, 31, 25, 32, 24, 33])  # half of them stay where they are
    assert np.asarray(both.maps.host_of).tolist() == [30, 31, 32, 33, 24, 25, 26, 27]
    assert int(got.evicted) == 4


def test_one_free_slot_beside_victims():
    both = Both()
    both.require([10, 11, 12])
    both.require([13, 14, 15, 16])
    got = both.require([20, 21, 22])  # slot 7 is free; 10 and 11 are the oldest
    assert np.asarray(got.slots)[:3].tolist() == [7, 0, 1] and int(got.evicted) == 2


def test_free_slots_go_in_ascending_order_wherever_they_are():
    both = Both()
    both.require(range(8))
    both.release([6, 1, 4])
    got = both.require([30, 31])
    assert np.asarray(got.slots)[:2].tolist() == [1, 4] and int(got.evicted) == 0
    both.release([30, 31, 6, 20])  # two of them are not resident any more, or never were
    both.require([6])
    assert np.asarray(both.maps.host_of).tolist() == [0, 6, 2, 3, NO_ROW, 5, NO_ROW, 7]


def test_duplicate_missing_rows_take_one_slot_at_their_first_mention():
    both = Both()
    got = both.require([9, 4, 9, 9, 4, 2])
    assert np.asarray(got.slots).tolist() == [0, 1, 0, 0, 1, 2, NO_SLOT, NO_SLOT]
    assert np.asarray(got.fills.mention).tolist() == [0, 1, 5, -1, -1, -1, -1, -1]


def test_duplicates_fill_a_list_longer_than_the_pool():
    """Three seats that share a prefix miss the same rows: the list is longer than the pool, its set is not."""
    both = Both(slots=4, length=12)
    both.require([1, 2, 3, 4])
    got = both.require([5, 6, 7, 8] * 3)
    assert np.asarray(got.slots).tolist() == [0, 1, 2, 3] * 3 and int(got.evicted) == 4
    both.require([8, 5, 8, 5, 9, 9, 8, 9])


def test_the_oldest_row_stays_when_it_is_selected():
    both = Both()
    for row in range(8):
        both.require([row])
    both.require([0, 20])
    assert np.asarray(both.maps.host_of).tolist() == [0, 20, 2, 3, 4, 5, 6, 7]


def test_a_row_evicted_and_selected_again_at_once():
    both = Both(slots=2, length=2)
    both.require([1, 2])
    both.require([3])
    both.require([1])  # left one step ago; takes the slot of 2
    both.require([2, 3])
    assert np.asarray(both.maps.host_of).tolist() == [3, 2]


def test_equal_priorities_fall_to_the_lower_slot():
    both = Both()
    both.require(range(8), when=5)
    got = both.require([30, 31, 32], when=5)
    assert np.asarray(got.slots)[:3].tolist() == [0, 1, 2]


def test_extreme_priorities_are_live_and_ordered():
    both = Both(slots=4, length=4)
    both.require([1], when=HIGHEST)
    both.require([2], when=LOWEST)
    both.require([3], when=0)
    both.require([4, 5], when=7)  # slot 3 is free, then the lowest
    assert np.asarray(both.maps.host_of).tolist() == [1, 5, 3, 4]
    both.require([6, 7, 8], when=8)
    assert np.asarray(both.maps.host_of).tolist() == [1, 7, 6, 8]
    both.require([6, 7, 8, 9], when=9)
    assert np.asarray(both.maps.host_of).tolist() == [9, 7, 6, 8]


def test_a_row_of_the_highest_priority_is_a_victim_before_a_protected_one(implementation):
    """A use counter that had saturated at 2^31 - 1 looked like the mark of a protected slot: the selected row in slot 0
    was thrown out for the newcomer, and both then claimed the slot."""
    allocate = functools.partial(pool.allocate, implementation=implementation)
    maps = pool.initial(HOST_ROWS, 2)
    maps, _ = allocate(maps, jnp.array([3, 4], jnp.int32), jnp.array([5, 2**31 - 1], jnp.int32))
    maps, allocation = allocate(maps, jnp.array([3, 7], jnp.int32), jnp.array([6, 6], jnp.int32))
    assert np.asarray(allocation.slots).tolist() == [0, 1]
    assert np.asarray(maps.host_of).tolist() == [3, 7]


@pytest.mark.parametrize("given, kept", [(FREE_PRIORITY, LOWEST), (LOWEST, LOWEST), (2**31 - 1, HIGHEST)])
def test_a_policy_cannot_write_the_marks_of_free_and_protected_slots(given, kept, implementation):
    allocate = functools.partial(pool.allocate, implementation=implementation)
    maps = pool.initial(HOST_ROWS, SLOTS)
    maps, _ = allocate(maps, jnp.array([3, NO_ROW], jnp.int32), jnp.array([given, 5], jnp.int32))
    assert np.asarray(maps.priority).tolist() == [kept] + [FREE_PRIORITY] * 7
    check_maps(*(np.asarray(array) for array in (maps.slot_of, maps.host_of, maps.priority, maps.free)))


def test_the_highest_of_several_priorities_for_a_slot_wins_also_below_its_old_one(implementation):
    allocate = functools.partial(pool.allocate, implementation=implementation)
    maps = pool.initial(HOST_ROWS, SLOTS)
    maps, _ = allocate(maps, jnp.array([3, 4], jnp.int32), jnp.array([90, 91], jnp.int32))
    maps, _ = allocate(maps, jnp.array([3, NO_ROW, 3], jnp.int32), jnp.array([-7, 99, -5], jnp.int32))
    assert np.asarray(maps.priority)[:3].tolist() == [-5, 91, FREE_PRIORITY]


def test_releasing_everything_gives_an_empty_pool():
    both = Both()
    both.require(range(8))
    both.release(list(range(HOST_ROWS)))
    empty = pool.initial(HOST_ROWS, SLOTS)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), both.maps, empty))


@pytest.mark.parametrize("slots, length", [(8, 8), (12, 20), (39, 30)], ids=["barely_legal", "tight", "ample"])
def test_a_random_history(slots, length):
    """Lists with duplicates and padding anywhere, steps that run backwards for some time, rows released in between."""
    random = np.random.default_rng(slots)
    both = Both(slots, length)
    for number in range(120):
        if random.random() < 0.2:
            both.release(random.choice(HOST_ROWS, random.integers(0, 12), replace=False).tolist())
            continue
        unique = random.choice(HOST_ROWS, random.integers(0, min(slots, HOST_ROWS) + 1), replace=False)
        rows = np.full(length, NO_ROW, np.int64)
        if len(unique):
            rows = np.where(random.random(length) < 0.9, random.choice(unique, length), NO_ROW)
        both.require(rows.tolist(), when=int(random.integers(-5, 5)) + number // 10)


def test_the_maps_may_be_updated_in_place(implementation):
    """Nothing but the state is as long as the pool or the host rows: the donated maps are the updated ones."""
    maps = jax.tree.map(lambda x: jnp.array(x, copy=True), pool.initial(64 * 1024, 4096))
    donated = functools.partial(jax.jit, donate_argnums=0)(
        lambda maps, rows: pool.allocate(maps, rows, rows, implementation=implementation)[0]
    )
    memory = donated.lower(maps, jnp.zeros(64, jnp.int32)).compile().memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes == 4 * 64 * 1024 + 9 * 4096
