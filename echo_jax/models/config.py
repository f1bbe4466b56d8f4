"""The hyperparameters of a DSA transformer (DeepSeek-V3.2, GLM-5), checked when they are built.

Knows names and sizes. Where the numbers come from (a Hugging Face `config.json`, a preset) is the business of
`checkpoints` and `presets`; what is computed with them, of `dsa`.
"""

from __future__ import annotations

import dataclasses
import math

FULL, SHARED = "full", "shared"
"""Kinds of layer: one with its own indexer, or one that reuses the selected set of the full layer before it."""

DENSE, MOE = "dense", "moe"
"""Kinds of feed-forward block."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies: plain, or stretched by YaRN (Peng et al. 2023, arXiv 2309.00071)."""

    theta: float = 10000.0
    kind: str = "default"  # "default" or "yarn"
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    cos_sin_factor: float | None = None  # stated by the model instead of derived from the mscales

    def __post_init__(self):
        if self.kind not in ("default", "yarn"):
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: 'default', 'yarn'")
        if self.kind == "yarn" and self.factor < 1:
            raise ValueError(f"YaRN factor {self.factor} is below 1; use rope type 'default' for no stretching")

    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by; 1 without YaRN."""
        if self.kind != "yarn":
            return 1.0
        if self.cos_sin_factor is not None:
            return self.cos_sin_factor
        return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)

    def softmax_factor(self) -> float:
        """What the attention scale is multiplied by: (0.1 mscale_all_dim ln(factor) + 1)^2 under YaRN."""
        if self.kind != "yarn" or self.mscale_all_dim == 0:
            return 1.0
        return _yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class DsaConfig:
    """A DSA transformer: MLA attention, lightning indexer, dense and MoE feed-forward blocks."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    layer_kinds: tuple[str, ...]  # FULL or SHARED, one per layer
    mlp_kinds: tuple[str, ...]  # DENSE or MOE, one per layer
    intermediate_size: int
    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_shared_experts: int = 0
    experts_per_token: int = 0
    expert_groups: int = 1
    expert_groups_kept: int = 1
    routed_scaling_factor: float = 1.0
    normalise_expert_weights: bool = True
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6  # of the norms of the two latents; GLM keeps 1e-6 where its other norms have 1e-5
    index_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_positions: int = 32768
    tie_word_embeddings: bool = False
    rope_interleave: bool = True  # main attention: pairs (2i, 2i+1); False: halves (i, i + d/2)
    index_rope_interleave: bool = False  # the indexer's own choice of the two
    dtype: str = "float32"  # of activations; parameters keep their own

    def __post_init__(self):
        if len(self.layer_kinds) != len(self.mlp_kinds):
            raise ValueError(
                f"{len(self.layer_kinds)} attention kinds but {len(self.mlp_kinds)} feed-forward kinds; give one of "
                "each per layer"
            )
        if not self.layer_kinds:
            raise ValueError("a model needs at least 1 layer, got 0; check num_hidden_layers")
        unknown = (set(self.layer_kinds) - {FULL, SHARED}) | (set(self.mlp_kinds) - {DENSE, MOE})
        if unknown:
            raise ValueError(f"layer kinds {sorted(unknown)} are unknown; use {FULL}/{SHARED} and {DENSE}/{MOE}")
        if self.layer_kinds[0] == SHARED:
            raise ValueError("layer 0 is 'shared' but has no full layer before it to share with; make it 'full'")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; rotary pairs need an even number")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim {self.qk_rope_head_dim}, but the "
                "rotated part is its first dims; raise index_head_dim"
            )
        if MOE in self.mlp_kinds:
            if not 0 < self.experts_per_token <= self.num_experts:
                raise ValueError(
                    f"experts_per_token {self.experts_per_token} must lie in 1..{self.num_experts} (num_experts)"
                )
            if self.num_experts % self.expert_groups:
                raise ValueError(
                    f"{self.num_experts} experts do not divide into {self.expert_groups} groups; change n_group"
                )
            reachable = self.expert_groups_kept * (self.num_experts // self.expert_groups)
            if reachable < self.experts_per_token:
                raise ValueError(
                    f"{self.expert_groups_kept} groups hold {reachable} experts but {self.experts_per_token} are "
                    "chosen per token; raise topk_group"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def record_width(self) -> int:
        """Values in one record: the latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        head = self.qk_nope_head_dim + self.qk_rope_head_dim
        return head**-0.5 * self.rope.softmax_factor()
