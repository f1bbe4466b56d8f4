"""Hugging Face `config.json` dictionaries <-> `DsaConfig`, in both dialects.

Knows how released models spell their hyperparameters: the hub style of DeepSeek-V3.2 (`rope_theta` beside
`rope_scaling`, `first_k_dense_replace`, `moe_layer_freq`) and the `rope_parameters` style that transformers 5 writes
(`mlp_layer_types`, `layer_types`), for the model types `deepseek_v32` and `glm_moe_dsa`. Knows no files and no
weights: those are the business of `safetensors`.

What this library does not compute is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echo_jax.checkpoints.notes import note
from echo_jax.checkpoints.rope import rope_from_hf, rope_to_hf
from echo_jax.models.config import DENSE, FULL, MOE, SHARED, DsaConfig

DEEPSEEK, GLM = "deepseek_v32", "glm_moe_dsa"

ARCHITECTURES = {DEEPSEEK: "DeepseekV32ForCausalLM", GLM: "GlmMoeDsaForCausalLM"}

FP8_BLOCK = (128, 128)
"""Rows and columns that share one scale in the released FP8 weights."""

LATENT_NORM_EPS = INDEX_NORM_EPS = 1e-6
"""Fixed in both architectures and therefore absent from every config.json."""

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "intermediate_size": "intermediate_size",
}
_REQUIRED_BY_MOE = {
    "moe_intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
}
_OPTIONAL = {
    "num_shared_experts": "n_shared_experts",
    "expert_groups": "n_group",
    "expert_groups_kept": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
    "normalise_expert_weights": "norm_topk_prob",
    "rms_norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "rope_interleave": "rope_interleave",
    "index_rope_interleave": "indexer_rope_interleave",
}
_DEFAULTS = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "rope_interleave": True,
}
_DEFAULTS_OF = {
    DEEPSEEK: _DEFAULTS
    | {
        "n_group": 8,
        "topk_group": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "indexer_rope_interleave": False,
    },
    GLM: _DEFAULTS
    | {
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "indexer_rope_interleave": True,
    },
}
"""What an absent key means to the architecture itself; the two differ, the indexer's rotation included."""

_ONLY = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}
"""Keys of which one value is supported; absent means that value."""

_ACTIVATIONS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
"""Stored dtype -> dtype of the activations. float32 holds every float16 value; a float16 overflow it does not copy."""


def config_from_hf(raw: Mapping[str, Any], *, any_quantization: bool = False) -> DsaConfig:
    """The model that a `config.json` describes, in either dialect.

    any_quantization: accept weights that `load_folder` does not read, for whoever needs the shapes only.
    An absent optional key means what the architecture takes it to mean. Raises ValueError naming every missing key, or
    the unsupported quantity with its value, what is supported, and what to do.
    """
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model type {kind!r} is not supported; supported: {', '.join(map(repr, ARCHITECTURES))} (models with MLA "
            "and a lightning indexer); check model_type in config.json"
        )
    for key, allowed in _ONLY.items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise ValueError(
                f"{key} {raw[key]!r} is not supported; this library computes {key} {allowed[0]!r} only, so the model "
                "would give other answers than its authors'"
            )
    if not any_quantization:
        check_quantization(raw)
    _require(raw, ["num_hidden_layers", *_REQUIRED.values()])
    raw = {**raw, "n_routed_experts": _num_experts(raw)}
    _check_other_names(raw)
    mlp_kinds = _mlp_kinds(raw)
    if MOE in mlp_kinds:
        _require(raw, list(_REQUIRED_BY_MOE.values()))
    values = {field: raw[key] for field, key in _REQUIRED.items()}
    values |= {field: raw[key] for field, key in _REQUIRED_BY_MOE.items() if raw.get(key) is not None}
    values |= {field: _optional(raw, key) for field, key in _OPTIONAL.items()}
    values["num_shared_experts"] = values["num_shared_experts"] or 0
    return DsaConfig(
        **values,
        layer_kinds=_layer_kinds(raw),
        mlp_kinds=mlp_kinds,
        rope=rope_from_hf(raw, _DEFAULTS_OF[kind]["max_position_embeddings"]),
        latent_norm_eps=LATENT_NORM_EPS,
        index_norm_eps=INDEX_NORM_EPS,
        dtype=_activation_dtype(raw),
    )


