"""Writes the object `message` with its content blocks, in one piece or as a stream of events. Pure."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic_core import from_json

from baton.core.errors import BatonError
from baton.gateway.http.answer_parts import AnswerPart, AnswerStream, Growth, OutputParts, event
from baton.gateway.http.anthropic.errors import anthropic_error
from baton.gateway.http.anthropic.models import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingEnabled,
)
from baton.gateway.text.chat.parsing.lenient_json import ArgumentReader, strict_json
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

# Each kind of part: the type of its deltas, and their field with the text.
_DELTAS = {
    "text": (b"text_delta", b"text"),
    "reasoning": (b"thinking_delta", b"thinking"),
    "tool_call": (b"input_json_delta", b"partial_json"),
}
StopReason = Literal["end_turn", "stop_sequence", "tool_use", "max_tokens", "model_context_window_exceeded"]
WriteReceipt = Callable[[common_pb2.Receipt], dict[str, Any]]


@dataclass(frozen=True)
class MessageObject:
    """Writes one `message`.

    Attributes:
        model: the model's name, as the answer shows it.
        omits_thinking: leave out the text of reasoning.
        names_edits: the client asked for edits of the conversation, so the answer lists them: there are none.
        write_receipt: formats the receipt; None: the answer has no receipt.
    """

    id: str
    model: str
    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    omits_thinking: bool = False
    names_edits: bool = False
    write_receipt: WriteReceipt | None = None

    @classmethod
    def of(
        cls, request: MessagesRequest, *, id: str, model: str, write_receipt: WriteReceipt | None = None
    ) -> "MessageObject":
        thinking = request.thinking
        shows = thinking.display if isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) else None
        stop = tuple(request.stop_sequences or ())
        edits = request.context_management is not None
        return cls(id, model, request.max_tokens, stop, shows == "omitted", edits, write_receipt)

    def begun(self, answer: OutputParts) -> dict[str, Any]:
        """Returns the message before its first block. Its usage has the prompt's tokens."""
        return self._object([], {"stop_reason": None, "stop_sequence": None}, usage(answer))

    def ended(self, answer: OutputParts) -> bytes:
        message = self._object([self.block(part) for part in answer.parts], self.stop(answer), usage(answer))
        return orjson.dumps(message | self.extras(answer))

    def extras(self, answer: OutputParts) -> dict[str, Any]:
        """Returns what the end of the message has on request."""
        extras: dict[str, Any] = {}
        if self.names_edits:
            extras["context_management"] = {"applied_edits": []}
        if self.write_receipt is not None:
            extras["baton"] = {"receipt": self.write_receipt(answer.receipt)}
        return extras

    def block(self, part: AnswerPart) -> dict[str, Any]:
        """Returns the content block of a whole part."""
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        if part.kind == "reasoning":
            shown = "" if self.omits_thinking else part.text
            return {"type": "thinking", "thinking": shown, "signature": signature(part)}
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.text)}

    def stop(self, answer: OutputParts) -> dict[str, Any]:
        reason = self._stop_reason(answer)
        return {"stop_reason": reason, "stop_sequence": answer.stop_reason if reason == "stop_sequence" else None}

    def _stop_reason(self, answer: OutputParts) -> StopReason:
        if answer.truncated:
            full = answer.usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if answer.stop_reason in self.stop_sequences:
            return "stop_sequence"
        return "tool_use" if answer.called_tools else "end_turn"

    def _object(self, content: list[dict[str, Any]], stop: dict[str, Any], used: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": used,
        }


def without_output(message: pb.GenerateResponse) -> pb.GenerateResponse:
    """Returns a message without its output, for a client that wants the prompt computed for prefix caches only.

    A node that has computed a prompt also samples a token, which nobody asked for.
    """
    left = pb.GenerateResponse(revision=message.revision)
    if message.HasField("prompt_usage"):
        left.prompt_usage.CopyFrom(message.prompt_usage)
    if message.finish_reason:
        left.finish_reason = common_pb2.FINISH_REASON_LENGTH
        left.receipt.CopyFrom(message.receipt)
    if message.HasField("usage"):
        left.usage.CopyFrom(message.usage)
        left.usage.completion_tokens = left.usage.reasoning_tokens = 0
    return left


