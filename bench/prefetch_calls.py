"""What the bench of prefetch times: inputs with a wanted hit rate, pools whose every word is known, and the calls.

It knows shapes, how a hit rate is made and how host rows stay cold. It knows no claim. Every time is in microseconds.

How a hit rate is made: the threshold of a seat lies just below its 2048th score, so 2048 rows are above it, and all of
them but the wanted number of misses have a slot. No row below the threshold matters to anybody. Every call has queries,
maps and rows of its own, and takes the next layer of the pool: host rows are as cold as a decode step finds them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import events, harness
from bench import indexer_scores as plain
from bench.moving import made_pool, moving_time
from echo_jax import hostmem
from echo_jax.recall import prefetch_candidates, rows_at
from pallas_kernels import indexer_prefetch, indexer_scores
from pallas_kernels.indexer_prefetch import reference

HEADS, WIDTH, PAGE, K = 64, 128, 64, 2048
BYTES = {"fp8": 656, "bf16": 1152}
HOST_ROWS, LAYERS = 32 * 98_304, {"fp8": 5, "bf16": 4}  # 9.6 and 13.5 GiB
SETS = 10  # of queries, maps and rows
REPEATS = 16


# ---- inputs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Set:
    """What changes from call to call."""

    query: jax.Array  # e4m3[B, 1, 64, 128]
    threshold: jax.Array  # f32[B]  just below the 2048th score of each seat
    top: np.ndarray  # i32[B, K]  host rows of the 2048 best


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One shape: what all calls share, and SETS of what they do not."""

    seats: int
    length: int
    weights: jax.Array
    pages: jax.Array
    numbers: jax.Array
    visible: jax.Array
    lengths: jax.Array
    sets: tuple[Set, ...]


@functools.cache
def inputs(seats: int, length: int) -> Inputs:
    _, weights, pages, numbers, visible = plain.arguments("fp8", seats, length)

    @jax.jit
    def best(key):
        query = jax.random.normal(key, (seats, 1, HEADS, WIDTH)).astype(jnp.float8_e4m3fn)
        score = indexer_scores(query, weights, pages, numbers, visible, implementation="mosaic_gpu")[:, 0]
        values, positions = lax.top_k(score[:, :-1], K)  # the last position is this step's
        rows = jnp.take_along_axis(reference.host_rows(numbers), positions, axis=1)
        return query, jnp.nextafter(values[:, -1], jnp.float32(-jnp.inf)), rows

    made = [best(jax.random.key(number)) for number in range(SETS)]
    sets = tuple(Set(query, threshold, np.asarray(rows)) for query, threshold, rows in made)
    return Inputs(seats, length, weights, pages, numbers, visible, visible[:, 0] - 1, sets)


