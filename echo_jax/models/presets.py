"""Configs by name: two for trying things out, and the shapes of the released models.

Knows numbers and where they come from. No weights belong to a preset: `dsa.init_params` makes random ones, a released
checkpoint brings its own config.

Sources. `v32`: config.json of deepseek-ai/DeepSeek-V3.2 (the same in V3.2-Exp). `glm5`: config.json of zai-org/GLM-5
(and GLM-5.1), where every layer has its indexer. `glm5.2`: zai-org/GLM-5.2, the same shapes with IndexShare (arXiv
2603.12201): from layer 2 on every fourth layer has an indexer and three share its choice; longer context.
"""

from __future__ import annotations

import dataclasses
import difflib
import math

import jax

from echo_jax.models.config import DENSE, FULL, MOE, SHARED, DsaConfig, RopeConfig
from echo_jax.models.dsa import init_params

TINY = DsaConfig(
    vocab_size=256,
    hidden_size=64,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=48,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_heads=8,
    index_head_dim=32,
    index_topk=64,
    layer_kinds=(FULL, FULL, SHARED, FULL),
    mlp_kinds=(DENSE, MOE, MOE, MOE),
    intermediate_size=128,
    moe_intermediate_size=32,
    num_experts=8,
    num_shared_experts=1,
    experts_per_token=2,
    expert_groups=2,
    expert_groups_kept=1,
    routed_scaling_factor=2.5,
    max_positions=4096,
)
"""Every kind of layer in 0.4 million parameters: compiles in seconds, for tests and first experiments."""

SMALL = DsaConfig(
    vocab_size=256,
    hidden_size=256,
    num_heads=8,
    q_lora_rank=192,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    index_heads=16,
    index_head_dim=128,
    index_topk=256,
    layer_kinds=(FULL,) * 8,
    mlp_kinds=(DENSE,) + (MOE,) * 7,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_experts=16,
    num_shared_experts=1,
    experts_per_token=4,
    expert_groups=4,
    expert_groups_kept=2,
    routed_scaling_factor=2.5,
    max_positions=32768,
    dtype="bfloat16",
)
"""The record and index key of the released models (512 + 64 values, 128) on a model that a CPU can run."""

V32 = DsaConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_heads=64,
    index_head_dim=128,
    index_topk=2048,
    layer_kinds=(FULL,) * 61,
    mlp_kinds=(DENSE,) * 3 + (MOE,) * 58,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_experts=256,
    num_shared_experts=1,
    experts_per_token=8,
    expert_groups=8,
    expert_groups_kept=4,
    routed_scaling_factor=2.5,
    rope=RopeConfig(
        theta=10000.0, kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    max_positions=163840,
    dtype="bfloat16",
)
"""DeepSeek-V3.2: 671.9 billion parameters without its predicted (MTP) layer."""

GLM5 = DsaConfig(
    vocab_size=154880,
    hidden_size=6144,
    num_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_heads=32,
    index_head_dim=128,
    index_topk=2048,
    layer_kinds=(FULL,) * 78,
    mlp_kinds=(DENSE,) * 3 + (MOE,) * 75,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_experts=256,
    num_shared_experts=1,
    experts_per_token=8,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1_000_000.0),
    max_positions=202752,
    index_rope_interleave=True,
    dtype="bfloat16",
)
"""GLM-5: 743.9 billion parameters without its predicted (MTP) layer."""

GLM5_2 = dataclasses.replace(
    GLM5,
    layer_kinds=tuple(FULL if layer < 3 or layer % 4 == 2 else SHARED for layer in range(78)),
    rope=RopeConfig(theta=8_000_000.0),
    max_positions=1_048_576,
)
"""GLM-5.2: 21 layers with an indexer, 57 that share."""

PRESETS = {"tiny": TINY, "small": SMALL, "v32": V32, "glm5": GLM5, "glm5.2": GLM5_2}


def preset(name: str) -> DsaConfig:
    """The config of that name. Raises ValueError for an unknown one, with the nearest and all there are."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)
        raise ValueError(
            f"preset {name!r} is unknown; the nearest is {near[0]!r}; there are: {', '.join(map(repr, PRESETS))}"
        )
    return PRESETS[name]


def parameter_count(config: DsaConfig) -> int:
    """Values in all parameters, each counted once; nothing is allocated."""
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
