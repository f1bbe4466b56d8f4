"""The transformer's maths, layer part by layer part, as pure functions over a pytree of parameters.

Knows MLA in its absorbed form (the query is carried into the latent space, so one record of `latent + rope` values
serves every head), the lightning indexer's inputs, the feed-forward blocks. Knows no cache: `decode` and `prefill`
bring the two together. `expanded` holds the same attention in its textbook form.

Parameters, one dict a layer (E hidden size, R latent width, Q query latent, H heads, G index heads, X experts):

    embed [V, E]   final_norm [E]   lm_head [E, V] (absent when tied)   layers: tuple of
      input_norm [E]   post_norm [E]
      attention  q_a [E, Q]  q_a_norm [Q]  q_b [Q, H, nope + rope]  kv_a [E, R + rope]  kv_a_norm [R]
                 kv_b_k [R, H, nope]  kv_b_v [R, H, v]  o [H, v, E]
      indexer    q_b [Q, G, D_i]  k [E, D_i]  k_norm_weight [D_i]  k_norm_bias [D_i]  weights [E, G]   (full layers)
      mlp        gate [E, I]  up [E, I]  down [I, E]                                                    (dense layers)
      moe        router [E, X]  bias [X]  gate [X, E, I]  up [X, E, I]  down [X, I, E]  shared: an mlp  (MoE layers)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax.models.config import DENSE, FULL, DsaConfig, RopeConfig

Params = dict[str, Any]


class AttentionInputs(NamedTuple):
    """What one layer hands to the cache for `N` tokens."""

    query: jax.Array  # f32[N, H, D]  absorbed query against whole records
    record: jax.Array  # f32[N, D]  normed latent, then rotated key
    index_query: jax.Array | None  # f32[N, G, D_i]  None in a shared layer
    index_weights: jax.Array | None  # f32[N, G]  both scale factors of the score folded in
    index_key: jax.Array | None  # f32[N, D_i]


def embed(params: Params, tokens: jax.Array, config: DsaConfig) -> jax.Array:
    """tokens i32[N] -> hidden [N, E] in the activation dtype."""
    return params["embed"].at[tokens].get(mode="clip").astype(config.dtype)


def project(layer: Params, hidden: jax.Array, positions: jax.Array, config: DsaConfig) -> AttentionInputs:
    """A layer up to its attention: hidden [N, E], positions i32[N]."""
    x = rms_norm(hidden, layer["input_norm"], config.rms_norm_eps)
    return attention_inputs(layer, x, positions, config)


def finish(layer: Params, hidden: jax.Array, attended: jax.Array, config: DsaConfig, mlp_kind: str) -> jax.Array:
    """A layer from its attention on: attended f32[N, H, R] joins hidden [N, E], then the feed-forward block does.

    The barrier ends the layer: what XLA fuses across it would depend on what the next one does with its cache.
    """
    hidden = hidden + attention_output(layer, attended, config)
    x = rms_norm(hidden, layer["post_norm"], config.rms_norm_eps)
    return lax.optimization_barrier(hidden + feed_forward(layer, x, config, mlp_kind))


def attention_inputs(layer: Params, x: jax.Array, positions: jax.Array, config: DsaConfig) -> AttentionInputs:
    """Projections of one layer. x [N, E] is the normed hidden state, positions i32[N]."""
    weights = layer["attention"]
    cosines, sines = rope_table(positions, config)
    nope, latent = config.qk_nope_head_dim, config.kv_lora_rank

    q_latent = rms_norm(product("ne,eq->nq", x, weights["q_a"]), weights["q_a_norm"], config.latent_norm_eps)
    q = product("nq,qhd->nhd", q_latent, weights["q_b"])
    absorbed = product("nhd,rhd->nhr", q[..., :nope], weights["kv_b_k"])
    q_rotated = rotate(q[..., nope:], cosines[:, None], sines[:, None], config.rope_interleave)
    query = jnp.concatenate([absorbed, q_rotated], axis=-1).astype(jnp.float32)

    kv = product("ne,ed->nd", x, weights["kv_a"])
    latent_part = rms_norm(kv[..., :latent], weights["kv_a_norm"], config.latent_norm_eps)
    key_rotated = rotate(kv[..., latent:], cosines, sines, config.rope_interleave)
    record = jnp.concatenate([latent_part, key_rotated], axis=-1).astype(jnp.float32)
    if "indexer" not in layer:
        return AttentionInputs(query, record, None, None, None)
    return AttentionInputs(query, record, *index_inputs(layer["indexer"], x, q_latent, cosines, sines, config))


def index_inputs(
    weights: Params,
    x: jax.Array,
    q_latent: jax.Array,
    cosines: jax.Array,
    sines: jax.Array,
    config: DsaConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lightning indexer's query f32[N, G, D_i], head weights f32[N, G] and key f32[N, D_i].

    score(t, s) = sum_g weights[t, g] relu(query[t, g] . key[s]); the usual factors D_i^-0.5 and G^-0.5 are positive
    and therefore commute with the relu into the weights.
    """
    rope = config.qk_rope_head_dim
    query = product("nq,qgd->ngd", q_latent, weights["q_b"])
    interleave = config.index_rope_interleave
    rotated = rotate(query[..., :rope], cosines[:, None], sines[:, None], interleave)
    query = jnp.concatenate([rotated, query[..., rope:]], axis=-1)

    key = layer_norm(
        product("ne,ed->nd", x, weights["k"]),
        weights["k_norm_weight"],
        weights["k_norm_bias"],
        config.index_norm_eps,
    )
    key = jnp.concatenate([rotate(key[..., :rope], cosines, sines, interleave), key[..., rope:]], axis=-1)

    scale = config.index_heads**-0.5 * config.index_head_dim**-0.5
    head_weights = jnp.einsum(
        "ne,eg->ng",
        x.astype(jnp.float32),
        weights["weights"].astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    return query.astype(jnp.float32), head_weights * scale, key.astype(jnp.float32)


def attention_output(layer: Params, attended: jax.Array, config: DsaConfig) -> jax.Array:
    """attended f32[N, H, R], the softmax-weighted latents of each head -> [N, E]."""
    weights = layer["attention"]
    values = product("nhr,rhv->nhv", attended.astype(config.dtype), weights["kv_b_v"])
    return product("nhv,hve->ne", values, weights["o"])


def feed_forward(layer: Params, x: jax.Array, config: DsaConfig, kind: str) -> jax.Array:
    """The block after attention; x [N, E] is normed."""
    return mlp(layer["mlp"], x) if kind == DENSE else moe(layer["moe"], x, config)


def mlp(weights: Params, x: jax.Array) -> jax.Array:
    """down(silu(gate x) * up x)."""
    gate = product("ne,ei->ni", x, weights["gate"])
    return product("ni,ie->ne", jax.nn.silu(gate) * product("ne,ei->ni", x, weights["up"]), weights["down"])


GATHER_AT_MOST = 16
"""Tokens up to which expert weights are gathered per token; above, every expert runs over all tokens."""


def moe(weights: Params, x: jax.Array, config: DsaConfig) -> jax.Array:
    """Dropless mixture of experts plus the shared expert, x [N, E] -> [N, E].

    Few tokens (decode): the weights of the chosen experts are gathered, so only those are read. Many tokens
    (prefill, training): a scan over experts, each applied to all tokens and weighted by its routing weight, zero
    where it was not chosen. No token is ever dropped and no capacity exists.
    """
    chosen, routing = route(weights, x, config)
    if x.shape[0] * config.experts_per_token <= GATHER_AT_MOST * max(1, config.experts_per_token):
        gate, up, down = (weights[name][chosen] for name in ("gate", "up", "down"))
        inner = jax.nn.silu(product("ne,nkei->nki", x, gate)) * product("ne,nkei->nki", x, up)
        out = product("nki,nkie->nke", inner, down).astype(jnp.float32)
        mixed = jnp.sum(out * routing[..., None], axis=1)
    else:
        experts = jnp.arange(config.num_experts)
        share = jnp.sum(jnp.where(chosen[..., None] == experts[None, None], routing[..., None], 0.0), axis=1)  # [N, X]

        def one_expert(total, expert):
            out = mlp({name: expert[name] for name in ("gate", "up", "down")}, x).astype(jnp.float32)
            return total + out * expert["share"][:, None], None

        stacked = {name: weights[name] for name in ("gate", "up", "down")} | {"share": share.T}
        mixed, _ = lax.scan(one_expert, jnp.zeros_like(x, jnp.float32), stacked)
    mixed = mixed.astype(x.dtype)
    return mixed + mlp(weights["shared"], x) if "shared" in weights else mixed


def route(weights: Params, x: jax.Array, config: DsaConfig) -> tuple[jax.Array, jax.Array]:
    """Experts i32[N, k] and their weights f32[N, k] (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Affinity is a sigmoid. The bias takes part in choosing only: first the best groups, by the sum of each group's two
    best biased affinities, then the best experts inside them. The weights are the unbiased affinities of the chosen,
    normalised to 1 where the model does so, times the scaling factor.
    """
    logits = jnp.einsum(
        "ne,ex->nx",
        x.astype(jnp.float32),
        weights["router"].astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    affinity = jax.nn.sigmoid(logits)
    biased = affinity + weights["bias"].astype(jnp.float32)[None]
    tokens, groups = x.shape[0], config.expert_groups
    if groups > 1:
        grouped = biased.reshape(tokens, groups, -1)
        best_two = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, kept = lax.top_k(best_two, config.expert_groups_kept)
        is_kept = (kept[..., None] == jnp.arange(groups)[None, None]).any(axis=1)
        biased = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(tokens, -1)
    _, chosen = lax.top_k(biased, config.experts_per_token)
    routing = jnp.take_along_axis(affinity, chosen, axis=-1)
    if config.normalise_expert_weights:
        routing = routing / (routing.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, routing * config.routed_scaling_factor


def logits(params: Params, hidden: jax.Array, config: DsaConfig) -> jax.Array:
    """hidden [N, E] -> f32[N, V]."""
    x = rms_norm(hidden, params["final_norm"], config.rms_norm_eps)
    if "lm_head" in params:
        return product("ne,ev->nv", x, params["lm_head"]).astype(jnp.float32)
    return product("ne,ve->nv", x, params["embed"]).astype(jnp.float32)


def product(spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """An einsum that accumulates in f32 and returns the activation dtype; true f32 where the activations are f32."""
    full = x.dtype == jnp.float32
    out = jnp.einsum(
        spec,
        x,
        weights.astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if full else None,
    )
    return out.astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in f32."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * _along_last(weight, x)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Mean and variance norm over the last axis, computed in f32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * scale * _along_last(weight, x) + _along_last(bias, x)).astype(x.dtype)


def _along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector.astype(jnp.float32), x.shape, (x.ndim - 1,))


def rope_table(positions: jax.Array, config: DsaConfig) -> tuple[jax.Array, jax.Array]:
    """positions i32[N] -> cosines and sines, f32[N, rope / 2], YaRN's attention factor included."""
    frequencies = jnp.asarray(rope_frequencies(config.rope, config.qk_rope_head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    factor = config.rope.attention_factor()
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rope_frequencies(rope: RopeConfig, width: int) -> np.ndarray:
    """f32[width / 2]: radians per position of each rotary pair.

    YaRN (arXiv 2309.00071, section 3.2): pairs that turn more than `beta_fast` times over the original context keep
    their frequency, pairs that turn less than `beta_slow` times are slowed by `factor`, a linear ramp between.

    Powers and products are rounded to float32 in the order of transformers. Float64 until the end differs in about ten
    of 32 pairs by up to 2 ulp, which at position 1,048,575 is 0.06 radians. The power itself is taken in float64 and
    rounded once, so that it is the same on every machine.
    """
    one = np.float32(1)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    periods = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "default":
        return one / periods

    def pair_that_turns(times: float) -> float:
        return width * math.log(rope.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), width - 1)
    steps = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
    kept_share = one - np.clip(steps, 0, 1)
    slowed = one / (np.float32(rope.factor) * periods)
    return slowed * (one - kept_share) + one / periods * kept_share


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array, interleave: bool) -> jax.Array:
    """Rotates pairs of the last axis, in f32: (2i, 2i+1) when interleaved, else (i, i + d/2).

    The interleaved form leaves its result as halves (all first members, then all second). Query and key are
    permuted alike, so their products are those of the interleaved layout.
    """
    wide = x.astype(jnp.float32)
    if interleave:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cosines, sines = jnp.broadcast_to(cosines, first.shape), jnp.broadcast_to(sines, first.shape)
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return turned.astype(x.dtype)


def init_params(key: jax.Array, config: DsaConfig, dtype: str = "float32", scale: float | None = None) -> Params:
    """Random parameters: normal with deviation fan_in^-0.5 (or `scale`), norms one, biases zero."""
    keys = iter(jax.random.split(key, 20 * config.num_layers + 4))
    hidden, heads = config.hidden_size, config.num_heads
    head = config.qk_nope_head_dim + config.qk_rope_head_dim

    def normal(*shape: int, fan_in: int) -> jax.Array:
        deviation = fan_in**-0.5 if scale is None else scale
        return (jax.random.normal(next(keys), shape, jnp.float32) * deviation).astype(dtype)

    def ones(*shape: int) -> jax.Array:
        return jnp.ones(shape, dtype)

    def swiglu(*lead: int, inner: int) -> Params:
        return {
            "gate": normal(*lead, hidden, inner, fan_in=hidden),
            "up": normal(*lead, hidden, inner, fan_in=hidden),
            "down": normal(*lead, inner, hidden, fan_in=inner),
        }

    layers = []
    for layer_kind, mlp_kind in zip(config.layer_kinds, config.mlp_kinds, strict=True):
        layer: Params = {"input_norm": ones(hidden), "post_norm": ones(hidden)}
        layer["attention"] = {
            "q_a": normal(hidden, config.q_lora_rank, fan_in=hidden),
            "q_a_norm": ones(config.q_lora_rank),
            "q_b": normal(config.q_lora_rank, heads, head, fan_in=config.q_lora_rank),
            "kv_a": normal(hidden, config.record_width, fan_in=hidden),
            "kv_a_norm": ones(config.kv_lora_rank),
            "kv_b_k": normal(config.kv_lora_rank, heads, config.qk_nope_head_dim, fan_in=config.kv_lora_rank),
            "kv_b_v": normal(config.kv_lora_rank, heads, config.v_head_dim, fan_in=config.kv_lora_rank),
            "o": normal(heads, config.v_head_dim, hidden, fan_in=heads * config.v_head_dim),
        }
        if layer_kind == FULL:
            width = config.index_head_dim
            layer["indexer"] = {
                "q_b": normal(config.q_lora_rank, config.index_heads, width, fan_in=config.q_lora_rank),
                "k": normal(hidden, width, fan_in=hidden),
                "k_norm_weight": ones(width),
                "k_norm_bias": jnp.zeros((width,), dtype),
                "weights": normal(hidden, config.index_heads, fan_in=hidden),
            }
        if mlp_kind == DENSE:
            layer["mlp"] = swiglu(inner=config.intermediate_size)
        else:
            layer["moe"] = {
                "router": normal(hidden, config.num_experts, fan_in=hidden),
                "bias": jnp.zeros((config.num_experts,), jnp.float32),
                **swiglu(config.num_experts, inner=config.moe_intermediate_size),
            }
            if config.num_shared_experts:
                inner = config.moe_intermediate_size * config.num_shared_experts
                layer["moe"]["shared"] = swiglu(inner=inner)
        layers.append(layer)
    params: Params = {
        "embed": normal(config.vocab_size, hidden, fan_in=hidden),
        "final_norm": ones(hidden),
        "layers": tuple(layers),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = normal(hidden, config.vocab_size, fan_in=hidden)
    return params
