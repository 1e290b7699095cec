"""Tiny models of the dense families that share Llama's file: `tests.unit.models.tiny` saves them."""

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
_FOUR_LAYERS = _DENSE | {"num_hidden_layers": 4}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.4, "logits_scaling": 2.5}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "granite": ("Granite", _DENSE | _GRANITE),
        "granite-tied-biases": (
            "Granite",
            _DENSE | _GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        ),
        "seed-oss": ("SeedOss", _DENSE | {"head_dim": 12}),
        "seed-oss-output-bias": (
            "SeedOss",
            _DENSE | {"head_dim": 12, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        ),
        "smollm3": ("SmolLM3", _FOUR_LAYERS | {"no_rope_layer_interval": 2}),
        "smollm3-layers-listed-window": (
            "SmolLM3",
            _FOUR_LAYERS
            | {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 7}
            | {"attention_bias": True, "tie_word_embeddings": False},
        ),
    }
)
