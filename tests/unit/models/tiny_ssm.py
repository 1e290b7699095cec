"""Tiny models with layers of Mamba-2: transformers' class and the values of its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# By the ends of names: transformers begins with states that fade within a token or two, and with skips of 1, which hide
# mistakes.
DRAWN: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        f"{mixer}.{name}": between
        for mixer in ("mamba", "mixer")
        for name, between in (
            ("A_log", (-4.0, -1.0)),
            ("D", (0.5, 1.5)),
            ("dt_bias", (-2.0, 1.0)),
            ("conv1d.weight", (-1.0, 1.0)),
        )
    }
    | {"e_score_correction_bias": (0.0, 0.3)}
)
REDRAWN = ("_layernorm.weight", "norm_f.weight")

_SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
_GRANITE = (
    _SHARED
    | _MAMBA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 24,
        "intermediate_size": 20,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.5,
    }
)
_BAMBA = _SHARED | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}
_FALCON = (
    _SHARED
    | _MAMBA
    | {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "mamba_d_ssm": 48,
        "mamba_norm_before_gate": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.7, 1.5, 0.8, 1.2, 0.6],
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [1.4, 0.3],
    }
)
_NEMOTRON = _SHARED | {
    "head_dim": 12,
    "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "full_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 4,
    "time_step_min": 0.3,
}

_NEMOTRON_MOE = _NEMOTRON | {
    "layer_types": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "granite-hybrid": ("GraniteMoeHybrid", _GRANITE),
        "granite-hybrid-dense-groups-rope": (
            "GraniteMoeHybrid",
            _GRANITE
            | {"num_local_experts": 0, "mamba_n_groups": 2, "position_embedding_type": "rope", "mamba_d_conv": 3}
            | {"tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
        ),
        "granite-without-states": (
            "GraniteMoeHybrid",
            _GRANITE | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_local_experts": 0},
        ),
        "bamba": ("Bamba", _BAMBA | {"time_step_limit": (0.4, 0.9)}),
        "bamba-groups-biases": (
            "Bamba",
            _BAMBA
            | {"mamba_n_groups": 4, "mamba_expand": 3, "mamba_d_head": 12, "attn_layer_indices": [0, 2]}
            | {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
        ),
        "falcon-h1": ("FalconH1", _FALCON),
        "falcon-h1-norm-groups-biases": (
            "FalconH1",
            _FALCON
            | {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_d_ssm": None, "mamba_conv_bias": False}
            | {"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True}
            | {"time_step_limit": (0.4, 0.9), "tie_word_embeddings": True},
        ),
        "nemotron-h": ("NemotronH", _NEMOTRON),
        "nemotron-h-biases": (
            "NemotronH",
            _NEMOTRON | {"n_groups": 1, "mlp_bias": True, "use_bias": True, "use_conv_bias": False, "conv_kernel": 2},
        ),
        "nemotron-h-experts": ("NemotronH", _NEMOTRON_MOE),
        "nemotron-h-latent-experts": (
            "NemotronH",
            _NEMOTRON_MOE | {"moe_latent_size": 16, "mlp_bias": True, "n_group": 1, "topk_group": 1},
        ),
    }
)

# By groups of heads that share inputs: one, two, four, four, one, two.
SPLIT = (
    "granite-hybrid",
    "granite-hybrid-dense-groups-rope",
    "bamba-groups-biases",
    "nemotron-h-latent-experts",
    "falcon-h1",
    "falcon-h1-norm-groups-biases",
)
