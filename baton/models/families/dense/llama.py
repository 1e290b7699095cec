"""Llama and the families that differ from it by the switches of `GQAConfig` and `LlamaSwitches`.

Shapes: T token, D hidden channel, H query head, C head channel, R row whose logits are computed, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.quantized_output import QuantizedOutput
from attention.rotation import HeadNorms, Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig, QKNorm
from baton.models.config.mtp import mtp_config
from baton.models.families.dense.llama_switches import LlamaSwitches, Norms, QueryGrowth
from baton.models.kernels.activation import multiply_by_sigmoid
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, allocate
from baton.models.layers.causal_lm import CausalLM, DecoderLayer
from baton.models.layers.decoder_layers import NormsAfter, NormsAround, ParallelHalves
from baton.models.layers.elementwise import sigmoid
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.moe import MoE
from baton.models.layers.moe.stacked_experts import StackedExperts
from baton.models.layers.moe.ungated_experts import SquaredReluMLP
from baton.models.layers.norms import CenteredNorm, RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.query_key_norms import OwnWeightsNorm, make_norms, norm_rows
from baton.models.layers.rotary import Rotary
from baton.models.layers.row_reader import RowReader
from baton.models.layers.step_context import StepContext
from baton.models.layers.xielu import XieluMLP


class LlamaAttention(ParallelModule, RowReader):
    """Grouped-query attention with rotary embedding, which Gemma and gpt-oss use too.

    Args:
        norm: class of the norms of queries and keys, for models that have them.
        input_size: channels of the input; None: those of the output.
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
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = gqa.num_heads, gqa.num_kv_heads, gqa.head_dim
        self.q_size, self.kv_size = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
        self.output_gate = gqa.output_gate
        q_and_gate = self.q_size * (2 if gqa.output_gate else 1)
        parts = (("q_proj", q_and_gate), ("k_proj", self.kv_size), ("v_proj", self.kv_size))
        self.qkv_proj = FusedLinear(input_size or hidden_size, parts, dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(self.q_size, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.qk_norm_of = gqa.qk_norm_of
        norms, turned = make_norms(gqa, norm, eps=norm_eps, dtype=dtype), gqa.qk_norm_of is QKNorm.TURNED_HEAD
        # Hunyuan norms heads after they turn, and has other names for the same weights.
        self.q_norm, self.k_norm = (None, None) if turned else norms
        self.query_layernorm, self.key_layernorm = norms if turned else (None, None)
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
        qkv_TX = self.qkv_proj(x_TD)
        if rotation.query_scale_T1 is not None:
            assert not self.output_gate, "no family has both"
            qkv_TX[:, : self.q_size].mul_(rotation.query_scale_T1)
        rows, out = (None, None) if self.output_gate else self._quantized_output(qkv_TX, metadata)
        out_THC = self._attended(qkv_TX, rotation if self.turns else None, kv_cache, metadata, out)
        if self.output_gate:
            q_and_gate_TX = qkv_TX[:, : 2 * self.q_size]
            out_THC = _gated(out_THC, q_and_gate_TX.unflatten(-1, (self.num_heads, 2, -1))[:, :, 1])
        out_TD: Tensor = self.o_proj(rows or out_THC.flatten(1))
        return out_TD

    def row_format(self, num_tokens: int) -> RowFormat | None:
        return self.qkv_proj.row_format(num_tokens)

    def _quantized_output(
        self, qkv_TX: Tensor, metadata: AttentionMetadata
    ) -> tuple[QuantizedRows, QuantizedOutput] | tuple[None, None]:
        """Returns memory for the attention's output, as the output projection reads it and as the attention writes it;
        None where the projection needs a tensor or the attention cannot quantize this batch."""
        num_tokens = len(qkv_TX)
        row_format = self.o_proj.row_format(num_tokens)
        if row_format is None or not row_format.blocked or num_tokens % row_format.multiple_of:
            return None, None
        if not self.attend.quantizes(metadata, num_tokens):
            return None, None
        rows = allocate(num_tokens, self.q_size, row_format, like=qkv_TX)
        stored_THC = rows.stored_PK.view(num_tokens, self.num_heads, self.head_dim)
        return rows, QuantizedOutput(stored_THC, rows.scale_PC.T, row_format.power_of_two, rows.dtype)

    def _attended(
        self,
        qkv_TX: Tensor,
        rotation: Rotation | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        out: QuantizedOutput | None = None,
    ) -> Tensor:
        """Norms, turns and attends, on a GPU in one kernel if it supports the norms."""
        q_norm, k_norm = self.q_norm or self.query_layernorm, self.k_norm or self.key_layernorm
        q_TX, k_TX = qkv_TX[:, : self.q_size], qkv_TX[:, self.q_size :][:, : self.kv_size]  # of rows without gates
        norms = None
        match q_norm, k_norm:
            case OwnWeightsNorm(), OwnWeightsNorm():
                q_TX.copy_(q_norm(q_TX))
                k_TX.copy_(k_norm(k_TX))
            case RMSNorm(), RMSNorm() if self.qk_norm_of is QKNorm.ROW:
                norm_rows(q_TX, k_TX, q_norm, k_norm, self.parallel)
            case RMSNorm(), RMSNorm():
                norms = HeadNorms(q_norm, k_norm, turned=self.qk_norm_of is QKNorm.TURNED_HEAD)
        return self.attend.rotate_and_attend(
            qkv_TX, rotation, kv_cache, metadata, norms=norms, gated=self.output_gate, out=out
        )


def _gated(x_THC: Tensor, gate_THC: Tensor) -> Tensor:
    return multiply_by_sigmoid(x_THC, gate_THC) if x_THC.is_cuda else x_THC * sigmoid(gate_THC)


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


def make_layer(
    config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
) -> ParallelModule:
    """Returns Llama's layer, or another arrangement of the same parts."""
    norms = switches_of(config).norms
    if norms is Norms.BEFORE:
        return LlamaLayer(config, gqa, layer_index=layer_index, backend=backend, dtype=dtype)
    assert switches_of(config).residual_multiplier == 1.0, "no family has both"
    size, eps = config.hidden_size, config.norm_eps
    attention = LlamaAttention(size, gqa, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype)
    mlp = make_mlp(config, layer_index, dtype=dtype)
    if norms is Norms.SHARED:
        return ParallelHalves(attention, mlp, CenteredNorm(size, eps=eps, dtype=dtype))
    block = NormsAfter if norms is Norms.AFTER else NormsAround
    return block(attention, mlp, lambda: RMSNorm(size, eps=eps, dtype=dtype))


def switches_of(config: ModelConfig) -> LlamaSwitches:
    """Returns the config's switches, or Llama's if the family's reader sets none."""
    return config.switches if isinstance(config.switches, LlamaSwitches) else LlamaSwitches()


def make_mlp(config: ModelConfig, layer_index: int, *, dtype: torch.dtype) -> nn.Module:
    """Returns the layer's mixture of experts, or its MLP."""
    if config.moe is not None and config.moe.layers[layer_index]:
        mixture = MoE(config.hidden_size, config.moe, dtype=dtype)
        if switches_of(config).stacked_experts:
            sizes = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
            mixture.experts = StackedExperts(*sizes, dtype=dtype, held=config.moe.held)
        return mixture
    if switches_of(config).xielu_mlp:
        return XieluMLP(config.hidden_size, config.intermediate_size, dtype=dtype)
    if switches_of(config).squared_relu_mlp:
        return SquaredReluMLP(config.hidden_size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)
    return GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)


class LlamaForCausalLM(CausalLM):
    shows_stream: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            make_layer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        switches = switches_of(config)
        centered = switches.norms is Norms.SHARED
        norm = CenteredNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype) if centered else None
        mtp_layer = None
        if config.drafts:
            own = mtp_config(config)
            assert isinstance(own.attention, GQAConfig)
            mtp_layer = make_layer(own, own.attention, layer_index=0, backend=backend, dtype=dtype)
        super().__init__(config, layers, dtype=dtype, norm=norm, mtp_layer=mtp_layer)
        self.switches = switches
        self.local_rotary = None if config.local_rope is None else Rotary(config.local_rope)
        self.slides = [window is not None for window in gqa.sliding_windows]
        for path, module in self.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, FusedLinear) and name in switches.in_one_tensor:
                module.keep_in_one(name)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        assert isinstance(self.model.norm, RMSNorm | CenteredNorm)
        rotation: Rotation = self.rotary(positions_T)
        if self.switches.query_growth is not None:
            rotation = replace(rotation, query_scale_T1=_query_scale(positions_T, self.switches.query_growth))
        local_rotation = rotation if self.local_rotary is None else self.local_rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        if self.switches.embedding_multiplier != 1.0:
            stream_TD *= self.switches.embedding_multiplier
        update_TD: Tensor | None = None
        for layer, slides in zip(self.model.layers, self.slides, strict=True):
            update_TD = layer(stream_TD, update_TD, local_rotation if slides else rotation, kv_cache, context.metadata)
        return self.model.norm.add_and_norm(stream_TD, update_TD)

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV, multiplier = super().compute_logits(hidden_RD), self.switches.logits_multiplier
        return logits_RV if multiplier == 1.0 else logits_RV.mul_(multiplier)


class ApertusForCausalLM(LlamaForCausalLM):
    """Llama with other names for a layer's norms."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.input_layernorm.": "model.layers.*.attention_layernorm.",
            "model.layers.*.post_attention_layernorm.": "model.layers.*.feedforward_layernorm.",
        }
    )


def _query_scale(positions_T: Tensor, growth: QueryGrowth) -> Tensor:
    """Returns the factors of queries [T,1] in float32."""
    return 1 + growth.beta * torch.log1p(torch.floor(positions_T.float() / growth.tokens)).unsqueeze(-1)
