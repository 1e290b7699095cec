"""Reads config.json of the families with layer norms and an MLP of two layers: StarCoder2, Nemotron, GPT-NeoX, GPT-2,
OPT, MPT."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeAlias

from baton.models.config.decoder import DecoderFields, RotaryFields
from baton.models.config.fields import Count, Cure, Fields, Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig


class Activation(StrEnum):
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SQUARED_RELU = "squared_relu"
    SILU = "silu"


class Projection(StrEnum):
    """The way a checkpoint stores the weights of queries, keys and values.

    SEPARATE: as three layers. JOINED: as one, all queries first, then all keys, then all values. BY_HEAD: as one, with
    each kv head's queries, key and value next to each other.
    """

    SEPARATE = "separate"
    JOINED = "joined"
    BY_HEAD = "by_head"


@dataclass(frozen=True)
class LayerNormSwitches:
    """The options in which these families differ.

    Attributes:
        parallel: attention and MLP read the same residual stream, each through its own norm.
        norm_after: norms follow the sums after both halves of a layer, and there is no norm after the last layer.
        norm_bias, norm_weight_offset: whether norms have biases; a number added to their weights.
        final_norm: there is a norm after the last layer.
        inputs_first: weights of layers are [in, out] in the checkpoint.
        position_offset: index of the first position's row in the table of learned positions; None: there is no table.
        clip_qkv: queries, keys and values are limited to plus and minus this number.
        embedding_size: channels of the embedding and the head, if projections lead to the hidden size and back.
    """

    activation: Activation
    projection: Projection = Projection.SEPARATE
    parallel: bool = False
    norm_after: bool = False
    norm_bias: bool = True
    norm_weight_offset: int = 0
    final_norm: bool = True
    inputs_first: bool = False
    position_offset: int | None = None
    clip_qkv: float | None = None
    embedding_size: int | None = None


# transformers' names. Names of the same function differ at most in the last bits.
ActivationName: TypeAlias = Literal[
    "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish"
]
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": Activation.GELU,
        "gelu_python": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.SQUARED_RELU,
        "silu": Activation.SILU,
        "swish": Activation.SILU,
    }
)


def _renamed(file: ConfigFile, names: Mapping[str, str]) -> ConfigFile:
    """Returns the file with its family's own field names replaced by the shared names."""
    missing = {own: name for own, name in names.items() if file.raw(own) is not None and file.raw(name) is None}
    return file.with_values({name: file.raw(own) for own, name in missing.items()})


class _StarCoder2Fields(RotaryFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"tie_word_embeddings": True})
    intermediate_size: Size
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    norm_epsilon: Positive = 1e-5
    norm_type: Literal["layer_norm"] = "layer_norm"
    mlp_type: Literal["default"] = "default"
    sliding_window: Count | None = None
    use_bias: bool = True
    quantization_config: Table | None = None


def read_starcoder2(file: ConfigFile) -> ModelConfig:
    fields = _StarCoder2Fields.read(file)
    bias, windows = fields.use_bias, fields.uniform_windows(fields.sliding_window)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.norm_epsilon,
        mlp_bias=bias,
        switches=LayerNormSwitches(_ACTIVATIONS[fields.hidden_act]),
    )


class _NemotronFields(RotaryFields):
    partial_rotary: ClassVar[bool] = True
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"partial_rotary_factor": 0.5})
    intermediate_size: Size
    hidden_act: ActivationName = "relu2"
    norm_eps: Positive = 1e-5
    attention_bias: bool = False
    quantization_config: Table | None = None


def read_nemotron(file: ConfigFile) -> ModelConfig:
    fields = _NemotronFields.read(_renamed(file, {"rope_percent": "partial_rotary_factor"}))
    attention = fields.gqa(qkv_bias=fields.attention_bias, output_bias=fields.attention_bias)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.norm_eps,
        switches=LayerNormSwitches(_ACTIVATIONS[fields.hidden_act], norm_weight_offset=1),
    )


class _GPTNeoXFields(RotaryFields):
    partial_rotary: ClassVar[bool] = True
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"partial_rotary_factor": 0.25})
    intermediate_size: Size
    hidden_act: ActivationName = "gelu"
    layer_norm_eps: Positive = 1e-5
    attention_bias: bool = True
    use_parallel_residual: bool = True


