"""The cache's memory is given back on demand, also after an error, and a process that keeps a cache ends well."""

import subprocess
import sys

import jax
import pytest

from echo_jax import decode
from echo_jax import state as state_lib
from tests import scenarios
from tests.limits import HANG_S
from tests.test_lossless import PLAIN

CONFIG = scenarios.cache(PLAIN, offload=True, model=scenarios.ONE_LAYER)


def is_gone(state) -> bool:
    return all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_destroying_gives_everything_back_and_may_be_repeated():
    state = state_lib.create(CONFIG.cache)
    state_lib.destroy(state)
    assert is_gone(state)
    state_lib.destroy(state)


def test_a_cache_for_the_length_of_a_block():
    """The state that was put in last is the one that is given back; the first was donated to the step."""
    params = scenarios.parameters(scenarios.ONE_LAYER)
    with pytest.raises(RuntimeError, match="in between"), state_lib.opened(CONFIG.cache) as held:
        held[0] = state_lib.admit(CONFIG.cache, held[0], 0, 64)
        held[0], output = decode.decode_step(params, held[0], jax.numpy.zeros((3, 1), "int32"), config=CONFIG)
        assert not is_gone(held[0])
        raise RuntimeError("in between")
    assert is_gone(held[0])
    assert output.logits.shape == (3, 1, scenarios.VOCAB), "what a step returned is not part of the cache"


def test_a_process_that_never_closes_ends_well(tmp_path):
    """Leaving Python with pools alive must not crash in the library or in XLA."""
    script = """
import jax
from tests import scenarios
from tests.test_lossless import PLAIN
from echo_jax import hostmem, state
config = scenarios.cache(PLAIN | {"memory": "auto"}, offload=True, model=scenarios.ONE_LAYER)
kept = state.create(config.cache)
print(hostmem.memory_of(kept.host_pool).value)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] in ("pinned", "ordinary") and not done.stderr
