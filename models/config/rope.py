"""Rotary embeddings, and the tables of config.json that describe them.

An unsupported type or field is an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from pydantic import ConfigDict

from baton.errors import ConfigError
from models.config.fields import Count, Fields, Positive
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
        """Factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_scale(self) -> float:
        """Factor of MLA's softmax scale: the part that covers all dimensions, of queries and of keys."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `turning` pairs of channels turn, as fast as in a rotary embedding of all channels, divided by
    `factor`."""

    factor: float
    turning: int


Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding of the first `dim` channels of each head; the others do not turn.

    `interleaved`: channels 2i and 2i+1 turn together; otherwise channels i and i + dim/2.
    """

    dim: int
    theta: float
    interleaved: bool
    scaling: Scaling | None


class _RopeFields(Fields):
    """Fields of every rope type; those of another type are refused."""

    model_config = ConfigDict(extra="forbid")

    rope_type: object = None
    type: object = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float = 1.0

    def scaling(self, max_position_embeddings: int) -> Scaling | None:
        """How frequencies are stretched; None where they are not."""
        del max_position_embeddings
        return None


class _LinearFields(_RopeFields):
    factor: Positive

    def scaling(self, max_position_embeddings: int) -> Scaling:
        del max_position_embeddings
        return LinearScaling(self.factor)


class _Llama3Fields(_RopeFields):
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count | None = None

    def scaling(self, max_position_embeddings: int) -> Scaling:
        low, high = self.low_freq_factor, self.high_freq_factor
        if high < low:
            raise self.refuse("high_freq_factor", f"at least low_freq_factor, {low}")
        return Llama3Scaling(self.factor, low, high, self.original_max_position_embeddings or max_position_embeddings)


class _YarnFields(_RopeFields):
    factor: Positive
    original_max_position_embeddings: Count | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def scaling(self, max_position_embeddings: int) -> Scaling:
        return YarnScaling(
            factor=self.factor,
            original_max_position_embeddings=self.original_max_position_embeddings or max_position_embeddings,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            attention_factor=self.attention_factor,
            mscale=self.mscale,
            mscale_all_dim=self.mscale_all_dim,
        )


_TYPES: Mapping[str, type[_RopeFields]] = MappingProxyType(
    {"default": _RopeFields, "linear": _LinearFields, "llama3": _Llama3Fields, "yarn": _YarnFields}
)


def read_rope(
    table: ConfigFile,
    *,
    dim: int,
    theta: float,
    interleaved: bool,
    max_position_embeddings: int,
    original_max_position_embeddings: int | None = None,
) -> RopeConfig:
    """The rotary embedding of `dim` channels that `table` describes.

    Args:
        theta: the base, unless the table has one.
        max_position_embeddings: the original context, unless the table has one.
        original_max_position_embeddings: the original context that some files have next to the table. It takes
            precedence over the table, as it does in transformers.

    Raises:
        ConfigError: an unsupported type or field, or a wrong value.
    """
    if dim % 2:
        raise ConfigError(f"{table.where}: rotary dimensions are {dim}", field="head_dim", value=dim, allowed=("even",))
    fields_class = _fields_class(table)
    name = "original_max_position_embeddings"
    if original_max_position_embeddings is not None and name in fields_class.model_fields:
        table = table.with_values({name: original_max_position_embeddings})
    fields = fields_class.read(table)
    if fields.partial_rotary_factor != 1.0:
        raise fields.refuse("partial_rotary_factor", "1.0")
    return RopeConfig(dim, fields.rope_theta or theta, interleaved, fields.scaling(max_position_embeddings))


def _fields_class(table: ConfigFile) -> type[_RopeFields]:
    name = "type" if table.raw("rope_type") is None else "rope_type"
    kind = table.raw(name)
    if kind is None:
        return _RopeFields
    if not isinstance(kind, str) or kind not in _TYPES:
        raise table.refuse(name, *_TYPES)
    return _TYPES[kind]
