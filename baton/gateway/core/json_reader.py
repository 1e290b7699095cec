"""Parses JSON from clients at a bounded cost. Pure.

Values, lists, objects and keys are counted before the text is parsed, and the depth afterwards: the parser holds the
interpreter lock from the first byte to the last, even in a thread, and a list or an object costs it and the garbage
collector a hundred times as much as a byte of text.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson

DEPTH_MAX = 128
VALUES_MAX = 1 << 19
CONTAINERS_MAX = 1 << 17  # lists and objects
KEYS_MAX = 1 << 18

_STEP_BYTES = 1 << 18  # other threads may run between two steps
_STRUCTURE = b'",:[{'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))


class NotJson(ValueError):
    """The text is not valid JSON, or is nested too deeply. NaN, lone surrogates and invalid UTF-8 are not valid."""


class TooManyValues(ValueError):
    """The text has too many values, containers or keys.

    Attributes:
        allowed: the limit, such as `up to 131072`.
    """

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class DuplicateKey(ValueError):
    """An object contains a key twice.

    Attributes:
        field: path of the key, such as `messages[0].role`.
    """

    def __init__(self, key: str, field: str) -> None:
        super().__init__(key)
        self.key = key
        self.field = field


@dataclass(frozen=True)
class Structure:
    """Numbers of lists and objects, commas and colons of a text, outside of its strings."""

    containers: int
    commas: int
    colons: int


def parse_json(text: bytes) -> Any:
    """Parses the text.

    Raises:
        NotJson: the text is not valid JSON, or is nested too deeply.
        TooManyValues: the text exceeds a limit.
        DuplicateKey: an object contains a key twice.
    """
    structure = measure(text)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise NotJson(str(error)) from None
    keys = 0
    for depth, level in enumerate(_levels(value), 1):
        if depth > DEPTH_MAX:
            raise NotJson(f"it is nested more than {DEPTH_MAX} deep")
        keys += sum(len(each) for each in level if isinstance(each, dict))
    if keys < structure.colons:  # the parser keeps only the last value of a repeated key
        raise _duplicate_key(text)
    return value


def measure(text: bytes) -> Structure:
    """Counts the structure of a text. For text that is not JSON, the counts cover at least its valid beginning.

    Raises:
        TooManyValues: a limit is exceeded; the rest of the text was not read.
    """
    containers = commas = colons = 0
    start, inside = 0, False
    while start < len(text):
        step = text[start : start + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # else the step would end inside an escape
            step = text[start : start + _STEP_BYTES + 1]
        start += len(step)
        if b"\\" in step:
            step = step.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = step.translate(None, _OTHERS).split(b'"')
        outside = b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
        containers += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        colons += outside.count(b":")
        _check_limit(containers, "lists and objects", CONTAINERS_MAX)
        _check_limit(commas, "JSON values", VALUES_MAX)
        _check_limit(colons, "keys", KEYS_MAX)
    return Structure(containers, commas, colons)


def _check_limit(count: int, what: str, limit: int) -> None:
    if count > limit:
        raise TooManyValues(f"too many {what}", f"up to {limit}")


def _levels(value: object) -> Iterator[list[Any]]:
    """Yields the objects and lists of each depth, outermost first."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        children = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [child for child in children if isinstance(child, dict | list)]


class _DuplicateKeyDict(dict[str, Any]):
    """An object that contained `key` twice."""

    key: str


def _duplicate_key(text: bytes) -> DuplicateKey:
    """Parses the text again, slowly, to find the repeated key for the error."""

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeated = _DuplicateKeyDict(made)
        repeated.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return repeated

    level = [("", json.loads(text, object_pairs_hook=make))]
    while level:
        deeper = []
        for field, value in level:
            if isinstance(value, _DuplicateKeyDict):
                return DuplicateKey(value.key, f"{field}.{value.key}".lstrip("."))
            if isinstance(value, dict):
                deeper += [(f"{field}.{key}".lstrip("."), child) for key, child in value.items()]
            elif isinstance(value, list):
                deeper += [(f"{field}[{index}]", child) for index, child in enumerate(value)]
        level = [(field, child) for field, child in deeper if isinstance(child, dict | list)]
    raise AssertionError("an object with fewer keys than colons has a key twice")
