"""Tiny models with a delta rule: transformers' class and the values of its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

_DRAWN: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        f"{mixer}.{name}": between
        for mixer in ("linear_attn", "self_attn", "forget_gate")
        for name, between in (("A_log", (-4.0, -1.0)), ("dt_bias", (-1.0, 1.0)), ("conv1d.weight", (-4.0, 4.0)))
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
_KIMI = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

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
        "kimi-linear": ("KimiLinear", _KIMI | {"q_lora_rank": 16}),
        "kimi-linear-experts-between-dense-layers": (
            "KimiLinear",
            _KIMI
            | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "norm_topk_prob": False}
            | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
            | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7, "linear_conv_kernel_dim": 2},
        ),
    }
)


def draw(path: str, tensor: Tensor) -> None:
    """Draws parameters of a delta rule, in place.

    transformers begins with states that fade within a token or two, which hides mistakes, and with convolutions whose
    small outputs lose digits when they are brought to unit length.
    """
    for end, between in _DRAWN.items():
        if path.endswith(end):
            tensor.uniform_(*between)


# Rows of test_parallel, over four ranks and over two.
SPLIT = ("qwen3-next-dense-layers-between-tied", "qwen3.5", "kimi-linear")
BY_TWO = ("qwen3-next", "kimi-linear-experts-between-dense-layers")
