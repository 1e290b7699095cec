"""Reads config.json of Llama-4's text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Count, CountOrZero, Heads, Integers, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig, MoEConfig, Scoring, TopKMethod


@dataclass(frozen=True)
class TemperatureTuning:
    """The growth of queries: a query at position p is multiplied by 1 + scale * ln(1 + floor((p + 1) /
    floor_tokens))."""

    floor_tokens: int
    scale: float


@dataclass(frozen=True)
class Llama4Switches:
    """The options in which layers differ.

    Attributes:
        rope_layers: whether each layer has a rotary embedding.
        qk_norm: layers with a rotary embedding norm queries and keys.
        temperature: growth of queries in layers without a rotary embedding.
    """

    rope_layers: tuple[bool, ...]
    qk_norm: bool
    temperature: TemperatureTuning | None


class _Llama4Fields(RotaryFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "attention_chunk_size": 8192,
        }
    )
    intermediate_size: Size  # of an expert
    intermediate_size_mlp: Size
    attention_bias: bool = False
    use_qk_norm: bool = True
    no_rope_layers: Integers = ()
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None
    # The first release's files have a 4 here. Null and 0 mean off, as in that release's code.
    attn_temperature_tuning: bool | CountOrZero | None = True
    floor_scale: Count = 8192
    attn_scale: float = 0.1
    moe_layers: Integers | None = None
    interleave_moe_layer_step: Count = 1
    num_local_experts: Heads
    num_experts_per_tok: Heads

    def rope_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a rotary embedding. Contrary to its name, `no_rope_layers` has a 1 for layers that
        do."""
        num_layers, flags = self.num_hidden_layers, self.no_rope_layers
        if not flags:
            return tuple((index + 1) % self.no_rope_layer_interval > 0 for index in range(num_layers))
        if len(flags) < num_layers or not set(flags) <= {0, 1}:
            raise self.refuse("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
        return tuple(flag == 1 for flag in flags[:num_layers])

    def chunk_sizes(self) -> tuple[int | None, ...]:
        """Returns chunk sizes by `layer_types`; without it, only layers with a rotary embedding have chunks."""
        size = self.attention_chunk_size
        types = self.types_of_layers("full_attention", "chunked_attention")
        if size is None and "chunked_attention" in types:
            cure = "layer_types has chunked_attention"
            raise self.refuse("attention_chunk_size", "an integer of at least 1", cure=cure)
        chunked = [kind == "chunked_attention" for kind in types] or self.rope_layers()
        return tuple(size if in_chunks else None for in_chunks in chunked)

    def moe(self) -> MoEConfig:
        num_layers, every = self.num_hidden_layers, self.interleave_moe_layer_step
        numbers = range(every - 1, num_layers, every) if self.moe_layers is None else self.moe_layers
        num_experts, per_token = self.num_local_experts, self.num_experts_per_tok
        if per_token > num_experts:
            raise self.refuse("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
        return MoEConfig(
            layers=tuple(index in numbers for index in range(num_layers)),
            num_experts=num_experts,
            experts_per_token=per_token,
            intermediate_size=self.intermediate_size,
            shared_intermediate_size=self.intermediate_size,
            scoring=Scoring.SIGMOID,
            method=TopKMethod.GREEDY,
            num_groups=1,
            groups_per_token=1,
            normalize_weights=False,
            weight_scale=1.0,
        )


def read_llama4(file: ConfigFile) -> ModelConfig:
    fields = _Llama4Fields.read(file)
    bias = fields.attention_bias
    attention = fields.gqa(qkv_bias=bias, output_bias=bias, attention_chunk_sizes=fields.chunk_sizes())
    temperature = TemperatureTuning(fields.floor_scale, fields.attn_scale)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim, interleaved=True),
        intermediate_size=fields.intermediate_size_mlp,
        moe=fields.moe(),
        switches=Llama4Switches(
            rope_layers=fields.rope_layers(),
            qk_norm=fields.use_qk_norm,
            temperature=temperature if fields.attn_temperature_tuning else None,
        ),
    )
