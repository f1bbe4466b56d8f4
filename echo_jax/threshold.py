"""Threshold policies: what the k-th best index score will be, guessed from what it was.

A policy is a small frozen dataclass with `init`, `update`, `value`, written for one request in one layer; `observe`
and `predict` vmap it over seats and hold the rules that no policy can break. Nothing here can change an answer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from echo_jax.types import ThresholdPolicy

MAX_WINDOW = 4096
"""Scores that a policy may remember of one request in one layer."""

NO_HISTORY = float("inf")
"""The threshold of a request without history: nothing scores above it, so nothing is copied ahead."""


def initial(policy: ThresholdPolicy, seats: int) -> Any:
    """Memory of `seats` requests without history, one leading axis."""
    one = jax.tree.map(jnp.asarray, policy.init())
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (seats, *leaf.shape)).copy(), one)


def predict(policy: ThresholdPolicy, memory: Any, seats: int) -> jax.Array:
    """f32[B]: the predicted k-th score of each of `seats` seats."""
    return jax.vmap(policy.value, axis_size=seats)(memory).astype(jnp.float32)


def bound(policy: ThresholdPolicy, memory: Any, seats: int) -> jax.Array | None:
    """f32[B]: a score that the policy expects somewhat more than K positions of each seat to exceed; None where the
    policy has no such method. It may spare the selection most of the scores and changes nothing else."""
    one = getattr(policy, "bound", None)
    return None if one is None else jax.vmap(one, axis_size=seats)(memory).astype(jnp.float32)


def observe(policy: ThresholdPolicy, memory: Any, kth_score: jax.Array, is_informative: jax.Array) -> Any:
    """Memory after the step's true k-th scores f32[B, T], oldest first.

    A score counts only where is_informative bool[B, T] (the query saw more than K positions, and the row is a real
    token) and it is not NaN; elsewhere the memory stays as it was.
    """
    counts = is_informative & ~jnp.isnan(kth_score)

    def one_seat(memory, scores, counts):
        for t in range(kth_score.shape[1]):
            updated = policy.update(memory, scores[t])
            memory = jax.tree.map(lambda new, old, t=t: jnp.where(counts[t], new, old), updated, memory)
        return memory

    return jax.vmap(one_seat)(memory, kth_score, counts)


def reset(policy: ThresholdPolicy, memory: Any, seat: jax.Array | int) -> Any:
    """The seat is given to a new request: its memory is that of a request without history."""
    fresh = policy.init()
    return jax.tree.map(lambda old, new: old.at[seat].set(jnp.asarray(new, old.dtype)), memory, fresh)


def rows_per_position(scoring_us: float, rows_per_us: float, positions: int, missing: float = 0.0) -> float:
    """c of the cap on early copies, min(S, floor(c * context)): rows that the scorer fetches, at rows_per_us, while
    `positions` positions of all seats together are scored in scoring_us, per position; or half of the `missing` rows
    that a layer-step of all seats is expected to have, where that is more.

    A row beyond the first number arrives after the scores, when `require` would fetch it straight to its slot; copied
    ahead it is moved a second time, and may be wrong. Fewer leave the link idle while scores are made. Where far more
    rows are missing the link is busy much longer than scores take. Who fetches then makes no difference, if the scorer
    is by then as fast as a recall: that is so where a seat's pages lie one after another, as admission to an empty pool
    lays them. Where they are scattered it is slower, and `missing` is to be left at 0.

    The rate is the one that fetching reaches *beside* the scores, each row when its score is known, of rows as far
    apart as a tenth of the selected are; a recall of the same rows alone, in the order of their addresses, is faster
    and says nothing of it. All three numbers are measured: `python -m bench.prefetch` times scores with prefetch by
    cap, takes the largest cap that makes them a tenth longer, and prints rates and c; it also shows what other caps
    give. On an H200 (FP8 keys and records, 16 x 131,072) scores take 81 us, and the best of the caps tried are 160 rows
    of a seat with a tenth of the selected missing, 160 to 256 with a fifth, 512 with half of them; of scattered pages
    128, 128 and 192.

    c belongs to a machine, a record format and an index, not to a batch: scoring takes as long per position whatever
    the seats, once they fill the chip.
    """
    if not (scoring_us > 0 and rows_per_us > 0 and positions >= 1 and missing >= 0):
        raise ValueError(
            f"scoring_us {scoring_us}, rows_per_us {rows_per_us} and positions {positions} must be positive, and "
            f"missing {missing} not negative; measure the rates at a batch that is served"
        )
    return max(scoring_us * rows_per_us, missing / 2) / positions


@dataclasses.dataclass(frozen=True)
class Ema:
    """Exponential moving average of the k-th score: m <- alpha * score + (1 - alpha) * m, first score taken whole.

    ECHO's predictor, alpha = 0.5.
    """

    alpha: float = 0.5

    def __post_init__(self):
        if not 0 < self.alpha <= 1:
            raise ValueError(f"ema alpha is {self.alpha} but must lie in (0, 1]")

    def init(self):
        return jnp.float32(NO_HISTORY)

    def update(self, memory, kth_score):
        mixed = self.alpha * kth_score + (1 - self.alpha) * memory
        return jnp.where(jnp.isfinite(memory), mixed, kth_score)

    def value(self, memory):
        return memory


@dataclasses.dataclass(frozen=True)
class Last:
    """The k-th score of the step before."""

    def init(self):
        return jnp.float32(NO_HISTORY)

    def update(self, memory, kth_score):
        return kth_score

    def value(self, memory):
        return memory


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same value always, history or not."""

    threshold: float = 0.0

    def init(self):
        return ()

    def update(self, memory, kth_score):
        return memory

    def value(self, memory):
        return jnp.float32(self.threshold)


