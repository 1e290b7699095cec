"""The times of what happens to one output, as its driver sees it: the record behind traces and waterfalls. Pure.

Tokens are left out, so that they cost nothing; of messages only what these show is kept, and no text or token.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.gateway.core import events as e
from baton.gateway.request import commands as c
from baton.protos.internal.v1 import decode_pb2, prefill_pb2

# A request that goes from node to node until its deadline must not grow without bound.
_MARKS_MAX = 2048


class Submitted(NamedTuple):
    attempt: int
    role: int
    node: str
    address: str
    num_given: int  # tokens that the client had by then


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
    """A part of a prompt, computed in this number of engine steps; who has it says which clock `ended_s` is of."""

    ended_s: float
    token_start: int
    token_stop: int
    steps: int = 1


@dataclass(frozen=True)
class LocalPrefillDone:
    """The decode node has computed the prompt, or the rest of it, when its first token came.

    Attributes:
        at_s: when the token came.
        prefill_s, queue_s: the computation, and the wait in the engine before it.
        chunks: of the computation, with seconds since the node has had the request.
    """

    at_s: float
    prefill_s: float
    queue_s: float
    chunks: tuple[ChunkDone, ...] = ()

    @classmethod
    def reported(cls, now_s: float, first: decode_pb2.StepToken) -> "LocalPrefillDone":
        """As the first token reports it. The message, which may be large, is not kept."""
        chunks = (
            ChunkDone(each.ended_s, each.token_start, each.token_stop, each.steps) for each in first.prompt_chunks
        )
        return cls(now_s, first.prefill_s, first.queue_s, tuple(chunks))


class Journal:
    """Of one output.

    Attributes:
        index: which of the request's outputs.
        marks: in their order, with times.
        dropped: how many marks were not kept, because there were too many.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.marks: list[tuple[float, Mark]] = []
        self.dropped = 0

    def event(self, now_s: float, event: e.Event) -> None:
        """Something has come from a node."""
        match event:
            case e.PrefillReplied(call, reply):
                if reply.HasField("first_token"):  # it may have the logprobs of the whole prompt
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
        """Something goes to a node."""
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
    """NOTE: a part of a message keeps the memory of all of it, as long as the journal of a request that is shown."""
    copy = prefill_pb2.SentPart()
    copy.CopyFrom(part)
    return copy
