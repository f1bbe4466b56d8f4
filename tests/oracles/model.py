"""Oracle of the whole model: a DSA transformer over a list of tokens, in float64, one position at a time.

Knows the parameters' names and shapes, the hyperparameters' names, and the maths of DeepSeek-V3.2 and GLM-5.
Knows no cache, no chunks and no formats: keys and values are expanded per head (the textbook form of MLA), so
the absorbed form is judged by something else than itself. Prefill and decode are the same numbers here: a
position sees those before it.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from tests.oracles.select import kth_gap, top_k


class Forward(NamedTuple):
    """Everything one run over P tokens shows; L layers."""

    logits: np.ndarray  # f64[P, V]
    selected: list[list[list[int]]]  # [L][P]: the positions attended to, ascending
    gap: np.ndarray  # f64[L, P]: k-th best index score minus the next, +inf where all are selected
    kth_score: np.ndarray  # f64[L, P]: the worst selected index score
    index_scores: np.ndarray  # f64[L, P, P]: -inf where not visible


def forward(params: dict, config: Any, tokens: Any) -> tuple[np.ndarray, list[list[list[int]]], np.ndarray]:
    """logits f64[P, V], selected positions [L][P], k-th gap f64[L, P] of a list of tokens."""
    result = forward_in_full(params, config, tokens)
    return result.logits, result.selected, result.gap


def forward_in_full(params: dict, config: Any, tokens: Any) -> Forward:
    """The run of `forward` with its index scores. A shared layer shows those of its full layer."""
    embed = _f64(params["embed"])
    hidden = np.stack([embed[int(token)] for token in tokens])
    selections: list[_Selection] = []
    for layer, layer_kind in zip(params["layers"], config.layer_kinds, strict=True):
        normed = np.stack([_rms_norm(x, layer["input_norm"], config.rms_norm_eps) for x in hidden])
        query_latents = _query_latents(layer["attention"], config, normed)
        if layer_kind == "full":
            selections.append(_select(layer["indexer"], config, normed, query_latents))
        else:
            selections.append(selections[-1])
        selected = selections[-1].positions
        hidden = hidden + _attention(layer["attention"], config, normed, query_latents, selected)
        normed = np.stack([_rms_norm(x, layer["post_norm"], config.rms_norm_eps) for x in hidden])
        if "moe" in layer:
            hidden = hidden + np.stack([_moe(layer["moe"], config, x) for x in normed])
        else:
            hidden = hidden + np.stack([_mlp(layer["mlp"], x) for x in normed])
    normed = np.stack([_rms_norm(x, params["final_norm"], config.rms_norm_eps) for x in hidden])
    head = _f64(params["lm_head"]) if "lm_head" in params else embed.T
    return Forward(
        logits=normed @ head,
        selected=[selection.positions for selection in selections],
        gap=np.stack([selection.gap for selection in selections]),
        kth_score=np.stack([selection.kth_score for selection in selections]),
        index_scores=np.stack([selection.scores for selection in selections]),
    )


# Attention


def _query_latents(attention: dict, config: Any, normed: np.ndarray) -> np.ndarray:
    """[P, Q]: what both the attention and the indexer make their queries of."""
    down = _f64(attention["q_a"])
    return np.stack([_rms_norm(x @ down, attention["q_a_norm"], config.latent_norm_eps) for x in normed])


def _attention(
    attention: dict, config: Any, normed: np.ndarray, query_latents: np.ndarray, selected: list[list[int]]
) -> np.ndarray:
    """[P, E]: MLA with keys and values of every head written out, over the selected positions only."""
    nope, latent = config.qk_nope_head_dim, config.kv_lora_rank
    q_b, kv_a, out = _f64(attention["q_b"]), _f64(attention["kv_a"]), _f64(attention["o"])
    kv_b_k, kv_b_v = _f64(attention["kv_b_k"]), _f64(attention["kv_b_v"])
    scale = attention_scale(config)
    latents, rotated_keys = [], []
    for position, x in enumerate(normed):
        compressed = x @ kv_a
        latents.append(_rms_norm(compressed[:latent], attention["kv_a_norm"], config.latent_norm_eps))
        rotated_keys.append(rotate(compressed[latent:], position, config.rope, config.rope_interleave))

    result = np.zeros_like(normed)
    for h in range(config.num_heads):
        keys = [np.concatenate([c @ kv_b_k[:, h], k]) for c, k in zip(latents, rotated_keys, strict=True)]
        values = [c @ kv_b_v[:, h] for c in latents]
        for position, query_latent in enumerate(query_latents):
            query = query_latent @ q_b[:, h]
            query = np.concatenate([query[:nope], rotate(query[nope:], position, config.rope, config.rope_interleave)])
            logits = np.array([scale * (query @ keys[s]) for s in selected[position]])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            mixed = sum(weight * values[s] for weight, s in zip(weights, selected[position], strict=True))
            result[position] += mixed @ out[h]
    return result


def attention_scale(config: Any) -> float:
    """(nope + rope)^-0.5, times (0.1 mscale_all_dim ln(factor) + 1)^2 under YaRN."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope
    if rope.kind == "yarn" and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    return scale


# Lightning indexer


class _Selection(NamedTuple):
    positions: list[list[int]]
    gap: np.ndarray
    kth_score: np.ndarray
    scores: np.ndarray


