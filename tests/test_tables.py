"""The page tables against loops: who owns which rows, and which rows lose their slots. Integers only.

Slots, bytes and the state they live in come on top of this in test_pool_machine.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import tables
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.threshold import Never
from tests.oracles.tables import OracleTables
from tests.oracles.words import NO_PAGE, NO_ROW, PAGE

SEATS, CAPACITY, PAGES = 3, 256, 8
CONFIG = CacheConfig(
    layer_kinds=("full",),
    records=RecordFormat("f32", 4, 2),
    keys=KeyFormat("f32", 4),
    threshold=Never(),
    eviction=Lru(),
    seats=SEATS,
    capacity=CAPACITY,
    host_rows=PAGES * PAGE,
    device_slots=32,
    top_k=4,
)

admit, release, rollback, new_rows = (
    jax.jit(tables.admit), jax.jit(tables.release), jax.jit(tables.rollback), jax.jit(tables.new_rows, static_argnums=1)
)  # fmt: skip


class Both:
    """The library and the oracle, driven together; a difference fails at once. An operation that both refuse raises."""

    def __init__(self):
        self.ours = tables.initial(CONFIG)
        self.oracle = OracleTables(SEATS, CAPACITY, PAGES)
        self.agree()

    def admit(self, seat, positions, shared=()):
        def check():
            tables.check_seat(self.ours, seat, must_be_active=False)
            needed = tables.pages_for(self.ours, positions)
            tables.check_shared_pages(self.ours, np.asarray(shared, np.int32), needed)
            tables.check_free_pages(self.ours, needed - len(shared))

        self._both_or_neither(check, lambda: self.oracle.admit(seat, positions, shared))
        padded = np.full(CAPACITY // PAGE, NO_PAGE, np.int32)
        padded[: len(shared)] = shared
        needed, count = np.int32(-(-positions // PAGE)), np.int32(len(shared))
        self.ours = admit(self.ours, np.int32(seat), needed, padded, count, count * np.int32(PAGE))
        self.agree()

    def fork(self, parent, child, positions):
        length = int(self.oracle.lengths[parent])

        def check():
            tables.check_seat(self.ours, parent, must_be_active=True)
            tables.check_seat(self.ours, child, must_be_active=False)
            if positions < length:
                raise ValueError("the state refuses this, before it asks the tables")
            tables.check_free_pages(self.ours, tables.pages_for(self.ours, positions) - length // PAGE)

        self._both_or_neither(check, lambda: self.oracle.fork(parent, child, positions))
        full, needed = np.int32(length // PAGE), np.int32(-(-positions // PAGE))
        table = self.ours.page_table[parent]
        self.ours = admit(self.ours, np.int32(child), needed, table, full, np.int32(length))
        self.agree()

    def append(self, count):
        """Every seat writes up to `count` positions, as many as it has room for."""
        positions, rows = new_rows(self.ours, count)
        for seat in range(SEATS):
            length, room = int(self.oracle.lengths[seat]), len(self.oracle.pages_of(seat)) * PAGE
            fits = min(count, room - length)
            expected = self.oracle.append(seat, fits) if fits else []
            assert np.asarray(positions[seat]).tolist() == list(range(length, length + count))
            assert np.asarray(rows[seat]).tolist() == expected + [NO_ROW] * (count - fits)
        self.ours = self.ours.replace(lengths=self.ours.lengths + jnp.sum(rows != NO_ROW, axis=1, dtype=jnp.int32))
        self.agree()

    def release(self, seat, keep_pages=False):
        dropped = []

        def on_oracle():
            dropped.extend(self.oracle.release(seat, keep_pages))

        self._both_or_neither(lambda: tables.check_seat(self.ours, seat, must_be_active=True), on_oracle)
        self.ours, is_dropped = release(self.ours, np.int32(seat), np.bool_(keep_pages))
        assert np.flatnonzero(is_dropped).tolist() == dropped
        self.agree()
        return dropped

    def rollback(self, lengths):
        lengths, dropped = np.asarray(lengths, np.int32), []

        def on_oracle():
            before = self.oracle.lengths.copy()
            try:
                for seat in np.flatnonzero(lengths != before):
                    dropped.extend(self.oracle.rollback(int(seat), int(lengths[seat])))
            except ValueError:
                self.oracle.lengths[:] = before  # all seats or none
                raise

        self._both_or_neither(lambda: tables.check_rollback(self.ours, lengths), on_oracle)
        self.ours, is_dropped = rollback(self.ours, lengths)
        assert np.flatnonzero(is_dropped).tolist() == sorted(dropped)
        self.agree()

    def uncache(self, pages):
        self.oracle.uncache(pages)
        is_chosen = np.isin(np.arange(PAGES), pages)
        self.ours = tables.uncache(self.ours, jnp.asarray(is_chosen))
        self.agree()

    def agree(self):
        for name in ("page_table", "page_count", "page_cached", "lengths", "active"):
            got, expected = np.asarray(getattr(self.ours, name)), getattr(self.oracle, name)
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected, err_msg=name)
        self.oracle.check()
        assert np.flatnonzero(tables.free_pages(self.ours)).tolist() == self.oracle.free_pages()
        rows = np.asarray(tables.rows_of_positions(self.ours))
        for seat in range(SEATS):
            reserved = len(self.oracle.pages_of(seat)) * PAGE
            expected = [self.oracle.row_of(seat, position) for position in range(reserved)]
            assert rows[seat].tolist() == expected + [NO_ROW] * (CAPACITY - reserved)

    def _both_or_neither(self, ours, oracle):
        refusals = []
        for act in (ours, oracle):
            try:
                act()
                refusals.append(None)
            except ValueError as refusal:
                refusals.append(refusal)
        assert (refusals[0] is None) == (refusals[1] is None), refusals
        if refusals[0] is not None:
            self.agree()
            raise refusals[0]


def test_no_request_at_all():
    both = Both()
    both.append(2)
    assert int(tables.free_pages(both.ours).sum()) == PAGES


def test_a_page_boundary_is_crossed():
    both = Both()
    both.admit(1, 70)
    for _ in range(33):
        both.append(2)
    assert int(both.ours.lengths[1]) == 66


def test_seat_full_writes_nothing_more():
    """Past its reserved pages a seat has no row for a token, and half of a pair may still fit."""
    both = Both()
    both.admit(0, CAPACITY)
    both.admit(2, 60)
    both.append(CAPACITY - 1)
    both.append(2)
    both.append(2)
    assert np.asarray(both.ours.lengths).tolist() == [CAPACITY, 0, 64]


def test_host_pool_exactly_full_and_one_page_short():
    both = Both()
    both.admit(0, 256)
    both.admit(1, 192)
    both.admit(2, 64)
    assert both.oracle.free_pages() == []
    both.release(1)
    with pytest.raises(ValueError, match="has 3 free pages but the request needs 4 of 64 rows; release"):
        both.admit(1, 193)
    both.admit(1, 192)


def test_pages_kept_for_reuse_are_not_free_until_they_are_dropped():
    both = Both()
    both.admit(0, 256)
    both.append(130)
    assert both.release(0, keep_pages=True) == list(range(256))
    assert np.flatnonzero(both.ours.page_cached).tolist() == [0, 1]  # page 2 holds two rows
    both.admit(1, 256)
    assert np.asarray(both.ours.page_table[1]).tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"has 2 free pages but the request needs 3 .* drop cached pages \(2 now\)"):
        both.admit(0, 192)
    both.uncache([0])
    both.admit(0, 192)
    assert np.asarray(both.ours.page_table[0]).tolist() == [0, 6, 7, NO_PAGE]


def test_admission_with_cached_pages_shared_out_of_order():
    both = Both()
    both.admit(0, 200)
    both.append(192)
    both.release(0, keep_pages=True)
    both.admit(1, 150, shared=[2, 0])  # an equal prefix need not lie in ascending pages
    assert np.asarray(both.ours.page_table[1]).tolist() == [2, 0, 3, NO_PAGE]
    assert np.flatnonzero(both.ours.page_cached).tolist() == [1]
    assert int(both.ours.lengths[1]) == 128
    both.append(1)
    assert both.release(1) == sorted([*range(0, 64), *range(128, 192), *range(192, 256)])


def test_fork_shares_full_pages_and_release_frees_with_the_last_sharer():
    both = Both()
    both.admit(0, 130)
    both.append(100)
    both.fork(0, 1, 130)
    both.fork(1, 2, 100)
    assert np.asarray(both.ours.page_count).tolist()[:1] == [3]
    both.append(2)
    assert both.release(0) == [*range(64, 192)]
    assert both.release(1, keep_pages=True) == sorted(rows_in([3, 4]))
    assert both.release(2, keep_pages=True) == sorted(rows_in([0, 5]))
    assert np.flatnonzero(both.ours.page_cached).tolist() == [0]


def rows_in(pages):
    return [page * PAGE + offset for page in pages for offset in range(PAGE)]


@pytest.mark.parametrize("length", [0, 63, 64, 65, 256], ids=lambda length: f"length_{length}")
def test_fork_at_every_edge_of_a_page(length):
    both = Both()
    both.admit(0, 256)
    if length:
        both.append(length)
    both.fork(0, 2, 256)
    assert int(both.ours.lengths[2]) == length
    both.append(1)


def test_rollback_stops_before_a_shared_page_and_goes_to_zero_otherwise():
    both = Both()
    both.admit(0, 200)
    both.append(130)
    both.fork(0, 1, 200)
    both.append(2)
    both.rollback([128, 131, 0])
    with pytest.raises(ValueError, match="page 1 there is shared with another request; fork again"):
        both.rollback([127, 131, 0])
    with pytest.raises(ValueError, match="page 1 there is shared"):
        both.rollback([128, 64, 0])
    both.release(1)
    both.rollback([0, 0, 0])
    both.append(2)


def test_rollback_never_lengthens_whatever_it_is_given():
    """The traced function trusts nobody here: a length beyond what was written would make unwritten rows visible."""
    both = Both()
    both.admit(0, 200)
    both.append(10)
    after, dropped = rollback(both.ours, np.array([11, 5, -3], np.int32))
    assert np.asarray(after.lengths).tolist() == [10, 0, 0] and not np.any(dropped)


REFUSED = {
    "seat_taken": (lambda both: both.admit(0, 64), "seat 0 holds a request; release it first"),
    "no_such_seat": (lambda both: tables.check_seat(both.ours, 3, False), r"seat 3 does not exist; .* seats 0\.\.2"),
    "negative_seat": (lambda both: tables.check_seat(both.ours, -1, False), "seat -1 does not exist"),
    "longer_than_a_seat": (lambda both: both.admit(1, 257), "request of 257 positions .* capacity of 256; shorten"),
    "no_positions": (lambda both: both.admit(1, 0), "request of 0 positions does not fit"),
    "too_few_pages": (lambda both: both.fork(0, 1, 256) or both.admit(2, 256), "has 2 free pages but .* needs 4"),
    "all_pages_shared": (lambda both: both.admit(1, 64, [0]), "1 shared pages leave none .*; share one less"),
    "shares_a_page_twice": (lambda both: both.admit(1, 256, [0, 0]), "name a page twice"),
    "shares_a_free_page": (lambda both: both.admit(1, 100, [7]), "page 7 holds no rows to share"),
    "shares_no_page": (
        lambda both: tables.check_shared_pages(both.ours, np.array([8], np.int32), 2),
        "page 8 holds no rows",
    ),
    "shares_a_half_full_page": (
        lambda both: both.admit(1, 190, [0, 1]),
        "page 1 of seat 0 holds 36 of 64 rows, but only full pages are shared; share fewer, or fork",
    ),
    "shares_an_unwritten_page": (lambda both: both.admit(1, 190, [2]), "page 2 of seat 0 holds 0 of 64 rows"),
    "fork_of_nothing": (lambda both: both.fork(1, 2, 64), "seat 1 holds no request; admit one first"),
    "release_of_nothing": (lambda both: both.release(2), "seat 2 holds no request; admit one first"),
    "rollback_lengthens": (lambda both: both.rollback([101, 0, 0]), "holds 100 positions .* rolled back to 101"),
    "rollback_below_zero": (lambda both: both.rollback([-1, 0, 0]), "cannot be rolled back to -1"),
    "rollback_of_half_the_seats": (
        lambda both: tables.check_rollback(both.ours, np.array([100])),
        "lengths for 3 seats; give one per seat",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """Both refuse, or both accept (`_both_or_neither`); a refusal leaves the tables as they are."""
    both = Both()
    both.admit(0, 150)
    both.append(100)
    act, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        act(both)
    both.agree()


def test_a_random_history():
    """Whatever is asked, sensible or not, both do the same or refuse together."""
    random = np.random.default_rng(7)
    both = Both()
    done = refused = 0
    for _ in range(400):
        seat, other = (int(x) for x in random.integers(0, SEATS, 2))
        positions = int(random.integers(1, CAPACITY + 20))
        wanted = random.integers(0, 8)
        try:
            if wanted <= 1:
                shared = random.integers(0, PAGES, random.integers(0, 3)) if random.random() < 0.5 else []
                both.admit(seat, positions, [int(page) for page in shared])
            elif wanted == 2:
                both.fork(seat, other, positions)
            elif wanted <= 4:
                both.append(int(random.choice([1, 2, 60])))
            elif wanted == 5:
                both.release(seat, keep_pages=bool(random.random() < 0.6))
            elif wanted == 6:
                drop = random.integers(0, 70, SEATS) * (random.random(SEATS) < 0.5)
                both.rollback(both.oracle.lengths - drop)
            else:
                cached = np.flatnonzero(both.oracle.page_cached)
                both.uncache([int(page) for page in cached[: random.integers(0, 2)]])
            done += 1
        except ValueError:
            refused += 1
    assert done > 100 and refused > 50