@dataclasses.dataclass(frozen=True)
class Never(Fixed):
    """Copies nothing ahead: every missing row is recalled."""

    threshold: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Always(Fixed):
    """Takes every missing row for a candidate, up to the cap."""

    threshold: float = float("-inf")


@dataclasses.dataclass(frozen=True)
class Random:
    """The last k-th score plus normal noise: an adversary that is wrong in both directions."""

    deviation: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"random seed is {self.seed} but must lie in 0..{2**32 - 1}")

    def init(self):
        return (jnp.float32(0.0), jnp.uint32(0))

    def update(self, memory, kth_score):
        return (kth_score, memory[1] + jnp.uint32(1))

    def value(self, memory):
        key = jax.random.fold_in(jax.random.key(self.seed), memory[1])
        return memory[0] + self.deviation * jax.random.normal(key)


@dataclasses.dataclass(frozen=True)
class Quantile:
    """A quantile of the last `window` k-th scores, linear between neighbours: 0.5 is their median, 0 the lowest."""

    share: float = 0.5
    window: int = 8

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"quantile share is {self.share} but must lie in [0, 1]")
        if not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"quantile window is {self.window} scores but must lie in 1..{MAX_WINDOW}")

    def init(self):
        return (jnp.zeros((self.window,), jnp.float32), jnp.int32(0))

    def update(self, memory, kth_score):
        scores, seen = memory
        return (scores.at[seen % self.window].set(kth_score), seen + 1)

    def value(self, memory):
        scores, seen = memory
        known = jnp.minimum(seen, self.window)
        ordered = jnp.sort(jnp.where(jnp.arange(self.window) < known, scores, jnp.inf))
        place = jnp.float32(self.share) * jnp.maximum(known - 1, 0).astype(jnp.float32)
        low = jnp.floor(place).astype(jnp.int32)
        high = jnp.minimum(low + 1, jnp.maximum(known - 1, 0))
        between = ordered[low] + (place - low.astype(jnp.float32)) * (ordered[high] - ordered[low])
        return jnp.where(seen > 0, between, NO_HISTORY)


@dataclasses.dataclass(frozen=True)
class Trend:
    """Exponential moving average of the k-th score and of its slope (Holt's linear smoothing): value = level + slope.

    level' = alpha * score + (1 - alpha) * (level + slope); slope' = beta * (level' - level) + (1 - beta) * slope. The
    first score is the level, without a slope.
    """

    alpha: float = 0.5
    beta: float = 0.25

    def __post_init__(self):
        for name in ("alpha", "beta"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"trend {name} is {getattr(self, name)} but must lie in (0, 1]")

    def init(self):
        return (jnp.float32(NO_HISTORY), jnp.float32(0.0))

    def update(self, memory, kth_score):
        level, slope = memory
        raised = self.alpha * kth_score + (1 - self.alpha) * (level + slope)
        turned = self.beta * (raised - level) + (1 - self.beta) * slope
        goes_on = jnp.isfinite(level + slope) & jnp.isfinite(raised)
        return (jnp.where(goes_on, raised, kth_score), jnp.where(goes_on, turned, 0.0))

    def value(self, memory):
        return memory[0] + memory[1]


