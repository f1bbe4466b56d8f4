"""One ECHO layer, in the order of the paper: encode, score, prefetch, select, require, attend, observe.

Knows arrays of one layer and the order in which they are touched. Knows no model: what it is handed are a query, a
record and index inputs, from anybody's projections. Knows no step: the tables were read once into a `StepView`, and the
host pool is only read here; `state.finish_step` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax import attend, checks, indexer, recall, threshold
from echo_jax.config import CacheConfig
from echo_jax.formats import Encoded, encode_step
from echo_jax.indexer import Bound, Selection
from echo_jax.recall import StepView
from echo_jax.stats import Moved
from echo_jax.types import NO_POSITION, PAGE, LayerState, Staging
from pallas_kernels import indexer_prefetch, indexer_scores, scores_on_this_gpu, sparse_mla

Selector = Callable[[jax.Array, jax.Array, int], Selection]
"""(score f32[N, P], visible i32[N], K) -> Selection."""

LEAST_POSITIONS_TO_HIDE_BEHIND = 2**18
"""Of all seats. A kernel that scores and copies ahead was slower than both in turn at 98,304, faster at 786,432."""


class LayerInputs(NamedTuple):
    """What a model's projections give for the new tokens of one layer."""

    query: jax.Array  # f32 or bf16 [B, T, H, D]  absorbed query against whole records
    record: jax.Array  # f32[B, T, D]  latent, then rotated key
    index_query: jax.Array | None = None  # f32[B, T, G, D_i]  None in a shared layer
    index_weights: jax.Array | None = None  # f32[B, T, G]
    index_key: jax.Array | None = None  # f32[B, T, D_i]


class LayerOutput(NamedTuple):
    """What one layer gives back besides its state."""

    attended: jax.Array  # f32[B, T, H, latent]
    selection: Selection  # positions i32[B, T, K], kth_score f32[B, T]; hand it to the shared layers that follow
    scores: jax.Array  # f32[B, T, K]  index scores of the selected positions
    new_records: jax.Array  # [B, T, *record shape]  stored form, for finish_step
    digest: jax.Array  # u32[B, T]  fingerprint of the attended bits
    moved: Moved


def echo_layer(
    config: CacheConfig,
    state: LayerState,
    host_pool: jax.Array | None,
    layer: int | jax.Array,
    view: StepView,
    inputs: LayerInputs,
    *,
    scale: float,
    shared: LayerOutput | None = None,
    staging: Staging | None = None,
    selector: Selector | None = None,
) -> tuple[LayerState, LayerOutput]:
    """Attention of one layer over a cache whose records live on the host.

    On return the layer's maps and pool hold every selected row. `shared` is the output of the full layer whose selected
    set this layer reuses, and `staging` what `recall.read_ahead` copied for it; without `shared` the layer scores,
    copies ahead and selects for itself, by `selector` or else the exact top-k.

    Raises ValueError for a layer number that the cache does not have, for inputs of other shapes than the cache's, and
    for a full layer without an index query. A traced layer number outside the cache reads zeros.
    """
    check_inputs(config, state, layer, view, inputs, shared)
    if config.attend_implementation == "mosaic_gpu":  # which rounds it: where it is made, not where it is waited for
        inputs = inputs._replace(query=inputs.query.astype(jnp.bfloat16))
    # Finished values go in: what XLA fuses into projections must not depend on whether the cache is offloaded.
    inputs = lax.optimization_barrier(inputs)
    layer = jnp.asarray(layer, jnp.int32)
    staging = recall.no_staging(config, view.rows.shape[0]) if staging is None else staging
    if shared is None:
        encoded = encode(config, state, view, inputs)
        state, new_records = state.replace(index_keys=encoded.index_keys), encoded.records
        bound = selection_bound(config, state)
        if config.offload:
            assert host_pool is not None
            score, staging, bound = score_and_prefetch(config, state, host_pool, layer, view, encoded, bound)
        else:
            score = scores_of(config, view, encoded.query, encoded.weights, encoded.index_keys)
        selection = select(config, view, score, selector, bound)
        scores = jnp.take_along_axis(score, jnp.maximum(selection.positions, 0), axis=-1)
    else:
        new_records = config.records.encode(inputs.record.astype(jnp.float32))
        selection, scores = shared.selection, shared.scores

    if config.offload:
        assert host_pool is not None
        state, slots, moved = recall.require(
            config, state, host_pool, layer, view, new_records, selection.positions, scores, staging
        )
    else:
        state, slots, moved = keep_resident(config, state, view, new_records, selection.positions)

    attended = attend_slots(config, state, inputs.query, slots, selection.positions, scale)
    if shared is None:
        # Behind the attended values: before, on a GPU, it would stand between a selection and what waits for it.
        attended, kth_score = lax.optimization_barrier((attended, selection.kth_score))
        state = observe(config, state, view, kth_score)
    digest = attend.digest(attended.reshape(-1, *attended.shape[2:])).reshape(attended.shape[:2])
    return state, LayerOutput(attended, selection, scores, new_records, digest, moved)


