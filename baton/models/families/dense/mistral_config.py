"""Reads config.json of Mistral, Ministral and Ministral 3, which Llama's file computes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.fields import Count, Fields, Positive
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.families.dense.llama_config import LlamaLikeFields
from baton.models.families.dense.llama_switches import LlamaSwitches, QueryGrowth


class _MistralFields(LlamaLikeFields):
    sliding_window: Count | None = 4096  # null means full attention


def read_mistral(file: ConfigFile) -> ModelConfig:
    fields = _MistralFields.read(file)
    windows = fields.uniform_windows(fields.sliding_window)
    return fields.llama_like(fields.gqa(windows=windows, qkv_bias=False, output_bias=False))


class _MinistralFields(LlamaLikeFields):
    sliding_window: Count | None = 4096

    def windows(self) -> tuple[int | None, ...]:
        """Returns windows by `layer_types`; without it, for all layers."""
        types = self.types_of_layers("full_attention", "sliding_attention")
        if "sliding_attention" in types and self.sliding_window is None:
            raise self.refuse("sliding_window", "an integer of at least 1")
        slides = [kind == "sliding_attention" for kind in types] or [True] * self.num_hidden_layers
        return tuple(self.sliding_window if slide else None for slide in slides)


def read_ministral(file: ConfigFile) -> ModelConfig:
    fields = _MinistralFields.read(file)
    return fields.llama_like(fields.gqa(windows=fields.windows(), qkv_bias=False, output_bias=False), mlp_bias=False)


class _Ministral3Fields(LlamaLikeFields):
    """The fields of Ministral 3. The table of its rotary embedding also has the scale of later queries."""

    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        }
    )
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = None

    def rope_table(self) -> ConfigFile:
        table = super().rope_table()
        return ConfigFile(table.where, {name: value for name, value in table.values.items() if name not in _NOT_ROPE})

    def query_growth(self) -> QueryGrowth | None:
        growth = _QueryGrowthFields.read(super().rope_table())
        if not growth.llama_4_scaling_beta:
            return None
        if growth.original_max_position_embeddings is None:
            raise growth.refuse("original_max_position_embeddings", "an integer of at least 1")
        return QueryGrowth(growth.llama_4_scaling_beta, growth.original_max_position_embeddings)


_NOT_ROPE = ("llama_4_scaling_beta", "max_position_embeddings")


class _QueryGrowthFields(Fields):
    llama_4_scaling_beta: float | None = None
    original_max_position_embeddings: Count | None = None


def read_ministral3(file: ConfigFile) -> ModelConfig:
    fields = _Ministral3Fields.read(file)
    attention = fields.gqa(windows=fields.uniform_windows(fields.sliding_window), qkv_bias=False, output_bias=False)
    return fields.llama_like(attention, mlp_bias=False, switches=LlamaSwitches(query_growth=fields.query_growth()))


class _Mistral3Text(Fields):
    model_type: Literal["mistral", "ministral3"] = "mistral"


def read_mistral3(file: ConfigFile) -> ModelConfig:
    """Reads the language model of Mistral Small 3 or Ministral 3."""
    return read_mistral(file) if _Mistral3Text.read(file).model_type == "mistral" else read_ministral3(file)
