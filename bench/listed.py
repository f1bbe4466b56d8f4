"""Scores and selection together: what the fused kernel's list of scores costs the one and saves the other.

    JAX_PLATFORMS=cuda,cpu python -m bench.listed                     (about 25 s on an H200)

It knows the two kernels that score and the selection, and makes keys at random. Nothing is prefetched: the threshold is
+inf, so the fused kernel does what the plain one does, and keeps the list. bench/top_k.py has the selection alone, with
bounds of all kinds; bench/prefetch.py what prefetch does.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_timing import graph_time, kernel_times
from bench.harness import record
from bench.top_k import CUPTI, TOP_K, bounds
from echo_jax import _ffi
from pallas_kernels import indexer_prefetch, indexer_scores

PAGE, WIDTH, HEADS = 64, 128, 64
SHAPES = ((1, 131072), (8, 131072), (32, 131072))
MULTIPLE = 2.0  # of k: what `threshold.Listing` leaves


class Inputs(NamedTuple):
    query: jax.Array  # e4m3[B, 1, G, D]
    weights: jax.Array  # f32[B, 1, G]
    pages: jax.Array  # u8[M, 64 * 132]
    numbers: jax.Array  # i32[B, N]
    visible: jax.Array  # i32[B, 1]
    bound: jax.Array  # f32[B]
    never: jax.Array  # f32[B]  a threshold that nothing exceeds
    nothing: jax.Array  # i32[B]  no older positions, and no place for a record
    slot_of: jax.Array  # i32[N_H]
    pool: jax.Array  # u32[1, N_H, 1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def make(seats: int, length: int) -> Inputs:
    """Keys and queries of small e4m3 numbers, drawn anew for every seat; a bound of zero."""
    keys = jax.random.split(jax.random.key(3), 3)
    pages = seats * length // PAGE
    codes = jax.random.bits(keys[0], (pages, PAGE * WIDTH), jnp.uint8) & jnp.uint8(0xB7)  # below 1, of both signs
    scales = jax.lax.bitcast_convert_type(jnp.ones((pages, PAGE), jnp.float32), jnp.uint8).reshape(pages, -1)
    query = jax.random.normal(keys[1], (seats, 1, HEADS, WIDTH)).astype(jnp.float8_e4m3fn)
    weights = jax.random.normal(keys[2], (seats, 1, HEADS), jnp.float32)
    return Inputs(
        *(query, weights, jnp.concatenate([codes, scales], axis=1)),
        jax.random.permutation(jax.random.key(9), pages).astype(jnp.int32).reshape(seats, -1),
        jnp.full((seats, 1), length, jnp.int32),
        jnp.zeros((seats,), jnp.float32),
        jnp.full((seats,), jnp.inf),
        jnp.zeros((seats,), jnp.int32),
        jnp.full((pages * PAGE,), -1, jnp.int32),
        jnp.zeros((1, pages * PAGE, 1), jnp.uint32),
    )


def plain(given: Inputs) -> jax.Array:
    asked = (given.query, given.weights, given.pages, given.numbers, given.visible)
    return indexer_scores(*asked, implementation="mosaic_gpu")


def fused(given: Inputs, bound: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    found = indexer_prefetch(
        *(given.query, given.weights, given.pages, given.numbers, given.visible),
        *(given.never, given.nothing, given.nothing, given.slot_of, given.pool, jnp.int32(0)),
        staging=64,
        bound=bound,
        implementation="mosaic_gpu",
    )
    return found.scores, found.above


def select(given: Inputs, scores: jax.Array, *hint: Any) -> tuple[jax.Array, jax.Array]:
    return _ffi.top_k(scores[:, 0], given.visible[:, 0], TOP_K, *hint)


def listed(given: Inputs) -> tuple[jax.Array, jax.Array]:
    scores, above = fused(given, given.bound)
    assert above is not None
    return select(given, scores, given.bound, above[:, 0])


WAYS = {
    "scores": plain,
    "scores, fused": lambda given: fused(given, None),
    "scores, fused, with a list": lambda given: fused(given, given.bound),
    "scores, selection": lambda given: select(given, plain(given)),
    "scores, selection with a bound": lambda given: select(given, plain(given), given.bound),
    "scores, fused, selection from the list": listed,
}


def main() -> None:
    reason = _ffi.why_unavailable()
    if reason is not None or jax.default_backend() != "gpu":
        sys.exit(f"needs an NVIDIA GPU and the library for it: {reason}")
    for seats, length in SHAPES:
        given = make(seats, length)
        scores = jax.jit(plain)(given)[:, 0]
        given = given._replace(bound=bounds(scores, jnp.full((seats,), int(MULTIPLE * TOP_K))))
        wanted = jax.tree.map(np.asarray, jax.jit(WAYS["scores, selection"])(given))
        for name, way in WAYS.items():
            run = jax.jit(way)
            if "selection" in name:
                for got, expected in zip(run(given), wanted, strict=True):
                    np.testing.assert_array_equal(np.asarray(got), expected, err_msg=f"{name}, {seats} x {length}")
            took = kernel_times(run, given)
            whole = graph_time(run, given)
            parts = " + ".join(f"{kernel[:14]} {time.median:.1f}" for kernel, time in took.kernels if time.median > 1.5)
            print(
                f"  {name:<40}{seats:>3} x {length}{took.total.median:8.1f} us in kernels,"
                f" {whole.median:6.1f} in a graph  {parts}",
                flush=True,
            )
            record(
                value=whole,
                unit="us",
                file="listed.jsonl",
                name=name,
                shapes={"seats": seats, "positions": length, "heads": HEADS, "k": TOP_K, "listed": MULTIPLE},
                method="time per call in a CUDA graph, L2 overwritten before each, less as many overwrites alone",
                notes=f"{took.total.median:.1f} us by {CUPTI}",
            )


if __name__ == "__main__":
    main()
