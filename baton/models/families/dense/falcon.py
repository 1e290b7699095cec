"""Falcon of all three generations: with ALiBi or rotary embedding, attention and MLP in sequence or in parallel.

The projection and the MLP are BLOOM's. Shapes: T token, D hidden channel, H query head, K kv head, C head channel.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.bloom import GeluMLP, GroupedQKV
from baton.models.families.dense.falcon_config import FalconSwitches
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Linear
from baton.models.layers.norms import LayerNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class FalconAttention(nn.Module):
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
            alibi_slopes=_scaled_slopes(gqa) if gqa.alibi_slopes else None,
        )

    def forward(
        self, x_TD: Tensor, rotation: Rotation | None, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        q_THC, k_TKC, v_TKC = self.query_key_value.split(x_TD)
        if rotation is not None:
            q_THC, k_TKC = rotation.apply(q_THC), rotation.apply(k_TKC)
        out_THC = self.attend(q_THC, k_TKC, v_TKC, kv_cache, metadata)
        out_TD: Tensor = self.dense(out_THC.flatten(1))
        return out_TD


def _scaled_slopes(gqa: GQAConfig) -> Tensor:
    """Returns the slopes [H] in float32. The reference adds distances before it scales the scores, and rounds the
    slopes to bfloat16.

    NOTE: it also rounds slope times position to bfloat16, which is not a function of the distance. Where that product
    needs more than 8 bits, its scores differ from ours by up to one part in 512 of the product.
    """
    return torch.tensor(gqa.alibi_slopes, dtype=torch.bfloat16).float() * gqa.scale


class FalconLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        switches = config.switches
        assert isinstance(switches, FalconSwitches)
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = self.post_attention_layernorm = self.ln_attn = self.ln_mlp = None
        if switches.num_norms == 2:
            self.ln_attn = LayerNorm(size, eps=eps, dtype=dtype)
            self.ln_mlp = LayerNorm(size, eps=eps, dtype=dtype)
        else:
            self.input_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        if not switches.parallel:
            self.post_attention_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.self_attention = FalconAttention(size, gqa, layer_index=layer_index, backend=backend, dtype=dtype)
        self.mlp = GeluMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias, approximate="none")

    def forward(
        self, x_TD: Tensor, rotation: Rotation | None, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        norm = self.input_layernorm or self.ln_attn
        assert norm is not None
        normed_TD = norm(x_TD)
        attended_TD = self.self_attention(normed_TD, rotation, kv_cache, metadata)
        if self.post_attention_layernorm is not None:
            x_TD = x_TD + self.parallel.all_reduce(attended_TD)
            return x_TD + self.parallel.all_reduce(self.mlp(self.post_attention_layernorm(x_TD)))
        if self.ln_mlp is not None:
            normed_TD = self.ln_mlp(x_TD)
        return x_TD + self.parallel.all_reduce(attended_TD + self.mlp(normed_TD))  # one sum over ranks for both


class FalconForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.embed_tokens.": "transformer.word_embeddings.",
            "model.layers.": "transformer.h.",
            "model.norm.": "transformer.ln_f.",
        }
    )

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            FalconLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        norm = LayerNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        super().__init__(config, layers, dtype=dtype, norm=norm)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        rotation = None if self.rotary is None else self.rotary(positions_T)
        hidden_TD: Tensor = self.model.embed_tokens(token_ids_T)
        for layer in self.model.layers:
            hidden_TD = layer(hidden_TD, rotation, kv_cache, context.metadata)
        out_TD: Tensor = self.model.norm(hidden_TD)
        return out_TD
