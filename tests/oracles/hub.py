"""Oracle of the loader: a small checkpoint folder in the hub's layout, as parameters and hyperparameters.

Knows the bytes of a safetensors file, the hub's tensor names and both dialects of its configs, and turns the
tensors around by hand: a hub matrix is [out, in], ours are [in, out] with heads apart. Every number is widened
exactly to float32, but for FP8 weights, whose code * scale is rounded once. Holds all of it in memory at once.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tests.oracles.formats import from_bf16, from_e4m3

SCALE_BLOCK = 128


def load(folder: Path) -> tuple[dict, SimpleNamespace]:
    """params (a pytree of float32 arrays) and a config with the attribute names of `DsaConfig`."""
    config = _config(json.loads((folder / "config.json").read_text()))
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(_read(file))
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = _scaled(tensors[weight], tensors[name])
    params = {
        "embed": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "layers": tuple(_layer(tensors, config, number) for number in range(len(config.layer_kinds))),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = tensors["lm_head.weight"].T
    return params, config


def _read(file: Path) -> dict[str, np.ndarray]:
    """A safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        data = content[start + first : start + end]
        if entry["dtype"] == "F8_E4M3":
            values = from_e4m3(np.frombuffer(data, np.uint8))
        elif entry["dtype"] == "BF16":
            values = from_bf16(np.frombuffer(data, "<u2"))
        else:
            values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]]).astype(np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def _scaled(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The FP8 weight [out, in] with each 128 x 128 block times its scale; blocks at the edges are smaller."""
    result = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            scale = scales[row // SCALE_BLOCK, column // SCALE_BLOCK]
            result[row, column] = weight[row, column] * scale
    return result


def _config(hub: dict) -> SimpleNamespace:
    layers = hub["num_hidden_layers"]
    if "mlp_layer_types" in hub:
        mlp_kinds = tuple({"dense": "dense", "sparse": "moe"}[kind] for kind in hub["mlp_layer_types"])
    else:
        mlp_kinds = tuple("dense" if n < hub["first_k_dense_replace"] else "moe" for n in range(layers))
    rope = hub.get("rope_parameters") or {"rope_theta": hub["rope_theta"], **(hub.get("rope_scaling") or {})}
    return SimpleNamespace(
        vocab_size=hub["vocab_size"],
        hidden_size=hub["hidden_size"],
        num_heads=hub["num_attention_heads"],
        q_lora_rank=hub["q_lora_rank"],
        kv_lora_rank=hub["kv_lora_rank"],
        qk_nope_head_dim=hub["qk_nope_head_dim"],
        qk_rope_head_dim=hub["qk_rope_head_dim"],
        v_head_dim=hub["v_head_dim"],
        index_heads=hub["index_n_heads"],
        index_head_dim=hub["index_head_dim"],
        index_topk=hub["index_topk"],
        layer_kinds=tuple(hub.get("indexer_types", ["full"] * layers)),
        mlp_kinds=mlp_kinds,
        num_experts=hub["n_routed_experts"],
        experts_per_token=hub["num_experts_per_tok"],
        expert_groups=hub["n_group"],
        expert_groups_kept=hub["topk_group"],
        routed_scaling_factor=hub["routed_scaling_factor"],
        normalise_expert_weights=hub["norm_topk_prob"],
        rms_norm_eps=hub["rms_norm_eps"],
        latent_norm_eps=1e-6,  # the released models' code gives these two norms no eps of the config
        index_norm_eps=1e-6,
        rope=SimpleNamespace(
            theta=rope["rope_theta"],
            kind=rope.get("rope_type", rope.get("type", "default")),
            factor=rope.get("factor", 1.0),
            original_max_positions=rope.get("original_max_position_embeddings"),
            beta_fast=rope.get("beta_fast", 32),
            beta_slow=rope.get("beta_slow", 1),
            mscale=rope.get("mscale", 1.0),
            mscale_all_dim=rope.get("mscale_all_dim", 0.0),
        ),
        rope_interleave=hub.get("rope_interleave", True),
        index_rope_interleave=hub.get("indexer_rope_interleave", False),
        tie_word_embeddings=hub["tie_word_embeddings"],
    )


def _layer(tensors: dict, config: SimpleNamespace, number: int) -> dict:
    def get(name: str) -> np.ndarray:
        return tensors[f"model.layers.{number}.{name}"]

    heads, nope = config.num_heads, config.qk_nope_head_dim
    q_b = get("self_attn.q_b_proj.weight")  # [H * (nope + rope), Q]
    kv_b = get("self_attn.kv_b_proj.weight")  # [H * (nope + v), R]
    kv_b = kv_b.reshape(heads, nope + config.v_head_dim, config.kv_lora_rank)
    layer = {
        "input_norm": get("input_layernorm.weight"),
        "post_norm": get("post_attention_layernorm.weight"),
        "attention": {
            "q_a": get("self_attn.q_a_proj.weight").T,
            "q_a_norm": get("self_attn.q_a_layernorm.weight"),
            "q_b": q_b.T.reshape(config.q_lora_rank, heads, nope + config.qk_rope_head_dim),
            "kv_a": get("self_attn.kv_a_proj_with_mqa.weight").T,
            "kv_a_norm": get("self_attn.kv_a_layernorm.weight"),
            "kv_b_k": kv_b[:, :nope].transpose(2, 0, 1),
            "kv_b_v": kv_b[:, nope:].transpose(2, 0, 1),
            "o": get("self_attn.o_proj.weight").T.reshape(heads, config.v_head_dim, config.hidden_size),
        },
    }
    if config.layer_kinds[number] == "full":
        index_q_b = get("self_attn.indexer.wq_b.weight")  # [G * D_i, Q]
        layer["indexer"] = {
            "q_b": index_q_b.T.reshape(config.q_lora_rank, config.index_heads, config.index_head_dim),
            "k": get("self_attn.indexer.wk.weight").T,
            "k_norm_weight": get("self_attn.indexer.k_norm.weight"),
            "k_norm_bias": get("self_attn.indexer.k_norm.bias"),
            "weights": get("self_attn.indexer.weights_proj.weight").T,
        }
    if config.mlp_kinds[number] == "dense":
        layer["mlp"] = _mlp(get, "mlp")
    else:
        experts = [_mlp(get, f"mlp.experts.{expert}") for expert in range(config.num_experts)]
        layer["moe"] = {
            "router": get("mlp.gate.weight").T,
            "bias": get("mlp.gate.e_score_correction_bias"),
            **{name: np.stack([expert[name] for expert in experts]) for name in ("gate", "up", "down")},
            "shared": _mlp(get, "mlp.shared_experts"),
        }
    return layer


def _mlp(get, prefix: str) -> dict:
    return {name: get(f"{prefix}.{name}_proj.weight").T for name in ("gate", "up", "down")}
