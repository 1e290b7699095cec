"""Reads config.json of Qwen3-Next and of the language models of Qwen3.5, which have a gated delta rule in most
layers."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from baton.models.config.fields import Count, CountOrZero, Fraction, Heads, Integers, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.config.recurrent import RecurrentConfig
from baton.models.families.moe.moe_config import RoutedFields


@dataclass(frozen=True)
class DeltaSwitches:
    """The options of layers with a delta rule.

    Attributes:
        key_dim, value_dim: channels of a key, of a value.
        values_per_key: number of value heads that share a key head. A key head with its value heads is one head of the
            state.
        conv_width: number of tokens that the short convolution before the rule sees, the token itself included.
        by_key_head: projections have one key head after the other, each with all kinds of its channels.
    """

    key_dim: int
    value_dim: int
    values_per_key: int
    conv_width: int
    by_key_head: bool = False

    @property
    def conv_channels(self) -> int:
        """The number of a head's channels that pass the convolution: query, key and values."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def conv_numbers(self) -> int:
        """The number of the convolution's last inputs, which come first in a head's state; the matrices follow."""
        return self.conv_channels * (self.conv_width - 1)

    def recurrent(self, layers: tuple[bool, ...], *, num_heads: int) -> RecurrentConfig:
        """Returns the states that these layers keep.

        Args:
            num_heads: key heads.
        """
        matrices = self.values_per_key * self.key_dim * self.value_dim
        return RecurrentConfig(layers, num_heads, self.conv_numbers + matrices)


class _QwenDeltaFields(RoutedFields):
    partial_rotary: ClassVar[bool] = True
    partial_rotary_factor: Fraction = 0.25
    head_dim: Size = 256
    attention_bias: bool = False
    attn_output_gate: Literal[True] = True
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32
    num_experts_per_tok: Heads = 10
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: CountOrZero = 512

    def hybrid(
        self, *, by_key_head: bool, normalize_weights: bool, layers_with_experts: tuple[bool, ...]
    ) -> ModelConfig:
        """Returns the model of these fields. Checkpoints have an extra layer for multi-token prediction."""
        bias = self.attention_bias
        attention = replace(
            self.gqa(qkv_bias=bias, output_bias=bias, qk_norm=True),
            output_gate=True,
        )
        moe = None
        if any(layers_with_experts):
            moe = self.greedy_experts(
                self.count_of_experts(),
                per_token=self.num_experts_per_tok,
                intermediate_size=self.moe_intermediate_size,
                normalize_weights=normalize_weights,
                layers=layers_with_experts,
                shared_intermediate_size=self.shared_expert_intermediate_size,
                shared_gate=True,
            )
        switches = self._switches(by_key_head=by_key_head)
        model = self.model(
            attention=attention,
            rope=self.rope(dim=attention.head_dim),
            intermediate_size=self.intermediate_size,
            moe=moe,
            mtp_layers=1,
            switches=switches,
        )
        recurrent = switches.recurrent(self._recurrent_layers(), num_heads=self.linear_num_key_heads)
        return replace(model, recurrent=recurrent)

    def _recurrent_layers(self) -> tuple[bool, ...]:
        types = self.types_of_layers("full_attention", "linear_attention")
        keeps = tuple(kind == "linear_attention" for kind in types)
        interval = self.full_attention_interval
        keeps = keeps or tuple((index + 1) % interval > 0 for index in range(self.num_hidden_layers))
        if all(keeps) or not any(keeps):
            raise self.refuse(
                "layer_types" if types else "full_attention_interval", "layers of both kinds: full and linear attention"
            )
        return keeps

    def _switches(self, *, by_key_head: bool) -> DeltaSwitches:
        values_per_key, rest = divmod(self.linear_num_value_heads, self.linear_num_key_heads)
        if rest:
            raise self.refuse(
                "linear_num_value_heads", f"a multiple of linear_num_key_heads, {self.linear_num_key_heads}"
            )
        if self.linear_conv_kernel_dim < 2:
            raise self.refuse("linear_conv_kernel_dim", "an integer of at least 2")
        return DeltaSwitches(
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            values_per_key=values_per_key,
            conv_width=self.linear_conv_kernel_dim,
            by_key_head=by_key_head,
        )


class _Qwen3NextFields(_QwenDeltaFields):
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: Integers = ()


def read_qwen3_next(file: ConfigFile) -> ModelConfig:
    fields = _Qwen3NextFields.read(file)
    layers = tuple(
        index not in fields.mlp_only_layers and (index + 1) % fields.decoder_sparse_step == 0
        for index in range(fields.num_hidden_layers)
    )
    return fields.hybrid(by_key_head=True, normalize_weights=fields.norm_topk_prob, layers_with_experts=layers)


def read_qwen3_5(file: ConfigFile) -> ModelConfig:
    fields = _QwenDeltaFields.read(file)
    layers = (False,) * fields.num_hidden_layers
    return fields.hybrid(by_key_head=False, normalize_weights=True, layers_with_experts=layers)


class _Qwen35MoEFields(_QwenDeltaFields):
    intermediate_size: Size = 512  # no layer is dense
    num_experts_per_tok: Heads = 8


def read_qwen3_5_moe(file: ConfigFile) -> ModelConfig:
    fields = _Qwen35MoEFields.read(file)
    layers = (True,) * fields.num_hidden_layers
    return fields.hybrid(by_key_head=False, normalize_weights=True, layers_with_experts=layers)
