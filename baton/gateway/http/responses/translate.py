"""Translates Responses requests to ours: items become messages in the shape of OpenAI's chat completions. Pure."""

from collections.abc import Sequence
from typing import Any

import orjson

from baton.core.errors import InvalidRequest
from baton.core.sampling_field import Door
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.common_fields import fill, reasoning_variables
from baton.gateway.http.responses.models import (
    AllowedTools,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    Part,
    Reasoning,
    ResponsesRequest,
)
from baton.gateway.text.chat.types import ChatRequest, NamedTool, ToolChoice
from baton.protos.v1 import generation_pb2 as pb

LOGPROBS = "message.output_text.logprobs"


def to_message(request: ResponsesRequest) -> pb.GenerateRequest:
    """Translates all of a request but the conversation. The caller sets `request_id`.

    Raises:
        InvalidRequest: the request resumes an output and wants logprobs, which this gateway has only for new tokens.
    """
    message = pb.GenerateRequest(model=request.model)
    sampling = fill(message, request, Door.RESPONSES)
    if request.max_output_tokens is not None:
        sampling.max_tokens = request.max_output_tokens
    if wants_logprobs(request):
        if request.baton.output_token_ids:
            raise InvalidRequest(
                "baton.output_token_ids and logprobs exclude each other: a response has the logprobs of all tokens",
                field="output_token_ids",
                value=len(request.baton.output_token_ids),
                cure="leave out the logprobs, or send the request from the beginning",
            )
        sampling.logprobs = request.top_logprobs or 0
    return message


def wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Translates the conversation.

    Raises:
        InvalidRequest: an output belongs to no call, or `tool_choice` names no tool.
    """
    tools = request.tools or ()
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        tools = _allowed(choice, tools)
    return ChatRequest(
        messages=_messages(request),
        tools=[_tool(tool) for tool in tools],
        tool_choice=_choice(choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        grammar=_grammar(request),
        template_kwargs=_variables(request),
    )


class _Conversation:
    """Collects messages. All items of one assistant turn become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def add(self, index: int, item: Item) -> None:
        match item:
            case Message(role="assistant"):
                self._add_answer(_content(item.content))
            case Message():
                self._add_prompt(item)
            case FunctionCall():
                self._add_call(item)
            case FunctionCallOutput():
                self._add_output(index, item)
            case Reasoning():
                if item.text:
                    self._turn(new="reasoning_content")["reasoning_content"] = item.text

    def add_instructions(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def _add_prompt(self, item: Message) -> None:
        role = "user" if item.role == "user" else "system"
        content = _content(item.content)
        # Many templates take only one system message, so those at the start are merged.
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            first = self.messages[0]["content"]
            self.messages[0]["content"] = [*_parts(first), *_parts(content)]
            return
        self.messages.append({"role": role, "content": content})

    def _add_answer(self, content: str | list[dict[str, str]]) -> None:
        self._turn(new="content")["content"] = content

    def _add_call(self, item: FunctionCall) -> None:
        calls = self._turn().setdefault("tool_calls", [])
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._call_ids.add(item.call_id)

    def _add_output(self, index: int, item: FunctionCallOutput) -> None:
        if item.call_id not in self._call_ids:
            field = f"input[{index}].call_id"
            cure = "give the function_call item before its output"
            raise InvalidRequest(f"{field} names no call", field=field, value=item.call_id, cure=cure)
        content = _content(item.output)
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _turn(self, new: str = "") -> dict[str, Any]:
        """Returns the assistant's message in progress. Begins a new one after another role's message, or if the message
        already has `new` or tool calls."""
        last = self.messages[-1] if self.messages else {}
        begun = last.get("role") == "assistant" and not (new and (new in last or "tool_calls" in last))
        # Reasoning comes before the answer that it led to.
        if not begun or (new == "reasoning_content" and "content" in last):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    conversation = _Conversation()
    if request.instructions:
        conversation.add_instructions(request.instructions)
    if isinstance(request.input, str):
        return [*conversation.messages, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        conversation.add(index, item)
    for message in conversation.messages:
        message.setdefault("content", "")
    return conversation.messages


def _content(content: str | list[Part]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0].text
    return [{"type": "text", "text": part.text} for part in content]


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: str | NamedFunction | AllowedTools | None, tools: Sequence[FunctionTool]) -> ToolChoice:
    if isinstance(choice, NamedFunction):
        _check_named("tool_choice.name", choice.name, tools)
        return NamedTool(choice.name)
    if isinstance(choice, AllowedTools):
        return choice.mode
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice is 'required' without tools", field="tool_choice", cure="give tools")
    return "none" if choice == "none" else "required" if choice == "required" else "auto"


def _allowed(choice: AllowedTools, tools: Sequence[FunctionTool]) -> list[FunctionTool]:
    for index, named in enumerate(choice.tools):
        _check_named(f"tool_choice.tools[{index}].name", named.name, tools)
    names = {named.name for named in choice.tools}
    return [tool for tool in tools if tool.name in names]


def _check_named(field: str, name: str, tools: Sequence[FunctionTool]) -> None:
    names = tuple(tool.name for tool in tools)
    if name not in names:
        raise InvalidRequest(
            f"{field} names no tool", field=field, value=name, allowed=names, cure="give it in `tools`"
        )


def _grammar(request: ResponsesRequest) -> Grammar | None:
    wanted = request.text.format if request.text is not None else None
    if isinstance(wanted, JsonSchemaFormat):
        return Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(wanted.schema_).decode())
    return Grammar(GrammarKind.JSON_OBJECT) if isinstance(wanted, JsonObjectFormat) else None


def _variables(request: ResponsesRequest) -> dict[str, Any]:
    variables = reasoning_variables(effort=request.reasoning.effort if request.reasoning else None)
    if request.text is not None and request.text.verbosity is not None:
        variables["verbosity"] = request.text.verbosity
    return {**variables, **(request.chat_template_kwargs or {})}
