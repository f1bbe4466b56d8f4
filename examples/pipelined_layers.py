"""Small random layers whose stages a schedule puts in order: real scores, real pools, real attention.

Knows what each stage of one request in one layer does, with the functions of the library, and how schedules over
requests, bands and layers are built from it. Does not know why one schedule is better than another.

Inputs drift from step to step, so that selections move and rows are missing. Contexts are given and do not grow.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import attend, hostmem, indexer, pool, recall
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.recall import StepView
from echo_jax.threshold import Ema
from echo_jax.types import NO_ROW, LayerState, Staging
from examples.schedules import BANDS, LAYERS, REQUESTS, Schedule, run


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 3
    requests: int = 4
    context: int = 256
    bands: int = 4
    top_k: int = 24
    slots: int = 40  # of a request in one layer
    hidden: int = 32
    index_heads: int = 4
    index_width: int = 32
    heads: int = 4
    latent: int = 32
    rope: int = 16

    @property
    def config(self) -> CacheConfig:
        """The cache of ONE request: what one moves cannot evict what another is about to attend."""
        return CacheConfig(
            layer_kinds=("full",) * self.layers,
            records=RecordFormat("bf16", self.latent, self.rope),
            keys=KeyFormat("f32", self.index_width),
            threshold=Ema(),
            eviction=Lru(),
            seats=1,
            capacity=self.context,
            host_rows=self.requests * self.context,
            device_slots=self.slots,
            top_k=self.top_k,
            staging=self.top_k,
        )


class World(NamedTuple):
    """What does not change: random weights, and requests whose whole context is on the host already."""

    index_query: jax.Array  # f32[L, E, G * D_i]
    index_weights: jax.Array  # f32[L, E, G]
    query: jax.Array  # f32[L, E, H * D]
    out: jax.Array  # f32[L, H * latent, E]
    keys: jax.Array  # f32[L, R, P, D_i]
    host_pool: jax.Array  # [L, R * P, *record]


class Cache(NamedTuple):
    layers: LayerState  # leaves [L, R, ...]
    kth_score: jax.Array  # f32[L, R]  the threshold policy's memory
    step: jax.Array  # i32[]


class Chosen(NamedTuple):
    positions: jax.Array  # i32[1, 1, K]
    scores: jax.Array  # f32[1, 1, K]
    kth_score: jax.Array  # f32[]


class Output(NamedTuple):
    """One request in one layer: what must be equal, then what may differ."""

    attended: jax.Array  # f32[E]
    positions: jax.Array  # i32[K]
    kth_score: jax.Array  # f32[]
    moved: jax.Array  # i32[4]  hits, useful, recalled, staged


@dataclasses.dataclass(frozen=True)
class Layers:
    """The stages of one request in one layer. Every schedule scores in the same bands and attends one request at a
    time, because the bits of a sum depend on shapes; the barriers keep XLA from fusing two stages into one."""

    sizes: Sizes
    world: World
    step: jax.Array

    def view(self, request: jax.Array) -> StepView:
        sizes = self.sizes
        rows = (request * sizes.context + jnp.arange(sizes.context, dtype=jnp.int32))[None]
        full = jnp.full((1,), sizes.context, jnp.int32)
        return StepView(rows, full, full[:, None] - 1, jnp.full((1, 1), NO_ROW, jnp.int32), full[:, None], self.step)

    def score_band(self, layer, request, x, band) -> jax.Array:
        """f32[P / bands]; x f32[E] is the layer's input, or a guess of it."""
        sizes, length = self.sizes, self.sizes.context // self.sizes.bands
        query = (x[None] @ self.world.index_query[layer]).reshape(1, sizes.index_heads, sizes.index_width)
        keys = lax.dynamic_slice_in_dim(self.world.keys[layer, request], band * length, length)
        weights = x[None] @ self.world.index_weights[layer]
        query, weights, keys = lax.optimization_barrier((query, weights, keys))
        return lax.optimization_barrier(indexer.scores(query, weights, keys))[0]

    def score(self, layer, request, x) -> jax.Array:
        bands = jnp.arange(self.sizes.bands, dtype=jnp.int32)
        return lax.map(lambda band: self.score_band(layer, request, x, band), bands).reshape(-1)

    def choose(self, score: jax.Array) -> Chosen:
        visible = jnp.full((1,), self.sizes.context, jnp.int32)
        positions, kth_score = indexer.select(score[None], visible, self.sizes.top_k)
        return Chosen(positions[None], score[positions][None], kth_score[0])

    def prefetch(self, layer, request, maps, wanted: jax.Array, first: jax.Array | int, staging: int) -> Staging:
        """Copies what is absent of the positions first + i with wanted bool[W][i], the lowest `staging` of them."""
        rows = lax.dynamic_slice_in_dim(self.view(request).rows, first, wanted.shape[0], axis=1)
        is_absent = pool.lookup(maps, rows) < 0
        found, refused = recall.prefetch_candidates(
            jnp.where(wanted, 1.0, 0.0)[None, None],
            jnp.full((1,), 0.5),
            is_absent,
            jnp.full((1,), staging, jnp.int32),
            staging,
        )
        rows = recall.rows_at(rows, found)
        records = hostmem.read_rows(self.world.host_pool, layer, rows[0])
        return Staging(rows, records[None], refused)

    def require(self, layer, request, cache: Cache, chosen: Chosen, staging: Staging | None):
        """The request's pool holds what is chosen; the cache, the chosen records in order, and what moved."""
        config = self.sizes.config
        staging = recall.no_staging(config, 1) if staging is None else staging
        state = jax.tree.map(lambda leaf: leaf[layer, request], cache.layers)
        nothing = jnp.zeros((1, 1, *config.records.shape), config.records.dtype)
        state, slots, moved = recall.require(
            config, state, self.world.host_pool, layer, self.view(request), nothing, *chosen[:2], staging
        )
        layers = jax.tree.map(lambda leaf, one: leaf.at[layer, request].set(one), cache.layers, state)
        counts = jnp.stack([moved.hits, moved.useful, moved.recalled, moved.staged])
        return cache._replace(layers=layers), (state.records[slots[0, 0]], counts)

    def attend(self, layer, x, chosen: Chosen, records, counts) -> Output:
        sizes, formats = self.sizes, self.sizes.config.records
        query = (x[None] @ self.world.query[layer]).reshape(1, sizes.heads, formats.width)
        query, records = lax.optimization_barrier((query, records[None]))
        mixed = attend.attend(query, records, chosen.positions[0] >= 0, formats.width**-0.5, formats)
        mixed = lax.optimization_barrier(mixed).reshape(1, -1) @ self.world.out[layer]
        return Output(mixed[0], chosen.positions[0, 0], chosen.kth_score, counts)


