"""Which class computes which architecture, and what a model asks of cache and attention.

The one place to add a family, together with its reader in `models.config`.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from attention.backend import AttentionFeature, AttentionNeeds
from attention.spec import KVCacheShape, KVCacheSpec, KVKind
from models.config import GQAConfig, ModelConfig
from models.deepseek import DeepseekForCausalLM
from models.llama import LlamaForCausalLM

FAMILIES: Mapping[str, type[LlamaForCausalLM] | type[DeepseekForCausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": LlamaForCausalLM,
        "Qwen2ForCausalLM": LlamaForCausalLM,
        "Qwen3ForCausalLM": LlamaForCausalLM,
        "DeepseekV2ForCausalLM": DeepseekForCausalLM,
        "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    }
)


def kv_cache_spec(config: ModelConfig, dtype: str) -> KVCacheSpec:
    """What one token's KV is when the model runs in `dtype`."""
    attention = config.attention
    if isinstance(attention, GQAConfig):
        return KVCacheSpec(KVKind.GQA, config.num_layers, attention.num_kv_heads, attention.head_dim, dtype)
    latent_dim = attention.kv_lora_rank + attention.qk_rope_head_dim
    return KVCacheSpec(KVKind.MLA, config.num_layers, 1, latent_dim, dtype)


def attention_needs(
    config: ModelConfig, *, dtype: str, device: torch.device | str, shape: KVCacheShape
) -> AttentionNeeds:
    """What a backend must be able to do to serve the model over a cache of that shape."""
    spec = kv_cache_spec(config, dtype)
    attention = config.attention
    windows = attention.sliding_windows if isinstance(attention, GQAConfig) else ()
    return AttentionNeeds(
        kind=spec.kind,
        device=torch.device(device).type,
        dtype=dtype,
        head_size=spec.head_dim,
        block_size=shape.block_size,
        layout=shape.layout,
        features=frozenset({AttentionFeature.SLIDING_WINDOW} if any(windows) else ()),
    )
