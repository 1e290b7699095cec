"""Reads from config.json how a checkpoint's weights are quantized, as one value for all publishers' spellings of a
scheme.

This file reads fp8 from DeepSeek's, AutoFP8's and compressed-tensors' files; other schemes have their own files.
Unknown fields are refused, because a misread scale makes a wrong model, not a slow one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

from baton.models.config.fields import Fields, Table, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.quantization.fields import CURE, SILENT, QuantizationFields, leaves_out
from baton.models.config.quantization.int8_config import Int8Config, Int8Fields, int8_config
from baton.models.config.quantization.mxfp4_config import Mxfp4Config, Mxfp4Fields
from baton.models.config.quantization.packed_config import PackedConfig
from baton.models.config.quantization.packed_formats import AwqFields, GptqFields, IntegersFields, PackQuantizedConfig

FP8_BLOCK = 128  # rows and columns of a weight, or channels of a token, that share a scale

_FIELD = "quantization_config"


class Granularity(StrEnum):
    """The part of a weight that shares one scale: the tensor, an output channel, or a block of 128 by 128."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


@dataclass(frozen=True)
class Fp8Config:
    """A checkpoint with linear layers in e4m3, except for the head, routers and the layers named in `unquantized`.

    Attributes:
        weights: the part of a weight that shares a scale. The weight is the stored number times the scale.
        static_inputs: the checkpoint has one scale for each layer's inputs. Otherwise each token gets a scale when it
            is computed, or one per 128 channels if weights have blocks.
        power_of_two_inputs: scales of inputs are rounded up to powers of two, as the weights' scales were.
        unquantized: names of modules that are not quantized; regular expressions begin with `re:`.
    """

    weights: Granularity
    static_inputs: bool
    power_of_two_inputs: bool = False
    unquantized: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the linear layer that checkpoints call `name` is in fp8."""
        return name != "lm_head" and not leaves_out(self.unquantized, name)

    @property
    def weight_bytes(self) -> float:
        return 1

    @property
    def channel_block(self) -> int | None:
        """Number of intermediate channels that share a scale and stay on one rank; None: ranks may split anywhere."""
        return FP8_BLOCK if self.weights is Granularity.BLOCK else None

    @property
    def head_blocks(self) -> tuple[int, int] | None:
        """The numbers that a rank's (outputs, inputs) of attention must be multiples of; None: any number works."""
        return (FP8_BLOCK, FP8_BLOCK) if self.weights is Granularity.BLOCK else None


Quantization: TypeAlias = Fp8Config | PackedConfig | Int8Config | Mxfp4Config


def read_quantization(file: ConfigFile) -> Quantization | None:
    """Reads the quantization; returns None for a checkpoint that is not quantized.

    Raises:
        ConfigError: the quantization is not supported.
    """
    if file.raw(_FIELD) is None:
        return None
    table = file.table(_FIELD)
    method = table.raw("quant_method")
    if method == "fp8":
        return _Fp8Fields.read(table).config()
    if method == "compressed-tensors":
        return _CompressedTensorsFields.read(table).config()
    if method == "gptq":
        return GptqFields.read(table).config()
    if method == "awq":
        return AwqFields.read(table).config()
    methods = ("fp8", "compressed-tensors", "gptq", "awq")
    raise file.refuse(_FIELD, *(f"quant_method {each}" for each in methods), cure=CURE)


def read_mxfp4(file: ConfigFile) -> Mxfp4Config | None:
    """Does what `read_quantization` does, for a family whose experts are published in mxfp4."""
    if file.raw(_FIELD) is None:
        return None
    table = file.table(_FIELD)
    if table.raw("quant_method") != "mxfp4":
        raise file.refuse(_FIELD, "quant_method mxfp4", "null", cure="choose the checkpoint in mxfp4 or in bfloat16")
    return Mxfp4Fields.read(table).config()


class _Fp8Fields(QuantizationFields):
    silent: ClassVar[frozenset[str]] = SILENT

    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    expert_dtype: Literal["fp8"] = "fp8"
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    ignored_layers: Texts = ()
    kv_cache_scheme: Literal["static"] | None = None
    modules_to_not_convert: Texts = ()
    scale_fmt: Literal["float", "ue8m0"] = "float"
    weight_block_size: list[int] | None = None

    def config(self) -> Fp8Config:
        static = self.activation_scheme == "static"
        weights = Granularity.TENSOR if self.weight_block_size is None else Granularity.BLOCK
        if weights is Granularity.BLOCK and self.weight_block_size != [FP8_BLOCK, FP8_BLOCK]:
            raise self.refuse("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}]", cure=CURE)
        if weights is Granularity.BLOCK and static:
            raise self.refuse("activation_scheme", "dynamic", cure="weights in blocks have no scales of inputs")
        names = self.names("modules_to_not_convert", self.modules_to_not_convert + self.ignored_layers)
        return Fp8Config(weights, static, self.scale_fmt == "ue8m0", names)


