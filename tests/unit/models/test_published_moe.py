"""config.json of mixtures of experts as publishers write it, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, QKNorm, Scoring, TopKMethod
from baton.models.config.rope import AlphaScaling, LongRopeScaling, YarnScaling
from baton.models.families.dense.llama_switches import LlamaSwitches
from baton.models.families.moe.moe_routers_config import PhimoeSwitches
from baton.models.families.reader import read_config

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GRANITE_MOE: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}
ERNIE_MOE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "vocab_size": 103424,
}
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
HUNYUAN_MOE: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "eos_token_id": 127960,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
PHIMOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "input_jitter_noise": 0.01,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0] * 64,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def moe_of(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None
    return config.moe


def test_mixtral_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL)
    attention, moe = attention_of(config), moe_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 128)
    assert not any(attention.sliding_windows)
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (8, 2, 14336)
    assert (moe.scoring, moe.method, moe.normalize_weights) == (Scoring.SOFTMAX, TopKMethod.GREEDY, True)
    assert all(moe.layers)


def test_qwen3_moe_is_read_in_both_spellings(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_MOE)
    attention, moe = attention_of(config), moe_of(config)
    assert attention.qk_norm
    assert not attention.qkv_bias
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (128, 8, 768)
    assert moe.normalize_weights
    assert config.intermediate_size == 6144
    assert config == read(tmp_path, QWEN3_MOE | {"num_experts": None, "num_local_experts": 128})


def test_qwen_with_all_layers_dense_has_no_experts(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3_MOE | {"mlp_only_layers": list(range(48))}).moe is None


def test_qwen2_moe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN2_MOE)
    moe = moe_of(config)
    assert attention_of(config).qkv_bias
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (60, 4, 1408)
    assert (moe.shared_intermediate_size, moe.shared_gate, moe.normalize_weights) == (5632, True, False)


def test_glm4_moe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GLM4_MOE)
    attention, moe = attention_of(config), moe_of(config)
    assert config.rope is not None
    assert (config.rope.dim, attention.head_dim) == (64, 128)
    assert (attention.qkv_bias, attention.output_bias, attention.qk_norm) == (True, False, False)
    assert (moe.scoring, moe.method, moe.weight_scale) == (Scoring.SIGMOID, TopKMethod.NOAUX_TC, 1.0)
    assert (moe.num_experts, moe.shared_intermediate_size) == (128, 1408)
    assert moe.layers == (False,) + (True,) * 45
    assert config.mtp_layers == 1


def test_granite_moe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE_MOE)
    moe = moe_of(config)
    assert attention_of(config).scale == 0.015625
    assert config.switches == LlamaSwitches(
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_multiplier=1 / 6
    )
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (40, 8, 512)


def test_ernie_moe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, ERNIE_MOE)
    moe = moe_of(config)
    assert config.rope is not None
    assert config.rope.interleaved
    assert (moe.scoring, moe.method, moe.num_groups) == (Scoring.SOFTMAX, TopKMethod.NOAUX_TC, 1)
    assert (moe.num_experts, moe.experts_per_token, moe.shared_intermediate_size) == (64, 6, 3072)
    assert moe.layers == (False,) + (True,) * 27
    assert config.mtp_layers == 1


def test_minimax_m2_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAX_M2)
    attention, moe = attention_of(config), moe_of(config)
    assert config.rope is not None
    assert config.quantization is not None
    assert (config.rope.dim, attention.head_dim) == (64, 128)
    assert attention.qk_norm
    assert attention.qk_norm_of is QKNorm.ROW
    assert (moe.scoring, moe.method, moe.normalize_weights) == (Scoring.SIGMOID, TopKMethod.NOAUX_TC, True)
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (256, 8, 1536)
    assert moe.shared_intermediate_size == 0


def test_hunyuan_moe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, HUNYUAN_MOE)
    moe = moe_of(config)
    assert config.rope is not None
    assert config.rope.scaling == AlphaScaling(1000.0)
    assert attention_of(config).qk_norm_of is QKNorm.TURNED_HEAD
    assert (moe.num_experts, moe.experts_per_token, moe.shared_intermediate_size) == (64, 8, 3072)
    assert moe.normalize_weights


def test_phimoe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, PHIMOE)
    moe = moe_of(config)
    assert config.rope is not None
    assert isinstance(config.rope.scaling, LongRopeScaling)
    assert config.switches == PhimoeSwitches(head_bias=True)
    assert (moe.method, moe.mixer_threshold, moe.experts_per_token) == (TopKMethod.SPARSE_MIXER, 0.02, 2)
    assert attention_of(config).output_bias
    assert not any(attention_of(config).sliding_windows), "a window of the whole context is none"


def test_olmoe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, OLMOE)
    moe = moe_of(config)
    assert attention_of(config).qk_norm_of is QKNorm.ROW
    assert (moe.num_experts, moe.experts_per_token, moe.normalize_weights) == (64, 8, False)


def test_kimi_k2_is_deepseek_with_more_experts_and_fewer_heads(tmp_path: Path) -> None:
    config = read(tmp_path, KIMI_K2)
    moe = moe_of(config)
    assert isinstance(config.attention, MLAConfig)
    assert config.attention.num_heads == 64
    assert config.rope is not None
    assert isinstance(config.rope.scaling, YarnScaling)
    assert (config.rope.scaling.beta_fast, config.rope.scaling.beta_slow) == (1.0, 1.0)
    assert config.max_context_tokens == 131072
    assert (moe.num_experts, moe.experts_per_token, moe.num_groups, moe.weight_scale) == (384, 8, 1, 2.827)
    assert moe.layers == (False,) + (True,) * 60


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok", "number of experts, 8"),
        (MIXTRAL | {"num_local_experts": None}, "num_experts", "missing"),
        (QWEN3_MOE | {"num_experts": None}, "num_experts", "missing"),
        (QWEN3_MOE | {"num_local_experts": 64}, "num_experts", "128"),
        (QWEN3_MOE | {"use_sliding_window": True}, "use_sliding_window", "false"),
        (ERNIE_MOE | {"moe_k": 65}, "moe_k", "number of experts, 64"),
        (MINIMAX_M2 | {"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
        (MINIMAX_M2 | {"attn_type_list": [0] * 62}, "attn_type_list", "1 for each layer"),
        (MINIMAX_M2 | {"rotary_dim": 256}, "partial_rotary_factor", "up to 1"),
        (MINIMAX_M2 | {"shared_intermediate_size": 64}, "shared_intermediate_size", "0"),
        (HUNYUAN_MOE | {"moe_topk": [8] * 31 + [4]}, "moe_topk", "for all layers"),
        (HUNYUAN_MOE | {"num_shared_expert": 2}, "num_shared_expert", "1 in all layers"),
        (HUNYUAN_MOE | {"moe_intermediate_size": 1024}, "moe_intermediate_size", "3072"),
        (HUNYUAN_MOE | {"use_cla": True}, "use_cla", "false"),
        (PHIMOE | {"num_experts_per_tok": 3}, "num_experts_per_tok", "2"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv", "null"),
        (ERNIE_MOE | {"use_bias": True}, "use_bias", "false"),
        (ERNIE_MOE | {"moe_use_aux_free": False}, "moe_use_aux_free", "true"),
        (QWEN2_MOE | {"use_sliding_window": True}, "layer_types", "for each layer"),
        (
            QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 0, "layer_types": ["sliding_attention"] * 24},
            "sliding_window",
            "at least 1",
        ),
        (QWEN2_MOE | {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window", "true"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
