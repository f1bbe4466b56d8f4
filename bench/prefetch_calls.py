"""What the benches of prefetch call: inputs with a wanted hit rate, pools whose every word is known, and the ways.

It knows shapes, how a hit rate is made, how host rows stay cold, and what a layer does from its scores to filled slots.
It knows no claim and no clock.

How a hit rate is made: the threshold of a seat lies just below its 2048th score, so 2048 rows are above it, and all of
them but the wanted number of misses have a slot. No row below the threshold matters to anybody. Every call has queries,
maps and rows of its own, and takes another layer of the pool: host rows are as cold as a decode step finds them.

Two lengths of the same road. *Short* (ECHO's figure 18): scores, then one recall that fills slots with staged records
and with what is left on the host; the list of the recall is known beforehand, with as many of a seat's rows in staging
as the cap lets in, drawn at random, as which of them win is the race's choice. *Whole*: the list is found as in a
layer, by the exact top-k and the slot manager, from what was really staged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on

from bench import indexer_scores as plain
from bench.prefetch_timing import mark, on_host
from echo_jax import hostmem, indexer, recall
from echo_jax import layer as layer_lib
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.recall import StepView
from echo_jax.stats import Moved
from echo_jax.threshold import Never
from echo_jax.types import FREE_PRIORITY, NO_ROW, NO_SLOT, SOURCE_HOST, LayerState, SlotMaps, Staging
from pallas_kernels import indexer_prefetch, indexer_scores
from pallas_kernels.indexer_prefetch import ahead as ahead_lib
from pallas_kernels.indexer_prefetch import reference

HEADS, WIDTH, PAGE, K = 64, 128, 64, 2048
FORMATS = {"fp8": RecordFormat("fp8", 512, 64), "bf16": RecordFormat("bf16", 512, 64)}
POOL_BYTES = 9 * 2**30  # and at least three layers
MOST_MISSES = K // 2  # of a seat
SLOTS = 3 * K  # of a seat
SETS = 10  # of queries, maps and rows
IN_ORDER, SCATTERED = "in-order", "scattered"
"""How the pages of a seat lie in both pools: as an empty pool hands them out, or anywhere, which is the worst that
admissions and releases could leave behind."""
USUALLY = IN_ORDER


# ---- inputs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Set:
    """What changes from call to call."""

    query: jax.Array  # e4m3[B, 1, 64, 128]
    threshold: jax.Array  # f32[B]  just below the 2048th score of each seat
    bound: jax.Array  # f32[B]  just below the 4096th: what a good guess leaves to the selection
    top: np.ndarray  # i32[B, K]  host rows of the 2048 best, shuffled: the first ones are missing


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One shape: what all calls share, and SETS of what they do not."""

    seats: int
    length: int
    weights: jax.Array
    pages: jax.Array
    numbers: jax.Array
    visible: jax.Array
    rows: jax.Array  # i32[B, P]  host row of every position
    sets: tuple[Set, ...]
    pages_lie: str = USUALLY

    def named(self, name: str) -> str:
        """Of a row: says how pages lie where that is not the usual way."""
        return name if self.pages_lie == USUALLY else f"{self.pages_lie} pages: {name}"

    @property
    def lengths(self) -> jax.Array:
        """Positions written before this step."""
        return self.visible[:, 0] - 1


class Start(NamedTuple):
    """What a call cannot start without."""

    visible: jax.Array
    blank: tuple[jax.Array, jax.Array]


class Lists(NamedTuple):
    """What one recall fills; i32[B * MOST_MISSES] each, of which `count` are looked at."""

    rows: jax.Array
    slots: jax.Array
    source: jax.Array
    count: jax.Array


class Shared(NamedTuple):
    """What is the same in all calls of a shape and a record format."""

    weights: jax.Array
    pages: jax.Array
    numbers: jax.Array
    rows: jax.Array
    lengths: jax.Array
    cap: jax.Array  # i32[B]
    pool: jax.Array


@functools.cache
def inputs(seats: int, length: int, pages_lie: str = USUALLY) -> Inputs:
    _, weights, pages, numbers, visible = plain.arguments("fp8", seats, length, pages_lie == SCATTERED)
    of_position = reference.host_rows(numbers)
    random = np.random.default_rng(0)
    made = [_best(jax.random.key(number), weights, pages, numbers, visible, of_position) for number in range(SETS)]
    sets = tuple(
        Set(query, threshold, bound, random.permuted(np.asarray(rows), axis=1))
        for query, threshold, bound, rows in made
    )
    return Inputs(seats, length, weights, pages, numbers, visible, of_position, sets, pages_lie)


