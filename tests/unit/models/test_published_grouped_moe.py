"""config.json of other families with DeepSeek-V3's experts as publishers write it, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.rope import YarnScaling
from baton.models.families.moe.mimo_config import MiMoSwitches
from baton.models.families.reader import read_config
from baton.planner.model_size import model_size

GLM4_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
DOTS1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SOLAR_OPEN: dict[str, Any] = {
    "architectures": ["SolarOpenForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "model_type": "solar_open",
    "moe_intermediate_size": 1280,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 196608,
}
K_EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": 53,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "is_moe_layer": [False] + [True] * 47,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
    "max_position_embeddings": 262144,
    "model_type": "exaone_moe",
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "vocab_size": 153600,
}

MIMO_V2_FLASH: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, *([1] * 4 + [0]), *([1] * 5 + [0]) * 7],
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0] + [1] * 47,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "ignored_layers": [f"model.layers.{index}.self_attn.o_proj" for index in range(48)],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 152576,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def moe_of(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.method) == (Scoring.SIGMOID, TopKMethod.NOAUX_TC)
    return config.moe


def test_glm_4_7_flash_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GLM4_FLASH)
    moe = moe_of(config)
    assert isinstance(config.attention, MLAConfig)
    assert (config.attention.num_heads, config.attention.v_head_dim) == (20, 256)
    assert (moe.num_experts, moe.experts_per_token, moe.weight_scale) == (64, 4, 1.8)
    assert moe.layers == (False,) + (True,) * 46
    assert config.mtp_layers == 1


def test_dots_llm1_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, DOTS1)
    moe = moe_of(config)
    assert isinstance(config.attention, GQAConfig)
    assert config.attention.qk_norm
    assert not any(config.attention.sliding_windows)
    assert (moe.num_experts, moe.experts_per_token, moe.shared_intermediate_size) == (128, 6, 2816)
    assert moe.layers == (False,) + (True,) * 61


def test_dots_llm1_has_windows_from_a_layer_on(tmp_path: Path) -> None:
    config = read(tmp_path, DOTS1 | {"sliding_window": 512, "max_window_layers": 60, "use_sliding_window": True})
    assert isinstance(config.attention, GQAConfig)
    assert config.attention.sliding_windows == (None,) * 60 + (512,) * 2


def test_solar_open_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, SOLAR_OPEN)
    moe = moe_of(config)
    assert config.rope is not None
    assert isinstance(config.rope.scaling, YarnScaling)
    assert (moe.num_experts, moe.shared_intermediate_size, all(moe.layers)) == (128, 1280, True)


def test_k_exaone_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, K_EXAONE)
    moe = moe_of(config)
    assert isinstance(config.attention, GQAConfig)
    assert config.attention.sliding_windows[:4] == (128, 128, 128, None)
    assert config.attention.rotary_layers[:4] == (True, True, True, False)
    assert (moe.num_experts, moe.shared_intermediate_size, moe.weight_scale) == (128, 2048, 2.5)
    assert moe.layers == (False,) + (True,) * 47
    assert config.mtp_layers == 1


def test_mimo_v2_flash_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, MIMO_V2_FLASH)
    moe, attention = moe_of(config), config.attention
    assert isinstance(attention, GQAConfig)
    # transformers' window: 128 tokens before the token itself.
    assert attention.sliding_windows[:7] == (None, 129, 129, 129, 129, None, 129)
    assert attention.sliding_windows.count(None) == 9
    assert attention.layer_heads[:2] == ((4, 192), (8, 192))
    assert (attention.num_heads, attention.num_kv_heads, attention.value_dim, attention.sinks) == (64, 8, 128, True)
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.dim, config.rope.theta, config.local_rope.dim, config.local_rope.theta) == (64, 5e6, 64, 1e4)
    assert (moe.num_experts, moe.experts_per_token, moe.shared_intermediate_size, moe.weight_scale) == (256, 8, 0, 1.0)
    assert moe.layers == (False,) + (True,) * 47
    assert (config.norm_eps, config.switches) == (1e-5, MiMoSwitches(0.707))
    assert config.quantization is not None
    assert config.quantization.covers("model.layers.1.self_attn.q_proj")
    assert not config.quantization.covers("model.layers.1.self_attn.o_proj")
    assert model_size(config).weight_bytes == pytest.approx(309e9, rel=0.01)


def test_mimo_v2_flash_is_the_same_model_in_the_fields_of_transformers(tmp_path: Path) -> None:
    published = read(tmp_path, MIMO_V2_FLASH | {"quantization_config": None})
    config = transformers.MiMoV2FlashConfig(
        max_position_embeddings=262144, architectures=["MiMoV2FlashForCausalLM"], dtype="bfloat16"
    )
    config.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert replace(ours, eos_token_ids=published.eos_token_ids) == published


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (MIMO_V2_FLASH | {"swa_v_head_dim": 192}, "swa_v_head_dim", "v_head_dim, 128"),
        (MIMO_V2_FLASH | {"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim", "up to head_dim, 192"),
        (MIMO_V2_FLASH | {"swa_num_key_value_heads": 6}, "swa_num_key_value_heads", "a multiple or a divisor"),
        (MIMO_V2_FLASH | {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern", "each of 48 layers"),
        (MIMO_V2_FLASH | {"layer_types": ["full_attention"] * 48}, "hybrid_layer_pattern", "sliding_attention"),
        (MIMO_V2_FLASH | {"mlp_layer_types": ["sparse"] * 48}, "moe_layer_freq", "sparse"),
        (MIMO_V2_FLASH | {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias", "false"),
        (MIMO_V2_FLASH | {"n_shared_experts": 1}, "n_shared_experts", "0"),
        (MIMO_V2_FLASH | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling", "null"),
        (MIMO_V2_FLASH | {"rms_norm_eps": 1e-6}, "rms_norm_eps", "layernorm_epsilon"),
        (GLM4_FLASH | {"first_k_dense_replace": 2}, "first_k_dense_replace", "dense layers before all others"),
        (GLM4_FLASH | {"mlp_layer_types": ["dense"]}, "mlp_layer_types", "each of 47 layers"),
        (GLM4_FLASH | {"attention_bias": True}, "attention_bias", "false"),
        (GLM4_FLASH | {"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
        (DOTS1 | {"sliding_window": 512, "max_window_layers": 60}, "use_sliding_window", "true"),
        (DOTS1 | {"moe_layer_freq": 2}, "moe_layer_freq", "1"),
        (SOLAR_OPEN | {"first_k_dense_replace": 1}, "first_k_dense_replace", "0"),
        (SOLAR_OPEN | {"use_qk_norm": True}, "use_qk_norm", "false"),
        (SOLAR_OPEN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1.0"),
        (K_EXAONE | {"is_moe_layer": [True] * 48}, "is_moe_layer", "mlp_layer_types"),
        (K_EXAONE | {"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types", "each of 48 layers"),
        (K_EXAONE | {"layer_types": None}, "sliding_window_pattern", "layer_types"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
