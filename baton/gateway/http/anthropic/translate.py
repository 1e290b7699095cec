"""Translates Messages requests to ours: blocks become messages in the shape of OpenAI's chat completions. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from baton.core.errors import InvalidRequest
from baton.core.sampling_field import Door
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.anthropic.models import (
    AnyTool,
    Auto,
    Block,
    CountTokensRequest,
    Message,
    MessagesRequest,
    NoTool,
    OneTool,
    TextBlock,
    Thinking,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolResult,
    ToolUse,
)
from baton.gateway.http.common_fields import fill, reasoning_variables
from baton.gateway.text.chat.types import ChatRequest, NamedTool, ToolChoice
from baton.protos.v1 import generation_pb2 as pb

Json = dict[str, Any]


def to_message(request: MessagesRequest) -> pb.GenerateRequest:
    """Translates all of a request but the conversation. The caller sets `request_id`.

    Raises:
        InvalidRequest: the thinking budget leaves no tokens for the answer.
    """
    if isinstance(request.thinking, ThinkingEnabled) and request.thinking.budget_tokens >= request.max_tokens:
        field = "thinking.budget_tokens"
        value = request.thinking.budget_tokens
        raise InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=("less than max_tokens",))
    message = pb.GenerateRequest(model=request.model)
    sampling = fill(message, request, Door.MESSAGES)
    sampling.max_tokens = request.max_tokens
    return message


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Translates the conversation. If its last message is the assistant's and not empty, the model continues it.

    Raises:
        InvalidRequest: a role has a block that it cannot have, a result has no call, or `tool_choice` names no tool.
    """
    messages = list(_messages(request))
    tools = request.tools or ()
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


def _messages(request: CountTokensRequest) -> Iterator[Json]:
    if request.system:
        yield {"role": "system", "content": _content(request.system)}
    call_ids: set[str] = set()
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _answer(where, message.content)
            call_ids |= {block.id for block in message.content if isinstance(block, ToolUse)}
        else:
            yield from _prompt(where, message, message.content, call_ids)


def _prompt(where: str, message: Message, blocks: Sequence[Block], call_ids: set[str]) -> Iterator[Json]:
    """Yields the messages for one of the user or the system: a message for each tool result, then one for the text."""
    texts: list[TextBlock] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResult) and message.role == "user":
            _check_result(f"{where}[{index}]", block, texts, call_ids)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        else:
            raise _misplaced(f"{where}[{index}]", block, message.role)
    if texts or not blocks:
        yield {"role": message.role, "content": _content(texts)}


def _check_result(where: str, block: ToolResult, texts: Sequence[TextBlock], call_ids: set[str]) -> None:
    if texts:
        cure = "give the tool_result blocks before the text"
        raise InvalidRequest(f"{where} comes after text", field=where, cure=cure)
    if block.tool_use_id not in call_ids:
        field = f"{where}.tool_use_id"
        cure = "give the assistant's message with the tool_use before it"
        raise InvalidRequest(f"{field} names no tool_use", field=field, value=block.tool_use_id, cure=cure)


def _answer(where: str, blocks: Sequence[Block]) -> Json:
    """Returns a message of the assistant."""
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": _arguments(f"{where}[{index}].input", block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResult):
            raise _misplaced(f"{where}[{index}]", block, "assistant")
    message: Json = {"role": "assistant", "content": _content(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(where: str, given: Json) -> str:
    try:
        return json.dumps(given, ensure_ascii=False, separators=(",", ":"))  # orjson is limited to 254 levels
    except RecursionError as error:
        raise InvalidRequest(f"{where} is nested too deeply", field=where) from error


def _misplaced(where: str, block: Block, role: str) -> InvalidRequest:
    field = f"{where}.type"
    message = f"{field} is {block.type!r}, which a message of the {role} cannot have"
    return InvalidRequest(message, field=field, value=block.type, cure="give it the role that has it")


def _content(texts: str | Sequence[TextBlock]) -> str | list[Json]:
    if isinstance(texts, str):
        return texts
    if len(texts) <= 1:
        return texts[0].text if texts else ""
    return [{"type": "text", "text": text.text} for text in texts]


def _result(block: ToolResult) -> str | list[Json]:
    """Returns a tool's output. A failure is marked in the text, because the conversation has no field for it."""
    content = _content(block.content or "")
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error:"}, *content]


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(request: CountTokensRequest, tools: Sequence[Tool]) -> ToolChoice:
    choice = request.tool_choice
    match choice:
        case None | Auto():
            return "auto"
        case NoTool():
            return "none"
        case AnyTool():
            if not tools:
                raise InvalidRequest("tool_choice is 'any' without tools", field="tool_choice", cure="give tools")
            return "required"
        case OneTool(name=name):
            names = tuple(tool.name for tool in tools)
            if name not in names:
                field = "tool_choice.name"
                cure = "give it in `tools`"
                raise InvalidRequest(f"{field} names no tool", field=field, value=name, allowed=names, cure=cure)
            return NamedTool(name)


def _grammar(request: CountTokensRequest) -> Grammar | None:
    if request.output_config is None or request.output_config.format is None:
        return None
    return Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(request.output_config.format.schema_).decode())


def _variables(request: CountTokensRequest) -> dict[str, object]:
    effort = request.output_config.effort if request.output_config is not None else None
    thinking = None if request.thinking is None else not isinstance(request.thinking, ThinkingDisabled)
    return reasoning_variables(effort=effort, thinking=thinking)
