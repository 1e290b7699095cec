"""Tiny models with latent attention and experts in other places than DeepSeek's: transformers' class and the values of
its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

REDRAWN = ("layernorm.0.weight", "layernorm.1.weight")

_LONGCAT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
    "moe_topk": 3,
    "n_routed_experts": 6,
    "zero_expert_num": 4,
    "expert_ffn_hidden_size": 20,
    "routed_scaling_factor": 1.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_GLM = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "longcat": ("LongcatFlash", _LONGCAT),
        # More choices than experts with weights.
        "longcat-yarn-most-experts-zero": (
            "LongcatFlash",
            _LONGCAT
            | {"rope_parameters": _YARN, "n_routed_experts": 3, "zero_expert_num": 6, "moe_topk": 5}
            | {"rms_norm_eps": 1e-4, "tie_word_embeddings": True},
        ),
        "longcat-no-zero-experts": ("LongcatFlash", _LONGCAT | {"zero_expert_num": 0}),
        "glm4-moe-lite": ("Glm4MoeLite", _GLM),
        "glm4-moe-lite-groups-dense-between": (
            "Glm4MoeLite",
            _GLM
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2, "q_lora_rank": None}
            | {"norm_topk_prob": False, "rope_interleave": False, "n_shared_experts": 2},
        ),
    }
)
# In the tests of tensor parallelism.
SPLIT = ("longcat", "longcat-yarn-most-experts-zero", "glm4-moe-lite-groups-dense-between")
