"""BLOOM: positions by ALiBi only; layer norms, one of them after the embedding.

Falcon uses the attention's projection and the MLP too, Phi-3-small the projection. Shapes: T token, D hidden channel, H
query head, K kv head, G query heads of a kv head, X = G + 2, C head channel.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.bloom_config import BloomSwitches
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.elementwise import gelu
from baton.models.layers.linear import Linear
from baton.models.layers.norms import LayerNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class GroupedQKV(Linear):
    """Computes queries, keys and values in one product, in checkpoints' order: for each kv head its queries, key,
    value."""

    def __init__(self, size: int, gqa: GQAConfig, *, dtype: torch.dtype) -> None:
        super().__init__(size, (gqa.num_heads + 2 * gqa.num_kv_heads) * gqa.head_dim, dtype=dtype, bias=gqa.qkv_bias)
        self.num_kv_heads, self.head_dim = gqa.num_kv_heads, gqa.head_dim

    def split(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [T,H,C], k and v [T,K,C]."""
        qkv_TKXC = self(x_TD).unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        return qkv_TKXC[:, :, :-2].flatten(1, 2), qkv_TKXC[:, :, -2], qkv_TKXC[:, :, -1]


class BloomAttention(nn.Module):
    def __init__(
        self, hidden_size: int, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.query_key_value = GroupedQKV(hidden_size, gqa, dtype=dtype)
        self.dense = Linear(gqa.num_heads * gqa.head_dim, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=gqa.num_kv_heads,
            head_dim=gqa.head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
            alibi_slopes=gqa.alibi_slopes,
        )

    def forward(self, x_TD: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        out_THC = self.attend(*self.query_key_value.split(x_TD), kv_cache, metadata)
        out_TD: Tensor = self.dense(out_THC.flatten(1))
        return out_TD


class GeluMLP(nn.Module):
    """An MLP of two layers with gelu in between.

    Args:
        approximate: argument of torch's gelu.
    """

    def __init__(self, size: int, intermediate_size: int, *, dtype: torch.dtype, bias: bool, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.dense_h_to_4h = Linear(size, intermediate_size, dtype=dtype, bias=bias)
        self.dense_4h_to_h = Linear(intermediate_size, size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.dense_4h_to_h(gelu(self.dense_h_to_4h(x_TD), approximate=self.approximate))
        return out_TD


class BloomLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert isinstance(config.switches, BloomSwitches)
        size, eps = config.hidden_size, config.norm_eps
        self.residual_after_norm = config.switches.residual_after_norm
        self.input_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.self_attention = BloomAttention(size, gqa, layer_index=layer_index, backend=backend, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = GeluMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias, approximate="tanh")

    def forward(self, x_TD: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        normed_TD = self.input_layernorm(x_TD)
        residual_TD = normed_TD if self.residual_after_norm else x_TD
        x_TD = residual_TD + self.parallel.all_reduce(self.self_attention(normed_TD, kv_cache, metadata))
        normed_TD = self.post_attention_layernorm(x_TD)
        residual_TD = normed_TD if self.residual_after_norm else x_TD
        return residual_TD + self.parallel.all_reduce(self.mlp(normed_TD))


class BloomForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.embed_tokens.": "transformer.word_embeddings.",
            "embedding_norm.": "transformer.word_embeddings_layernorm.",
            "model.layers.": "transformer.h.",
            "model.norm.": "transformer.ln_f.",
        }
    )

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            BloomLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        size, eps = config.hidden_size, config.norm_eps
        super().__init__(config, layers, dtype=dtype, norm=LayerNorm(size, eps=eps, dtype=dtype))
        self.embedding_norm = LayerNorm(size, eps=eps, dtype=dtype)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        del positions_T  # ALiBi computes distances in the attention
        hidden_TD: Tensor = self.embedding_norm(self.model.embed_tokens(token_ids_T))
        for layer in self.model.layers:
            hidden_TD = layer(hidden_TD, kv_cache, context.metadata)
        out_TD: Tensor = self.model.norm(hidden_TD)
        return out_TD
