"""JSON as models write it, rewritten to valid JSON."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.text.chat.parsing.cursor import Markers
from baton.gateway.text.chat.parsing.json_rewriter import DEPTH_MAX, JsonRewriter
from baton.gateway.text.chat.parsing.lenient_json import MENDED_CHARS_MAX, ArgumentReader, rewritten

ENDS = Markers("</t>")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *"{}[]:,\"'\\ \n", '"a"', "1", "tr", "true", "-", "\\u", "d83d", "\\ude00", "</t>", "<", "x y", "\ud800",
            "é", "NaN", "1e999", '"b": ', "None", "\x00",
        ]
    ),
    max_size=25,
).map("".join)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from([None, 2]))
def test_valid_json_stays_as_it_is(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert rewritten(text) == text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from("{["), FRAGMENTS, st.lists(st.integers(0, 60), max_size=12))
def test_anything_becomes_valid_json_however_it_was_cut(bracket: str, rest: str, places: list[int]) -> None:
    text = bracket + rest
    rewriter = JsonRewriter(ENDS)
    end = rewriter.read(text, 0, last=True)
    rewriter.complete()
    whole = rewriter.take()
    json.loads(whole, parse_constant=not_json)
    whole.encode()

    rewriter = JsonRewriter(ENDS)
    position, written = 0, ""
    for _, place in pairwise([0, *sorted({min(place, len(text)) for place in places})]):
        position = rewriter.read(text[:place], position)
        written += rewriter.take()
        assert whole.startswith(written)
        so_far = written + rewriter.held()
        assert so_far == written or json.loads(rewritten(so_far)) is not None
    position = rewriter.read(text, position, last=True)
    rewriter.complete()
    assert (written + rewriter.take(), position) == (whole, end)


def not_json(constant: str) -> object:
    raise AssertionError(constant)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": "x\ny\x00"}', '{"a": "x\\ny\\u0000"}'),
        ('{"a": tr', '{"a": true}'),
        ('{"a": 1.', '{"a": 1}'),
        ('{"a": "x" "b": 1}', '{"a": "x" ,"b": 1}'),
        ("{'a': 'it's', b: True, \"c\": NaN}", '{"a": "it\'s", "b": true, "c": null}'),
        ('{"a": New York, "b": [1 2]}', '{"a": "New York", "b": ["1 2"]}'),
        ('{"a": [1, 2}', '{"a": [1, 2]}'),
        ('{"a": 1]}', '{"a": 1}'),
        ('{"a"', '{"a": null}'),
        ('{"a":, "b"}', '{"a":null, "b": null}'),
        ('{"a": "\\ud83d', '{"a": "\ufffd"}'),
        ('{"a": "\\ud83d\\ude00 \\udc00 \\d \\u12"}', '{"a": "\\ud83d\\ude00 \ufffd \\\\d \\\\u12"}'),
        ('{"a": "say "hi" now"}', '{"a": "say \\"hi\\" now"}'),
        ('{"a": 1e999, "b": 007, "c": .5, "d": 0x1F}', '{"a": null, "b": 7, "c": 0.5, "d": "0x1F"}'),
        ('{{"a":1}}', '{"a":1}'),
        ('{"a": [1,,2,], }', '{"a": [1,2] }'),
        ('{"a" : {b 1}}', '{"a" : {"b 1": null}}'),
    ],
)
def test_what_is_wrong_is_mended(text: str, expected: str) -> None:
    assert rewritten(text) == expected


def test_a_marker_ends_a_value_but_for_one_in_a_string() -> None:
    text = '{"a": "</t>", "b": [1</t> more'
    rewriter = JsonRewriter(ENDS)
    assert text[rewriter.read(text, 0) :] == "</t> more"
    assert (rewriter.take(), rewriter.closed) == ('{"a": "</t>", "b": [1]}', False)


def test_what_is_nested_too_deeply_is_null() -> None:
    value = json.loads(rewritten("[" * DEPTH_MAX * 2))
    for _ in range(DEPTH_MAX - 1):
        (value,) = value
    assert value == [None]


def test_a_conversation_cannot_make_the_gateway_mend_without_end() -> None:
    reader = ArgumentReader()
    broken = '{"a": [1,], "b": "' + "x" * (MENDED_CHARS_MAX // 2)
    assert reader.read(broken)["a"] == [1]
    assert reader.read(broken) == {"arguments": broken}
    assert reader.read('{"a": 1}') == {"a": 1}