@jax.jit
def _best(key, weights, pages, numbers, visible, of_position):
    """Queries, thresholds, bounds and the host rows of the best."""
    query = jax.random.normal(key, (numbers.shape[0], 1, HEADS, WIDTH)).astype(jnp.float8_e4m3fn)
    score = indexer_scores(query, weights, pages, numbers, visible, implementation="mosaic_gpu")[:, 0]
    found, more = (indexer.select(score, visible[:, 0] - 1, k) for k in (K, 2 * K))  # the last one is this step's
    rows = jnp.take_along_axis(of_position, found.positions, axis=1)
    threshold, bound = (jnp.nextafter(some.kth_score, jnp.float32(-jnp.inf)) for some in (found, more))
    return query, threshold, bound, rows


def misses_at(hit: float) -> int:
    """Of each seat."""
    return round((1 - hit) * K)


def missing(given: Inputs, misses: int, host_rows: int) -> list[SlotMaps]:
    """For each set: maps of a nearly full pool in which `misses` of each seat's best have no slot.

    Whoever else has a slot is drawn once for all sets and was never used; the few of them that are among the best leave
    theirs free.
    """
    slots, (seats, length) = given.seats * SLOTS, (given.seats, given.length)
    others = np.random.default_rng(1).permutation(seats * length)[:slots].astype(np.int32)
    return [_maps(jnp.asarray(one.top), jnp.int32(misses), jnp.asarray(others), host_rows) for one in given.sets]


@functools.partial(jax.jit, static_argnames="host_rows")
def _maps(top: jax.Array, misses: jax.Array, others: jax.Array, host_rows: int) -> SlotMaps:
    seats, slots = top.shape[0], others.shape[0]
    is_resident = jnp.arange(K, dtype=jnp.int32)[None] >= misses
    best = jnp.where(is_resident, top, NO_ROW).reshape(-1)
    is_best = jnp.zeros((host_rows,), bool).at[top.reshape(-1)].set(True)
    others = jnp.where(is_best[others], NO_ROW, others)
    host_of = jnp.concatenate([best, others[seats * K :]])
    place = jnp.where(host_of == NO_ROW, host_rows, host_of)
    slot_of = jnp.full((host_rows,), NO_SLOT, jnp.int32)
    slot_of = slot_of.at[place].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
    is_free = host_of == NO_ROW
    used = jnp.where(jnp.arange(slots) < seats * K, 1, 0).astype(jnp.int32)
    return SlotMaps(slot_of=slot_of, host_of=host_of, priority=jnp.where(is_free, FREE_PRIORITY, used), free=is_free)


def lists(given: Inputs, misses: int, cap: int, staging: int) -> list[Lists]:
    """For each set: the missing rows, ascending seat by seat, min(cap, misses) of a seat's in staging and the others
    on the host."""
    assert misses <= MOST_MISSES
    random = np.random.default_rng(misses)
    seats, length = given.seats, given.seats * MOST_MISSES
    staged, found = min(cap, misses, staging), []
    for one, free in zip(given.sets, _some_slots(seats), strict=True):
        rows = np.sort(one.top[:, :misses], axis=1)
        order = random.permuted(np.tile(np.arange(misses, dtype=np.int32), (seats, 1)), axis=1)  # staged where < staged
        place = order + staging * np.arange(seats, dtype=np.int32)[:, None]
        source = np.where(order < staged, place, SOURCE_HOST)
        slots = free[: seats * misses].reshape(seats, misses)
        padded = [np.full((length,), -1, np.int32) for _ in range(3)]
        for target, part in zip(padded, (rows, slots, source), strict=True):
            target[: seats * misses] = part.reshape(-1)
        rows, slots, source = map(jnp.asarray, padded)
        found.append(Lists(rows, slots, source, jnp.int32(seats * misses)))
    return found


def disordered(wanted: Lists) -> Lists:
    """The same rows, none of them staged, in an order drawn once: as candidates come, not as their addresses go."""
    rows, count = np.array(wanted.rows), int(wanted.count)
    rows[:count] = np.random.default_rng(3).permutation(rows[:count])
    return wanted._replace(rows=jnp.asarray(rows), source=jnp.full_like(wanted.source, SOURCE_HOST))


