"""Reads config.json of StableLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig


@dataclass(frozen=True)
class StableLMSwitches:
    """The options of a StableLM's layers.

    Attributes:
        parallel: attention and MLP read one norm of the residual stream.
        qk_norm_heads: numbers of query and kv heads of the whole model if each head has its own norm; None: no norms.
    """

    parallel: bool
    qk_norm_heads: tuple[int, int] | None


class _StableLMFields(RotaryFields):
    partial_rotary: ClassVar[bool] = True
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"partial_rotary_factor": 0.25})
    intermediate_size: Size
    layer_norm_eps: Positive = 1e-5
    mlp_bias: Literal[False] = False
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    quantization_config: Table | None = None


def read_stablelm(file: ConfigFile) -> ModelConfig:
    fields = _StableLMFields.read(file)
    attention = fields.gqa(windows=fields.uniform_windows(None), qkv_bias=fields.use_qkv_bias, output_bias=False)
    heads = (attention.num_heads, attention.num_kv_heads)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.layer_norm_eps,
        switches=StableLMSwitches(fields.use_parallel_residual, heads if fields.qk_layernorm else None),
    )
