"""A whole worker's state: made, opened for a step, closed after it, and changed between steps.

Requests come and go here: admitted with room for all they may grow to, forked, rolled back, released. Knows tables,
pools and the host pool. Knows no model and no token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import checks, eviction, hostmem, pool, tables, threshold
from echo_jax.config import CacheConfig
from echo_jax.recall import StepView
from echo_jax.types import NO_PAGE, NO_ROW, PAGE, EchoState, LayerState, ThresholdPolicy


def create(config: CacheConfig, device: Any = None) -> EchoState:
    """An empty cache: pools allocated once, no request, every page free. All arrays are committed to the
    device (a jax.Device; the first one by default)."""
    device = device or jax.devices()[0]

    def one_layer(kind: str) -> LayerState:
        is_full = kind == "full"
        keys = jnp.zeros((config.pages, *config.keys.page_shape), config.keys.dtype) if is_full else None
        return LayerState(
            slots=pool.initial(config.host_rows, config.device_slots) if config.offload else None,
            records=jnp.zeros((config.pool_rows, *config.records.shape), config.records.dtype),
            index_keys=keys,
            threshold=threshold.initial(config.threshold, config.seats) if is_full else None,
        )

    host_pool = None
    if config.offload:
        memory = hostmem.choose(device.platform, config.host_memory)
        shape = (config.num_layers, config.host_rows, *config.records.shape)
        host_pool = hostmem.create_pool(shape, config.records.dtype, memory, device)
    layers = tuple(jax.device_put(one_layer(kind), device) for kind in config.layer_kinds)
    start = jax.device_put((tables.initial(config), jnp.int32(0)), device)
    return EchoState(tables=start[0], layers=layers, host_pool=host_pool, step=start[1])


def destroy(state: EchoState) -> None:
    """Gives the memory of every array back at once, the host pool's locked pages included, whoever still refers to the
    state. Arrays that a step has taken are skipped, so it can be called twice."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


@contextlib.contextmanager
def opened(config: CacheConfig, device: Any = None) -> Iterator[list[EchoState]]:
    """A cache for the length of a `with`: yields a list of one state, to be replaced by each that follows it, and gives
    its memory back at the end, also after an error.

        with state.opened(config) as held:
            held[0], output = decode_step(params, held[0], tokens, config=...)
    """
    held = [create(config, device)]
    try:
        yield held
    finally:
        for state in held:
            destroy(state)


def begin_step(config: CacheConfig, state: EchoState, tokens_per_seat: int | None = None) -> StepView:
    """Reads the tables once for a step of T tokens per seat, `config.tokens_per_step` unless told.

    Raises ValueError for a T whose rows the device pool cannot hold together, and for a state of other sizes.
    """
    tokens = config.tokens_per_step if tokens_per_seat is None else tokens_per_seat
    config.check_step(tokens)
    return view_of(config, state, tokens)


def view_of(config: CacheConfig, state: EchoState, tokens: int) -> StepView:
    """`begin_step` without its question to the device pool, for a prompt's chunk, whose rows do not go through it."""
    checks.shape("page_table", state.tables.page_table, (config.seats, config.pages_per_seat), "seats, pages of a seat")
    positions, new_rows = tables.new_rows(state.tables, tokens)
    return StepView(
        rows=tables.rows_of_positions(state.tables),
        lengths=state.tables.lengths,
        positions=positions,
        new_rows=new_rows,
        visible=jnp.where(new_rows == NO_ROW, 0, positions + 1),
        step=state.step,
    )


def finish_step(
    config: CacheConfig,
    state: EchoState,
    layers: tuple[LayerState, ...] | list[LayerState],
    new_records: list[jax.Array],
    view: StepView,
) -> EchoState:
    """Ends a step: new_records, one [B, T, *record] a layer, go to the host; lengths and clock move on.

    Raises ValueError unless there is one state and one array of new records for every layer.
    """
    for name, held in (("layers", layers), ("new_records", new_records)):
        if len(held) != config.num_layers:
            raise ValueError(f"{name} holds {len(held)} layers but the cache has {config.num_layers}; give each once")
    for number, records in enumerate(new_records):
        wanted = (*view.new_rows.shape, *config.records.shape)
        checks.shape(f"new_records[{number}]", records, wanted, "seats, tokens of this step, stored record")
    written = jnp.sum(view.new_rows != NO_ROW, axis=1, dtype=jnp.int32)
    return close(config, state, layers, new_records, view.new_rows.reshape(-1), written)


