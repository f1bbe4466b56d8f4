"""How local a trace is: overlap of selected sets, misses of an LRU cache, candidates above a predicted threshold.

Knows sets and scores of one row at a time. Knows no pool: misses are computed from how recently rows were selected, for
every size at once, as if a row had its slots to itself. `replay` runs the real pool, shared, with every policy.

Definitions, over the steps after the first quarter and over rows that see more than K positions:

- overlap: share of a step's set that was in the step before's.
- LRU miss at m K slots: share of a step's set that is not among the m K positions selected (or written) most recently.
  The cache is empty when counting begins, so the first counted step misses entirely; `first_use` says how much of the
  misses is of that kind, a position's first use since then. Of positions last used in the same step only some may still
  have a slot: each counts as the share of them that has. A position is never missed in the step that writes it.
- candidates: positions scoring above the average (EMA, alpha 0.5) of the k-th scores before, per K.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import indexer, threshold
from echo_jax.models.config import FULL
from echo_jax.traces import ScoreSource, StepScores, Trace, TraceInfo
from echo_jax.types import NO_POSITION

MULTIPLES = (1, 2, 4, 8, 16)
"""Slots per row, in units of K."""

DROPPED = 0.25
PREDICTOR = threshold.Ema(0.5)


@dataclasses.dataclass(frozen=True)
class Locality:
    """The statistics of one layer, or of several together. Rates are shares of 1; NaN where nothing was counted."""

    counted: int  # steps times rows
    overlap: float
    lru_miss: dict[int, float]  # by slots, in units of K
    first_use: float
    candidates: tuple[float, float, float]  # per K: 10th, 50th and 90th percentile
    kth_score: float  # mean
    kth_deviation: float  # of the k-th score, over steps and rows
    kth_error: float  # prediction less truth: mean
    kth_error_deviation: float  # and its root mean square
    below_band: float  # share of steps whose prediction lies below the band: their candidates are a lower bound
    nan_scores: int  # visible, in all steps


class _Counted(NamedTuple):
    """One step of every row."""

    is_counted: jax.Array  # bool[R]
    has_previous: jax.Array  # bool[R]  and the step before can be compared with
    overlap: jax.Array  # f32[R]
    misses: jax.Array  # f32[R, M]
    first_use: jax.Array  # f32[R]
    candidates: jax.Array  # f32[R]
    kth_score: jax.Array  # f32[R]
    predicted: jax.Array  # f32[R]
    is_below_band: jax.Array  # bool[R]
    nan_scores: jax.Array  # i32[R]


class _Memory(NamedTuple):
    was_selected: jax.Array  # bool[R, P]  in the step before
    is_comparable: jax.Array  # bool[R]  there was one, of the same request, with more than K positions
    last_use: jax.Array  # i32[R, P]  step of last use, -1 for none
    used_in: jax.Array  # i32[R, T]  how many positions were last used in each step
    average: Any  # the predictor's memory, one per row


def describe(trace: Trace, multiples: tuple[int, ...] = MULTIPLES) -> dict[int, Locality]:
    """The statistics of every layer that scores; one compilation serves all."""
    info = trace.info
    scoring = [layer for layer, kind in enumerate(info.layer_kinds) if kind == FULL]
    return {layer: describe_layer(trace.layer(layer), info, multiples) for layer in scoring}


def describe_layer(source: ScoreSource, info: TraceInfo, multiples: tuple[int, ...] = MULTIPLES) -> Locality:
    """The statistics of one layer's steps, with LRU misses at so many times K slots a row."""
    first = int(info.steps * DROPPED)
    counted = _measure(source, info.top_k, info.steps, first, multiples)
    return _summary(jax.tree.map(np.asarray, counted), multiples)


def _summary(counted: Any, multiples: tuple[int, ...]) -> Locality:
    """Means and percentiles of a _Counted of NumPy arrays."""
    kept = counted.is_counted
    paired = kept & counted.has_previous
    known = kept & np.isfinite(counted.predicted) & ~np.isnan(counted.kth_score)
    error = (counted.predicted - counted.kth_score)[known]
    percentiles = np.percentile(counted.candidates[known], (10, 50, 90)) if known.any() else [np.nan] * 3
    misses = [_mean(counted.misses[..., number][kept]) for number in range(len(multiples))]
    return Locality(
        counted=int(kept.sum()),
        overlap=_mean(counted.overlap[paired]),
        lru_miss=dict(zip(multiples, misses, strict=True)),
        first_use=_mean(counted.first_use[kept]),
        candidates=(float(percentiles[0]), float(percentiles[1]), float(percentiles[2])),
        kth_score=_mean(counted.kth_score[known]),
        kth_deviation=float(np.std(counted.kth_score[known])) if known.any() else float("nan"),
        kth_error=_mean(error),
        kth_error_deviation=_mean(error**2) ** 0.5,
        below_band=_mean(counted.is_below_band[known]),
        nan_scores=int(counted.nan_scores.sum()),
    )


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if values.size else float("nan")


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _measure(source: ScoreSource, top_k: int, steps: int, first: int, multiples: tuple[int, ...]) -> _Counted:
    """[T, R, ...] of every step; counting begins with step `first`."""
    carry = source.init()
    shape = jax.eval_shape(lambda: source.step(carry, jnp.int32(0))[1].score).shape
    memory = _Memory(
        was_selected=jnp.zeros(shape, bool),
        is_comparable=jnp.zeros(shape[:1], bool),
        last_use=jnp.full(shape, -1, jnp.int32),
        used_in=jnp.zeros((shape[0], steps), jnp.int32),
        average=threshold.initial(PREDICTOR, shape[0]),
    )

    def one(carry, t):
        scores, memory = carry
        scores, step = source.step(scores, t)
        memory, counted = _count(memory, step, t, top_k, t >= first, multiples)
        return (scores, memory), counted

    return lax.scan(one, (carry, memory), jnp.arange(steps, dtype=jnp.int32))[1]


