"""`SamplingField` declares one sampling parameter: its name, bounds and meaning at every door. Knows no parameter."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from baton.core.errors import InvalidRequest, shortened
from baton.core.types import Grammar

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
_SHOWN_CHARACTERS = 100


class Door(StrEnum):
    """A door that takes sampling parameters. Baton's own messages and Python client are not listed: they take all of
    them."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    VLLM = "vLLM's gRPC"
    GENERATE_COMMAND = "baton generate"
    CHAT_COMMAND = "baton chat"
    GENERATION_CONFIG = "generation_config.json"


OPENAI = (Door.CHAT, Door.COMPLETIONS)
HTTP = (*OPENAI, Door.RESPONSES, Door.MESSAGES)
COMMANDS = (Door.GENERATE_COMMAND, Door.CHAT_COMMAND)
EVERYWHERE = (*HTTP, Door.VLLM, *COMMANDS)


class Kind(Enum):
    """Shape of a value. Each door has one table from kinds to its own types."""

    INTEGER = "an integer"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXTS = "a list of non-empty strings"
    TOKENS = "a list of token ids"
    BIASES = "numbers by token id"
    GRAMMAR = "a Grammar"


class Bounds(NamedTuple):
    """The allowed numbers, and how errors and help say it.

    Args:
        above: `low` itself is not allowed.
    """

    low: float
    high: float
    text: str
    above: bool = False

    def hold(self, value: Any) -> bool:
        # NOTE: every comparison with NaN is false, so NaN is outside all bounds.
        return bool((self.low < value if self.above else self.low <= value) and value <= self.high)


class Lenient(NamedTuple):
    """Integers below the bounds that JSON may have anyway: from `low` on they are read modulo `modulus`, or as 0
    without one."""

    low: int
    modulus: int | None = None

    def read(self, value: int) -> int:
        return max(value, 0) if self.modulus is None else value % self.modulus


@dataclass(frozen=True)
class SamplingField:
    """One sampling parameter.

    Args:
        meaning: what the parameter does, for pages and help.
        doors: doors that take it.
        bounds: bounds of the number, or of each number in a list or mapping.
        renamed: its names at doors that call it otherwise.
        by_hand: doors whose own code declares and translates it, since it has another form there.
        items_max: most items of a list or mapping.
        lenient: further integers that JSON may have.
        unset: what happens without it, where the default does not say so.
        name, kind, default: those of the declaration; `sampling_table` fills them in.
    """

    meaning: str
    bounds: Bounds | None = None
    doors: Collection[Door] = EVERYWHERE
    renamed: Mapping[Door, str] = field(default_factory=lambda: MappingProxyType({}))
    by_hand: Collection[Door] = ()
    items_max: int | None = None
    lenient: Lenient | None = None
    unset: str = ""
    name: str = ""
    kind: Kind = Kind.NUMBER
    default: Any = None

    def name_at(self, door: Door) -> str:
        return self.renamed.get(door, self.name)

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        return self.kind.value if self.bounds is None else self.bounds.text

    def check(self, value: Any) -> None:
        """Checks a value's type and bounds.

        Raises:
            InvalidRequest: the value has another type or is out of bounds; names it.
        """
        if self.kind is Kind.BIASES:
            if not isinstance(value, Mapping):
                raise self._wrong(self.name, value)
            for key, each in value.items():
                self._check_one(f"{self.name}[{key}]", each, ok=_is_token(key))
        elif self.kind in (Kind.TEXTS, Kind.TOKENS):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise self._wrong(self.name, value)
            for each in value:
                self._check_one(self.name, each)
        else:
            self._check_one(self.name, value)

    def _check_one(self, name: str, value: Any, *, ok: bool = True) -> None:
        if not (ok and _IS_KIND[self.kind](value) and (self.bounds is None or self.bounds.hold(value))):
            raise self._wrong(name, value)

    def _wrong(self, name: str, value: Any) -> InvalidRequest:
        shown = str(value) if isinstance(value, Real) else shortened(repr(value), _SHOWN_CHARACTERS)
        return InvalidRequest(f"{name} is {shown}", field=name, value=value, allowed=(self.allowed,))


def sampling_table(declared: type[Any]) -> Mapping[str, SamplingField]:
    """The fields of a dataclass whose types are annotated with a `SamplingField`, by name."""
    hints = get_type_hints(declared, include_extras=True)
    table = {}
    for each in fields(declared):
        (found,) = hints[each.name].__metadata__
        default = each.default_factory() if callable(each.default_factory) else each.default
        kind = _KINDS[hints[each.name].__origin__]
        table[each.name] = replace(found, name=each.name, kind=kind, default=default)
    return MappingProxyType(table)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Real) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return _is_integer(value) and 0 <= value <= U32_MAX


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_IS_KIND: Mapping[Kind, Callable[[Any], bool]] = MappingProxyType(
    {
        Kind.INTEGER: _is_integer,
        Kind.NUMBER: _is_number,
        Kind.FLAG: lambda value: isinstance(value, bool),
        Kind.TEXTS: _is_text,
        Kind.TOKENS: _is_token,
        Kind.BIASES: _is_number,
        Kind.GRAMMAR: lambda value: isinstance(value, Grammar),
    }
)
_KINDS: Mapping[Any, Kind] = MappingProxyType(
    {
        int: Kind.INTEGER,
        int | None: Kind.INTEGER,
        float: Kind.NUMBER,
        bool: Kind.FLAG,
        tuple[str, ...]: Kind.TEXTS,
        tuple[int, ...]: Kind.TOKENS,
        Mapping[int, float]: Kind.BIASES,
        Grammar | None: Kind.GRAMMAR,
    }
)
FINITE = math.nextafter(math.inf, 0)