def missing(given: Inputs, misses: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """For each set: slot_of i32[N_H], where `misses` of each seat's best have no slot, and these rows, ascending."""
    random = np.random.default_rng(misses)
    maps, rows = [], []
    nothing = jnp.full((HOST_ROWS,), reference.NO_SLOT, jnp.int32)
    for one in given.sets:
        shuffled = random.permuted(one.top, axis=1)
        rows.append(jnp.asarray(np.sort(shuffled[:, :misses], axis=1).reshape(-1)))
        maps.append(nothing.at[shuffled[:, misses:].reshape(-1)].set(jnp.int32(1)))
    return maps, rows


@functools.cache
def pool_of(records: str) -> list[jax.Array]:
    """[pool], each word a function of its layer, row and place."""
    holder = made_pool(BYTES[records], LAYERS[records], HOST_ROWS)
    layers, host_rows, words = holder[0].shape
    store = jax.jit(hostmem.write_back, donate_argnums=0)

    @jax.jit
    def pattern(first):
        row = first + jnp.arange(65_536, dtype=jnp.int32)
        word = jnp.arange(words, dtype=jnp.uint32)[None, None] * jnp.uint32(0x85EBCA6B)
        layer = jnp.arange(layers, dtype=jnp.uint32)[:, None, None] << 27
        made = (row.astype(jnp.uint32)[None, :, None] * jnp.uint32(0x9E3779B1)) ^ layer ^ word
        return made, jnp.where(row < host_rows, row, -1)

    for first in range(0, host_rows, 65_536):
        holder[0] = store(holder[0], *pattern(jnp.int32(first)))
    jax.block_until_ready(holder[0])
    return holder


# ---- what is timed: (small, changing, shared, layer) -> results, the first of which comes last -----------------------


@jax.jit
def score(visible, changing, shared, layer):
    del layer
    weights, pages, numbers, *_ = shared
    return indexer_scores(changing[0], weights, pages, numbers, visible, implementation="mosaic_gpu")


@jax.jit
def recall(zero, changing, shared, layer):
    """Rows known beforehand: what the link takes."""
    return hostmem.read_rows(shared[-1], layer + zero[0], changing[0])


@jax.jit
def in_turn(visible, changing, shared, layer):
    """Scores, then a recall of rows known beforehand: the best that is possible without overlap."""
    scores = score(visible, changing, shared, layer)
    bits = lax.bitcast_convert_type(scores[0, 0, :1], jnp.uint32)
    zero = jnp.minimum(bits, jnp.uint32(0)).astype(jnp.int32)
    return recall(zero, changing[1:], shared, layer), scores


@functools.partial(jax.jit, static_argnames="staging")
def fused(visible, changing, shared, layer, staging):
    (query, threshold, slot_of), (weights, pages, numbers, lengths, cap, pool) = changing, shared
    return indexer_prefetch(
        *(query, weights, pages, numbers, visible, threshold, lengths, cap, slot_of, pool, layer),
        staging=staging,
        implementation="mosaic_gpu",
    )


@functools.partial(jax.jit, static_argnames="staging")
def separate(visible, changing, shared, layer, staging):
    """The library's other path: scores, candidates found by running sums, records read by the library."""
    (query, threshold, slot_of), (weights, pages, numbers, lengths, cap, pool) = changing, shared
    scores = indexer_scores(query, weights, pages, numbers, visible, implementation="mosaic_gpu")
    of_position = reference.host_rows(numbers)
    positions = jnp.arange(of_position.shape[1], dtype=jnp.int32)[None]
    is_absent = (positions < lengths[:, None]) & (slot_of[of_position] < 0)
    found, refused = prefetch_candidates(scores, threshold, is_absent, cap, staging)
    rows = rows_at(of_position, found)
    return hostmem.read_rows(pool, layer, rows.reshape(-1)), scores, rows, refused


def timed(function: Callable, small: jax.Array, changing: list[tuple], shared: tuple, layers: int) -> Any:
    """us of one call; the k-th call has the k-th of `changing`, and layer k of a pool of `layers`."""
    calls = itertools.count()

    def call(small, changing, shared):
        number = next(calls) % REPEATS
        return function(small, changing[number % SETS], shared, jnp.int32(number % layers))

    return events.event_time(call, small, changing, shared, repeats=REPEATS)


def fill_time(records: str, count: int) -> harness.Measurement:
    """us of the kernel that moves `count` staged records to slots: what `require` adds where rows were staged."""
    words, calls = BYTES[records] // 4, 8
    random = np.random.default_rng(0)
    pool, target = pool_of(records)[0], [jnp.zeros((65_536, words), jnp.uint32)]
    staged = jnp.zeros((count, words), jnp.uint32)
    rows = jnp.arange(count, dtype=jnp.int32)
    slots = [jnp.asarray(random.permutation(65_536)[:count].astype(np.int32)) for _ in range(calls)]

    @functools.partial(jax.jit, donate_argnums=0)
    def program(target, pool, slots):
        for at in slots:
            arguments = (jnp.int32(0), jnp.int32(count), rows, at, rows, staged[:0], staged)
            target = hostmem.recall(target, pool, *arguments)
        return target

    def call():
        target[0] = program(target[0], pool, slots)
        return target[0]

    return moving_time(call)
