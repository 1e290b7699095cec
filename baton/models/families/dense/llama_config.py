"""Reads config.json of Llama, Qwen2, Qwen3 and MiMo-7B, which Llama's file computes."""

from dataclasses import replace
from typing import Annotated

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Count, CountOrZero, Cure, LayersOrZero, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.llama_switches import LlamaSwitches


class LlamaLikeFields(RotaryFields):
    """The fields that Llama-like families share."""

    intermediate_size: Size
    quantization_config: Table | None = None

    def llama_like(
        self,
        attention: GQAConfig,
        *,
        interleaved: bool = False,
        mlp_bias: bool | None = None,
        norm_eps: float | None = None,
        switches: LlamaSwitches | None = None,
    ) -> ModelConfig:
        """Returns the model of a family with one rotary embedding for all layers.

        Args:
            mlp_bias, norm_eps: for families without the fields `mlp_bias` and `rms_norm_eps`.
        """
        return self.model(
            attention=attention,
            rope=self.rope(dim=attention.head_dim, interleaved=interleaved),
            intermediate_size=self.intermediate_size,
            mlp_bias=mlp_bias,
            norm_eps=norm_eps,
            switches=switches,
        )


class _LlamaFields(LlamaLikeFields):
    attention_bias: bool = False
    sliding_window: Annotated[None, Cure("this architecture always attends to all tokens")] = None


def read_llama(file: ConfigFile) -> ModelConfig:
    fields = _LlamaFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    return fields.llama_like(fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias))


class _QwenFields(LlamaLikeFields):
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: CountOrZero = 28

    def windows(self) -> tuple[int | None, ...]:
        """Returns each layer's window by `layer_types`; without it, layers from `max_window_layers` on slide."""
        window = self.sliding_window if self.use_sliding_window else None
        types = self.types_of_layers("full_attention", "sliding_attention")
        if not types:
            full_layers = self.max_window_layers
            return tuple(None if index < full_layers else window for index in range(self.num_hidden_layers))
        if window is None and "sliding_attention" in types:
            raise self.refuse("use_sliding_window", "true", cure="layer_types has sliding_attention")
        return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_qwen2(file: ConfigFile) -> ModelConfig:
    fields = _QwenFields.read(file)
    return fields.llama_like(fields.gqa(windows=fields.windows(), qkv_bias=True, output_bias=False))


class _MiMoFields(_QwenFields):
    num_nextn_predict_layers: LayersOrZero = 0


def read_mimo_dense(file: ConfigFile) -> ModelConfig:
    """Reads config.json of MiMo-7B, which is Qwen2 with layers for multi-token prediction."""
    return replace(read_qwen2(file), mtp_layers=_MiMoFields.read(file).num_nextn_predict_layers)


def read_qwen3(file: ConfigFile) -> ModelConfig:
    fields = _QwenFields.read(file)
    bias, windows = fields.attention_bias, fields.windows()
    return fields.llama_like(fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True))
