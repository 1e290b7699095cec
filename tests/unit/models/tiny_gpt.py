"""Tiny models of the families with layer norms and an MLP of two layers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCAB_SIZE = 61  # tiny.VOCAB_SIZE
NORMS = ("ln_1.weight", "ln_2.weight", "norm_1.weight", "norm_2.weight", "norm_f.weight")  # transformers makes them 1
_SHARED = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "initializer_range": 0.2}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 512}
_STARCODER2 = _SHARED | _LAYERS | {"num_key_value_heads": 2, "norm_epsilon": 1e-2}
_NEMOTRON = _SHARED | _LAYERS | {"num_key_value_heads": 2, "norm_eps": 1e-2}
_GPT_NEOX = _SHARED | _LAYERS | {"layer_norm_eps": 1e-2}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.2,
}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.2,
}
_MPT = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 512,
    "initializer_range": 0.2,
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "starcoder2": ("Starcoder2", _STARCODER2),
        "starcoder2-window-no-biases-gelu": (
            "Starcoder2",
            _STARCODER2 | {"sliding_window": 6, "use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False},
        ),
        "nemotron": ("Nemotron", _NEMOTRON),
        "nemotron-wide-heads-biases": (
            "Nemotron",
            _NEMOTRON
            | {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
        ),
        "gpt-neox": (
            "GPTNeoX",
            _GPT_NEOX | {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.5}},
        ),
        "gpt-neox-in-sequence-no-attention-biases": (
            "GPTNeoX",
            _GPT_NEOX
            | {"hidden_act": "gelu_fast", "use_parallel_residual": False, "attention_bias": False}
            | {"tie_word_embeddings": True},
        ),
        "gpt2": ("GPT2", _GPT2 | {"n_inner": 48, "layer_norm_epsilon": 1e-2}),
        "gpt2-untied-unscaled-relu": (
            "GPT2",
            _GPT2 | {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "relu"},
        ),
        "opt": ("OPT", _OPT),
        "opt-norms-after-projections": (
            "OPT",
            _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20, "tie_word_embeddings": False},
        ),
        "opt-no-biases-no-final-norm-tied-projections": (
            "OPT",
            _OPT | {"enable_bias": False, "_remove_final_layer_norm": True, "word_embed_proj_dim": 48},
        ),
        "mpt": ("Mpt", _MPT | {"layer_norm_epsilon": 1e-2}),
        "mpt-clipped-scaled-six-heads": (
            "Mpt",
            _MPT
            | {"d_model": 36, "n_heads": 6, "tie_word_embeddings": False}
            | {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}},
        ),
    }
)
