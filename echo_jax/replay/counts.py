"""What is counted in one step of a replay, besides what moved.

Knows predictions, sets and sums. Moves nothing and decides nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.replay.rules import Choice, Facts, missed
from echo_jax.replay.settings import Plan
from echo_jax.stats import Moved
from echo_jax.types import NO_POSITION


class Record(NamedTuple):
    """One step of every setting. Sums are over the batch."""

    moved: Moved  # i32[Z] each
    reselected: jax.Array  # i32[Z]  missing rows that lost their slot at most RESELECT_WINDOW steps ago
    candidates: jax.Array  # i32[Z]  old positions above the threshold, resident or not
    missed: jax.Array  # i32[Z]  rows of the exact set that were not attended
    deferred: jax.Array  # i32[Z]  requests that the rule held back
    predictions: jax.Array  # i32[Z]  finite predictions of finite k-th scores
    above: jax.Array  # i32[Z]  of which above the k-th score
    below_floor: jax.Array  # i32[Z]  of which below what the trace's band knows: candidates are undercounted
    error: jax.Array  # f32[Z]  sum of prediction - k-th score
    absolute_error: jax.Array  # f32[Z]
    relative_error: jax.Array  # f32[Z]  sum of |prediction - k-th score| / |k-th score|
    rank_error: jax.Array  # f32[Z]  sum of |candidates / K - 1|: how many places off, whatever the scores' scale
    predicted: jax.Array  # f32[Z]  of request 0


class SharedRecord(NamedTuple):
    """What is the same for every setting."""

    positions: jax.Array  # i32[]  visible positions of all queries: what the indexer scores
    queries: jax.Array  # i32[]
    predictable: jax.Array  # i32[]  queries that see more than K positions, in a layer that predicts
    exact: jax.Array  # i32[]  rows of the exact sets
    nan_scores: jax.Array  # i32[]  visible scores that are NaN
    kth_score: jax.Array  # f32[]  of request 0


def shared_record(plan: Plan, facts: Facts) -> SharedRecord:
    """What the step asked of everybody."""
    sees = jnp.arange(plan.positions, dtype=jnp.int32)[None] < facts.visible[:, None]
    return SharedRecord(
        positions=jnp.sum(facts.visible, dtype=jnp.int32),
        queries=jnp.sum(facts.scores.active, dtype=jnp.int32),
        predictable=jnp.sum((facts.visible > plan.top_k) & (plan.kind == "full"), dtype=jnp.int32),
        exact=jnp.sum(facts.exact != NO_POSITION, dtype=jnp.int32),
        nan_scores=jnp.sum(jnp.isnan(facts.scores.score) & sees, dtype=jnp.int32),
        kth_score=facts.kth_score[0],
    )


def record(
    plan: Plan,
    facts: Facts,
    predicted: jax.Array,
    is_old: jax.Array,
    moved: Moved,
    reselected: jax.Array,
    choice: Choice,
) -> Record:
    """What the settings of a group did: predicted f32[Z, R], is_old bool[R, P] of the requests that took part."""
    scores, count = facts.scores, predicted.shape[0]
    kth = facts.kth_score[None]
    counts = jnp.isfinite(predicted) & jnp.isfinite(kth) & (facts.visible > plan.top_k)[None]
    if plan.kind != "full":  # a shared layer predicts nothing
        counts = jnp.zeros_like(counts)
    error = jnp.where(counts, predicted - kth, 0.0)
    relative = jnp.where(counts, jnp.abs(error) / jnp.maximum(jnp.abs(kth), jnp.finfo(jnp.float32).tiny), 0.0)
    candidates = (scores.score[None] > predicted[..., None]) & is_old[None] & (plan.kind == "full")

    ranks = jnp.sum(candidates, axis=2, dtype=jnp.int32).astype(jnp.float32)

    lost = jnp.sum(jnp.where(choice.runs, missed(facts, choice), 0), dtype=jnp.int32)
    deferred = jnp.sum(scores.active & ~choice.runs, dtype=jnp.int32)

    def total(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, axis=tuple(range(1, mask.ndim)), dtype=jnp.int32)

    return Record(
        moved=moved,
        reselected=reselected,
        candidates=total(candidates),
        missed=jnp.broadcast_to(lost, (count,)),
        deferred=jnp.broadcast_to(deferred, (count,)),
        predictions=total(counts),
        above=total(counts & (predicted > kth)),
        below_floor=total(counts & (predicted < scores.floor[None])),
        error=jnp.sum(error, axis=1),
        absolute_error=jnp.sum(jnp.abs(error), axis=1),
        relative_error=jnp.sum(relative, axis=1),
        rank_error=jnp.sum(jnp.where(counts, jnp.abs(ranks / plan.top_k - 1), 0.0), axis=1),
        predicted=predicted[:, 0],
    )
