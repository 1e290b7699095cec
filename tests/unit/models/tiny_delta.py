"""Tiny models with a delta rule: transformers' class and the values of its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# By the ends of names: transformers begins with states that fade within a token or two, which hides mistakes, and with
# convolutions whose small outputs lose digits when they are brought to unit length.
DRAWN: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        f"{mixer}.{name}": between
        for mixer in ("linear_attn", "self_attn", "forget_gate")
        for name, between in (("A_log", (-4.0, -1.0)), ("dt_bias", (-1.0, 1.0)), ("conv1d.weight", (-2.0, 2.0)))
    }
)

CONFIG_SUFFIX = {"Qwen3_5": "TextConfig", "Qwen3_5Moe": "TextConfig"}

_QWEN = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_BY_FOUR = {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_conv_kernel_dim": 3}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen3-next": ("Qwen3Next", _QWEN | _EXPERTS),
        "qwen3-next-dense-layers-between-tied": (
            "Qwen3Next",
            _QWEN
            | _EXPERTS
            | _BY_FOUR
            | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}
            | {"layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]}
            | {"attention_bias": True, "tie_word_embeddings": True},
        ),
        "qwen3.5": ("Qwen3_5", _QWEN | _BY_FOUR),
        "qwen3.5-moe": ("Qwen3_5Moe", {k: v for k, v in _QWEN.items() if k != "intermediate_size"} | _EXPERTS),
    }
)
