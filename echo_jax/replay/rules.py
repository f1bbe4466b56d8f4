"""Selection rules: which rows a system attends, and which it fetches ahead without a threshold.

ECHO's rule is `Exact`: the exact top-k is attended, and a threshold decides what is copied ahead. Other systems are
other rules over the same steps (`rivals`). Knows one step of one layer; knows no pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from echo_jax import indexer
from echo_jax.traces import StepScores
from echo_jax.types import NO_POSITION

INDEXER, LAYER = "indexer", "layer"
"""What a system's early copies have time to hide behind: this layer's scoring, or one whole layer."""


class Facts(NamedTuple):
    """One step of one layer, as every rule and policy of a replay sees it."""

    scores: StepScores
    step: jax.Array  # i32[]
    visible: jax.Array  # i32[R]  0 where there is no query
    exact: jax.Array  # i32[R, K]  the exact top-k, ascending, then NO_POSITION
    kth_score: jax.Array  # f32[R]
    is_exact: jax.Array  # bool[R, P]  the same set as a mask


def facts_of(scores: StepScores, step: jax.Array, top_k: int) -> Facts:
    """The exact top-k of a step, as its scores carry it or as the decoder would find it."""
    requests, positions = scores.score.shape
    if scores.selected is not None and scores.kth_score is not None:
        exact, kth_score = scores.selected, scores.kth_score
    else:
        exact, kth_score = indexer.select(scores.score, scores.visible, top_k)
    if (missing := top_k - exact.shape[1]) > 0:  # a capacity below K lists fewer
        exact = jnp.pad(exact, ((0, 0), (0, missing)), constant_values=NO_POSITION)
    outside = jnp.where(exact == NO_POSITION, positions, exact)
    rows = jnp.arange(requests, dtype=jnp.int32)[:, None]
    is_exact = jnp.zeros((requests, positions), bool).at[rows, outside].set(True, mode="drop")
    return Facts(scores, step, scores.visible, exact, kth_score, is_exact)


class Choice(NamedTuple):
    """What a rule does with a step."""

    attended: jax.Array  # i32[R, A]  positions that must be resident, each once, then or between NO_POSITION
    ahead: jax.Array | None  # i32[R, E]  positions fetched ahead, those that are absent; None: the threshold decides
    runs: jax.Array  # bool[R]  the request takes part in this step
    warm: jax.Array | None = None  # i32[R, W, A]  where a request starts: W lists made resident before it, uncounted


def missed(facts: Facts, choice: Choice) -> jax.Array:
    """i32[R]: how many of the exact set are not attended."""
    if choice.attended is facts.exact:
        return jnp.zeros(facts.exact.shape[:1], jnp.int32)
    at = jnp.where(choice.attended == NO_POSITION, 0, choice.attended)
    kept = jnp.take_along_axis(facts.is_exact, at, axis=1) & (choice.attended != NO_POSITION)
    wanted = jnp.sum(facts.exact != NO_POSITION, axis=1, dtype=jnp.int32)
    return wanted - jnp.sum(kept, axis=1, dtype=jnp.int32)


class Rule(Protocol):
    """A system's way of selecting. A frozen dataclass, static in a compiled replay."""

    hides_behind: ClassVar[str]  # INDEXER or LAYER

    def init(self, requests: int, positions: int, top_k: int) -> Any:
        """Memory before the first step."""
        ...

    def choose(self, memory: Any, facts: Facts) -> tuple[Any, Choice]:
        """The choice of one step. Traced; what the trace lacks is None in `facts.scores` already when tracing."""
        ...


@dataclasses.dataclass(frozen=True)
class Exact:
    """Attend the exact top-k; the threshold policy decides what is copied ahead. ECHO."""

    hides_behind: ClassVar[str] = INDEXER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        return memory, Choice(facts.exact, None, facts.scores.active)
