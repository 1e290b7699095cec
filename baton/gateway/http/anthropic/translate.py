"""Translates Messages requests to ours. Pure."""

from collections.abc import Sequence
from typing import Any

import orjson

from baton.core.errors import InvalidRequest
from baton.core.sampling_field import Door
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.anthropic.blocks import Effort, SystemMessage
from baton.gateway.http.anthropic.client_tools import description_of, schema_of
from baton.gateway.http.anthropic.conversation import conversation
from baton.gateway.http.anthropic.models import (
    CountTokensRequest,
    JsonFormat,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
)
from baton.gateway.http.anthropic.tool_loading import visible
from baton.gateway.http.anthropic.tools import AnyTool, Auto, ClientTool, NoTool, OneTool, OwnTool, ServerTool
from baton.gateway.http.common_fields import fill, reasoning_variables
from baton.gateway.http.keep_time import longest_ttl, set_keep_time
from baton.gateway.text.chat.types import ChatRequest, NamedTool, ToolChoice
from baton.protos.v1 import generation_pb2 as pb

Json = dict[str, Any]


def to_message(request: MessagesRequest, *, interleaved: bool = False) -> pb.GenerateRequest:
    """Translates all of a request but the conversation. The caller sets `request_id`.

    Args:
        interleaved: whether the client's thinking budget is that of several answers between calls of tools, so that it
            may be above `max_tokens`.

    Raises:
        InvalidRequest: the thinking budget leaves no tokens for the answer.
    """
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens and not interleaved:
        field, value = "thinking.budget_tokens", thinking.budget_tokens
        raise InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=("less than max_tokens",))
    message = pb.GenerateRequest(model=request.model)
    sampling = fill(message, request, Door.MESSAGES)
    set_keep_time(message, retention=longest_ttl(request))
    sampling.max_tokens = max(1, request.max_tokens)  # after 0, `without_output` leaves the token out
    return message


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Translates the conversation. If its last message is the assistant's and not empty, the model continues it.

    Raises:
        InvalidRequest: a role has a block that it cannot have, a result has no call, or `tool_choice` names no tool.
    """
    tools = visible(request)
    messages = conversation(request, {tool.name for tool in tools})
    continued = request.messages[-1].role == "assistant"
    if continued and "tool_calls" in messages[-1]:
        field = f"messages[{len(request.messages) - 1}].content"
        cure = "send a message of the user with the tool_result blocks"
        raise InvalidRequest(f"{field} ends the conversation with a tool_use", field=field, cure=cure)
    if continued and not messages[-1]["content"]:
        messages.pop()
        continued = False
    if not messages:
        raise InvalidRequest("messages has no content", field="messages", cure="begin with a message of the user")
    return ChatRequest(
        messages=messages,
        tools=[_tool(tool) for tool in tools],
        tool_choice=_choice(request, tools),
        parallel_tool_calls=not getattr(request.tool_choice, "disable_parallel_tool_use", False),
        grammar=_grammar(request),
        template_kwargs={**_variables(request), **(request.chat_template_kwargs or {})},
        continue_final_message=continued,
    )


def _tool(tool: OwnTool | ClientTool) -> Json:
    if isinstance(tool, ClientTool):
        description: str | None = description_of(tool.type)
        schema = schema_of(tool.type)
    else:
        description, schema = tool.description, tool.input_schema
    function: Json = {"name": tool.name, "parameters": schema}
    if description is not None:
        function["description"] = description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(request: CountTokensRequest, tools: Sequence[OwnTool | ClientTool]) -> ToolChoice:
    choice = request.tool_choice
    match choice:
        case None | Auto():
            return "auto"
        case NoTool():
            return "none"
        case AnyTool():
            if not tools:
                cure = "give tools that you run yourself"
                raise InvalidRequest("tool_choice is 'any' without tools", field="tool_choice", cure=cure)
            return "required"
        case OneTool(name=name):
            names = tuple(tool.name for tool in tools)
            if name not in names:
                raise _no_tool(name, names, request)
            return NamedTool(name)


def _no_tool(name: str, names: tuple[str, ...], request: CountTokensRequest) -> InvalidRequest:
    field = "tool_choice.name"
    if any(isinstance(tool, ServerTool) and tool.name == name for tool in request.tools or ()):
        message, cure = f"{field} names a tool that nobody runs here", "give a tool that you run yourself"
    else:
        message, cure = f"{field} names no tool", "add it to `tools`"
    return InvalidRequest(message, field=field, value=name, allowed=names, cure=cure)


def _grammar(request: CountTokensRequest) -> Grammar | None:
    form = _format(request)
    return None if form is None else Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(form.schema_).decode())


def _format(request: CountTokensRequest) -> JsonFormat | None:
    given = None if request.output_config is None else request.output_config.format
    if given is not None and request.output_format is not None:
        cure = "give output_config.format only"
        raise InvalidRequest("output_format and output_config.format are both set", field="output_format", cure=cure)
    return given or request.output_format


def _variables(request: CountTokensRequest) -> dict[str, object]:
    thinking = None if request.thinking is None else not isinstance(request.thinking, ThinkingDisabled)
    return reasoning_variables(effort=_effort(request), thinking=thinking)


def _effort(request: CountTokensRequest) -> Effort | None:
    """Returns the effort that the last instruction in the conversation sets, else that of the whole request."""
    for turn in reversed(request.messages):
        if isinstance(turn, SystemMessage) and turn.output_config is not None and turn.output_config.effort is not None:
            return turn.output_config.effort
    return request.output_config.effort if request.output_config is not None else None
