"""The slot manager of the shared library against its jnp form, bit for bit, over random histories.

What the jnp form itself must do is test_pool.py's business, against loops; whole histories of requests are
test_pool_machine.py's. Here both forms get the same maps and the same lists: duplicates, padding, new rows with and
without a slot, staged rows once, twice and in vain, priorities of every size. On a GPU, by hand:

    JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/test_slot_manager.py
"""

import functools

import jax
import numpy as np
import pytest

from echo_jax import _ffi, pool
from tests.oracles.pool import check_maps
from tests.slot_histories import CASES, draw_maps, draw_priorities, draw_rows, draw_staged

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


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
