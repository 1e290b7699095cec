"""Reads config.json of BLOOM."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from baton.models.config.decoder import DecoderFields
from baton.models.config.fields import Count, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig

# Maps published field names to the names in other families and newer files.
_SPELLINGS = (
    ("n_embed", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("seq_length", "max_position_embeddings"),
)


@dataclass(frozen=True)
class BloomSwitches:
    """Options of BLOOM. With `residual_after_norm`, each half of a layer is added to the output of its norm, not to its
    input."""

    residual_after_norm: bool


class _BloomFields(DecoderFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {"max_position_embeddings": 2048, "tie_word_embeddings": True}
    )
    apply_residual_connection_post_layernorm: bool = False
    n_inner: Size | None = None
    layer_norm_epsilon: Positive = 1e-5
    pretraining_tp: Count = 1
    slow_but_exact: bool = False


def read_bloom(file: ConfigFile) -> ModelConfig:
    renamed = {name: file.raw(published) for published, name in _SPELLINGS if file.raw(published) is not None}
    fields = _BloomFields.read(ConfigFile(file.where, {**renamed, **file.values}))
    if fields.slow_but_exact and fields.pretraining_tp > 1:
        # The reference sums slices of the products' inputs and omits the biases.
        raise fields.refuse("slow_but_exact", "false", cure="with pretraining_tp above 1 it leaves biases out")
    return fields.model(
        attention=fields.gqa(qkv_bias=True, output_bias=True, alibi=True),
        rope=None,
        intermediate_size=fields.n_inner or 4 * fields.hidden_size,
        norm_eps=fields.layer_norm_epsilon,
        mlp_bias=True,
        switches=BloomSwitches(residual_after_norm=fields.apply_residual_connection_post_layernorm),
    )
