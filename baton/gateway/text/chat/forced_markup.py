"""Writes grammars of forced calls for the families that write each argument by itself: in elements or as keywords."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.gateway.text.chat.constraints import Forced, Lark, arguments_schema, json_of, name_of, repeated
from baton.gateway.text.chat.forced_json import llama_calls
from baton.gateway.text.chat.parsing.argument_types import ArgumentType, ArgumentTypes
from baton.gateway.text.chat.parsing.gemma_call import GemmaMarkup
from baton.gateway.text.chat.parsing.pair_call import PairMarkup
from baton.gateway.text.chat.parsing.tool_code import FENCE, FENCE_END
from baton.gateway.text.chat.parsing.xml_call import QWEN, XmlMarkup
from baton.gateway.text.chat.types import Json

Value = Callable[[str, object, ArgumentType], str]  # an argument's expression from its name, schema and type

LINE = r'"\n"?'
KEYWORD = re.compile(r"[\w.\-]+", re.ASCII)


def pythonic_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for calls in Python's form, or for JSON objects if a schema allows unnamed arguments."""
    if not all(map(_has_plain_arguments, forced.tools)):
        return llama_calls(lark, forced)
    return f'"[" {repeated(_python_call(lark, forced), lark.literal(", "), parallel=forced.parallel)} "]"'


def tool_code_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for a block of code with one call in each line. It has named arguments only."""
    calls = repeated(_python_call(lark, forced), r'"\n"', parallel=forced.parallel)
    return f"{lark.literal(FENCE + chr(10))} {calls} {lark.literal(chr(10) + FENCE_END)}"


def _python_call(lark: Lark, forced: Forced) -> str:
    def value(name: str, schema: object, _: ArgumentType) -> str:
        return f"{lark.literal(name + '=')} {json_of(schema)}"

    return lark.one_of(
        [
            f"{lark.literal(name_of(tool) + '(')} {_joined(lark, arguments_schema(tool), value)} {lark.literal(')')}"
            for tool in forced.tools
        ]
    )


def _has_plain_arguments(tool: Json) -> bool:
    schema = arguments_schema(tool)
    return schema.get("additionalProperties") is False and all(map(KEYWORD.fullmatch, schema.get("properties", {})))


def xml_calls(lark: Lark, forced: Forced, markup: XmlMarkup = QWEN) -> str:
    """Returns an expression for XML calls: one element for each argument, in the schema's order."""
    between = "\n" if markup.framed else ""
    end = f"{between}{markup.parameter_end}\n"

    def name(text: str) -> str:
        return f'"{text}"' if markup.quoted else text

    def value(key: str, schema: object, type: ArgumentType) -> str:
        attribute = "" if not markup.typed else f' string="{"true" if type.is_text or _strings(type) else "false"}"'
        begin = lark.literal(f"{markup.parameter}{name(key)}{attribute}>{between}")
        return f"{begin} {_value(lark, schema, type, end)}"

    quote, attribute = ('"' if markup.quoted else ""), (' string="true"' if markup.typed else "")
    any_begin, any_end = lark.literal(markup.parameter + quote), lark.literal(f"{quote}{attribute}>{between}")
    any_element = rf"{any_begin} /[^<>'\"\n]+/ {any_end} {lark.text_up_to(end)}"
    calls = []
    for tool in forced.tools:
        begin = lark.literal(f"{markup.function}{name(name_of(tool))}>\n")
        calls.append(
            f"{begin} {_elements(lark, tool, value, any_element)} {lark.literal(markup.function_end + chr(10))}"
        )
    call = lark.one_of(calls)
    open_, close = lark.literal(f"{markup.call}\n"), lark.literal(markup.call_end)
    if markup.quoted:
        return f"{open_} {call}{'+' if forced.parallel else ''} {close}"
    return repeated(lark.rule(f"{open_} {call} {close}"), r'"\n"', parallel=forced.parallel)


def pair_calls(lark: Lark, forced: Forced, markup: PairMarkup) -> str:
    """Returns an expression for calls with a pair of elements for each argument, in the schema's order.

    Newer models of a family leave line breaks out, so all of them are optional.
    """
    end = f"</{markup.value}>"
    between = f"</{markup.key}>"

    def value(key: str, schema: object, type: ArgumentType) -> str:
        begin = f"{lark.literal(f'<{markup.key}>{key}{between}')} {LINE} {lark.literal(f'<{markup.value}>')}"
        return f"{begin} {_value(lark, schema, type, end)} {LINE}"

    any_begin = rf"{lark.literal(f'<{markup.key}>')} /[^<>\n]+/ {lark.literal(between)} {LINE}"
    any_pair = f"{any_begin} {lark.literal(f'<{markup.value}>')} {lark.text_up_to(end)} {LINE}"
    separator = f"<{markup.separator}>" if markup.separator else ""
    calls = []
    for tool in forced.tools:
        begin = lark.literal(f"<{markup.call}>{name_of(tool)}{separator}")
        calls.append(f"{begin} {LINE} {_elements(lark, tool, value, any_pair)} {lark.literal(markup.call_end)}")
    call = repeated(lark.one_of(calls), LINE, parallel=forced.parallel)
    if not markup.section:
        return call
    return f"{lark.literal(f'<{markup.section}>')} {LINE} {call} {LINE} {lark.literal(markup.section_end)}"


