"""Streams a response as OpenAI's semantic events, with a template for the deltas of each item. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from baton.core.errors import BatonError, ContextOverflow
from baton.gateway.http.answer_parts import AnswerPart, AnswerStream, Growth, event
from baton.gateway.http.custom_input import CustomInput
from baton.gateway.http.errors import row_of
from baton.gateway.http.responses.answer import ResponseObject, Status, failure
from baton.protos.v1 import common_pb2

# The deltas of each type of item. Other items have none: they are sent whole, at their end.
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}
_WITH_CONTENT = ("message", "reasoning")


class ResponsesStream(AnswerStream):
    """Encodes one stream.

    Args:
        keep: takes the whole response before its last event is sent; None: nobody keeps it.
    """

    def __init__(
        self, response: ResponseObject, *, token_ids: bool = False, keep: Callable[[bytes], None] | None = None
    ) -> None:
        super().__init__(response.answer(), token_ids=token_ids)
        self._response = response
        self._keep = keep
        self._type = ""  # of the current item
        self._custom: CustomInput | None = None  # reads the current item's text out of JSON
        self._number = 0  # sequence number of the next event
        self._head = b""  # the current part's deltas up to their number
        self._tail = b""

    def finish(self) -> bytes:
        events = self._begin_once()
        status: Status = "incomplete" if self._answer.truncated else "completed"
        if self._answer.parts:
            events += self._close(self._answer.parts[-1], status)
        whole = self._response.ended(self._answer)
        if self._keep is not None:
            self._keep(whole)
        events.append(self._whole(f"response.{status}", whole))
        return b"".join(events)

    def error(self, error: BatonError) -> bytes:
        events = self._begin_once()
        if isinstance(error, ContextOverflow):
            events.append(self._error(error))
        events.append(self._whole("response.failed", self._response.failed(self._answer, error)))
        return b"".join(events)

    def _error(self, error: BatonError) -> bytes:
        """Returns the event `error` in both of its forms: OpenAI's library raises what `error` has."""
        named = {**failure(error), "param": error.field or None}
        return self._event("error", {**named, "error": {"type": row_of(error).openai_type, **named}})

    def _begin(self) -> list[bytes]:
        begun = self._response.begun()
        return [self._whole("response.created", begun), self._whole("response.in_progress", begun)]

    def _next_part(self, part: AnswerPart) -> list[bytes]:
        events = self._close(self._answer.parts[part.position - 1], "completed") if part.position else []
        return events + self._open(part)

    def _open(self, part: AnswerPart) -> list[bytes]:
        kind = self._type = self._response.item_type(part)
        is_json = kind == "custom_tool_call" and self._response.has_json(part)
        self._custom = CustomInput() if is_json else None
        where = self._where(part)
        if kind in _DELTAS:
            name = _DELTAS[kind]
            fixed = orjson.dumps({"type": name, **where})[:-1]
            self._head = b'event: %b\ndata: %b,"sequence_number":' % (name.encode(), fixed)
            self._tail = b',"logprobs":[]}\n\n' if kind == "message" else b"}\n\n"
        bare = AnswerPart(part.kind, part.position, part.id, part.name)
        item = self._response.item(bare, "in_progress")
        if kind not in _WITH_CONTENT:
            return [self._event("response.output_item.added", {"output_index": part.position, "item": item})]
        content = item["content"][0]
        item["content"] = []
        return [
            self._event("response.output_item.added", {"output_index": part.position, "item": item}),
            self._event("response.content_part.added", {**where, "part": content}),
        ]

    def _delta(self, growth: Growth) -> bytes:
        if self._type not in _DELTAS:
            return b""
        text = growth.text if self._custom is None else self._custom.push(growth.text)
        return self._text_delta(text, growth.tokens) if text else b""

    def _text_delta(self, text: str, tokens: Sequence[common_pb2.Token] = ()) -> bytes:
        number = self._number
        self._number = number + 1
        tail = self._tail
        if tokens and self._type == "message":
            tail = b',"logprobs":%b}\n\n' % orjson.dumps(self._response.logprobs(tokens))
        return b'%b%d,"delta":%b%b' % (self._head, number, orjson.dumps(text), tail)

    def _close(self, part: AnswerPart, status: Status) -> list[bytes]:
        where, item, kind = self._where(part), self._response.item(part, status), self._type
        done_name = _DELTAS[kind].replace("delta", "done") if kind in _DELTAS else ""
        events = []
        if kind == "function_call":
            done = {**where, "name": item["name"], "arguments": item["arguments"]}
            events.append(self._event(done_name, done))
        elif kind == "custom_tool_call":
            rest = "" if self._custom is None else self._custom.finish()
            events += [self._text_delta(rest)] if rest else []
            events.append(self._event(done_name, {**where, "input": item["input"]}))
        elif kind in _WITH_CONTENT:
            content = item["content"][0]
            more = {"logprobs": content["logprobs"]} if kind == "message" else {}
            events.append(self._event(done_name, {**where, "text": content["text"], **more}))
            events.append(self._event("response.content_part.done", {**where, "part": content}))
        events.append(self._event("response.output_item.done", {"output_index": part.position, "item": item}))
        return events

    def _where(self, part: AnswerPart) -> dict[str, Any]:
        where: dict[str, Any] = {"item_id": self._response.item_id(part), "output_index": part.position}
        return {**where, "content_index": 0} if self._response.item_type(part) in _WITH_CONTENT else where

    def _event(self, name: str, rest: dict[str, Any]) -> bytes:
        number = self._number
        self._number = number + 1
        return event(name, orjson.dumps({"type": name, "sequence_number": number, **rest}))

    def _whole(self, name: str, response: bytes) -> bytes:
        number = self._number
        self._number = number + 1
        return event(name, b'{"type":"%b","sequence_number":%d,"response":%b}' % (name.encode(), number, response))
