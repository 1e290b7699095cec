"""Arguments without a type, read as a schema says, whole and as they come."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.text.chat.parsing.argument_types import ArgumentText, ArgumentTypes
from baton.gateway.text.chat.parsing.json_rewriter import DEPTH_MAX
from baton.gateway.text.chat.parsing.llama import llama
from baton.gateway.text.chat.parsing.xml_call import xml_calls
from tests.unit.gateway.chat.outputs import cut, parse

TEXTS = ['{"a": 1}', "[1]", "true", "42", "1e5", "null", "NaN", "None", '"t"', "", " x ", "1,5", "\ud800\x00\n"]
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


def typed(schema: Any, **shared: Any) -> ArgumentTypes:
    return ArgumentTypes({"type": "object", "properties": {"a": schema}, **shared})


def read(schema: Any, text: str, **shared: Any) -> Any:
    """The value, which is the same whole, as it comes, and in a call of XML."""
    made = typed(schema, **shared).of("a").read(text)
    writer = ArgumentText(typed(schema, **shared).of("a"))
    assert "".join(map(writer.push, text)) + writer.finish() == made
    made.encode()
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    tool = {"f": {"type": "object", "properties": {"a": schema}, **shared}}
    for pieces in ([call], list(call)):
        assert parse(xml_calls(tool), pieces).calls == [("f", f'{{"a": {made}}}')]
    return json.loads(made, parse_constant=not_json)


def not_json(constant: str) -> object:
    raise AssertionError(constant)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"}, {"type": ["string"]}, {"$ref": "#/$defs/S"}, {"allOf": [{"$ref": "#/$defs/S"}]}, {}, True,
        {"description": "no type"}, {"minLength": 1}, {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "enum": ["q"]}, {"type": ["string", "number", "boolean", "object", "array"]},
        {"$ref": "#/$defs/Loop"}, {"$ref": "http://elsewhere"}, {"$ref": "#/$defs/None"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", TEXTS)
def test_strings_stay_strings(schema: Any, text: str) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
    expected = text.replace("\ud800", "\ufffd")
    assert read(schema, text, **{"$defs": {"S": {"type": "string"}, "Loop": loop}}) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]}, {"type": ["null", "string"]}, OPTIONAL, {"type": "string", "nullable": True},
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/S"}]}, {"allOf": [OPTIONAL, {"description": "d"}]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", TEXTS)
def test_a_string_or_null_is_null_for_null_only(schema: Any, text: str) -> None:
    expected = None if text == "null" else text.replace("\ud800", "\ufffd")
    assert read(schema, text, **{"$defs": {"S": {"type": "string"}}}) == expected


def deep(levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, " 42\n", 42),
        ({"type": "integer"}, "1e5", 100_000),
        ({"type": "integer"}, "2.0", 2),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "9" * 30, int("9" * 30)),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"type": "object"}, '{"a": 1, "b": [NaN,]}', {"a": 1, "b": [None]}),
        ({"type": "object"}, "{'a': (1, True), 'b': 'c\\d'}", {"a": [1, True], "b": "c\\d"}),
        ({"type": "object"}, '{"a": "x\ny"', {"a": "x\ny"}),
        ({"type": "object"}, '{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ({"type": "object"}, "none of it", "none of it"),
        ({"type": "array"}, "[" * 300 + "]" * 300, deep(DEPTH_MAX, None)),
        ({"type": "array"}, "[" * 300 + "True" + "]" * 300, deep(DEPTH_MAX, None)),
        ({"type": "array", "items": {"type": "string"}}, '["1", 2]', ["1", 2]),
        ({"type": "array"}, '{"a": 1}', {"a": 1}),
        ({"properties": {"b": {}}}, '{"b": 1}', {"b": 1}),
        ({"items": {}}, "[1]", [1]),
        ({"minimum": 1}, "1", 1),
        ({"type": "any"}, "1", 1),
        ({"type": "any"}, "x", "x"),
        ({"type": "dict"}, "{}", {}),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"enum": ["true", 1, None, True, {"a": 1}]}, "true", "true"),
        ({"enum": [True, "true"]}, "true", True),
        ({"enum": [1, "a", None, 2.5]}, "1.0", 1),
        ({"enum": [1, "a", None, 2.5]}, "2.5", 2.5),
        ({"enum": [1, "a", None, 2.5]}, "null", None),
        ({"enum": [1, "a", None, 2.5]}, '"a"', "a"),
        ({"enum": [{"a": 1}]}, "{'a': 1}", {"a": 1}),
        ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
        ({"type": "string", "enum": ["1", "2"]}, " 2", "2"),
        ({"type": "integer", "enum": [1, "1"]}, "1", 1),
        ({"type": ["integer", "string"]}, "42", 42),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["string", "integer"]}, "42", "42"),
        ({"type": ["boolean", "string"]}, "true", True),
        ({"type": ["boolean", "string"]}, "TRUE", "TRUE"),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, "{a}", "{a}"),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "1.5", 1.5),
        ({"oneOf": [{"const": "auto"}, {"type": "integer"}]}, "auto", "auto"),
        ({"oneOf": [{"const": "auto"}, {"type": "integer"}]}, "3", 3),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "3", 3),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "3.0", 3),
        ({"$ref": "#/$defs/a~1b%20c"}, "3", 3),
        ({"$ref": "#/$defs/list/0"}, "3", 3),
    ],
)
def test_what_the_schema_allows_is_tried_in_its_order(schema: Any, text: str, expected: Any) -> None:
    shared = {"a/b c": {"type": "integer"}, "list": [{"type": "integer"}]}
    assert read(schema, text, **{"$defs": shared}) == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"additionalProperties": {"type": "integer"}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}]},
    ],
)
def test_an_arguments_schema_is_found_wherever_it_stands(parameters: Any) -> None:
    assert ArgumentTypes(parameters).of("a").read("42") == "42"
    assert ArgumentTypes({}).of("a").read("42") == '"42"'


def test_numbers_keep_their_digits() -> None:
    assert typed({"type": "number"}).of("a").read("1e5") == "1e5"
    assert typed({"type": "object"}).of("a").read('{"a":1.10}') == '{"a":1.10}'


def test_python_calls_read_what_is_no_literal_by_the_schema() -> None:
    schemas = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": ["integer", "string"]}}}}
    text = "[f(a=New York, b='42', c=1e5, d=[1, NaN])]"
    assert parse(llama(schemas), [text]).calls == [("f", '{"a": "New York", "b": "42", "c": 1e5, "d": [1, null]}')]


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            True,
            {"type": "string"},
            {"type": "null"},
            {"type": "integer"},
            {"type": "object"},
            {"enum": ["a", 1, None]},
        ]
    ),
    lambda inner: st.builds(
        lambda key, members: {key: members}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    SCHEMAS,
    st.lists(st.sampled_from(['{"a": 1}', "nul", "l", "1", ".", "e5", "\n", "x", '"', "[", "a", " "]), max_size=6),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_a_value_is_the_same_however_it_was_cut_and_valid_json(schema: Any, text: list[str], places: list[int]) -> None:
    value = "".join(text)
    whole = typed(schema).of("a").read(value)
    json.loads(whole, parse_constant=not_json)
    writer = ArgumentText(typed(schema).of("a"))
    assert "".join(map(writer.push, cut(value, places))) + writer.finish() == whole


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": list(range(10_000)), "allOf": [{"enum": list(range(10_000))}]}, "[" * 60_000),
        ({"enum": [{"x": i} for i in range(10_000)]}, '{"x": [' + "1," * 20_000),
        ({"enum": [f"v{i}" for i in range(10_000)]}, "v" * 60_000),
        ({"allOf": [{"$ref": "#/$defs/Many"}] * 250}, "v1"),
    ],
)
def test_large_enumerations_and_long_texts_take_bounded_time(schema: Any, text: str) -> None:
    """Each pair of values was compared, and the text was read anew for each value: minutes of the gateway's loop."""
    many = {"Many": {"enum": [f"v{i}" for i in range(100_000)]}}
    started_s = time.thread_time()
    json.loads(typed(schema, **{"$defs": many}).of("a").read(text))
    assert time.thread_time() - started_s < 5


def test_enumerations_of_two_keywords_have_their_common_values_in_order() -> None:
    schema = {
        "enum": [3, "b", "a", 1.5, None, 2],
        "allOf": [{"enum": ["a", 2, 3, None]}, {"type": ["integer", "string", "null"]}],
    }
    kind = typed(schema).of("a")
    assert [each.constant for each in kind.alternatives] == ["3", '"a"', None, "2"]
