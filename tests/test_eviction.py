"""Eviction policies: the priority of a slot after a use, and after the clock is set back."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.eviction import HIGHEST, LOWEST, POLICIES, REBASE_AT, Clock, Lfu, Lru, ScoreWeighted
from echo_jax.types import EvictionPolicy
from tests.oracles.words import FREE_PRIORITY

NAN, INF = float("nan"), float("inf")


def touched(policy, priority, was_free, step, score):
    """The policy applied to lists, as the library does: elementwise, i32."""
    given = jnp.asarray(priority, jnp.int32), jnp.asarray(was_free), jnp.int32(step), jnp.asarray(score, jnp.float32)
    result = policy.touch(*given)
    assert result.dtype == jnp.int32
    return np.broadcast_to(result, len(priority)).tolist()


def rebased(policy, priority, shift=REBASE_AT):
    result = policy.rebase(jnp.asarray(priority, jnp.int32), jnp.int32(shift))
    assert result.dtype == jnp.int32
    return np.asarray(result).tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_a_policy_and_hashable(name):
    policy = POLICIES[name]()
    assert isinstance(policy, EvictionPolicy)
    assert hash(policy) == hash(POLICIES[name]())


def test_lru_is_the_step_of_last_use():
    assert touched(Lru(), [3, FREE_PRIORITY, 99], [False, True, False], 42, [0.5, -INF, NAN]) == [42, 42, 42]


def test_lfu_counts_uses_since_the_row_came_in_and_stops_at_the_top():
    given = [1, FREE_PRIORITY, 41, HIGHEST - 1, HIGHEST]
    assert touched(Lfu(), given, [False, True, False, False, False], 7, [0.0] * 5) == [2, 1, 42, HIGHEST, HIGHEST]


def test_score_weighted_adds_a_bonus_for_the_score():
    # sigmoid: 0.5 at 0, 0 and 1 at the infinities, 0.88 at 2. A NaN and a new row that nobody chose get none.
    scores = [0.0, -INF, INF, NAN, 2.0]
    assert touched(ScoreWeighted(16), [5] * 5, [False] * 5, 100, scores) == [108, 100, 116, 100, 114]
    assert touched(ScoreWeighted(0), [5] * 5, [False] * 5, 100, scores) == [100] * 5


def test_score_weighted_never_prefers_the_lower_score():
    scores = np.sort(np.random.default_rng(1).normal(size=200) * 5)
    given = touched(ScoreWeighted(), [0] * 200, [False] * 200, 0, scores)
    assert given == sorted(given) and len(set(given)) == 17


def test_clock_is_the_turn_of_the_hand():
    for step in (0, 15, 16, 17, 33):
        assert touched(Clock(16), [99, FREE_PRIORITY], [False, True], step, [0.0, 0.0]) == [step // 16] * 2


@pytest.mark.parametrize("policy", [Lru(), ScoreWeighted()], ids=["lru", "score"])
def test_setting_the_clock_back_lowers_times_alike(policy):
    assert rebased(policy, [REBASE_AT - 1, REBASE_AT + 16, 0, -5]) == [-1, 16, -REBASE_AT, -REBASE_AT - 5]
    # A row untouched for three settings of the clock is the oldest there is, and does not come round as the newest.
    assert rebased(policy, [-REBASE_AT, -REBASE_AT - 1, LOWEST, LOWEST + 1]) == [LOWEST] * 4


def test_setting_the_clock_back_leaves_counts_and_lowers_turns():
    assert rebased(Lfu(), [1, 77, HIGHEST]) == [1, 77, HIGHEST]
    assert rebased(Clock(16), [REBASE_AT // 16 - 1, REBASE_AT // 16, 3]) == [-1, 0, 3 - REBASE_AT // 16]


@pytest.mark.parametrize("policy", [Lru(), ScoreWeighted(3), Clock(16), Clock(7), Clock(1)], ids=str)
def test_the_order_of_uses_survives_the_setting_back(policy):
    """Uses before it and after it compare as they would have with a clock that never stops, periods that do not divide
    2^30 included; equal is allowed where the clock is coarse."""
    before = [REBASE_AT - 40 + i for i in range(40)]
    early = [touched(policy, [0], [False], step, [0.0])[0] for step in before]
    early = rebased(policy, early)
    late = [touched(policy, [0], [False], step, [0.0])[0] for step in range(40)]
    for a, b in itertools.pairwise(early + late):
        assert a <= b
    assert early[0] < late[-1]
