"""Assembles an answer's messages to an ordered list of parts: reasoning, text and tool calls. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson

from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

Kind = Literal["reasoning", "text", "tool_call"]


@dataclass(slots=True)
class AnswerPart:
    """A stretch of reasoning or of text, or one tool call with its arguments as JSON.

    Attributes:
        position: number of the part in the answer, from 0.
        id, name: those of a tool call, else empty.
        tokens: tokens of a text part, if they are kept.
    """

    kind: Kind
    position: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[common_pb2.Token] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Growth:
    """What one message adds to one part; `tokens` are the tokens that the part gets with it."""

    part: AnswerPart
    text: str
    begins: bool
    tokens: Sequence[common_pb2.Token] = ()


class OutputParts:
    """Collects the messages of a chat that has one output.

    Args:
        keeps_tokens: keep the tokens of text parts, for logprobs.

    Attributes:
        usage: tokens of the prompt from the first message on, and of the output at its end.
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self.parts: list[AnswerPart] = []
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        self.stop_reason = ""
        self.usage = common_pb2.Usage()
        self.receipt = common_pb2.Receipt()
        self._tool_index = -1  # of the tool call in progress
        self._keeps_tokens = keeps_tokens
        self._pending: list[common_pb2.Token] = []  # tokens whose text has not arrived yet

    @property
    def called_tools(self) -> bool:
        return any(part.kind == "tool_call" for part in self.parts)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == common_pb2.FINISH_REASON_LENGTH

    def push(self, message: pb.GenerateResponse) -> list[Growth]:
        """Adds a message. Returns what it adds to each part, in order."""
        if self._keeps_tokens:
            self._pending += message.tokens
        delta = message.chat
        grown: list[Growth] = []
        if delta.reasoning:
            grown.append(self._grow("reasoning", delta.reasoning))
        if delta.content:
            grown.append(self._grow("text", delta.content))
        grown += [self._grow_tool(piece) for piece in delta.tool_calls]
        if grown:
            self._give_tokens(grown[-1])
        if message.finish_reason:
            self.finish_reason = message.finish_reason
            self.stop_reason = message.stop_reason
            self.receipt = message.receipt
        if message.HasField("usage"):
            self.usage = message.usage
        elif message.HasField("prompt_usage"):
            self.usage = message.prompt_usage
        return grown

    def collect(self, message: pb.GenerateResponse) -> bytes:
        """Adds a message of an answer that is sent in one piece. Returns no event."""
        self.push(message)
        return b""

    def _grow(self, kind: Kind, text: str) -> Growth:
        begins = not self.parts or self.parts[-1].kind != kind
        if begins:
            self.parts.append(AnswerPart(kind, len(self.parts)))
        part = self.parts[-1]
        part.pieces.append(text)
        return Growth(part, text, begins)

    def _grow_tool(self, piece: pb.ToolCallDelta) -> Growth:
        begins = not self.parts or self.parts[-1].kind != "tool_call" or piece.index != self._tool_index
        if begins:
            self._tool_index = piece.index
            self.parts.append(AnswerPart("tool_call", len(self.parts), piece.id, piece.name))
        part = self.parts[-1]
        part.pieces.append(piece.arguments)
        return Growth(part, piece.arguments, begins)

    def _give_tokens(self, last: Growth) -> None:
        if last.part.kind == "text":
            last.tokens = self._pending
            last.part.tokens += self._pending
        self._pending = []


class AnswerStream(ABC):
    """Encodes a chat's answer, part by part, as one API's events. The first message produces the first event.

    Args:
        token_ids: add the token ids and the weights' revision to deltas.
    """

    def __init__(self, answer: OutputParts, *, token_ids: bool) -> None:
        self._answer = answer
        self._returns_token_ids = token_ids
        self._token_ids: list[int] = []  # tokens that no event carries yet
        self._revision = ""  # of the weights
        self._begun = False

    def push(self, message: pb.GenerateResponse) -> bytes:
        """Returns the events for this message; may be empty."""
        grown = self._answer.push(message)
        if self._returns_token_ids:
            self._token_ids += [token.token_id for token in message.tokens]
            self._revision = message.revision or self._revision
        elif self._begun and len(grown) == 1 and not grown[0].begins:
            return self._delta(grown[0])
        events = self._begin_once()
        for growth in grown:
            if growth.begins:
                events += self._next_part(growth.part)
            if growth.text:
                events.append(self._delta(growth))
        if self._token_ids and message.tokens and grown and grown[-1].text and events[-1]:
            events[-1] = with_token_ids(events[-1], self._token_ids, self._revision)
            self._token_ids = []
        return b"".join(events)

    def skip(self, message: pb.GenerateResponse) -> None:
        """Takes a message whose events the client already has."""
        self.push(message)
        self._token_ids = []

    def _begin_once(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        return self._begin()

    @abstractmethod
    def _begin(self) -> list[bytes]:
        """Returns the events before the first part."""

    @abstractmethod
    def _next_part(self, part: AnswerPart) -> list[bytes]:
        """Returns the events that end the previous part and begin this one."""

    @abstractmethod
    def _delta(self, growth: Growth) -> bytes:
        """Returns the event for what a message adds to the current part; may be empty."""


def with_token_ids(event: bytes, token_ids: Sequence[int], revision: str) -> bytes:
    """Adds to an event what a client needs to continue at another gateway.

    Args:
        token_ids: the tokens whose text is complete with this event, and was not before it.
        revision: of the weights.
    """
    start = event.removesuffix(b"}\n\n")
    return b'%b,"token_ids":%b,"revision":%b}\n\n' % (start, orjson.dumps(token_ids), orjson.dumps(revision))


def event(name: str, data: bytes) -> bytes:
    """Returns a server-sent event whose data is one line of JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
