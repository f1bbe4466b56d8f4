"""Movement: rows are copied ahead (a hint), and made resident before attention reads them (a promise).

`prefetch` may be wrong and cannot change an answer: it fills staging, never the pool. `require` is what makes an
answer possible: on return every selected row and every new row has a slot that holds its record.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax import hostmem, pool
from echo_jax.config import CacheConfig
from echo_jax.stats import Moved
from echo_jax.types import NO_POSITION, NO_ROW, LayerState, Staging


class StepView(NamedTuple):
    """What every layer of one step sees of the tables. Made once per step."""

    rows: jax.Array  # i32[B, P]  host row of every position, or NO_ROW
    lengths: jax.Array  # i32[B]  positions written before this step
    positions: jax.Array  # i32[B, T]  of the new tokens
    new_rows: jax.Array  # i32[B, T]  their host rows; NO_ROW where the seat is idle or full
    visible: jax.Array  # i32[B, T]  positions each query sees, itself included; 0 where there is no query
    step: jax.Array  # i32[]


def no_staging(config: CacheConfig, seats: int) -> Staging:
    """Nothing was copied ahead; no place was even set aside."""
    return Staging(
        rows=jnp.full((seats, 0), NO_ROW, jnp.int32),
        records=jnp.zeros((seats, 0, *config.records.shape), config.records.dtype),
        refused=jnp.zeros((seats,), jnp.int32),
    )


def prefetch(
    config: CacheConfig,
    state: LayerState,
    host_pool: jax.Array,
    layer: jax.Array,
    view: StepView,
    score: jax.Array,
    threshold: jax.Array,
) -> Staging:
    """Copies rows that will probably be selected: those scoring above threshold f32[B] in score f32[B, T, P].

    Only rows written before this step and not resident; at most min(S, floor(c * context)) of a seat.
    """
    assert state.slots is not None
    if config.staging == 0:
        return no_staging(config, view.rows.shape[0])
    positions = jnp.arange(view.rows.shape[1], dtype=jnp.int32)
    is_old = (positions[None] < view.lengths[:, None]) & (view.rows != NO_ROW)
    is_absent = is_old & (pool.lookup(state.slots, view.rows) < 0)
    allowed = jnp.floor(view.lengths.astype(jnp.float32) * config.prefetch_per_position)
    allowed = jnp.where(view.lengths > 0, jnp.minimum(allowed, config.staging), 0.0)  # 0 * inf is NaN
    found, refused = prefetch_candidates(score, threshold, is_absent, allowed.astype(jnp.int32), config.staging)
    rows = rows_at(view.rows, found)
    records = hostmem.read_rows(host_pool, layer, rows.reshape(-1))
    return Staging(rows, records.reshape(*rows.shape, *config.records.shape), refused)


def prefetch_candidates(
    score: jax.Array, threshold: jax.Array, is_absent: jax.Array, cap: jax.Array, staging: int
) -> tuple[jax.Array, jax.Array]:
    """Positions worth copying ahead, i32[B, S] ascending then NO_POSITION, and how many the cap refused, i32[B].

    score f32[B, T, P]: a position is a candidate if any of its seat's queries scores above threshold f32[B] and
    is_absent bool[B, P] (written before this step, and not resident). The lowest cap i32[B] <= S positions win.
    """
    passes = jnp.any(score > threshold[:, None, None], axis=1) & is_absent
    running = jnp.cumsum(passes, axis=-1, dtype=jnp.int32)
    ranks = jnp.arange(staging, dtype=jnp.int32)
    found = jax.vmap(lambda count: jnp.searchsorted(count, ranks + 1).astype(jnp.int32))(running)
    total = running[:, -1]
    taken = jnp.minimum(total, cap)
    return jnp.where(ranks[None] < taken[:, None], found, NO_POSITION), total - taken


def require(
    config: CacheConfig,
    state: LayerState,
    host_pool: jax.Array,
    layer: jax.Array,
    view: StepView,
    new_records: jax.Array,
    selected: jax.Array,
    selected_scores: jax.Array,
    staging: Staging,
) -> tuple[LayerState, jax.Array, Moved]:
    """Makes the step's new rows and selected rows resident; returns the slots of the latter, i32[B, T, K].

    new_records [B, T, *record], selected i32[B, T, K] positions with their scores f32[B, T, K]. Missing rows are filled
    from the new record, from staging where staged, from the host otherwise.
    """
    assert state.slots is not None
    seats, count = view.new_rows.shape
    selected_rows = rows_at(view.rows, selected.reshape(seats, -1))
    wanted = jnp.concatenate([view.new_rows, selected_rows], axis=1)  # a seat's list: new rows, then selected ones
    rows = wanted.reshape(-1)
    maps, allocation = pool.allocate(state.slots, rows)

    own = jnp.arange(seats * count, dtype=jnp.int32).reshape(seats, count)
    is_new = jnp.zeros(wanted.shape, bool).at[:, :count].set(view.new_rows != NO_ROW).reshape(-1)
    staged_at = _place_in(staging.rows.reshape(-1), rows)
    from_new = jnp.zeros(wanted.shape, jnp.int32).at[:, :count].set(own).reshape(-1)
    source = jnp.where(staged_at >= 0, staged_at + seats * count, hostmem.SOURCE_HOST)
    source = jnp.where(is_new, from_new, source)
    extra = jnp.concatenate([x.reshape(-1, *config.records.shape) for x in (new_records, staging.records)], axis=0)
    must_fill = allocation.is_filled | is_new
    records = hostmem.recall(
        state.records, host_pool, layer, rows, jnp.where(must_fill, allocation.slots, -1), source, extra
    )

    scores = jnp.concatenate([jnp.full((seats, count), -jnp.inf), selected_scores.reshape(seats, -1)], axis=1)
    priority = config.eviction.touch(*pool.before_touch(maps, allocation), view.step, scores.reshape(-1))
    maps = pool.touch(maps, allocation.slots, priority)

    is_miss = allocation.is_filled & ~is_new
    useful = jnp.sum(is_miss & (staged_at >= 0), dtype=jnp.int32)
    moved = Moved(
        hits=jnp.sum(allocation.was_used, dtype=jnp.int32),
        useful=useful,
        recalled=jnp.sum(is_miss, dtype=jnp.int32) - useful,
        staged=jnp.sum(staging.rows != NO_ROW, dtype=jnp.int32),
        refused=jnp.sum(staging.refused, dtype=jnp.int32),
        evicted=allocation.evicted,
        written=jnp.sum(is_new, dtype=jnp.int32),
    )
    slots = allocation.slots.reshape(wanted.shape)[:, count:].reshape(selected.shape)
    return state.replace(slots=maps, records=records), slots, moved


def rows_at(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Host rows of positions i32[B, M]; NO_ROW for NO_POSITION."""
    found = jnp.take_along_axis(rows, jnp.maximum(positions, 0), axis=1)
    return jnp.where(positions == NO_POSITION, NO_ROW, found)


def _place_in(staged: jax.Array, rows: jax.Array) -> jax.Array:
    """i32[M]: the first place of each row in staged i32[E], or -1; padding is nowhere."""
    if staged.shape[0] == 0:
        return jnp.full(rows.shape, -1, jnp.int32)
    order = jnp.argsort(staged, stable=True).astype(jnp.int32)
    ordered = staged[order]
    at = jnp.minimum(jnp.searchsorted(ordered, rows), staged.shape[0] - 1)
    return jnp.where((ordered[at] == rows) & (rows != NO_ROW), order[at], -1)
