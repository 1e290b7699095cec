"""A message as it comes: Anthropic's events, written from templates that are built once for each block. Pure."""

import orjson

from baton.core.errors import BatonError
from baton.gateway.http.anthropic.answer import MessageObject, signature, usage
from baton.gateway.http.anthropic.errors import anthropic_error
from baton.gateway.http.parts import AnswerPart, Growth, OutputParts, event, with_token_ids
from baton.protos.v1 import generation_pb2 as pb

# Type of a block's deltas, and the field with their text.
_DELTAS = {
    "text": (b"text_delta", b"text"),
    "reasoning": (b"thinking_delta", b"thinking"),
    "tool_call": (b"input_json_delta", b"partial_json"),
}


class MessageStream:
    """Encodes one stream. The first event comes with the first message.

    Args:
        token_ids: deltas have the ids of their tokens, and the revision of the weights.
    """

    def __init__(self, message: MessageObject, request_id: str, *, token_ids: bool = False) -> None:
        self._returns_token_ids = token_ids
        self._token_ids: list[int] = []  # of tokens that no event has yet
        self._revision = ""  # of the weights
        self._message = message
        self._request_id = request_id
        self._answer = OutputParts()
        self._begun = False
        self._head = b""  # of the current block's deltas, up to their text

    def push(self, message: pb.GenerateResponse) -> bytes:
        grown = self._answer.push(message)
        if self._returns_token_ids:
            self._token_ids += [token.token_id for token in message.tokens]
            self._revision = message.revision or self._revision
        elif self._begun and len(grown) == 1 and not grown[0].begins:
            return self._delta(grown[0])
        events = [] if self._begun else self._begin()
        for growth in grown:
            if growth.begins:
                events += self._next_block(growth.part)
            if growth.text:
                events.append(self._delta(growth))
        if self._token_ids and message.tokens and grown and grown[-1].text and events[-1]:
            events[-1] = with_token_ids(events[-1], self._token_ids, self._revision)
            self._token_ids = []
        return b"".join(events)

    def skip(self, message: pb.GenerateResponse) -> None:
        """The client has the events for this message."""
        self.push(message)
        self._token_ids = []

    def finish(self) -> bytes:
        answer = self._answer
        events = [] if self._begun else self._begin()
        if answer.parts:
            events += self._stop(answer.parts[-1])
        end = {"type": "message_delta", "delta": self._message.stop(answer), "usage": usage(answer)}
        if self._message.write_receipt is not None:
            end["baton"] = {"receipt": self._message.write_receipt(answer.receipt)}
        events.append(event("message_delta", orjson.dumps(end)))
        events.append(event("message_stop", b'{"type":"message_stop"}'))
        return b"".join(events)

    def error(self, error: BatonError) -> bytes:
        return event("error", orjson.dumps(anthropic_error(error, self._request_id)))

    def _begin(self) -> list[bytes]:
        self._begun = True
        start = {"type": "message_start", "message": self._message.begun()}
        return [event("message_start", orjson.dumps(start)), event("ping", b'{"type":"ping"}')]

    def _next_block(self, part: AnswerPart) -> list[bytes]:
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
