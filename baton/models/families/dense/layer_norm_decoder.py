"""Families with layer norms and an MLP of two layers: StarCoder2, Nemotron, GPT-NeoX, GPT-2, OPT, MPT.

`LayerNormSwitches` has the differences in the computation; the classes at the end have checkpoints' module names.
Shapes: T token, D hidden channel, E channel of the embedding, H query head, K kv head, C head channel, R row whose
logits are computed.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, relu

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.bloom import GroupedQKV
from baton.models.families.dense.layer_norm_config import Activation, LayerNormSwitches, Projection
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.elementwise import gelu, silu
from baton.models.layers.embedding import Embedding
from baton.models.layers.linear import FusedLinear, InputsFirstLinear, Linear
from baton.models.layers.norms import LayerNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext

_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.GELU: gelu,
        Activation.GELU_TANH: lambda x_TI: gelu(x_TI, approximate="tanh"),
        Activation.RELU: relu,
        Activation.SQUARED_RELU: lambda x_TI: relu(x_TI).square(),
        Activation.SILU: silu,
    }
)


class LayerNormAttention(nn.Module):
    """Attention with rotary embedding, ALiBi, or neither."""

    def __init__(
        self,
        hidden_size: int,
        gqa: GQAConfig,
        switches: LayerNormSwitches,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.heads = [gqa.num_heads, gqa.num_kv_heads, gqa.num_kv_heads]
        self.head_dim, self.clip_qkv = gqa.head_dim, switches.clip_qkv
        self.qkv_proj = _projection(hidden_size, gqa, switches, dtype=dtype)
        self.o_proj = _linear(switches)(gqa.num_heads * gqa.head_dim, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=gqa.num_kv_heads,
            head_dim=gqa.head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
            sliding_window=gqa.sliding_windows[layer_index],
            alibi_slopes=gqa.alibi_slopes or None,
        )

    def forward(
        self, x_TD: Tensor, rotation: Rotation | None, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        if isinstance(self.qkv_proj, GroupedQKV):
            q_THC, k_TKC, v_TKC = self.qkv_proj.split(x_TD)
            if rotation is not None:
                q_THC, k_TKC = rotation.apply(q_THC), rotation.apply(k_TKC)
            out_THC = self.attend(q_THC, k_TKC, v_TKC, kv_cache, metadata)
        elif rotation is not None:
            out_THC = self.attend.rotate_and_attend(self._clipped(x_TD), rotation, kv_cache, metadata)
        else:
            q_THC, k_TKC, v_TKC = self._clipped(x_TD).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
            out_THC = self.attend(q_THC, k_TKC, v_TKC, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD

    def _clipped(self, x_TD: Tensor) -> Tensor:
        qkv_TX: Tensor = self.qkv_proj(x_TD)
        return qkv_TX if self.clip_qkv is None else qkv_TX.clamp_(-self.clip_qkv, self.clip_qkv)


def _projection(size: int, gqa: GQAConfig, switches: LayerNormSwitches, *, dtype: torch.dtype) -> Linear:
    q_size, kv_size = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    match switches.projection:
        case Projection.SEPARATE:
            parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
            return FusedLinear(size, parts, dtype=dtype, bias=gqa.qkv_bias)
        case Projection.JOINED:
            return _linear(switches)(size, q_size + 2 * kv_size, dtype=dtype, bias=gqa.qkv_bias)
        case Projection.BY_HEAD:
            return GroupedQKV(size, gqa, dtype=dtype)


def _linear(switches: LayerNormSwitches) -> type[Linear]:
    return InputsFirstLinear if switches.inputs_first else Linear


class PlainMLP(nn.Module):
    """An MLP of two layers."""

    def __init__(
        self, size: int, intermediate_size: int, switches: LayerNormSwitches, *, dtype: torch.dtype, bias: bool
    ) -> None:
        super().__init__()
        self.activate = _FUNCTIONS[switches.activation]
        self.up_proj = _linear(switches)(size, intermediate_size, dtype=dtype, bias=bias)
        self.down_proj = _linear(switches)(intermediate_size, size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        up_TI = self.up_proj(x_TD)
        out_TD: Tensor = self.down_proj(self.activate(up_TI))
        return out_TD


class LayerNormLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        switches, size = _switches(config), config.hidden_size
        self.parallel_residual, self.norm_after = switches.parallel, switches.norm_after
        self.input_layernorm = _norm(config, dtype=dtype)
        self.self_attn = LayerNormAttention(size, gqa, switches, layer_index=layer_index, backend=backend, dtype=dtype)
        self.post_attention_layernorm = _norm(config, dtype=dtype)
        self.mlp = PlainMLP(size, config.intermediate_size, switches, dtype=dtype, bias=config.mlp_bias)

    def forward(
        self, x_TD: Tensor, rotation: Rotation | None, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        all_reduce = self.parallel.all_reduce
        if self.norm_after:
            x_TD = self.input_layernorm(x_TD + all_reduce(self.self_attn(x_TD, rotation, kv_cache, metadata)))
            out_TD: Tensor = self.post_attention_layernorm(x_TD + all_reduce(self.mlp(x_TD)))
            return out_TD
        attended_TD = self.self_attn(self.input_layernorm(x_TD), rotation, kv_cache, metadata)
        if self.parallel_residual:  # one sum over ranks for both
            return x_TD + all_reduce(attended_TD + self.mlp(self.post_attention_layernorm(x_TD)))
        x_TD = x_TD + all_reduce(attended_TD)
        return x_TD + all_reduce(self.mlp(self.post_attention_layernorm(x_TD)))


def _norm(config: ModelConfig, *, dtype: torch.dtype) -> LayerNorm:
    switches = _switches(config)
    return LayerNorm(
        config.hidden_size,
        eps=config.norm_eps,
        dtype=dtype,
        bias=switches.norm_bias,
        weight_offset=switches.norm_weight_offset,
    )


def _switches(config: ModelConfig) -> LayerNormSwitches:
    assert isinstance(config.switches, LayerNormSwitches)
    return config.switches


class LearnedPositions(nn.Module):
    """A table of one vector for each position of the longest context.

    Args:
        offset: index of the first position's row.
    """

    def __init__(self, max_positions: int, size: int, *, offset: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions + offset, size, dtype=dtype))
        self.offset = offset

    def forward(self, positions_T: Tensor) -> Tensor:
        return embedding(positions_T + self.offset, self.weight)


class LayerNormForCausalLM(CausalLM):
    """A model with layer norms. Its modules have Llama's names, like Nemotron's checkpoints."""

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, _switches(config)
        assert isinstance(gqa, GQAConfig)
        layers = [
            LayerNormLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        norm = _norm(config, dtype=dtype) if switches.final_norm else nn.Identity()
        super().__init__(config, layers, dtype=dtype, norm=norm)
        size, offset = config.hidden_size, switches.position_offset
        self.positions: LearnedPositions | None = None
        if offset is not None:
            self.positions = LearnedPositions(config.max_position_embeddings, size, offset=offset, dtype=dtype)
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if switches.embedding_size is not None:
            self._embed_with(switches.embedding_size, dtype=dtype)

    def _embed_with(self, embedding_size: int, *, dtype: torch.dtype) -> None:
        config = self.config
        self.model.embed_tokens = Embedding(config.vocab_size, embedding_size, dtype=dtype)
        self.project_in = Linear(embedding_size, config.hidden_size, dtype=dtype)
        self.project_out = Linear(config.hidden_size, embedding_size, dtype=dtype)
        if self.lm_head is not None:
            self.lm_head = Linear(embedding_size, config.vocab_size, dtype=dtype)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        rotation = None if self.rotary is None else self.rotary(positions_T)
        hidden_TD: Tensor = self.model.embed_tokens(token_ids_T)
        if self.project_in is not None:
            hidden_TD = self.project_in(hidden_TD)
        if self.positions is not None:
            hidden_TD = hidden_TD + self.positions(positions_T)
        for layer in self.model.layers:
            hidden_TD = layer(hidden_TD, rotation, kv_cache, context.metadata)
        out_TD: Tensor = self.model.norm(hidden_TD)
        return out_TD

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        return super().compute_logits(hidden_RD if self.project_out is None else self.project_out(hidden_RD))


class StarCoder2ForCausalLM(LayerNormForCausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.mlp.up_proj": "model.layers.*.mlp.c_fc",
            "model.layers.*.mlp.down_proj": "model.layers.*.mlp.c_proj",
        }
    )


class GPTNeoXForCausalLM(LayerNormForCausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.self_attn.qkv_proj": "gpt_neox.layers.*.attention.query_key_value",
            "model.layers.*.self_attn.o_proj": "gpt_neox.layers.*.attention.dense",
            "model.layers.*.mlp.up_proj": "gpt_neox.layers.*.mlp.dense_h_to_4h",
            "model.layers.*.mlp.down_proj": "gpt_neox.layers.*.mlp.dense_4h_to_h",
            "model.layers.": "gpt_neox.layers.",
            "model.embed_tokens.": "gpt_neox.embed_in.",
            "model.norm.": "gpt_neox.final_layer_norm.",
            "lm_head.": "embed_out.",
        }
    )


class GPT2LMHeadModel(LayerNormForCausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.input_layernorm": "transformer.h.*.ln_1",
            "model.layers.*.self_attn.qkv_proj": "transformer.h.*.attn.c_attn",
            "model.layers.*.self_attn.o_proj": "transformer.h.*.attn.c_proj",
            "model.layers.*.post_attention_layernorm": "transformer.h.*.ln_2",
            "model.layers.*.mlp.up_proj": "transformer.h.*.mlp.c_fc",
            "model.layers.*.mlp.down_proj": "transformer.h.*.mlp.c_proj",
            "model.embed_tokens.": "transformer.wte.",
            "positions.": "transformer.wpe.",
            "model.norm.": "transformer.ln_f.",
        }
    )


class OPTForCausalLM(LayerNormForCausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.input_layernorm": "model.decoder.layers.*.self_attn_layer_norm",
            "model.layers.*.self_attn.o_proj": "model.decoder.layers.*.self_attn.out_proj",
            "model.layers.*.post_attention_layernorm": "model.decoder.layers.*.final_layer_norm",
            "model.layers.*.mlp.up_proj": "model.decoder.layers.*.fc1",
            "model.layers.*.mlp.down_proj": "model.decoder.layers.*.fc2",
            "model.layers.": "model.decoder.layers.",
            "model.embed_tokens.": "model.decoder.embed_tokens.",
            "positions.": "model.decoder.embed_positions.",
            "model.norm.": "model.decoder.final_layer_norm.",
            "project_in.": "model.decoder.project_in.",
            "project_out.": "model.decoder.project_out.",
        }
    )


class MptForCausalLM(LayerNormForCausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.layers.*.input_layernorm": "transformer.blocks.*.norm_1",
            "model.layers.*.self_attn.qkv_proj": "transformer.blocks.*.attn.Wqkv",
            "model.layers.*.self_attn.o_proj": "transformer.blocks.*.attn.out_proj",
            "model.layers.*.post_attention_layernorm": "transformer.blocks.*.norm_2",
            "model.layers.*.mlp.up_proj": "transformer.blocks.*.ffn.up_proj",
            "model.layers.*.mlp.down_proj": "transformer.blocks.*.ffn.down_proj",
            "model.embed_tokens.": "transformer.wte.",
            "model.norm.": "transformer.norm_f.",
        }
    )