def usage(answer: OutputParts) -> dict[str, Any]:
    """Returns the usage as Anthropic counts it: `input_tokens` excludes cached tokens."""
    used = answer.usage
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
    }


def counted(request: CountTokensRequest, tokens: int) -> dict[str, Any]:
    """Returns the answer to a request that counts tokens."""
    edited = {} if request.context_management is None else {"context_management": {"original_input_tokens": tokens}}
    return {"input_tokens": tokens, **edited}


def signature(part: AnswerPart) -> str:
    """Returns a signature for a reasoning block. Baton never checks it, but some clients drop blocks without one."""
    return hashlib.sha256(part.text.encode()).hexdigest()


def _input(arguments: str) -> orjson.Fragment:
    """Returns a call's arguments as an object. If the output was cut off, the object has only the whole members, which
    is also what Anthropic's clients make of a stream."""
    read = _object(arguments) if arguments.lstrip().startswith("{") else ArgumentReader().read(arguments)
    return orjson.Fragment(json.dumps(read, ensure_ascii=False))  # orjson refuses integers of more than 64 bits


def _object(arguments: str) -> dict[str, Any]:
    with suppress(ValueError):
        return dict(strict_json(arguments))
    with suppress(ValueError):
        return dict(from_json(arguments, allow_partial=True))
    return {}


class MessageStream(AnswerStream):
    """Encodes one stream, with a template for the deltas of each block."""

    def __init__(self, message: MessageObject, request_id: str, *, token_ids: bool = False) -> None:
        super().__init__(OutputParts(), token_ids=token_ids)
        self._message = message
        self._request_id = request_id
        self._head = b""  # the current block's deltas up to their text

    def finish(self) -> bytes:
        answer = self._answer
        events = self._begin_once()
        if answer.parts:
            events += self._stop(answer.parts[-1])
        end = {"type": "message_delta", "delta": self._message.stop(answer), "usage": usage(answer)}
        events.append(event("message_delta", orjson.dumps(end | self._message.extras(answer))))
        events.append(event("message_stop", b'{"type":"message_stop"}'))
        return b"".join(events)

    def error(self, error: BatonError) -> bytes:
        return event("error", orjson.dumps(anthropic_error(error, self._request_id)))

    def _begin(self) -> list[bytes]:
        start = {"type": "message_start", "message": self._message.begun(self._answer)}
        return [event("message_start", orjson.dumps(start)), event("ping", b'{"type":"ping"}')]

    def _next_part(self, part: AnswerPart) -> list[bytes]:
        events = self._stop(self._answer.parts[part.position - 1]) if part.position else []
        kind, text = _DELTAS[part.kind]
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (part.position, kind, text)
        )
        block = self._message.block(AnswerPart(part.kind, part.position, part.id, part.name))
        if part.kind == "reasoning":
            block["signature"] = ""
        start = {"type": "content_block_start", "index": part.position, "content_block": block}
        return [*events, event("content_block_start", orjson.dumps(start))]

    def _delta(self, growth: Growth) -> bytes:
        if growth.part.kind == "reasoning" and self._message.omits_thinking:
            return b""
        return b"%b%b}}\n\n" % (self._head, orjson.dumps(growth.text))

    def _stop(self, part: AnswerPart) -> list[bytes]:
        events = []
        if part.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": signature(part)}
            delta = {"type": "content_block_delta", "index": part.position, "delta": signed}
            events.append(event("content_block_delta", orjson.dumps(delta)))
        stop = {"type": "content_block_stop", "index": part.position}
        return [*events, event("content_block_stop", orjson.dumps(stop))]
