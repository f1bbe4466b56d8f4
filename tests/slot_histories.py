"""Random histories for the slot manager: maps at the start, lists, priorities, staged rows and releases, drawn.

Shared by the tests of every implementation and by the bench on a GPU. Knows NumPy and the words of the maps; calls no
implementation.
"""

import dataclasses

import numpy as np

from echo_jax.types import FREE_PRIORITY, NO_ROW, NO_SLOT, SlotMaps


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool, the shape of its lists, and how they are drawn."""

    name: str
    host_rows: int
    slots: int
    seats: int
    per_seat: int
    new_per_seat: int = 0
    staged: int = 0
    different: int | None = None  # most different rows of a list; the pool's slots by default
    fresh: float = (
        0.3  # share of a list's rows drawn from all host rows; the rest are resident ones where there are any
    )
    priorities: str = "steps"
    steps: int = 25
    releases: float = 0.2  # rows lose their slots after so many of the steps
    warm: float = 0.0  # share of the slots that are in use at the start
    ages: int = 9000  # used so many steps ago at most


CASES = [
    Case("one_slot", 3, 1, 1, 4, fresh=0.5),
    Case("exactly_full", 300, 24, 2, 20, 2, staged=16),
    Case("duplicates", 200, 16, 4, 60, 1, staged=30, different=12),
    Case("seldom_missing", 500, 60, 3, 40, 1, fresh=0.02, steps=40, releases=0.0),
    Case("everything_missing", 4000, 700, 2, 300, 1, staged=200, fresh=1.0, steps=12),
    Case("one_priority", 3000, 500, 2, 100, 2, staged=64, priorities="one", warm=0.9),
    Case("any_priority", 3000, 500, 2, 100, 2, staged=64, priorities="any", warm=0.9),
    Case("few_of_many", 9000, 5000, 4, 33, 1, staged=40, fresh=0.2, releases=0.1, warm=0.99),
    # Most of the lowest slots are selected: a sample of all slots misleads.
    Case("mostly_selected", 9000, 5000, 4, 1100, 1, fresh=0.06, releases=0.0, steps=5, warm=1.0, different=4900),
    Case("more_than_a_guess", 9000, 5000, 2, 900, 2, staged=64, fresh=0.9, releases=0.0, steps=5, warm=0.9),
    Case("crowded_bins", 9000, 5000, 8, 128, 0, fresh=0.7, priorities="any", steps=10, warm=0.9),
]


def draw_maps(random, case) -> SlotMaps:
    """Maps at the start: some rows in some slots, used at steps long past."""
    slot_of, host_of = np.full(case.host_rows, NO_SLOT, np.int32), np.full(case.slots, NO_ROW, np.int32)
    priority, free = np.full(case.slots, FREE_PRIORITY, np.int32), np.ones(case.slots, bool)
    slots = random.permutation(case.slots)[: int(case.warm * case.slots)]
    rows = random.choice(case.host_rows, len(slots), replace=False)
    slot_of[rows], host_of[slots], free[slots] = slots, rows, False
    priority[slots] = -random.integers(1, case.ages + 1, len(slots))
    return SlotMaps(slot_of=slot_of, host_of=host_of, priority=priority, free=free)  # pyright: ignore[reportArgumentType]


def draw_rows(random, case, maps) -> np.ndarray:
    """i32[M]: at most `different` rows, some resident and some not, with duplicates and padding anywhere."""
    length = case.seats * case.per_seat
    most = min(case.different or case.slots, case.slots, case.host_rows)
    count = most if random.random() < 0.3 else int(random.integers(0, most + 1))
    if count == 0:
        return np.full(length, NO_ROW, np.int32)
    chosen = random.choice(case.host_rows, count, replace=False)
    resident = np.flatnonzero(maps.slot_of >= 0)
    if len(resident):
        chosen = np.where(random.random(count) < case.fresh, chosen, np.resize(random.permutation(resident), count))
    rows = np.resize(np.concatenate([chosen, random.choice(chosen, length)]), length)
    return random.permutation(np.where(random.random(length) < 0.1, NO_ROW, rows)).astype(np.int32)


def draw_priorities(random, case, step, length) -> np.ndarray:
    if case.priorities == "one":
        return np.full(length, 7, np.int32)
    if case.priorities == "steps":
        return np.maximum(step - random.integers(0, 3, length), 0).astype(np.int32)
    ends = random.choice([-(2**31), -(2**31) + 1, 0, 2**31 - 2, 2**31 - 1], length)
    return np.where(random.random(length) < 0.1, ends, random.integers(-(2**31), 2**31, length)).astype(np.int32)


def draw_staged(random, case, rows) -> np.ndarray:
    """i32[E]: rows of the list, rows of no list, padding, some twice."""
    anywhere = random.integers(0, case.host_rows, case.staged)
    staged = np.where(random.random(case.staged) < 0.5, random.choice(rows, case.staged), anywhere)
    return np.where(random.random(case.staged) < 0.2, NO_ROW, staged).astype(np.int32)
