"""JSON of clients is read at a bounded cost: what is too much is refused before the parser sees it."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import baton.gateway.core.json_reader as reader
from baton.gateway.core.json_reader import (
    CONTAINERS_MAX,
    KEYS_MAX,
    VALUES_MAX,
    DuplicateKey,
    NotJson,
    TooManyValues,
    measure,
    parse_json,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text('\\",:[]{}ab\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def counted(value: object) -> tuple[int, int, int]:
    """Containers, commas and colons that the text of a value has."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    own = (1, max(0, len(value) - 1), len(value) if isinstance(value, dict) else 0)
    containers, commas, colons = (sum(column) for column in zip(own, *inner, strict=True))
    return containers, commas, colons


@pytest.mark.parametrize("step_bytes", [1, 2, 3, 7, 1 << 18])
@settings(deadline=None)
@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_the_structure_is_counted_outside_of_strings_wherever_the_text_is_cut(
    step_bytes: int, value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_STEP_BYTES", step_bytes)
        structure = measure(text)
        assert parse_json(text) == orjson.loads(text)
    assert (structure.containers, structure.commas, structure.colons) == counted(value)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * CONTAINERS_MAX,
        b"[" + b"{}," * CONTAINERS_MAX,
        b"[" + b"[" * 120 * (CONTAINERS_MAX // 100),
        b'[{"a":[[{}]]}' * CONTAINERS_MAX,
        b"[" + b"1," * (VALUES_MAX + 1),
        b"[" + b'"a",' * (VALUES_MAX + 1),
        b"[" + b'"\\\\\\"",' * (VALUES_MAX + 1),
        b"{" + b'"a":' * (KEYS_MAX + 1),
    ],
)
def test_too_much_is_refused_before_it_is_parsed(text: bytes) -> None:
    """Its end is no JSON, which nobody finds out."""
    with pytest.raises(TooManyValues):
        parse_json(text + b"\xff")


def test_the_rest_of_too_much_is_not_counted() -> None:
    class Counting(bytes):
        """Counts the bytes that are read."""

        read = 0

        def __getitem__(self, key: Any) -> Any:
            part = super().__getitem__(key)
            Counting.read += len(part)
            return part

    text = Counting(b"[" + b"[]," * CONTAINERS_MAX + b" " * (8 << 20))
    with pytest.raises(TooManyValues):
        measure(text)
    assert Counting.read < 1 << 20


@pytest.mark.parametrize("text", [b'"' + b'\\",[' * 300_000 + b'"', b'"' + b"[{,:" * 300_000 + b'"'])
def test_a_text_may_have_any_number_of_marks(text: bytes) -> None:
    assert len(parse_json(text)) == 300_000 * (3 if b"\\" in text else 4)


@pytest.mark.parametrize("text", [b"", b"{", b"NaN", b'"\\ud800"', b'"\xff"', b"[" * 129 + b"]" * 129])
def test_what_is_no_json_is_no_json(text: bytes) -> None:
    with pytest.raises(NotJson):
        parse_json(text)


def test_the_deepest_value_is_read() -> None:
    assert parse_json(b"[" * 128 + b"]" * 128)


def test_a_key_given_twice_is_named_with_its_place() -> None:
    with pytest.raises(DuplicateKey) as caught:
        parse_json(b'[{"a": {"b": 1, "c": 2, "b": 1}}]')
    assert (caught.value.key, caught.value.field) == ("b", "[0].a.b")
