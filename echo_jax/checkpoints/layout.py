"""Which stored tensor is which parameter: the names and shapes of the hub layout against the params pytree of `dsa`.

Knows names, shapes and the two rearrangements between them (a linear weight is stored `[out, in]` and used
`[in, ...out]`; `kv_b_proj` holds the key and the value part of each head side by side). Knows no files, no dtypes, no
values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from echo_jax.models.config import DENSE, FULL, DsaConfig


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of the hub layout and the one or two parameters in it."""

    name: str
    shape: tuple[int, ...]  # as stored
    leaves: tuple[str, ...]  # path of each parameter, "layers/3/attention/q_b"
    whole: tuple[int, ...]  # all its parameters side by side along the last axis, one expert
    widths: tuple[int, ...]  # how the last axis divides among them
    is_linear: bool = True  # stored transposed
    expert: int | None = None  # its place along the first axis of the parameter
    expert_count: int = 0

    def to_params(self, stored: np.ndarray) -> list[np.ndarray]:
        """Views of the parameters in `stored`, in order of `leaves`; nothing is copied where NumPy can avoid it."""
        used = (stored.T if self.is_linear else stored).reshape(self.whole)
        return np.split(used, np.cumsum(self.widths)[:-1], axis=-1) if len(self.leaves) > 1 else [used]

    def to_stored(self, params: list[np.ndarray]) -> np.ndarray:
        """The inverse of `to_params`, C-contiguous."""
        used = np.concatenate(params, axis=-1) if len(params) > 1 else params[0]
        turned = used.reshape(self.shape[::-1]).T if self.is_linear else used.reshape(self.shape)
        return np.ascontiguousarray(turned)

    def leaf_shape(self, leaf: str) -> tuple[int, ...]:
        """Shape of the whole parameter, its experts included."""
        shape = (*self.whole[:-1], self.widths[self.leaves.index(leaf)])
        return (self.expert_count, *shape) if self.expert is not None else shape


NEVER_NARROWED = frozenset({"moe/bias", "moe/router", "indexer/weights"})
"""Parameters that are read in f32 and decide a discrete choice; they keep their dtype when the others are narrowed."""


def is_never_narrowed(leaf: str) -> bool:
    return "/".join(leaf.split("/")[-2:]) in NEVER_NARROWED


def stored_tensors(config: DsaConfig) -> Iterator[StoredTensor]:
    """Every tensor that a model of this config has, in the order of the layers; one tensor per expert."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    yield _plain("model.embed_tokens.weight", "embed", vocabulary, hidden)
    for index, (layer_kind, mlp_kind) in enumerate(zip(config.layer_kinds, config.mlp_kinds, strict=True)):
        name, leaf = f"model.layers.{index}.", f"layers/{index}/"
        yield _plain(f"{name}input_layernorm.weight", f"{leaf}input_norm", hidden)
        yield from _attention(f"{name}self_attn.", f"{leaf}attention/", config)
        if layer_kind == FULL:
            yield from _indexer(f"{name}self_attn.indexer.", f"{leaf}indexer/", config)
        yield _plain(f"{name}post_attention_layernorm.weight", f"{leaf}post_norm", hidden)
        if mlp_kind == DENSE:
            yield from _mlp(f"{name}mlp.", f"{leaf}mlp/", hidden, config.intermediate_size)
        else:
            yield from _moe(f"{name}mlp.", f"{leaf}moe/", config)
    yield _plain("model.norm.weight", "final_norm", hidden)
    if not config.tie_word_embeddings:
        yield _linear("lm_head.weight", "lm_head", hidden, (vocabulary,))


def _attention(name: str, leaf: str, config: DsaConfig) -> Iterator[StoredTensor]:
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    yield _linear(f"{name}q_a_proj.weight", f"{leaf}q_a", hidden, (config.q_lora_rank,))
    yield _plain(f"{name}q_a_layernorm.weight", f"{leaf}q_a_norm", config.q_lora_rank)
    out = (heads, nope + config.qk_rope_head_dim)
    yield _linear(f"{name}q_b_proj.weight", f"{leaf}q_b", config.q_lora_rank, out)
    yield _linear(f"{name}kv_a_proj_with_mqa.weight", f"{leaf}kv_a", hidden, (config.record_width,))
    yield _plain(f"{name}kv_a_layernorm.weight", f"{leaf}kv_a_norm", latent)
    yield StoredTensor(
        f"{name}kv_b_proj.weight",
        (heads * (nope + value), latent),
        (f"{leaf}kv_b_k", f"{leaf}kv_b_v"),
        (latent, heads, nope + value),
        (nope, value),
    )
    yield StoredTensor(
        f"{name}o_proj.weight", (hidden, heads * value), (f"{leaf}o",), (heads, value, hidden), (hidden,)
    )


def _indexer(name: str, leaf: str, config: DsaConfig) -> Iterator[StoredTensor]:
    heads, width = config.index_heads, config.index_head_dim
    yield _linear(f"{name}wq_b.weight", f"{leaf}q_b", config.q_lora_rank, (heads, width))
    yield _linear(f"{name}wk.weight", f"{leaf}k", config.hidden_size, (width,))
    yield _plain(f"{name}k_norm.weight", f"{leaf}k_norm_weight", width)
    yield _plain(f"{name}k_norm.bias", f"{leaf}k_norm_bias", width)
    yield _linear(f"{name}weights_proj.weight", f"{leaf}weights", config.hidden_size, (heads,))


def _mlp(name: str, leaf: str, hidden: int, inner: int, expert: int | None = None, count: int = 0):
    sizes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    for part, (width, out) in sizes.items():
        tensor = _linear(f"{name}{part}_proj.weight", f"{leaf}{part}", width, (out,))
        yield dataclasses.replace(tensor, expert=expert, expert_count=count)


def _moe(name: str, leaf: str, config: DsaConfig) -> Iterator[StoredTensor]:
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    yield _linear(f"{name}gate.weight", f"{leaf}router", hidden, (count,))
    yield _plain(f"{name}gate.e_score_correction_bias", f"{leaf}bias", count)
    for expert in range(count):
        yield from _mlp(f"{name}experts.{expert}.", leaf, hidden, inner, expert, count)
    if config.num_shared_experts:
        yield from _mlp(f"{name}shared_experts.", f"{leaf}shared/", hidden, inner * config.num_shared_experts)


def _linear(name: str, leaf: str, width: int, out: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name, (int(np.prod(out)), width), (leaf,), (width, *out), out[-1:])


def _plain(name: str, leaf: str, *shape: int) -> StoredTensor:
    return StoredTensor(name, shape, (leaf,), shape, shape[-1:], is_linear=False)
