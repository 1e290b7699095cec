"""The formats in which checkpoints pack integers into words: GPTQ, AWQ and compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.models.config.fields import Count, Table, Texts
from baton.models.config.quantization.fields import CURE, SILENT, QuantizationFields
from baton.models.config.quantization.packed_config import Axis, PackedConfig, StoredPart, TensorRole


@dataclass(frozen=True)
class GptqConfig(PackedConfig):
    """GPTQ in the form of AutoGPTQ and GPTQModel, with words along the inputs and each input's group (`g_idx`).

    Stored zeros are the actual zeros less one, wrapped, unless `checkpoint_format` is gptq_v2; `packing` names the
    format.
    """

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


# The output that each place of a word holds, from the lowest bits on.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqConfig(PackedConfig):
    """AWQ in AutoAWQ's form for its gemm kernel, with words along the outputs and even outputs before odd ones."""

    @property
    def tensors(self) -> Mapping[TensorRole, StoredPart]:
        words = self.per_word
        return {
            TensorRole.NUMBERS: StoredPart("qweight", "I32", Axis(1, words), Axis(0), packed_dim=1, order=_ORDER),
            TensorRole.ZEROS: StoredPart(
                "qzeros", "I32", Axis(1, words), self._group_axis(0), packed_dim=1, order=_ORDER
            ),
            TensorRole.SCALES: StoredPart("scales", "", Axis(1), self._group_axis(0)),
        }


class AwqFields(QuantizationFields):
    silent: ClassVar[frozenset[str]] = SILENT | {
        "backend",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "modules_to_fuse",
    }

    bits: Literal[4]
    group_size: Count
    zero_point: Literal[True]
    version: Literal["gemm", "GEMM"] = "gemm"
    modules_to_not_convert: Texts = ()

    def config(self) -> AwqConfig:
        names = self.names("modules_to_not_convert", self.modules_to_not_convert)
        return AwqConfig("awq", self.bits, self.group_size, symmetric=False, unquantized=names)


@dataclass(frozen=True)
class PackQuantizedConfig(PackedConfig):
    """compressed-tensors `pack-quantized`: words along the inputs; signed numbers and zeros are shifted to be
    unsigned."""

    @property
    def tensors(self) -> Mapping[TensorRole, StoredPart]:
        words = self.per_word
        tensors = {
            TensorRole.NUMBERS: StoredPart("weight_packed", "I32", Axis(0), Axis(1, words), packed_dim=1),
            TensorRole.SCALES: StoredPart("weight_scale", "", Axis(0), self._group_axis(1)),
            TensorRole.SHAPE: StoredPart("weight_shape", "I64", None, None, optional=True),
        }
        if not self.symmetric:
            zeros = StoredPart("weight_zero_point", "I32", Axis(0, words), self._group_axis(1), packed_dim=0)
            tensors[TensorRole.ZEROS] = zeros
        if self.reordered:
            tensors[TensorRole.GROUPS] = StoredPart("weight_g_idx", "I32", None, Axis(0))
        return tensors


class IntegersFields(QuantizationFields):
    """The fields of packed weights: `num_bits` integers with a scale per group of inputs or for all."""

    silent: ClassVar[frozenset[str]] = SILENT | {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}

    num_bits: Literal[4, 8]
    type: Literal["int"]
    symmetric: bool = True
    strategy: Literal["group", "channel"]
    dynamic: Literal[False] = False
    group_size: int | None = None
    actorder: Literal["group", "weight", "static"] | bool | None = None
    block_structure: object = None

    def config(self, unquantized: tuple[str, ...]) -> PackQuantizedConfig:
        size = None if self.strategy == "channel" else self.group_size
        if self.strategy == "group" and (size is None or not 1 <= size < 2**31):
            raise self.refuse("group_size", "an integer of at least 1", cure=CURE)
        reordered = self.actorder in ("group", True)
        return PackQuantizedConfig("pack-quantized", self.num_bits, size, self.symmetric, reordered, unquantized)
