"""Reads JSON that clients send, at a bounded cost: its depth and its numbers of values, objects, lists and keys have
limits, which are checked before a value is made of it. Pure.

The parser holds the interpreter lock from its first byte to its last, also in a thread. A list or an object costs it,
and the garbage collector, a hundred times as much as a byte of text.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson

DEPTH_MAX = 128  # lists and objects within each other
VALUES_MAX = 1 << 19
CONTAINERS_MAX = 1 << 17  # lists and objects
KEYS_MAX = 1 << 18

_STEP_BYTES = 1 << 18  # between two steps other threads may run
_STRUCTURE = b'",:[{'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))


class NotJson(ValueError):
    """The text is no JSON (NaN, lone surrogates and invalid UTF-8 are none), or is nested too deeply."""


class TooMuchJson(ValueError):
    """The text has too many values.

    Attributes:
        allowed: how many there may be.
    """

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class KeyTwice(ValueError):
    """An object has a key twice.

    Attributes:
        key: the key.
        field: where the key is, such as `messages[0].role`.
    """

    def __init__(self, key: str, field: str) -> None:
        super().__init__(key)
        self.key = key
        self.field = field


@dataclass(frozen=True)
class Structure:
    """How many lists and objects, commas and colons a text has outside of its strings."""

    containers: int
    commas: int
    colons: int


def parse_json(text: bytes) -> Any:
    """The value that the text is.

    Raises:
        NotJson, TooMuchJson, KeyTwice: there is none.
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
    if keys < structure.colons:  # of a key that is given twice the parser keeps the last value
        raise _twice(text)
    return value


def measure(text: bytes) -> Structure:
    """The structure of a text; of one that is no JSON, that of its valid beginning or more.

    Raises:
        TooMuchJson: it has more than is allowed; the rest of the text was not looked at.
    """
    containers = commas = colons = 0
    start, inside = 0, False
    while start < len(text):
        step = text[start : start + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # the step would end within an escape
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
        _check_most(containers, "lists and objects", CONTAINERS_MAX)
        _check_most(commas, "JSON values", VALUES_MAX)
        _check_most(colons, "keys", KEYS_MAX)
    return Structure(containers, commas, colons)


def _check_most(count: int, what: str, most: int) -> None:
    if count > most:
        raise TooMuchJson(f"too many {what}", f"up to {most}")


def _levels(value: object) -> Iterator[list[Any]]:
    """The objects and lists of each depth, from the outermost one."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        children = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [child for child in children if isinstance(child, dict | list)]


class _Twice(dict[str, Any]):
    """An object that has this key twice."""

    key: str


def _twice(text: bytes) -> KeyTwice:
    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        twice = _Twice(made)
        twice.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return twice

    level = [("", json.loads(text, object_pairs_hook=make))]
    while level:
        deeper = []
        for field, value in level:
            if isinstance(value, _Twice):
                return KeyTwice(value.key, f"{field}.{value.key}".lstrip("."))
            if isinstance(value, dict):
                deeper += [(f"{field}.{key}".lstrip("."), child) for key, child in value.items()]
            elif isinstance(value, list):
                deeper += [(f"{field}[{index}]", child) for index, child in enumerate(value)]
        level = [(field, child) for field, child in deeper if isinstance(child, dict | list)]
    raise AssertionError("an object with fewer keys than colons has a key twice")