def _count(
    memory: _Memory, step: StepScores, t: jax.Array, top_k: int, has_begun: jax.Array, multiples: tuple[int, ...]
) -> tuple[_Memory, _Counted]:
    rows, capacity = step.score.shape
    memory = _forget(memory, step.starts)
    at_row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    positions = jnp.arange(capacity, dtype=jnp.int32)[None]
    is_large = step.visible > top_k
    is_counting = step.active & has_begun

    if step.selected is None or step.kth_score is None:
        chosen = indexer.select(step.score, step.visible, top_k)
        selected, kth_score = chosen.positions, chosen.kth_score
    else:
        selected, kth_score = step.selected, step.kth_score
    is_listed = selected != NO_POSITION
    listed = jnp.maximum(jnp.sum(is_listed, axis=1), 1).astype(jnp.float32)
    at = jnp.where(is_listed, selected, capacity)
    is_selected = jnp.zeros((rows, capacity), bool).at[at_row, at].set(True, mode="drop")

    slots = top_k * jnp.asarray(multiples, jnp.float32)
    missed, first_use = _missed(memory, selected, is_listed & (selected != step.length[:, None]), slots)
    predicted = threshold.predict(PREDICTOR, memory.average, rows)
    is_old = positions < step.length[:, None]
    counted = _Counted(
        is_counted=is_counting & is_large,
        has_previous=memory.is_comparable,
        overlap=jnp.sum(is_selected & memory.was_selected, axis=1).astype(jnp.float32) / listed,
        misses=missed / listed[:, None],
        first_use=first_use / listed,
        candidates=jnp.sum((step.score > predicted[:, None]) & is_old, axis=1).astype(jnp.float32) / top_k,
        kth_score=kth_score,
        predicted=predicted,
        is_below_band=predicted < step.floor,
        nan_scores=jnp.sum(jnp.isnan(step.score) & (positions < step.visible[:, None]), axis=1, dtype=jnp.int32),
    )

    memory = _use(memory, step, selected, is_selected, is_counting, t)
    average = threshold.observe(PREDICTOR, memory.average, kth_score[:, None], is_large[:, None])
    return memory._replace(was_selected=is_selected, is_comparable=is_large, average=average), counted


def _forget(memory: _Memory, starts: jax.Array) -> _Memory:
    """A new request knows nothing of the row's last one."""

    def cleared(values, empty):
        return jnp.where(starts.reshape(-1, *[1] * (values.ndim - 1)), jnp.asarray(empty, values.dtype), values)

    return _Memory(
        was_selected=memory.was_selected,
        is_comparable=memory.is_comparable & ~starts,
        last_use=cleared(memory.last_use, -1),
        used_in=cleared(memory.used_in, 0),
        average=jax.tree.map(cleared, memory.average, PREDICTOR.init()),
    )


def _missed(memory: _Memory, selected, may_miss, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[R, M]: how many of the selected positions i32[R, K] (those that may miss) have none of so many slots f32[M];
    f32[R]: how many of them were never used."""
    last = jnp.take_along_axis(memory.last_use, jnp.maximum(selected, 0), axis=1)
    newer = lax.cumsum(memory.used_in, axis=1, reverse=True) - memory.used_in  # positions used after each step
    group = jnp.take_along_axis(memory.used_in, jnp.maximum(last, 0), axis=1).astype(jnp.float32)
    newer = jnp.take_along_axis(newer, jnp.maximum(last, 0), axis=1).astype(jnp.float32)
    has_slot = jnp.clip((slots[None, :, None] - newer[:, None]) / jnp.maximum(group, 1)[:, None], 0, 1)
    missed = jnp.where(last[:, None] < 0, 1.0, 1.0 - has_slot)
    missed = jnp.sum(jnp.where(may_miss[:, None], missed, 0.0), axis=2)
    return missed, jnp.sum(may_miss & (last < 0), axis=1).astype(jnp.float32)


def _use(memory: _Memory, step: StepScores, selected, is_selected, is_counting, t: jax.Array) -> _Memory:
    """The selected positions and the one written have been used in step t."""
    at_row = jnp.arange(selected.shape[0], dtype=jnp.int32)[:, None]
    own = step.length[:, None]
    is_own_listed = jnp.take_along_axis(is_selected, own, axis=1)
    used = jnp.concatenate([selected, jnp.where(is_own_listed, NO_POSITION, own)], axis=1)
    used = jnp.where(is_counting[:, None], used, NO_POSITION)
    is_used = used != NO_POSITION
    last = jnp.take_along_axis(memory.last_use, jnp.maximum(used, 0), axis=1)
    leaves = jnp.where(is_used & (last >= 0), last, memory.used_in.shape[1])
    used_in = memory.used_in.at[at_row, leaves].add(-1, mode="drop")
    used_in = used_in.at[:, t].add(jnp.sum(is_used, axis=1, dtype=jnp.int32))
    at = jnp.where(is_used, used, memory.last_use.shape[1])
    return memory._replace(last_use=memory.last_use.at[at_row, at].set(t, mode="drop"), used_in=used_in)
