"""Movement: rows are copied ahead (a hint), and made resident before attention reads them (a promise).

`prefetch` may be wrong and cannot change an answer: it fills staging, never the pool. `require` is what makes an
answer possible: on return every selected row and every new row has a slot that holds its record.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from echo_jax import _ffi, hostmem, pool
from echo_jax.config import CacheConfig
from echo_jax.pool import Allocation
from echo_jax.stats import Moved
from echo_jax.types import NO_POSITION, NO_ROW, LayerState, SlotMaps, Staging


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
    is_absent = _is_absent(state.slots, view)
    found, refused = prefetch_candidates(score, threshold, is_absent, prefetch_cap(config, view), config.staging)
    return _stage(config, host_pool, layer, rows_at(view.rows, found), refused)


def prefetch_cap(config: CacheConfig, view: StepView) -> jax.Array:
    """i32[B]: most rows a seat may copy ahead, min(S, floor(c * context))."""
    allowed = jnp.floor(view.lengths.astype(jnp.float32) * config.prefetch_per_position)
    allowed = jnp.where(view.lengths > 0, jnp.minimum(allowed, config.staging), 0.0)  # 0 * inf is NaN
    return allowed.astype(jnp.int32)


def prefetch_candidates(
    score: jax.Array, threshold: jax.Array, is_absent: jax.Array, cap: jax.Array, staging: int
) -> tuple[jax.Array, jax.Array]:
    """Positions worth copying ahead, i32[B, S] ascending then NO_POSITION, and how many the cap refused, i32[B].

    score f32[B, T, P]: a position is a candidate if any of its seat's queries scores above threshold f32[B] and
    is_absent bool[B, P] (written before this step, and not resident). The lowest cap i32[B] <= S positions win.
    """
    return _lowest(jnp.any(score > threshold[:, None, None], axis=1) & is_absent, cap, staging)


def read_ahead(
    config: CacheConfig,
    layers: Mapping[int, LayerState],
    host_pool: jax.Array,
    view: StepView,
    selected: jax.Array,
    after: jax.Array | int = 0,
) -> dict[int, Staging]:
    """Copies rows that will certainly be selected: the set of the layers that share a list is known from the full layer
    before them (`CacheConfig.sharers_of`), so what each misses, by its number, can cross the link until it is needed.

    selected i32[B, T, K] is ascending for each query, then NO_POSITION, as a `Selection` is. Only rows written before
    this step and not resident in that layer, each once; at most S of a seat, the lowest positions first.

    The copies wait for `after`, a count i32[] of what should cross the link first: the rows that the full layer itself
    recalls, which somebody waits for. (Where jnp keeps the maps that count is there before those rows are.) They run
    beside what follows if the graph may (`config.COMPILER_OPTIONS`). One call for all layers, for which the first of
    them waits: one each XLA would put where it is needed, into memory that others must have done with.
    """
    seats, capacity = view.rows.shape
    if config.staging == 0 or not layers:
        return dict.fromkeys(layers, no_staging(config, seats))
    # By the list, not by position: K entries of a query where a context has a hundred thousand.
    listed = jnp.where(selected == NO_POSITION, capacity, selected).reshape(seats, -1)
    if selected.shape[1] > 1:  # each query's list is in order, and several may hold a position
        listed = jnp.sort(listed, axis=1)
        is_repeated = jnp.pad(listed[:, 1:] == listed[:, :-1], ((0, 0), (1, 0)))
        listed = jnp.where(is_repeated, capacity, listed)
    positions = jnp.where(listed >= view.lengths[:, None], NO_POSITION, listed)
    rows = rows_at(view.rows, positions)
    maps = [state.slots for state in layers.values() if state.slots is not None]
    assert len(maps) == len(layers)
    is_absent = (rows != NO_ROW)[None] & (jnp.stack([pool.lookup(each, rows) for each in maps]) < 0)  # [G, B, M]
    # Each to its place: of lists so short a scatter is one kernel, where the search of `_lowest` is a dozen.
    running = jnp.cumsum(is_absent, axis=-1, dtype=jnp.int32)
    place = jnp.where(is_absent, running - 1, config.staging)  # one past the end: dropped
    staged = jnp.full((*place.shape[:2], config.staging), NO_ROW, jnp.int32)
    of_layer, of_seat = jnp.ogrid[: place.shape[0], :seats]
    staged = staged.at[of_layer[..., None], of_seat[..., None], place].set(rows[None], mode="drop")
    refused = jnp.maximum(running[..., -1] - config.staging, 0)
    # All at once: sums of what was staged would come first, and what the full layer does next would wait for them.
    numbers = np.asarray([*layers], np.int32) + jnp.minimum(after, 0)  # no count is negative, but XLA cannot know that
    together = jax.lax.optimization_barrier(_stage(config, host_pool, numbers, staged, refused))
    # Each of the three arrays is cut by layer.
    return {number: Staging(*each) for number, *each in zip(layers, *together, strict=True)}


def _is_absent(maps: SlotMaps, view: StepView) -> jax.Array:
    """bool[B, P]: written before this step, and not resident."""
    positions = jnp.arange(view.rows.shape[1], dtype=jnp.int32)
    is_old = (positions[None] < view.lengths[:, None]) & (view.rows != NO_ROW)
    return is_old & (pool.lookup(maps, view.rows) < 0)


def _lowest(mask: jax.Array, cap: jax.Array, staging: int) -> tuple[jax.Array, jax.Array]:
    """i32[B, S]: the lowest positions where mask bool[B, P] is set, cap i32[B] <= S at most; i32[B]: how many more."""
    running = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    ranks = jnp.arange(staging, dtype=jnp.int32)
    # Unrolled: a loop would leave the captured graph of a GPU.
    search = functools.partial(jnp.searchsorted, method="scan_unrolled")
    found = jax.vmap(lambda count: search(count, ranks + 1).astype(jnp.int32))(running)
    total = running[:, -1]
    taken = jnp.minimum(total, cap)
    return jnp.where(ranks[None] < taken[:, None], found, NO_POSITION), total - taken


def _stage(config: CacheConfig, host_pool, layer, rows: jax.Array, refused: jax.Array) -> Staging:
    read: Any = hostmem.read_rows
    if config.prefetch_implementation == "second_stream":
        # Given no jitted function, for whose calls XLA finds no stream. A CPU has none, and computes in turn.
        read = compute_on(read, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)
    records = read(host_pool, layer, rows.reshape(*layer.shape, -1))
    return Staging(rows, records.reshape(*rows.shape, *config.records.shape), refused)


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
    given = new_records.reshape(-1, *config.records.shape), staging.records.reshape(-1, *config.records.shape)
    if pool.is_by_library(config.slot_manager) and hostmem.uses_library(host_pool):
        required = _by_one_call(
            config, state, host_pool, layer, view, selected, selected_scores, staging.rows.reshape(-1), *given
        )
    else:
        maps, made = plan(config, state.slots, view, selected, selected_scores, staging.rows)
        fills = made.fills
        lists = fills.count, fills.rows, fills.slots, fills.source
        records = hostmem.recall(state.records, host_pool, layer, *lists, *given)
        slots = made.slots.reshape(view.new_rows.shape[0], -1)[:, view.new_rows.shape[1] :]
        required = _Required(maps, records, slots, made.hits, made.useful, made.recalled, made.written, made.evicted)
    moved = Moved(
        hits=required.hits,
        useful=required.useful,
        recalled=required.recalled,
        staged=jnp.sum(staging.rows != NO_ROW, dtype=jnp.int32),
        refused=jnp.sum(staging.refused, dtype=jnp.int32),
        evicted=required.evicted,
        written=required.written,
    )
    slots = required.slots.reshape(selected.shape)
    return state.replace(slots=required.maps, records=required.records), slots, moved


class _Wanted(NamedTuple):
    """What `pool.allocate` is asked for: a seat's list is its T new rows, then the rows it selected in order."""

    rows: jax.Array  # i32[B * (T + T * K)]
    priority: jax.Array  # i32[B * (T + T * K)], or i32[] for all
    sizes: dict[str, int]


