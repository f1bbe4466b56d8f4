"""What index scores are, in plain jnp; runs on every backend.

It knows the stored forms of index keys as bytes. It does not know who fills the pages or what a score is for.

    keys = pages[page_numbers]                                     # [P, D], decoded
    score[p] = sum_g weights[g] * relu(query[g] . keys[p])         # one query row
    score[p] = -inf where p >= visible
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

PAGE = 64  # keys in a page


def indexer_scores(
    query: jax.Array, weights: jax.Array, pages: jax.Array, page_numbers: jax.Array, visible: jax.Array
) -> jax.Array:
    """f32[B, T, 64 N]; arguments as in `pallas_kernels.dispatch.indexer_scores`."""
    keys = jax.vmap(lambda numbers: read_keys(pages, numbers, query.shape[-1]))(page_numbers)
    return jax.vmap(score_seat)(query.astype(jnp.float32), weights, keys, visible)


def read_keys(pages: jax.Array, numbers: jax.Array, width: int) -> jax.Array:
    """i32[N] page numbers -> f32[64 N, D]. A number outside the pool reads some page: its positions are not visible."""
    stored = pages.at[jnp.maximum(numbers, 0)].get(mode="clip")
    if pages.dtype != jnp.uint8:
        return stored.reshape(-1, width).astype(jnp.float32)
    codes = lax.bitcast_convert_type(stored[:, : PAGE * width], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = lax.bitcast_convert_type(stored[:, PAGE * width :].reshape(-1, PAGE, 4), jnp.float32)
    return (codes.reshape(-1, PAGE, width) * scales[..., None]).reshape(-1, width)


def score_seat(query: jax.Array, weights: jax.Array, keys: jax.Array, visible: jax.Array) -> jax.Array:
    """One seat: query f32[T, G, D], weights f32[T, G], keys f32[P, D], visible i32[T] -> f32[T, P]."""
    rows, heads, width = query.shape
    products = jnp.einsum("md,pd->mp", query.reshape(rows * heads, width), keys, precision=lax.Precision.HIGHEST)
    products = jax.nn.relu(products).reshape(rows, heads, -1)
    score = jnp.sum(products * weights[..., None], axis=1)
    positions = jnp.arange(score.shape[-1], dtype=jnp.int32)
    return jnp.where(positions[None] < visible[:, None], score, -jnp.inf)
