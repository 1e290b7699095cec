"""Llama and the families that differ from it by switches of their configs: Mistral, Qwen2, Qwen3.

Shapes: T token, D hidden channel, H query head, C head channel.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import HeadNorms, Rotation
from kvcache.cache import PagedKVCache
from models.causal_lm import CausalLM, DecoderLayer
from models.config.model_config import GQAConfig, ModelConfig
from models.layers import GatedMLP, RMSNorm
from models.linear import FusedLinear, Linear
from models.moe import MoE


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary embedding; also that of Gemma and gpt-oss.

    Args:
        norm: class of the norms of queries and keys, in models that have them.
    """

    def __init__(
        self,
        hidden_size: int,
        gqa: GQAConfig,
        *,
        layer_index: int,
        norm_eps: float,
        backend: AttentionBackend,
        dtype: torch.dtype,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = gqa.num_heads, gqa.num_kv_heads, gqa.head_dim
        q_size, kv_size = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv_proj = FusedLinear(hidden_size, parts, dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(q_size, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.q_norm = norm(gqa.head_dim, eps=norm_eps, dtype=dtype) if gqa.qk_norm else None
        self.k_norm = norm(gqa.head_dim, eps=norm_eps, dtype=dtype) if gqa.qk_norm else None
        # float32 for every model dtype, because the softmax is in float32.
        self.sinks = nn.Parameter(torch.empty(gqa.num_heads, dtype=torch.float32)) if gqa.sinks else None
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=gqa.num_kv_heads,
            head_dim=gqa.head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
            sliding_window=gqa.sliding_windows[layer_index],
            logits_soft_cap=gqa.logits_soft_cap,
            sinks=self.sinks,
        )

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        norms = None if self.q_norm is None or self.k_norm is None else HeadNorms(self.q_norm, self.k_norm)
        out_THC = self.attend.rotate_and_attend(self.qkv_proj(x_TD), rotation, kv_cache, metadata, norms=norms)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD


class LlamaLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = LlamaAttention(size, gqa, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = make_mlp(config, layer_index, dtype=dtype)


def make_mlp(config: ModelConfig, layer_index: int, *, dtype: torch.dtype) -> nn.Module:
    """The layer's mixture of experts, or its gated MLP."""
    if config.moe is not None and config.moe.layers[layer_index]:
        return MoE(config.hidden_size, config.moe, dtype=dtype)
    return GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            LlamaLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
