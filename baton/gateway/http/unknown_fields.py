"""Collects the unknown fields of one body, where the setting `unknown_fields` accepts them without effect. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_MAX = 16  # an answer has no more warnings
_NAME_CHARACTERS_MAX = 80
_SEARCHED_MAX = 10_000  # objects and lists; a field in a later one is named without its place


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
        self._root: Mapping[str, Any] | None = None
        self._shown: list[_Unknown] = []

    @property
    def full(self) -> bool:
        """Whether further fields are only counted, so the name that was meant need not be searched for them."""
        return len(self._shown) >= _SHOWN_MAX

    def begin(self, root: Mapping[str, Any]) -> None:
        """Takes the object that is validated as the whole body, whose fields have no place but their name."""
        self._root = root

    def add(self, owner: Mapping[str, Any], name: str, nearest: str) -> None:
        self.count += 1
        if not self.full:
            self._shown.append(_Unknown(owner, name, nearest))

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        """Returns a sentence for each of the first fields, with its place in the body."""
        owners = {id(each.owner) for each in self._shown if each.owner is not self._root}
        places = _places(body, owners)
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
    name = name if name.strip() else repr(name)
    written = f"{place}.{name}" if place else name
    cure = f"; did you mean {field.nearest}?" if field.nearest else ""
    return f"{written} is not a parameter of this endpoint and has no effect{cure}"


def _places(body: Mapping[str, Any], owners: set[int]) -> dict[int, str]:
    """Returns where these objects, given by `id`, are in the body, such as `tools[0].function`.

    Looks at the first objects and lists only, because a body may have 500,000 of them.
    """
    places: dict[int, str] = {}
    looked = 0
    inside = [_members("", body)]
    while inside and len(places) < len(owners) and looked < _SEARCHED_MAX:
        place, value = next(inside[-1], ("", None))
        if value is None:
            inside.pop()
            continue
        looked += 1
        if id(value) in owners:
            places[id(value)] = place
        inside.append(_members(place, value))
    return places


def _members(place: str, value: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the objects and lists in an object or list, with their places."""
    if isinstance(value, Mapping):
        dot = f"{place}." if place else ""
        for name, each in value.items():
            if isinstance(each, dict | list):
                yield f"{dot}{name[:_NAME_CHARACTERS_MAX]}", each
        return
    for index, each in enumerate(value):
        if isinstance(each, dict | list):
            yield f"{place}[{index}]", each
