"""The replay against loops: every count of every step, under many ways to run a cache."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from echo_jax import eviction, threshold
from echo_jax.formats import RecordFormat
from echo_jax.replay import caps
from echo_jax.replay.run import run_layer
from echo_jax.replay.settings import Setting, plan
from echo_jax.traces import StepScores, TraceInfo
from tests.oracles import replay as oracle
from tests.oracles import threshold as oracle_threshold

R, P, K, STEPS = 3, 64, 5, 40
RECORDS = RecordFormat("bf16", 512, 64)
INFO = TraceInfo(1, R, STEPS, P, K, ("full",), ("test",), "synth", 0)


class Listed(struct.PyTreeNode):
    """A source that holds all its steps."""

    score: Any
    length: Any
    active: Any
    starts: Any
    extra: Any = None  # further fields of StepScores

    def init(self):
        return ()

    def step(self, carry, t):
        extra = {} if self.extra is None else {name: values[t] for name, values in self.extra.items()}
        floor = jnp.full(self.length.shape[1:], -jnp.inf)
        step = StepScores(self.score[t], self.length[t], self.active[t], self.starts[t], floor)
        return carry, step._replace(**extra)


@functools.cache
def history(seed=0, requests=R, steps=STEPS):
    """Requests that come and go at different times; scores that wander, with ties, infinities and NaN."""
    random = np.random.default_rng(seed)
    fixed = random.normal(size=(requests, P))
    score = np.empty((steps, requests, P), np.float32)
    length, active, starts = (np.zeros((steps, requests), kind) for kind in (np.int32, bool, bool))
    now, left, slow = np.zeros(requests, int), np.zeros(requests, int), np.zeros((requests, P))
    for t in range(steps):
        slow = 0.8 * slow + 0.6 * random.normal(size=(requests, P))
        for r in range(requests):
            if left[r] == 0 and (t == 0 or random.random() < 0.4):
                now[r], left[r], starts[t, r] = random.integers(0, 30), random.integers(1, 25), True
                fixed[r] = random.normal(size=P)
            active[t, r] = left[r] > 0
            length[t, r] = now[r] if left[r] else 0
        value = np.round(fixed + 0.7 * slow + 0.5 * random.normal(size=(requests, P)) + 1, 1)
        odd = random.random((requests, P)) < 0.01
        score[t] = np.where(odd, random.choice([np.nan, np.inf, -np.inf, -0.0], size=(requests, P)), value)
        for r in np.flatnonzero(random.random(requests) < 0.08):  # a k-th score that is no number, or one of many equal
            score[t, r] = random.choice([np.nan, np.inf, -np.inf, 1.5])
        score[t][np.arange(P)[None] > length[t][:, None]] = -np.inf
        now += active[t]
        left -= active[t]
    steps_list = [
        oracle.Step(*one) for one in zip(score, length.tolist(), active.tolist(), starts.tolist(), strict=True)
    ]
    return Listed(*(jnp.asarray(one) for one in (score, length, active, starts))), steps_list


@dataclasses.dataclass(frozen=True)
class Pair:
    """A setting, and the same thing said to the oracle."""

    setting: Setting
    ways: Any  # a dict, or a function that makes one with a memory of its own

    def oracle(self):
        ways: Any = self.ways() if callable(self.ways) else self.ways
        base = {
            "top_k": K,
            "capacity": P,
            "slots_per_request": self.setting.slots_per_request,
            "threshold": lambda: oracle_threshold.EMA(0.5),
            "touch": lambda priority, filled, step, score: step,
            "allowed": lambda contexts, candidates: [64 if context else 0 for context in contexts],
        }
        return oracle.Ways(**(base | ways))


class SeesOutcome(oracle_threshold.Last):
    def _next(self, kth_score):
        return np.nextafter(kth_score, np.float32(-np.inf))


class Dealer:
    """One budget for all: each row goes to the request whose staged rows were needed most, which has candidates."""

    def __init__(self, budget, rows, keep):
        self.budget, self.rows, self.keep = budget, rows, np.float32(keep)
        self.share = [np.float32(1)] * R

    def ways(self):
        return {"allowed": self.allowed, "told": self.told, "began": self.began}

    def began(self, request):
        self.share[request] = np.float32(1)

    def allowed(self, contexts, candidates):
        given, left = [0] * R, self.budget
        for r in sorted(range(R), key=lambda r: (-self.share[r], r)):
            given[r] = min(candidates[r], self.rows, left)
            left -= given[r]
        return given

    def told(self, request, staged, useful):
        if staged:
            new = np.float32(useful) / np.float32(staged)
            self.share[request] = self.keep * self.share[request] + (np.float32(1) - self.keep) * new


def sigmoid_bonus(priority, filled, step, score):
    return step + (0 if math.isnan(score) else round(4 / (1 + math.exp(-max(min(score, 700.0), -700.0)))))


PAIRS = {
    "ema_lru": Pair(Setting(8), {}),
    "tight_pool": Pair(Setting(6), {}),
    "small_cap": Pair(
        Setting(7, cap=caps.Fixed(2)), {"allowed": lambda contexts, candidates: [2 if n else 0 for n in contexts]}
    ),
    "proportional": Pair(
        Setting(9, cap=caps.Proportional(0.1, 4)),
        {"allowed": lambda contexts, candidates: [min(4, context // 10) for context in contexts]},
    ),
    "no_prefetch": Pair(
        Setting(8, threshold=threshold.Never(), cap=caps.Fixed(0)),
        {"threshold": oracle_threshold.Never, "allowed": lambda contexts, candidates: [0] * R},
    ),
    "always": Pair(Setting(8, threshold=threshold.Always()), {"threshold": oracle_threshold.Always}),
    "last_lfu": Pair(
        Setting(10, threshold=threshold.Last(), eviction=eviction.Lfu()),
        {
            "threshold": oracle_threshold.Last,
            "touch": lambda priority, filled, step, score: 1 if filled else priority + 1,
        },
    ),
    "two_queue": Pair(
        Setting(8, eviction=eviction.TwoQueue(3)),
        {"touch": lambda priority, filled, step, score: step - 3 if filled else step},
    ),
    "score_weighted": Pair(Setting(8, eviction=eviction.ScoreWeighted(4)), {"touch": sigmoid_bonus}),
    "clairvoyant": Pair(
        Setting(8, threshold=threshold.Clairvoyant()), {"threshold": SeesOutcome, "knows_outcome": True}
    ),
    "belady": Pair(
        Setting(8, eviction=eviction.Belady()),
        {
            "touch": lambda priority, filled, step, score: -(2**31) + 1 if score == -math.inf else int(score),
            "knows_uses": True,
        },
    ),
    "split": Pair(Setting(8, pool="split"), {"split": True}),
    "budgeted": Pair(Setting(8, cap=caps.Budgeted(3, 2, keep=0.5)), lambda: Dealer(3, 2, 0.5).ways()),
    "split_tight": Pair(
        Setting(6, pool="split", threshold=threshold.Last()), {"split": True, "threshold": oracle_threshold.Last}
    ),
}
NAMES = list(PAIRS)


@functools.cache
def replayed(seed, kind="full"):
    """All pairs in one pass: they share scores and selection, and nothing else."""
    source, _ = history(seed)
    made = plan(INFO, kind, [pair.setting for pair in PAIRS.values()], RECORDS)
    return made, run_layer(made, source, STEPS, chunk=16)


def compare(counts, place, expected):
    """Integers are equal; sums of float errors differ by the order of their addition."""
    each = counts.each
    found = {name: getattr(each.moved, name) for name in ("hits", "useful", "recalled", "staged", "refused")}
    found |= {name: getattr(each.moved, name) for name in ("evicted", "written")}
    found |= {name: getattr(each, name) for name in ("reselected", "candidates", "missed", "predictions", "above")}
    for name, values in found.items():
        wanted = [step[name] for step in expected]
        assert values[:, place].tolist() == wanted, name
    for name in ("error", "absolute_error", "relative_error", "rank_error"):
        np.testing.assert_allclose(
            getattr(each, name)[:, place], [step[name] for step in expected], rtol=2e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_count_of_every_step_is_the_oracles(name, seed):
    pair = PAIRS[name]
    made, counts = replayed(seed)
    compare(counts, made.settings.index(pair.setting), oracle.replay(history(seed)[1], pair.oracle()))


def test_the_history_is_worth_replaying():
    """Every count occurs, so that agreement about it says something."""
    made, counts = replayed(0)
    place = made.settings.index(PAIRS["small_cap"].setting)
    each = counts.each
    for name in ("hits", "useful", "recalled", "staged", "refused", "evicted", "written"):
        assert getattr(each.moved, name)[:, place].sum() > 10, name
    wasted = each.moved.staged[:, place].sum() - each.moved.useful[:, place].sum()
    assert wasted > 0 and each.reselected[:, place].sum() > 3
    source, steps = history(0)
    assert np.asarray(source.starts).sum() > 2 * R and not np.asarray(source.active).all()
    assert counts.shared.nan_scores.sum() > 0


def test_a_row_that_comes_back_after_sixteen_steps_was_evicted_too_early_and_after_seventeen_not():
    """Two requests with two slots each: position 0 loses its slot in step 2, to the token made there."""
    steps, start = 22, 30
    score = np.zeros((steps, 2, P), np.float32)
    length = np.tile(np.arange(start, start + steps, dtype=np.int32)[:, None], (1, 2))
    for t in range(steps):
        score[t, :, start + t] = 1.0  # each token attends itself, but for the first step and one of return
    score[0, :, 0] = score[2 + 16, 0, 0] = score[2 + 17, 1, 0] = 2.0
    starts = np.zeros((steps, 2), bool)
    starts[0] = True
    source = Listed(*(jnp.asarray(one) for one in (score, length, np.ones((steps, 2), bool), starts)))
    info = TraceInfo(1, 2, steps, P, 1, ("full",), ("test",), "synth", 0)
    made = plan(info, "full", [Setting(2, threshold=threshold.Never(), cap=caps.Fixed(0), pool="split")], RECORDS)
    counts = run_layer(made, source, steps, chunk=steps)
    recalled, back = counts.each.moved.recalled[:, 0], counts.each.reselected[:, 0]
    assert np.flatnonzero(recalled).tolist() == [0, 18, 19] and np.flatnonzero(back).tolist() == [18]
