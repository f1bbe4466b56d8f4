"""What sparse MLA over slots is, in plain jnp; runs on every backend.

It knows the stored forms of records as bytes. It does not know who chose the slots.

    rows = records[slots]                                          # [K, 576], decoded; slots of -1 are not listed
    logits = scale * query @ rows.T                                # [H, K], one query row
    out = softmax(logits) @ rows[:, :512]                          # f32; zeros where nothing is listed
    lse = log(sum(exp(logits)))                                    # natural; -inf where nothing is listed
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SCALED_TOGETHER = 128  # latent values of an FP8 record that share a scale


def sparse_mla(
    query: jax.Array, records: jax.Array, slots: jax.Array, scale: float, latent: int
) -> tuple[jax.Array, jax.Array]:
    """f32[B, T, H, latent] and f32[B, T, H]; arguments as in `pallas_kernels.sparse_mla.dispatch.sparse_mla`."""
    seats, rows, heads, width = query.shape
    stored = records.at[jnp.maximum(slots, 0)].get(mode="clip").reshape(seats * rows, -1, *records.shape[1:])
    flat = query.astype(jnp.float32).reshape(seats * rows, heads, width)
    is_listed = (slots >= 0).reshape(seats * rows, -1)
    out, lse = jax.vmap(attend_row, in_axes=(0, 0, 0, None, None))(flat, stored, is_listed, scale, latent)
    return out.reshape(seats, rows, heads, latent), lse.reshape(seats, rows, heads)


def attend_row(
    query: jax.Array, stored: jax.Array, is_listed: jax.Array, scale: float, latent: int
) -> tuple[jax.Array, jax.Array]:
    """One query row: query f32[H, D], stored [K, *record shape], is_listed bool[K] -> f32[H, latent], f32[H]."""
    # A place that is not listed holds whatever was there, NaN included: zeros keep it out of both products.
    rows = jnp.where(is_listed[:, None], decode(stored, query.shape[-1], latent), 0.0)
    logits = jnp.einsum("hd,kd->hk", query, rows, precision=lax.Precision.HIGHEST) * jnp.float32(scale)
    logits = jnp.where(is_listed[None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum("hk,kd->hd", weights, rows, precision=lax.Precision.HIGHEST)[:, :latent]
    return mixed / jnp.where(total > 0, total, 1.0), (peak + jnp.log(total))[:, 0]


def decode(stored: jax.Array, width: int, latent: int) -> jax.Array:
    """Stored records [..., *record shape] -> f32[..., width]; u32 words are an FP8 record, anything else the values."""
    if stored.dtype != jnp.uint32:
        lead = stored.shape[: stored.ndim - 2]
        return stored.reshape(*lead, width).astype(jnp.float32)
    lead, words, scales = stored.shape[:-1], latent // 4, latent // SCALED_TOGETHER
    codes = lax.bitcast_convert_type(stored[..., :words], jnp.float8_e4m3fn).astype(jnp.float32)
    scale = lax.bitcast_convert_type(stored[..., words : words + scales], jnp.float32)
    values = codes.reshape(*lead, scales, SCALED_TOGETHER) * scale[..., None]
    rope = lax.bitcast_convert_type(stored[..., words + scales :], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([values.reshape(*lead, latent), rope.reshape(*lead, width - latent)], axis=-1)
