"""Reads a conversation from its message on the wire."""

import json
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from baton.types import Grammar
from gateway.chat.types import ChatRequest, NamedTool, ToolChoice
from protos.baton.v1 import generation_pb2 as pb

_MODES: tuple[ToolChoice, ...] = ("auto", "none", "required")


def chat_from_proto(chat: pb.Chat, grammar: Grammar | None) -> ChatRequest:
    """Raises:
    InvalidRequest: a field is not the JSON that it should be; names it.
    """
    return ChatRequest(
        messages=_objects("chat.messages_json", chat.messages_json or "[]"),
        tools=_objects("chat.tools_json", chat.tools_json or "[]"),
        tool_choice=_tool_choice("chat.tool_choice_json", chat.tool_choice_json),
        parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        grammar=grammar,
        template_kwargs=_object("chat.template_kwargs_json", chat.template_kwargs_json or "{}"),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        continue_final_message=chat.continue_final_message,
    )


def _tool_choice(field: str, text: str) -> ToolChoice:
    if text in ("", *_MODES):  # the bare word is clear enough
        return next((mode for mode in _MODES if mode == text), "auto")
    value = _parse(field, text)
    if value in _MODES:
        return next(mode for mode in _MODES if mode == value)
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        allowed = ('"auto"', '"none"', '"required"', '{"type": "function", "function": {"name": ...}}')
        raise InvalidRequest(f"{field} is {_short(text)}", field=field, value=_short(text), allowed=allowed)
    return NamedTool(name)


def _objects(field: str, text: str) -> tuple[Mapping[str, Any], ...]:
    value = _parse(field, text)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidRequest(
            f"{field} is no array of objects", field=field, value=_short(text), allowed=("a JSON array of objects",)
        )
    return tuple(value)


def _object(field: str, text: str) -> Mapping[str, Any]:
    value = _parse(field, text)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is no object", field=field, value=_short(text), allowed=("a JSON object",))
    return value


def _parse(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field=field, value=_short(text)) from None


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
