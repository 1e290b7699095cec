"""Random tiny checkpoints of every family, made and saved by transformers: the reference that our models must equal."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from packaging.version import Version

from tests.unit.models import (
    tiny_delta,
    tiny_dense,
    tiny_gemma,
    tiny_gpt,
    tiny_hybrid,
    tiny_latent,
    tiny_moe,
    tiny_rope,
    tiny_sparse,
    tiny_ssm,
)

VOCAB_SIZE = 61
MAX_POSITIONS = 512

_CONFIG_SUFFIX = {
    "Gemma3": "TextConfig",
    "Llama4": "TextConfig",
    **tiny_gemma.CONFIG_SUFFIX,
    **tiny_delta.CONFIG_SUFFIX,
}
_REDRAWN = (
    *("norm.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight", "bias", "sinks", *tiny_gpt.NORMS),
    *(f"norms.{head}.weight" for head in range(4)),
)

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
_GEMMA = _DENSE | {"num_hidden_layers": 4, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 7}
_GEMMA2 = _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_LLAMA4 = _DENSE | {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "intermediate_size_mlp": 40,
    "num_local_experts": 5,
    "attention_chunk_size": 6,
    "no_rope_layers": [1, 1, 0, 1],
    "interleave_moe_layer_step": 2,
    "floor_scale": 4,
    "attn_scale": 0.7,
}
_GPT_OSS = _DENSE | {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "sliding_window": 7,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.8,
    "initializer_range": 0.4,
}
_FALCON = {name: value for name, value in _SHARED.items() if name != "intermediate_size"} | {"num_hidden_layers": 3}
_FALCON_RW = _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_BLOOM = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}

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
        "qwen2-window-after-first-layer": ("Qwen2", _DENSE | _WINDOWED | {"max_window_layers": 1}),
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
        "gemma2": ("Gemma2", _GEMMA2),
        "gemma2-untied-biases-no-caps": (
            "Gemma2",
            _GEMMA
            | {"tie_word_embeddings": False, "attention_bias": True}
            | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        ),
        "gemma3": ("Gemma3", _GEMMA | {"sliding_window_pattern": 3, "rope_parameters": _GEMMA3_ROPES}),
        "gemma3-untied-layer-types-cap": (
            "Gemma3",
            _GEMMA
            | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
            | {"tie_word_embeddings": False, "final_logit_softcapping": 3.0},
        ),
        "llama4": ("Llama4", _LLAMA4),
        "llama4-all-experts-two-of-them-biases": (
            "Llama4",
            _LLAMA4
            | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 2, "attention_bias": True}
            | {"use_qk_norm": False, "rope_parameters": _LLAMA3, "tie_word_embeddings": True},
        ),
        "llama4-dense-untuned": ("Llama4", _LLAMA4 | {"moe_layers": [], "attn_temperature_tuning": False}),
        "gpt-oss": ("GptOss", _GPT_OSS),
        "gpt-oss-tied-yarn-no-biases": (
            "GptOss",
            _GPT_OSS
            | {"rope_parameters": _YARN | {"truncate": False}, "tie_word_embeddings": True, "attention_bias": False},
        ),
        "falcon-rw": ("Falcon", _FALCON_RW),
        "falcon-rw-untied-six-heads": (
            "Falcon",
            _FALCON_RW | {"hidden_size": 36, "num_attention_heads": 6, "tie_word_embeddings": False},
        ),
        "falcon-multi-query-five-heads": ("Falcon", _FALCON | {"hidden_size": 40, "num_attention_heads": 5}),
        "falcon-multi-query-alibi": ("Falcon", _FALCON | {"alibi": True}),
        "falcon-multi-query-in-sequence": ("Falcon", _FALCON | {"parallel_attn": False}),
        "falcon-rotary": ("Falcon", _FALCON | {"multi_query": False, "ffn_hidden_size": 40}),
        "falcon-new": ("Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
        "falcon-new-one-norm-alibi": (
            "Falcon",
            _FALCON
            | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "alibi": True},
        ),
        "bloom": ("Bloom", _BLOOM),
        "bloom-untied-five-heads-residual-after-norm": (
            "Bloom",
            _BLOOM
            | {"hidden_size": 40, "n_head": 5, "tie_word_embeddings": False}
            | {"apply_residual_connection_post_layernorm": True},
        ),
        **tiny_moe.MODELS,
        **tiny_dense.MODELS,
        **tiny_gpt.MODELS,
        **tiny_hybrid.MODELS,
        **tiny_gemma.MODELS,
        **tiny_rope.MODELS,
        **tiny_delta.MODELS,
        **tiny_ssm.MODELS,
        **tiny_sparse.MODELS,
        **tiny_latent.MODELS,
    }
)


# Models whose logits transformers computes wrongly before a version, and how.
_WRONG_BEFORE = {
    **dict.fromkeys(("granite-hybrid-dense-groups-rope", "bamba-groups-biases"), "5.23"),  # one norm over all groups
    # Looks for tokens beyond the layers' own vocabulary in it.
    **dict.fromkeys(("gemma3n", "gemma3n-unequal-mlps-untied"), "5.21"),
}


def is_reference(name: str) -> bool:
    """Whether the logits of the installed transformers are this model's."""
    return name not in _WRONG_BEFORE or Version(transformers.__version__) >= Version(_WRONG_BEFORE[name])


def architecture_of(family: str) -> str:
    """transformers' class of the language model."""
    return "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"


def save_tiny(name: str, directory: Path, *, changed: Mapping[str, Any] | None = None, **save_options: Any) -> Any:
    """Saves the model to `directory` and returns transformers' own.

    Args:
        changed: fields of the config with other values.
    """
    family, fields = TINY[name]
    fields = {**fields, **(changed or {})}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}{_CONFIG_SUFFIX.get(family, 'Config')}")(**fields)
    # NOTE: transformers' eager attention adds Falcon's distances twice, in the mask and to the scores; its default not.
    config._attn_implementation = "sdpa" if family == "Falcon" else "eager"
    model = getattr(transformers, architecture_of(family))(config).eval()
    with torch.no_grad():
        for path, tensor in model.state_dict().items():
            if path.endswith(
                (*_REDRAWN, *tiny_gemma.REDRAWN, *tiny_latent.REDRAWN, *tiny_ssm.REDRAWN)
            ):  # transformers begins with ones and zeros, which hide mistakes
                tensor.uniform_(0.5, 1.5)
            for end, between in tiny_ssm.DRAWN.items():
                if path.endswith(end):
                    tensor.uniform_(*between)
            tiny_delta.draw(path, tensor)
    if "swiglu_limit" in fields:  # which some versions of transformers write into the config and do not read
        for layer in model.model.layers:
            layer.mlp.experts.limit = fields["swiglu_limit"]
    model.save_pretrained(directory, **save_options)
    return model
