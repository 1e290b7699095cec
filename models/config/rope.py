"""Rotary embeddings as a checkpoint's config.json describes them, in both of its spellings.

Newer files have `rope_parameters` with the base inside; older ones `rope_theta`, and `rope_scaling` where the
frequencies are stretched. A type or field that we do not compute is an error. No torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.errors import ConfigError
from models.config.file import ConfigFile


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths below `original / high_freq_factor` are kept, those above `original / low_freq_factor` stretched."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). Dimensions that turn more than `beta_fast` times over the original context are kept,
    those that turn less than `beta_slow` times are stretched.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None
    mscale: float
    mscale_all_dim: float

    @property
    def rotary_scale(self) -> float:
        """What cosines and sines are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_scale(self) -> float:
        """What MLA multiplies the softmax scale with: the part that covers all dimensions, on query and on key."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class RopeConfig:
    """`interleaved`: channels 2i and 2i+1 turn together; otherwise channel i and i + dim/2."""

    dim: int
    theta: float
    interleaved: bool
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None


_ORIGINAL = "original_max_position_embeddings"
_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": _COMMON_FIELDS,
        "linear": _COMMON_FIELDS | {"factor"},
        "llama3": _COMMON_FIELDS | {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
        "yarn": _COMMON_FIELDS
        | {"factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate"}
        | {"attention_factor", "mscale", "mscale_all_dim"},
    }
)


def read_rope(file: ConfigFile, *, dim: int, interleaved: bool, max_position_embeddings: int) -> RopeConfig:
    """The rotary embedding of `dim` channels that `file` describes.

    Raises:
        ConfigError: a type or field that we do not compute, or a wrong value.
    """
    if dim % 2:
        raise ConfigError(f"{file.where}: rotary dimensions are {dim}", field="head_dim", value=dim, allowed=("even",))
    refuse_both_spellings(file)
    table = _with_original(file.table("rope_parameters" if "rope_parameters" in file else "rope_scaling"), file)
    theta = file.positive("rope_theta", 10_000.0)
    return read_rope_table(
        table, dim=dim, theta=theta, interleaved=interleaved, max_position_embeddings=max_position_embeddings
    )


def refuse_both_spellings(file: ConfigFile) -> None:
    if "rope_parameters" in file and "rope_scaling" in file:
        raise file.refuse("rope_scaling", "null", cure="keep either rope_parameters or rope_scaling")


def _with_original(table: ConfigFile, file: ConfigFile) -> ConfigFile:
    """Some files have the original context beside the table: that one counts, as for those who load them elsewhere."""
    if _ORIGINAL not in file or _ORIGINAL not in _FIELDS[_kind(table)]:
        return table
    return table.with_values({_ORIGINAL: file.raw(_ORIGINAL)})


def _kind(table: ConfigFile) -> str:
    name = "rope_type" if "rope_type" in table else "type"
    return table.choice(name, {kind: kind for kind in _FIELDS}, "default")


def read_rope_table(
    table: ConfigFile, *, dim: int, theta: float, interleaved: bool, max_position_embeddings: int
) -> RopeConfig:
    """The rotary embedding that `table` describes; `theta` is the base if it names none."""
    kind = _kind(table)
    fields = _FIELDS[kind]
    if unknown := sorted(table.names() - fields):
        raise table.refuse(unknown[0], "null", cure=f"this rope type knows {', '.join(sorted(fields))}")
    if table.number("partial_rotary_factor", 1.0) != 1.0:
        raise table.refuse("partial_rotary_factor", "1.0")
    theta = table.positive("rope_theta", theta)
    return RopeConfig(dim, theta, interleaved, _scaling(table, kind, max_position_embeddings))


def _scaling(
    table: ConfigFile, kind: str, max_position_embeddings: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    if kind == "default":
        return None
    factor = table.positive("factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = table.integer(_ORIGINAL, max_position_embeddings)
    if kind == "llama3":
        low, high = table.positive("low_freq_factor"), table.positive("high_freq_factor")
        if high < low:
            raise table.refuse("high_freq_factor", f"at least low_freq_factor, {low}")
        return Llama3Scaling(factor, low, high, original)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=table.positive("beta_fast", 32.0),
        beta_slow=table.positive("beta_slow", 1.0),
        truncate=table.flag("truncate", default=True),
        attention_factor=table.positive("attention_factor") if "attention_factor" in table else None,
        mscale=table.number("mscale", 0.0),
        mscale_all_dim=table.number("mscale_all_dim", 0.0),
    )
