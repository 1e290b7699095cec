"""Tiny models in which part of a head turns, or whose checkpoints keep several projections in one tensor."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_DENSE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
# Short factors for prompts of up to 64 tokens.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [2.0, 4.0, 7.0],
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "phi3-window": ("Phi3", _DENSE | {"sliding_window": 6}),
        "phi3-longrope-partial": (
            "Phi3",
            _DENSE
            | {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE, "tie_word_embeddings": True}
            | {"sliding_window": 512},
        ),
        "stablelm": ("StableLm", _DENSE | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        "stablelm-parallel-head-norms-biases": (
            "StableLm",
            _DENSE
            | {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "layer_norm_eps": 1e-2}
            | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.75}},
        ),
    }
)
