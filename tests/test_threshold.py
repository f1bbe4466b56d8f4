"""Threshold policies against loops over one request at a time, and the rules no policy can break."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import threshold
from echo_jax.types import ThresholdPolicy
from tests.oracles import threshold as oracle

NAN, INF = float("nan"), float("inf")
SEATS, T, TOP_K = 4, 2, 5

PAIRS = {
    "ema": (threshold.Ema(), lambda: oracle.EMA(0.5)),
    "ema_slow": (threshold.Ema(0.25), lambda: oracle.EMA(0.25)),
    "ema_of_one": (threshold.Ema(1.0), lambda: oracle.EMA(1.0)),
    "last": (threshold.Last(), oracle.Last),
    "fixed": (threshold.Fixed(0.1), lambda: oracle.Fixed(0.1)),
    "never": (threshold.Never(), oracle.Never),
    "always": (threshold.Always(), oracle.Always),
}


class Both:
    def __init__(self, name):
        self.policy, one = PAIRS[name]
        self.memory = threshold.initial(self.policy, SEATS)
        self.oracles = [one() for _ in range(SEATS)]
        self.agree()

    def observe(self, kth, visible):
        kth, visible = np.asarray(kth, np.float32), np.asarray(visible)
        for seat in range(SEATS):
            for t in range(T):
                self.oracles[seat].observe(float(kth[seat, t]), int(visible[seat, t]), TOP_K)
        self.memory = threshold.observe(self.policy, self.memory, jnp.asarray(kth), jnp.asarray(visible > TOP_K))
        self.agree()

    def reset(self, seat):
        self.oracles[seat].reset()
        self.memory = threshold.reset(self.policy, self.memory, seat)
        self.agree()

    def agree(self):
        predicted = np.asarray(threshold.predict(self.policy, self.memory, SEATS))
        assert predicted.shape == (SEATS,) and predicted.dtype == np.float32
        expected = np.array([one.value() for one in self.oracles], np.float32)
        # Products and sums may be fused, so that the last place differs; alpha = 0.5 and 1 leave nothing to fuse.
        exact = getattr(self.policy, "alpha", 1.0) in (0.5, 1.0)
        np.testing.assert_allclose(predicted, expected, rtol=0 if exact else 2**-22, atol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_a_history_of_four_seats(name):
    """Seats see different scores, few positions, NaN, infinities and new requests, independently of one another."""
    random = np.random.default_rng(3)
    both = Both(name)
    for number in range(60):
        kth = random.normal(size=(SEATS, T)) * 3
        kth = np.where(random.random((SEATS, T)) < 0.1, random.choice([NAN, INF, -INF, 0.0, -0.0]), kth)
        both.observe(kth, random.integers(0, 14, (SEATS, T)))
        if number % 7 == 6:
            both.reset(int(random.integers(SEATS)))


@pytest.mark.parametrize("name", ["ema", "last"])
def test_no_history_predicts_nothing(name):
    both = Both(name)
    both.observe(np.ones((SEATS, T)), np.full((SEATS, T), TOP_K))  # all K visible positions are selected: no k-th score
    assert np.isposinf(threshold.predict(both.policy, both.memory, SEATS)).all()
    both.observe(np.full((SEATS, T), NAN), np.full((SEATS, T), 9))
    assert np.isposinf(threshold.predict(both.policy, both.memory, SEATS)).all()
    both.observe(np.full((SEATS, T), 2.0), np.full((SEATS, T), TOP_K + 1))
    assert (np.asarray(threshold.predict(both.policy, both.memory, SEATS)) == 2.0).all()


def test_several_queries_count_oldest_first():
    both = Both("ema")
    both.observe([[8, 4], [8, NAN], [NAN, 4], [NAN, NAN]], [[9, 9]] * SEATS)
    assert np.asarray(threshold.predict(both.policy, both.memory, SEATS)).tolist() == [6.0, 8.0, 4.0, INF]
    both.observe([[0, 0]] * SEATS, [[9, 0], [0, 9], [0, 0], [9, 9]])
    assert np.asarray(threshold.predict(both.policy, both.memory, SEATS)).tolist() == [3.0, 4.0, 4.0, 0.0]


def test_an_infinite_score_does_not_blind_the_average_for_ever():
    """The average of anything with an infinity is that infinity: the request would never, or always, prefetch again."""
    both = Both("ema")
    both.observe([[INF, INF], [-INF, INF], [1, -INF], [1, 2]], [[9, 9]] * SEATS)
    both.observe([[4, 2]] * SEATS, [[9, 9]] * SEATS)
    assert np.asarray(threshold.predict(both.policy, both.memory, SEATS)).tolist() == [3.0, 3.0, 3.0, 2.375]


def test_a_seat_is_reset_alone():
    both = Both("last")
    both.observe([[1, 2], [3, 4], [5, 6], [7, 8]], [[9, 9]] * SEATS)
    both.reset(2)
    assert np.asarray(threshold.predict(both.policy, both.memory, SEATS)).tolist() == [2.0, 4.0, INF, 8.0]


def test_the_random_policy_repeats_itself_and_is_wrong_both_ways():
    policy = threshold.Random(deviation=1.0, seed=3)

    def history():
        memory = threshold.initial(policy, SEATS)
        values = []
        for number in range(50):
            kth = jnp.full((SEATS, T), number, jnp.float32)
            memory = threshold.observe(policy, memory, kth, jnp.ones((SEATS, T), bool))
            values.append(np.asarray(threshold.predict(policy, memory, SEATS)) - number)
        return np.stack(values)

    noise = history()
    np.testing.assert_array_equal(noise, history())
    assert (noise > 0.5).any() and (noise < -0.5).any() and len(np.unique(noise)) == 50
    assert not np.array_equal(noise[0], noise[1])


def test_a_listing_bounds_the_scores_of_almost_every_step():
    """As the rule in plain numbers says; below nearly all of the scores it was made for, and not far."""
    policy, random = threshold.Listing(threshold.Never(), z=4.0, window=32), np.random.default_rng(5)
    scores = (10 + random.normal(size=600)).astype(np.float32)
    scores[[7, 50]] = NAN, INF
    memory, level, error, seen, bounds = threshold.initial(policy, 1), INF, 0.0, 0, []
    observe = jax.jit(lambda memory, score: threshold.observe(policy, memory, score, jnp.ones((1, 1), bool)))
    bound: Any = jax.jit(lambda memory: threshold.bound(policy, memory, 1))
    for score in scores.astype(float):
        bounds.append(float(bound(memory)[0]))
        np.testing.assert_allclose(bounds[-1], level - 4 * error if seen else INF, rtol=1e-4)
        memory = observe(memory, jnp.full((1, 1), score, jnp.float32))
        if np.isnan(score):
            continue
        off = abs(score - level)
        if np.isfinite(off):
            weight = 1 / min(seen + 1, 32)
            error, seen = weight * off + (1 - weight) * error, seen + 1
        level = (score + level) / 2 if np.isfinite(level) else score
    known = slice(60, None)
    assert np.mean(np.array(bounds)[known] < scores[known]) > 0.99
    assert 0 < np.mean(scores[known] - np.array(bounds)[known]) < 6
    assert np.isposinf(threshold.predict(policy, memory, 1)).all(), "the threshold is still the inner policy's"


def test_few_policies_have_a_bound():
    """A policy without one, as everybody's own may be, leaves the selection as it is."""
    assert threshold.bound(threshold.Ema(), threshold.initial(threshold.Ema(), SEATS), SEATS) is None
    listing = threshold.Listing()
    memory = threshold.initial(listing, SEATS)
    bound = threshold.bound(listing, memory, SEATS)
    assert bound is not None and np.isposinf(bound).all()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(z=-1), "z is -1"),
        (dict(window=0), "window is 0"),
        (dict(policy=3), "3 is not"),
    )
    for wrong, words in cases:
        with pytest.raises(ValueError, match=words):
            threshold.Listing(**wrong)