def _select(indexer: dict, config: Any, normed: np.ndarray, query_latents: np.ndarray) -> _Selection:
    """Scores of all visible positions and the exact top-k of them, for every position."""
    q_b, k, head_weights = _f64(indexer["q_b"]), _f64(indexer["k"]), _f64(indexer["weights"])
    heads, width = config.index_heads, config.index_head_dim
    count = len(normed)
    scores = np.full((count, count), -np.inf)
    keys, positions, gaps, kth_scores = [], [], [], []
    for position, x in enumerate(normed):
        key = _layer_norm(x @ k, indexer["k_norm_weight"], indexer["k_norm_bias"], config.index_norm_eps)
        keys.append(_rotate_first(key, position, config))
        weights = (x @ head_weights) * heads**-0.5
        queries = [_rotate_first(query_latents[position] @ q_b[:, g], position, config) for g in range(heads)]
        for s in range(position + 1):
            scores[position, s] = sum(weights[g] * max(0.0, (queries[g] @ keys[s]) * width**-0.5) for g in range(heads))
        chosen, kth_score = top_k(scores[position], position + 1, config.index_topk)
        positions.append(chosen)
        kth_scores.append(kth_score)
        gaps.append(kth_gap(scores[position], position + 1, config.index_topk))
    return _Selection(positions, np.array(gaps), np.array(kth_scores), scores)


def _rotate_first(x: np.ndarray, position: int, config: Any) -> np.ndarray:
    """The indexer rotates the first dims of a head, the attention the last."""
    rope = config.qk_rope_head_dim
    return np.concatenate([rotate(x[:rope], position, config.rope, config.index_rope_interleave), x[rope:]])


# Rotary positions


def rotate(x: np.ndarray, position: int, rope: Any, interleave: bool) -> np.ndarray:
    """Rotate the pairs of x by position * frequency: (2i, 2i + 1), or (i, i + d/2) when not interleaved."""
    half = len(x) // 2
    result = np.zeros_like(x)
    for i, frequency in enumerate(frequencies(len(x), rope)):
        a, b = (2 * i, 2 * i + 1) if interleave else (i, i + half)
        cosine = math.cos(position * frequency) * rotary_factor(rope)
        sine = math.sin(position * frequency) * rotary_factor(rope)
        result[a] = x[a] * cosine - x[b] * sine
        result[b] = x[b] * cosine + x[a] * sine
    return result


def frequencies(width: int, rope: Any) -> list[float]:
    """Angle per position of each of the width / 2 pairs; YaRN divides the slow ones by its factor.

    A pair that turns more than beta_fast times within the original context keeps its frequency, one that
    turns less than beta_slow times is stretched in full, and those between are blended linearly in the pair's
    number.
    """
    plain = [rope.theta ** (-2 * i / width) for i in range(width // 2)]
    if rope.kind == "default":
        return plain

    def pair_that_turns(times: float) -> float:
        positions_per_radian = rope.original_max_positions / (times * 2 * math.pi)
        return width * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), width - 1)
    result = []
    for i, frequency in enumerate(plain):
        stretched = min(max((i - low) / (high - low if high != low else 0.001), 0.0), 1.0)
        result.append(frequency / rope.factor * stretched + frequency * (1 - stretched))
    return result


def rotary_factor(rope: Any) -> float:
    """What YaRN multiplies cosines and sines by: the ratio of its two mscale terms; 1 otherwise."""
    if rope.kind == "default" or rope.factor <= 1:
        return 1.0
    term = 0.1 * math.log(rope.factor)
    return (term * rope.mscale + 1) / (term * rope.mscale_all_dim + 1)


# Feed-forward blocks


def _mlp(mlp: dict, x: np.ndarray) -> np.ndarray:
    gate, up = x @ _f64(mlp["gate"]), x @ _f64(mlp["up"])
    return (gate * _sigmoid(gate) * up) @ _f64(mlp["down"])


def _moe(moe: dict, config: Any, x: np.ndarray) -> np.ndarray:
    """The chosen experts, weighted, and the shared expert where there is one."""
    result = np.zeros_like(x)
    for expert, weight in route(x, moe, config).items():
        result += weight * _mlp({name: moe[name][expert] for name in ("gate", "up", "down")}, x)
    if "shared" in moe:
        result += _mlp(moe["shared"], x)
    return result


def route(x: np.ndarray, moe: dict, config: Any) -> dict[int, float]:
    """The chosen experts of one token and their weights.

    Score = sigmoid(router logit). The choice goes by score + bias: keep the groups whose two best experts
    have the greatest sum, then the best experts in them; equals go to the lower number. The weight is the
    score without bias, divided by the sum of the chosen ones where configured, times the scaling factor.
    """
    scores = _sigmoid(x @ _f64(moe["router"]))
    choice = scores + _f64(moe["bias"])
    size = config.num_experts // config.expert_groups
    group_scores = []
    for group in range(config.expert_groups):
        group_scores.append(sum(sorted(choice[group * size : (group + 1) * size], reverse=True)[:2]))
    groups = sorted(range(config.expert_groups), key=lambda group: (-group_scores[group], group))
    groups = groups[: config.expert_groups_kept]
    experts = [expert for expert in range(config.num_experts) if expert // size in groups]
    experts = sorted(experts, key=lambda expert: (-choice[expert], expert))[: config.experts_per_token]
    total = sum(scores[expert] for expert in experts) + 1e-20 if config.normalise_expert_weights else 1.0
    return {expert: float(scores[expert] / total * config.routed_scaling_factor) for expert in experts}


# Small parts


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x * x)) + eps) * _f64(weight)


def _layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    centred = x - np.mean(x)
    return centred / math.sqrt(float(np.mean(centred * centred)) + eps) * _f64(weight) + _f64(bias)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def _f64(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
