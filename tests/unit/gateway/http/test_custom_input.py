"""A custom tool's text is read out of JSON as early as possible, however the JSON is cut."""

import json
import string
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.http.custom_input import CustomInput, as_arguments


def read(pieces: list[str]) -> list[str]:
    reader = CustomInput()
    given = [reader.push(piece) for piece in pieces]
    given.append(reader.finish())
    assert reader.text == "".join(given)
    return given


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


@given(
    text=st.text(),
    places=st.lists(st.integers(0, 200)),
    ascii_only=st.booleans(),
    space=st.sampled_from(["", " ", "\n  "]),
)
def test_the_text_does_not_depend_on_the_cuts(text: str, places: list[int], *, ascii_only: bool, space: str) -> None:
    written = f'{space}{{{space}"input"{space}:{space}{json.dumps(text, ensure_ascii=ascii_only)}{space}}}{space}'
    assert "".join(read(cut(written, places))) == text


@given(places=st.lists(st.integers(0, 60)), text=st.text(alphabet=string.printable + '\\"{}:', max_size=60))
def test_anything_is_read_without_an_error(text: str, places: list[int]) -> None:
    assert "".join(read(cut(text, places))) == "".join(read([text]))


def test_the_text_comes_before_the_json_ends() -> None:
    assert read(['{"input": "*** Beg', "in Pa", "tch\\", 'n"}'])[:3] == ["*** Beg", "in Pa", "tch"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"patch": "a"}', "a"),
        ('{"why": "x", "input": "a"}', "a"),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("no JSON", "no JSON"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83dx\\ude00"}', "\ufffdx\ufffd"),
        ('{"input": "a"}, and more "input": "b"', "a"),
        ('{"input": "cut', "cut"),
    ],
)
def test_a_call_of_another_shape_still_has_a_text(written: str, text: str) -> None:
    assert "".join(read([written])) == text


def test_a_long_text_under_another_name_is_read_once() -> None:
    pieces = ['{"patch": "', *["x" * 100] * 2000, '"}']
    assert "".join(read(pieces)) == "x" * 200_000


@given(st.text())
def test_what_a_client_sends_back_is_what_the_model_wrote(text: str) -> None:
    assert "".join(read([as_arguments(text)])) == text
