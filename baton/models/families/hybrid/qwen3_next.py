"""Qwen3-Next and the language models of Qwen3.5: gated delta nets, with gated attention in every fourth layer.

Shapes: T token, D hidden channel, H key head, R value head of a key head, G = H * R, V value channel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.mtp import mtp_config
from baton.models.families.dense.gemma import GemmaRMSNorm
from baton.models.families.dense.llama import LlamaAttention
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.families.hybrid.delta_parts import DeltaMixer, by_head
from baton.models.kernels.recurrent.delta_gates import MOST_PROJECTED, project
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.moe import MoE
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.recurrent.delta_gates import correction_rates, log_decays
from baton.models.layers.recurrent.gated_norm import GatedRMSNorm
from baton.models.layers.recurrent.short_conv import DepthwiseWeights
from baton.models.layers.step_context import StepContext


class GatedDeltaNet(DeltaMixer):
    """A gated delta net. It projects queries, keys and values, the gate z of the output, and two numbers per value
    head: the size of a correction, and how much of the state is kept."""

    def __init__(
        self,
        hidden_size: int,
        switches: DeltaSwitches,
        *,
        num_heads: int,
        layer_index: int,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(switches, num_heads=num_heads, layer_index=layer_index)
        qkv_size = 2 * self.key_size + self.value_size
        qkvz_parts = (("in_proj_qkv", qkv_size), ("in_proj_z", self.value_size))
        ba_parts = (("in_proj_b", self.num_value_heads), ("in_proj_a", self.num_value_heads))
        self.qkvz_proj = FusedLinear(hidden_size, qkvz_parts, dtype=dtype)
        self.ba_proj = FusedLinear(hidden_size, ba_parts, dtype=dtype)
        if switches.by_key_head:
            self.qkvz_proj.keep_in_one("in_proj_qkvz")
            self.ba_proj.keep_in_one("in_proj_ba")
        self.conv1d = DepthwiseWeights(qkv_size, switches.conv_width, dtype=dtype)
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_value_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(switches.value_dim, eps=norm_eps, dtype=dtype)
        self.out_proj = Linear(self.value_size, hidden_size, dtype=dtype)

    def conv_weights(self) -> Sequence[Tensor]:
        return torch.split(self.conv1d.weight, [self.key_size, self.key_size, self.value_size])

    def forward(self, x_TD: Tensor, kv_cache: PagedKVCache, rows: StateRows) -> Tensor:
        qkv_THX, z_BGV = self._projected(x_TD)
        log_decay_THR, rates_THR = self._gates(x_TD)
        out_THRV = self.mix(qkv_THX, log_decay_THR, rates_THR, kv_cache, rows)
        normed_BGV = self.norm(out_THRV.view(z_BGV.shape), z_BGV)
        out_TD: Tensor = self.out_proj(normed_BGV.view(len(x_TD), -1))
        return out_TD

    def _projected(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries, keys and values of each head; z as [T, G, V] or [T * H, R, V]."""
        switches, heads = self.switches, self.num_heads
        qkvz_TX = self.qkvz_proj(x_TD)
        if switches.by_key_head:
            z_size = switches.values_per_key * switches.value_dim
            qkv_THX, z_THX = qkvz_TX.unflatten(-1, (heads, -1)).split([switches.conv_channels, z_size], dim=-1)
            z_BRV = z_THX.flatten(0, 1).unflatten(-1, (-1, switches.value_dim))
            return qkv_THX, z_BRV
        *qkv, z_TX = qkvz_TX.split([self.key_size, self.key_size, self.value_size, self.value_size], dim=-1)
        return by_head(qkv, num_heads=heads), z_TX.unflatten(-1, (-1, switches.value_dim))

    def _gates(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log decays and correction rates of each value head."""
        rates_HR, bias_HR = (each.view(self.num_heads, -1) for each in (self.A_log, self.dt_bias))
        layer = self.ba_proj
        is_plain = type(layer) is FusedLinear and layer.multiply is linear and not layer.has_adapters
        if x_TD.is_cuda and is_plain and len(x_TD) <= MOST_PROJECTED:
            return project(x_TD, layer.weight, rates_HR, bias_HR, by_head=self.switches.by_key_head)
        ba_TX = layer(x_TD)
        if self.switches.by_key_head:
            b_THR, a_THR = ba_TX.unflatten(-1, (self.num_heads, 2, -1)).unbind(2)
        else:
            b_THR, a_THR = ba_TX.unflatten(-1, (2, self.num_heads, -1)).unbind(1)
        return log_decays(a_THR, rates_HR, bias_HR), correction_rates(b_THR)


class Qwen3NextLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        switches, recurrent = config.switches, config.recurrent
        assert isinstance(switches, DeltaSwitches)
        size, eps = config.hidden_size, config.norm_eps
        place = config.cache_layer(layer_index)
        self.linear_attn: GatedDeltaNet | None = None
        self.self_attn: LlamaAttention | None = None
        if recurrent is not None and recurrent.layers[layer_index]:
            self.linear_attn = GatedDeltaNet(
                size, switches, num_heads=recurrent.num_heads, layer_index=place, norm_eps=eps, dtype=dtype
            )
        else:
            self.self_attn = LlamaAttention(
                size, gqa, layer_index=place, norm_eps=eps, backend=backend, dtype=dtype, norm=GemmaRMSNorm
            )
        self.input_layernorm = GemmaRMSNorm(size, eps=eps, dtype=dtype)
        self.post_attention_layernorm = GemmaRMSNorm(size, eps=eps, dtype=dtype)
        if config.moe is not None and config.moe.layers[layer_index]:
            self.mlp: nn.Module = MoE(size, config.moe, dtype=dtype)
        else:
            self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: StateRows | None = None,
    ) -> Tensor:
        """Does what `DecoderLayer.forward` does.

        Args:
            rows: for layers with states.
        """
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        if self.linear_attn is not None:
            assert rows is not None
            mixed_TD = self.linear_attn(normed_TD, kv_cache, rows)
        else:
            assert self.self_attn is not None
            mixed_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self.parallel.all_reduce(mixed_TD))
        return self.parallel.all_reduce(self.mlp(normed_TD))


class Qwen3NextForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            Qwen3NextLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        norm = GemmaRMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        mtp_layer = None
        if config.drafts:
            own = mtp_config(config)
            assert isinstance(own.attention, GQAConfig)
            mtp_layer = Qwen3NextLayer(own, own.attention, layer_index=0, backend=backend, dtype=dtype)
        super().__init__(config, layers, dtype=dtype, norm=norm, mtp_layer=mtp_layer)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        assert context.states is not None
        assert isinstance(self.model.norm, GemmaRMSNorm)
        rotation = self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, context.metadata, context.states)
        return self.model.norm.add_and_norm(stream_TD, update_TD)