def config_to_hf(
    config: DsaConfig, *, dialect: str = "rope_parameters", stored_dtype: str | None = None
) -> dict[str, Any]:
    """The `config.json` of `config`; `config_from_hf` gives it back.

    dialect: "rope_parameters" (as transformers 5 writes it) or "hub" (as DeepSeek-V3.2 was released).
    stored_dtype: of the weights beside it; the activation dtype when None.
    Token ids are null: without them a reader would assume ids 0 and 1. Whoever knows better overwrites them.
    Raises ValueError for an unknown dialect or a value that no config.json can say.
    """
    if dialect not in ("rope_parameters", "hub"):
        raise ValueError(f"config dialect {dialect!r} is unknown; use 'rope_parameters' or 'hub'")
    for field, fixed in (("latent_norm_eps", LATENT_NORM_EPS), ("index_norm_eps", INDEX_NORM_EPS)):
        if getattr(config, field) != fixed:
            raise ValueError(
                f"{field} {getattr(config, field)} cannot be written to a config.json, where it is fixed at {fixed}; "
                "use the orbax form for this model"
            )
    kind = GLM if SHARED in config.layer_kinds or config.index_rope_interleave else DEEPSEEK
    raw: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    has_moe = MOE in config.mlp_kinds
    for table in (_REQUIRED, _REQUIRED_BY_MOE if has_moe else {}, _OPTIONAL):
        raw |= {key: getattr(config, field) for field, key in table.items()}
    raw |= {key: allowed[0] for key, allowed in _ONLY.items() if key != "partial_rotary_factor"}
    raw |= {"num_hidden_layers": config.num_layers, "num_key_value_heads": config.num_heads}
    raw |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    raw["dtype" if dialect == "rope_parameters" else "torch_dtype"] = stored_dtype or config.dtype
    if SHARED in config.layer_kinds:
        raw["indexer_types"] = list(config.layer_kinds)
    dense = config.mlp_kinds.index(MOE) if has_moe else config.num_layers
    regular = config.mlp_kinds == (DENSE,) * dense + (MOE,) * (config.num_layers - dense)
    if regular:
        raw |= {"first_k_dense_replace": dense, "moe_layer_freq": 1}
    if dialect == "rope_parameters" or not regular:
        raw["mlp_layer_types"] = [{DENSE: "dense", MOE: "sparse"}[one] for one in config.mlp_kinds]
    rope = rope_to_hf(config.rope)
    if dialect == "rope_parameters":
        raw["rope_parameters"] = {"rope_theta": config.rope.theta, "rope_type": config.rope.kind, **rope}
    else:
        raw["rope_theta"] = config.rope.theta
        raw["rope_scaling"] = {"type": config.rope.kind, **rope} if rope else None
    return dict(sorted(raw.items()))


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the config says that weights are quantised, under either of its names; None where it says nothing."""
    found = {key: raw[key] for key in ("quantization_config", "compression_config") if raw.get(key)}
    for key, stated in found.items():
        if not isinstance(stated, Mapping):
            raise ValueError(f"{key} is {stated!r} but must be an object; fetch config.json again")
    methods = [stated.get("quant_method") for stated in found.values()]
    if len(found) == 2 and found["quantization_config"] != found["compression_config"]:
        raise ValueError(
            f"quantization_config ({methods[0]!r}) and compression_config ({methods[1]!r}) of config.json differ; keep "
            "the one that says how the weights are stored"
        )
    return next(iter(found.values()), None)


def check_quantization(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block with one FP8 scale; refuses every other way to quantise weights."""
    stated = quantization_of(raw)
    if stated is None:
        return FP8_BLOCK
    method, form = stated.get("quant_method"), stated.get("fmt", "e4m3")
    if method != "fp8" or form != "e4m3":
        shown = f"{method!r} with fmt {form!r}" if method == "fp8" else repr(method)
        raise ValueError(
            f"quantisation method {shown} is not supported; supported: 'fp8' with fmt 'e4m3' and "
            "block scales; convert the weights to bfloat16 and remove quantization_config"
        )
    block = stated.get("weight_block_size", FP8_BLOCK)
    if not isinstance(block, Sequence) or len(block) != 2 or min(block) < 1:
        raise ValueError(
            f"weight_block_size {block!r} is not supported; FP8 weights need [rows, columns] per scale, such as "
            f"{list(FP8_BLOCK)}"
        )
    return int(block[0]), int(block[1])


def predicted_layers(raw: Mapping[str, Any]) -> int:
    """Layers of multi-token prediction (MTP) that the config declares behind its hidden layers."""
    return raw.get("num_nextn_predict_layers") or 0


def _require(raw: Mapping[str, Any], keys: list[str]) -> None:
    missing = [key for key in keys if raw.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}; add what the model was trained with")


def _optional(raw: Mapping[str, Any], key: str) -> Any:
    return raw[key] if raw.get(key) is not None else _DEFAULTS_OF[raw["model_type"]][key]


