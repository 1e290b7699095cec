"""Converts system prompt and messages to messages in the shape of OpenAI's chat completions. Pure.

Texts that change with every request are kept out of the prompt's beginning, which prefix caches hold.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.blocks import (
    Block,
    CompactionBlock,
    DocumentBlock,
    DocumentContent,
    Message,
    PlainText,
    RedactedThinking,
    ResultBlock,
    ResultPicture,
    SearchResultBlock,
    ServerBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolAddition,
    ToolReference,
    ToolResult,
    ToolSearchResult,
    ToolUse,
    Turn,
)
from baton.gateway.http.anthropic.models import CountTokensRequest

Json = dict[str, Any]

# Blocks that are not part of the prompt, in messages of any role.
_SILENT = (RedactedThinking, ServerBlock, ToolAddition, ToolSearchResult)
# Claude Code's first block, with a checksum of each request; it says nothing to the model.
_HEADER_LINES = re.compile(r"(?:x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_CLOCK = re.compile(
    r"(?:today'?s|(?:the )?current) (?:date and time|date|time)(?: is)?:? [^\n]{0,40}\d[^\n]{0,40}", re.IGNORECASE
)


def conversation(request: CountTokensRequest, tools: Collection[str]) -> list[Json]:
    """Returns the conversation's messages.

    Args:
        tools: names of the tools that the model sees.

    Raises:
        InvalidRequest: a role has a block that it cannot have, or a result has no call.
    """
    return [*_system(request), *_messages(request.messages, tools)]


def _system(request: CountTokensRequest) -> Iterator[Json]:
    given = request.system or ()
    texts = stable_first([given] if isinstance(given, str) else [block.text for block in given])
    if texts:
        yield {"role": "system", "content": content_of(texts)}


def _messages(turns: Sequence[Turn], tools: Collection[str]) -> Iterator[Json]:
    last_user = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    call_ids: set[str] = set()
    for index, turn in enumerate(turns):
        where = f"messages[{index}].content"
        if isinstance(turn, SystemMessage):
            is_over = turn.clear_at == "next_user_message" and index < last_user
            if turn.content and not is_over:
                yield from _prompt(where, turn, call_ids, tools)
        elif turn.role == "assistant":
            yield _answer(where, turn)
            call_ids |= {block.id for block in turn.content if isinstance(block, ToolUse)}
        else:
            yield from _prompt(where, turn, call_ids, tools)


def _prompt(
    where: str, turn: Message | SystemMessage, call_ids: Collection[str], tools: Collection[str]
) -> Iterator[Json]:
    """Yields the messages for one of the user or the system: a message for each tool result, then one for the text."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        if isinstance(block, ToolResult) and turn.role == "user":
            _check_result(f"{where}[{index}]", block, texts, call_ids)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, tools)}
        elif isinstance(block, ToolResult | ToolUse | ThinkingBlock):
            raise _misplaced(f"{where}[{index}]", block, turn.role)
        else:
            texts += _texts(block)
    if texts or not turn.content:
        yield {"role": turn.role, "content": content_of(texts)}


def _check_result(where: str, block: ToolResult, texts: Sequence[str], call_ids: Collection[str]) -> None:
    if texts:
        cure = "give the tool_result blocks before the text"
        raise InvalidRequest(f"{where} comes after text", field=where, cure=cure)
    if block.tool_use_id not in call_ids:
        field = f"{where}.tool_use_id"
        cure = "give the assistant's message with the tool_use before it"
        raise InvalidRequest(f"{field} names no tool_use", field=field, value=block.tool_use_id, cure=cure)


def _answer(where: str, turn: Message) -> Json:
    """Returns a message of the assistant."""
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(turn.content):
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": _arguments(f"{where}[{index}].input", block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResult):
            raise _misplaced(f"{where}[{index}]", block, "assistant")
        else:
            texts += _texts(block)
    message: Json = {"role": "assistant", "content": content_of(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(block: Block | ResultBlock) -> list[str]:
    """Returns the texts that a block adds to a message."""
    if isinstance(block, TextBlock | ResultPicture):
        return [block.text]
    if isinstance(block, DocumentBlock):
        return ["\n".join(filter(None, [block.title, block.context, *_source(block)]))]
    if isinstance(block, SearchResultBlock):
        return ["\n".join([block.title, block.source, *(text.text for text in block.content)])]
    if isinstance(block, CompactionBlock):
        return [block.content] if block.content else []
    assert isinstance(block, _SILENT), f"a block of type {block.type} becomes no text"
    return []


def _source(block: DocumentBlock) -> list[str]:
    source = block.source
    if isinstance(source, PlainText):
        return [source.data]
    assert isinstance(source, DocumentContent), "documents without text are refused"
    if isinstance(source.content, str):
        return [source.content]
    return [part.text for part in source.content if isinstance(part, TextBlock)]


def _arguments(where: str, given: Json) -> str:
    try:
        return json.dumps(given, ensure_ascii=False, separators=(",", ":"))  # orjson is limited to 254 levels
    except RecursionError as error:
        raise InvalidRequest(f"{where} is nested too deeply", field=where) from error


def _misplaced(where: str, block: Block, role: str) -> InvalidRequest:
    field = f"{where}.type"
    message = f"{field} is {block.type!r}, which a message of the {role} cannot have"
    return InvalidRequest(message, field=field, value=block.type, cure="give it the role that has it")


def content_of(texts: Sequence[str]) -> str | list[Json]:
    """Returns a message's content: a string for one text, else parts."""
    if len(texts) <= 1:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]


def _result(block: ToolResult, tools: Collection[str]) -> str | list[Json]:
    """Returns a tool's output. A failure is marked in the text, because the conversation has no field for it."""
    if isinstance(block.content, str):
        return f"Error: {block.content}" if block.is_error else block.content
    texts = ["Error:"] if block.is_error else []
    for each in block.content or ():
        if isinstance(each, ToolReference):
            texts.append(f"{each.tool_name} {'can be called now' if each.tool_name in tools else 'does not exist'}.")
        else:
            texts += _texts(each)
    return content_of(texts)


def stable_first(texts: Sequence[str]) -> list[str]:
    """Returns the texts of a system prompt without `x-anthropic-` header lines at their beginning, and with those that
    only tell the date or the time at the end."""
    kept = [text for text in map(_without_headers, texts) if text]
    return sorted(kept, key=_is_clock)


def _is_clock(text: str) -> bool:
    return _CLOCK.fullmatch(text.strip()) is not None


def _without_headers(text: str) -> str:
    headers = _HEADER_LINES.match(text)
    return text if headers is None else text[headers.end() :]
