"""JSON Schemas: keywords that are refused, values that are wrong, and expressions that mean something else in Rust."""

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import GrammarKind
from baton.grammar.patterns import UnsupportedPattern, to_rust
from baton.grammar.schema import readable_schema
from tests.unit.grammar.conftest import Accepts

REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, '"not" at the root'),
    ({"properties": {"a/b": {"uniqueItems": True}}}, '"uniqueItems" at /properties/a~1b'),
    ({"items": {"contains": {}}}, '"contains" at /items'),
    ({"if": {}, "then": {}}, '"if"'),
    ({"dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
    ({"dependentSchemas": {"a": {}}}, '"dependentSchemas"'),
    ({"dependencies": {"a": ["b"]}}, '"dependencies"'),
    ({"propertyNames": {"pattern": "a"}}, '"propertyNames"'),
    ({"unevaluatedProperties": False}, '"unevaluatedProperties"'),
    ({"unevaluatedItems": False}, '"unevaluatedItems"'),
    ({"$dynamicRef": "#x"}, r'"\$dynamicRef"'),
    ({"additionalItems": False}, '"additionalItems"'),
    ({"items": [{}, {}]}, '"items" at /items'),
    ({"format": "zip"}, '"format" at the root is zip; allowed: date-time'),
    ({"format": 3}, '"format"'),
    ({"type": "sting"}, '"type" at the root is sting; allowed: null'),
    ({"type": []}, '"type"'),
    ({"pattern": "(?=a)"}, '"pattern"'),
    ({"patternProperties": {"(?!a)": {}}}, '"patternProperties"'),
    ({"$ref": "http://x/y"}, r'"\$ref"'),
    ({"$ref": "#/nope"}, r'"\$ref"'),
    ({"$defs": {"a": {"$id": "http://x", "$ref": "#/$defs/b"}, "b": {}}}, r'"\$ref".*"\$id"'),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, r'"\$schema"'),
    ({"minLength": -1}, '"minLength"'),
    ({"minLength": 1.5}, '"minLength"'),
    ({"maximum": "3"}, '"maximum"'),
    ({"exclusiveMinimum": True}, '"exclusiveMinimum"'),
    ({"multipleOf": 0}, '"multipleOf"'),
    ({"const": 2**60}, r"2\*\*53"),
    ({"enum": [[{"a": 2**60}]]}, r"2\*\*53"),
    ({"enum": []}, '"enum"'),
    ({"anyOf": []}, '"anyOf"'),
    ({"required": "a"}, '"required"'),
    ({"properties": []}, '"properties"'),
    ({"properties": {"a": 1}}, '"a" at /properties/a'),
    ({"minProperties": 3}, '"minProperties"'),
    (False, "false"),
    ([1], "an object or a boolean"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_a_schema_is_refused_by_keyword_and_place(schema: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        readable_schema(json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", '{"minimum": NaN}', "[" * 5000, '{"items":' * 300 + "{}" + "}" * 300])
def test_text_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"not JSON|nested too deeply|an object or"):
        readable_schema(text)


@pytest.mark.parametrize("keyword", ["minItems", "maxItems", "minLength", "minimum"])
def test_a_number_too_large_for_a_float_is_refused(keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=keyword):
        readable_schema(f'{{"{keyword}": 1e400}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"then": {"not": {}}},
        {"if": {}},
        {"minContains": 2},
        {"unevaluatedProperties": True},
        {"title": "a", "deprecated": True, "x-order": 1, "discriminator": {"not": 1}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "http://x/y"},
        {"maxItems": 2.0},
        {"minProperties": 2, "required": ["a", "b"]},
        {"components": {"schemas": {"A": {"type": "integer"}}}, "$ref": "#/components/schemas/A"},
        {"$ref": "#", "description": "endless"},
    ],
)
def test_keywords_that_say_nothing_are_passed_over(schema: Any) -> None:
    readable_schema(json.dumps(schema))


def test_references_are_followed_into_every_place(accepts: Accepts) -> None:
    schema = {"$ref": "#/x-shared/a~1b", "x-shared": {"a/b": {"type": "string", "pattern": "^.$"}}}
    assert accepts(GrammarKind.JSON_SCHEMA, json.dumps(schema), '"a"')
    assert not accepts(GrammarKind.JSON_SCHEMA, json.dumps(schema), '"\u2028"')
    with pytest.raises(InvalidRequest, match='"not" at /x-shared/a'):
        readable_schema(json.dumps({"$ref": "#/x-shared/a", "x-shared": {"a": {"not": {}}}}))


def test_properties_may_have_the_names_of_keywords() -> None:
    readable_schema(json.dumps({"properties": {"not": {"type": "string"}, "$id": {}, "if": True}, "required": ["not"]}))


@pytest.mark.parametrize(
    ("pattern", "rust"),
    [
        ("a.b", r"a[^\n\r\u2028\u2029]b"),
        (r"a\.b", r"a\.b"),
        ("[.]", "[.]"),
        (r"\d+\/", r"\d+/"),
        (r"(?:a|b)(?<n>c)", r"(?:a|b)(?<n>c)"),
    ],
)
def test_expressions_are_rewritten_to_what_they_mean(pattern: str, rust: str) -> None:
    assert to_rust(pattern) == rust


@pytest.mark.parametrize(
    "pattern", ["[a&&b]", "[a--b]", "[[:alpha:]]", "(?i)a", "(?<=a)b", r"\bword\b", r"\cA", "[]", "[^]"]
)
def test_expressions_that_mean_something_else_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        to_rust(pattern)


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [(r"^\s$", "\u0085", False), (r"^\s$", "\ufeff", True), (r"^[\s-]+$", " -", True), (r"^\S$", "\u0085", True)],
)
def test_spaces_are_those_of_ecmascript(accepts: Accepts, pattern: str, text: str, matches: bool) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    assert accepts(GrammarKind.JSON_SCHEMA, schema, json.dumps(text, ensure_ascii=False)) == matches


def test_a_large_multiple_is_refused_before_it_costs_time() -> None:
    with pytest.raises(InvalidRequest, match="multipleOf"):
        readable_schema('{"type": "integer", "multipleOf": 9999991}')
