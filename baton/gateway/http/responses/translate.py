"""Translates Responses requests to ours: items become messages in the shape of OpenAI's chat completions. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.core.errors import InvalidRequest
from baton.core.sampling_field import Door
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.common_fields import fill, reasoning_variables
from baton.gateway.http.custom_input import as_arguments
from baton.gateway.http.keep_time import set_keep_time
from baton.gateway.http.responses.items import (
    AdditionalTools,
    AgentMessage,
    ApplyPatchCall,
    ApplyPatchOutput,
    CallOutput,
    CustomToolCall,
    FunctionCall,
    Item,
    ItemReference,
    LocalShellCall,
    LocalShellOutput,
    Message,
    NoText,
    OutputPart,
    Part,
    Reasoning,
    ShellCall,
    ShellOutput,
    ToolSearchCall,
    ToolSearchOutput,
    UnreadItem,
)
from baton.gateway.http.responses.models import (
    ENCRYPTED,
    LOGPROBS,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesRequest,
)
from baton.gateway.http.responses.tool_table import ShownTool, ToolTable, shown_name
from baton.gateway.http.responses.tools import AllowedTools, ChosenTool, ClientToolChoice
from baton.gateway.text.chat.types import ChatRequest, NamedTool, ToolChoice
from baton.protos.v1 import generation_pb2 as pb

_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Conversation:
    """What a request asks of the model.

    Attributes:
        tools: the client's tools.
        raw_tool: the only tool that may be called, if its input has a grammar. Then the output is that input itself.
        warnings: parts of the request that have no effect.
    """

    chat: ChatRequest
    tools: ToolTable
    raw_tool: ShownTool | None = None
    warnings: tuple[str, ...] = ()


def to_message(request: ResponsesRequest) -> pb.GenerateRequest:
    """Translates all of a request but the conversation. The caller sets `request_id`.

    Raises:
        InvalidRequest: the request resumes an output and wants logprobs, which this gateway has only for new tokens.
    """
    message = pb.GenerateRequest(model=request.model)
    sampling = fill(message, request, Door.RESPONSES)
    set_keep_time(message, cache_key=request.prompt_cache_key, retention=request.prompt_cache_retention)
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
    """Translates a conversation that refers to nothing stored. Raises what `to_conversation` raises."""
    return to_conversation(request).chat


def to_conversation(
    request: ResponsesRequest, previous: Sequence[Item] = (), referenced: Mapping[str, Item] | None = None
) -> Conversation:
    """Translates the conversation.

    Args:
        previous: the items before those of the request.
        referenced: stored items by their ids, for references.

    Raises:
        InvalidRequest: an output belongs to no call, a reference to no item, `tool_choice` names no tool, or the model
            could not tell two tools apart.
    """
    collected = _Items(ToolTable(), referenced or {})
    collected.tools.add(request.tools or (), "tools")
    if request.instructions:
        collected.messages.append({"role": "system", "content": request.instructions})
    for index, item in enumerate(previous):
        collected.add(f"the stored items[{index}]", item)
    if isinstance(request.input, str):
        collected.messages.append({"role": "user", "content": request.input})
    else:
        for index, item in enumerate(request.input):
            collected.add(f"input[{index}]", item)
    for message in collected.messages:
        message.setdefault("content", "")
    tools, choice = collected.tools, request.tool_choice
    if isinstance(choice, AllowedTools):
        tools, choice = tools.allowed(choice), choice.mode
    raw_tool = _raw_tool(choice, tools)
    chat = ChatRequest(
        messages=collected.messages,
        tools=tools.functions(),
        tool_choice=_choice(choice, tools) if raw_tool is None else NamedTool(raw_tool.shown_name),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        grammar=_grammar(request) if raw_tool is None else raw_tool.grammar,
        template_kwargs=_variables(request),
        raw_tool="" if raw_tool is None else raw_tool.shown_name,
    )
    return Conversation(chat, tools, raw_tool, tuple(_warnings(request, collected, raw_tool)))


@dataclass
class _Items:
    """Collects messages. All items of one assistant turn become one message."""

    tools: ToolTable
    referenced: Mapping[str, Item]
    messages: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)
    _call_ids: set[str] = field(default_factory=set)

    def add(self, where: str, item: Item) -> None:
        """Adds an item; `where` is its place, for errors."""
        match item:
            case Message(role="assistant"):
                self._turn(new="content")["content"] = self._content(item.content)
            case Message():
                self._add_prompt(item)
            case AgentMessage():
                begin = {"type": "text", "text": f"{item.author} to {item.recipient}:"}
                self.messages.append({"role": "user", "content": [begin, *_parts(self._content(item.content))]})
            case Reasoning():
                self._add_reasoning(item)
            case FunctionCall() | CustomToolCall() | LocalShellCall() | ShellCall() | ApplyPatchCall():
                self._add_call(*_called(item))
            case ToolSearchCall():
                if item.call_id is not None:
                    self._add_call(item.call_id, "tool_search", _arguments(item.arguments))
            case ToolSearchOutput():
                self.tools.add(item.tools, f"{where}.tools")
                if item.call_id is not None:
                    self._add_output(where, item.call_id, f"found {len(item.tools)} tool(s)")
            case AdditionalTools():
                self.tools.add(item.tools, f"{where}.tools")
            case CallOutput():
                self._add_output(where, item.call_id, self._content(item.output))
            case LocalShellOutput():
                self._add_output(where, item.call_id or item.id or "", item.output)
            case ShellOutput():
                self._add_output(where, item.call_id, _arguments(item.output))
            case ApplyPatchOutput():
                self._add_output(where, item.call_id, "\n".join(filter(None, (item.status, item.output))))
            case ItemReference():
                self._add_referenced(where, item)
            case UnreadItem():
                self.left_out[f"items of type {item.type}"] = None

    def _add_prompt(self, item: Message) -> None:
        role = "system" if item.role in _SYSTEM else "user"
        content = self._content(item.content)
        # Many templates take only one system message, so those at the start are merged.
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            first = self.messages[0]["content"]
            self.messages[0]["content"] = [*_parts(first), *_parts(content)]
            return
        self.messages.append({"role": role, "content": content})

    def _add_reasoning(self, item: Reasoning) -> None:
        if item.text:
            self._turn(new="reasoning_content")["reasoning_content"] = item.text
        elif item.encrypted_content:
            self.left_out["encrypted reasoning of other servers"] = None

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._call_ids.add(call_id)

    def _add_output(self, where: str, call_id: str, content: str | list[dict[str, str]]) -> None:
        if call_id not in self._call_ids:
            cure = "give the call's item before its output"
            raise InvalidRequest(f"{where}.call_id names no call", field=f"{where}.call_id", value=call_id, cure=cure)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_referenced(self, where: str, reference: ItemReference) -> None:
        item = self.referenced.get(reference.id)
        if item is None:
            raise InvalidRequest(
                f"{where}.id names no stored item",
                field=f"{where}.id",
                value=reference.id,
                cure="send the item itself, or the `previous_response_id`",
            )
        self.add(where, item)

    def _content(self, content: str | Sequence[Part | OutputPart]) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content
        self.left_out.update({f"parts of type {part.type}": None for part in content if isinstance(part, NoText)})
        if len(content) == 1:
            return content[0].text
        return [{"type": "text", "text": part.text} for part in content]

    def _turn(self, new: str = "") -> dict[str, Any]:
        """Returns the assistant's message in progress. Begins a new one after another role's message, or if the message
        already has `new` or tool calls."""
        last = self.messages[-1] if self.messages else {}
        begun = last.get("role") == "assistant" and not (new and (new in last or "tool_calls" in last))
        # Reasoning comes before the answer that it led to.
        if not begun or (new == "reasoning_content" and "content" in last):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def _called(
    item: FunctionCall | CustomToolCall | LocalShellCall | ShellCall | ApplyPatchCall,
) -> tuple[str, str, str]:
    """Returns the id of a call, the function's name as the model sees it, and its arguments as JSON."""
    match item:
        case FunctionCall():
            return item.call_id, shown_name(item.name, item.namespace), item.arguments
        case CustomToolCall():
            return item.call_id, shown_name(item.name, item.namespace), as_arguments(item.input)
        case LocalShellCall():
            given = {name: value for name, value in item.action.items() if name != "type" and value}
            return item.call_id or item.id or "", "local_shell", _arguments(given)
        case ShellCall():
            given = {name: value for name, value in item.action.items() if value is not None}
            return item.call_id, "shell", _arguments(given)
        case ApplyPatchCall():
            return item.call_id, "apply_patch", _arguments(item.operation)


