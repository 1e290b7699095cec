"""Tiny models with short convolutions in some layers: transformers' class and the values of its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_MOE = _SHARED | {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3, "num_dense_layers": 1}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "lfm2": ("Lfm2", _SHARED | {"block_auto_adjust_ff_dim": False}),
        "lfm2-wide-filter-biases-adjusted-mlp": (
            "Lfm2",
            _SHARED
            | {"conv_L_cache": 5, "conv_bias": True, "tie_word_embeddings": False}
            | {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5}
            | {"layer_types": ["full_attention", "conv", "conv", "conv"]},
        ),
        "lfm2-moe": ("Lfm2Moe", _MOE | {"routed_scaling_factor": 1.7}),
        "lfm2-moe-no-correction": ("Lfm2Moe", _MOE | {"use_expert_bias": False, "norm_topk_prob": False}),
    }
)

# The models of the tests of tensor parallelism.
SPLIT = ("lfm2-wide-filter-biases-adjusted-mlp", "lfm2-moe")
