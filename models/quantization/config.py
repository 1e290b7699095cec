"""Which of a checkpoint's weights are fp8 and what their scales stand for, read from config.json.

Three publishers' spellings become one value: DeepSeek's and AutoFP8's `quant_method` "fp8", and compressed-tensors.
A field that is not understood is refused: a scale that is misread is a wrong model, not a slow one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict

from models.config.fields import Fields, Table, Texts
from models.config.file import ConfigFile

FP8_BLOCK = 128  # rows and columns of a weight, or channels of a token, that share a scale

_FIELD = "quantization_config"
_CURE = "this quantization is not supported; choose the checkpoint in bfloat16, or one in fp8 (e4m3)"
_REGEX = "re:"


class Granularity(StrEnum):
    """The part of a weight that shares a scale: the tensor, an output channel, or a block of 128 by 128."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


@dataclass(frozen=True)
class Fp8Config:
    """Linear layers are stored in e4m3, apart from the head, routers and those named.

    Attributes:
        weights: the part of a weight that shares a scale; stored number times scale is the weight.
        static_inputs: the checkpoint has one scale for each layer's inputs. Else each token gets a scale when it is
            computed, or one for every 128 channels where weights have blocks.
        power_of_two_inputs: scales of inputs are rounded up to powers of two, as those of the weights were.
        unquantized: names of modules that are not quantized; regular expressions begin with `re:`.
    """

    weights: Granularity
    static_inputs: bool
    power_of_two_inputs: bool = False
    unquantized: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the linear layer that checkpoints call `name` is in fp8."""
        return name != "lm_head" and not any(_matches(pattern, name) for pattern in self.unquantized)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    # The whole name, a module that contains it, or its end: publishers use all three.
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def read_quantization(file: ConfigFile) -> Fp8Config | None:
    """None for a checkpoint that is not quantized.

    Raises:
        ConfigError: it is quantized in a way that is not understood.
    """
    if file.raw(_FIELD) is None:
        return None
    table = file.table(_FIELD)
    method = table.raw("quant_method")
    if method == "fp8":
        return _Fp8Fields.read(table).config()
    if method == "compressed-tensors":
        return _CompressedTensorsFields.read(table).config()
    raise file.refuse(_FIELD, "quant_method fp8", "quant_method compressed-tensors", cure=_CURE)


class _QuantizationFields(Fields):
    """Unknown fields may change what the numbers mean, so they are refused unless they are empty.

    Attributes:
        silent: fields that say how a file was made, and nothing about what it holds.
    """

    model_config = ConfigDict(extra="forbid")
    cure: ClassVar[str] = _CURE
    silent: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read(cls, file: ConfigFile) -> Self:
        known = {
            name: value
            for name, value in file.values.items()
            if name in cls.model_fields or (value and name not in cls.silent)
        }
        return super().read(ConfigFile(file.where, known))

    def names(self, field: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names of modules, sorted, so that two spellings of one list are one model."""
        for name in names:
            if name.startswith(_REGEX):
                try:
                    re.compile(name.removeprefix(_REGEX))
                except re.error:
                    raise self.refuse(field, "names of modules", "re: and a regular expression") from None
        return tuple(sorted(set(names)))


_SILENT = frozenset({"quant_method", "global_compression_ratio", "version", "dequantize", "run_compressed"})


class _Fp8Fields(_QuantizationFields):
    silent: ClassVar[frozenset[str]] = _SILENT

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
            raise self.refuse("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}]", cure=_CURE)
        if weights is Granularity.BLOCK and static:
            raise self.refuse("activation_scheme", "dynamic", cure="weights in blocks have no scales of inputs")
        names = self.names("modules_to_not_convert", self.modules_to_not_convert + self.ignored_layers)
        return Fp8Config(weights, static, self.scale_fmt == "ue8m0", names)


class _NumbersFields(_QuantizationFields):
    """Symmetric 8-bit floats: weights, or inputs of layers."""

    silent: ClassVar[frozenset[str]] = _SILENT | {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"}

    num_bits: Literal[8]
    type: Literal["float"]
    symmetric: Literal[True] = True
    strategy: Literal["tensor", "channel", "token", "block", "group"]
    dynamic: bool = False
    group_size: object = None
    block_structure: object = None

    def sharing(self) -> tuple[str, bool]:
        """(what shares a scale, whether scales are computed while serving)."""
        if self.strategy == "block" and self.block_structure != [FP8_BLOCK, FP8_BLOCK]:
            raise self.refuse("block_structure", f"[{FP8_BLOCK}, {FP8_BLOCK}]", cure=_CURE)
        if self.strategy == "group" and self.group_size != FP8_BLOCK:
            raise self.refuse("group_size", str(FP8_BLOCK), cure=_CURE)
        return self.strategy, self.dynamic


class _GroupFields(_QuantizationFields):
    weights: Table | None = None
    input_activations: Table | None = None
    output_activations: object = None
    targets: Texts = ()
    format: Literal["float-quantized"] = "float-quantized"


class _SparsityFields(Fields):
    format: Literal["dense"] = "dense"


# By what shares a scale and whether it is dynamic, of weights and of inputs: the weights' granularity, and whether
# inputs have static scales.
_UNDERSTOOD: Mapping[tuple[tuple[str, bool], tuple[str, bool]], tuple[Granularity, bool]] = MappingProxyType(
    {
        (("tensor", False), ("tensor", False)): (Granularity.TENSOR, True),
        (("tensor", False), ("token", True)): (Granularity.TENSOR, False),
        (("channel", False), ("tensor", False)): (Granularity.CHANNEL, True),
        (("channel", False), ("token", True)): (Granularity.CHANNEL, False),
        (("block", False), ("group", True)): (Granularity.BLOCK, False),
    }
)


class _CompressedTensorsFields(_QuantizationFields):
    silent: ClassVar[frozenset[str]] = _SILENT

    config_groups: Table | None = None
    format: Literal["float-quantized"] = "float-quantized"
    ignore: Texts = ()
    kv_cache_scheme: Table | None = None
    quantization_status: Literal["compressed", "frozen"] = "frozen"
    sparsity_config: Table | None = None

    def config(self) -> Fp8Config:
        _SparsityFields.read(self.table("sparsity_config"))
        if self.kv_cache_scheme is not None and self._sharing(self.table("kv_cache_scheme")) != ("tensor", False):
            raise self.refuse("kv_cache_scheme", "null", "static 8-bit floats with one scale per tensor", cure=_CURE)
        groups = self.table("config_groups")
        if len(groups.values) != 1:
            raise self.refuse("config_groups", "one group", cure=_CURE)
        (name,) = groups.values
        group = _GroupFields.read(groups.table(name))
        if group.targets != ("Linear",):
            raise group.refuse("targets", "['Linear']", cure=_CURE)
        kinds = self._sharing(group.table("weights")), self._sharing(group.table("input_activations"))
        if kinds not in _UNDERSTOOD:
            pairs = [f"weights per {weights} with inputs per {inputs}" for (weights, _), (inputs, _) in _UNDERSTOOD]
            raise group.refuse("weights", *dict.fromkeys(pairs), cure=_CURE)
        weights, static = _UNDERSTOOD[kinds]
        return Fp8Config(weights, static, unquantized=self.names("ignore", self.ignore))

    @staticmethod
    def _sharing(table: ConfigFile) -> tuple[str, bool]:
        return _NumbersFields.read(table).sharing()
