"""Rotary embeddings, and the reader of their tables in config.json.

Unsupported types and fields are errors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, TypeAlias

from annotated_types import Ge, Le
from pydantic import ConfigDict

from baton.core.errors import ConfigError
from baton.models.config.fields import CONTEXT_MAX, AtLeastZero, Count, Fields, Fraction, Integers, Numbers, Positive
from baton.models.config.file import ConfigFile

_Weight: TypeAlias = Annotated[float, Ge(0), Le(1000)]  # YaRN's factor of scores grows with its square
_TURNS_MAX = 1e6  # of YaRN's betas; far beyond it the index of the pair that turns so often is not finite


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling. It keeps wavelengths below `original / high_freq_factor` and stretches those above `original /
    low_freq_factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling (arXiv 2309.00071). It keeps dimensions that turn more than `beta_fast` times over the original
    context, and stretches those that turn less than `beta_slow` times.
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
        """Factor of MLA's softmax scale, which covers all dimensions of queries and keys."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class AlphaScaling:
    """A scaling that enlarges the base by a fixed factor: `theta * alpha ** (dim / (dim - 2))`."""

    alpha: float


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE's scaling (arXiv 2402.13753). Each pair of channels turns more slowly by its own factor, and there are
    two sets of factors.

    transformers uses the long set for sequences of more than `original_max_position_embeddings` tokens, and recomputes
    all keys when a sequence grows past that length. Here all tokens of all requests use one set, because keys in a
    cache or from another node do not fit queries that turn by the other set.

    Attributes:
        short_scale, long_scale: factors of cosines and sines.
        long: whether the long set is used; `ModelConfig.for_context` chooses.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    short_scale: float
    long_scale: float
    original_max_position_embeddings: int
    long: bool = False

    @property
    def factors(self) -> tuple[float, ...]:
        return self.long_factors if self.long else self.short_factors

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        return self.long_scale if self.long else self.short_scale


