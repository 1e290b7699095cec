"""Nemotron-H: each layer is one part: Mamba-2, attention, an MLP, or in newer models a mixture of experts.

No part knows positions, and no MLP or expert has a gate.
Shapes: T token, D hidden channel, E expert, I intermediate channel, L channel of routed experts, K chosen expert.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from kvcache.cache import PagedKVCache
from models.causal_lm import CausalLM
from models.config.model_config import GQAConfig, ModelConfig
from models.families.mamba_config import MambaSwitches
from models.families.mamba_parts import HybridAttention, Mamba2Mixer
from models.layers import RMSNorm
from models.linear import Linear
from models.parallel import ParallelModule
from models.recurrent.rows import StateRows


class SquaredReluMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, *, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(size, intermediate_size, dtype=dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(relu(self.up_proj(x_TD)).square())
        return out_TD


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
        """Adds the update of the layer before to the stream; returns its own."""
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

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        del positions_T  # no layer knows them
        assert self.state_rows is not None
        assert isinstance(self.model.norm, RMSNorm)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, kv_cache, metadata, self.state_rows)
        return self.model.norm.add_and_norm(stream_TD, update_TD)
