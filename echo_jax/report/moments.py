"""What one request's cache did in single steps of a trace, row by row: material for a page that steps through them.

Runs the decoder's own functions, as a replay does, on a pool that one request has to itself: `threshold` predicts,
`recall.prefetch_candidates` stages, `indexer.select` selects where the trace does not say, `recall.plan` gives slots.
Where a replay counts, this keeps who it was. Knows no page.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import indexer, pool, recall, threshold
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.models.config import FULL
from echo_jax.recall import StepView
from echo_jax.traces import StepScores, Trace, TraceInfo
from echo_jax.types import NO_POSITION, NO_ROW, PAGE, SlotMaps, ThresholdPolicy

DRAWN = 3
"""Scores that a moment keeps, in units of K, the best ones; those of rows that something happened to come on top."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """One step of one layer. Positions are ascending; one request has the pool, so that a host row is a position."""

    layer: int
    step: int
    length: int  # positions written before this step: the new token's own
    threshold: float  # what the k-th score was predicted to be; inf without history
    kth_score: float  # what it was; NaN where nothing was selected
    next_threshold: float  # the prediction for the next step
    refused: int  # candidates that found no room in staging
    positions: np.ndarray  # i32[N] those whose scores are kept
    scores: np.ndarray  # f32[N]; NaN where the trace does not know it
    was_resident: np.ndarray  # i32 older positions with a slot before this step
    staged: np.ndarray  # i32 copied ahead
    selected: np.ndarray  # i32 the exact top-k, the new token among them if it is
    hits: np.ndarray  # i32 selected, and had a slot
    useful: np.ndarray  # i32 selected, missing, and staged
    recalled: np.ndarray  # i32 selected, missing, and copied when asked for
    evicted: np.ndarray  # i32 lost their slot
    before: np.ndarray  # i32[N_G] the position in each slot, or NO_POSITION
    after: np.ndarray  # i32[N_G] the same after the step


class _State(NamedTuple):
    maps: SlotMaps
    memory: Any  # the threshold policy's, of one seat


class _Seen(NamedTuple):
    scores: StepScores
    selected: jax.Array
    kth_score: jax.Array
    predicted: jax.Array
    next_predicted: jax.Array
    staged: jax.Array
    refused: jax.Array
    before: jax.Array
    after: jax.Array


def pool_config(
    info: TraceInfo, layers: Sequence[int], steps: Sequence[int], slots: int, policy: ThresholdPolicy, staging: int
) -> CacheConfig:
    """The configuration of one request's pool, evicting by LRU; formats are of no consequence, since no record moves.

    ValueError for a layer that does not score, a step that is not there, and a pool that is too small.
    """
    if wrong := [layer for layer in layers if not 0 <= layer < info.layers or info.layer_kinds[layer] != FULL]:
        raise ValueError(
            f"layer {wrong[0]} is none that scores; the trace's are "
            f"{[layer for layer, kind in enumerate(info.layer_kinds) if kind == FULL]}"
        )
    if wrong := [step for step in steps if not 0 <= step < info.steps]:
        raise ValueError(f"step {wrong[0]} is not one of the trace's, 0..{info.steps - 1}")
    host_rows = -(-info.capacity // PAGE) * PAGE
    return CacheConfig(
        layer_kinds=(FULL,),
        records=RecordFormat("bf16", 512, 64),
        keys=KeyFormat("fp8", 128),
        threshold=policy,
        eviction=Lru(),
        seats=1,
        capacity=host_rows,
        host_rows=host_rows,
        device_slots=slots,
        top_k=info.top_k,
        staging=staging,
    )


def moments(trace: Trace, config: CacheConfig, layer: int, steps: Sequence[int], request: int = 0) -> list[Moment]:
    """The moments of those steps, after all steps before them; none of a step in which the request has no query."""
    source = trace.layer(layer)
    stream = source.init()
    state = _State(pool.initial(config.host_rows, config.device_slots), threshold.initial(config.threshold, 1))
    found = []
    for t in range(max(steps) + 1):
        stream, state, seen = _step(config, request, source, stream, state, jnp.int32(t))
        if t in steps:
            kept: Any = jax.tree.map(np.asarray, seen)
            if kept.scores.active[0]:
                found.append(_moment(layer, t, config.top_k, kept))
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(config: CacheConfig, request: int, source, stream, state: _State, t: jax.Array):
    """One step in the order of the paper: score, predict and stage, select, require, observe."""
    stream, scores = source.step(stream, t)
    scores = jax.tree.map(lambda leaf: leaf[request : request + 1], scores)
    state = _begin(config, state, scores)

    capacity = scores.score.shape[1]
    rows = jnp.arange(capacity, dtype=jnp.int32)[None]
    new_row = jnp.where(scores.active & (scores.length < capacity), scores.length, NO_ROW)[:, None]
    view = StepView(rows, scores.length, scores.length[:, None], new_row, scores.visible[:, None], t)

    predicted = threshold.predict(config.threshold, state.memory, 1)
    is_absent = (rows < scores.length[:, None]) & scores.active[:, None] & (pool.lookup(state.maps, rows) < 0)
    cap = jnp.full((1,), config.staging, jnp.int32)
    staged, refused = recall.prefetch_candidates(scores.score[:, None], predicted, is_absent, cap, config.staging)

    if scores.selected is not None and scores.kth_score is not None:
        selected, kth_score = scores.selected, scores.kth_score
    else:
        selected, kth_score = indexer.select(scores.score, scores.visible, config.top_k)
        missing = config.top_k - selected.shape[1]
        selected = jnp.pad(selected, ((0, 0), (0, missing)), constant_values=NO_POSITION)
    selected = jnp.where(scores.active[:, None], selected, NO_POSITION)
    values = jnp.take_along_axis(scores.score, jnp.maximum(selected, 0), axis=1)
    values = jnp.where(selected == NO_POSITION, -jnp.inf, values)
    maps, _ = recall.plan(config, state.maps, view, selected[:, None], values[:, None], recall.rows_at(rows, staged))

    is_informative = (scores.visible > config.top_k)[:, None]
    memory = threshold.observe(config.threshold, state.memory, kth_score[:, None], is_informative)
    following = threshold.predict(config.threshold, memory, 1)
    seen = _Seen(scores, selected, kth_score, predicted, following, staged, refused, state.maps.host_of, maps.host_of)
    return stream, _State(maps, memory), seen


def _begin(config: CacheConfig, state: _State, scores: StepScores) -> _State:
    """A request that starts finds neither slots nor history of the one before it; one that ended leaves its slots."""
    fresh = threshold.initial(config.threshold, 1)
    memory = jax.tree.map(lambda old, new: jnp.where(scores.starts[0], new, old), state.memory, fresh)
    leaves = (scores.starts | ~scores.active)[0]
    dropped = jnp.broadcast_to(leaves, (config.host_rows,))
    return _State(pool.release(state.maps, dropped), memory)


def _moment(layer: int, step: int, top_k: int, seen: Any) -> Moment:
    score, length = seen.scores.score[0], int(seen.scores.length[0])
    selected, staged = _real(seen.selected[0]), _real(seen.staged[0])
    before, after = _real(seen.before), _real(seen.after)
    missing = np.setdiff1d(selected, before)
    missing = missing[missing != length]  # the new token's record is a value, not yet on the host
    evicted = np.setdiff1d(before, after)
    visible = score[: length + 1]
    order = np.argsort(-np.where(np.isnan(visible), -np.inf, visible), kind="stable")[: DRAWN * top_k]
    best = order[np.isfinite(visible[order])]
    positions = np.unique(np.concatenate([best, selected, staged, evicted]))
    known = np.where(np.isfinite(score[positions]), score[positions], np.nan)
    return Moment(
        layer=layer,
        step=step,
        length=length,
        threshold=float(seen.predicted[0]),
        kth_score=float(seen.kth_score[0]),
        next_threshold=float(seen.next_predicted[0]),
        refused=int(seen.refused[0]),
        positions=positions,
        scores=known,
        was_resident=before,
        staged=staged,
        selected=selected,
        hits=np.intersect1d(selected, before),
        useful=np.intersect1d(missing, staged),
        recalled=np.setdiff1d(missing, staged),
        evicted=evicted,
        before=seen.before,
        after=seen.after,
    )


def _real(positions: np.ndarray) -> np.ndarray:
    return np.sort(positions[positions != NO_POSITION])
