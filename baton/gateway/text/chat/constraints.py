"""Builds grammars of whole outputs in llguidance's Lark: reasoning, then tool calls or an answer.

`forced_json` and `forced_markup` write the calls in each family's syntax. The family's parser can read whatever such a
grammar forces.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.parsing.parser import ReasoningMarkers
from baton.gateway.text.chat.types import Json
from baton.grammar.gbnf import lark_from_gbnf
from baton.grammar.lark import literal, read_choices, regex
from baton.grammar.schema import parse_json

# Keywords that may allow members which an object's `properties` do not list.
OPEN_SCHEMA = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref",
    "if", "not", "dependentSchemas",
}  # fmt: skip


@dataclass
class Lark:
    """A grammar being written.

    Args:
        tokens: ids of the special tokens by their texts. In a grammar, a special token never matches text.
    """

    tokens: Mapping[str, int]
    _names: dict[str, str] = field(default_factory=dict)  # names of rules, by the rest of the rule

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def literal(self, text: str) -> str:
        """Returns an expression for exactly this text, which may contain special tokens."""
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else json.dumps(piece, ensure_ascii=False)
            for piece in self._special.split(text)
            if piece
        )

    def rule(self, expression: str, options: str = "") -> str:
        """Adds a rule for this expression, and returns its name."""
        return self._names.setdefault(f"{options}: {expression}", f"r{len(self._names)}")

    def text_up_to(self, marker: str) -> str:
        """Returns an expression for any text up to and including the marker."""
        special = self._special.search(marker)
        before = marker[: special.start()] if special else marker
        escaped = re.escape(before).replace("/", r"\/").replace("\\\n", r"\n")
        if special:  # a special token ends any text
            return f"{self.rule(f'/(?s:.*){escaped}/')} {self.literal(marker[special.start() :])}"
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
    """Returns the name of a tool's function."""
    return str(tool["function"]["name"])


def arguments_schema(tool: Json) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. It forbids members that it does not name, unless it says otherwise.

    Raises:
        InvalidRequest: it forbids objects. Whatever the model called the tool with would not be read as a call.
    """
    schema = dict(tool["function"].get("parameters") or {})
    kind = schema.setdefault("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        about = f"the schema of the arguments of {name_of(tool)} has the type {json.dumps(kind)[:100]}"
        raise InvalidRequest(about, field="tools", value=name_of(tool), allowed=("object",))
    if not OPEN_SCHEMA & schema.keys():
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


def json_of(schema: object) -> str:
    """Returns an expression for the JSON values that a schema allows."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def repeated(call: str, separator: str, *, parallel: bool) -> str:
    """Returns an expression for one call, or for several with a separator between them."""
    return f"{call} ({separator} {call})*" if parallel else call


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
