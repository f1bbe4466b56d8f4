"""Attention for training: cuDNN's where it runs and agrees with the textbook form, else that form in blocks.

Knows how to ask for either, and how to tell whether they agree. Knows no model: an attention here is what
`echo_jax.models.expanded.forward` takes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from echo_jax.models import expanded
from echo_jax.models.config import DsaConfig

AGREES = 0.05
"""Largest difference of gradients or outputs, as a share of the largest one, that bf16 may make."""

MASK_AT_ONCE = 1 << 30
"""Elements of a mask that one call is trusted with: offsets above 2^31 bytes break where someone counted in 32 bits."""


def in_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, scale: float, block: int = 256
) -> jax.Array:
    """The textbook form, `block` queries at a time, recomputed backwards; the length is a multiple of it or less."""
    batch, length = query.shape[:2]
    block = min(block, length)

    @jax.checkpoint
    def one_block(args):
        start, query, *allowed = args
        visible = jnp.arange(length)[None] <= start + jnp.arange(block)[:, None]
        visible = jnp.broadcast_to(visible[None], (batch, block, length))
        return expanded.attend(query, key, value, visible & allowed[0] if allowed else visible, scale)[0]

    parts = [a for a in (query, mask) if a is not None]
    parts = [jnp.moveaxis(a.reshape(batch, length // block, block, *a.shape[2:]), 1, 0) for a in parts]
    out = jax.lax.map(one_block, (block * jnp.arange(length // block), *parts))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, *out.shape[3:])


def flash(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, scale: float, causal: bool = True
) -> jax.Array:
    """cuDNN's; it wants values as wide as keys. `causal` may be False where the mask is causal itself."""
    width = value.shape[-1]
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[-1] - width)))
    out = jax.nn.dot_product_attention(
        query, key, value, mask=None if mask is None else mask[:, None], scale=scale, is_causal=causal,
        implementation="cudnn",
    )  # fmt: skip
    return out[..., :width]


def best(config: DsaConfig, *, backwards: bool = True) -> expanded.Attention:
    """The fastest that runs here and agrees, without and with a mask; prints what was found.

    backwards: gradients have to agree too. Arrays wider than 16 bits always go in blocks: cuDNN takes none.
    """
    if jax.default_backend() != "gpu":
        return in_blocks
    plain = flash if _agrees(flash, config, with_mask=False, backwards=backwards) else in_blocks
    masked = in_blocks
    for candidate in (flash, functools.partial(flash, causal=False)):
        if _agrees(candidate, config, with_mask=True, backwards=backwards):
            masked = candidate
            break

    def attention(query, key, value, mask, scale):
        if query.dtype.itemsize > 2:
            return in_blocks(query, key, value, mask, scale)
        if mask is None:
            return plain(query, key, value, None, scale)
        at_once, batch = max(1, MASK_AT_ONCE // (mask.shape[1] * mask.shape[2])), mask.shape[0]
        parts = [slice(first, first + at_once) for first in range(0, batch, at_once)]
        return jnp.concatenate([masked(query[p], key[p], value[p], mask[p], scale) for p in parts])

    return attention


def _agrees(attention: expanded.Attention, config: DsaConfig, *, with_mask: bool, backwards: bool) -> bool:
    batch, length = (1, config.max_positions) if with_mask else (4, 2048)
    widths = (config.qk_nope_head_dim + config.qk_rope_head_dim,) * 2 + (config.v_head_dim,)
    *keys, mask_key = jax.random.split(jax.random.key(1), 4)
    arrays = [
        jax.random.normal(k, (batch, length, config.num_heads, w), jnp.bfloat16)
        for k, w in zip(keys, widths, strict=True)
    ]

    def outcome(attention):
        def attended(query, key, value, mask):
            return attention(query, key, value, mask, config.attention_scale)

        def loss(*arrays):
            return (attended(*arrays).astype(jnp.float32) ** 2).sum()

        @jax.jit
        def run(query, key, value):
            index = jnp.arange(length)
            drawn = jax.random.bernoulli(mask_key, 0.01, (batch, length, length)) | (index[:, None] == index)[None]
            mask = drawn & (index[:, None] >= index)[None] if with_mask else None
            if backwards:
                return jax.grad(loss, (0, 1, 2))(query, key, value, mask)
            return (attended(query, key, value, mask),)

        return run(*arrays)

    name = f"cuDNN attention {'with' if with_mask else 'without'} a mask"
    try:
        worst = max(
            float(jnp.abs(a - b).astype(jnp.float32).max() / jnp.abs(a).astype(jnp.float32).max())
            for a, b in zip(outcome(in_blocks), outcome(attention), strict=True)
        )
    except Exception as error:  # whatever a missing or unwilling library raises: the blocks still train
        print(f"{name} does not run here: {str(error)[:300]}", flush=True)
        return False
    what = "gradients differ" if backwards else "outputs differ"
    print(f"{name}: {what} by {worst:.4f} of the largest", flush=True)
    return worst < AGREES