def check_inputs(
    config: CacheConfig,
    state: LayerState,
    layer: int | jax.Array,
    view: StepView,
    inputs: LayerInputs,
    shared: LayerOutput | None,
) -> None:
    """Refuses what does not fit the cache, by name; while tracing, since all of it is shapes."""
    checks.layer_number(layer, config.num_layers)
    seats, tokens = view.new_rows.shape
    each = (seats, tokens)
    width = config.records.latent + config.records.rope
    why = f"B {seats} seats, T {tokens} tokens of this step"
    checks.shape("query", inputs.query, (*each, None, width), f"{why}, heads, latent and rope values of a record")
    checks.shape("record", inputs.record, (*each, width), f"{why}, latent and rope values")
    if shared is not None:
        return
    if state.index_keys is None:
        raise ValueError(
            f"layer {layer} is a shared layer, without index keys; pass shared=, the output of the full layer before it"
        )
    heads = None if inputs.index_query is None else inputs.index_query.shape[2:3]
    for name, wanted in (
        ("index_query", (*each, None, config.keys.width)),
        ("index_weights", (*each, *(heads or (None,)))),
        ("index_key", (*each, config.keys.width)),
    ):
        array = getattr(inputs, name)
        if array is None:
            raise ValueError(f"{name} is None but layer {layer} is a full layer, which scores positions for itself")
        checks.shape(name, array, wanted, f"{why}, index heads, width of an index key")


def encode(config: CacheConfig, state: LayerState, view: StepView, inputs: LayerInputs) -> Encoded:
    """The new tokens in their stored forms, the index keys in their resident places, and the query for the scorer.

    All of it is there before scores are made: a record encoded after them would, on a GPU, stand between a selection
    and `require`. The barrier also keeps XLA from fusing the scores differently in the resident and in the offloaded
    program. Inputs of fewer bits are taken for the float32 numbers that they are.
    """
    index_key, query, weights = inputs.index_key, inputs.index_query, inputs.index_weights
    assert index_key is not None and query is not None and weights is not None and state.index_keys is not None
    encoded = encode_step(
        config.records,
        config.keys,
        state.index_keys,
        view.new_rows.reshape(-1),
        index_key.reshape(-1, config.keys.width).astype(jnp.float32),
        inputs.record.reshape(-1, inputs.record.shape[-1]).astype(jnp.float32),
        query.astype(jnp.float32),
        weights.astype(jnp.float32),
        config.encode_implementation,
    )
    records = encoded.records.reshape(*inputs.record.shape[:2], *config.records.shape)
    return lax.optimization_barrier(encoded._replace(records=records))


def selection_bound(config: CacheConfig, state: LayerState) -> Bound | None:
    """A hint to `select`, f32[B]: what the threshold policy expects somewhat more than K positions of each seat to
    exceed. None where it has no such guess, or the selection no use for it."""
    if not indexer.uses_library(min(config.top_k, config.capacity), config.top_k_implementation):
        return None
    score = threshold.bound(config.threshold, state.threshold, config.seats)
    return None if score is None else Bound(score)


def score_and_prefetch(
    config: CacheConfig,
    state: LayerState,
    host_pool: jax.Array,
    layer: jax.Array,
    view: StepView,
    encoded: Encoded,
    bound: Bound | None = None,
) -> tuple[jax.Array, Staging, Bound | None]:
    """The scores of `scores_of`, and the rows above the predicted threshold copied ahead, together or in turn.

    Together, the scorer also says which scores exceed the bound, u32[B, T, P // 32]: the bound comes back with that.
    """
    predicted = threshold.predict(config.threshold, state.threshold, config.seats)
    asked = (encoded.query, encoded.weights, encoded.index_keys)
    if (way := prefetch_way(config, encoded.query, encoded.index_keys)) != "fused":
        score = scores_of(config, view, *asked)
        if way == "none":
            return score, recall.no_staging(config, config.seats), bound
        return score, recall.prefetch(config, state, host_pool, layer, view, score, predicted), bound
    assert state.slots is not None
    cap = recall.prefetch_cap(config, view)
    operands, wanted = scorer_operands(config, view, *asked)
    arguments: Any = (*operands, predicted, view.lengths, cap, state.slots.slot_of, host_pool, layer)
    bounds = None if bound is None else bound.score
    found = indexer_prefetch(*arguments, staging=config.staging, bound=bounds, implementation=wanted)
    bound = None if bound is None else bound._replace(above=found.above)
    return lax.optimization_barrier(found.scores), Staging(found.rows, found.records, found.refused), bound


