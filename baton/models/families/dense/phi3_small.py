"""Phi-3-small: block-sparse and dense attention in alternating layers, its own gated MLP, and muP's multipliers.

The attention's projection is BLOOM's. Shapes: T token, D hidden channel, H query head, K kv head, C head channel, I MLP
channel, R row whose logits are computed, V vocabulary.
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
from baton.models.families.dense.bloom import GroupedQKV
from baton.models.families.dense.phi3_small_config import Phi3SmallSwitches
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.elementwise import sigmoid
from baton.models.layers.linear import Linear
from baton.models.layers.norms import LayerNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class Phi3SmallAttention(nn.Module):
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
            blocksparse=gqa.blocksparse[layer_index],
        )

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        q_THC, k_TKC, v_TKC = self.query_key_value.split(x_TD)
        out_THC = self.attend(rotation.apply(q_THC), rotation.apply(k_TKC), v_TKC, kv_cache, metadata)
        out_TD: Tensor = self.dense(out_THC.flatten(1))
        return out_TD


def gegelu(gate_up: Tensor, limit: float | None) -> Tensor:
    """Returns quick gelu of the last axis's even channels, times one plus the odd channels; both are clamped first."""
    gate_TI, up_TI = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    if limit is not None:
        gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(-limit, limit)
    out_TI: Tensor = gate_TI * sigmoid(1.702 * gate_TI) * (up_TI + 1)
    return out_TI


class Phi3SmallMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, *, limit: float | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.limit = limit
        self.up_proj = Linear(size, 2 * intermediate_size, dtype=dtype, bias=True)
        self.down_proj = Linear(intermediate_size, size, dtype=dtype, bias=True)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(gegelu(self.up_proj(x_TD), self.limit))
        return out_TD


class Phi3SmallLayer(ParallelModule):
    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        switches: Phi3SmallSwitches,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.self_attn = Phi3SmallAttention(size, gqa, layer_index=layer_index, backend=backend, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = Phi3SmallMLP(size, config.intermediate_size, limit=switches.gegelu_limit, dtype=dtype)

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), rotation, kv_cache, metadata)
        x_TD = x_TD + self.parallel.all_reduce(attended_TD)
        return x_TD + self.parallel.all_reduce(self.mlp(self.post_attention_layernorm(x_TD)))


class Phi3SmallForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({"model.norm.": "model.final_layernorm."})

    unused_tokens: Tensor

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, config.switches
        assert isinstance(gqa, GQAConfig)
        assert isinstance(switches, Phi3SmallSwitches)
        layers = [
            Phi3SmallLayer(config, gqa, switches, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        norm = LayerNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        super().__init__(config, layers, dtype=dtype, norm=norm)
        self.switches = switches
        self.register_buffer("unused_tokens", torch.tensor(switches.unused_tokens, dtype=torch.int64), persistent=False)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotation = self.rotary(positions_T)
        hidden_TD = self.model.embed_tokens(token_ids_T) * self.switches.embedding_multiplier
        for layer in self.model.layers:
            hidden_TD = layer(hidden_TD, rotation, kv_cache, context.metadata)
        out_TD: Tensor = self.model.norm(hidden_TD)
        return out_TD

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV = super().compute_logits(hidden_RD) / self.switches.logits_divisor
        return logits_RV.index_fill_(-1, self.unused_tokens, -torch.inf)
