"""Both dialects of config.json say the same model, and what is not computed is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest

from echo_jax.checkpoints.hf_config import check_quantization, config_from_hf, config_to_hf
from echo_jax.models.config import DENSE, FULL, MOE, SHARED, RopeConfig
from echo_jax.models.dsa import rope_frequencies
from echo_jax.models.presets import GLM5, GLM5_2, PRESETS, SMALL, TINY, V32

FIXTURES = Path(__file__).parent / "fixtures"

RELEASED_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
RELEASED_GLM5 = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
RELEASED_GLM5_2 = RELEASED_GLM5 | {
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
}


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize(
    ("raw", "config"),
    [(RELEASED_V32, V32), (RELEASED_GLM5, GLM5), (RELEASED_GLM5_2, GLM5_2)],
    ids=["v32", "glm5", "glm5.2"],
)
def test_released_configs_are_the_presets(raw, config):
    assert config_from_hf(raw) == config


@pytest.mark.parametrize("dialect", ["hub", "rope_parameters"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_back_in_both_dialects(name, dialect):
    written = json.loads(json.dumps(config_to_hf(PRESETS[name], dialect=dialect)))
    assert config_from_hf(written) == PRESETS[name]
    assert ("rope_parameters" in written) == (dialect == "rope_parameters")


def test_an_odd_arrangement_of_moe_layers_survives_both_dialects():
    config = dataclasses.replace(TINY, mlp_kinds=(MOE, DENSE, MOE, DENSE))
    for dialect in ("hub", "rope_parameters"):
        assert config_from_hf(config_to_hf(config, dialect=dialect)) == config
    dense = dataclasses.replace(TINY, mlp_kinds=(DENSE,) * 4)
    assert config_from_hf(config_to_hf(dense)).mlp_kinds == (DENSE,) * 4


def test_every_spelling_of_shared_layers():
    kinds = (FULL, FULL, FULL, SHARED, SHARED, SHARED, FULL, SHARED)
    base = RELEASED_GLM5 | {"num_hidden_layers": 8, "mlp_layer_types": ["dense"] * 8}
    as_list = ["full" if kind == FULL else "shared" for kind in kinds]
    assert config_from_hf(base | {"indexer_types": as_list}).layer_kinds == kinds
    assert config_from_hf(base | {"indexer_types": [*as_list, "full"]}).layer_kinds == kinds, "one for the MTP layer"
    assert config_from_hf(base | {"index_topk_pattern": "FFFSSSFS"}).layer_kinds == kinds
    assert config_from_hf(base | {"index_topk_freq": 4, "index_skip_topk_offset": 3}).layer_kinds == kinds
    assert config_from_hf(base).layer_kinds == (FULL,) * 8


def test_dense_layers_by_frequency():
    raw = RELEASED_V32 | {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    assert config_from_hf(raw).mlp_kinds == (DENSE, DENSE, MOE, DENSE, MOE, DENSE)


def test_the_indexer_rotation_follows_the_key_and_else_the_architecture():
    assert config_from_hf(RELEASED_V32).index_rope_interleave is False
    assert config_from_hf(without(RELEASED_GLM5, "indexer_rope_interleave")).index_rope_interleave is True
    assert config_from_hf(RELEASED_V32 | {"indexer_rope_interleave": True}).index_rope_interleave is True
    assert config_from_hf(RELEASED_GLM5 | {"indexer_rope_interleave": False}).index_rope_interleave is False


def test_absent_keys_mean_what_the_architecture_says():
    keys = ("n_group", "topk_group", "rms_norm_eps", "max_position_embeddings", "routed_scaling_factor")
    assert config_from_hf(without(RELEASED_V32, *keys, "norm_topk_prob", "n_shared_experts")) == V32
    assert config_from_hf(without(RELEASED_GLM5, *keys, "mlp_layer_types")) == GLM5


def test_no_shared_expert():
    assert config_from_hf(RELEASED_V32 | {"n_shared_experts": 0}).num_shared_experts == 0


def yarn(**changes):
    scaling = {key: value for key, value in (RELEASED_V32["rope_scaling"] | changes).items() if value is not None}
    return config_from_hf(RELEASED_V32 | {"rope_scaling": scaling}).rope


def test_the_yarn_factor_on_cosines_and_sines():
    """As transformers derives it: the ratio only where both mscales are given, a stated attention_factor before all."""
    plain = 0.1 * 3.6888794541139363 + 1  # 0.1 ln 40 + 1
    assert yarn().attention_factor() == 1.0
    assert yarn(mscale=0.5).attention_factor() == pytest.approx((0.05 * 3.6888794541139363 + 1) / plain)
    assert yarn(mscale=None, mscale_all_dim=None).attention_factor() == pytest.approx(plain)
    assert yarn(mscale=0.5, mscale_all_dim=None).attention_factor() == pytest.approx(plain)
    assert yarn(mscale=None).attention_factor() == pytest.approx(plain)
    assert yarn(attention_factor=1.25).attention_factor() == 1.25
    assert yarn(mscale=None).softmax_factor() == pytest.approx(plain**2)
    assert yarn(mscale=None, mscale_all_dim=None).softmax_factor() == 1.0
    for rope in (yarn(mscale=0.5), yarn(mscale=None), yarn(attention_factor=1.25), yarn(mscale_all_dim=None)):
        for dialect in ("hub", "rope_parameters"):
            again = config_from_hf(config_to_hf(dataclasses.replace(V32, rope=rope), dialect=dialect)).rope
            assert again.attention_factor() == rope.attention_factor()
            assert again.softmax_factor() == rope.softmax_factor()


def test_yarn_without_a_factor_stretches_to_the_stated_reach():
    assert yarn(factor=None).factor == 163840 / 4096
    assert yarn(original_max_position_embeddings=None, factor=2).original_max_positions == 163840


def test_plain_rope_in_the_hub_style():
    raw = without(RELEASED_V32, "rope_scaling")
    assert config_from_hf(raw | {"rope_scaling": None}).rope == RopeConfig(theta=10000.0)
    assert rope_frequencies(config_from_hf(raw).rope, 64)[0] == 1.0


REFUSED = {
    "model_type": ({"model_type": "deepseek_v3"}, ["model type 'deepseek_v3'", "'deepseek_v32', 'glm_moe_dsa'"]),
    "no_model_type": ({"model_type": None}, ["model type None"]),
    "missing": ({"hidden_size": None, "index_topk": None}, ["lacks hidden_size, index_topk"]),
    "missing_moe": ({"n_routed_experts": None}, ["lacks n_routed_experts"]),
    "missing_theta": ({"rope_theta": None}, ["lacks rope_theta"]),
    "no_query_latent": ({"q_lora_rank": None}, ["lacks q_lora_rank"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "'silu'"]),
    "routing": ({"scoring_func": "softmax"}, ["scoring_func 'softmax'", "'sigmoid'"]),
    "bias": ({"attention_bias": True}, ["attention_bias True"]),
    "dtype": ({"torch_dtype": "float8_e5m2"}, ["dtype 'float8_e5m2'", "bfloat16"]),
    "rope": ({"rope_scaling": {"type": "longrope", "factor": 4}}, ["rope type 'longrope'", "'default', 'yarn'"]),
    "rope_per_type": (
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"full": {"rope_theta": 1.0}}},
        ["one per layer type"],
    ),
    "partial_rope": (
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["factor 0.5"],
    ),
    "theta_nowhere": ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, ["lacks rope_theta"]),
    "untruncated": ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}}, ["truncate false"]),
    "quantisation": ({"quantization_config": {"quant_method": "awq"}}, ["'awq'", "convert the weights"]),
    "fp8_form": ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, ["'e5m2'", "'e4m3'"]),
    "block": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, ["weight_block_size None"]),
    "indexer_types": ({"indexer_types": ["full"] * 5}, ["indexer_types has 5 entries", "num_hidden_layers is 61"]),
    "indexer_word": ({"indexer_types": ["full"] * 60 + ["half"]}, ["'half'", "'full', 'shared'"]),
    "layer_types": ({"layer_types": ["sliding_attention"] * 61}, ["'sliding_attention'", "'indexed_attention'"]),
    "mlp_word": ({"mlp_layer_types": ["moe"] * 61}, ["'moe'", "'dense', 'sparse'"]),
    "moe_list": ({"moe_layer_freq": [0, 1]}, ["moe_layer_freq [0, 1]", "mlp_layer_types"]),
    "shared_first": ({"index_topk_pattern": "S" * 61}, ["layer 0 is 'shared'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_quantity_value_and_remedy(case):
    changes, words = REFUSED[case]
    raw = RELEASED_V32 | changes
    with pytest.raises(ValueError) as caught:
        config_from_hf({key: value for key, value in raw.items() if value is not None})
    for word in words:
        assert word in str(caught.value)


def test_block_size_is_read():
    assert check_quantization({}) == (128, 128)
    stated = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    assert check_quantization({"quantization_config": stated}) == (64, 32)


def test_what_a_config_file_cannot_say_is_refused():
    with pytest.raises(ValueError, match="latent_norm_eps 1e-05 cannot be written"):
        config_to_hf(dataclasses.replace(SMALL, latent_norm_eps=1e-5))
    with pytest.raises(ValueError, match="config dialect 'toml' is unknown"):
        config_to_hf(SMALL, dialect="toml")


def test_float16_models_are_computed_in_float32():
    assert config_from_hf(RELEASED_V32 | {"torch_dtype": "torch.float16"}).dtype == "float32"
