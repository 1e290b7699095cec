"""What the configs of all schemes share: strict fields, and names of modules that are not quantized. Free of torch."""

import re
from typing import ClassVar, Self

from pydantic import ConfigDict

from baton.models.config.fields import Fields
from baton.models.config.file import ConfigFile, shown
from baton.models.config.patterns import may_hang

CURE = (
    "this quantization is not supported; choose the checkpoint in bfloat16, or one in fp8 (e4m3), compressed-tensors "
    "int8 or int4, AWQ or GPTQ"
)
# Fields that say how a file was made or which kernels other programs take.
SILENT = frozenset({"quant_method", "global_compression_ratio", "version", "dequantize", "run_compressed"})
_REGEX = "re:"
_FORKS_MAX = 6  # of a pattern; published ones have up to three


def leaves_out(patterns: tuple[str, ...], name: str) -> bool:
    """Whether one of the patterns names the module `name`, a module that contains it, or its end: publishers use all
    three. Regular expressions begin with `re:`."""
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    # The whole name, a module that contains it, or its end: publishers use all three.
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


class QuantizationFields(Fields):
    """Unknown fields may change what the numbers mean, so they are refused unless they are empty.

    Attributes:
        silent: fields that say how a file was made, and nothing about what it holds.
    """

    model_config = ConfigDict(extra="forbid")
    cure: ClassVar[str] = CURE
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
                except (re.error, OverflowError):
                    raise self.refuse(field, "names of modules", "re: and a regular expression") from None
                if may_hang(name.removeprefix(_REGEX), forks_max=_FORKS_MAX):
                    cure = f"{shown(name)} could take too long to match; list the modules by name"
                    allowed = f"re: and up to {_FORKS_MAX} groups and repeats, no repeated group"
                    raise self.refuse(field, "names of modules", allowed, cure=cure)
        return tuple(sorted(set(names)))
