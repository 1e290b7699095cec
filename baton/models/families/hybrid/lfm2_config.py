"""Reads config.json of LFM2, dense and with a mixture of experts."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Count, Heads, Integers, LayersOrZero, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.recurrent import RecurrentConfig

_MOST_TIMES = 1024  # wider than the model


@dataclass(frozen=True)
class Lfm2Switches:
    """The options of an LFM2.

    Attributes:
        conv_width: number of tokens that a convolution sees, the token itself included.
        conv_bias: the convolutions and the products around them have biases.
    """

    conv_width: int
    conv_bias: bool


class _Lfm2Fields(RotaryFields):
    intermediate_size: Size
    rope_theta: Positive = 1_000_000.0
    norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None  # the publisher's spelling
    conv_bias: bool = False
    conv_L_cache: Count = 3

    def is_conv(self) -> tuple[bool, ...]:
        """Whether each layer is a convolution."""
        types = self.types_of_layers("full_attention", "conv")
        if not types:
            raise self.refuse("layer_types", "full_attention or conv for each layer")
        return tuple(kind == "conv" for kind in types)

    def lfm2(self, is_conv: tuple[bool, ...], *, intermediate_size: int, moe: MoEConfig | None = None) -> ModelConfig:
        if self.conv_L_cache < 2:
            raise self.refuse("conv_L_cache", "an integer of at least 2")
        if all(is_conv):
            raise self.refuse("layer_types", "full_attention for at least one layer")
        attention = self.gqa(qkv_bias=False, output_bias=False, qk_norm=True)
        # Channels do not mix, so any equal parts work.
        num_heads = math.gcd(self.hidden_size, self.num_attention_heads)
        channels = self.hidden_size // num_heads
        config = self.model(
            attention=attention,
            rope=self.rope(dim=attention.head_dim),
            intermediate_size=intermediate_size,
            norm_eps=self.norm_eps,
            mlp_bias=False,
            moe=moe,
            switches=Lfm2Switches(self.conv_L_cache, self.conv_bias),
        )
        tied = self.tie_word_embeddings if self.tie_embedding is None else self.tie_embedding
        recurrent = RecurrentConfig(is_conv, num_heads, channels * (self.conv_L_cache - 1)) if any(is_conv) else None
        return replace(config, tie_word_embeddings=tied, recurrent=recurrent)


class _DenseFields(_Lfm2Fields):
    block_ff_dim: Size | None = None  # the publisher's spelling of intermediate_size
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Positive | None = 1.0
    block_multiple_of: Size = 256
    full_attn_idxs: Integers | None = None  # the older spelling of layer_types

    def mlp_size(self) -> int:
        size = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        if self.block_ffn_dim_multiplier > _MOST_TIMES:
            raise self.refuse("block_ffn_dim_multiplier", f"a number up to {_MOST_TIMES}")
        return -(-int(self.block_ffn_dim_multiplier * size) // self.block_multiple_of) * self.block_multiple_of


def read_lfm2(file: ConfigFile) -> ModelConfig:
    fields = _DenseFields.read(file)
    count = fields.num_hidden_layers
    if fields.layer_types:
        is_conv = fields.is_conv()
    else:
        attends = range(count) if fields.full_attn_idxs is None else fields.full_attn_idxs
        is_conv = tuple(index not in attends for index in range(count))
    return fields.lfm2(is_conv, intermediate_size=fields.mlp_size())


class _MoEFields(_Lfm2Fields):
    moe_intermediate_size: Size
    num_dense_layers: LayersOrZero = 2
    num_experts: Heads = 32
    num_experts_per_tok: Heads = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    hidden_act: Literal["silu"] = "silu"


def read_lfm2_moe(file: ConfigFile) -> ModelConfig:
    fields = _MoEFields.read(file)
    if fields.num_experts_per_tok > fields.num_experts:
        raise fields.refuse("num_experts_per_tok", f"at most the number of experts, {fields.num_experts}")
    layers = tuple(index >= fields.num_dense_layers for index in range(fields.num_hidden_layers))
    moe = MoEConfig(
        layers=layers,
        num_experts=fields.num_experts,
        experts_per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        shared_intermediate_size=0,
        scoring=Scoring.SIGMOID,
        method=TopKMethod.NOAUX_TC if fields.use_expert_bias else TopKMethod.GREEDY,
        num_groups=1,
        groups_per_token=1,
        normalize_weights=fields.norm_topk_prob,
        weight_scale=fields.routed_scaling_factor,
    )
    return fields.lfm2(fields.is_conv(), intermediate_size=fields.intermediate_size, moe=moe if any(layers) else None)
