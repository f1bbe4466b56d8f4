"""Policies that came with the replay: thresholds, caps, two queues; each against a loop of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import eviction, threshold
from echo_jax.replay import caps

SCORES = np.random.default_rng(4).normal(size=30).astype(np.float32) + np.linspace(0, 3, 30, dtype=np.float32)


def values(policy, scores=SCORES):
    """What the policy predicts before each score, and after the last."""
    memory, found = policy.init(), []
    for score in scores:
        found.append(float(policy.value(memory)))
        memory = policy.update(memory, jnp.float32(score))
    return [*found, float(policy.value(memory))]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("window", [1, 4, 50])
def test_quantile_is_numpys_of_the_last_scores(share, window):
    found = values(threshold.Quantile(share, window))
    assert found[0] == np.inf
    for seen in range(1, len(found)):
        expected = np.quantile(SCORES[max(0, seen - window) : seen].astype(np.float64), share)
        np.testing.assert_allclose(found[seen], expected, rtol=1e-5, atol=1e-6)


def test_trend_is_holts_recurrence():
    found = values(threshold.Trend(0.5, 0.25))
    level, slope = float(SCORES[0]), 0.0
    assert found[:2] == [np.inf, level]
    for place, score in enumerate(SCORES[1:], start=2):
        raised = 0.5 * float(score) + 0.5 * (level + slope)
        slope = 0.25 * (raised - level) + 0.75 * slope
        level = raised
        np.testing.assert_allclose(found[place], level + slope, rtol=1e-5)


def test_trend_follows_a_line_that_the_average_lags_behind():
    line = np.arange(40, dtype=np.float32)
    trend, ema = values(threshold.Trend(0.5, 0.5), line)[-1], values(threshold.Ema(0.5), line)[-1]
    assert abs(trend - 40) < 0.1 and abs(ema - 38) < 0.1


def test_trend_forgets_an_infinity():
    found = values(threshold.Trend(), np.array([1, np.inf, 2, 3, -np.inf, 4], np.float32))
    assert np.isfinite(found[3]) and found[3] == 2.0 and found[-1] == 4.0


@pytest.mark.parametrize("z", [-1.0, 0.0, 2.0])
def test_margin_shifts_by_its_running_error(z):
    found = values(threshold.Margin(threshold.Last(), z))
    error = 0.0
    assert found[:2] == [np.inf, SCORES[0]]  # nothing was predicted for the first score, so nothing was off
    for place in range(2, len(found)):
        error = 0.5 * abs(float(SCORES[place - 1]) - float(SCORES[place - 2])) + 0.5 * error
        np.testing.assert_allclose(found[place], float(SCORES[place - 1]) - z * error, rtol=1e-4, atol=1e-5)


def test_margin_shifts_policies_only():
    with pytest.raises(ValueError, match="'nothing' is not"):
        threshold.Margin("nothing")  # type: ignore[arg-type]


def test_clairvoyant_lets_the_kth_row_itself_pass():
    for score in np.array([1.0, -1.0, 0.0, 3e38, -3e38, 1e-30], np.float32):
        memory = threshold.Clairvoyant().update(None, jnp.float32(score))
        assert np.asarray(threshold.Clairvoyant().value(memory)) < score


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: threshold.Quantile(1.5), "1.5"),
        (lambda: threshold.Quantile(0.5, 0), "window is 0"),
        (lambda: threshold.Trend(0.0), "alpha is 0.0"),
        (lambda: threshold.Trend(0.5, 2), "beta is 2"),
        (lambda: eviction.TwoQueue(-1), "probation is -1"),
        (lambda: caps.Fixed(-1), "rows is -1"),
        (lambda: caps.Fixed(2.5), "rows is 2.5"),  # type: ignore[arg-type]
        (lambda: caps.Proportional(float("nan")), "per_position is nan"),
        (lambda: caps.Budgeted(-5), "budget -5"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_two_queue_gives_first_uses_less_time():
    given = jnp.array([3, -(2**31)], jnp.int32), jnp.array([False, True])
    assert eviction.TwoQueue(16).touch(*given, jnp.int32(100), jnp.zeros(2)).tolist() == [100, 84]
    assert eviction.TwoQueue().rebase(jnp.array([eviction.REBASE_AT]), jnp.int32(eviction.REBASE_AT)).tolist() == [0]


def test_belady_orders_by_the_next_use():
    touched = eviction.Belady().touch(
        jnp.zeros(3, jnp.int32), jnp.zeros(3, bool), jnp.int32(5), jnp.array([-9.0, -7.0, -jnp.inf])
    )
    assert touched.dtype == jnp.int32 and touched[2] < touched[0] < touched[1]


# ---- caps ------------------------------------------------------------------------------------------------


def test_fixed_and_proportional_caps_count_as_the_decoders_do():
    from tests.test_recall import CONFIG

    contexts = np.array([0, 1, 9, 10, 11, 5000], np.int32)
    for per_position, rows in ((float("inf"), 5), (0.1, 4), (0.0, 4)):
        config = dataclasses.replace(CONFIG, staging=rows, prefetch_per_position=per_position)
        cap = caps.Fixed(rows) if per_position == float("inf") else caps.Proportional(per_position, rows)
        found = cap.allowed((), jnp.asarray(contexts), jnp.asarray(contexts))
        assert found.tolist() == [config.cap(int(context)) for context in contexts]


def test_a_budget_goes_to_whose_rows_were_needed_most():
    """Against a loop that deals row by row."""
    random, cap = np.random.default_rng(5), caps.Budgeted(20, 8, keep=0.5)
    memory, shares = cap.init(4), np.ones(4)
    allowed = jax.jit(cap.allowed)
    for _ in range(30):
        candidates = random.integers(0, 12, 4)
        given = np.asarray(allowed(memory, jnp.zeros(4, jnp.int32), jnp.asarray(candidates, jnp.int32)))
        expected, left = np.zeros(4, int), 20
        for request in sorted(range(4), key=lambda r: (-shares[r], r)):
            expected[request] = min(candidates[request], 8, left)
            left -= expected[request]
        assert given.tolist() == expected.tolist()
        useful = np.array([random.integers(0, n + 1) for n in given])
        memory = cap.update(memory, jnp.asarray(given), jnp.asarray(useful, jnp.int32))
        for request in range(4):
            if given[request]:
                shares[request] = np.float32(0.5 * shares[request] + 0.5 * np.float32(useful[request] / given[request]))
        np.testing.assert_allclose(memory, shares, rtol=1e-6)
        shares = np.asarray(memory, float)  # rounding must not decide a tie
