"""Llama and the families that differ from it by the switches of `GQAConfig` and `LlamaSwitches`.

Shapes: T token, D hidden channel, H query head, C head channel, R row whose logits are computed, V vocabulary.
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
from models.families.llama_switches import LlamaSwitches
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
        self.turns = not gqa.rotary_layers or gqa.rotary_layers[layer_index]
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
        rotation_here = rotation if self.turns else None
        out_THC = self.attend.rotate_and_attend(self.qkv_proj(x_TD), rotation_here, kv_cache, metadata, norms=norms)
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
        self.residual_multiplier = switches_of(config).residual_multiplier


def switches_of(config: ModelConfig) -> LlamaSwitches:
    """Llama's own where the family's reader sets none."""
    return config.switches if isinstance(config.switches, LlamaSwitches) else LlamaSwitches()


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
        self.switches = switches_of(config)
        if self.switches.fused_tensors:
            for path, module in self.named_modules():
                if isinstance(module, FusedLinear):
                    module.keep_in_one(path.rpartition(".")[2])

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        assert self.rotary is not None
        assert isinstance(self.model.norm, RMSNorm)
        rotation = self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        if self.switches.embedding_multiplier != 1.0:
            stream_TD *= self.switches.embedding_multiplier
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, metadata)
        return self.model.norm.add_and_norm(stream_TD, update_TD)

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV, multiplier = super().compute_logits(hidden_RD), self.switches.logits_multiplier
        return logits_RV if multiplier == 1.0 else logits_RV.mul_(multiplier)