def gemma_calls(lark: Lark, forced: Forced, markup: GemmaMarkup) -> str:
    """Returns an expression for calls as `call:NAME{key:<escape>text<escape>,other:3}`."""

    def value(key: str, schema: object, type: ArgumentType) -> str:
        begin = lark.literal(f"{key}:")
        if type.is_text or _strings(type):
            return f"{begin} {lark.literal(markup.string)} {_value(lark, schema, type, markup.string)}"
        return f"{begin} {json_of(schema)}"

    text = f"{lark.literal(markup.string)} {lark.text_up_to(markup.string)}"
    any_pair = lark.rule(rf'/[^:,{{}}<>\s]+/ ":" {text}')
    calls = []
    for tool in forced.tools:
        schema = arguments_schema(tool)
        is_open = schema.get("additionalProperties") is not False
        given = f'({any_pair} ("," {any_pair})*)?' if is_open else _joined(lark, schema, value, ",")
        begin, end = lark.literal(f"{markup.call}call:{name_of(tool)}{{"), lark.literal("}" + markup.call_end)
        calls.append(f"{begin} {given} {end}")
    call = lark.one_of(calls)
    return f"{call}+" if forced.parallel else call


def _arguments(schema: Mapping[str, Any], value: Value) -> list[tuple[str, bool]]:
    """Returns the expression of each argument in the schema's order, and whether it is required."""
    required = set(schema.get("required", ()))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    types = ArgumentTypes(schema)
    return [
        (value(name, {**part, **shared} if isinstance(part, dict) else part, types.of(name)), name in required)
        for name, part in schema.get("properties", {}).items()
    ]


def _elements(lark: Lark, tool: Json, value: Value, any_element: str) -> str:
    """Returns an expression for all arguments of a call, without separators.

    Args:
        any_element: the expression of an argument that the schema does not name.
    """
    schema = arguments_schema(tool)
    if schema.get("additionalProperties") is not False:
        return f"{lark.rule(any_element)}*"
    elements = [each if needed else f"({each})?" for each, needed in _arguments(schema, value)]
    return lark.rule(" ".join(elements)) if elements else ""


def _joined(lark: Lark, schema: Mapping[str, Any], value: Value, separator: str = ", ") -> str:
    """Returns an expression for arguments with separators: the required ones, then others, in the schema's order."""
    pairs = _arguments(schema, value)
    needed = [each for each, is_needed in pairs if is_needed]
    optional = [each for each, is_needed in pairs if not is_needed]
    between = lark.literal(separator)
    if needed:
        return f" {between} ".join(needed) + "".join(f" ({between} {pair})?" for pair in optional)
    rest = ""
    for index in reversed(range(len(optional))):
        others = "".join(f" ({between} {pair})?" for pair in optional[index + 1 :])
        rest = lark.rule(f"{optional[index]}{others}" + (f" | {rest}" if rest else ""))
    return f"({rest})?" if rest else ""


def _value(lark: Lark, schema: object, type: ArgumentType, end: str) -> str:
    """Returns an expression for a value whose markup has no type, and its end."""
    if type.is_text:
        return lark.text_up_to(end)
    return f"{_plain_value(lark, type, json_of(schema))} {lark.literal(end)}"


def _strings(type: ArgumentType) -> Sequence[str]:
    """Returns the string constants that a type allows."""
    return [json.loads(each.constant) for each in type.alternatives if each.type == "string" and each.constant]


def _plain_value(lark: Lark, type: ArgumentType, whole: str) -> str:
    """Returns an expression for a value that is not any text.

    Args:
        whole: the expression for values that are not string constants; those are written without quotes.
    """
    strings = _strings(type)
    if not strings:
        return whole
    others = [each.constant or whole for each in type.alternatives if each.type != "string"]
    choices = [lark.literal(text) for text in strings]
    choices += [other if other is whole else lark.literal(other) for other in dict.fromkeys(others)]
    return f"({' | '.join(choices)})"
