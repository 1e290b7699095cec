"""Custom tools of chat completions: tools of the client whose input is a text instead of JSON. Pure.

A template knows functions only, so the model sees such a tool as a function with one text, and earlier calls of it as
calls of that function.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar
from baton.gateway.http.allowed_tools import ChatAllowedTools
from baton.gateway.http.checking import Model, by_type, tag
from baton.gateway.http.custom_input import GRAMMAR_KINDS, as_arguments, text_function
from baton.gateway.http.field_errors import short

Json = dict[str, Any]


class ChatTextFormat(Model):
    type: Literal["text"]


class ChatGrammar(Model):
    """A language, by its grammar."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class ChatGrammarFormat(Model):
    type: Literal["grammar"]
    grammar: ChatGrammar


class ChatCustomDefinition(Model):
    """What the model is shown of a custom tool."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    format: (
        Annotated[Annotated[ChatTextFormat, tag("text")] | Annotated[ChatGrammarFormat, tag("grammar")], by_type()]
        | None
    ) = None

    @property
    def grammar(self) -> Grammar | None:
        """The language of the tool's input; None: any text."""
        if not isinstance(self.format, ChatGrammarFormat):
            return None
        return Grammar(GRAMMAR_KINDS[self.format.grammar.syntax], self.format.grammar.definition)


class ChatCustomTool(Model):
    """A tool of the client whose input is a text instead of JSON."""

    type: Literal["custom"]
    custom: ChatCustomDefinition


ChatTool = Annotated[Annotated[Json, tag("function")] | Annotated[ChatCustomTool, tag("custom")], by_type()]


@dataclass(frozen=True)
class CustomTools:
    """The custom tools of one chat that the model may call.

    Attributes:
        grammars: the languages of their inputs by the tools' names; None: any text.
        raw_tool: the only tool that may be called, if its input has a grammar. Then the output is that input itself.
            Empty: there is none.
        grammar_field: the body's field with the grammar of `raw_tool`.
    """

    grammars: Mapping[str, Grammar | None] = field(default_factory=dict)
    raw_tool: str = ""
    grammar_field: str = ""

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the whole output, if there is a `raw_tool`."""
        return self.grammars.get(self.raw_tool)

    @property
    def warnings(self) -> list[str]:
        free = [name for name, grammar in self.grammars.items() if grammar is not None and name != self.raw_tool]
        names = ", ".join(free)
        return [f"tools: the grammar of {names} is enforced only if tool_choice names the tool"] if free else []


def custom_tools(tools: Sequence[Json | ChatCustomTool], choice: object) -> CustomTools:
    """Finds the custom tools among a chat's tools, and the one that must be called.

    Raises:
        InvalidRequest: two custom tools have one name, or `choice` has an unknown type, or names a tool that is not
            there.
    """
    places: dict[str, int] = {}
    grammars: dict[str, Grammar | None] = {}
    for index, tool in enumerate(tools):
        if isinstance(tool, ChatCustomTool):
            name, where = tool.custom.name, f"tools[{index}].custom.name"
            if name in places:
                cure = "give each tool its own name"
                raise InvalidRequest(f"{where} is {name!r} again", field=where, value=name, cure=cure)
            places[name], grammars[name] = index, tool.custom.grammar
    count = len(tools)
    if isinstance(choice, ChatAllowedTools):
        names, choice = allowed_names(choice, tools), choice.mode
        count, grammars = len(names), {name: grammars[name] for name in grammars if name in names}
    forced = _chosen(choice, tuple(grammars)) if isinstance(choice, dict) else ""
    if choice == "required" and count == 1:
        forced = next(iter(grammars), "")
    if grammars.get(forced) is None:
        return CustomTools(grammars)
    return CustomTools(grammars, forced, f"tools[{places[forced]}].custom.format.grammar.definition")


def allowed_names(choice: ChatAllowedTools, tools: Sequence[Json | ChatCustomTool]) -> frozenset[str]:
    """Returns the names of the tools that a choice allows.

    Raises:
        InvalidRequest: one of them is not there.
    """
    return choice.names([_type_and_name(tool) for tool in tools])


def with_functions(conversation: Mapping[str, Any]) -> Json:
    """Returns a conversation with functions in place of its custom tools, their choice and their calls.

    Args:
        conversation: `messages` as the client sent them, `tools` as their models, and `tool_choice`.

    Raises:
        InvalidRequest: a custom call has another shape, or `tool_choice` names no tool.
    """
    tools, choice = conversation["tools"], conversation.get("tool_choice")
    names = tuple(tool.custom.name for tool in tools if isinstance(tool, ChatCustomTool))
    if isinstance(choice, dict) and (name := _chosen(choice, names)):
        choice = {"type": "function", "function": {"name": name}}
    if isinstance(choice, ChatAllowedTools):
        choice = choice.mode  # the caller leaves out the other tools
    return {
        **conversation,
        "messages": [_message(each, f"messages[{at}]") for at, each in enumerate(conversation["messages"])],
        "tools": [_function(tool) if isinstance(tool, ChatCustomTool) else tool for tool in tools],
        "tool_choice": choice,
    }


def _chosen(choice: Json, names: tuple[str, ...]) -> str:
    """Returns the name of the custom tool that a choice names; empty: it names a function."""
    kind = choice.get("type")
    if kind not in ("function", "custom"):
        allowed, value = ("'function'", "'custom'", "'allowed_tools'"), short(kind)
        raise InvalidRequest(f"tool_choice.type is {value}", field="tool_choice.type", value=value, allowed=allowed)
    named = choice.get(kind, choice)  # the Responses API has the name next to the type
    name = named.get("name") if isinstance(named, dict) else None
    if isinstance(name, str) and name in names:
        return name
    if kind == "function":
        return ""
    where = "tool_choice.custom.name"
    raise InvalidRequest(
        f"{where} names no custom tool", field=where, value=short(name), allowed=names, cure="add it to `tools`"
    )


def _type_and_name(tool: Json | ChatCustomTool) -> tuple[str, str]:
    if isinstance(tool, ChatCustomTool):
        return "custom", tool.custom.name
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return "function", name if isinstance(name, str) else ""  # a wrong tool is refused later


def _function(tool: ChatCustomTool) -> Json:
    custom = tool.custom
    return {"type": "function", "function": text_function(custom.name, custom.description, custom.grammar)}


def _message(message: Json, where: str) -> Json:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(map(_is_custom, calls)):
        return message
    return {
        **message,
        "tool_calls": [
            _function_call(call, f"{where}.tool_calls[{index}].custom") if _is_custom(call) else call
            for index, call in enumerate(calls)
        ],
    }


def _is_custom(call: object) -> bool:
    return isinstance(call, dict) and call.get("type") == "custom"


def _function_call(call: Json, where: str) -> Json:
    custom = call.get("custom")
    name, text = (custom.get("name"), custom.get("input")) if isinstance(custom, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        allowed, value = ("an object with the strings name and input",), short(custom)
        raise InvalidRequest(f"{where} is {value}", field=where, value=value, allowed=allowed)
    others = {key: value for key, value in call.items() if key != "custom"}
    return {**others, "type": "function", "function": {"name": name, "arguments": as_arguments(text)}}
