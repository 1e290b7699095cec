"""GPTQ as AutoGPTQ and GPTQModel write it: words along the inputs, and each input's group (`g_idx`).

Stored zeros are one less than the zeros, wrapped, unless `checkpoint_format` is gptq_v2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.models.config.fields import Table, Texts
from baton.models.config.quantization.fields import CURE, SILENT, QuantizationFields
from baton.models.config.quantization.packed_config import Axis, PackedConfig, StoredPart, TensorRole


@dataclass(frozen=True)
class GptqConfig(PackedConfig):
    """`packing` gptq or gptq_v2."""

    @property
    def tensors(self) -> Mapping[TensorRole, StoredPart]:
        words = self.per_word
        return {
            TensorRole.NUMBERS: StoredPart("qweight", "I32", Axis(1), Axis(0, words), packed_dim=0),
            TensorRole.ZEROS: StoredPart("qzeros", "I32", Axis(1, words), self._group_axis(0), packed_dim=1),
            TensorRole.SCALES: StoredPart("scales", "", Axis(1), self._group_axis(0)),
            TensorRole.GROUPS: StoredPart("g_idx", "I32", None, Axis(0), optional=not self.reordered),
        }

    @property
    def zeros_are_less_one(self) -> bool:
        return self.packing == "gptq"


class GptqFields(QuantizationFields):
    silent: ClassVar[frozenset[str]] = SILENT | {
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "disable_exllama",
        "exllama_config",
        "is_marlin_format",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "mse",
        "offload_to_disk",
        "pad_token_id",
        "quantizer",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "vram_strategy",
    }

    bits: Literal[4, 8]
    group_size: int
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    format: Literal["gptq", "gptq_v2"] | None = None
    pack_dtype: Literal["int32"] = "int32"
    lm_head: Literal[False] = False
    dynamic: Table | None = None
    modules_to_not_convert: Texts = ()

    def config(self) -> GptqConfig:
        if not 1 <= self.group_size < 2**31 and self.group_size != -1:
            raise self.refuse("group_size", "-1", "an integer of at least 1")
        if self.dynamic:
            raise self.refuse("dynamic", "null", cure=CURE)
        return GptqConfig(
            self.checkpoint_format or self.format or "gptq",
            self.bits,
            None if self.group_size == -1 else self.group_size,
            self.sym,
            self.desc_act,
            self.names("modules_to_not_convert", self.modules_to_not_convert),
        )
