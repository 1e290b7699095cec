"""Reads config.json of Falcon, of all three generations."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Count, Heads, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig


@dataclass(frozen=True)
class FalconSwitches:
    """The norms of a layer.

    Attributes:
        parallel: attention and MLP read the same input.
        num_norms: number of norms of that input; 2: one for the attention and one for the MLP.
    """

    parallel: bool
    num_norms: int


class _FalconFields(RotaryFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 65_024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "max_position_embeddings": 2048,
            "multi_query": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
        }
    )
    activation: Literal["gelu"] = "gelu"
    apply_residual_connection_post_layernorm: Literal[False] = False
    bias: bool = False
    alibi: bool = False
    multi_query: bool = False
    new_decoder_architecture: bool = False
    parallel_attn: bool = False
    num_ln_in_parallel_attn: Count | None = None
    num_kv_heads: Heads | None = None
    ffn_hidden_size: Size | None = None
    layer_norm_epsilon: Positive = 1e-5

    def used_kv_heads(self) -> int:
        """Returns the number of kv heads. The field `num_kv_heads` counts only in the newest generation."""
        if self.new_decoder_architecture:
            return self.num_kv_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads

    def switches(self) -> FalconSwitches:
        parallel, most_norms = self.parallel_attn, 2 if self.new_decoder_architecture else 1
        num_norms = self.num_ln_in_parallel_attn or most_norms
        if self.new_decoder_architecture and not parallel:
            raise self.refuse("parallel_attn", "true", cure="new_decoder_architecture is always parallel")
        if num_norms > most_norms:
            raise self.refuse("num_ln_in_parallel_attn", "1", "2 with new_decoder_architecture")
        return FalconSwitches(parallel=parallel, num_norms=num_norms)


def read_falcon(file: ConfigFile) -> ModelConfig:
    fields = _FalconFields.read(file)
    bias, kv_heads = fields.bias, fields.used_kv_heads()
    attention = fields.gqa(num_kv_heads=kv_heads, qkv_bias=bias, output_bias=bias, alibi=fields.alibi)
    return fields.model(
        attention=attention,
        rope=None if fields.alibi else fields.rope(dim=attention.head_dim),
        intermediate_size=fields.ffn_hidden_size or 4 * fields.hidden_size,
        norm_eps=fields.layer_norm_epsilon,
        mlp_bias=bias,
        switches=fields.switches(),
    )
