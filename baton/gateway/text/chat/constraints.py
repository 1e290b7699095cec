"""Builds grammars of whole outputs in llguidance's Lark: reasoning, then tool calls in a family's syntax or an answer.

The family's parser can read whatever such a grammar forces.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.parsing.argument_types import ArgumentType, ArgumentTypes
from baton.gateway.text.chat.parsing.parser import ReasoningMarkers
from baton.gateway.text.chat.types import Json
from baton.grammar.gbnf import lark_from_gbnf
from baton.grammar.lark import literal, read_choices, regex
from baton.grammar.schema import parse_json

ANY_TEXT = r"/(?s:.*)/"
# Keywords that may allow members which an object's `properties` do not list.
OPEN_SCHEMA = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref",
    "if", "not", "dependentSchemas",
}  # fmt: skip
NEWLINE, PARAMETER_END = "\n", "</parameter>\n"
NAME = re.compile(r"[\w.\-]+", re.ASCII)


@dataclass
class Lark:
    """A grammar being written.

    Args:
        tokens: ids of the special tokens by their texts. In a grammar, a special token never matches text.
    """

    tokens: Mapping[str, int]
    _names: dict[str, str] = field(default_factory=dict)  # names of rules, by the rest of the rule

    def literal(self, text: str) -> str:
        """Returns an expression for exactly this text, which may contain special tokens."""
        special = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        pieces = re.split(f"({special})", text) if special else [text]
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def rule(self, expression: str, options: str = "") -> str:
        """Adds a rule for this expression, and returns its name."""
        return self._names.setdefault(f"{options}: {expression}", f"r{len(self._names)}")

    def text_up_to(self, marker: str) -> str:
        """Returns an expression for any text up to and including the marker."""
        if marker in self.tokens:
            return f"{self.rule(ANY_TEXT)} {self.literal(marker)}"
        escaped = re.escape(marker).replace("/", r"\/").replace("\\\n", r"\n")
        return self.rule(f"/(?s:.*){escaped}/", "[lazy]")

    def one_of(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))

    def finish(self, start: str) -> Grammar:
        rules = [f"{name}{rest}" for rest, name in self._names.items()]
        return Grammar(GrammarKind.LARK, "\n".join(["%llguidance {}", f"start: {start}", *rules]) + "\n")


@dataclass(frozen=True)
class Forced:
    """The tool calls that a grammar forces.

    Attributes:
        tools: the tools that may be called, in the shape of requests.
        parallel: whether more than one call is allowed.
    """

    tools: Sequence[Json]
    parallel: bool


def name_of(tool: Json) -> str:
    return str(tool["function"]["name"])


def arguments_schema(tool: Json) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. It forbids members that it does not name, unless it says otherwise."""
    schema = dict(tool["function"].get("parameters") or {})
    schema.setdefault("type", "object")
    if not OPEN_SCHEMA & schema.keys():
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


def json_of(schema: object) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _repeated(call: str, separator: str, *, parallel: bool) -> str:
    return f"{call} ({separator} {call})*" if parallel else call


def _objects(lark: Lark, forced: Forced, key: str) -> str:
    """Returns an expression for one call as `{"name": ..., KEY: ...}`."""
    calls = []
    for tool in forced.tools:
        before = f'{{"name": {json.dumps(name_of(tool), ensure_ascii=False)}, "{key}": '
        calls.append(f"{lark.literal(before)} {json_of(arguments_schema(tool))} {lark.literal('}')}")
    return lark.one_of(calls)


def llama_calls(lark: Lark, forced: Forced) -> str:
    return _repeated(_objects(lark, forced, "parameters"), '"; "', parallel=forced.parallel)


def hermes_calls(lark: Lark, forced: Forced) -> str:
    call = _objects(lark, forced, "arguments")
    begin, end = lark.literal("<tool_call>\n"), lark.literal("\n</tool_call>")
    call = lark.rule(f"{begin} {call} {end}")
    return _repeated(call, r'"\n"', parallel=forced.parallel)


def mistral_array_calls(lark: Lark, forced: Forced) -> str:
    calls = _repeated(_objects(lark, forced, "arguments"), '", "', parallel=forced.parallel)
    before, after = '" "? "["', '"]"'
    return f"{lark.literal('[TOOL_CALLS]')} {before} {calls} {after}"


def mistral_named_calls(lark: Lark, forced: Forced) -> str:
    call = lark.one_of(
        [
            f"{lark.literal(f'[TOOL_CALLS]{name_of(tool)}[ARGS]')} {json_of(arguments_schema(tool))}"
            for tool in forced.tools
        ]
    )
    return f"{call}+" if forced.parallel else call


def deepseek_calls(lark: Lark, forced: Forced, *, fenced: bool) -> str:
    calls = []
    for tool in forced.tools:
        name = name_of(tool)
        before = f"function<｜tool▁sep｜>{name}\n```json\n" if fenced else f"{name}<｜tool▁sep｜>"
        after = "\n```<｜tool▁call▁end｜>" if fenced else "<｜tool▁call▁end｜>"
        begin = lark.literal("<｜tool▁call▁begin｜>" + before)
        calls.append(f"{begin} {json_of(arguments_schema(tool))} {lark.literal(after)}")
    call = _repeated(lark.one_of(calls), r'"\n"?', parallel=forced.parallel)
    return f"{lark.literal('<｜tool▁calls▁begin｜>')} {call} {lark.literal('<｜tool▁calls▁end｜>')}"


