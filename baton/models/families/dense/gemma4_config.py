"""Reads config.json of Gemma 4's text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.decoder import DecoderFields
from baton.models.config.fields import Count, CountOrZero, Fields, Fraction, Heads, LayersOrZero, Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.rope import ProportionalScaling, RopeConfig, read_rope
from baton.models.families.dense.gemma_config import with_shared_kv

_FULL, _SLIDING = "full_attention", "sliding_attention"
_EVERY = 6  # each such layer sees all tokens, and so does the last layer
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Gemma4Switches:
    """The options of a Gemma 4.

    Attributes:
        input_size: channels of each layer's own input; 0: there is none.
        input_vocab_size: rows of the embedding of these inputs.
        values_are_keys: layers without a window use the projection of their keys as values.
    """

    input_size: int
    input_vocab_size: int
    values_are_keys: bool


class _LayerFields(Fields):
    """The fields of one layer that replace the model's."""

    model_config = Fields.model_config | {"extra": "forbid"}

    head_dim: Size | None = None
    num_key_value_heads: Heads | None = None


class _ProportionalFields(Fields):
    model_config = Fields.model_config | {"extra": "forbid"}

    rope_type: Literal["proportional"]
    rope_theta: Positive
    factor: Positive = 1.0
    partial_rotary_factor: Fraction = 1.0