@dataclasses.dataclass(frozen=True)
class Counter:
    """A policy of somebody else's, with a memory of several arrays and no seat of its own."""

    def init(self):
        return {"seen": 0, "best": np.full((2,), -np.inf, np.float32)}

    def update(self, memory, kth_score):
        return {"seen": memory["seen"] + 1, "best": jnp.maximum(memory["best"], kth_score)}

    def value(self, memory):
        return memory["best"][0] + memory["seen"]


def test_a_policy_of_any_memory():
    policy = Counter()
    assert isinstance(policy, ThresholdPolicy)
    memory = threshold.initial(policy, SEATS)
    is_informative = jnp.array([[True, True], [True, False], [False, True], [False, False]])
    observe = jax.jit(lambda memory, kth: threshold.observe(policy, memory, kth, is_informative))
    memory = observe(memory, jnp.array([[1, 3], [5, 9], [7, 2], [8, 8]], jnp.float32))
    assert np.asarray(memory["seen"]).tolist() == [2, 1, 1, 0]
    assert np.asarray(threshold.predict(policy, memory, SEATS)).tolist() == [5.0, 6.0, 3.0, -INF]
    memory = threshold.reset(policy, memory, 0)
    assert np.asarray(memory["seen"]).tolist() == [0, 1, 1, 0]
    assert np.asarray(memory["best"])[0].tolist() == [-INF, -INF]


@pytest.mark.parametrize("name", threshold.POLICIES)
def test_every_policy_is_a_policy_and_hashable(name):
    policy = threshold.POLICIES[name]()
    assert isinstance(policy, ThresholdPolicy)
    assert hash(policy) == hash(threshold.POLICIES[name]())