def pythonic_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for calls in Python's form, or for JSON objects if a schema allows unnamed arguments."""
    if not all(_has_plain_arguments(tool) for tool in forced.tools):
        return llama_calls(lark, forced)
    call = lark.one_of(
        [
            f"{lark.literal(name_of(tool) + '(')} {_keywords(lark, arguments_schema(tool))} {lark.literal(')')}"
            for tool in forced.tools
        ]
    )
    return f'"[" {_repeated(call, lark.literal(", "), parallel=forced.parallel)} "]"'


def _has_plain_arguments(tool: Json) -> bool:
    schema = arguments_schema(tool)
    return schema.get("additionalProperties") is False and all(map(NAME.fullmatch, schema.get("properties", {})))


def _keywords(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Returns an expression for `key=value` pairs: the required ones, then any others, each in the schema's order."""
    required = set(schema.get("required", ()))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    needed: list[str] = []
    optional: list[str] = []
    for name, value in schema.get("properties", {}).items():
        pair = f"{lark.literal(name + '=')} {json_of({**value, **shared} if isinstance(value, dict) else value)}"
        (needed if name in required else optional).append(pair)
    if needed:
        return ' ", " '.join(needed) + "".join(f' (", " {pair})?' for pair in optional)
    pairs = ""
    for index in reversed(range(len(optional))):
        others = "".join(f' (", " {pair})?' for pair in optional[index + 1 :])
        pairs = lark.rule(f"{optional[index]}{others}" + (f" | {pairs}" if pairs else ""))
    return f"({pairs})?" if pairs else ""


def xml_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for XML calls: one element for each argument, in the schema's order."""
    calls = []
    for tool in forced.tools:
        schema = arguments_schema(tool)
        begin = lark.literal(f"<tool_call>\n<function={name_of(tool)}>\n")
        given = _elements(lark, schema) if schema.get("additionalProperties") is False else _any_elements(lark)
        calls.append(f"{begin} {given} {lark.literal('</function>' + NEWLINE + '</tool_call>')}")
    return _repeated(lark.one_of(calls), r'"\n"', parallel=forced.parallel)


def _elements(lark: Lark, schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    types = ArgumentTypes(schema)
    elements = []
    for name, value in schema.get("properties", {}).items():
        begin = lark.literal(f"<parameter={name}>\n")
        if types.of(name).is_text:
            element = f"{begin} {lark.text_up_to(NEWLINE + PARAMETER_END)}"
        else:
            whole = json_of({**value, **shared} if isinstance(value, dict) else value)
            element = f"{begin} {_plain_value(lark, types.of(name), whole)} {lark.literal(NEWLINE + PARAMETER_END)}"
        elements.append(element if name in required else f"({element})?")
    return lark.rule(" ".join(elements)) if elements else ""


def _plain_value(lark: Lark, type: ArgumentType, whole: str) -> str:
    """Returns an expression for a value whose markup has no type.

    Args:
        whole: the expression for values that are not string constants; those are written without quotes.
    """
    strings = [json.loads(each.constant) for each in type.alternatives if each.type == "string" and each.constant]
    if not strings:
        return whole
    others = [each.constant or whole for each in type.alternatives if each.type != "string"]
    choices = [lark.literal(text) for text in strings]
    choices += [other if other is whole else lark.literal(other) for other in dict.fromkeys(others)]
    return f"({' | '.join(choices)})"


def _any_elements(lark: Lark) -> str:
    element = lark.rule(rf'"<parameter=" /[^<>\n]+/ ">\n" {lark.text_up_to(NEWLINE + PARAMETER_END)}')
    return f"{element}*"


def harmony_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for one call, after which the model ends its output."""
    return lark.one_of(
        [
            lark.literal(f"<|channel|>commentary to=functions.{name_of(tool)} <|constrain|>json<|message|>")
            + f" {json_of(arguments_schema(tool))}"
            for tool in forced.tools
        ]
    )


def harmony_analysis(lark: Lark) -> str:
    begin, then = lark.literal("<|channel|>analysis<|message|>"), lark.literal("<|start|>assistant")
    thought = lark.rule(f"{begin} {lark.text_up_to('<|end|>')} {then}")
    return f"({thought})?"


def reasoning(lark: Lark, markers: ReasoningMarkers, *, opened: bool) -> str:
    """Returns an expression for reasoning and its closing marker. It is optional unless the prompt `opened` it."""
    thought = lark.text_up_to(markers.close) + r" /\n{1,3}/?"
    if opened:
        return lark.rule(thought)
    return f"({lark.rule(f'{lark.literal(markers.open)} {thought}')})?"


def answer(grammar: Grammar) -> str:
    """Returns the request's grammar as an expression within a larger grammar.

    Raises:
        InvalidRequest: grammars of this kind, or this grammar, cannot be part of a larger one.
    """
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return json_of({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            schema = parse_json(grammar.text, what="JSON Schema")
            return json_of({} if schema is True else schema)
        case GrammarKind.CHOICE:
            return "(" + " | ".join(map(literal, read_choices(grammar.text))) + ")"
        case GrammarKind.REGEX:
            return regex(grammar.text)
        case GrammarKind.LARK if not grammar.text.lstrip().startswith("{"):
            return f"%lark {{\n{grammar.text}\n}}"
        case GrammarKind.GBNF:
            return f"%lark {{\n{lark_from_gbnf(grammar.text)}\n}}"
        case _:
            raise InvalidRequest(
                f"a grammar of kind {grammar.kind.value} cannot be combined with reasoning or with tools",
                field="grammar",
                value=grammar.kind.value,
                cure="give a JSON schema, or turn the model's thinking off",
            )
