"""An answer as an ordered list of parts: reasoning, text and tool calls, put together from its messages. Pure."""

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
    """One piece of reasoning, of the answer's text, or one tool call with its arguments' JSON.

    Attributes:
        position: in the answer, from 0.
        id, name: of a tool call.
        tokens: those of text.
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
    """What one message adds to one part; `tokens` are those that the part got with it."""

    part: AnswerPart
    text: str
    begins: bool
    tokens: Sequence[common_pb2.Token] = ()


class OutputParts:
    """Collects the messages of a chat's only output.

    Args:
        keeps_tokens: parts get their tokens, for logprobs.

    Attributes:
        reasoning_tokens: number of tokens whose text is reasoning, as far as messages tell them apart.
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self.parts: list[AnswerPart] = []
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        self.stop_reason = ""
        self.usage = common_pb2.Usage()
        self.receipt = common_pb2.Receipt()
        self.reasoning_tokens = 0
        self._tool_index = -1  # of the tool call in progress
        self._keeps_tokens = keeps_tokens
        self._pending: list[common_pb2.Token] = []  # tokens whose text has not come yet
        self._pending_count = 0

    @property
    def called_tools(self) -> bool:
        return any(part.kind == "tool_call" for part in self.parts)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == common_pb2.FINISH_REASON_LENGTH

    def push(self, message: pb.GenerateResponse) -> list[Growth]:
        """Adds a message; returns what grew, in order."""
        self._pending_count += len(message.tokens)
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
        return grown

    def collect(self, message: pb.GenerateResponse) -> bytes:
        """As `push`, for an answer in one piece: nothing is to be sent yet."""
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
        if last.part.kind == "reasoning":
            self.reasoning_tokens += self._pending_count
        elif last.part.kind == "text" and self._pending:
            last.tokens = self._pending
            last.part.tokens += self._pending
        self._pending_count = 0
        if self._pending:
            self._pending = []


class AnswerStream(ABC):
    """Encodes a chat's answer, part by part, as one API's events. The first event comes with the first message.

    Args:
        token_ids: deltas have the ids of their tokens, and the revision of the weights.
    """

    def __init__(self, answer: OutputParts, *, token_ids: bool) -> None:
        self._answer = answer
        self._returns_token_ids = token_ids
        self._token_ids: list[int] = []  # of tokens that no event has yet
        self._revision = ""  # of the weights
        self._begun = False

    def push(self, message: pb.GenerateResponse) -> bytes:
        """The events for this message; may be empty."""
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
        """The client has the events for this message."""
        self.push(message)
        self._token_ids = []

    def _begin_once(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        return self._begin()

    @abstractmethod
    def _begin(self) -> list[bytes]:
        """The events before the first part."""

    @abstractmethod
    def _next_part(self, part: AnswerPart) -> list[bytes]:
        """The events that end the part before this one, and begin this one."""

    @abstractmethod
    def _delta(self, growth: Growth) -> bytes:
        """The event for what a message adds to the current part; may be empty."""


def with_token_ids(event: bytes, token_ids: Sequence[int], revision: str) -> bytes:
    """The event with what a client needs to go on elsewhere: the tokens whose text the stream has with this event, and
    had not before it, and the revision of the weights."""
    start = event.removesuffix(b"}\n\n")
    return b'%b,"token_ids":%b,"revision":%b}\n\n' % (start, orjson.dumps(token_ids), orjson.dumps(revision))


def event(name: str, data: bytes) -> bytes:
    """One server-sent event whose data is one line of JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
