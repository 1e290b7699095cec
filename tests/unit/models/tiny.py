"""Random tiny checkpoints of every family, made and saved by transformers: the reference that our models must equal."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

VOCAB_SIZE = 61
MAX_POSITIONS = 512

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
}
_DENSE = _SHARED | {"num_hidden_layers": 2, "num_key_value_heads": 2}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 7}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_DEEPSEEK = _SHARED | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-5,
}
_DEEPSEEK_YARN = {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2}}

TINY: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("Llama", _DENSE),
        "llama-llama3-tied": ("Llama", _DENSE | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
        "llama-linear-biases-wide-heads": (
            "Llama",
            _DENSE
            | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}
            | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        ),
        "llama-yarn": ("Llama", _DENSE | {"rope_parameters": _YARN}),
        "mistral-window": ("Mistral", _DENSE | {"sliding_window": 6}),
        "mistral-full": ("Mistral", _DENSE | {"sliding_window": None}),
        "qwen2": ("Qwen2", _DENSE),
        "qwen2-window-behind-first-layer": ("Qwen2", _DENSE | _WINDOWED | {"max_window_layers": 1}),
        "qwen3": ("Qwen3", _DENSE | {"head_dim": 16}),
        "qwen3-window-by-layer-types": (
            "Qwen3",
            _DENSE | _WINDOWED | {"layer_types": ["sliding_attention", "full_attention"], "attention_bias": True},
        ),
        "deepseek-v2": ("DeepseekV2", _DEEPSEEK),
        "deepseek-v2-q-lora-groups-yarn": (
            "DeepseekV2",
            _DEEPSEEK
            | _DEEPSEEK_YARN
            | {"q_lora_rank": 16, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
            | {"routed_scaling_factor": 1.7},
        ),
        "deepseek-v3": ("DeepseekV3", _DEEPSEEK | {"q_lora_rank": 16, "n_group": 4, "topk_group": 2}),
        "deepseek-v3-yarn": (
            "DeepseekV3",
            _DEEPSEEK | _DEEPSEEK_YARN | {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        ),
        "deepseek-v3-rotary-halves": (
            "DeepseekV3",
            _DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_interleave": False},
        ),
    }
)


def save_tiny(name: str, directory: Path, **save_options: Any) -> Any:
    """Saves the model to `directory` and returns transformers' own."""
    family, fields = TINY[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, tensor in model.state_dict().items():
            if path.endswith(("norm.weight", "bias")):  # transformers begins with ones and zeros, which hide mistakes
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(directory, **save_options)
    return model
