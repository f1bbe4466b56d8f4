"""The lightning indexer over whole sequences: its scores, the keys they select, and how it is taught.

Knows the exact top-k as a mask, and how far index scores are from the attention that they should foresee. Knows no
transformer and no values; `expanded` brings both together. What is learnt from here reaches nothing but the indexer.

Letters: B sequences, T queries, S keys, H heads, G index heads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.models.config import DsaConfig

MASKED = -1e30
"""Logit of a key that a query may not see; finite, so that no gradient is NaN."""

DIGIT_BITS = 3
"""Bits of the k-th score found in one pass over the scores: XLA counts for seven thresholds in one kernel, not more,
so eleven passes replace 32."""


class Indexer(NamedTuple):
    """The lightning indexer's side of `B` sequences."""

    query: jax.Array  # [B, T, G, D_i]  activation dtype
    weights: jax.Array  # f32[B, T, G]  scale factors folded in
    key: jax.Array  # [B, S, D_i]  activation dtype


def index_scores(query: jax.Array, weights: jax.Array, key: jax.Array) -> jax.Array:
    """score(t, s) = sum_g weights[t, g] relu(query[t, g] . key[s]); f32[B, T, S], visible or not."""
    products = jnp.einsum("btgd,bsd->bgts", query, key, preferred_element_type=jnp.float32, precision=precision(query))
    return (jax.nn.relu(products) * jnp.moveaxis(weights, 2, 1)[..., None]).sum(axis=1)


