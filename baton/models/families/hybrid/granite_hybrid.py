"""Granite 4 and Bamba: layers of Mamba-2 or attention, each with a mixture of experts or an MLP after it.

Shapes: T token, D hidden channel, R row whose logits are computed, V vocabulary.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.hybrid.mamba_config import MambaSwitches
from baton.models.families.hybrid.mamba_parts import HybridAttention, Mamba2Mixer
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.moe import MoE
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class SharedMLP(nn.Module):
    """The MLP of a model without experts, under the name of shared experts."""

    def __init__(self, size: int, intermediate_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared_experts = GatedMLP(size, intermediate_size, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.shared_experts(x_TD)
        return out_TD


class HybridLayer(ParallelModule):
    """One layer of a Granite hybrid: Mamba-2 or attention, then an MLP.

    Args:
        layer_index: index in the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        mlp: nn.Module,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        switches, recurrent = config.switches, config.recurrent
        assert isinstance(switches, MambaSwitches)
        self.residual_multiplier = switches.residual_multiplier
        size, eps, place = config.hidden_size, config.norm_eps, config.cache_layer(layer_index)
        self.mamba: Mamba2Mixer | None = None
        self.self_attn: HybridAttention | None = None
        if recurrent is not None and recurrent.layers[layer_index]:
            self.mamba = Mamba2Mixer(size, switches, recurrent, layer_index=place, norm_eps=eps, dtype=dtype)
        else:
            self.self_attn = HybridAttention(size, gqa, layer_index=place, norm_eps=eps, backend=backend, dtype=dtype)
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = mlp

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: StateRows | None,
    ) -> Tensor:
        """Does what `DecoderLayer.forward` does."""
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        if self.mamba is not None:
            assert rows is not None
            mixed_TD = self.mamba(normed_TD, kv_cache, rows)
        else:
            assert self.self_attn is not None
            mixed_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self._update(mixed_TD))
        return self._update(self.mlp(normed_TD))

    def _update(self, part_TD: Tensor) -> Tensor:
        """Returns the update of the stream, given this rank's part of it."""
        whole_TD = self.parallel.all_reduce(part_TD)
        return whole_TD if self.residual_multiplier == 1.0 else whole_TD * self.residual_multiplier


class GraniteHybridForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, config.switches
        assert isinstance(gqa, GQAConfig)
        assert isinstance(switches, MambaSwitches)
        layers = [
            self.make_layer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
        self.switches = switches

    @classmethod
    def make_layer(
        cls, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> ParallelModule:
        mlp = cls.make_mlp(config, dtype)
        return HybridLayer(config, gqa, mlp, layer_index=layer_index, backend=backend, dtype=dtype)

    @staticmethod
    def make_mlp(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
        size = config.hidden_size
        mlp = (
            SharedMLP(size, config.intermediate_size, dtype=dtype)
            if config.moe is None
            else MoE(size, config.moe, dtype=dtype)
        )
        assert mlp.shared_experts is not None
        mlp.shared_experts.gate_up_proj.keep_in_one("gate_up_proj")
        return mlp

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert isinstance(self.model.norm, RMSNorm)
        rotation = None if self.rotary is None else self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        if self.switches.embedding_multiplier != 1.0:
            stream_TD *= self.switches.embedding_multiplier
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, context.metadata, context.states)
        return self.model.norm.add_and_norm(stream_TD, update_TD)

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV, multiplier = super().compute_logits(hidden_RD), self.switches.logits_multiplier
        return logits_RV if multiplier == 1.0 else logits_RV.mul_(multiplier)


class BambaForCausalLM(GraniteHybridForCausalLM):
    """Granite's hybrid with an MLP in each layer, and other names."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.mlp.": "model.layers.*.feed_forward.",
            "model.layers.*.post_attention_layernorm.": "model.layers.*.pre_ff_layernorm.",
            "model.norm.": "model.final_layernorm.",
        }
    )

    @staticmethod
    def make_mlp(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)