class _Required(NamedTuple):
    """What `require` comes to, whoever did it."""

    maps: SlotMaps
    records: jax.Array
    slots: jax.Array  # i32[B, T * K]  of the selected rows
    hits: jax.Array
    useful: jax.Array
    recalled: jax.Array
    written: jax.Array
    evicted: jax.Array


def _wanted(config: CacheConfig, maps: SlotMaps, view: StepView, selected, selected_scores) -> _Wanted:
    seats, count = view.new_rows.shape
    wanted = jnp.concatenate([view.new_rows, rows_at(view.rows, selected.reshape(seats, -1))], axis=1)
    scores = jnp.concatenate([jnp.full((seats, count), -jnp.inf), selected_scores.reshape(seats, -1)], axis=1)
    rows = wanted.reshape(-1)
    priority = config.eviction.touch(*pool.before_touch(maps, rows), view.step, scores.reshape(-1))
    return _Wanted(rows, priority, {"per_seat": wanted.shape[1], "new_per_seat": count})


def _by_one_call(
    config: CacheConfig,
    state: LayerState,
    host_pool,
    layer,
    view: StepView,
    selected,
    selected_scores,
    staged_rows,
    new,
    staged,
) -> _Required:
    """Where the library keeps the maps and moves the records, it does both at once: on a GPU one launch less, and the
    lists of what to fill never leave the block that made them. It takes the rows from the table itself; what is wanted
    is listed here for the policies whose priorities depend on it, and by XLA for no other."""
    assert state.slots is not None
    wanted = _wanted(config, state.slots, view, selected, selected_scores)
    results = _ffi.require(
        pool.leaves(state.slots),
        view.rows,
        view.new_rows,
        selected.reshape(selected.shape[0], -1),
        jnp.atleast_1d(wanted.priority),
        staged_rows,
        state.records,
        host_pool,
        layer,
        new,
        staged,
    )
    slot_of, host_of, priority, free, records, slots, _, hits, useful, recalled, written, evicted = results
    maps = SlotMaps(slot_of=slot_of, host_of=host_of, priority=priority, free=free)
    return _Required(maps, records, slots, hits, useful, recalled, written, evicted)


def plan(
    config: CacheConfig,
    maps: SlotMaps,
    view: StepView,
    selected: jax.Array,
    selected_scores: jax.Array,
    staged_rows: jax.Array,
) -> tuple[SlotMaps, Allocation]:
    """The integer half of `require`: who gets which slot and what each is filled from. Moves no record.

    selected i32[B, T, K] positions with their scores f32[B, T, K]; staged_rows i32[B, S]. A seat's list is its T new
    rows, then the rows it selected in order; `Allocation.slots` has its shape, i32[B * (T + T * K)].
    """
    wanted = _wanted(config, maps, view, selected, selected_scores)
    return pool.allocate(
        maps,
        wanted.rows,
        wanted.priority,
        staged_rows.reshape(-1),
        **wanted.sizes,
        implementation=config.slot_manager,
    )


def rows_at(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Host rows of positions i32[B, M]; NO_ROW for NO_POSITION."""
    found = jnp.take_along_axis(rows, jnp.maximum(positions, 0), axis=1)
    return jnp.where(positions == NO_POSITION, NO_ROW, found)
