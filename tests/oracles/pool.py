"""Oracle of the slot manager: which host row sits in which slot of one layer's device pool.

Knows rows, slots and priorities, in dicts. Knows nothing of pages, bytes or policies: what a used slot's
priority becomes is the caller's `touch`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.oracles.words import FREE_PRIORITY, NO_ROW, NO_SLOT

Touch = Callable[[int, bool, int, float], int]
"""(old priority, just filled, step, best score) -> new priority. The old priority of a slot that was just
filled is FREE_PRIORITY, whether it was free before or a victim's."""


class Required(NamedTuple):
    """What one `require` did."""

    slots: list[list[int]]  # per seat, the slot of each entry of its selected list, NO_SLOT at padding
    placed: list[tuple[int, int]]  # (row, slot) of every row that got a slot, new rows included, in order
    evicted: list[tuple[int, int]]  # (row, slot) of every victim, in order
    hits: int  # unique selected rows that were resident before; this step's new rows are not counted
    missing: int  # unique selected rows that were not; this step's new rows are not counted


class OraclePool:
    """The maps of one layer: `slots` device slots over `host_rows` host rows."""

    def __init__(self, host_rows: int, slots: int):
        self.host_rows = host_rows
        self.slots = slots
        self.slot_of: dict[int, int] = {}
        self.host_of: dict[int, int] = {}
        self.priority: dict[int, int] = {}  # of live slots only

    def require(
        self,
        seat_lists: Sequence[Sequence[int]],
        new_rows: Sequence[Sequence[int]],
        step: int,
        touch: Touch,
        scores: Sequence[Sequence[float]] | None = None,
    ) -> Required:
        """Make every selected row and every new row resident; evict exactly the shortage.

        seat_lists: per seat, its T x K selected host rows in order, NO_ROW where padded
        new_rows: per seat, the T host rows this step writes, NO_ROW where padded
        scores: per seat, the index score of each entry of its list; without them every selected row scores 0

        A seat's list is its new rows, then its selected rows. All of them, of all seats, are protected. Those
        that are missing, each once, in order of first occurrence, take the free slots in ascending order,
        then the slots of the unprotected rows in ascending order of (priority, slot). Afterwards every
        protected row's slot is touched once, with the best score of its occurrences (-inf for a new row
        nobody selected).
        """
        if len(seat_lists) != len(new_rows):
            raise ValueError(
                f"{len(seat_lists)} selected lists but {len(new_rows)} lists of new rows; give one per seat"
            )
        fresh = {row for rows in new_rows for row in rows if row != NO_ROW}
        best = _best_scores(seat_lists, scores)

        order: list[int] = []  # every protected row once, by first occurrence
        protected: set[int] = set()
        for new, selected in zip(new_rows, seat_lists, strict=True):
            for row in [*new, *selected]:
                if row == NO_ROW or row in protected:
                    continue
                if not 0 <= row < self.host_rows:
                    raise ValueError(f"host row {row} lies outside 0..{self.host_rows - 1}")
                order.append(row)
                protected.add(row)
        if len(order) > self.slots:
            raise ValueError(f"the pool holds {self.slots} rows but the step needs {len(order)}; raise the slots")

        missing = [row for row in order if row not in self.slot_of]
        hits = [row for row in order if row in self.slot_of and row not in fresh]
        free = [slot for slot in range(self.slots) if slot not in self.host_of]
        shortage = max(0, len(missing) - len(free))
        unprotected = [slot for slot in sorted(self.host_of) if self.host_of[slot] not in protected]
        victims = sorted(unprotected, key=lambda slot: (self.priority[slot], slot))[:shortage]
        assert len(victims) == shortage

        evicted = [(self.host_of[slot], slot) for slot in victims]
        self.release([row for row, _ in evicted])
        placed = list(zip(missing, free + victims, strict=False))
        filled = {row for row, _ in placed}
        assert len(placed) == len(missing)
        for row, slot in placed:
            self.slot_of[row] = slot
            self.host_of[slot] = row
            self.priority[slot] = FREE_PRIORITY
        for row in order:
            slot = self.slot_of[row]
            priority = int(touch(self.priority[slot], row in filled, step, best.get(row, -math.inf)))
            if not FREE_PRIORITY < priority < 2**31:
                raise ValueError(f"touch returned {priority} for slot {slot}; a live priority is above {FREE_PRIORITY}")
            self.priority[slot] = priority

        slots = [[NO_SLOT if row == NO_ROW else self.slot_of[row] for row in selected] for selected in seat_lists]
        return Required(slots, placed, evicted, len(hits), len([row for row in missing if row not in fresh]))

    def release(self, rows: Sequence[int]) -> None:
        """The rows lose their slots; a row without a slot is left alone."""
        for row in rows:
            if row in self.slot_of:
                slot = self.slot_of.pop(row)
                del self.host_of[slot]
                del self.priority[slot]

    def rebase(self, rebase: Callable[[int, int], int], shift: int) -> None:
        """Every live priority becomes rebase(priority, shift)."""
        for slot in self.priority:
            self.priority[slot] = int(rebase(self.priority[slot], shift))

    def maps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """slot_of i32[N_H], host_of i32[N_G], priority i32[N_G], free bool[N_G]."""
        slot_of = np.full(self.host_rows, NO_SLOT, np.int32)
        host_of = np.full(self.slots, NO_ROW, np.int32)
        priority = np.full(self.slots, FREE_PRIORITY, np.int32)
        free = np.ones(self.slots, bool)
        for row, slot in self.slot_of.items():
            slot_of[row] = slot
        for slot, row in self.host_of.items():
            host_of[slot] = row
            priority[slot] = self.priority[slot]
            free[slot] = False
        return slot_of, host_of, priority, free

    def check(self) -> None:
        """Assert `check_maps` on the arrays, and that the dicts agree with them."""
        check_maps(*self.maps())
        assert set(self.priority) == set(self.host_of)
        assert {slot: row for row, slot in self.slot_of.items()} == self.host_of


def check_maps(slot_of: np.ndarray, host_of: np.ndarray, priority: np.ndarray, free: np.ndarray) -> None:
    """Assert of anybody's maps: three ways to say that a slot is free agree; the maps are inverse."""
    live = 0
    for slot in range(len(host_of)):
        row = int(host_of[slot])
        says_free = (bool(free[slot]), row == NO_ROW, int(priority[slot]) == FREE_PRIORITY)
        assert len(set(says_free)) == 1, f"slot {slot}: free, host_of, priority say {says_free}"
        if row != NO_ROW:
            live += 1
            assert slot_of[row] == slot, f"slot {slot} holds row {row}, whose slot is {slot_of[row]}"
    for row in range(len(slot_of)):
        slot = int(slot_of[row])
        if slot != NO_SLOT:
            assert host_of[slot] == row, f"row {row} is in slot {slot}, which holds row {host_of[slot]}"
    assert int(free.sum()) + live == len(host_of)


def _best_scores(seat_lists, scores) -> dict[int, float]:
    """The best score of each selected row; a NaN is worse than any number."""
    best: dict[int, float] = {}
    for seat, selected in enumerate(seat_lists):
        for place, row in enumerate(selected):
            score = 0.0 if scores is None else float(scores[seat][place])
            if row not in best or math.isnan(best[row]) or score > best[row]:
                best[row] = score
    return best
