"""Chunked prefill: a prompt enters the cache in chunks of one static shape.

A chunk's queries select for themselves, and their union may be larger than any pool, so prefill does not go through the
pool: each layer reads the request's rows from the host into a workspace, adds the chunk's own, and attends from there
in blocks of queries. The workspace is `P * record` bytes, one layer at a time. The chunk's records go to the host in
one call at the end. Every reader sees stored forms, and everything is computed in blocks of one shape, so the chunk
size does not change results. (A matrix product with another number of rows may round differently. On a GPU, where
small products waste the machine and bits across chunk sizes are not promised, raise `block` to the chunk.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from echo_jax import attend, checks, hostmem, indexer, pool, recall, threshold
from echo_jax import state as state_lib
from echo_jax import tables as tables_lib
from echo_jax.config import CacheConfig
from echo_jax.decode import DecodeConfig
from echo_jax.layer import page_numbers
from echo_jax.models import dsa
from echo_jax.models.config import SHARED, DsaConfig
from echo_jax.recall import StepView
from echo_jax.types import NO_POSITION, NO_ROW, EchoState, LayerState


class PrefillOutput(struct.PyTreeNode):
    """What a chunk returns besides the state; C rows, of which only the first `count` are real."""

    logits: jax.Array  # f32[V] of the last real token, or f32[C, V] when all were asked for
    selected: jax.Array  # i32[L, C, K]
    digests: jax.Array  # u32[L, C]


class _Chunk(NamedTuple):
    view: StepView  # one seat, T = C
    seat: jax.Array
    count: jax.Array  # i32[]  real tokens


@functools.partial(jax.jit, static_argnames=("config", "all_logits"), donate_argnames="state")
def prefill_chunk(
    params: dsa.Params,
    state: EchoState,
    tokens: jax.Array,
    seat: jax.Array,
    count: jax.Array,
    *,
    config: DecodeConfig,
    all_logits: bool = False,
) -> tuple[EchoState, PrefillOutput]:
    """Appends the first `count` of tokens i32[C] to a seat, from wherever its length is.

    The seat must have been admitted with room for them: tokens beyond its room, and all tokens of a seat that is idle
    or does not exist, are not written and their logits mean nothing (`prefill` refuses them). `state` is donated.
    """
    model, cache = config.model, config.cache
    checks.integers("tokens", tokens)
    checks.shape("tokens", tokens, (None,), "the tokens of one seat")
    if tokens.shape[0] % cache.block or tokens.shape[0] == 0:
        raise ValueError(
            f"a chunk of {tokens.shape[0]} tokens is no multiple of the block of {cache.block}; pad it to one and say "
            "how many are real with count"
        )
    chunk = _open(cache, state, tokens.shape[0], seat, count)
    positions = chunk.view.positions[0]
    in_blocks = functools.partial(_in_blocks, cache.block)
    hidden = dsa.embed(params, tokens, model)

    layers, new_records, picks = list(state.layers), [], []
    for index, weights in enumerate(params["layers"]):
        inputs = in_blocks(functools.partial(_project, model, weights), (hidden, positions))
        is_shared = model.layer_kinds[index] == SHARED
        layers[index], stored, pick, attended, digest = _layer(
            config, layers[index], state.host_pool, index, chunk, inputs, picks[-1] if is_shared else None
        )
        finish = functools.partial(_finish, model, weights, model.mlp_kinds[index])
        hidden = in_blocks(finish, (hidden, attended))
        new_records.append(stored)
        picks.append(pick._replace(digest=digest))

    rows = chunk.view.new_rows[0]
    written = jnp.where(jnp.arange(cache.seats) == chunk.seat, jnp.sum(rows != NO_ROW, dtype=jnp.int32), 0)
    state = state_lib.close(cache, state, layers, new_records, rows, written)
    if not all_logits:
        hidden = lax.dynamic_slice_in_dim(hidden, jnp.maximum(count - 1, 0), 1)
        logits = dsa.logits(params, hidden, model)[0]
    else:
        logits = in_blocks(lambda x: dsa.logits(params, x, model), hidden)
    selected = jnp.stack([pick.positions for pick in picks])
    digests = jnp.stack([pick.digest for pick in picks])
    return state, PrefillOutput(logits, selected, digests)


def _project(model: DsaConfig, weights: dsa.Params, block) -> dsa.AttentionInputs:
    hidden, positions = block
    return lax.optimization_barrier(dsa.project(weights, hidden, positions, model))


def _finish(model: DsaConfig, weights: dsa.Params, mlp_kind: str, block) -> jax.Array:
    hidden, attended = block
    return dsa.finish(weights, hidden, attended, model, mlp_kind)


class _Pick(NamedTuple):
    positions: jax.Array  # i32[C, K]
    kth_score: jax.Array  # f32[C]
    scores: jax.Array  # f32[C, K]
    digest: jax.Array | None = None  # u32[C]


def _open(cache: CacheConfig, state: EchoState, length: int, seat: jax.Array, count: jax.Array) -> _Chunk:
    view = state_lib.view_of(cache, state, length)
    one = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, seat, keepdims=True), view._replace(step=view.lengths))
    is_seat = (seat >= 0) & (seat < cache.seats)  # the lookup takes the nearest seat for one that does not exist
    is_real = (jnp.arange(length, dtype=jnp.int32)[None] < count) & is_seat
    rows = jnp.where(is_real, one.new_rows, NO_ROW)
    visible = jnp.where(rows == NO_ROW, 0, one.visible)
    return _Chunk(one._replace(step=view.step, new_rows=rows, visible=visible), seat, count)


def _layer(config, state: LayerState, host_pool, layer: int, chunk: _Chunk, inputs, shared: _Pick | None):
    """One layer of a chunk: append, score and select, workspace, attend, warm."""
    cache, view = config.cache, chunk.view
    stored = cache.records.encode(inputs.record)
    new_rows = view.new_rows[0]
    if shared is None:
        keys = cache.keys.append(state.index_keys, new_rows, inputs.index_key)
        state = state.replace(index_keys=keys)
        pick = _pick(cache, state, view, inputs)
    else:
        pick = shared

    if cache.offload:
        workspace = _workspace(cache, host_pool, layer, view, stored)
        at = pick.positions
    else:
        outside = jnp.where(new_rows < 0, state.records.shape[0], new_rows)
        workspace = state.records.at[outside].set(stored, mode="drop")
        state = state.replace(records=workspace)
        at = recall.rows_at(view.rows, pick.positions.reshape(1, -1)).reshape(pick.positions.shape)
    attended, digest = _attend(cache, inputs.query, workspace, at, pick.positions, config.model.attention_scale)

    if shared is None:
        last = jnp.maximum(chunk.count - 1, 0)
        state = _observe(cache, state, chunk, pick.kth_score[last], view.visible[0, last])
    if cache.offload and cache.warm_windows:
        state = _warm(cache, state, host_pool, layer, chunk, pick, workspace)
    return state, stored, pick, attended, digest


def _pick(cache: CacheConfig, state: LayerState, view: StepView, inputs) -> _Pick:
    """Scores and selects, a block of queries at a time."""
    assert state.index_keys is not None
    query, weights = cache.keys.prepare_query(inputs.index_query, inputs.index_weights)
    keys = cache.keys.read_pages(state.index_keys, page_numbers(view.rows)[0])
    query, weights, keys = lax.optimization_barrier((query, weights, keys))

    def one_block(block):
        query, weights, visible = block
        score = indexer.mask_invisible(indexer.scores(query, weights, keys), visible)
        selection = indexer.select(lax.optimization_barrier(score), visible, cache.top_k, cache.top_k_implementation)
        scores = jnp.take_along_axis(score, jnp.maximum(selection.positions, 0), axis=-1)
        return selection.positions, selection.kth_score, scores

    positions, kth, scores = _in_blocks(cache.block, one_block, (query, weights, view.visible[0]))
    missing = ((0, 0), (0, cache.top_k - positions.shape[-1]))
    return _Pick(jnp.pad(positions, missing, constant_values=NO_POSITION), kth, jnp.pad(scores, missing))


def _workspace(cache: CacheConfig, host_pool, layer: int, view: StepView, stored: jax.Array) -> jax.Array:
    """[P, *record]: the seat's rows of this layer by position, those of this chunk included."""
    capacity = view.rows.shape[1]
    positions = jnp.arange(capacity, dtype=jnp.int32)
    old = jnp.where(positions < view.lengths[0], view.rows[0], NO_ROW)
    workspace = hostmem.read_rows(host_pool, jnp.int32(layer), old)
    at = jnp.where(view.new_rows[0] == NO_ROW, capacity, view.positions[0])
    return workspace.at[at].set(stored, mode="drop")