def _num_experts(raw: Mapping[str, Any]) -> Any:
    """n_routed_experts, under any of the names that transformers reads it by."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    if len(set(found.values())) > 1:
        stated = ", ".join(f"{name} {value}" for name, value in found.items())
        raise ValueError(f"{stated} of config.json differ but all say how many experts a layer has; keep one of them")
    return next(iter(found.values()), None)


def _check_other_names(raw: Mapping[str, Any]) -> None:
    """What follows from other keys and is stated all the same."""
    parts = {"qk_nope_head_dim": raw["qk_nope_head_dim"], "qk_rope_head_dim": raw["qk_rope_head_dim"]}
    whole = sum(parts.values())
    if raw.get("qk_head_dim") not in (None, whole):
        raise ValueError(
            f"qk_head_dim {raw['qk_head_dim']} is not the sum of qk_nope_head_dim {parts['qk_nope_head_dim']} and "
            f"qk_rope_head_dim {parts['qk_rope_head_dim']}; correct config.json"
        )
    if raw.get("head_dim") not in (None, whole, raw["qk_rope_head_dim"]):
        note(f"head_dim {raw['head_dim']} of config.json is not used; a head has {whole} dims, {parts}")
    named = [name for name in raw.get("architectures") or () if name in ARCHITECTURES.values()]
    if named and ARCHITECTURES[raw["model_type"]] not in named:
        note(
            f"architectures {named[0]!r} and model_type {raw['model_type']!r} of config.json disagree; model_type "
            "counts, as in transformers"
        )


def _activation_dtype(raw: Mapping[str, Any]) -> str:
    found = {key: str(raw[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if raw.get(key)}
    if len(set(found.values())) > 1:
        note(
            f"dtype {found['dtype']!r} and torch_dtype {found['torch_dtype']!r} of config.json disagree; dtype counts, "
            "as in transformers"
        )
    dtype = next(iter(found.values()), "float32")
    if dtype not in _ACTIVATIONS:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(_ACTIVATIONS)}; convert the weights")
    return _ACTIVATIONS[dtype]


def _per_layer(raw: Mapping[str, Any], key: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """A per-layer list, its words translated; entries for the predicted (MTP) layers at its end are dropped."""
    stated, layers = list(raw[key]), raw["num_hidden_layers"]
    if len(stated) not in (layers, layers + predicted_layers(raw)):
        raise ValueError(f"{key} has {len(stated)} entries but num_hidden_layers is {layers}; give one entry per layer")
    unknown = sorted({str(one) for one in stated} - set(names))
    if unknown:
        raise ValueError(f"{key} has {', '.join(map(repr, unknown))}; supported: {', '.join(map(repr, names))}")
    return tuple(names[one] for one in stated[:layers])


def _layer_kinds(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Which layers have an indexer of their own: a list, a pattern of letters, or every `freq`-th from an offset on."""
    if raw.get("layer_types") is not None:
        _per_layer(raw, "layer_types", dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), FULL))
    words = {"indexer_types": {}, "index_topk_pattern": {"F": FULL, "S": SHARED}}
    stated = {
        key: _per_layer(raw, key, names | {"full": FULL, "shared": SHARED})
        for key, names in words.items()
        if raw.get(key) is not None
    }
    if not stated or raw.get("index_topk_freq") is not None:
        every = max(raw.get("index_topk_freq") or 1, 1)
        offset = raw["index_skip_topk_offset"] if raw.get("index_skip_topk_offset") is not None else 2
        since = (max(layer - offset + 1, 0) for layer in range(raw["num_hidden_layers"]))
        stated["index_topk_freq"] = tuple(FULL if steps % every == 0 else SHARED for steps in since)
    return _first_of(stated)


def _first_of(stated: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The kinds of layers under the name that counts, which is the first; a note of the first layer that another name
    calls something else."""
    (name, kinds), *others = stated.items()
    for other, differing in others:
        layers = [layer for layer, (kind, one) in enumerate(zip(kinds, differing, strict=True)) if kind != one]
        if layers:
            note(
                f"{name} and {other} of config.json disagree, first on layer {layers[0]} ({kinds[layers[0]]!r} and "
                f"{differing[layers[0]]!r}); {name} counts, as in transformers"
            )
    return kinds


def _mlp_kinds(raw: Mapping[str, Any]) -> tuple[str, ...]:
    stated = {}
    if raw.get("mlp_layer_types") is not None:
        stated["mlp_layer_types"] = _per_layer(raw, "mlp_layer_types", {"dense": DENSE, "sparse": MOE})
    if not stated or raw.get("first_k_dense_replace") is not None or raw.get("moe_layer_freq") not in (None, 1):
        dense = raw["first_k_dense_replace"] if raw.get("first_k_dense_replace") is not None else 3
        every = raw.get("moe_layer_freq") or 1
        if not isinstance(every, int):
            raise ValueError(
                f"moe_layer_freq {every!r} is not an integer; say which layers are MoE with mlp_layer_types alone"
            )
        layers = range(raw["num_hidden_layers"])
        stated["first_k_dense_replace"] = tuple(MOE if i >= dense and i % every == 0 else DENSE for i in layers)
    return _first_of(stated)
