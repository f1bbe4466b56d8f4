"""Caps on prefetch: how many rows each request may copy ahead in one layer-step.

A cap is a small frozen dataclass with `rows` (S, the places of a request in staging), `init`, `allowed` and `update`,
written for a whole batch. Knows counts. Which rows travel is decided in `recall.prefetch_candidates`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp


@runtime_checkable
class Cap(Protocol):
    """A batch's allowance. Whatever it returns is cut to 0..rows."""

    @property
    def rows(self) -> int:
        """S: most rows of one request, the size of its staging."""
        ...

    def init(self, requests: int) -> Any:
        """Memory before the first step: arrays with a leading axis of `requests`."""
        ...

    def allowed(self, memory: Any, context: jax.Array, candidates: jax.Array) -> jax.Array:
        """i32[R]: rows each request may copy ahead; it has i32[R] positions and i32[R] candidates."""
        ...

    def update(self, memory: Any, staged: jax.Array, useful: jax.Array) -> Any:
        """Memory after a step that copied ahead staged i32[R] rows, useful i32[R] of which were needed."""
        ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same number for every request."""

    rows: int = 64

    def __post_init__(self):
        _check_rows("fixed", self.rows)

    def init(self, requests):
        return ()

    def allowed(self, memory, context, candidates):
        return jnp.where(context > 0, self.rows, 0)

    def update(self, memory, staged, useful):
        return memory


@dataclasses.dataclass(frozen=True)
class Proportional:
    """min(rows, floor(per_position * context)): as many rows as the link moves while the indexer scores the context."""

    per_position: float = 0.002
    rows: int = 2048

    def __post_init__(self):
        _check_rows("proportional", self.rows)
        if not 0 <= self.per_position < float("inf"):
            raise ValueError(f"proportional per_position is {self.per_position} but must be a number from 0 up")

    def init(self, requests):
        return ()

    def allowed(self, memory, context, candidates):
        share = jnp.floor(context.astype(jnp.float32) * self.per_position)
        return jnp.minimum(share, self.rows).astype(jnp.int32)

    def update(self, memory, staged, useful):
        return memory


@dataclasses.dataclass(frozen=True)
class Budgeted:
    """One budget for the batch, dealt to the requests whose candidates have lately been needed most.

    Each request's hit share among its staged rows is a moving average (coefficient `keep` on the old value, 1 before
    anything was staged). A copied row is worth that share, every row costs the same, so the best deal under one budget
    is: in order of falling share (ties: lower request), all candidates, until the budget is spent.
    """

    budget: int = 512
    rows: int = 512
    keep: float = 0.9

    def __post_init__(self):
        _check_rows("budgeted", self.rows)
        if self.budget < 0 or not 0 <= self.keep <= 1:
            raise ValueError(f"budgeted budget {self.budget} must not be negative, keep {self.keep} must lie in [0, 1]")

    def init(self, requests):
        return jnp.ones((requests,), jnp.float32)

    def allowed(self, memory, context, candidates):
        order = jnp.argsort(-memory, stable=True)
        wanted = jnp.minimum(candidates, self.rows)[order]
        before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
        given = jnp.clip(self.budget - before, 0, wanted)
        return jnp.zeros_like(candidates).at[order].set(given, unique_indices=True)

    def update(self, memory, staged, useful):
        share = useful.astype(jnp.float32) / jnp.maximum(staged, 1).astype(jnp.float32)
        return jnp.where(staged > 0, self.keep * memory + (1 - self.keep) * share, memory)


def _check_rows(name: str, rows: int) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ValueError(f"{name} rows is {rows!r} but must be a whole number from 0 up; 0 switches prefetch off")


CAPS = {"fixed": Fixed, "proportional": Proportional, "budgeted": Budgeted}
