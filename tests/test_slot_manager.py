"""The slot manager of the shared library against its jnp form, bit for bit, over random histories.

What the jnp form itself must do is test_pool.py's business, against loops; whole histories of requests are
test_pool_machine.py's. Here both forms get the same maps and the same lists: duplicates, padding, new rows with and
without a slot, staged rows once, twice and in vain, priorities of every size. On a GPU, by hand:

    JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/test_slot_manager.py
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from echo_jax import _ffi, pool
from echo_jax.types import NO_ROW, SlotMaps
from tests.oracles.pool import check_maps

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


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


CASES = [
    Case("one_slot", 3, 1, 1, 4, fresh=0.5),
    Case("exactly_full", 300, 24, 2, 20, 2, staged=16),
    Case("duplicates", 200, 16, 4, 60, 1, staged=30, different=12),
    Case("seldom_missing", 500, 60, 3, 40, 1, fresh=0.02, steps=40, releases=0.0),
    Case("everything_missing", 4000, 700, 2, 300, 1, staged=200, fresh=1.0, steps=12),
    Case("one_priority", 3000, 500, 2, 100, 2, staged=64, priorities="one"),
    Case("any_priority", 3000, 500, 2, 100, 2, staged=64, priorities="any"),
    Case("few_of_many", 9000, 5000, 4, 33, 1, staged=40, fresh=0.2, releases=0.1, warm=0.99),
    Case("crowded_bins", 9000, 5000, 8, 128, 0, fresh=0.7, priorities="any", steps=10, warm=0.9),
]


def draw_maps(random, case) -> SlotMaps:
    """Maps at the start: some rows in some slots, used at steps long past."""
    maps = jax.tree.map(np.array, pool.initial(case.host_rows, case.slots))
    slots = random.permutation(case.slots)[: int(case.warm * case.slots)]
    rows = random.permutation(case.host_rows)[: len(slots)]
    maps.slot_of[rows], maps.host_of[slots], maps.free[slots] = slots, rows, False
    maps.priority[slots] = -random.integers(1, 9000, len(slots))
    return maps


def draw_rows(random, case, maps) -> np.ndarray:
    """i32[M]: at most `different` rows, some resident and some not, with duplicates and padding anywhere."""
    length = case.seats * case.per_seat
    most = min(case.different or case.slots, case.slots, case.host_rows)
    count = most if random.random() < 0.3 else int(random.integers(0, most + 1))
    if count == 0:
        return np.full(length, NO_ROW, np.int32)
    chosen = random.permutation(case.host_rows)[:count]
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


def both_forms(function, platform):
    """arguments -> function's results by jnp on the CPU, and by the library on the platform."""
    reason = _ffi.why_unavailable(platform)
    assert reason is None, reason
    device, cpu = jax.devices(platform)[0], jax.devices("cpu")[0]
    specified, library = (jax.jit(functools.partial(function, implementation=name)) for name in ("jnp", "ffi"))

    def run(*arguments):
        expected = specified(*jax.device_put(arguments, cpu))
        return jax.device_get(expected), jax.device_get(library(*jax.device_put(arguments, device)))

    return run


def assert_equal(got, expected):
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_random_history(case, platform):
    random = np.random.default_rng(len(case.name))
    maps = draw_maps(random, case)
    lists = {"per_seat": case.per_seat, "new_per_seat": case.new_per_seat}
    allocate = both_forms(functools.partial(pool.allocate, **lists), platform)
    release = both_forms(pool.release, platform)
    totals = dict.fromkeys(("hits", "useful", "recalled", "written", "evicted"), 0)
    for step in range(case.steps):
        rows = draw_rows(random, case, maps)
        priority = draw_priorities(random, case, step, len(rows))
        expected, got = allocate(maps, rows, priority, draw_staged(random, case, rows))
        assert_equal(got, expected)
        maps, allocation = got
        check_maps(maps.slot_of, maps.host_of, maps.priority, maps.free)
        totals = {name: total + int(getattr(allocation, name)) for name, total in totals.items()}
        if random.random() < case.releases:
            expected, maps = release(maps, random.random(case.host_rows) < random.choice([0.02, 0.5]))
            assert_equal(maps, expected)
    # The history was worth having.
    assert totals["hits"] > 0 and totals["recalled"] > 0 and totals["evicted"] > 0
    assert (totals["useful"] > 0) == (case.staged > 0) and (totals["written"] > 0) == (case.new_per_seat > 0)
