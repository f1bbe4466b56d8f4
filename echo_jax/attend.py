"""Sparse MLA over selected records: softmax over the list, in list order. Maths only.

Bits depend on the records and the order of the list, never on which slots the records came from: the resident and the
offloaded run share this function.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.formats import RecordFormat


def attend(query: jax.Array, stored: jax.Array, is_listed: jax.Array, scale: float, records: RecordFormat) -> jax.Array:
    """out[n, h] = sum_k softmax_k(scale * query[n, h] . record[n, k]) * record[n, k, :latent].

    query f32[N, H, D]; stored [N, K, *record shape]; is_listed bool[N, K]; -> f32[N, H, latent]. A query with an empty
    list returns zeros.
    """
    # Unlisted places hold whatever was there, NaN included: zeros keep it out of both products. Both run over whole
    # records, so the rows are laid out once (slicing the latents first doubles the time on a CPU).
    rows = jnp.where(is_listed[..., None], records.decode(stored), 0.0)
    logits = jnp.einsum("nkd,nhd->nkh", rows, query, precision=lax.Precision.HIGHEST) * scale
    logits = jnp.where(is_listed[..., None], logits, -jnp.inf).swapaxes(1, 2)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum("nhk,nkd->nhd", weights, rows, precision=lax.Precision.HIGHEST)[..., : records.latent]
    return mixed / jnp.where(total > 0, total, 1.0)


def digest(attended: jax.Array) -> jax.Array:
    """u32[N]: a fingerprint of the bits of attended f32[N, H, R]; integers, so the order of summation is free.

    Each word is mixed with its place before summing; two outputs that differ in any bit collide with chance 2^-32.
    """
    words = lax.bitcast_convert_type(attended, jnp.uint32).reshape(attended.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)[None] * jnp.uint32(2654435761)
    mixed = (words ^ place) * jnp.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    return jnp.sum(mixed ^ (mixed >> 13), axis=-1, dtype=jnp.uint32)