_GPT_NEOX_NAMES = MappingProxyType({"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"})


def read_gpt_neox(file: ConfigFile) -> ModelConfig:
    fields = _GPTNeoXFields.read(_renamed(file, _GPT_NEOX_NAMES))
    attention = fields.gqa(qkv_bias=fields.attention_bias, output_bias=fields.attention_bias)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.layer_norm_eps,
        mlp_bias=True,
        switches=LayerNormSwitches(
            _ACTIVATIONS[fields.hidden_act],
            projection=Projection.BY_HEAD,
            parallel=fields.use_parallel_residual,
        ),
    )


class _GPT2Fields(DecoderFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 50_257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        }
    )
    activation_function: ActivationName = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    n_inner: Size | None = None
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


_GPT2_NAMES = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
)


def read_gpt2(file: ConfigFile) -> ModelConfig:
    fields = _GPT2Fields.read(_renamed(file, _GPT2_NAMES))
    scale = None if fields.scale_attn_weights else 1.0
    return fields.model(
        attention=fields.gqa(qkv_bias=True, output_bias=True, scale=scale),
        rope=None,
        intermediate_size=fields.n_inner or 4 * fields.hidden_size,
        norm_eps=fields.layer_norm_epsilon,
        mlp_bias=True,
        switches=LayerNormSwitches(
            _ACTIVATIONS[fields.activation_function],
            projection=Projection.JOINED,
            inputs_first=True,
            position_offset=0,
        ),
    )


class _OPTFields(DecoderFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 50_272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
    )
    ffn_dim: Size = 3072
    activation_function: ActivationName = "relu"
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: Annotated[Literal[True], Cure("norms without weights are not supported")] = True
    remove_final_layer_norm: bool = False
    word_embed_proj_dim: Size | None = None


def read_opt(file: ConfigFile) -> ModelConfig:
    fields = _OPTFields.read(_renamed(file, {"_remove_final_layer_norm": "remove_final_layer_norm"}))
    bias, before = fields.enable_bias, fields.do_layer_norm_before
    embedding_size = fields.word_embed_proj_dim
    return fields.model(
        attention=fields.gqa(qkv_bias=bias, output_bias=bias),
        rope=None,
        intermediate_size=fields.ffn_dim,
        norm_eps=1e-5,
        mlp_bias=bias,
        switches=LayerNormSwitches(
            _ACTIVATIONS[fields.activation_function],
            norm_after=not before,
            final_norm=before and not fields.remove_final_layer_norm,
            position_offset=2,
            embedding_size=None if embedding_size == fields.hidden_size else embedding_size,
        ),
    )


class _MPTAttentionFields(Fields):
    """The fields of MPT's attention. Only the code that came with the checkpoints ever computed most variants."""

    cure: ClassVar[str] = "transformers computes no other variant either"
    alibi: Literal[True] = True
    alibi_bias_max: Literal[8] = 8
    attn_type: Literal["multihead_attention"] = "multihead_attention"
    attn_uses_sequence_id: Literal[False] = False
    clip_qkv: Positive | None = None
    prefix_lm: Literal[False] = False
    qk_ln: Literal[False] = False
    softmax_scale: Positive | None = None


class _MPTFields(DecoderFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 50_368,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
    )
    attn_config: Table | None = None
    expansion_ratio: Count = 4
    layer_norm_epsilon: Positive = 1e-5
    logit_scale: None = None
    no_bias: Literal[True] = True
    norm_type: Literal["low_precision_layernorm", "layernorm"] = "low_precision_layernorm"


_MPT_NAMES = MappingProxyType(
    {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    }
)


def read_mpt(file: ConfigFile) -> ModelConfig:
    fields = _MPTFields.read(_renamed(file, _MPT_NAMES))
    own = _MPTAttentionFields.read(fields.table("attn_config"))
    return fields.model(
        attention=fields.gqa(qkv_bias=False, output_bias=False, scale=own.softmax_scale, alibi=True),
        rope=None,
        intermediate_size=fields.expansion_ratio * fields.hidden_size,
        norm_eps=fields.layer_norm_epsilon,
        mlp_bias=False,
        switches=LayerNormSwitches(
            Activation.GELU, projection=Projection.JOINED, norm_bias=False, clip_qkv=own.clip_qkv
        ),
    )
