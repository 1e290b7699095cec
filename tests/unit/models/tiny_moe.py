"""Tiny models with mixtures of experts: transformers' class and the values of its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "num_experts_per_tok": 3,
}
_QWEN = _SHARED | {"num_experts": 6, "moe_intermediate_size": 20}
_QWEN2 = _QWEN | {"shared_expert_intermediate_size": 28}
_GLM = _SHARED | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_DOTS = _SHARED | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_SOLAR = {name: value for name, value in _SHARED.items() if name != "intermediate_size"} | {
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
}
_EXAONE = _SHARED | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_MIMO = _SHARED | {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 48,
    "v_head_dim": 32,
    "sliding_window": 7,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
_ERNIE = {name: value for name, value in _SHARED.items() if name != "num_experts_per_tok"} | {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 20,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
}
_PHIMOE = {name: value for name, value in _SHARED.items() if name != "num_experts_per_tok"} | {"num_local_experts": 6}
_HUNYUAN = {name: value for name, value in _SHARED.items() if name != "num_experts_per_tok"} | {
    "head_dim": 8,
    "num_experts": 5,
    "moe_topk": 2,
}
# DeepSeek-V3 without groups, and with a YaRN that keeps no channel between.
_KIMI = _SHARED | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen3-moe": ("Qwen3Moe", _QWEN | {"head_dim": 16, "norm_topk_prob": True}),
        "qwen3-moe-dense-layers-between": (
            "Qwen3Moe",
            _QWEN
            | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True}
            | {"num_experts_per_tok": 2},
        ),
        "mixtral": ("Mixtral", _SHARED | {"num_local_experts": 5}),
        "mixtral-window-tied": (
            "Mixtral",
            _SHARED
            | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
            | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        ),
        "qwen2-moe": ("Qwen2Moe", _QWEN2),
        "qwen2-moe-window-no-biases": (
            "Qwen2Moe",
            _QWEN2
            | {"use_sliding_window": True, "sliding_window": 7, "norm_topk_prob": True, "qkv_bias": False}
            | {"layer_types": ["sliding_attention", "full_attention"], "mlp_only_layers": [0]},
        ),
        "glm4-moe": ("Glm4Moe", _GLM | {"use_qk_norm": True, "routed_scaling_factor": 1.7}),
        "glm4-moe-biases-groups": (
            "Glm4Moe",
            _GLM
            | {"attention_bias": True, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
        ),
        "dots1": ("Dots1", _DOTS | {"sliding_window": None, "routed_scaling_factor": 1.7, "norm_topk_prob": True}),
        "dots1-window-groups-biases": (
            "Dots1",
            _DOTS
            | {"sliding_window": 7, "max_window_layers": 1, "attention_bias": True, "n_group": 4, "topk_group": 2},
        ),
        "solar-open": ("SolarOpen", _SOLAR | {"attention_bias": True, "routed_scaling_factor": 1.7}),
        "solar-open-groups": (
            "SolarOpen",
            _SOLAR
            | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ),
        "exaone-moe": ("ExaoneMoe", _EXAONE),
        "exaone-moe-groups-dense-between": (
            "ExaoneMoe",
            _EXAONE
            | {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}
            | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "n_group": 4, "topk_group": 2}
            | {"num_shared_experts": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
        ),
        "mimo-v2-flash": ("MiMoV2Flash", _MIMO | {"routed_scaling_factor": 1.7}),
        "mimo-v2-flash-groups-dense-between": (
            "MiMoV2Flash",
            _MIMO
            | {"attention_bias": True, "attention_value_scale": None, "n_group": 4, "topk_group": 2}
            | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "norm_topk_prob": False}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]}
            | {"tie_word_embeddings": True, "sliding_window": 4}
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                }
            },
        ),
        "granite-moe": (
            "GraniteMoe",
            _SHARED
            | {"num_local_experts": 5, "attention_bias": True, "embedding_multiplier": 3.0}
            | {"residual_multiplier": 0.5, "attention_multiplier": 0.4, "logits_scaling": 0.25},
        ),
        "ernie-moe": ("Ernie4_5_Moe", _ERNIE),
        "ernie-moe-dense-layers-around-no-shared": (
            "Ernie4_5_Moe",
            _ERNIE
            | {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3, "moe_num_shared_experts": 0}
            | {"tie_word_embeddings": False},
        ),
        "phimoe": ("Phimoe", _PHIMOE | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}),
        "phimoe-window-longrope": (
            "Phimoe",
            _PHIMOE
            | {"sliding_window": 9, "num_local_experts": 2}
            | {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 500.0,
                    "short_factor": [1.0, 1.5, 2.0, 3.0],
                    "long_factor": [2.0, 3.0, 4.0, 8.0],
                    "short_mscale": 1.2,
                    "long_mscale": 1.3,
                    "original_max_position_embeddings": 512,
                }
            },
        ),
        "olmoe": ("Olmoe", _SHARED | {"num_experts": 6, "attention_bias": True}),
        "olmoe-normalized": ("Olmoe", _SHARED | {"num_experts": 5, "norm_topk_prob": True}),
        # rotary_dim is what checkpoints have, and the factor what transformers before 5.18 reads.
        "minimax-m2": (
            "MiniMaxM2",
            _SHARED | {"num_local_experts": 6, "head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": 0.5},
        ),
        "hunyuan-moe": ("HunYuanMoEV1", _HUNYUAN),
        "hunyuan-moe-biases": ("HunYuanMoEV1", _HUNYUAN | {"moe_topk": [3, 3], "attention_bias": True}),
        "kimi-k2": ("DeepseekV3", _KIMI),
    }
)

# Rows of test_parallel.
SPLIT = (
    "qwen3-moe-dense-layers-between",
    "mixtral-window-tied",
    "qwen2-moe",
    "glm4-moe-biases-groups",
    "dots1-window-groups-biases",
    "solar-open",
    "exaone-moe-groups-dense-between",
    "granite-moe",
    "ernie-moe",
)
# Rows of test_parallel, over two and four ranks.
BY_BOTH = ("mimo-v2-flash", "mimo-v2-flash-groups-dense-between")
# Rows of test_moe_checkpoints.
SPELLED = (
    "qwen3-moe",
    "mixtral",
    "qwen2-moe",
    "glm4-moe",
    "dots1",
    "solar-open",
    "exaone-moe",
    "mimo-v2-flash",
    "granite-moe",
    "ernie-moe",
    "phimoe",
    "olmoe",
    "minimax-m2",
    "hunyuan-moe",
)