def close(
    config: CacheConfig,
    state: EchoState,
    layers: tuple[LayerState, ...] | list[LayerState],
    new_records: list[jax.Array],
    rows: jax.Array,
    written: jax.Array,
) -> EchoState:
    """Writes new records of all layers to host rows i32[M] in one call; seats grow by written i32[B].

    The write is tied behind every layer's pool, so behind every recall and prefetch of the step: an untied write, or
    one per layer, makes XLA copy the whole host pool.
    """
    layers, host_pool = tuple(layers), state.host_pool
    if host_pool is not None:
        stacked = jnp.stack([record.reshape(-1, *config.records.shape) for record in new_records])
        host_pool, stacked, layers = lax.optimization_barrier((host_pool, stacked, layers))
        host_pool = hostmem.write_back(host_pool, stacked, rows)
    step = state.step + 1
    shift = jnp.where(step >= eviction.REBASE_AT, eviction.REBASE_AT, 0)
    if config.offload:
        layers = tuple(_rebase(config, layer, shift) for layer in layers)
    return EchoState(
        tables=state.tables.replace(lengths=state.tables.lengths + written),
        layers=tuple(layers),
        host_pool=host_pool,
        step=step - shift,
    )


def _rebase(config: CacheConfig, layer: LayerState, shift: jax.Array) -> LayerState:
    maps = layer.slots
    assert maps is not None
    rebased = pool.clamp(config.eviction.rebase(maps.priority, shift))
    priority = jnp.where(maps.free | (shift == 0), maps.priority, rebased)
    return layer.replace(slots=maps.replace(priority=priority))


def admit(config: CacheConfig, state: EchoState, seat: int, positions: int, shared_pages=()) -> EchoState:
    """Gives a seat to a request that will hold up to `positions` positions; its pages are reserved now.

    shared_pages: full pages of an equal prefix, owned by another seat or cached; the request starts after them.
    Raises ValueError, changing nothing, when the seat is taken or pages are short.
    """
    tables.check_seat(state.tables, seat, must_be_active=False)
    needed = tables.pages_for(state.tables, positions)
    shared_pages = np.asarray([checks.whole("shared page", page) for page in shared_pages], np.int32)
    tables.check_shared_pages(state.tables, shared_pages, needed)
    tables.check_free_pages(state.tables, needed - len(shared_pages))
    padded = np.full((config.pages_per_seat,), NO_PAGE, np.int32)
    padded[: len(shared_pages)] = shared_pages
    return _admit(state, np.int32(seat), np.int32(needed), padded, np.int32(len(shared_pages)), policy=config.threshold)


# Jitted on what they need of the configuration, so that a sweep over its other fields compiles them once. The state is
# given up; its arrays' places and memory kinds stay as they are.
_donated_with_manager = functools.partial(jax.jit, donate_argnames="state", static_argnames="slot_manager")
_donated_with_policy = functools.partial(jax.jit, donate_argnames="state", static_argnames="policy")


@_donated_with_policy
def _admit(state: EchoState, seat, pages_needed, shared_pages, shared_count, *, policy: ThresholdPolicy) -> EchoState:
    updated = tables.admit(state.tables, seat, pages_needed, shared_pages, shared_count, shared_count * PAGE)
    return state.replace(tables=updated, layers=_fresh_thresholds(policy, state.layers, seat))


def _fresh_thresholds(policy: ThresholdPolicy, layers, seat):
    """A predictor must not carry over from the seat's previous occupant."""
    return tuple(
        layer if layer.threshold is None else layer.replace(threshold=threshold.reset(policy, layer.threshold, seat))
        for layer in layers
    )


