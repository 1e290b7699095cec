"""Records the times of one output's events and commands, for traces and timelines. Pure.

Token events are not recorded, so they cost nothing. Of messages, only the fields that traces show are kept.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.gateway.core import events as e
from baton.gateway.request import commands as c
from baton.protos.internal.v1 import decode_pb2, prefill_pb2

# Bounds the journal of a request that is retried until its deadline.
_MARKS_MAX = 2048


class Submitted(NamedTuple):
    attempt: int
    role: int
    node: str
    address: str
    num_given: int  # number of tokens that the client had


class CallMade(NamedTuple):
    call: int
    node: str
    address: str
    token_start: int
    token_stop: int


class FirstToken(NamedTuple):
    call: int
    at_s: float | None
    parts: tuple[prefill_pb2.SentPart, ...]


@dataclass(frozen=True, slots=True)
class LocalPrefillOrdered:
    """The decode node was asked to prefill the prompt itself."""


Mark = (
    Submitted
    | CallMade
    | FirstToken
    | LocalPrefillOrdered
    | e.DecodeReplied
    | e.PrefillReplied
    | e.PrefillEnded
    | e.SessionLost
    | c.LeaveDecode
    | c.CancelPrefill
    | c.LoseNode
)


class ChunkDone(NamedTuple):
    """A part of a prompt, computed in `steps` engine steps. The holder of the value defines the clock of `ended_s`."""

    ended_s: float
    token_start: int
    token_stop: int
    steps: int = 1


@dataclass(frozen=True)
class LocalPrefillDone:
    """A prompt, or the rest of one, that the decode node has computed, as its first token reports it.

    Attributes:
        at_s: time at which the token arrived.
        prefill_s: time of the computation.
        queue_s: wait in the engine before the computation.
        chunks: parts of the computation; `ended_s` counts from the arrival of the request at the node.
    """

    at_s: float
    prefill_s: float
    queue_s: float
    chunks: tuple[ChunkDone, ...] = ()

    @classmethod
    def reported(cls, now_s: float, first: decode_pb2.StepToken) -> "LocalPrefillDone":
        """Copies what the first token reports, so that the message, which may be large, is not kept."""
        chunks = (
            ChunkDone(each.ended_s, each.token_start, each.token_stop, each.steps) for each in first.prompt_chunks
        )
        return cls(now_s, first.prefill_s, first.queue_s, tuple(chunks))


class Journal:
    """The record of one output.

    Attributes:
        index: index of the output in its request.
        marks: recorded events and commands with their times, in order.
        dropped: number of marks dropped beyond the limit.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.marks: list[tuple[float, Mark]] = []
        self.dropped = 0

    def event(self, now_s: float, event: e.Event) -> None:
        """Records an event from a node."""
        match event:
            case e.PrefillReplied(call, reply):
                if reply.HasField("first_token"):  # copied: the message may have the logprobs of the whole prompt
                    at_s = reply.at_s if reply.HasField("at_s") else None
                    self._add(now_s, FirstToken(call, at_s, tuple(map(_copied, reply.parts))))
                else:
                    self._add(now_s, event)
            case e.DecodeReplied(_, message):
                if not isinstance(message, decode_pb2.Released):
                    self._add(now_s, event)
            case e.PrefillEnded() | e.SessionLost():
                self._add(now_s, event)
            case _:
                pass

    def command(self, now_s: float, command: c.Command) -> None:
        """Records a command to a node."""
        match command:
            case c.SubmitToDecode(attempt, role, address, request, node):
                given = len(request.output_token_ids)
                self._add(now_s, Submitted(attempt, role, node or address, address, given))
            case c.CallPrefill(call, address, request, _, node):
                ticket = request.ticket
                self._add(now_s, CallMade(call, node or address, address, ticket.token_start, ticket.token_stop))
            case c.AskDecode(_, decode_pb2.PrefillHere()):
                self._add(now_s, LocalPrefillOrdered())
            case c.LeaveDecode() | c.CancelPrefill() | c.LoseNode():
                self._add(now_s, command)
            case _:
                pass

    def _add(self, now_s: float, mark: Mark) -> None:
        if len(self.marks) < _MARKS_MAX:
            self.marks.append((now_s, mark))
        else:
            self.dropped += 1


def _copied(part: prefill_pb2.SentPart) -> prefill_pb2.SentPart:
    """Copies a part of a message. NOTE: a reference would keep the memory of the whole message."""
    copy = prefill_pb2.SentPart()
    copy.CopyFrom(part)
    return copy