@dataclass(frozen=True)
class ProportionalScaling:
    """A scaling in which only the first `turning` pairs of channels turn, at their speed in a rotary embedding of all
    channels divided by `factor`."""

    factor: float
    turning: int


Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | AlphaScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding of the first `dim` channels of each head; the others do not turn.

    With `interleaved`, channels 2i and 2i+1 turn together; otherwise channels i and i + dim/2.
    """

    dim: int
    theta: float
    interleaved: bool
    scaling: Scaling | None


class _RopeFields(Fields):
    """The fields of every rope type. A type's class refuses the fields of other types.

    `mrope_section` assigns pairs of channels to the time, height and width of a token's place in an image. For a text
    token all three are its position, so sections change nothing.
    """

    model_config = ConfigDict(extra="forbid")

    rope_type: object = None
    type: object = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Fraction | None = None
    mrope_section: Integers | None = None
    mrope_interleaved: bool = False

    def scaling(self, *, dim: int, max_position_embeddings: int) -> Scaling | None:
        """Returns how frequencies are stretched; None if they are not."""
        del dim, max_position_embeddings
        return None

    def check_sections(self, dim: int) -> None:
        if self.mrope_section is not None and sum(self.mrope_section) != dim // 2:
            raise self.refuse("mrope_section", f"integers whose sum is {dim // 2}, the pairs of rotary channels")


class _LinearFields(_RopeFields):
    factor: Positive

    def scaling(self, *, dim: int, max_position_embeddings: int) -> Scaling:
        del dim, max_position_embeddings
        return LinearScaling(self.factor)


class _DynamicFields(_RopeFields):
    """The fields of type dynamic. transformers enlarges the base for sequences longer than `max_position_embeddings`,
    by their length at each step. Cached keys would then have turned with another base, so such sequences are not
    served, and `factor` has no effect. With `alpha` the base is constant. The other fields are YaRN's; Hunyuan's files
    have them unused.
    """

    factor: Positive = 1.0
    alpha: AtLeastZero = 0.0
    beta_fast: AtLeastZero = 0.0
    beta_slow: AtLeastZero = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def scaling(self, *, dim: int, max_position_embeddings: int) -> Scaling | None:
        del max_position_embeddings
        if self.alpha and dim == 2:
            raise self.refuse("alpha", "null", cure="a single pair of channels has no base to enlarge")
        return AlphaScaling(self.alpha) if self.alpha else None


class _Llama3Fields(_RopeFields):
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count | None = None

    def scaling(self, *, dim: int, max_position_embeddings: int) -> Scaling:
        del dim
        low, high = self.low_freq_factor, self.high_freq_factor
        if high < low:
            raise self.refuse("high_freq_factor", f"at least low_freq_factor, {low}")
        return Llama3Scaling(self.factor, low, high, self.original_max_position_embeddings or max_position_embeddings)


class _YarnFields(_RopeFields):
    factor: Positive | None  # null: the ratio of the two contexts
    original_max_position_embeddings: Count | None = None
    beta_fast: AtLeastZero = 0.0  # 0: 32
    beta_slow: AtLeastZero = 0.0  # 0: 1
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: _Weight = 0.0
    mscale_all_dim: _Weight = 0.0

    def scaling(self, *, dim: int, max_position_embeddings: int) -> Scaling:
        del dim
        original = self.original_max_position_embeddings or max_position_embeddings
        beta_fast, beta_slow = self.beta_fast or 32.0, self.beta_slow or 1.0
        for name, turns in (("beta_fast", beta_fast), ("beta_slow", beta_slow)):
            if not 1 / _TURNS_MAX <= turns <= _TURNS_MAX:
                raise self.refuse(name, f"0 or {1 / _TURNS_MAX:g} to {_TURNS_MAX:g}", cure="common are 32 and 1")
        factor = self.factor or max_position_embeddings / original
        if factor * original > CONTEXT_MAX:
            raise self.refuse("factor", f"up to {CONTEXT_MAX / original:g}, which makes {CONTEXT_MAX} tokens")
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=self.truncate,
            attention_factor=self.attention_factor,
            mscale=self.mscale,
            mscale_all_dim=self.mscale_all_dim,
        )


class _LongRopeFields(_RopeFields):
    short_factor: Numbers
    long_factor: Numbers
    original_max_position_embeddings: Count | None = None
    factor: Positive | None = None
    attention_factor: Positive | None = None
    short_mscale: Positive | None = None
    long_mscale: Positive | None = None

    def scaling(self, *, dim: int, max_position_embeddings: int) -> Scaling:
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != dim // 2:
                raise self.refuse(name, f"{dim // 2} numbers, one for each pair of rotary channels")
        original = self.original_max_position_embeddings or max_position_embeddings
        scale = self.attention_factor or self._scale(self.factor or max_position_embeddings / original, original)
        return LongRopeScaling(
            short_factors=self.short_factor,
            long_factors=self.long_factor,
            short_scale=self.short_mscale or scale,
            long_scale=self.long_mscale or scale,
            original_max_position_embeddings=original,
        )

    def _scale(self, factor: float, original: int) -> float:
        if factor <= 1:
            return 1.0
        if original == 1:
            raise self.refuse("original_max_position_embeddings", "an integer of at least 2")
        return math.sqrt(1 + math.log(factor) / math.log(original))


_TYPES: Mapping[str, type[_RopeFields]] = MappingProxyType(
    {
        "default": _RopeFields,
        "mrope": _RopeFields,
        "linear": _LinearFields,
        "dynamic": _DynamicFields,
        "llama3": _Llama3Fields,
        "yarn": _YarnFields,
        "longrope": _LongRopeFields,
        "su": _LongRopeFields,
    }
)


def read_rope(
    table: ConfigFile,
    *,
    dim: int,
    theta: float,
    interleaved: bool,
    max_position_embeddings: int,
    original_max_position_embeddings: int | None = None,
    partial_rotary_factor: float | None = None,
) -> RopeConfig:
    """Returns the rotary embedding that `table` describes.

    Args:
        dim: channels of a head that can turn.
        theta: the base, unless the table has one.
        max_position_embeddings: the original context, unless the table has one.
        original_max_position_embeddings: the original context that some files have next to the table. It takes
            precedence over the table's, as in transformers.
        partial_rotary_factor: the part of `dim` that turns, unless the table has one; None: all of it turns, and a
            table with another value is refused.

    Raises:
        ConfigError: a type or field is unsupported, or a value is wrong.
    """
    fields_class = _fields_class(table)
    name = "original_max_position_embeddings"
    if original_max_position_embeddings is not None and name in fields_class.model_fields:
        table = table.with_values({name: original_max_position_embeddings})
    fields = fields_class.read(table)
    if partial_rotary_factor is None and fields.partial_rotary_factor not in (None, 1):
        raise fields.refuse("partial_rotary_factor", "1.0")
    dim = int(dim * (fields.partial_rotary_factor or partial_rotary_factor or 1.0))
    if dim % 2 or not dim:
        raise ConfigError(f"{table.where}: rotary dimensions are {dim}", field="head_dim", value=dim, allowed=("even",))
    fields.check_sections(dim)
    scaling = fields.scaling(dim=dim, max_position_embeddings=max_position_embeddings)
    theta = fields.rope_theta or theta
    if isinstance(scaling, YarnScaling) and theta <= 1:  # no pair is the first to be stretched, since all turn alike
        where = f"{table.where}: yarn"
        raise ConfigError(where, field="rope_theta", value=theta, allowed=("a number above 1",))
    return RopeConfig(dim, theta, interleaved, scaling)


def _fields_class(table: ConfigFile) -> type[_RopeFields]:
    name = "type" if table.raw("rope_type") is None else "rope_type"
    kind = table.raw(name)
    if kind is None:
        return _RopeFields
    if not isinstance(kind, str) or kind not in _TYPES:
        raise table.refuse(name, *_TYPES)
    return _TYPES[kind]