@functools.partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def step(sizes: Sizes, schedule: Schedule, world: World, cache: Cache, x: jax.Array, unroll: bool = False):
    """One decode step of every request, x f32[R, E]: the cache after it and the outputs [L, R]."""
    layers = Layers(sizes, world, cache.step)
    program = {REQUESTS: _over_requests, BANDS: _over_bands, LAYERS: _over_layers}[schedule.over]
    cache, outputs = program(schedule, layers, cache, x, unroll)
    kth_score = jax.vmap(jax.vmap(Ema().update))(cache.kth_score, outputs.kth_score)
    return Cache(cache.layers, kth_score, cache.step + 1), outputs


def _over_requests(schedule: Schedule, layers: Layers, cache: Cache, x, unroll: bool):
    def one_layer(carry, layer):
        cache, x = carry

        def score(request, parts, given):
            return (), layers.choose(layers.score(layer, request, x[request]))

        def require(request, parts, given):
            return layers.require(layer, request, parts["require"], given["score"], None)

        def attend(request, parts, given):
            return (), layers.attend(layer, x[request], given["score"], *given["require"])

        stages = {"score": score, "require": require, "attend": attend}
        parts, kept = run(schedule, x.shape[0], stages, {"require": cache}, unroll=unroll)
        return (parts["require"], x + kept["attend"].attended), kept["attend"]

    numbers = jnp.arange(layers.sizes.layers, dtype=jnp.int32)
    (cache, _), outputs = lax.scan(one_layer, (cache, x), numbers, unroll=unroll)
    return cache, outputs


def _over_bands(schedule: Schedule, layers: Layers, cache: Cache, x, unroll: bool):
    sizes = layers.sizes
    length, places = sizes.context // sizes.bands, sizes.config.staging // sizes.bands

    def one_request(layer, x, cache, request):
        maps = jax.tree.map(lambda leaf: leaf[layer, request], cache.layers.slots)

        def score(band, parts, given):
            return (), layers.score_band(layer, request, x[request], band)

        def prefetch(band, parts, given):
            wanted = given["score"] > cache.kth_score[layer, request]
            return (), layers.prefetch(layer, request, maps, wanted, band * length, places)

        stages = {"score": score, "prefetch": prefetch}
        _, kept = run(schedule, sizes.bands, stages, {}, keep=("score", "prefetch"), unroll=unroll)
        rows, records, refused = kept["prefetch"]
        staging = Staging(rows.reshape(1, -1), records.reshape(1, -1, *records.shape[3:]), refused.sum(axis=0))
        chosen = layers.choose(kept["score"].reshape(-1))
        cache, found = layers.require(layer, request, cache, chosen, staging)
        return cache, layers.attend(layer, x[request], chosen, *found)

    def one_layer(carry, layer):
        cache, x = carry
        requests = jnp.arange(sizes.requests, dtype=jnp.int32)
        cache, outputs = lax.scan(functools.partial(one_request, layer, x), cache, requests, unroll=unroll)
        return (cache, x + outputs.attended), outputs

    (cache, _), outputs = lax.scan(one_layer, (cache, x), jnp.arange(sizes.layers, dtype=jnp.int32), unroll=unroll)
    return cache, outputs


