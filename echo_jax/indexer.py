"""The lightning indexer over resident keys: scores, exact selection, and who is worth copying ahead.

Maths on arrays, and the choice between two forms of the selection. Scores are what the stored keys give; the order of
scores is total, so selection has one answer: -0 equals +0, equal scores go to the lower position, a visible NaN ranks
below a visible -inf, and what a query cannot see is excluded by length, never by value.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import _ffi
from echo_jax.types import NO_POSITION

MINUS_ZERO = np.uint32(0x80000000)
"""The bits of -0."""


class Selection(NamedTuple):
    """The exact top-k of each query."""

    positions: jax.Array  # i32[..., K]  ascending, then NO_POSITION
    kth_score: jax.Array  # f32[...]  the lowest selected score; NaN where nothing is selected


class Bound(NamedTuple):
    """A hint to `select`: a score that, it is hoped, somewhat more than top_k visible ones of each row exceed."""

    score: jax.Array  # f32[N]  any value will do; one that is not finite is no hint
    above: jax.Array | None = None  # u32[N, ceil(P / 32)]  bit p % 32 of word p // 32: set where score[n, p] > bound


def scores(query: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """score[n, p] = sum_g weights[n, g] * relu(query[n, g] . keys[p]).

    query f32[N, G, D_i], weights f32[N, G], keys f32[P, D_i] -> f32[N, P]. Positions a query cannot see are the
    caller's to mask.
    """
    tokens, heads, width = query.shape
    products = jnp.einsum("md,pd->mp", query.reshape(tokens * heads, width), keys, precision=lax.Precision.HIGHEST)
    products = jax.nn.relu(products).reshape(tokens, heads, -1)
    return jnp.sum(products * weights[..., None], axis=1)


def mask_invisible(score: jax.Array, visible: jax.Array) -> jax.Array:
    """-inf at positions at or beyond visible i32[N]; score f32[N, P]."""
    positions = jnp.arange(score.shape[-1], dtype=jnp.int32)
    return jnp.where(positions[None] < visible[:, None], score, -jnp.inf)


def select(
    score: jax.Array, visible: jax.Array, top_k: int, implementation: str = "auto", bound: Bound | None = None
) -> Selection:
    """The top_k best of the first visible positions of each row; all of them where fewer are visible.

    score f32|bf16[N, P], visible i32[N] -> positions i32[N, min(top_k, P)]. -0 is a kth_score of +0, and every NaN the
    same NaN; a visible length outside 0..P means the nearer end. The implementations (_ffi.IMPLEMENTATIONS; the
    library's is echo_top_k) agree bit for bit. RuntimeError where the one named cannot serve the default backend.

    `bound` may make the library sooner and changes nothing else: what it leaves out is not looked at where enough is
    left, for then nothing of it can be selected.
    """
    if score.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"score is {score.dtype} but must be float32 or bfloat16; convert it")
    if top_k < 1:
        raise ValueError(f"top_k is {top_k} but must be at least 1")
    top_k = min(top_k, score.shape[-1])
    if uses_library(top_k, implementation):
        return Selection(*_ffi.top_k(score, visible, top_k, *(bound or ())))
    return _select_with_jnp(_as_float32(score), visible, top_k)


def uses_library(top_k: int, implementation: str = "auto") -> bool:
    """Whether `select` of so many takes the library; RuntimeError where it is asked for by name and cannot serve."""
    unfit = None
    if top_k > _ffi.GPU_MAX_TOP_K and jax.default_backend() != "cpu":
        unfit = f"top_k is {top_k} but a GPU selects at most {_ffi.GPU_MAX_TOP_K} by the library; use 'jnp'"
    return _ffi.serves("top-k implementation", implementation, unfit=unfit)


def _select_with_jnp(score: jax.Array, visible: jax.Array, top_k: int) -> Selection:
    """Two ways to the same list: plain scores (zeros and normal numbers) go through `lax.top_k`, whose ties fall to the
    lower index; anything else, subnormal numbers included, which XLA takes for zeros on some backends, through a search
    over the total order's integer keys.
    """
    positions = jnp.arange(score.shape[-1], dtype=jnp.int32)
    is_visible = positions[None] < visible[:, None]
    is_odd = jnp.any(is_visible & ~_is_plain(score))
    return lax.cond(is_odd, _select_by_order, _select_finite, score, is_visible, jnp.arange(top_k, dtype=jnp.int32))


def _select_finite(score: jax.Array, is_visible: jax.Array, ranks: jax.Array) -> Selection:
    top_k, length = ranks.shape[0], score.shape[-1]
    comparable = jnp.where(is_visible, _one_zero(score), -jnp.inf)
    values, positions = lax.top_k(comparable, top_k)
    is_selected = values > -jnp.inf
    kth_score = jnp.min(jnp.where(is_selected, values, jnp.inf), axis=-1)
    ascending = jnp.sort(jnp.where(is_selected, positions.astype(jnp.int32), length), axis=-1)
    return Selection(
        jnp.where(ascending == length, NO_POSITION, ascending),
        jnp.where(jnp.any(is_selected, axis=-1), kth_score, jnp.nan),
    )


def _select_by_order(score: jax.Array, is_visible: jax.Array, ranks: jax.Array) -> Selection:
    top_k = ranks.shape[0]
    keys = order_keys(score, is_visible)
    wanted = jnp.minimum(jnp.sum(is_visible, axis=-1, dtype=jnp.int32), top_k)

    def try_bit(bit, kth):
        raised = kth | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        enough = jnp.sum(keys >= raised[:, None], axis=-1, dtype=jnp.int32) >= wanted
        return jnp.where(enough, raised, kth)

    kth = lax.fori_loop(0, 32, try_bit, jnp.zeros_like(keys[:, 0]))  # the wanted-th largest key
    above, ties = keys > kth[:, None], is_visible & (keys == kth[:, None])
    ties_taken = wanted - jnp.sum(above, axis=-1, dtype=jnp.int32)
    is_selected = above | (ties & (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) <= ties_taken[:, None]))
    is_selected = is_selected & (wanted > 0)[:, None]

    # The j-th selected position is where the running count first reaches j + 1.
    running = jnp.cumsum(is_selected, axis=-1, dtype=jnp.int32)
    found = jax.vmap(lambda count: jnp.searchsorted(count, ranks + 1).astype(jnp.int32))(running)
    positions = jnp.where(ranks[None] < wanted[:, None], found, NO_POSITION)
    lowest = jnp.argmin(jnp.where(is_selected, keys, ~jnp.uint32(0)), axis=-1)
    kth_score = jnp.take_along_axis(_one_zero(score), lowest[:, None], axis=-1)[:, 0]
    return Selection(positions, jnp.where((wanted > 0) & ~jnp.isnan(kth_score), kth_score, jnp.nan))


def order_keys(score: jax.Array, is_visible: jax.Array) -> jax.Array:
    """u32 keys in the order of scores: 0 invisible, 1 NaN, then -inf up to +inf with both zeros equal."""
    bits = lax.bitcast_convert_type(_one_zero(score), jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    keys = jnp.where(jnp.isnan(score), jnp.uint32(1), keys)
    return jnp.where(is_visible, keys, jnp.uint32(0))


def _is_plain(score: jax.Array) -> jax.Array:
    """Zero or a normal number."""
    bits = lax.bitcast_convert_type(score, jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    return ((exponent > 0) & (exponent < 0xFF)) | (bits == 0) | (bits == MINUS_ZERO)


def _as_float32(score: jax.Array) -> jax.Array:
    """The same numbers in float32, by their bits: a conversion may take subnormal numbers for zeros."""
    if score.dtype == jnp.float32:
        return score
    bits = lax.bitcast_convert_type(score, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _one_zero(score: jax.Array) -> jax.Array:
    """The scores, -0 made +0.

    By their bits: a float comparison takes subnormal numbers for zeros where the processor is told to, as XLA does on
    a CPU; and `bits << 1 == 0` is turned back into that comparison by LLVM.
    """
    bits = lax.bitcast_convert_type(score, jnp.uint32)
    return lax.bitcast_convert_type(jnp.where(bits == MINUS_ZERO, jnp.uint32(0), bits), jnp.float32)
