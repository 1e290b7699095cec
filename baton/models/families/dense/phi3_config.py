"""Reads config.json of Phi-3, Phi-3.5, Phi-4 and Phi-4-mini. Their checkpoints keep several projections in one
tensor."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.fields import Count
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.families.dense.llama_config import LlamaLikeFields
from baton.models.families.dense.llama_switches import LlamaSwitches


class _Phi3Fields(LlamaLikeFields):
    partial_rotary: ClassVar[bool] = True
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    )
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    sliding_window: Count | None = None

    def rope_table(self) -> ConfigFile:
        """Returns the table, with LongRoPE's name in place of older files' name for it."""
        table = super().rope_table()
        name = "type" if table.raw("rope_type") is None else "rope_type"
        return table.with_values({name: "longrope"}) if table.raw(name) == "yarn" else table

    def window(self) -> int | None:
        """Returns the window; None if it covers the whole context, as in most files."""
        window = self.sliding_window
        return None if window is None or window >= self.max_position_embeddings else window


def read_phi3(file: ConfigFile) -> ModelConfig:
    fields = _Phi3Fields.read(file)
    windows = (fields.window(),) * fields.num_hidden_layers
    attention = fields.gqa(windows=windows, qkv_bias=False, output_bias=False)
    return fields.llama_like(attention, switches=LlamaSwitches(in_one_tensor=("qkv_proj", "gate_up_proj")))
