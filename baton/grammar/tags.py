"""Translates structural tags to Lark's syntax: free text in which some strings begin a structured part.

It reads both shapes of XGrammar and vLLM: {"structures", "triggers"} and {"type": "structural_tag", "format"}.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from baton.grammar.lark import literal, readable_lark, regex
from baton.grammar.refusal import refusal
from baton.grammar.schema import parse_json, readable

FORMATS = (
    *("const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "triggered_tags"),
    "tags_with_separator",
)
_MOST_NESTED = 32

# Cuts a text at special tokens: pieces of text, and ids of special tokens.
SplitSpecial = Callable[[str], Sequence[str | int]]


def lark_from_tags(text: str, split: SplitSpecial) -> str:
    """Translates a structural tag to Lark.

    Raises:
        InvalidRequest: the text is not a structural tag, or has a format that is not supported; names it.
    """
    tag = parse_json(text, what="structural tag")
    if not isinstance(tag, dict):
        raise refusal("a structural tag is a JSON object", value=text)
    if "format" in tag:
        return _Writer(split).grammar(tag["format"])
    if "structures" in tag:
        structures = _field(tag, "structures", list, "the structural tag")
        tags = [
            {
                "begin": _field(each, "begin", str, "a structure"),
                "content": {"type": "json_schema", "json_schema": _schema_of(each)},
                "end": _field(each, "end", str, "a structure"),
            }
            for each in structures
        ]
        triggers = _field(tag, "triggers", list, "the structural tag")
        return _Writer(split).grammar({"type": "triggered_tags", "triggers": triggers, "tags": tags})
    raise refusal(
        "the structural tag has neither structures nor a format", value=text, allowed=("structures", "format")
    )


def _schema_of(structure: dict[str, Any]) -> Any:
    schema = structure.get("schema", {})
    return parse_json(schema, what="JSON Schema") if isinstance(schema, str) else schema


class _Writer:
    """Writes the rules of one structural tag, each under a name of its own."""

    def __init__(self, split: SplitSpecial) -> None:
        self._split = split
        self._rules: list[str] = []

    def grammar(self, form: Any) -> str:
        start = self._form(form, "format", 0)
        return readable_lark("\n".join([f"start: {start}", "TEXT: /(?s:.*)/", *self._rules]))

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _form(self, form: Any, place: str, depth: int) -> str:
        """An expression for one format."""
        if depth > _MOST_NESTED:
            raise refusal("the structural tag is nested too deeply", value=place)
        kind = _field(form, "type", str, place)
        inner = f"{place}.{kind}"
        match kind:
            case "const_string":
                return self._text(_field(form, "value", str, inner)) or '""'
            case "json_schema":
                return f"%json {readable(form.get('json_schema', True))}"
            case "regex":
                return self._rule(regex(_field(form, "pattern", str, inner)))
            case "any_text":
                return "TEXT"
            case "sequence":
                return self._sequence(_field(form, "elements", list, inner), inner, depth)
            case "or":
                elements = _field(form, "elements", list, inner)
                return self._rule(" | ".join(self._form(each, inner, depth + 1) for each in elements))
            case "tag":
                return self._tag(form, inner, depth)
            case "triggered_tags":
                return self._triggered(form, inner, depth)
            case "tags_with_separator":
                return self._separated(form, inner, depth)
        raise refusal(f"the structural tag has the format {kind!r} at {place}", value=kind, allowed=FORMATS)

    def _sequence(self, elements: list[Any], place: str, depth: int) -> str:
        parts = []
        for index, each in enumerate(elements):
            if index < len(elements) - 1 and isinstance(each, dict) and each.get("type") == "any_text":
                raise refusal(
                    f"{place} has any_text before other elements",
                    value="any_text",
                    cure="put it last, or into a tag whose end says where it stops",
                )
            parts.append(self._form(each, place, depth + 1))
        return self._rule(" ".join(parts))

    def _tag(self, tag: Any, place: str, depth: int) -> str:
        begin = self._text(_field(tag, "begin", str, place))
        return self._rule(f"{begin} {self._content(tag, place, depth)}")

    def _content(self, tag: Any, place: str, depth: int) -> str:
        """An expression for a tag's content and end."""
        content, end = tag.get("content"), tag.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(each, str) for each in ends):
            raise refusal(f"{place} has the end {end!r}", value=end, allowed=("a string", "an array of strings"))
        if isinstance(content, dict) and content.get("type") == "any_text" and any(ends):
            return self._text_up_to(ends)
        body = self._form(content, f"{place}.content", depth + 1)
        closing = " | ".join(self._text(each) or '""' for each in ends)
        return f"{body} ({closing})" if any(ends) else body

    def _text_up_to(self, ends: list[str]) -> str:
        """An expression for free text up to the first of these strings, including it."""
        options = []
        for each in ends:
            first, *others = self._split(each) or [""]
            if isinstance(first, int):  # free text has no special tokens, so it stops there by itself
                options.append(f"TEXT {self._text(each)}")
            else:
                stop = self._rule(f"TEXT {literal(first)}", lazy=True)
                options.append(" ".join([stop, *map(_piece, others)]))
        return self._rule(" | ".join(options))

    def _triggered(self, form: Any, place: str, depth: int) -> str:
        triggers = _field(form, "triggers", list, place)
        options = []
        for tag in _field(form, "tags", list, place):
            begin = _field(tag, "begin", str, f"{place}.tags")
            trigger = next(
                (each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None
            )
            if trigger is None:
                raise refusal(
                    f"{place} has a tag that begins with {begin!r}, and no trigger",
                    value=begin,
                    allowed=tuple(map(str, triggers)),
                    cure="give a trigger that the tag begins with",
                )
            options.append(self._after_text(tag, trigger, f"{place}.tags", depth))
        if not options:
            raise refusal(f"{place} has no tags", value="tags")
        tags = self._rule(" | ".join(options))
        if form.get("stop_after_first"):
            return tags if form.get("at_least_one") else self._rule(f"{tags} | TEXT")
        return self._rule(f"{tags}{'+' if form.get('at_least_one') else '*'} TEXT")

    def _after_text(self, tag: Any, trigger: str, place: str, depth: int) -> str:
        """An expression for free text up to the trigger, then the rest of the tag."""
        rest = self._text(tag["begin"][len(trigger) :])
        content = self._content(tag, place, depth)
        return self._rule(f"{self._text_up_to([trigger])} {rest} {content}")

    def _separated(self, form: Any, place: str, depth: int) -> str:
        tags = _field(form, "tags", list, place)
        if not tags:
            raise refusal(f"{place} has no tags", value="tags")
        one = self._rule(" | ".join(self._tag(each, f"{place}.tags", depth + 1) for each in tags))
        separator = self._text(_field(form, "separator", str, place))
        more = one if form.get("stop_after_first") else self._rule(f"{one} ({separator} {one})*")
        return more if form.get("at_least_one") else self._rule(f'{more} | ""')

    def _text(self, text: str) -> str:
        """An expression for the text, in which special tokens are tokens."""
        return " ".join(map(_piece, self._split(text)))


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def _field(value: Any, name: str, kind: type, place: str) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        wanted = "a string" if kind is str else "an array"
        raise refusal(f'"{name}" of {place} is {json.dumps(found)}', value=json.dumps(value), allowed=(wanted,))
    return found
