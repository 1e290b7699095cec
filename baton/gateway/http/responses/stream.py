"""Streams a response as OpenAI's semantic events, with a template for the deltas of each item. Pure."""

from typing import Any

import orjson

from baton.core.errors import BatonError
from baton.gateway.http.answer_parts import AnswerPart, AnswerStream, Growth, event
from baton.gateway.http.responses.answer import ResponseObject, Status

_DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "tool_call": "response.function_call_arguments.delta",
}


class ResponsesStream(AnswerStream):
    """Encodes one stream."""

    def __init__(self, response: ResponseObject, *, token_ids: bool = False) -> None:
        super().__init__(response.answer(), token_ids=token_ids)
        self._response = response
        self._number = 0  # sequence number of the next event
        self._head = b""  # the current part's deltas up to their number
        self._tail = b""

    def finish(self) -> bytes:
        events = self._begin_once()
        status: Status = "incomplete" if self._answer.truncated else "completed"
        if self._answer.parts:
            events += self._close(self._answer.parts[-1], status)
        events.append(self._whole(f"response.{status}", self._response.ended(self._answer)))
        return b"".join(events)

    def error(self, error: BatonError) -> bytes:
        events = self._begin_once()
        events.append(self._whole("response.failed", self._response.failed(self._answer, error)))
        return b"".join(events)

    def _begin(self) -> list[bytes]:
        begun = self._response.begun()
        return [self._whole("response.created", begun), self._whole("response.in_progress", begun)]

    def _next_part(self, part: AnswerPart) -> list[bytes]:
        events = self._close(self._answer.parts[part.position - 1], "completed") if part.position else []
        return events + self._open(part)

    def _open(self, part: AnswerPart) -> list[bytes]:
        where = self._where(part)
        name = _DELTAS[part.kind]
        fixed = orjson.dumps({"type": name, **where})[:-1]
        self._head = b'event: %b\ndata: %b,"sequence_number":' % (name.encode(), fixed)
        self._tail = b',"logprobs":[]}\n\n' if part.kind == "text" else b"}\n\n"
        bare = AnswerPart(part.kind, part.position, part.id, part.name)
        item = self._response.item(bare, "in_progress")
        if part.kind == "tool_call":
            return [self._event("response.output_item.added", {"output_index": part.position, "item": item})]
        content = item["content"][0]
        item["content"] = []
        return [
            self._event("response.output_item.added", {"output_index": part.position, "item": item}),
            self._event("response.content_part.added", {**where, "part": content}),
        ]

    def _delta(self, growth: Growth) -> bytes:
        number = self._number
        self._number = number + 1
        tail = self._tail
        if growth.tokens:
            tail = b',"logprobs":%b}\n\n' % orjson.dumps(self._response.logprobs(growth.tokens))
        return b'%b%d,"delta":%b%b' % (self._head, number, orjson.dumps(growth.text), tail)

    def _close(self, part: AnswerPart, status: Status) -> list[bytes]:
        where, item = self._where(part), self._response.item(part, status)
        if part.kind == "tool_call":
            done = {**where, "name": part.name, "arguments": part.text}
            events = [self._event("response.function_call_arguments.done", done)]
        else:
            content = item["content"][0]
            rest = {"logprobs": content["logprobs"]} if part.kind == "text" else {}
            done = {**where, "text": content["text"], **rest}
            events = [
                self._event(_DELTAS[part.kind].replace("delta", "done"), done),
                self._event("response.content_part.done", {**where, "part": content}),
            ]
        events.append(self._event("response.output_item.done", {"output_index": part.position, "item": item}))
        return events

    def _where(self, part: AnswerPart) -> dict[str, Any]:
        where: dict[str, Any] = {"item_id": self._response.item_id(part), "output_index": part.position}
        return where if part.kind == "tool_call" else {**where, "content_index": 0}

    def _event(self, name: str, rest: dict[str, Any]) -> bytes:
        number = self._number
        self._number = number + 1
        return event(name, orjson.dumps({"type": name, "sequence_number": number, **rest}))

    def _whole(self, name: str, response: bytes) -> bytes:
        number = self._number
        self._number = number + 1
        return event(name, b'{"type":"%b","sequence_number":%d,"response":%b}' % (name.encode(), number, response))