def _over_layers(schedule: Schedule, layers: Layers, cache: Cache, x, unroll: bool):
    requests = jnp.arange(layers.sizes.requests, dtype=jnp.int32)

    def each(function: Callable[[jax.Array, Any], Any], values: Any) -> Any:
        one = lambda _, taken: ((), function(*taken))  # noqa: E731
        return lax.scan(one, (), (requests, values), unroll=unroll)[1]

    def choose(layer, x):
        return each(lambda request, x: layers.choose(layers.score(layer, request, x)), x)

    def guess(layer, parts, given):  # in the round before the layer's: parts["attend"] is the input of the layer before
        return (), choose(layer, parts["attend"]).positions

    def prefetch(layer, parts, given):
        def one(request, positions):
            maps = jax.tree.map(lambda leaf: leaf[layer, request], parts["require"].layers.slots)
            wanted = jnp.zeros((layers.sizes.context,), bool).at[positions[0, 0]].set(True)
            return layers.prefetch(layer, request, maps, wanted, 0, layers.sizes.config.staging)

        return (), each(one, given["guess"])

    def score(layer, parts, given):
        return (), choose(layer, parts["attend"])

    def require(layer, parts, given):
        def one(cache, taken):
            request, chosen, staging = taken
            return layers.require(layer, request, cache, chosen, staging)

        return lax.scan(one, parts["require"], (requests, given["score"], given["prefetch"]), unroll=unroll)

    def attend(layer, parts, given):
        x = parts["attend"]
        taken = (x, given["score"], given["require"])
        outputs = each(lambda request, one: layers.attend(layer, one[0], one[1], *one[2]), taken)
        return x + outputs.attended, outputs

    stages = {"guess": guess, "prefetch": prefetch, "score": score, "require": require, "attend": attend}
    parts, kept = run(schedule, layers.sizes.layers, stages, {"require": cache, "attend": x}, unroll=unroll)
    return parts["require"], kept["attend"]


def make(sizes: Sizes, seed: int = 0) -> tuple[World, Cache]:
    """Random weights and records, and empty pools."""
    config, random = sizes.config, np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32)

    memory = hostmem.choose()
    records = normal(sizes.layers, config.host_rows, config.records.width)
    host_pool = hostmem.create_pool(
        (sizes.layers, config.host_rows, *config.records.shape), config.records.dtype, memory
    )
    fill = jax.jit(hostmem.write_back, donate_argnums=0)
    host_pool = fill(host_pool, config.records.encode(records), jnp.arange(config.host_rows, dtype=jnp.int32))
    each = (sizes.layers, sizes.hidden)
    world = World(
        index_query=normal(*each, sizes.index_heads * sizes.index_width, scale=sizes.hidden**-0.5),
        index_weights=jnp.abs(normal(*each, sizes.index_heads, scale=sizes.hidden**-0.5)),
        query=normal(*each, sizes.heads * config.records.width, scale=sizes.hidden**-0.5),
        out=normal(sizes.layers, sizes.heads * sizes.latent, sizes.hidden, scale=(sizes.heads * sizes.latent) ** -0.5),
        keys=normal(sizes.layers, sizes.requests, sizes.context, sizes.index_width),
        host_pool=host_pool,
    )
    one = LayerState(
        slots=pool.initial(config.host_rows, config.device_slots),
        records=jnp.zeros((config.device_slots, *config.records.shape), config.records.dtype),
        index_keys=None,
        threshold=(),
    )
    lead = (sizes.layers, sizes.requests)
    layers = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)).copy(), one)
    return world, Cache(layers, jnp.full(lead, jnp.inf), jnp.int32(1))


def decode(sizes: Sizes, schedule: Schedule, steps: int, unroll: bool = False) -> tuple[Output, list[float]]:
    """Outputs [steps, L, R] of requests whose inputs drift from step to step, and the seconds of each step."""
    world, cache = make(sizes)
    random, x, outputs, seconds = np.random.default_rng(1), 0.0, [], []
    for _ in range(steps):
        x = 0.9 * x + random.normal(size=(sizes.requests, sizes.hidden)) * (1 - 0.9**2) ** 0.5
        start = time.perf_counter()
        cache, output = jax.block_until_ready(step(sizes, schedule, world, cache, jnp.asarray(x, jnp.float32), unroll))
        seconds.append(time.perf_counter() - start)
        outputs.append(jax.tree.map(np.asarray, output))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *outputs), seconds


def differences(one: Output, other: Output) -> int:
    """Words of attended outputs, lists and k-th scores that are not the same bits."""
    return sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in zip(one[:3], other[:3], strict=True))
