"""Converts a conversation's JSON, in the shapes of OpenAI's chat completions, to a `ChatRequest`.

The gRPC and HTTP APIs use it. It checks shapes only; the template may refuse values. Errors name the wrong value.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar
from baton.gateway.core.json_reader import DuplicateKey, NotJson, TooManyValues, parse_json
from baton.gateway.text.chat.types import ChatRequest, NamedTool, ToolChoice
from baton.protos.v1 import generation_pb2 as pb

ROLES = ("system", "developer", "user", "assistant", "tool")
CHOICES = ("auto", "none", "required")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parts with reasoning of an earlier turn, and the names of their text.
REASONING_PARTS = {"thinking": ("thinking",), "reasoning": ("text", "reasoning")}
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
MESSAGES_MAX = 100_000
TOOLS_MAX = 1024
_KEY_CHARACTERS = 80
STRINGS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal")


def chat_request(body: Mapping[str, Any], grammar: Grammar | None = None) -> ChatRequest:
    """Reads the conversation from a request's JSON.

    It reads `messages`, `tools`, `tool_choice`, `parallel_tool_calls`, `chat_template`, `chat_template_kwargs`,
    `documents`, `add_generation_prompt`, `continue_final_message` and `reasoning_effort`, and ignores other members.

    Raises:
        InvalidRequest: a value has the wrong shape; the error names it, as in messages[2].content[0].type.
    """
    _refuse_functions(body)
    tools = _tools(body.get("tools"))
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), has_tools=bool(tools)),
        parallel_tool_calls=_flag(body, "parallel_tool_calls", default=True),
        grammar=grammar,
        template_kwargs=_template_kwargs(body),
        template=_optional(body.get("chat_template"), "chat_template", str, "a string"),
        add_generation_prompt=_optional(body.get("add_generation_prompt"), "add_generation_prompt", bool, "a boolean"),
        continue_final_message=_flag(body, "continue_final_message", default=False),
    )


def chat_of_message(chat: pb.Chat, grammar: Grammar | None = None) -> ChatRequest:
    """Reads the conversation of a gRPC request.

    Raises:
        InvalidRequest: a field is not JSON, or has the wrong shape.
    """
    choice = chat.tool_choice_json
    return chat_request(
        {
            "messages": _parse(chat.messages_json, "messages"),
            "tools": _parse(chat.tools_json, "tools"),
            # The words may also stand without JSON's quotes.
            "tool_choice": choice if choice in CHOICES else _parse(choice, "tool_choice"),
            "chat_template_kwargs": _parse(chat.template_kwargs_json, "chat_template_kwargs"),
            "continue_final_message": chat.continue_final_message,
            "add_generation_prompt": chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
            "parallel_tool_calls": chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
        },
        grammar,
    )


def _parse(text: str, field: str) -> Any:
    if not text:
        return None
    try:
        return parse_json(text.encode())
    except DuplicateKey as error:
        key = error.key[:_KEY_CHARACTERS]
        raise InvalidRequest(f"{field} has the key {key!r} twice", field=field, value=key) from None
    except TooManyValues as error:
        raise InvalidRequest(f"{field} has {error}", field=field, allowed=(error.allowed,)) from None
    except NotJson as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field=field, value=text[:200]) from error


def _wrong(field: str, value: object, allowed: str, cure: str = "") -> InvalidRequest:
    shown = "an object" if isinstance(value, Mapping) else "an array" if isinstance(value, list) else json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return InvalidRequest(f"{field} is {shown}", field=field, value=shown, allowed=(allowed,), cure=cure)


def _optional(value: Any, field: str, kind: type, allowed: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise _wrong(field, value, allowed)
    return value


def _flag(body: Mapping[str, Any], field: str, *, default: bool) -> bool:
    value = _optional(body.get(field), field, bool, "a boolean")
    return default if value is None else bool(value)


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "an object")
    return value


def _array(value: Any, field: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(field, value, "an array")
    if len(value) > most:
        raise InvalidRequest(
            f"{field} has {len(value)} elements", field=field, value=len(value), allowed=(f"up to {most}",)
        )
    return value


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, value, "a string")
    return value


def _refuse_functions(body: Mapping[str, Any]) -> None:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(old) is not None:
            raise InvalidRequest(f"{old} is no longer supported", field=old, cure=f"use {new}")


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    field = "chat_template_kwargs"
    kwargs = {} if body.get(field) is None else dict(_object(body[field], field))
    if body.get("documents") is not None:
        kwargs.setdefault("documents", body["documents"])
    if kwargs.get("documents") is not None:
        for index, document in enumerate(_array(kwargs["documents"], "documents", MESSAGES_MAX)):
            _object(document, f"documents[{index}]")
    effort = _optional(body.get("reasoning_effort"), "reasoning_effort", str, "a string")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


def _messages(value: Any) -> list[dict[str, Any]]:
    messages = _array(value, "messages", MESSAGES_MAX)
    if not messages:
        raise InvalidRequest("messages is empty", field="messages", cure="give at least one message")
    return [
        _message(_object(message, f"messages[{index}]"), f"messages[{index}]") for index, message in enumerate(messages)
    ]


def _message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise _wrong(f"{field}.role", role, ", ".join(ROLES), "use role tool with tool_call_id")
    if role not in ROLES:
        raise _wrong(f"{field}.role", role, ", ".join(ROLES))
    if message.get("function_call") is not None:
        raise InvalidRequest(
            f"{field}.function_call is no longer supported", field=f"{field}.function_call", cure="use tool_calls"
        )
    made = dict(message)
    for name in STRINGS:
        if made.get(name) is not None:
            _string(made[name], f"{field}.{name}")
    if made.get("tool_calls") is not None:
        if role != "assistant":
            raise InvalidRequest(
                f"{field} of role {role} has tool_calls", field=f"{field}.tool_calls", cure="remove it"
            )
        calls = _array(made["tool_calls"], f"{field}.tool_calls", TOOLS_MAX)
        made["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if role == "assistant" and isinstance(made.get("content"), list):
        made = _with_reasoning_apart(made, field)
    made["content"] = _content(made, role, field)
    return made


def _with_reasoning_apart(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Moves the content's parts with reasoning to `reasoning_content`, where templates look for it."""
    said, thought = [], []
    for index, part in enumerate(message["content"]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "redacted_thinking":  # only its author can read it
            continue
        if isinstance(kind, str) and kind in REASONING_PARTS:
            thought.append(_reasoning(part, f"{field}.content[{index}]"))
        else:
            said.append(part)
    content = said or ""
    if not any(thought) or message.get("reasoning_content") is not None:
        return {**message, "content": content}
    return {**message, "content": content, "reasoning_content": "\n".join(thought)}


def _reasoning(part: Mapping[str, Any], field: str) -> str:
    name = next((name for name in REASONING_PARTS[part["type"]] if part.get(name) is not None), None)
    if name is None:
        return ""
    if isinstance(part[name], list):  # Mistral's form: text parts
        parts = [_part(each, f"{field}.{name}[{index}]") for index, each in enumerate(part[name])]
        return "".join(str(each["text"]) for each in parts)
    return _string(part[name], f"{field}.{name}")


def _content(message: Mapping[str, Any], role: str, field: str) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("refusal"):
            return message["refusal"]
        if role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
            return None
        if role in ("assistant", "tool"):
            return ""
        raise _wrong(f"{field}.content", content, "a string or an array of text parts")
    if not isinstance(content, list):
        raise _wrong(f"{field}.content", content, "a string or an array of text parts")
    return [_part(part, f"{field}.content[{index}]") for index, part in enumerate(content)]


def _part(part: Any, field: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _object(part, field).get("type")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise _wrong(f"{field}.type", kind, "text", "this model reads text only")
    return {"type": "text", "text": _string(part.get(key), f"{field}.{key}")}


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    made = dict(_object(call, field))
    if made.setdefault("type", "function") != "function":
        raise _wrong(f"{field}.type", made["type"], "function")
    if made.get("id") is not None:
        _string(made["id"], f"{field}.id")
    function = dict(_object(made.get("function"), f"{field}.function"))
    _string(function.get("name"), f"{field}.function.name")
    arguments = function.get("arguments")
    if arguments is None:
        function["arguments"] = "{}"
    elif not isinstance(arguments, Mapping):
        _string(arguments, f"{field}.function.arguments")
    return {**made, "function": function}


def _tools(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(_array(value, "tools", TOOLS_MAX))]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            field = f"tools[{index}].function.name"
            raise InvalidRequest(
                f"{field} is {name!r} again", field=field, value=name, cure="give each tool its own name"
            )
        seen.add(name)
    return tools


def _tool(tool: Any, field: str) -> dict[str, Any]:
    # Every prefix is cached, and the template would write the mark into the prompt.
    made = {name: value for name, value in _object(tool, field).items() if name != "cache_control"}
    if made.get("type") != "function":
        raise _wrong(f"{field}.type", made.get("type"), "function")
    function = dict(_object(made.get("function"), f"{field}.function"))
    function.pop("cache_control", None)
    made["function"] = function
    name = _string(function.get("name"), f"{field}.function.name")
    if not FUNCTION_NAME.fullmatch(name):
        raise _wrong(f"{field}.function.name", name, "1 to 128 letters, digits, underscores, dots and dashes")
    if function.get("description") is not None:
        _string(function["description"], f"{field}.function.description")
    if function.get("parameters") is not None:
        _check_schema(_object(function["parameters"], f"{field}.function.parameters"), f"{field}.function.parameters")
    return made


def _check_schema(schema: Mapping[str, Any], field: str) -> None:
    """Checks what grammars and parsers of calls rely on. The grammar's compiler checks the rest of the schema."""
    if "properties" in schema:
        _object(schema["properties"], f"{field}.properties")
    if "required" in schema:
        for index, name in enumerate(_array(schema["required"], f"{field}.required", MESSAGES_MAX)):
            _string(name, f"{field}.required[{index}]")


def _tool_choice(value: Any, *, has_tools: bool) -> ToolChoice:
    if value is None:
        return "auto" if has_tools else "none"
    if isinstance(value, str):
        if value == "auto" and not has_tools:
            return "none"
        for choice in CHOICES:
            if value == choice:
                return choice  # type: ignore[return-value]
        raise _wrong("tool_choice", value, ", ".join(CHOICES) + " or an object that names a function")
    choice_object = _object(value, "tool_choice")
    if choice_object.get("type") != "function":
        raise _wrong("tool_choice.type", choice_object.get("type"), "function")
    function = choice_object.get("function", choice_object)  # the Responses API has the name next to the type
    return NamedTool(_string(_object(function, "tool_choice.function").get("name"), "tool_choice.function.name"))
