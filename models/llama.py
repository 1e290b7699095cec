"""Llama and the families that differ from it by a switch: Mistral, Qwen2, Qwen3.

Reads top to bottom: attention, layer, model. Shapes: T token, D hidden channel, H query head,
K kv head, X heads of several kinds side by side, C head channel.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.cache import PagedKVCache
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from models.causal_lm import CausalLM
from models.config import GQAConfig, ModelConfig
from models.layers import GatedMLP, RMSNorm
from models.linear import FusedLinear, Linear
from models.rotary import Rotation


class LlamaAttention(nn.Module):
    """As Gemma and gpt-oss have it too.

    Args:
        norm: of queries and keys, where the model has them.
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
        norm: type[nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = gqa.num_heads, gqa.num_kv_heads, gqa.head_dim
        q_size, kv_size = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv_proj = FusedLinear(hidden_size, parts, dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(q_size, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.q_norm = norm(gqa.head_dim, eps=norm_eps, dtype=dtype) if gqa.qk_norm else None
        self.k_norm = norm(gqa.head_dim, eps=norm_eps, dtype=dtype) if gqa.qk_norm else None
        # float32 whatever the model's dtype, because the softmax is.
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
        qkv_TXC = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        qk_TXC, v_TKC = torch.split(qkv_TXC, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THC, k_TKC = self._split_qk(qk_TXC)
            qk_TXC = torch.cat((self.q_norm(q_THC), self.k_norm(k_TKC)), dim=1)
        # Queries and keys turn by the same angles: one rotation serves both.
        q_THC, k_TKC = self._split_qk(rotation.apply(qk_TXC))
        out_THC = self.attend(q_THC, k_TKC, v_TKC, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD

    def _split_qk(self, qk_TXC: Tensor) -> tuple[Tensor, Tensor]:
        q_THC, k_TKC = torch.split(qk_TXC, [self.num_heads, self.num_kv_heads], dim=1)
        return q_THC, k_TKC


class LlamaLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = LlamaAttention(size, gqa, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotation, kv_cache, metadata)
        out_TD: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out_TD


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            LlamaLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
