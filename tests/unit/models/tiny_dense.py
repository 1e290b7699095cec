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
_OLMO3_ROPES = {
    "full_attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 6,
    "max_position_embeddings": 96,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.7,
}
SPLIT = (
    "granite-tied-biases",
    "olmo2",
    "olmo2-four-kv-heads",
    "exaone4",
    "hunyuan-dense",
    "ministral3",
    "cohere-norms-untied",
    "arcee",
    "apertus",
    "glm4",
)

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
        "olmo2": ("Olmo2", _DENSE | {"attention_bias": True, "rms_norm_eps": 0.1}),
        "olmo2-four-kv-heads": ("Olmo2", _DENSE | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        "olmo3": ("Olmo3", _FOUR_LAYERS | {"sliding_window": 7, "rope_parameters": _OLMO3_ROPES}),
        "exaone4": ("Exaone4", _FOUR_LAYERS | {"sliding_window": 7, "sliding_window_pattern": 3}),
        "exaone4-no-window": (
            "Exaone4",
            _DENSE | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rms_norm_eps": 0.1},
        ),
        "ernie4.5": ("Ernie4_5", _DENSE | {"head_dim": 12, "use_bias": True}),
        "hunyuan-dense": ("HunYuanDenseV1", _DENSE | {"head_dim": 8, "attention_bias": True, "rms_norm_eps": 0.1}),
        "hunyuan-dense-alpha": (
            "HunYuanDenseV1",
            _DENSE | {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        ),
        "ministral": (
            "Ministral",
            _DENSE | {"head_dim": 12, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        "cohere": ("Cohere", _DENSE | {"logit_scale": 0.4, "attention_bias": True, "layer_norm_eps": 0.1}),
        "cohere-norms-untied": (
            "Cohere",
            _DENSE | {"use_qk_norm": True, "tie_word_embeddings": False, "logit_scale": 0.4},
        ),
        "cohere2": ("Cohere2", _FOUR_LAYERS | {"logit_scale": 0.4, "sliding_window": 7, "sliding_window_pattern": 2}),
        "arcee": ("Arcee", _DENSE | {"attention_bias": True, "mlp_bias": True}),
        "apertus": ("Apertus", _DENSE | {"rms_norm_eps": 0.1}),
        "glm": ("Glm", _DENSE | {"head_dim": 16}),
        "glm4": ("Glm4", _DENSE | {"head_dim": 16, "attention_bias": False, "rms_norm_eps": 0.1}),
        "ministral3": ("Ministral3", _DENSE | {"head_dim": 12, "rope_parameters": _MINISTRAL3_ROPE}),
    }
)
