"""Eviction policies: what priority a slot gets when a step uses it. The manager evicts the lowest unprotected one.

Knows numbers, elementwise. Which slots exist, which are protected and who is evicted is decided in `pool`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

REBASE_AT = 2**30
"""The step at which the clock is set back, so that priorities outlive 2^31 steps."""

LOWEST = -(2**31) + 1
"""The lowest priority a slot in use has; one above FREE_PRIORITY."""

HIGHEST = 2**31 - 2
"""The highest priority a slot in use has; 2^31 - 1 marks protected slots while victims are chosen."""


def _shift_down(priority: jax.Array, shift: jax.Array) -> jax.Array:
    """priority - shift, saturating at LOWEST: i32 must not wrap round."""
    return jnp.where(priority < LOWEST + shift, jnp.int32(LOWEST), priority - shift)


def _check_steps(name: str, steps: int, least: int = 0) -> None:
    """Refuses a number of steps with which a priority, step + steps or step - steps, could wrap round: steps are below
    REBASE_AT."""
    if not least <= steps <= REBASE_AT - 2:
        raise ValueError(
            f"{name} is {steps} steps but must be at least {least}, and at most {REBASE_AT - 2}: priorities are int32"
        )


@dataclasses.dataclass(frozen=True)
class Lru:
    """Least recently used: the step of last selection or write."""

    def touch(self, priority, was_free, step, score):
        return step  # of all

    def rebase(self, priority, shift):
        return _shift_down(priority, shift)


@dataclasses.dataclass(frozen=True)
class Lfu:
    """Least frequently used: how many steps have selected the row since it came in. Ties fall to the lower slot."""

    def touch(self, priority, was_free, step, score):
        return jnp.where(was_free, 1, jnp.minimum(priority, HIGHEST - 1) + 1)

    def rebase(self, priority, shift):
        return priority  # a count, not a time


@dataclasses.dataclass(frozen=True)
class ScoreWeighted:
    """Recency plus a bonus for high index scores: step + bonus_steps * sigmoid(score)."""

    bonus_steps: int = 16

    def __post_init__(self):
        _check_steps("score bonus_steps", self.bonus_steps)

    def touch(self, priority, was_free, step, score):
        bonus = jnp.where(jnp.isnan(score), 0.0, jax.nn.sigmoid(score)) * self.bonus_steps
        return step + jnp.round(bonus).astype(jnp.int32)

    def rebase(self, priority, shift):
        return _shift_down(priority, shift)


@dataclasses.dataclass(frozen=True)
class Clock:
    """CLOCK in the form a priority can carry: a use sets the epoch `step // period`, and victims of the oldest epoch
    are taken in slot order, as the hand would meet them. `period` steps make one turn of the hand."""

    period: int = 16

    def __post_init__(self):
        _check_steps("clock period", self.period, least=1)

    def touch(self, priority, was_free, step, score):
        return step // self.period

    def rebase(self, priority, shift):
        return _shift_down(priority, shift // self.period)


@dataclasses.dataclass(frozen=True)
class TwoQueue:
    """Two queues in one priority: a row's first use counts as a use `probation` steps ago, a second one as a use now.

    Rows that are used once leave before rows in use that have waited up to `probation` steps longer.
    """

    probation: int = 16

    def __post_init__(self):
        _check_steps("two-queue probation", self.probation)

    def touch(self, priority, was_free, step, score):
        return jnp.where(was_free, step - self.probation, step)

    def rebase(self, priority, shift):
        return _shift_down(priority, shift)


@dataclasses.dataclass(frozen=True)
class Belady:
    """The row whose next use is farthest away leaves first: no policy recalls fewer rows. Only a replay can know it.

    `sees_ahead` asks the replay to hand over, in place of the score, minus the step of the row's next use (-inf where
    it has none).
    """

    sees_ahead: ClassVar[bool] = True

    def touch(self, priority, was_free, step, score):
        return jnp.maximum(score, jnp.float32(LOWEST)).astype(jnp.int32)

    def rebase(self, priority, shift):
        return priority  # steps of a trace, which are counted from its beginning


POLICIES = {"lru": Lru, "lfu": Lfu, "score": ScoreWeighted, "clock": Clock, "two-queue": TwoQueue}

REPLAY_ONLY = {"belady": Belady}
"""Policies that need to know what later steps select."""