class _NumbersFields(QuantizationFields):
    """The fields of symmetric 8-bit floats, for weights or for layers' inputs."""

    silent: ClassVar[frozenset[str]] = SILENT | {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"}

    num_bits: Literal[8]
    type: Literal["float"]
    symmetric: Literal[True] = True
    strategy: Literal["tensor", "channel", "token", "block", "group"]
    dynamic: bool = False
    group_size: object = None
    block_structure: object = None

    def sharing(self) -> tuple[str, bool]:
        """Returns (the part that shares a scale, whether scales are computed while serving)."""
        if self.strategy == "block" and self.block_structure != [FP8_BLOCK, FP8_BLOCK]:
            raise self.refuse("block_structure", f"[{FP8_BLOCK}, {FP8_BLOCK}]", cure=CURE)
        if self.strategy == "group" and self.group_size != FP8_BLOCK:
            raise self.refuse("group_size", str(FP8_BLOCK), cure=CURE)
        return self.strategy, self.dynamic


_FORMATS = Literal["float-quantized", "int-quantized", "pack-quantized"]


class _GroupFields(QuantizationFields):
    weights: Table | None = None
    input_activations: Table | None = None
    output_activations: object = None
    targets: Texts = ()
    format: _FORMATS | None = None


class _SparsityFields(Fields):
    format: Literal["dense"] = "dense"


# Maps the sharing of weights and of inputs to the weights' granularity and whether inputs have static scales.
_UNDERSTOOD: Mapping[tuple[tuple[str, bool], tuple[str, bool]], tuple[Granularity, bool]] = MappingProxyType(
    {
        (("tensor", False), ("tensor", False)): (Granularity.TENSOR, True),
        (("tensor", False), ("token", True)): (Granularity.TENSOR, False),
        (("channel", False), ("tensor", False)): (Granularity.CHANNEL, True),
        (("channel", False), ("token", True)): (Granularity.CHANNEL, False),
        (("block", False), ("group", True)): (Granularity.BLOCK, False),
    }
)


class _CompressedTensorsFields(QuantizationFields):
    silent: ClassVar[frozenset[str]] = SILENT

    config_groups: Table | None = None
    format: _FORMATS = "float-quantized"
    ignore: Texts = ()
    kv_cache_scheme: Table | None = None
    quantization_status: Literal["compressed", "frozen"] = "frozen"
    sparsity_config: Table | None = None

    def config(self) -> Fp8Config | Int8Config | PackQuantizedConfig:
        _SparsityFields.read(self.table("sparsity_config"))
        if self.kv_cache_scheme is not None and self._sharing(self.table("kv_cache_scheme")) != ("tensor", False):
            raise self.refuse("kv_cache_scheme", "null", "static 8-bit floats with one scale per tensor", cure=CURE)
        groups = self.table("config_groups")
        if len(groups.values) != 1:
            raise self.refuse("config_groups", "one group", cure=CURE)
        (name,) = groups.values
        group = _GroupFields.read(groups.table(name))
        if group.targets != ("Linear",):
            raise group.refuse("targets", "['Linear']", cure=CURE)
        if (group.format or self.format) != self.format:
            raise group.refuse("format", self.format, cure=CURE)
        unquantized = self.names("ignore", self.ignore)
        if self.format == "pack-quantized":
            if group.input_activations:
                raise group.refuse("input_activations", "null", cure=CURE)
            return IntegersFields.read(group.table("weights")).config(unquantized)
        if self.format == "int-quantized":
            weights, inputs = (Int8Fields.read(group.table(field)) for field in ("weights", "input_activations"))
            return int8_config(weights, inputs, unquantized)
        return self._fp8(group, unquantized)

    def _fp8(self, group: _GroupFields, unquantized: tuple[str, ...]) -> Fp8Config:
        kinds = self._sharing(group.table("weights")), self._sharing(group.table("input_activations"))
        if kinds not in _UNDERSTOOD:
            pairs = [f"weights per {weights} with inputs per {inputs}" for (weights, _), (inputs, _) in _UNDERSTOOD]
            raise group.refuse("weights", *dict.fromkeys(pairs), cure=CURE)
        weights, static = _UNDERSTOOD[kinds]
        return Fp8Config(weights, static, unquantized=unquantized)

    @staticmethod
    def _sharing(table: ConfigFile) -> tuple[str, bool]:
        return _NumbersFields.read(table).sharing()
