"""The results of a request: events while it streams, and whole outputs joined from them."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from baton.core.errors import InternalError
from baton.core.types import FinishReason, PromptLogprob, Receipt, TokenOutput, Usage


@dataclass(frozen=True)
class ToolCall:
    """A tool call, or a streamed piece of one. All pieces share `index`; only the first has `id` and `name`."""

    index: int
    id: str
    name: str
    arguments: str  # JSON, or a piece of it


@dataclass(frozen=True)
class ChatDelta:
    """New answer text, reasoning and tool calls of a chat, parsed from the model's raw text."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Piece:
    """New tokens of one output, with their text.

    Attributes:
        text: empty while a character is incomplete; of a chat, the raw text with its markup.
        index: number of the output, from 0.
        chat: the text's meaning; None unless the request is a chat.
        prompt_logprobs: in an output's first event with tokens, if they were requested.
    """

    text: str
    tokens: tuple[TokenOutput, ...]
    index: int = 0
    chat: ChatDelta | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    request_id: str = ""


@dataclass(frozen=True)
class Finished:
    """The last event of one output: the rest of its text, why it ended, usage and receipt.

    If a request has several outputs, the last one to end carries the usage of all, and the others carry zeros.
    """

    text: str
    finish_reason: FinishReason
    stop_reason: str  # the stop string or stop token id that ended the output, if any
    usage: Usage
    receipt: Receipt
    tokens: tuple[TokenOutput, ...] = ()
    index: int = 0
    chat: ChatDelta | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    request_id: str = ""


@dataclass(frozen=True)
class Notice:
    """A sentence for display that says why no token has arrived for a while."""

    message: str
    request_id: str = ""
    text: ClassVar[str] = ""
    tokens: ClassVar[tuple[TokenOutput, ...]] = ()


Event = Piece | Finished | Notice


@dataclass(frozen=True)
class Completion:
    """A whole output.

    Attributes:
        text: the answer; of a chat, without reasoning and tool calls.
        tokens: the output's tokens, with logprobs if they were requested.
        stop_reason: the stop string or stop token id that ended the output; empty if none did.
        usage: tokens of all outputs of the request together.
        receipt: which nodes served the output, and how long each stage took.
        index: number of the output, from 0.
        raw_text: the text as the model wrote it, with the markup of reasoning and tool calls.
    """

    text: str
    tokens: tuple[TokenOutput, ...]
    finish_reason: FinishReason
    stop_reason: str
    usage: Usage
    receipt: Receipt
    index: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    request_id: str = ""
    raw_text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


async def collect(events: AsyncGenerator[Event, None]) -> Completion:
    """Joins all events of one request, and returns its first output."""
    return (await collect_all(events))[0]


async def collect_all(events: AsyncGenerator[Event, None]) -> list[Completion]:
    """Joins all events of one request, and returns its outputs in order.

    Raises:
        InternalError: the stream ended before an output did.
    """
    outputs: dict[int, list[Piece | Finished]] = {}
    async for event in events:
        if not isinstance(event, Notice):
            outputs.setdefault(event.index, []).append(event)
    ended = [event for output in outputs.values() for event in output[-1:] if isinstance(event, Finished)]
    if not ended or len(ended) < len(outputs):
        raise InternalError("the stream ended without its last message", cure="see the gateway's log")
    usage = max((event.usage for event in ended), key=lambda usage: usage.prompt_tokens)
    return [_joined(outputs[index], usage) for index in sorted(outputs)]


def _joined(events: Sequence[Piece | Finished], usage: Usage) -> Completion:
    last = events[-1]
    assert isinstance(last, Finished)
    raw_text = "".join(event.text for event in events)
    deltas = [event.chat for event in events if event.chat is not None]
    return Completion(
        text="".join(delta.content for delta in deltas) if deltas else raw_text,
        tokens=tuple(token for event in events for token in event.tokens),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=usage,
        receipt=last.receipt,
        index=last.index,
        prompt_logprobs=next((event.prompt_logprobs for event in events if event.prompt_logprobs), ()),
        request_id=last.request_id,
        raw_text=raw_text,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_joined_calls(deltas),
    )


def _joined_calls(deltas: Sequence[ChatDelta]) -> tuple[ToolCall, ...]:
    calls: dict[int, list[ToolCall]] = {}
    for delta in deltas:
        for piece in delta.tool_calls:
            calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCall(index, pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces))
        for index, pieces in sorted(calls.items())
    )