def selected_mask(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """The k best visible keys of each query, bool[..., S]; all visible ones where they are at most k.

    Exact, equal scores to the lower position. No sort: the k-th largest score is found digit by digit, by counting, on
    the order-keeping integer image of the floats.
    """
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    top = jnp.uint32(0x80000000)
    bits = jnp.where(bits == top, jnp.uint32(0), bits)  # -0 equals +0; told by bits, since a subnormal is no zero
    image = jnp.where(bits >= top, ~bits, bits | top)
    image = jnp.where(visible, image, jnp.uint32(0))  # below every float, NaN with the sign bit aside

    def at_least(threshold):
        return (image >= threshold[..., None]).sum(axis=-1, dtype=jnp.int32)

    def add_digit(i, threshold):
        shift = (DIGIT_BITS * (digits - 1 - i)).astype(jnp.uint32)
        digit = jnp.zeros_like(threshold)
        for candidate in range(1, 1 << DIGIT_BITS):
            fits = candidate <= lax.shift_right_logical(jnp.uint32(0xFFFFFFFF), shift)  # the first digit is a short one
            reaches = at_least(threshold | lax.shift_left(jnp.uint32(candidate), shift)) >= k
            digit = digit + (reaches & fits).astype(jnp.uint32)  # counts fall, so those that reach k are the lowest
        return threshold | lax.shift_left(digit, shift)

    digits = -(-32 // DIGIT_BITS)
    kth = lax.fori_loop(0, digits, add_digit, jnp.zeros(scores.shape[:-1], jnp.uint32))
    above = image > kth[..., None]
    tied = visible & (image == kth[..., None])
    room = k - above.sum(axis=-1, dtype=jnp.int32)

    def first_tied(_):
        return tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room[..., None])

    has_surplus = (tied.sum(axis=-1, dtype=jnp.int32) > room).any()
    return above | lax.cond(has_surplus, first_tied, lambda _: tied, None)


def selected_keys(indexer: Indexer, k: int, block: int, extents: int) -> jax.Array:
    """`selected_mask` of whole sequences, bool[B, T, S]; a query sees the keys up to its own. No gradient.

    Queries are taken `block` at a time against the first 1/extents, 2/extents, ... of the keys.
    """
    query, weights, key = lax.stop_gradient(indexer)
    batch, length = key.shape[:2]
    block, extents = blocks_of(length, block, extents)
    span, found = length // extents, []
    for extent in range(extents):
        stop = (extent + 1) * span

        def one_block(start, query, weights, key=key[:, :stop]):
            rows = start + jnp.arange(block)
            visible = (jnp.arange(key.shape[1])[None] <= rows[:, None])[None]
            scores = index_scores(query, weights, key)
            return selected_mask(scores, jnp.broadcast_to(visible, scores.shape), k)

        starts = stop - span + block * jnp.arange(span // block)
        parts = [a[:, stop - span : stop].reshape(batch, span // block, block, *a.shape[2:]) for a in (query, weights)]
        masks = lax.map(lambda args, one=one_block: one(*args), (starts, *(jnp.moveaxis(a, 1, 0) for a in parts)))
        masks = jnp.moveaxis(masks, 0, 1).reshape(batch, span, stop)
        found.append(jnp.pad(masks, ((0, 0), (0, 0), (0, length - stop))))
    return jnp.concatenate(found, axis=1)


class Lesson(NamedTuple):
    """Which queries the indexer learns from, for long sequences: every `every`-th, beginning with `phase`.

    A mean over them is, with `phase` drawn at random, an unbiased estimate of the mean over all.
    """

    every: int  # divides T
    phase: jax.Array | int  # below `every`


def taught(
    query: jax.Array,
    key: jax.Array,
    indexer: Indexer,
    mask: jax.Array | None,
    weights: jax.Array | None,
    lesson: Lesson,
    config: DsaConfig,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Mean KL (dense attention || softmax of the index scores) in nats, and the mean share of it in the selection.

    query [B, T, H, d], key [B, S, H, d]: what attention compares; constants here, so that gradients reach the indexer
    only. Both distributions are over everything a query sees, so a key that is attended but not selected is missed
    where it counts. mask bool[B, T, S]: the selection, drawn anew where it is None. weights f32[B, T]: how much each
    query counts in the divergence, all alike where None.
    """
    batch, length = query.shape[:2]
    every, count = lesson.every, length // lesson.every
    if length % every:
        raise ValueError(f"{length} positions are not a multiple of every {every}; change one of the two")
    block, _ = blocks_of(count, block, 1)

    def blocks(a):
        rows = lax.dynamic_index_in_dim(a.reshape(batch, count, every, *a.shape[2:]), lesson.phase, 2, keepdims=False)
        return jnp.moveaxis(rows.reshape(batch, count // block, block, *a.shape[2:]), 1, 0)

    query, key = lax.stop_gradient((query, key))
    weights = jnp.ones((batch, length), jnp.float32) if weights is None else weights
    parts = [blocks(a) for a in (query, indexer.query, indexer.weights, weights)]
    if mask is not None:
        parts.append(blocks(mask))

    @jax.checkpoint
    def one_block(args):
        start, query, index_query, index_weights, weights, *selected = args
        rows = lesson.phase + every * (start + jnp.arange(block))
        visible = (jnp.arange(length)[None] <= rows[:, None])[None]
        visible = jnp.broadcast_to(visible, (batch, block, length))
        logits = jnp.einsum(
            "bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32, precision=precision(query)
        )
        logits = jnp.where(visible[:, None], logits * config.attention_scale, MASKED)
        distribution = lax.stop_gradient(jax.nn.softmax(logits, axis=-1).mean(axis=1))
        scores = index_scores(index_query, index_weights, indexer.key)
        chosen = selected[0] if selected else selected_mask(lax.stop_gradient(scores), visible, config.index_topk)
        mass = jnp.where(chosen, distribution, 0.0).sum(axis=-1).mean()
        return (index_divergence(scores, distribution, visible) * weights).sum(), weights.sum(), mass

    divergence, weight, mass = lax.map(one_block, (block * jnp.arange(count // block), *parts))
    return divergence.sum() / weight.sum(), mass.mean()


def index_divergence(scores: jax.Array, distribution: jax.Array, mask: jax.Array) -> jax.Array:
    """KL(distribution || softmax of the scores over the mask) of each query, f32[B, T], in nats."""
    log_foreseen = jax.nn.log_softmax(jnp.where(mask, scores, MASKED), axis=-1)
    surprise = jnp.log(jnp.maximum(distribution, 1e-20)) - log_foreseen
    return jnp.where(mask, distribution * surprise, 0.0).sum(axis=-1)


def blocks_of(length: int, block: int, extents: int) -> tuple[int, int]:
    """Block and extents cut down to the length; a ValueError where they do not divide it."""
    block = min(block, length)
    extents = min(extents, length // block)
    if length % (block * extents):
        raise ValueError(f"{length} positions are not a multiple of {block} x {extents}; change block or extents")
    return block, extents


def precision(operand: jax.Array) -> lax.Precision | None:
    """True f32 where the operands are f32."""
    return lax.Precision.HIGHEST if operand.dtype == jnp.float32 else None
