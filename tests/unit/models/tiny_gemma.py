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
_VAULT = _SHARED | {"query_pre_attn_scalar": 20, "sliding_window": 7}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "gemma1": ("Gemma", _SHARED),
        "gemma1-untied-biases": ("Gemma", _SHARED | {"tie_word_embeddings": False, "attention_bias": True}),
        "vault-gemma": (
            "VaultGemma",
            _VAULT | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
    }
)
# Split over four ranks by `test_parallel`.
BY_FOUR = ("gemma1-untied-biases", "vault-gemma")