def _attend(cache: CacheConfig, query, workspace, at, positions, scale: float):
    """f32[C, H, latent] and u32[C]; `at` says where in the workspace each selected record lies."""

    def one_block(block):
        query, at, positions = block
        records = workspace.at[jnp.maximum(at, 0)].get(mode="clip")
        query, records, is_listed = lax.optimization_barrier((query, records, positions != NO_POSITION))
        attended = lax.optimization_barrier(attend.attend(query, records, is_listed, scale, cache.records))
        return attended, attend.digest(attended)

    return _in_blocks(cache.block, one_block, (query, at, positions))


def _in_blocks(block: int, function, arrays):
    """Maps over blocks of rows of every array, and joins the results."""
    split = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), arrays)
    joined = lax.map(function, split)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joined)


def _observe(cache: CacheConfig, state: LayerState, chunk: _Chunk, kth_score, visible) -> LayerState:
    """The predictor starts from the k-th score of the prompt's last query."""
    is_seat = jnp.arange(cache.seats) == chunk.seat
    scores = jnp.where(is_seat, kth_score, jnp.nan)[:, None]
    informative = (is_seat & (visible > cache.top_k))[:, None]
    return state.replace(threshold=threshold.observe(cache.threshold, state.threshold, scores, informative))


def _warm(cache: CacheConfig, state: LayerState, host_pool, layer: int, chunk: _Chunk, pick: _Pick, workspace):
    """The rows that the chunk's last queries selected become resident, from the workspace: no row crosses the link."""
    assert state.slots is not None
    first = jnp.clip(chunk.count - cache.warm_windows, 0, pick.positions.shape[0] - cache.warm_windows)
    window = first + jnp.arange(cache.warm_windows)
    chosen = jnp.where((window < chunk.count)[:, None], pick.positions[window], NO_POSITION).reshape(-1)
    rows = recall.rows_at(chunk.view.rows, chosen[None])[0]
    scores = pick.scores[window].reshape(-1)
    priority = cache.eviction.touch(*pool.before_touch(state.slots, rows), chunk.view.step, scores)
    maps, allocation = pool.allocate(state.slots, rows, priority, implementation=cache.slot_manager)
    fills = allocation.fills
    records = hostmem.recall(
        state.records,
        host_pool,
        jnp.int32(layer),
        fills.count,
        fills.rows,
        fills.slots,
        chosen[jnp.maximum(fills.mention, 0)],  # the workspace lies by position
        workspace,
        workspace[:0],
    )
    return state.replace(slots=maps, records=records)


