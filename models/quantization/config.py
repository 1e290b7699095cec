"""Which of a checkpoint's weights are fp8 and what their scales stand for, read from config.json.

Three publishers' spellings become one value: DeepSeek's and AutoFP8's `quant_method` "fp8", and compressed-tensors.
What is not understood to the last field is refused: a scale that is misread is a wrong model, not a slow one. No torch.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from models.config.file import ConfigFile

FP8_BLOCK = 128  # rows and columns of a weight that share a scale, and channels of a token that do

_FIELD = "quantization_config"
_CURE = "this quantization is not supported; choose the checkpoint in bfloat16, or one in fp8 (e4m3)"
_REGEX = "re:"
# What says how a file was made, and nothing about what it holds.
_SILENT = frozenset({"quant_method", "global_compression_ratio", "version", "dequantize", "run_compressed"})
_SILENT_OF_NUMBERS = frozenset({"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"})


class Granularity(StrEnum):
    """What shares a scale: a whole tensor, an output channel, or a block of 128 by 128."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


@dataclass(frozen=True)
class Fp8Config:
    """Linear layers are stored in e4m3, apart from the head, routers and those named.

    Attributes:
        weights: what shares a scale; stored number times scale is the weight.
        static_inputs: every layer's inputs have one scale, in the checkpoint; else each token gets its own when it is
            computed, or one for every 128 channels where weights have blocks.
        power_of_two_inputs: scales of inputs are rounded up to powers of two, as those of the weights were.
        unquantized: names of modules that are stored as they were, `re:` before regular expressions.
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
    # A whole name, a module that it is in, or its end: all three are published.
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def read_quantization(file: ConfigFile) -> Fp8Config | None:
    """None for a checkpoint that is not quantized.

    Raises:
        ConfigError: it is, in another way than those understood.
    """
    if _FIELD not in file:
        return None
    table = file.table(_FIELD)
    method = table.raw("quant_method")
    if method == "fp8":
        return _read_fp8(table)
    if method == "compressed-tensors":
        return _read_compressed_tensors(table)
    raise file.refuse(_FIELD, "quant_method fp8", "quant_method compressed-tensors", cure=_CURE)


def _read_fp8(table: ConfigFile) -> Fp8Config:
    lists = ("modules_to_not_convert", "ignored_layers")
    known = {"activation_scheme", "fmt", "weight_block_size", "kv_cache_scheme", "scale_fmt", "expert_dtype", *lists}
    _refuse_others(table, known | _SILENT)
    _only(table, "fmt", "e4m3", "float8_e4m3fn")
    _only(table, "expert_dtype", "fp8")
    _only(table, "kv_cache_scheme", "static")
    power_of_two = table.choice("scale_fmt", {"float": False, "ue8m0": True}, "float")
    static = table.choice("activation_scheme", {"dynamic": False, "static": True}, "dynamic")
    weights = Granularity.BLOCK if "weight_block_size" in table else Granularity.TENSOR
    if weights is Granularity.BLOCK and table.integers("weight_block_size") != (FP8_BLOCK, FP8_BLOCK):
        raise table.refuse("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}]", cure=_CURE)
    if weights is Granularity.BLOCK and static:
        raise table.refuse("activation_scheme", "dynamic", cure="weights in blocks have no scales of inputs")
    return Fp8Config(weights, static, power_of_two, _names(table, *lists))


def _read_compressed_tensors(table: ConfigFile) -> Fp8Config:
    known = {"config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status", "sparsity_config"}
    _refuse_others(table, known | _SILENT)
    _only(table.table("sparsity_config"), "format", "dense")
    _only(table, "format", "float-quantized")
    _only(table, "quantization_status", "compressed", "frozen")
    if "kv_cache_scheme" in table and _numbers(table.table("kv_cache_scheme")) != ("tensor", False):
        raise table.refuse("kv_cache_scheme", "null", "static 8-bit floats with one scale per tensor", cure=_CURE)
    groups = table.table("config_groups")
    if len(groups.names()) != 1:
        raise table.refuse("config_groups", "one group", cure=_CURE)
    (name,) = groups.names()
    group = groups.table(name)
    _refuse_others(group, {"weights", "input_activations", "output_activations", "targets", "format"})
    _only(group, "format", "float-quantized")
    if group.texts("targets") != ("Linear",):
        raise group.refuse("targets", "['Linear']", cure=_CURE)
    understood = {
        (("tensor", False), ("tensor", False)): (Granularity.TENSOR, True),
        (("tensor", False), ("token", True)): (Granularity.TENSOR, False),
        (("channel", False), ("tensor", False)): (Granularity.CHANNEL, True),
        (("channel", False), ("token", True)): (Granularity.CHANNEL, False),
        (("block", False), ("group", True)): (Granularity.BLOCK, False),
    }
    kinds = _numbers(group.table("weights")), _numbers(group.table("input_activations"))
    if kinds not in understood:
        said = [f"weights per {weights} with inputs per {inputs}" for (weights, _), (inputs, _) in understood]
        raise group.refuse("weights", *dict.fromkeys(said), cure=_CURE)
    weights, static = understood[kinds]
    return Fp8Config(weights, static, unquantized=_names(table, "ignore"))


def _numbers(table: ConfigFile) -> tuple[str, bool]:
    """(what shares a scale, whether scales are computed while serving) of symmetric 8-bit floats; others are refused.

    An absent table is refused too, by its `num_bits`.
    """
    known = {"num_bits", "type", "symmetric", "strategy", "dynamic", "group_size", "block_structure"}
    _refuse_others(table, known | _SILENT_OF_NUMBERS)
    if table.raw("num_bits") != 8:
        raise table.refuse("num_bits", "8", cure=_CURE)
    if table.raw("type") != "float":
        raise table.refuse("type", "float", cure=_CURE)
    if not table.flag("symmetric", default=True):
        raise table.refuse("symmetric", "true", cure=_CURE)
    strategies = {name: name for name in ("tensor", "channel", "token", "block", "group")}
    strategy = table.choice("strategy", strategies, "missing")
    if strategy == "block" and table.integers("block_structure") != (FP8_BLOCK, FP8_BLOCK):
        raise table.refuse("block_structure", f"[{FP8_BLOCK}, {FP8_BLOCK}]", cure=_CURE)
    if strategy == "group" and table.integer("group_size") != FP8_BLOCK:
        raise table.refuse("group_size", str(FP8_BLOCK), cure=_CURE)
    return strategy, table.flag("dynamic")


def _names(table: ConfigFile, *fields: str) -> tuple[str, ...]:
    """Sorted, so that two spellings of one list are one model."""
    names = {name for field in fields for name in table.texts(field)}
    for name in names:
        if name.startswith(_REGEX):
            try:
                re.compile(name.removeprefix(_REGEX))
            except re.error:
                raise table.refuse(fields[0], "names of modules", "re: and a regular expression") from None
    return tuple(sorted(names))


def _only(table: ConfigFile, name: str, *allowed: str) -> None:
    """Refuses a field that is there and is none of `allowed`."""
    if name in table and table.raw(name) not in allowed:
        raise table.refuse(name, *allowed, cure=_CURE)


def _refuse_others(table: ConfigFile, known: frozenset[str] | set[str]) -> None:
    """Refuses fields that may change what the numbers mean; empty ones do not."""
    for name in sorted(table.names() - known):
        if table.raw(name):
            raise table.refuse(name, "null", cure=_CURE)