def prefetch_way(config: CacheConfig, query: jax.Array, keys: jax.Array) -> str:
    """ "fused": one kernel scores and copies ahead. "separate": rows are copied after the scores; "second_stream": then
    too, on a stream beside the selection's. "none": none are.

    "auto" is fused where that kernel is a GPU's and scores take long enough to hide something behind them. On an H200
    the attention part of a layer took 281 us with it, 297 us with nothing copied ahead and 344 us with copies after the
    scores (32 x 98,304 positions, hit rate 0.97). Scores and recall took 58 us and 73 in turn at 8 x 98,304, but 22 and
    20 at 1 x 98,304: there nothing is copied ahead.
    """
    if not config.offload or config.staging == 0:
        return "none"
    if config.prefetch_implementation != "auto":
        return config.prefetch_implementation
    if config.score_implementation == "reference" or not scores_on_this_gpu(query, keys):
        return "separate"
    return "fused" if config.seats * config.capacity >= LEAST_POSITIONS_TO_HIDE_BEHIND else "none"


def scores_of(config: CacheConfig, view: StepView, query: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """f32[B, T, P]: index scores of all positions, -inf where the query does not see. The query is encoded,
    [B, T, G, D_i] with weights f32[B, T, G]; keys are a pool's pages."""
    operands, wanted = scorer_operands(config, view, query, weights, keys)
    return lax.optimization_barrier(indexer_scores(*operands, implementation=wanted))


def scorer_operands(
    config: CacheConfig, view: StepView, query: jax.Array, weights: jax.Array, keys: jax.Array
) -> tuple[Any, Any]:
    """What both scorers take first, and the implementation that is asked for."""
    pages = lax.optimization_barrier(page_numbers(view.rows))
    wanted = None if config.score_implementation == "auto" else config.score_implementation
    return (query, weights, keys, pages, view.visible), wanted


def page_numbers(rows: jax.Array) -> jax.Array:
    """i32[B, P // PAGE] page of each run of positions; rows i32[B, P]. NO_ROW gives a negative number."""
    return rows[:, ::PAGE] // PAGE


def select(
    config: CacheConfig, view: StepView, score: jax.Array, selector: Selector | None, bound: Bound | None = None
) -> Selection:
    """The selector's choice for every query, i32[B, T, K]; the exact top-k without one, whatever the seats' bound."""
    if selector is None:
        if bound is not None:
            above = None if bound.above is None else bound.above.reshape(-1, bound.above.shape[-1])
            bound = Bound(jnp.repeat(bound.score, score.shape[1]), above)
        selector = functools.partial(indexer.select, implementation=config.top_k_implementation, bound=bound)
    flat = selector(score.reshape(-1, score.shape[-1]), view.visible.reshape(-1), config.top_k)
    positions = flat.positions.reshape(*score.shape[:2], -1)
    missing = config.top_k - positions.shape[-1]  # a context shorter than K lists fewer
    positions = jnp.pad(positions, ((0, 0), (0, 0), (0, missing)), constant_values=NO_POSITION)
    return Selection(positions, flat.kth_score.reshape(score.shape[:2]))


def keep_resident(
    config: CacheConfig, state: LayerState, view: StepView, new_records: jax.Array, selected: jax.Array
) -> tuple[LayerState, jax.Array, Moved]:
    """The resident run's `require`: slot = host row, nothing can be missing."""
    rows = view.new_rows.reshape(-1)
    outside = jnp.where(rows < 0, state.records.shape[0], rows)
    records = state.records.at[outside].set(new_records.reshape(-1, *config.records.shape), mode="drop")
    slots = recall.rows_at(view.rows, selected.reshape(selected.shape[0], -1)).reshape(selected.shape)
    none = jnp.int32(0)
    hits = jnp.sum(selected != NO_POSITION, dtype=jnp.int32)
    moved = Moved(hits, none, none, none, none, none, jnp.sum(rows >= 0, dtype=jnp.int32))
    return state.replace(records=records), slots, moved


def attend_slots(
    config: CacheConfig,
    state: LayerState,
    query: jax.Array,
    slots: jax.Array,
    selected: jax.Array,
    scale: float,
) -> jax.Array:
    """f32[B, T, H, latent]: sparse MLA over the records in the slots, in list order."""
    if config.attend_implementation == "mosaic_gpu":
        query, records, listed = lax.optimization_barrier((query, state.records, slots))
        form = {"record_format": config.records.name, "latent": config.records.latent}
        attended, _ = sparse_mla(query, records, listed, scale, **form, implementation="mosaic_gpu")
        return lax.optimization_barrier(attended)
    seats, count, heads, width = query.shape
    stored = state.records.at[jnp.maximum(slots, 0)].get(mode="clip")
    flat = (
        query.reshape(-1, heads, width),
        stored.reshape(-1, *stored.shape[2:]),
        (selected >= 0).reshape(-1, slots.shape[-1]),
    )
    query, stored, is_listed = lax.optimization_barrier(flat)
    attended = attend.attend(query, stored, is_listed, scale, config.records)
    return lax.optimization_barrier(attended).reshape(seats, count, heads, -1)


def observe(config: CacheConfig, state: LayerState, view: StepView, kth_score: jax.Array) -> LayerState:
    """The threshold policy learns the true k-th scores; not where at most K positions were visible."""
    is_informative = view.visible > config.top_k
    memory = threshold.observe(config.threshold, state.threshold, kth_score, is_informative)
    return state.replace(threshold=memory)