def fork(config: CacheConfig, state: EchoState, parent: int, child: int, positions: int) -> EchoState:
    """The child starts as a copy of the parent: full pages are shared, the partial page is copied (records of all
    layers and index keys; slots are not copied). `positions` is the child's capacity."""
    tables.check_seat(state.tables, parent, must_be_active=True)
    tables.check_seat(state.tables, child, must_be_active=False)
    length = int(state.tables.lengths[parent])
    if checks.whole("positions", positions) < length:
        raise ValueError(
            f"a fork of {positions} positions cannot hold its parent's {length}; raise the child's positions"
        )
    needed = tables.pages_for(state.tables, positions)
    tables.check_free_pages(state.tables, needed - length // PAGE)
    return _fork(state, np.int32(parent), np.int32(child), np.int32(needed), policy=config.threshold)


@_donated_with_policy
def _fork(state: EchoState, parent, child, pages_needed, *, policy: ThresholdPolicy) -> EchoState:
    length = state.tables.lengths[parent]
    full, partial = length // PAGE, length % PAGE
    table = state.tables.page_table[parent]
    updated = tables.admit(state.tables, child, pages_needed, table, full, length)
    last = jnp.minimum(full, table.shape[0] - 1)
    source_page, target_page = table[last], updated.page_table[child, last]
    has_partial = partial > 0

    layers = []
    for layer in _fresh_thresholds(policy, state.layers, child):
        if layer.index_keys is not None:
            where = jnp.where(has_partial, target_page, layer.index_keys.shape[0])
            copied = layer.index_keys.at[where].set(layer.index_keys[jnp.maximum(source_page, 0)], mode="drop")
            layer = layer.replace(index_keys=copied)
        layers.append(layer)

    offsets = jnp.arange(PAGE, dtype=jnp.int32)
    source = jnp.where(offsets < partial, source_page * PAGE + offsets, NO_ROW)
    target = jnp.where(offsets < partial, target_page * PAGE + offsets, NO_ROW)
    if state.host_pool is None:
        outside = jnp.where(target < 0, layers[0].records.shape[0], target)
        layers = [
            layer.replace(records=layer.records.at[outside].set(layer.records[jnp.maximum(source, 0)], mode="drop"))
            for layer in layers
        ]
        return state.replace(tables=updated, layers=tuple(layers))
    host_pool = hostmem.copy_rows(state.host_pool, source, target)
    return state.replace(tables=updated, layers=tuple(layers), host_pool=host_pool)


def release(config: CacheConfig, state: EchoState, seat: int, keep_pages: bool = False) -> EchoState:
    """Ends a seat's request: pages nobody else refers to become free, or cached for reuse with keep_pages (full ones
    only), and their rows lose their slots."""
    tables.check_seat(state.tables, seat, must_be_active=True)
    return _release(state, np.int32(seat), np.bool_(keep_pages), slot_manager=config.slot_manager)


@_donated_with_manager
def _release(state: EchoState, seat, keep_pages, *, slot_manager: str) -> EchoState:
    updated, dropped = tables.release(state.tables, seat, keep_pages)
    return state.replace(tables=updated, layers=_drop_slots(state.layers, dropped, slot_manager))


def _drop_slots(layers, dropped, slot_manager: str):
    def drop(layer: LayerState) -> LayerState:
        if layer.slots is None:
            return layer
        return layer.replace(slots=pool.release(layer.slots, dropped, implementation=slot_manager))

    return tuple(map(drop, layers))


def uncache(config: CacheConfig, state: EchoState, pages) -> EchoState:
    """Cached pages become free; their rows lost their slots when the pages were released."""
    cached = np.asarray(state.tables.page_cached)
    chosen = np.zeros((config.pages,), bool)
    for page in pages:
        if not 0 <= checks.whole("page", page) < config.pages or not cached[page]:
            raise ValueError(f"page {page} is not cached; only cached pages can be dropped")
        chosen[page] = True
    return state.replace(tables=tables.uncache(state.tables, jnp.asarray(chosen)))


def rollback(config: CacheConfig, state: EchoState, lengths) -> EchoState:
    """Drops the newest rows of every seat, down to lengths i32[B], from tables and maps: what speculative decoding
    does with rejected tokens. Refuses to lengthen, and to touch a page that another request shares."""
    checks.integers("lengths", lengths)
    lengths = np.asarray(lengths, np.int64)
    tables.check_rollback(state.tables, lengths)
    return _rollback(state, lengths.astype(np.int32), slot_manager=config.slot_manager)


@_donated_with_manager
def _rollback(state: EchoState, lengths, *, slot_manager: str) -> EchoState:
    updated, dropped = tables.rollback(state.tables, lengths)
    return state.replace(tables=updated, layers=_drop_slots(state.layers, dropped, slot_manager))