@functools.cache
def _some_slots(seats: int) -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.permutation(seats * SLOTS)[: seats * MOST_MISSES].astype(np.int32) for _ in range(SETS)]


def pool_shape(records: str, host_rows: int) -> jax.ShapeDtypeStruct:
    """Of `pool_of`, in pinned memory."""
    form = FORMATS[records]
    layers = max(3, POOL_BYTES // (host_rows * form.bytes_per_row))
    return on_host((layers, host_rows, *form.shape), form.dtype)


@functools.cache
def unwritten_pool_of(records: str, host_rows: int) -> jax.Array:
    """Some 9 GiB of zeros in pinned memory: enough where only time is asked for."""
    shape = pool_shape(records, host_rows)
    return jax.block_until_ready(hostmem.create_pool(shape.shape, shape.dtype, hostmem.HostMemory.PINNED))


@functools.cache
def pool_of(records: str, host_rows: int) -> list[jax.Array]:
    """[pool], each word a function of its layer, row and place: some 9 GiB."""
    form, shape = FORMATS[records], pool_shape(records, host_rows).shape
    layers, words = shape[0], form.bytes_per_row // 4

    def pattern(row):
        word = jnp.arange(words, dtype=jnp.uint32)[None, None] * jnp.uint32(0x85EBCA6B)
        layer = jnp.arange(layers, dtype=jnp.uint32)[:, None, None] << 27
        made = (row.astype(jnp.uint32)[None, :, None] * jnp.uint32(0x9E3779B1)) ^ layer ^ word
        if form.dtype != jnp.uint32:
            made = lax.bitcast_convert_type(made, form.dtype)
        return made.reshape(layers, row.size, *form.shape)

    return [filled(hostmem.create_pool(shape, form.dtype, hostmem.HostMemory.PINNED), pattern)]


def filled(host_pool: jax.Array, records_of: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`host_pool`, which is donated, with records_of(rows i32[M]), of [L, M, *record], in those rows of its layers."""
    host_rows = host_pool.shape[1]
    together = min(65_536, host_rows)
    store = jax.jit(hostmem.write_back, donate_argnums=0)

    @jax.jit
    def made(first):
        row = first + jnp.arange(together, dtype=jnp.int32)
        return records_of(row), jnp.where(row < host_rows, row, NO_ROW)

    for first in range(0, host_rows, together):
        host_pool = store(host_pool, *made(jnp.int32(first)))
    return jax.block_until_ready(host_pool)


def shared_of(given: Inputs, host_pool: jax.Array, cap: int) -> Shared:
    caps = jnp.full((given.seats,), cap, jnp.int32)
    return Shared(given.weights, given.pages, given.numbers, given.rows, given.lengths, caps, host_pool)


def config_of(seats: int, length: int, records: str, host_rows: int, staging: int) -> CacheConfig:
    """Of the whole road; nobody asks its threshold policy."""
    return CacheConfig(
        layer_kinds=("full",),
        records=FORMATS[records],
        keys=KeyFormat("fp8", WIDTH),
        threshold=Never(),
        eviction=Lru(),
        seats=seats,
        capacity=length,
        host_rows=host_rows,
        device_slots=seats * SLOTS,
        top_k=K,
        staging=staging,
    )


# ---- the short road: (records, changing, shared, layer) -> (records, what must be there) -----------------------------


def start_of(given: Inputs, staging: int) -> Start:
    return Start(given.visible, ahead_lib.blank(given.seats, staging))


def score(start: Start, query, shared: Shared):
    asked = (query, shared.weights, shared.pages, shared.numbers, start.visible)
    return indexer_scores(*asked, implementation="mosaic_gpu")


def prefetch(
    start: Start, query, threshold, slot_of, shared: Shared, layer, staging: int, bound=None, tuning: Any = None
):
    """The fused kernel; its lists are blank beforehand, as a step has them made beside what comes before the scores."""
    return indexer_prefetch(
        *(query, shared.weights, shared.pages, shared.numbers, start.visible, threshold, shared.lengths, shared.cap),
        *(slot_of, shared.pool, layer),
        staging=staging,
        blank=start.blank,
        bound=bound,
        tuning=tuning,
        implementation="mosaic_gpu",
    )


def resident(records, changing, shared: Shared, layer):
    """Scores: all that is left to do where everything is on the device."""
    start, query, *_ = changing
    return records, score(start, query, shared)


def link(records, changing, shared: Shared, layer):
    """The recall alone, of rows known beforehand: what the link takes."""
    *_, wanted = changing
    return _fill(records, shared, layer, wanted, records[:0]), ()


def in_turn(records, changing, shared: Shared, layer):
    """Scores, then a recall of rows known beforehand: the best that is possible without overlap."""
    start, query, _, _, wanted = changing
    scores = score(start, query, shared)
    return _fill(mark(records, scores), shared, layer, wanted, records[:0]), scores


def fused(records, changing, shared: Shared, layer, staging: int, middle: int = -1, tuning: Any = None):
    """Scores with prefetch, then a recall that takes what is staged from there; `middle` marks what lies between."""
    start, query, threshold, slot_of, wanted = changing
    found = prefetch(start, query, threshold, slot_of, shared, layer, staging, tuning=tuning)
    if middle >= 0:
        records = mark(records, (found.scores, found.records), number=middle)
    staged = found.records.reshape(-1, *records.shape[1:])
    return _fill(records, shared, layer, wanted, staged), found.scores


def _fill(records, shared: Shared, layer, wanted: Lists, staged):
    asked = (wanted.count, wanted.rows, wanted.slots, wanted.source)
    return hostmem.recall(records, shared.pool, layer, *asked, records[:0], staged)


# ---- the whole road: (records, changing, shared, layer) -> (records, what must be there) -----------------------------


def whole(records, changing, shared: Shared, layer, config: CacheConfig, way: str):
    """As `echo_layer` without projections and attention. way: "resident", "in turn", "fused" or "second stream"."""
    *others, maps = changing
    (records, maps), slots, positions, kth, *_ = layer_of((records, maps), others, shared, layer, config, way)
    return records, (maps, slots, positions, kth)


def layer_of(
    state, changing, shared: Shared, layer, config: CacheConfig, way: str, step: Any = 2, staging: Staging | None = None
) -> tuple[Any, jax.Array, jax.Array, jax.Array, Moved | None, jax.Array]:
    """(records, maps), slots and positions of the selected, the k-th scores, what moved, and all scores.

    `staging` is what was copied before this step; a way that copies for itself does not look at it.
    """
    start, query, threshold, bound = changing
    records, maps = state
    held = LayerState(slots=maps, records=records, index_keys=None, threshold=None)
    new_rows = jnp.take_along_axis(shared.rows, shared.lengths[:, None], axis=1)
    lengths, step = shared.lengths, jnp.asarray(step, jnp.int32)
    view = StepView(shared.rows, lengths, lengths[:, None], new_rows, start.visible, step)
    staging, above = recall.no_staging(config, config.seats) if staging is None else staging, None
    if way == "fused":
        found = prefetch(start, query, threshold, maps.slot_of, shared, layer, config.staging, bound)
        scores, above = found.scores, found.above
        staging = Staging(found.rows, found.records, found.refused)
    else:
        scores = score(start, query, shared)
    if way == "second stream":
        staging = on_second_stream(scores, threshold, maps, view, shared, layer, config)
    # Every way may use the bound; the fused kernel has marked what is above it.
    selection = layer_lib.select(config, view, scores, None, None if bound is None else indexer.Bound(bound, above))
    positions, kth = selection
    if way == "resident":
        return state, positions, positions, kth, None, scores
    of_selected = jnp.take_along_axis(scores, jnp.maximum(positions, 0), axis=-1)
    new = jnp.zeros((config.seats, 1, *config.records.shape), config.records.dtype)
    asked = (config, held, shared.pool, layer, view, new, positions, of_selected, staging)
    held, slots, moved = recall.require(*asked)
    return (held.records, held.slots), slots, positions, kth, moved, scores


def on_second_stream(scores, threshold, maps: SlotMaps, view: StepView, shared: Shared, layer, config) -> Staging:
    """The library's other path: candidates by running sums, and a recall of them beside the selection."""
    positions = jnp.arange(view.rows.shape[1], dtype=jnp.int32)[None]
    is_absent = (positions < view.lengths[:, None]) & (maps.slot_of[view.rows] == NO_SLOT)
    cap = jnp.minimum(shared.cap, config.staging)
    found, refused = recall.prefetch_candidates(scores, threshold, is_absent, cap, config.staging)
    staged = recall.rows_at(view.rows, found)
    # What a stream is given holds no jitted function of its own: XLA finds no stream for those.
    beside: Any = compute_on(hostmem.read_rows, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)
    records = beside(shared.pool, layer, staged.reshape(-1))
    return Staging(staged, records.reshape(*staged.shape, *config.records.shape), refused)
