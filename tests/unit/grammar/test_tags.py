"""Structural tags: free text, and parts that follow a grammar of their own."""

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from tests.unit.grammar.conftest import EOS, Accepts

X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FUNCTIONS = {
    "structures": [
        {"begin": "<function=f>", "schema": X, "end": "</function>"},
        {"begin": "<function=g>", "schema": {}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
CALL = '<function=f>{"x":1}</function>'
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANSWER = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {
                "type": "triggered_tags",
                "triggers": ["<t>"],
                "tags": [{"begin": "<t>", "content": NUMBER, "end": "</t>"}],
                "at_least_one": True,
                "stop_after_first": True,
            },
        ],
    },
}
LIST = {
    "format": {
        "type": "tags_with_separator",
        "separator": ";",
        "tags": [
            {"begin": "<t>", "content": {"type": "regex", "pattern": "a/b+"}, "end": "</t>"},
            {"begin": "<u>", "content": {"type": "const_string", "value": "q"}, "end": ["", "!"]},
        ],
    },
}
EITHER = {"format": {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]}}


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (
            FUNCTIONS,
            [
                "hello",
                '<function=f>{"x":1}</function>',
                'a <function=f>{"x":1}</function> b <function=g>[1]</function> c',
            ],
            ['<function=f>{"x":"q"}</function>', "<function=h>1</function>", 'a <function=f>{"x":1}'],
        ),
        (
            ANSWER,
            ["<think>a b c</think>x<t>12</t>"],
            ["<think>abc", "<think>a</think>", "<think>a</think><t>12</t>more", "<t>1</t>", "<think></think><t>a</t>"],
        ),
        (LIST, ["<t>a/bb</t>", "", "<t>a/b</t>;<u>q", "<u>q!;<u>q"], ["<t>a/b</t>;", "x"]),
        (EITHER, ["12", "none"], ["", "12none"]),
    ],
    ids=["functions", "answer", "list", "either"],
)
def test_outputs_are_accepted_as_the_tag_says(accepts: Accepts, tag: Any, good: list[str], bad: list[str]) -> None:
    text = json.dumps(tag)
    assert [each for each in good if not accepts(GrammarKind.STRUCTURAL_TAG, text, each)] == []
    assert [each for each in bad if accepts(GrammarKind.STRUCTURAL_TAG, text, each)] == []


def test_special_tokens_in_a_tag_are_tokens(compiler: GrammarCompiler) -> None:
    tag = {"format": {"type": "tag", "begin": "<|endoftext|>", "content": NUMBER, "end": "."}}
    matcher = compiler.matcher(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    assert not matcher.is_accepting
    matcher.consume(EOS)
    assert not matcher.is_accepting


@pytest.mark.parametrize(
    ("tag", "named"),
    [
        ({}, "neither structures nor a format"),
        ([], "a JSON object"),
        ({"format": {"type": "grammar", "grammar": "x"}}, "'grammar'"),
        ({"format": {"value": "x"}}, '"type" of format'),
        ({"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": ""}], "triggers": ["<a"]}, '"not"'),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}, "no trigger"),
        ({"structures": [], "triggers": ["<b"]}, "no tags"),
        ({"structures": [{"begin": 3}], "triggers": ["<b"]}, '"begin" of a structure'),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]}}, "any_text before"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "looks ahead"),
    ],
)
def test_a_tag_that_cannot_be_followed_is_refused_by_name(compiler: GrammarCompiler, tag: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        compiler.check(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
