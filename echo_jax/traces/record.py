"""Recording: a model continues prompts, as `generate` does, and what its indexers scored is written down.

Knows requests, and how to see the scores of a decode step: `echo_layer` hands them to its selector, and the recording
selector keeps them before it selects. The run is the resident one, which is what every offloaded run equals; the tokens
are those of `generate`, and a test says so. Knows nothing of files: `writing` does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import indexer
from echo_jax import state as state_lib
from echo_jax.config import CacheConfig
from echo_jax.decode import DecodeConfig
from echo_jax.engine import check_requests, resident
from echo_jax.layer import LayerInputs, echo_layer, page_numbers, scores_of
from echo_jax.models import dsa
from echo_jax.models.config import FULL, SHARED
from echo_jax.prefill import PrefillOutput, prefill
from echo_jax.recall import StepView
from echo_jax.sampling import GREEDY, Sampling, sample
from echo_jax.traces import LOOKAHEAD_SCORE, PAGE_BOUND, PROMPT_SELECTED, QUERY_COSINE, StepScores, TraceInfo
from echo_jax.traces.writing import Writer
from echo_jax.types import NO_POSITION, NO_ROW, EchoState, LayerState

RECORDED = "recorded"
"""The archetype of a layer that was recorded."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is recorded besides scores and sets. Static."""

    fields: tuple[str, ...] = ()
    page_size: int = 16  # of page_bound
    windows: int = 0  # queries at a prompt's end whose sets are kept, for prompt_selected


def trace_info(config: DecodeConfig, watch: Watch, *, requests: int, steps: int, band: int | None, score_dtype: str,
               seed: int, recipe: dict[str, Any]) -> TraceInfo:  # fmt: skip
    """The header of a recording. Raises ValueError for a page size that does not divide the capacity."""
    cache = config.cache
    if PAGE_BOUND in watch.fields and cache.capacity % watch.page_size:
        raise ValueError(
            f"page size {watch.page_size} does not divide the capacity of {cache.capacity} positions; use a divisor, "
            "such as 16"
        )
    if (PROMPT_SELECTED in watch.fields) != (watch.windows > 0):
        raise ValueError(f"{PROMPT_SELECTED} needs at least 1 window, and only it has windows; got {watch.windows}")
    return TraceInfo(
        layers=cache.num_layers,
        requests=requests,
        steps=steps,
        capacity=cache.capacity,
        top_k=cache.top_k,
        layer_kinds=cache.layer_kinds,
        archetypes=(RECORDED,) * cache.num_layers,
        source="record",
        seed=seed,
        band=band,
        score_dtype=score_dtype,
        page_size=watch.page_size if PAGE_BOUND in watch.fields else None,
        fields=watch.fields,
        recipe=recipe,
    )


