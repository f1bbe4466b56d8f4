"""Threshold policies: what the k-th best index score will be, guessed from what it was.

A policy is a small frozen dataclass with `init`, `update`, `value`, written for one request in one layer; `observe`
and `predict` vmap it over seats and hold the rules that no policy can break. Nothing here can change an answer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from echo_jax.types import ThresholdPolicy

NO_HISTORY = float("inf")
"""The threshold of a request without history: nothing scores above it, so nothing is copied ahead."""


def initial(policy: ThresholdPolicy, seats: int) -> Any:
    """Memory of `seats` requests without history, one leading axis."""
    one = jax.tree.map(jnp.asarray, policy.init())
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (seats, *leaf.shape)).copy(), one)


def predict(policy: ThresholdPolicy, memory: Any, seats: int) -> jax.Array:
    """f32[B]: the predicted k-th score of each of `seats` seats."""
    return jax.vmap(policy.value, axis_size=seats)(memory).astype(jnp.float32)


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

    def init(self):
        return (jnp.float32(0.0), jnp.uint32(0))

    def update(self, memory, kth_score):
        return (kth_score, memory[1] + jnp.uint32(1))

    def value(self, memory):
        key = jax.random.fold_in(jax.random.key(self.seed), memory[1])
        return memory[0] + self.deviation * jax.random.normal(key)


POLICIES = {"ema": Ema, "last": Last, "fixed": Fixed, "never": Never, "always": Always, "random": Random}