def _arguments(given: object) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _raw_tool(choice: object, tools: ToolTable) -> ShownTool | None:
    """Returns the tool whose input is the whole output: the only one that may be called, if its input has a grammar."""
    if isinstance(choice, ChosenTool):
        found = tools.chosen(choice)
    elif choice == "required" and len(tools.tools) == 1:
        (found,) = tools.tools.values()
    else:
        return None
    return found if found.grammar is not None else None


def _choice(choice: str | ChosenTool | ClientToolChoice | None, tools: ToolTable) -> ToolChoice:
    if isinstance(choice, ChosenTool | ClientToolChoice):
        return NamedTool(tools.chosen(choice).shown_name)
    if choice == "required" and not tools.tools:
        raise InvalidRequest(
            "tool_choice is 'required' without tools that the model can call", field="tool_choice", cure="add tools"
        )
    return "none" if choice == "none" else "required" if choice == "required" else "auto"


def _warnings(request: ResponsesRequest, collected: _Items, raw_tool: ShownTool | None) -> list[str]:
    warnings = []
    if hosted := collected.tools.left_out:
        warnings.append(f"tools: {', '.join(hosted)}: these run at OpenAI only, so the model does not see them")
    free = [tool.shown_name for tool in collected.tools.tools.values() if tool.grammar is not None and tool != raw_tool]
    if free:
        warnings.append(f"tools: the grammar of {', '.join(free)} is enforced only if tool_choice names the tool")
    if collected.left_out:
        warnings.append(f"input: left out: {', '.join(collected.left_out)}")
    if unknown := [name for name in request.include or () if name not in (LOGPROBS, ENCRYPTED)]:
        warnings.append(f"include: {', '.join(unknown)}: this server has no such items")
    return warnings


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
