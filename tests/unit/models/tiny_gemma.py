"""Tiny models of the Gemma families that `tiny` does not have itself."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
# Layers without a window: fewer, larger heads, and slower rotation of a part of them.
_GEMMA4 = _SHARED | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "global_head_dim": 20,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 61,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_GEMMA4_WITHOUT = _GEMMA4 | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
# Tokens beyond the layers' own vocabulary, gates that are cut off, and a stream other than the first.
_GEMMA3N = _SHARED | {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 50,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.8, 0.0],
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_VAULT = _SHARED | {"query_pre_attn_scalar": 20, "sliding_window": 7}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "gemma1": ("Gemma", _SHARED),
        "gemma1-untied-biases": ("Gemma", _SHARED | {"tie_word_embeddings": False, "attention_bias": True}),
        "vault-gemma": (
            "VaultGemma",
            _VAULT | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
        "gemma3n": ("Gemma3n", _GEMMA3N),
        "gemma3n-unequal-mlps-untied": (
            "Gemma3n",
            _GEMMA3N
            | {"intermediate_size": [48, 40, 48, 32, 48], "altup_correct_scale": False, "altup_active_idx": 0}
            | {"tie_word_embeddings": False, "attention_bias": True, "num_kv_shared_layers": 0},
        ),
        "gemma4-wide-mlps": ("Gemma4", _GEMMA4 | {"use_double_wide_mlp": True}),
        "gemma4-values-are-keys": (
            "Gemma4",
            _GEMMA4_WITHOUT
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
            | {"tie_word_embeddings": False, "final_logit_softcapping": None, "attention_bias": True},
        ),
        "gemma4-experts": (
            "Gemma4",
            _GEMMA4_WITHOUT
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
            | {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20, "num_key_value_heads": 4},
        ),
    }
)
CONFIG_SUFFIX = {"Gemma3n": "TextConfig", "Gemma4": "TextConfig"}
REDRAWN = (
    "correct_output_scale",
    "layer_scalar",
    "router.scale",
    "per_expert_scale",
)  # ones in a new model, which hide mistakes
ALSO_SEE = {"Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration"}
# Split over four ranks by `test_parallel`.
BY_FOUR = ("gemma1-untied-biases", "vault-gemma", "gemma3n-unequal-mlps-untied")
# And over two and four.
BY_TWO = ("gemma3n", "gemma4-wide-mlps", "gemma4-values-are-keys", "gemma4-experts")