class _Gemma4Fields(DecoderFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPES,
        }
    )
    head_dim: Size
    num_key_value_heads: Heads
    intermediate_size: Size
    quantization_config: Table | None = None
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    # "vision" lets an image's tokens see each other; it does not affect text.
    use_bidirectional_attention: Literal["vision"] | None = None
    attention_bias: bool = False
    sliding_window: Count = 512
    final_logit_softcapping: Positive | None = None
    rope_parameters: Table
    global_head_dim: Size = 512
    num_global_key_value_heads: Heads | None = None
    per_layer_config: Table | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: LayersOrZero = 0
    use_double_wide_mlp: bool = False
    vocab_size_per_layer_input: Size = 262_144
    hidden_size_per_layer_input: CountOrZero = 256
    enable_moe_block: bool = False
    num_experts: Heads | None = None
    top_k_experts: Heads | None = None
    moe_intermediate_size: Size | None = None

    def attention(self) -> GQAConfig:
        windows = self.windows()
        heads = self.layer_heads(windows)
        largest_heads, largest_size = (max(sizes) for sizes in zip(*heads, strict=True))
        if any(largest_heads % num_heads for num_heads, _ in heads):
            raise self.refuse("num_key_value_heads", "a multiple of the other layers' kv heads, or a divisor of them")
        if self.num_attention_heads % largest_heads:
            raise self.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {self.num_attention_heads}")
        attention = GQAConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=largest_heads,
            head_dim=largest_size,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            qk_norm=True,
            sliding_windows=windows,
            scale=1.0,
            layer_heads=heads if len(set(heads)) > 1 else (),
        )
        attention = with_shared_kv(self, attention, self.num_kv_shared_layers)
        if any(own != heads[attention.kv_source(index)] for index, own in enumerate(heads)):
            raise self.refuse("per_layer_config", "equal heads in layers that share keys and values")
        return attention

    def windows(self) -> tuple[int | None, ...]:
        num_layers = self.num_hidden_layers
        types = list(self.types_of_layers(_FULL, _SLIDING))
        types = types or [_SLIDING if (index + 1) % _EVERY else _FULL for index in range(num_layers)]
        types[-1] = _FULL  # whatever the file says, as in transformers
        return tuple(self.sliding_window if kind == _SLIDING else None for kind in types)

    def layer_heads(self, windows: tuple[int | None, ...]) -> tuple[tuple[int, int], ...]:
        """Returns (kv heads, channels of a head) of each layer: from `per_layer_config`, or from published files'
        fields for layers without a window."""
        own = (self.num_key_value_heads, self.head_dim)
        if self.per_layer_config is None:
            num_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            full = (num_heads or self.num_key_value_heads, self.global_head_dim)
            return tuple(full if window is None else own for window in windows)
        heads, table = [own] * len(windows), self.table("per_layer_config")
        for name in table.values:
            if not name.isdecimal() or int(name) >= len(heads):
                raise table.refuse(name, "null", cure=f"the model has layers 0 to {len(heads) - 1}")
            layer = _LayerFields.read(table.table(name))
            heads[int(name)] = (layer.num_key_value_heads or own[0], layer.head_dim or own[1])
        return tuple(heads)

    def ropes(self, heads: Mapping[str, int]) -> tuple[RopeConfig, RopeConfig]:
        """Returns the rotary embeddings of layers without and with a window."""
        table = self.table("rope_parameters")
        if unknown := sorted(set(table.values) - {_FULL, _SLIDING}):
            raise table.refuse(unknown[0], "null", cure=f"this family has tables: {_FULL}, {_SLIDING}")
        return self._rope(table.table(_FULL), heads[_FULL]), self._rope(table.table(_SLIDING), heads[_SLIDING])

    def _rope(self, table: ConfigFile, dim: int) -> RopeConfig:
        if table.raw("rope_type") != "proportional":
            context = self.max_position_embeddings
            return read_rope(table, dim=dim, theta=10_000.0, interleaved=False, max_position_embeddings=context)
        fields = _ProportionalFields.read(table)
        turning = int(fields.partial_rotary_factor * dim // 2)
        return RopeConfig(
            dim, fields.rope_theta, interleaved=False, scaling=ProportionalScaling(fields.factor, turning)
        )

    def moe(self) -> MoEConfig | None:
        """Returns the experts next to the dense MLP, which counts as a shared expert."""
        if not self.enable_moe_block:
            return None
        if self.quantization_config is not None:
            cure = "the experts of this family are supported as bfloat16, float16 or float32"
            raise self.refuse("quantization_config", "null", cure=cure)
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if getattr(self, name) is None:
                raise self.refuse(name, "an integer of at least 1")
        assert self.num_experts is not None
        assert self.top_k_experts is not None
        assert self.moe_intermediate_size is not None
        if self.top_k_experts > self.num_experts:
            raise self.refuse("top_k_experts", f"up to num_experts, {self.num_experts}")
        return MoEConfig(
            layers=(True,) * self.num_hidden_layers,
            num_experts=self.num_experts,
            experts_per_token=self.top_k_experts,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.intermediate_size,
            scoring=Scoring.SOFTMAX,
            method=TopKMethod.GREEDY,
            num_groups=1,
            groups_per_token=1,
            normalize_weights=True,
            weight_scale=1.0,
        )


def read_gemma4(file: ConfigFile) -> ModelConfig:
    fields = _Gemma4Fields.read(file)
    attention = fields.attention()
    dims = {
        _FULL if window is None else _SLIDING: attention.heads_of(index)[1]
        for index, window in enumerate(attention.sliding_windows)
    }
    rope, local_rope = fields.ropes({_FULL: fields.head_dim, _SLIDING: fields.head_dim} | dims)
    owned, wide = attention.num_kv_layers, fields.use_double_wide_mlp
    size, layers = fields.intermediate_size, range(fields.num_hidden_layers)
    sizes = tuple(2 * size if wide and index >= owned else size for index in layers)
    if wide and fields.enable_moe_block:
        raise fields.refuse("use_double_wide_mlp", "false", cure="not supported together with enable_moe_block")
    return fields.model(
        attention=attention,
        rope=rope,
        local_rope=local_rope,
        intermediate_size=max(sizes),
        intermediate_sizes=sizes if len(set(sizes)) > 1 else (),
        final_logits_soft_cap=fields.final_logit_softcapping,
        moe=fields.moe(),
        switches=Gemma4Switches(
            input_size=fields.hidden_size_per_layer_input,
            input_vocab_size=fields.vocab_size_per_layer_input,
            values_are_keys=fields.attention_k_eq_v,
        ),
    )