def _checked(tokens: Sequence[int] | np.ndarray, state: EchoState, seat: int, config: DecodeConfig) -> np.ndarray:
    """The prompt as i32[N], or ValueError."""
    if len(tokens) == 0:
        raise ValueError("the prompt has 0 tokens; give at least 1")
    prompt = np.asarray(tokens)
    checks.integers("the prompt", prompt)
    checks.shape("the prompt", prompt, (None,), "a list of tokens")
    outside = prompt[(prompt < 0) | (prompt >= config.model.vocab_size)]
    if outside.size:
        raise ValueError(
            f"the prompt holds token {outside[0]} but the model knows 0..{config.model.vocab_size - 1}; use the "
            "model's own tokenizer"
        )
    tables_lib.check_seat(state.tables, seat, must_be_active=True)
    room = int(state.remaining()[seat])
    if len(prompt) > room:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens but seat {seat} has room for {room} more; shorten it, or admit the "
            "request with more positions"
        )
    return prompt.astype(np.int32)


def prefill(
    params: dsa.Params,
    state: EchoState,
    tokens: Sequence[int] | np.ndarray,
    seat: int,
    *,
    config: DecodeConfig,
    progress: Callable[[int, PrefillOutput], None] | None = None,
) -> tuple[EchoState, PrefillOutput]:
    """Runs a whole prompt, tokens i32[N] on the host, through prefill_chunk; returns the state and the last output.

    progress, if given, is called after every chunk with the number of tokens done and the chunk's output. Raises
    ValueError, changing nothing, for an empty prompt, a token outside the vocabulary, a seat that is idle or does not
    exist, and a prompt that is longer than the room of its seat.
    """
    tokens = _checked(tokens, state, seat, config)
    chunk = config.cache.chunk
    for start in range(0, len(tokens), chunk):
        part = np.zeros((chunk,), np.int32)
        count = min(chunk, len(tokens) - start)
        part[:count] = tokens[start : start + count]
        state, output = prefill_chunk(params, state, part, np.int32(seat), np.int32(count), config=config)
        if progress is not None:
            progress(start + count, output)
    return state, output
