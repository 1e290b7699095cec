"""Reads config.json of Gemma 3n's text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.fields import Count, CountOrZero, Heads, Integers, LayersOrZero, Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.families.dense.gemma_config import LocalRopeFields, with_shared_kv

_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of the first layers, if the file has no value and the model has more layers


@dataclass(frozen=True)
class Gemma3nSwitches:
    """The options of a Gemma 3n.

    Attributes:
        input_size: channels of each layer's own input.
        input_vocab_size: rows of the embedding of these inputs.
        streams: number of residual streams; layers compute the stream `active_stream`.
        scales_output: the corrected active stream is scaled before it is combined with the layer's input.
        laurel_rank: rank of the low-rank residual next to the attention.
        sparsities: each layer's share of gates that are cut off; 0: none.
    """

    input_size: int
    input_vocab_size: int
    streams: int
    active_stream: int
    scales_output: bool
    laurel_rank: int
    sparsities: tuple[float, ...]


class _Gemma3nFields(LocalRopeFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0,
        }
    )
    intermediate_size: Integers
    quantization_config: Table | None = None
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    attention_bias: bool = False
    sliding_window: Count = 512
    final_logit_softcapping: Positive | None = None
    vocab_size_per_layer_input: Size = 262_144
    hidden_size_per_layer_input: Count = 256
    altup_active_idx: CountOrZero = 0
    altup_correct_scale: bool = True
    altup_num_inputs: Heads = 4
    num_kv_shared_layers: LayersOrZero = 15
    laurel_rank: Size = 64
    activation_sparsity_pattern: object = None

    def mlp_sizes(self) -> tuple[int, ...]:
        """Returns the value of each layer."""
        sizes, num_layers = self.intermediate_size, self.num_hidden_layers
        sizes = sizes * num_layers if len(sizes) == 1 else sizes
        if len(sizes) != num_layers or not all(0 < size < 2**20 for size in sizes):
            raise self.refuse("intermediate_size", f"one size above 0, or one for each of {num_layers} layers")
        return sizes

    def sparsities(self) -> tuple[float, ...]:
        """Returns the value of each layer."""
        num_layers, given = self.num_hidden_layers, self.activation_sparsity_pattern
        if given is None:
            sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
            return (_SPARSITY,) * sparse + (0.0,) * (num_layers - sparse)
        if not isinstance(given, list) or len(given) != num_layers or not all(map(_is_share, given)):
            raise self.refuse("activation_sparsity_pattern", f"from 0 to below 1 for each of {num_layers} layers")
        return tuple(float(share) for share in given)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def read_gemma3n(file: ConfigFile) -> ModelConfig:
    fields = _Gemma3nFields.read(file)
    if fields.altup_active_idx >= fields.altup_num_inputs:
        raise fields.refuse("altup_active_idx", f"below altup_num_inputs, {fields.altup_num_inputs}")
    attention = fields.gqa(
        windows=fields.windows_by_type(fields.sliding_window, every=5),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qk_norm=True,
        scale=1.0,
    )
    attention = with_shared_kv(fields, attention, fields.num_kv_shared_layers)
    rope, local_rope = fields.ropes(dim=attention.head_dim)
    sizes = fields.mlp_sizes()
    return fields.model(
        attention=attention,
        rope=rope,
        local_rope=local_rope,
        intermediate_size=max(sizes),
        intermediate_sizes=sizes if len(set(sizes)) > 1 else (),
        final_logits_soft_cap=fields.final_logit_softcapping,
        switches=Gemma3nSwitches(
            input_size=fields.hidden_size_per_layer_input,
            input_vocab_size=fields.vocab_size_per_layer_input,
            streams=fields.altup_num_inputs,
            active_stream=fields.altup_active_idx,
            scales_output=fields.altup_correct_scale,
            laurel_rank=fields.laurel_rank,
            sparsities=fields.sparsities(),
        ),
    )