@dataclasses.dataclass(frozen=True)
class Margin:
    """Another policy's value less z times its running error, the moving average (coefficient 0.5) of |score - value|.

    z > 0 takes more candidates, z < 0 fewer, each in proportion to how far the policy has been off.
    """

    policy: ThresholdPolicy = Ema()
    z: float = 1.0

    def __post_init__(self):
        if not isinstance(self.policy, ThresholdPolicy):
            raise ValueError(f"margin shifts a threshold policy, which {self.policy!r} is not; name one, such as ema")

    def init(self):
        return (self.policy.init(), jnp.float32(0.0))

    def update(self, memory, kth_score):
        inner, error = memory
        off = jnp.abs(kth_score - jnp.asarray(self.policy.value(inner), jnp.float32))
        error = jnp.where(jnp.isfinite(off), 0.5 * off + 0.5 * error, error)
        return (self.policy.update(inner, kth_score), error)

    def value(self, memory):
        inner, error = memory
        return jnp.asarray(self.policy.value(inner), jnp.float32) - self.z * error


@dataclasses.dataclass(frozen=True)
class Listing:
    """Another policy's value, and beside it a bound: what somewhat more than K scores exceed, in all but a few steps
    of a thousand.

    The bound is the moving average of the k-th score (coefficient 0.5) less z times its mean error over about `window`
    scores. A prediction of the k-th score itself is too high in half of the steps, and then fewer than K scores exceed
    it. Synthetic layers of 32,768 positions, k 2048: z = 4 is too high in 0.2 % of the steps and leaves 2.0 k scores
    (`volatile`: 2.8 k); z = 3 in 1.4 %, and leaves 1.7 k; with the error of the last few scores only, as `Margin` has
    it, z = 4 is too high in 2 %.
    """

    policy: ThresholdPolicy = Ema()
    z: float = 4.0
    window: int = 32

    def __post_init__(self):
        if not isinstance(self.policy, ThresholdPolicy):
            raise ValueError(f"listing adds a bound to a threshold policy, which {self.policy!r} is not; name one")
        if not self.z >= 0 or not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(
                f"listing z is {self.z} and window is {self.window} but must be at least 0, and 1..{MAX_WINDOW} scores"
            )

    def init(self):
        return (self.policy.init(), Ema().init(), jnp.float32(0.0), jnp.int32(0))

    def update(self, memory, kth_score):
        inner, level, error, seen = memory
        off = jnp.abs(kth_score - level)
        counts = jnp.isfinite(off)
        seen = jnp.minimum(seen + counts.astype(jnp.int32), self.window)
        weight = 1.0 / jnp.maximum(seen, 1).astype(jnp.float32)  # the first ones count alike
        error = jnp.where(counts, weight * off + (1.0 - weight) * error, error)
        return (self.policy.update(inner, kth_score), Ema().update(level, kth_score), error, seen)

    def value(self, memory):
        return self.policy.value(memory[0])

    def bound(self, memory):
        """f32[]: NO_HISTORY until two scores were seen."""
        _, level, error, seen = memory
        return jnp.where(seen > 0, level - self.z * error, NO_HISTORY)


@dataclasses.dataclass(frozen=True)
class Clairvoyant:
    """The k-th score that the step will turn out to have: what no predictor can beat. Only a replay can know it.

    `sees_ahead` asks the replay to observe before it predicts. The value lies one place below the score, so that the
    k-th row itself stands above it.
    """

    sees_ahead: ClassVar[bool] = True

    def init(self):
        return jnp.float32(NO_HISTORY)

    def update(self, memory, kth_score):
        return jnp.nextafter(kth_score, jnp.float32(-jnp.inf))

    def value(self, memory):
        return memory


POLICIES = {
    "ema": Ema,
    "last": Last,
    "fixed": Fixed,
    "never": Never,
    "always": Always,
    "random": Random,
    "quantile": Quantile,
    "trend": Trend,
    "margin": Margin,
    "listing": Listing,
}

REPLAY_ONLY = {"clairvoyant": Clairvoyant}
"""Policies that need a step's outcome before the step."""
