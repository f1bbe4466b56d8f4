"""The statistics of a trace against loops that follow their definitions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from echo_jax.traces import StepScores, TraceInfo
from echo_jax.traces.describe import describe_layer

T, R, P, K, MULTIPLES = 24, 3, 40, 5, (1, 2, 4)
FIRST = T // 4


class Steps(struct.PyTreeNode):
    """A trace in arrays: score f32[T, R, P], length i32[T, R], active and starts bool[T, R], floor f32[T, R]."""

    score: Any
    length: Any
    active: Any
    starts: Any
    floor: Any

    def init(self):
        return ()

    def step(self, carry, t):
        return carry, StepScores(self.score[t], self.length[t], self.active[t], self.starts[t], self.floor[t])


def info(steps=T):
    return TraceInfo(layers=1, requests=R, steps=steps, capacity=P, top_k=K, layer_kinds=("full",), archetypes=("",),
                     source="record", seed=0)  # fmt: skip


def drawn(seed=0, ties=False):
    """Rows of different lengths; row 1 ends and begins again, row 2 is idle for a while and starts below K."""
    random = np.random.default_rng(seed)
    length = np.stack([10 + np.arange(T), np.r_[15 + np.arange(12), 7 + np.arange(T - 12)], 1 + np.arange(T)], axis=1)
    active, starts = np.ones((T, R), bool), np.zeros((T, R), bool)
    starts[0] = starts[12, 1] = True
    active[14:17, 2] = False
    lasting = 2 * random.standard_normal((1, R, P))
    score = lasting + random.standard_normal((T, R, P))
    if ties:
        score = np.round(score)
    visible = np.where(active, length + 1, 0)
    score = np.where(np.arange(P) < visible[..., None], score, -np.inf).astype(np.float32)
    return Steps(score, length.astype(np.int32), active, starts, np.full((T, R), -np.inf, np.float32))


def loops(steps: Steps):
    """Every statistic, by a list of positions in order of their last use."""
    overlaps, misses, first_uses, candidates, errors, kths = [], {m: [] for m in MULTIPLES}, [], [], [], []
    for row in range(R):
        recent: list[set[int]] = []  # positions by step of last use, oldest first
        before: set[int] | None = None
        average = None
        for t in range(T):
            if steps.starts[t, row]:
                recent, before, average = [], None, None
            length = int(steps.length[t, row])
            visible = length + 1 if steps.active[t, row] else 0
            order = sorted(range(visible), key=lambda s: (-float(steps.score[t, row, s]), s))[:K]
            chosen = set(order)
            is_large = visible > K
            if t >= FIRST and is_large:
                if before is not None:
                    overlaps.append(len(chosen & before) / K)
                for m in MULTIPLES:
                    left, kept = float(m * K), {}
                    for group in reversed(recent):
                        share = min(1.0, max(0.0, left / max(1, len(group))))
                        kept |= dict.fromkeys(group, share)
                        left -= len(group)
                    misses[m].append(sum(1 - kept.get(s, 0.0) for s in chosen if s != length) / K)
                known = set().union(*recent) if recent else set()
                first_uses.append(len(chosen - known - {length}) / K)
                if average is not None:
                    candidates.append(sum(float(steps.score[t, row, s]) > average for s in range(length)) / K)
                    kths.append(float(steps.score[t, row, order[-1]]))
                    errors.append(average - kths[-1])
            if t >= FIRST and visible:
                used = chosen | {length}
                recent = [group - used for group in recent] + [used]
            before = chosen if is_large else None
            if is_large:
                kth = float(steps.score[t, row, order[-1]])
                average = kth if average is None else 0.5 * average + 0.5 * kth
    return overlaps, misses, first_uses, candidates, kths, errors


@pytest.mark.parametrize("ties", [False, True])
def test_statistics_are_those_of_loops(ties):
    steps = drawn(ties=ties)
    found = describe_layer(jax.tree.map(jnp.asarray, steps), info(), MULTIPLES)
    overlaps, misses, first_uses, candidates, kths, errors = loops(steps)
    assert found.counted == len(first_uses) > 30 and len(overlaps) < len(first_uses)
    assert found.overlap == pytest.approx(np.mean(overlaps), abs=1e-6)
    assert list(found.lru_miss) == list(MULTIPLES)
    for m in MULTIPLES:
        assert found.lru_miss[m] == pytest.approx(np.mean(misses[m]), abs=1e-6)
    assert found.lru_miss[1] > found.lru_miss[2] > found.lru_miss[4] >= found.first_use > 0
    assert found.first_use == pytest.approx(np.mean(first_uses), abs=1e-6)
    assert found.candidates == pytest.approx(tuple(np.percentile(candidates, (10, 50, 90))), abs=1e-6)
    assert found.kth_score == pytest.approx(np.mean(kths), abs=1e-5)
    assert found.kth_deviation == pytest.approx(np.std(kths), abs=1e-5)
    assert found.kth_error == pytest.approx(np.mean(errors), abs=1e-5)
    assert found.kth_error_deviation == pytest.approx(np.sqrt(np.mean(np.square(errors))), abs=1e-5)
    assert found.nan_scores == 0 and found.below_band == 0


def test_nan_scores_are_counted_where_they_are_seen():
    steps = drawn()
    steps.score[3, 0, 2] = steps.score[20, 1, 4] = np.nan
    steps.score[15, 2, 1] = np.nan  # an idle row sees nothing
    steps.score[5, 0, P - 1] = np.nan  # beyond the row's length
    found = describe_layer(jax.tree.map(jnp.asarray, steps), info(), MULTIPLES)
    assert found.nan_scores == 2 and np.isfinite(found.kth_error)


def test_predictions_below_the_band_are_said():
    steps = drawn()
    steps.floor[:, 0] = np.inf
    found = describe_layer(jax.tree.map(jnp.asarray, steps), info(), MULTIPLES)
    *_, errors = loops(steps)
    assert found.below_band == pytest.approx((T - FIRST) / len(errors))


def test_nothing_to_count_is_nan():
    """Contexts below K: every set is everything."""
    steps = drawn()
    steps = steps.replace(length=np.minimum(steps.length, K - 1))
    found = describe_layer(jax.tree.map(jnp.asarray, steps), info(), MULTIPLES)
    assert found.counted == 0 and np.isnan(found.overlap) and np.isnan(found.candidates).all()


def test_what_the_run_selected_counts_and_not_what_scores_say():
    """A stored trace brings its sets: its rounded scores would select others."""

    class Told(Steps):
        def step(self, carry, t):
            _, step = super().step(carry, t)
            selected = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (R, K))
            return carry, step._replace(selected=selected, kth_score=jnp.zeros((R,)))

    steps = drawn()
    told = Told(steps.score, steps.length + 10, steps.active | True, steps.starts, steps.floor)
    found = describe_layer(jax.tree.map(jnp.asarray, told), info(), MULTIPLES)
    assert found.overlap == 1 and found.kth_score == 0
