"""Tiny models that attend to selected tokens: transformers' class and the values of its config.

`index_topk` is below the tests' sequences, so that selection matters. 16 heads of the indexer leave no token whose
score is 0 because every head's product is negative: of equal scores transformers takes any.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SPARSE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-5,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "beta_fast": 16,
    "beta_slow": 2,
    "rope_theta": 500.0,
}
_GLM = _SPARSE | {"n_group": 1, "topk_group": 1, "v_head_dim": 16}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "deepseek-v32": ("DeepseekV32", _SPARSE),
        "deepseek-v32-yarn-dense-between": (
            "DeepseekV32",
            _SPARSE
            | {"rope_parameters": _YARN, "index_topk": 9, "norm_topk_prob": False}
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_routed_experts": 12, "num_experts_per_tok": 5},
        ),
        "deepseek-v32-selects-all": ("DeepseekV32", _SPARSE | {"index_topk": 64}),
        "glm-moe-dsa-shared-selection": (
            "GlmMoeDsa",
            _GLM
            | {"num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]}
            | {"first_k_dense_replace": 3},
        ),
    }
)
# In the tests of tensor parallelism.
SPLIT = ("deepseek-v32", "glm-moe-dsa-shared-selection")