def record(
    params: dsa.Params,
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    writer: Writer,
    watch: Watch,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    on_prefill: Callable[[int, int], None] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continues every prompt as `engine.generate` does, whose arguments these are, and writes every decode step.

    Returns the tokens of each prompt. A request's row is active from its first decode step until it ends. Raises
    ValueError before anything is allocated when the requests do not fit.
    """
    check_requests(config, prompts, max_new_tokens)
    config = resident(config)
    cache = config.cache
    state = state_lib.create(cache)
    seeds = jnp.asarray(np.arange(cache.seats, dtype=np.uint32) + np.uint32(seed))
    current = np.zeros((cache.seats,), np.int32)
    tokens: list[list[int]] = [[] for _ in prompts]
    windows = np.full((cache.num_layers, cache.seats, watch.windows, cache.top_k), NO_POSITION, np.int32)

    for seat, prompt in enumerate(prompts):
        state = state_lib.admit(cache, state, seat, len(prompt) + max_new_tokens)
        keep = functools.partial(_keep_windows, windows[:, seat], on_prefill, seat)
        state, output = prefill(params, state, prompt, seat, config=config, progress=_Progress(keep))
        position = jnp.full((1,), len(prompt), jnp.int32)
        current[seat] = int(sample(output.logits[None], seeds[seat : seat + 1], position, sampling)[0])
        tokens[seat].append(int(current[seat]))
        if on_token is not None:
            on_token(seat, tokens[seat][-1])

    running = {seat for seat in range(len(prompts)) if tokens[seat][-1] not in stop_tokens}
    for seat in set(range(len(prompts))) - running:
        state = state_lib.release(cache, state, seat)
    queries, has_begun = no_queries(config), np.zeros((cache.seats,), bool)
    for _ in range(max_new_tokens - 1):
        if not running:
            break
        state, logits, queries, steps = recorded_step(
            params, state, jnp.asarray(current)[:, None], queries, config=config, watch=watch
        )
        for layer, step in steps.items():
            starts = np.asarray(step.active) & ~has_begun
            kept = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(prompts)], step._replace(starts=starts))
            sets = windows[layer, : len(prompts)] if PROMPT_SELECTED in watch.fields else None
            writer.add(layer, kept._replace(prompt_selected=sets))
        has_begun |= np.asarray(steps[0].active)
        drawn = np.asarray(sample(logits, seeds, state.tables.lengths, sampling))
        for seat in sorted(running):
            current[seat] = drawn[seat]
            tokens[seat].append(int(drawn[seat]))
            if on_token is not None:
                on_token(seat, tokens[seat][-1])
            if tokens[seat][-1] in stop_tokens:
                running.discard(seat)
                state = state_lib.release(cache, state, seat)
    return tokens


class _Progress:
    """Calls back after every chunk with the chunk's own count of tokens."""

    def __init__(self, keep: Callable[[int, int, PrefillOutput], None]):
        self._keep, self._before = keep, 0

    def __call__(self, done: int, output: PrefillOutput) -> None:
        self._keep(done, done - self._before, output)
        self._before = done


def _keep_windows(windows: np.ndarray, on_prefill, seat: int, done: int, count: int, output: PrefillOutput) -> None:
    """windows i32[L, W, K] takes the sets of the chunk's `count` queries, the last ones last."""
    if width := windows.shape[1]:
        sets = np.asarray(output.selected)[:, :count][:, -width:]
        windows[:] = np.concatenate([windows, sets], axis=1)[:, -width:]
    if on_prefill is not None:
        on_prefill(seat, done)


Choose = Callable[[int, StepScores, int], indexer.Selection]
"""(layer, what it scored, K) -> what is attended. `starts` and `selected` are not there yet."""


@functools.partial(jax.jit, static_argnames=("config", "watch"), donate_argnames="state")
def recorded_step(
    params: dsa.Params,
    state: EchoState,
    tokens: jax.Array,
    last_queries: dict[int, jax.Array],
    *,
    config: DecodeConfig,
    watch: Watch,
) -> tuple[EchoState, jax.Array, dict[int, jax.Array], dict[int, StepScores]]:
    """`watched_step` that attends the exact top-k; `state` is donated."""

    def exact(layer: int, step: StepScores, top_k: int) -> indexer.Selection:
        return indexer.select(step.score, step.visible, top_k)

    return watched_step(params, state, tokens, last_queries, config=config, watch=watch, choose=exact)


def watched_step(
    params: dsa.Params,
    state: EchoState,
    tokens: jax.Array,
    last_queries: dict[int, jax.Array],
    *,
    config: DecodeConfig,
    watch: Watch,
    choose: Choose,
) -> tuple[EchoState, jax.Array, dict[int, jax.Array], dict[int, StepScores]]:
    """`decode_step` for tokens i32[B, 1] that also returns what was scored, and attends what `choose` says.

    last_queries: index queries f32[B, G, D_i] of each scoring layer in the step before, or `no_queries`. Returns the
    state, logits f32[B, V], the queries, and a StepScores for each scoring layer, `starts` left to the caller.
    """
    model, cache = config.model, config.cache
    view = state_lib.begin_step(cache, state, 1)
    hidden = before = dsa.embed(params, tokens.reshape(-1), model)
    layers, outputs, steps, queries = list(state.layers), [], {}, {}
    for index, weights in enumerate(params["layers"]):
        inputs = _project(weights, hidden, view, config)
        selector, seen = None, []
        if model.layer_kinds[index] == FULL:
            assert inputs.index_query is not None
            queries[index] = inputs.index_query[:, 0]
            entered = before if index else None
            fields = _fields(layers[index], weights, inputs, entered, last_queries[index], view, config, watch)
            selector = functools.partial(_watching_select, seen, functools.partial(choose, index), fields)
        before = hidden
        layers[index], output = echo_layer(
            cache,
            layers[index],
            state.host_pool,
            index,
            view,
            inputs,
            scale=model.attention_scale,
            shared=outputs[-1] if model.layer_kinds[index] == SHARED else None,
            selector=selector,
        )
        attended = output.attended.reshape(tokens.shape[0], *output.attended.shape[2:])
        hidden = dsa.finish(weights, hidden, attended, model, model.mlp_kinds[index])
        outputs.append(output)
        if seen:
            selected, kth_score = output.selection.positions[:, 0], output.selection.kth_score[:, 0]
            steps[index] = seen[0]._replace(selected=selected, kth_score=kth_score)

    state = state_lib.finish_step(cache, state, layers, [output.new_records for output in outputs], view)
    return state, dsa.logits(params, hidden, model), queries, steps


def _project(weights: dsa.Params, hidden: jax.Array, view: StepView, config: DecodeConfig) -> LayerInputs:
    inputs = dsa.project(weights, hidden, view.positions.reshape(-1), config.model)
    return LayerInputs(*jax.tree.map(lambda x: x.reshape(x.shape[0], 1, *x.shape[1:]), inputs))


def _watching_select(
    seen: list[StepScores],
    choose: Callable[[StepScores, int], indexer.Selection],
    fields: StepScores,
    score: jax.Array,
    visible: jax.Array,
    top_k: int,
) -> indexer.Selection:
    """What `choose` makes of the scores; they are kept for the caller, who is traced together with it."""
    seen.append(fields._replace(score=score))
    return choose(seen[0], top_k)


def _fields(layer: LayerState, weights, inputs: LayerInputs, before: jax.Array | None, last_query: jax.Array,
            view: StepView, config: DecodeConfig, watch: Watch) -> StepScores:  # fmt: skip
    """Everything of a layer's step but the scores, and what follows from them."""
    assert inputs.index_query is not None
    active = view.new_rows[:, 0] != NO_ROW
    guess = bound = cosine = None
    if LOOKAHEAD_SCORE in watch.fields:
        guess = _lookahead(layer, weights, before, view, config)
    if PAGE_BOUND in watch.fields:  # the new key is among those bounded
        bound = page_bounds(append(config.cache, layer, view, inputs), inputs, view, config, watch.page_size)
    if QUERY_COSINE in watch.fields:
        cosine = query_cosines(inputs.index_query[:, 0], last_query)
    return StepScores(
        score=jnp.zeros((0,)),
        length=jnp.where(active, view.lengths, 0),
        active=active,
        starts=active,
        floor=jnp.full(active.shape, -jnp.inf),
        lookahead_score=guess,
        page_bound=bound,
        query_cosine=cosine,
    )


# ---- what rivals need ------------------------------------------------------------------------------------


def _lookahead(layer: LayerState, weights, before: jax.Array | None, view: StepView, config: DecodeConfig) -> jax.Array:
    """f32[B, P]: the layer's scores of older positions, its query made from what entered the layer before it.

    That is InfiniGen's guess, known one layer ahead. -inf for layer 0, which has nothing before it.
    """
    if before is None:
        return jnp.full(view.rows.shape, -jnp.inf)
    inputs = _project(weights, before, view, config)
    older = view._replace(visible=jnp.where(view.visible > 0, view.lengths[:, None], 0))
    return score_positions(config.cache, layer, older, inputs)[:, 0]


def append(config: CacheConfig, state: LayerState, view: StepView, inputs: LayerInputs) -> LayerState:
    """The new index keys go to their places, and nothing else is stored."""
    assert inputs.index_key is not None and state.index_keys is not None
    keys = inputs.index_key.reshape(-1, config.keys.width)
    return state.replace(index_keys=config.keys.append(state.index_keys, view.new_rows.reshape(-1), keys))


def score_positions(config: CacheConfig, state: LayerState, view: StepView, inputs: LayerInputs) -> jax.Array:
    """f32[B, T, P]: index scores of all positions, -inf where the query does not see. No key is appended."""
    assert inputs.index_query is not None and inputs.index_weights is not None and state.index_keys is not None
    asked = config.keys.encode_query(inputs.index_query, inputs.index_weights)
    query, weights = jax.lax.optimization_barrier(asked)
    return scores_of(config, view, query, weights, state.index_keys)


def page_bounds(layer: LayerState, inputs: LayerInputs, view: StepView, config: DecodeConfig, page: int) -> jax.Array:
    """f32[B, P // page]: no visible position of a page scores above its bound, up to f32 rounding; -inf without any.

    From the smallest and largest value of each channel over the page's keys, as Quest bounds attention scores: a head's
    product with any key lies between sum_d min(q lo, q hi) and sum_d max(q lo, q hi), and relu and the head's weight
    are monotone, rising or falling with the weight's sign.
    """
    keys_of, state = config.cache.keys, layer.index_keys
    assert inputs.index_query is not None and inputs.index_weights is not None and state is not None
    query, weights = keys_of.prepare_query(inputs.index_query[:, 0], inputs.index_weights[:, 0])
    keys = keys_of.read_pages(state, page_numbers(view.rows).reshape(-1)).reshape(*view.rows.shape, keys_of.width)
    seats, capacity = view.rows.shape
    is_visible = (jnp.arange(capacity, dtype=jnp.int32)[None] < view.visible).reshape(seats, -1, page, 1)
    keys = keys.reshape(seats, -1, page, keys_of.width)
    lowest = jnp.min(jnp.where(is_visible, keys, jnp.inf), axis=2)  # [B, pages, D]
    highest = jnp.max(jnp.where(is_visible, keys, -jnp.inf), axis=2)
    is_empty = ~jnp.any(is_visible, axis=(2, 3))
    lowest, highest = (jnp.where(is_empty[..., None], 0.0, edge) for edge in (lowest, highest))
    rising, falling = jax.nn.relu(query), jax.nn.relu(-query)

    def product(one, other):
        return jnp.einsum("bgd,bpd->bgp", one, other, precision=jax.lax.Precision.HIGHEST)

    most = jax.nn.relu(product(rising, highest) - product(falling, lowest))
    least = jax.nn.relu(product(rising, lowest) - product(falling, highest))
    bound = jnp.sum(jnp.where(weights[..., None] > 0, most, least) * weights[..., None], axis=1)
    return jnp.where(is_empty, -jnp.inf, bound)


def query_cosines(query: jax.Array, last: jax.Array) -> jax.Array:
    """f32[B]: cosine of two index queries f32[B, G, D_i], the mean over heads; -1 where the last is `no_queries`."""
    lengths = jnp.linalg.norm(query, axis=-1) * jnp.linalg.norm(last, axis=-1)
    cosines = jnp.sum(query * last, axis=-1) / jnp.maximum(lengths, 1e-30)
    return jnp.where(jnp.any(last != 0, axis=(1, 2)), jnp.mean(cosines, axis=-1), -1.0)


def no_queries(config: DecodeConfig) -> dict[int, jax.Array]:
    """What `recorded_step` is given before the first one: zeros, which no step's queries are."""
    shape = (config.cache.seats, config.model.index_heads, config.model.index_head_dim)
    full = [index for index, kind in enumerate(config.model.layer_kinds) if kind == FULL]
    return {index: jnp.zeros(shape, jnp.float32) for index in full}
