"""What index scores with prefetch are, in plain jnp; runs on every backend whose host pool jnp can index.

It knows lists, maps and caps as arrays. It does not know what a score is (`indexer_scores`), what a record means, who
predicts a threshold or who uses what was fetched.

    scores = indexer_scores(...)
    is_candidate[p] = any_t(scores[t, p] > threshold) and p < length and slot_of[row[p]] == NO_SLOT       # one seat
    staged = the first min(cap, staging) candidates
    records = host_pool[layer, rows of the staged]
    above[t, p] = scores[t, p] > bound              # for the selection, which need not look at other scores

The order of a seat's list means nothing: another implementation may stage other candidates, in any order, as long as
it stages as many. A threshold of +inf or NaN has no candidates, one of -inf has all that score above -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_scores.reference import PAGE

NO_ROW = NO_SLOT = -1
WORD = 32  # positions in a word of `above`


class Prefetched(NamedTuple):
    """Scores, and what crossed the link while they were made. A seat's staged records are its first `count`."""

    scores: jax.Array  # f32[B, T, 64 N]  bitwise those of indexer_scores
    rows: jax.Array  # i32[B, S]  host row of each staged record, then NO_ROW
    records: jax.Array  # [B, S, *record]  where the row is NO_ROW, anything
    count: jax.Array  # i32[B]  min(cap, S, candidates)
    refused: jax.Array  # i32[B]  candidates beyond that
    above: jax.Array | None = None  # u32[B, T, 2 N]  bit p % 32 of word p // 32: scores[b, t, p] > bound[b]


def stage(
    scores: jax.Array,
    page_numbers: jax.Array,
    threshold: jax.Array,
    lengths: jax.Array,
    cap: jax.Array,
    slot_of: jax.Array,
    host_pool: jax.Array,
    layer: jax.Array,
    staging: int,
    bound: jax.Array | None = None,
) -> Prefetched:
    """`scores` f32[B, T, 64 N] with the candidates staged; the others as in `dispatch.indexer_prefetch`.

    The lowest positions win. Records beyond `count` are zero.
    """
    rows = host_rows(page_numbers)
    is_row = (rows >= 0) & (rows < slot_of.shape[0])
    is_absent = is_row & (slot_of.at[jnp.where(is_row, rows, 0)].get() == NO_SLOT)
    is_old = jnp.arange(rows.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    is_candidate = jnp.any(scores > threshold[:, None, None], axis=1) & is_old & is_absent
    place = jnp.cumsum(is_candidate, axis=1, dtype=jnp.int32) - 1
    limit = jnp.clip(cap, 0, staging)
    place = jnp.where(is_candidate & (place < limit[:, None]), place, staging)
    nothing = jnp.full((staging,), NO_ROW, jnp.int32)
    staged = jax.vmap(lambda place, rows: nothing.at[place].set(rows, mode="drop"))(place, rows)
    wanted = jnp.where(staged == NO_ROW, host_pool.shape[1], staged)
    records = host_pool.at[layer, wanted].get(mode="fill", fill_value=0)
    total = jnp.sum(is_candidate, axis=1, dtype=jnp.int32)
    count = jnp.minimum(total, limit)
    above = None if bound is None else pack(scores > bound[:, None, None])
    return Prefetched(scores, staged, records, count, total - count, above)


def pack(bits: jax.Array) -> jax.Array:
    """u32[..., M // 32] words of bits bool[..., M], the lowest bit first."""
    words = bits.reshape(*bits.shape[:-1], -1, WORD).astype(jnp.uint32)
    place = jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum(words << place.reshape((1,) * (words.ndim - 1) + (WORD,)), axis=-1, dtype=jnp.uint32)


def host_rows(page_numbers: jax.Array) -> jax.Array:
    """i32[B, N] page numbers -> i32[B, 64 N] host rows; NO_ROW where a page has none."""
    inside = jnp.arange(PAGE, dtype=jnp.int32)[None, None]
    is_page = (page_numbers >= 0) & (page_numbers < 2**31 // PAGE)  # no row number beyond 32 bits
    rows = jnp.where(is_page, page_numbers, 0)[..., None] * PAGE + inside
    return jnp.where(is_page[..., None], rows, NO_ROW).reshape(page_numbers.shape[0], -1)
