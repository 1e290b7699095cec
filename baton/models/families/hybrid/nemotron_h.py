"""Nemotron-H, whose layers are single parts: Mamba-2, attention, an MLP, or in newer models a mixture of experts.

No part knows positions, and no MLP or expert has a gate.
Shapes: T token, D hidden channel, C channel of routed experts' inputs and outputs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig
from baton.models.families.hybrid.mamba_config import MambaSwitches
from baton.models.families.hybrid.mamba_parts import HybridAttention, Mamba2Mixer
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Linear
from baton.models.layers.moe.router import Router
from baton.models.layers.moe.ungated_experts import SquaredReluExperts, SquaredReluMLP
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class LatentMoE(nn.Module):
    """Routed experts, in some models on a projection of fewer channels, plus shared ones."""

    def __init__(self, size: int, moe: MoEConfig, *, latent_size: int, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.gate = Router(size, moe)
        sizes = moe.num_experts, latent_size or size, moe.intermediate_size
        self.experts = SquaredReluExperts(*sizes, dtype=dtype, held=moe.held)
        self.shared_experts = SquaredReluMLP(size, moe.shared_intermediate_size, dtype=dtype, bias=bias)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if latent_size:
            self.fc1_latent_proj = Linear(size, latent_size, dtype=dtype, bias=bias)
            self.fc2_latent_proj = Linear(latent_size, size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TC = x_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_TD)
        routed_TC: Tensor = self.experts(x_TC, *self.gate(x_TD))
        routed_TD = routed_TC if self.fc2_latent_proj is None else self.fc2_latent_proj(routed_TC)
        return routed_TD.add_(self.shared_experts(x_TD))


class NemotronHLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        switches, recurrent = config.switches, config.recurrent
        assert isinstance(switches, MambaSwitches)
        assert recurrent is not None
        size, eps, place = config.hidden_size, config.norm_eps, config.cache_layer(layer_index)
        self.norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mixer: nn.Module
        if recurrent.layers[layer_index]:
            self.mixer = Mamba2Mixer(size, switches, recurrent, layer_index=place, norm_eps=eps, dtype=dtype)
        elif recurrent.kv_layers[layer_index]:
            self.mixer = HybridAttention(size, gqa, layer_index=place, norm_eps=eps, backend=backend, dtype=dtype)
        elif config.moe is not None and config.moe.layers[layer_index]:
            latent, bias = switches.latent_size, config.mlp_bias
            self.mixer = LatentMoE(size, config.moe, latent_size=latent, dtype=dtype, bias=bias)
        else:
            self.mixer = SquaredReluMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: StateRows,
    ) -> Tensor:
        """Adds the previous layer's update to the stream; returns this layer's."""
        normed_TD = self.norm.add_and_norm(stream_TD, update_TD)
        match self.mixer:
            case Mamba2Mixer() as mamba:
                part_TD = mamba(normed_TD, kv_cache, rows)
            case HybridAttention() as attention:
                part_TD = attention(normed_TD, None, kv_cache, metadata)
            case mlp:
                part_TD = mlp(normed_TD)
        return self.parallel.all_reduce(part_TD)


class NemotronHForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f.", "model.": "backbone."}
    )

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            NemotronHLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        del positions_T  # no layer uses positions
        assert context.states is not None
        assert isinstance(self.model.norm, RMSNorm)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, kv_cache, context.metadata, context.states)
        return self.model.norm.add_and_norm(stream_TD, update_TD)
