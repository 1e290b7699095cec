"""Collects the unknown fields of one body, where the setting `unknown_fields` accepts them without effect. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_MAX = 16  # an answer has no more warnings
_NAME_CHARACTERS_MAX = 80


@dataclass(frozen=True)
class _Unknown:
    """An unknown field: the object that has it, its name, and the name that was probably meant."""

    owner: Mapping[str, Any]
    name: str
    nearest: str


class UnknownFields:
    """The unknown fields of one body.

    Attributes:
        count: number of unknown fields so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[_Unknown] = []

    @property
    def full(self) -> bool:
        """Whether further fields are only counted, so the name that was meant need not be searched for them."""
        return len(self._shown) >= _SHOWN_MAX

    def add(self, owner: Mapping[str, Any], name: str, nearest: str) -> None:
        self.count += 1
        if not self.full:
            self._shown.append(_Unknown(owner, name, nearest))

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        """Returns a sentence for each of the first fields, with its place in the body."""
        places = _places(body, {id(each.owner) for each in self._shown})
        return [_sentence(places.get(id(each.owner), ""), each) for each in self._shown]


class JsonBody(dict[str, Any]):
    """A parsed body, which carries what `checked` does with unknown fields.

    Attributes:
        unknown: collects them; None: they are refused.
    """

    def __init__(self, members: Mapping[str, Any], unknown: UnknownFields | None) -> None:
        super().__init__(members)
        self.unknown = unknown


def _sentence(place: str, field: _Unknown) -> str:
    name = field.name[:_NAME_CHARACTERS_MAX]
    written = f"{place}.{name}" if place else name
    cure = f"; did you mean {field.nearest}?" if field.nearest else ""
    return f"{written} is not a parameter of this endpoint and has no effect{cure}"


def _places(body: Mapping[str, Any], owners: set[int]) -> dict[int, str]:
    """Returns where these objects, given by `id`, are in the body, such as `tools[0].function`; the body itself is
    nowhere.
    """
    places: dict[int, str] = {}
    rest: list[tuple[str, Any]] = list(body.items())
    while rest and len(places) < len(owners):
        place, value = rest.pop()
        if isinstance(value, dict):
            if id(value) in owners:
                places[id(value)] = place
            rest.extend((f"{place}.{name[:_NAME_CHARACTERS_MAX]}", inner) for name, inner in value.items())
        elif isinstance(value, list):
            rest.extend(_elements(place, value))
    return places


def _elements(place: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{place}[{index}]", value) for index, value in enumerate(values) if isinstance(value, dict | list)]
