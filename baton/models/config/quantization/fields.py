"""The parts that the configs of all schemes share: strict fields, and names of unquantized modules. It imports no
torch."""

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
# Fields about how a file was made, or about other programs' kernels.
SILENT = frozenset({"quant_method", "global_compression_ratio", "version", "dequantize", "run_compressed"})
_REGEX = "re:"
_FORKS_MAX = 6  # per pattern; published patterns have up to three


def leaves_out(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a pattern names the module `name`. Regular expressions begin with `re:`."""
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    # Publishers write the whole name, a module that contains it, or its end.
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


class QuantizationFields(Fields):
    """Base of quantization fields. Unknown fields may change what the numbers mean, so they are refused unless they are
    empty.

    Attributes:
        silent: fields about how a file was made, which do not affect its content.
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
        """Returns module names, sorted, so that the order of the list does not change the model's identity."""
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
