"""The same attention in its textbook form: per-head keys and values, masks over whole sequences, no cache.

Training runs on this form, and tests hold the absorbed form of `dsa` against it. Attention goes in blocks of queries,
which gives whatever is asked for, or through a faster one that is given. Which keys are selected and how the indexer
is taught is `selection`. Knows no optimiser, no data and no cache; an expanded key or value is never stored.

Letters: B sequences, T queries, S keys, H heads, G index heads, X experts, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.models import dsa
from echo_jax.models.config import DENSE, MOE, DsaConfig
from echo_jax.models.dsa import Params
from echo_jax.models.selection import (
    MASKED,
    Indexer,
    Lesson,
    blocks_of,
    index_divergence,
    index_scores,
    precision,
    selected_keys,
    selected_mask,
    taught,
)

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, float], jax.Array]
"""(query [B, T, H, d], key [B, T, H, d], value [B, T, H, v], mask bool[B, T, T] or None, scale) -> [B, T, H, v]: causal
attention to the keys that the mask allows, to all before a query and itself where there is none."""

EVERY_QUERY = Lesson(every=1, phase=0)


class ExpandedInputs(NamedTuple):
    """What one layer attends with, for `N` tokens."""

    query: jax.Array  # [N, H, nope + rope]
    key: jax.Array  # [N, H, nope + rope]  the rotated part is the same for every head
    value: jax.Array  # [N, H, v]
    q_latent: jax.Array  # [N, Q]  normed query latent, which the indexer's query starts from


class Seen(NamedTuple):
    """What one layer with an indexer compares, for whoever watches; [N, ...] all sequences in a row."""

    layer: int
    normed: jax.Array  # [N, E]  what attention and indexer start from
    q_latent: jax.Array  # [N, Q]
    query: jax.Array  # [B, T, H, nope + rope]
    key: jax.Array  # [B, T, H, nope + rope]
    indexer: Indexer


class Forward(NamedTuple):
    """What `forward` gives back."""

    logits: jax.Array  # f32[B, T, V]
    divergence: jax.Array  # f32[L]  mean KL of attention from index scores, in nats; 0 where it was not asked for
    mass: jax.Array  # f32[L]  mean share of dense attention inside the selected set; 0 where it was not asked for
    expert_load: jax.Array  # f32[MoE layers, X]  share of the tokens' choices that fell on each expert
    watched: tuple[Any, ...] = ()  # what `watch` returned for each layer that has an indexer


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    config: DsaConfig,
    *,
    sparse: bool,
    distil: bool,
    block: int = 512,
    extents: int = 1,
    attention: Attention | None = None,
    lesson: Lesson = EVERY_QUERY,
    weights: jax.Array | None = None,
    watch: Callable[[Seen], Any] | None = None,
) -> Forward:
    """The whole transformer over tokens i32[B, T] at positions i32[B, T] (rising along T).

    sparse: a query attends to the exact top-k of its index scores, else to everything before it and itself.
    distil: also measure how far the index scores are from the attention they should foresee. Its gradient reaches
    only the indexer: hidden state, query latent and attention distribution enter it as constants.
    block, extents: queries are taken `block` at a time; keys are cut to the first 1/extents, 2/extents, ... of the
    sequence where the causal mask allows. Neither changes the result beyond rounding.
    attention: a faster causal attention, which does not tell its distribution. With it the indexer is taught by the
    dense distribution, sparse or not, on the queries of `lesson`, each counted by weights f32[B, T]; without it by the
    distribution that the query attends with, on all queries alike.
    watch: takes notes, layer by layer; needs sparse or distil, without which no indexer runs.
    """
    batch, length = tokens.shape
    flat = positions.reshape(-1)
    x = embed(params, tokens.reshape(-1), config)
    divergences, masses, loads, watched = [], [], [], []
    shared: Indexer | None = None
    for layer, mlp_kind in zip(params["layers"], config.mlp_kinds, strict=True):
        normed = dsa.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        inputs = expanded_inputs(layer, normed, flat, config)
        query, key, value = (a.reshape(batch, length, *a.shape[1:]) for a in inputs[:3])
        divergence = mass = jnp.zeros((), jnp.float32)
        if "indexer" in layer and (sparse or distil):
            shared = indexer_of(layer, normed, inputs.q_latent, flat, config, (batch, length))
            if watch is not None:
                watched.append(watch(Seen(len(masses), normed, inputs.q_latent, query, key, shared)))
        if attention is None:
            attended, divergence, mass = causal_attention(
                query, key, value, shared, config, sparse=sparse, distil=distil, block=block, extents=extents
            )
        else:
            mask = selected_keys(shared, config.index_topk, block, extents) if sparse and shared is not None else None
            attended = attention(query, key, value, mask, config.attention_scale)
            if distil and shared is not None:
                divergence, mass = taught(query, key, shared, mask, weights, lesson, config, block)
        attended = attended.reshape(batch * length, *attended.shape[2:])
        x = x + dsa.product("nhv,hve->ne", attended, layer["attention"]["o"])
        normed = dsa.rms_norm(x, layer["post_norm"], config.rms_norm_eps)
        if mlp_kind == DENSE:
            x = x + dsa.mlp(layer["mlp"], normed)
        else:
            mixed, load = mixture(layer["moe"], normed, config)
            x = x + mixed
            loads.append(load)
        divergences.append(divergence)
        masses.append(mass)
    logits = dsa.logits(params, x, config).reshape(batch, length, -1)
    load = jnp.stack(loads) if MOE in config.mlp_kinds else jnp.zeros((0, config.num_experts), jnp.float32)
    return Forward(logits, jnp.stack(divergences), jnp.stack(masses), load, tuple(watched))


def embed(params: Params, tokens: jax.Array, config: DsaConfig) -> jax.Array:
    """`dsa.embed` as a product: the gradient of a gather adds all tokens of a kind to one row, in bf16, one at a time.

    Ones and zeros times the table, accumulated in f32, are the table's rows to the bit.
    """
    return dsa.product("nv,ve->ne", jax.nn.one_hot(tokens, config.vocab_size, dtype=config.dtype), params["embed"])


def expanded_inputs(layer: Params, x: jax.Array, positions: jax.Array, config: DsaConfig) -> ExpandedInputs:
    """Queries, keys and values of each head; x [N, E] is normed, positions i32[N]."""
    weights = layer["attention"]
    cosines, sines = dsa.rope_table(positions, config)
    nope, latent = config.qk_nope_head_dim, config.kv_lora_rank

    q_latent = dsa.rms_norm(dsa.product("ne,eq->nq", x, weights["q_a"]), weights["q_a_norm"], config.latent_norm_eps)
    q = dsa.product("nq,qhd->nhd", q_latent, weights["q_b"])
    q_rotated = dsa.rotate(q[..., nope:], cosines[:, None], sines[:, None], config.rope_interleave)

    kv = dsa.product("ne,ed->nd", x, weights["kv_a"])
    latents = dsa.rms_norm(kv[..., :latent], weights["kv_a_norm"], config.latent_norm_eps)
    k_nope = dsa.product("nr,rhd->nhd", latents, weights["kv_b_k"])
    k_rotated = dsa.rotate(kv[..., latent:], cosines, sines, config.rope_interleave)
    k_rotated = jnp.broadcast_to(k_rotated[:, None], (x.shape[0], config.num_heads, config.qk_rope_head_dim))
    return ExpandedInputs(
        query=jnp.concatenate([q[..., :nope], q_rotated], axis=-1),
        key=jnp.concatenate([k_nope, k_rotated], axis=-1),
        value=dsa.product("nr,rhv->nhv", latents, weights["kv_b_v"]),
        q_latent=q_latent,
    )


def indexer_of(
    layer: Params, x: jax.Array, q_latent: jax.Array, positions: jax.Array, config: DsaConfig, shape: tuple[int, int]
) -> Indexer:
    """The indexer's side of B x T = `shape` tokens: x [N, E] normed, q_latent [N, Q], positions i32[N].

    Gradients end at its inputs.
    """
    cosines, sines = dsa.rope_table(positions, config)
    constants = lax.stop_gradient((x, q_latent))
    query, weights, key = dsa.index_inputs(layer["indexer"], *constants, cosines, sines, config)
    # Query and key come out of the activation dtype, so going back to it loses nothing.
    query, key = query.astype(config.dtype), key.astype(config.dtype)
    return Indexer(*(a.reshape(*shape, *a.shape[1:]) for a in (query, weights, key)))


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    indexer: Indexer | None,
    config: DsaConfig,
    *,
    sparse: bool,
    distil: bool,
    block: int,
    extents: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention [B, T, H, v], mean divergence and mean mass, in blocks of queries that are recomputed backwards."""
    batch, length = query.shape[:2]
    block, extents = blocks_of(length, block, extents)

    def one_block(start, query, index_query, index_weights, key, value, index_key):
        rows = start + jnp.arange(block)
        visible = jnp.broadcast_to(
            (jnp.arange(key.shape[1])[None] <= rows[:, None])[None], (batch, block, key.shape[1])
        )
        none = jnp.zeros((), jnp.float32)
        if index_query is None:
            return attend(query, key, value, visible, config.attention_scale)[0], none, none
        scores = index_scores(index_query, index_weights, index_key)
        mask = selected_mask(lax.stop_gradient(scores), visible, config.index_topk)
        out, distribution = attend(query, key, value, mask if sparse else visible, config.attention_scale)
        if not distil:
            return out, none, none
        distribution = lax.stop_gradient(distribution)
        divergence = index_divergence(scores, distribution, mask if sparse else visible).mean()
        return out, divergence, jnp.where(mask, distribution, 0.0).sum(axis=-1).mean()

    if indexer is None:
        indexer_blocks, index_key = (None, None), None
    else:
        indexer_blocks, index_key = (indexer.query, indexer.weights), indexer.key
    span, outs, divergences, masses = length // extents, [], [], []
    for extent in range(extents):
        stop = (extent + 1) * span
        keys = tuple(a if a is None else a[:, :stop] for a in (key, value, index_key))

        def per_block(a, first=stop - span, last=stop):
            if a is None:
                return None
            return jnp.moveaxis(a[:, first:last].reshape(batch, span // block, block, *a.shape[2:]), 1, 0)

        starts = stop - span + block * jnp.arange(span // block)
        body = jax.checkpoint(lambda args, keys=keys: one_block(*args, *keys))
        out, divergence, mass = lax.map(body, (starts, *(per_block(a) for a in (query, *indexer_blocks))))
        outs.append(jnp.moveaxis(out, 0, 1).reshape(batch, span, *out.shape[3:]))
        divergences.append(divergence.mean())
        masses.append(mass.mean())
    return jnp.concatenate(outs, axis=1), jnp.stack(divergences).mean(), jnp.stack(masses).mean()


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale query . key) value over the keys that mask bool[B, T, S] allows (at least one per query).

    Returns the attended values [B, T, H, v] and the attention distribution f32[B, T, S], the mean over heads.
    """
    full = precision(query)
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32, precision=full)
    allowed = jnp.broadcast_to(mask[:, None], logits.shape)
    probabilities = jax.nn.softmax(jnp.where(allowed, logits * scale, MASKED), axis=-1)
    out = jnp.einsum(
        "bhts,bshv->bthv",
        probabilities.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
        precision=full,
    )
    return out.astype(value.dtype), probabilities.mean(axis=1)


def mixture(weights: Params, x: jax.Array, config: DsaConfig) -> tuple[jax.Array, jax.Array]:
    """The mixture of experts as one wide block, x [N, E] -> ([N, E], load f32[X]).

    Every expert runs over every token, weighted by its routing weight, zero where it was not chosen. The load is each
    expert's share of all choices; it carries no gradient.
    """
    chosen, routing = dsa.route(weights, x, config)
    experts = jnp.arange(config.num_experts)[None, None]
    is_chosen = chosen[..., None] == experts  # [N, k, X]
    share = jnp.where(is_chosen, routing[..., None], 0.0).sum(axis=1)
    gate = dsa.product("ne,xei->nxi", x, weights["gate"])
    inner = jax.nn.silu(gate) * dsa.product("ne,xei->nxi", x, weights["up"]) * share.astype(x.dtype)[..., None]
    mixed = dsa.product("nxi,xie->ne", inner, weights["down"])
    if "shared" in weights:
        mixed = mixed + dsa.mlp(weights["shared"], x)
    return mixed, is_chosen.astype(jnp.float32).mean(axis=(0, 1))
