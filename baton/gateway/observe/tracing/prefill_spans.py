"""Builds the spans of one Prefill call: its wait, its chunks, and its transfers. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from baton.gateway.observe.tracing.node_clock import NodeClock
from baton.gateway.request.journal import CallMade, ChunkDone, FirstToken
from baton.metrics.metric import ProcessRole
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.tracing.declared import CHUNK, PREFILL, PREFILL_QUEUE, SEND, Attribute
from baton.tracing.span import Span, SpanPlace

T = TypeVar("T")
NewId = Callable[[], int]

# Maximum number of spans for the chunks of one prompt; beyond it, one span stands for several chunks.
_SPANS_MAX = 32


class Failure(NamedTuple):
    """Failure of an attempt or a call. `reason` is the same as in metrics."""

    reason: str
    text: str


@dataclass
class CallNotes:
    """Collected data of one call.

    Attributes:
        span_id: id of the call's span.
        ended_at_s: time at which the call ended at the gateway; None: it has not ended.
    """

    called: CallMade
    span_id: int
    called_at_s: float
    links: list[int] = field(default_factory=list)
    clock: NodeClock = field(init=False)
    scheduled: pb.PrefillScheduled | None = None
    progress: list[tuple[float, float | None, int]] = field(default_factory=list)
    parts: list[pb.SentPart] = field(default_factory=list)
    sent: pb.PrefillSent | None = None
    sent_at: tuple[float, float | None] = (0.0, None)
    ended_at_s: float | None = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        self.clock = NodeClock(self.called_at_s)

    @property
    def place(self) -> SpanPlace:
        return SpanPlace(ProcessRole.PREFILL, self.called.node)

    def replied(self, now_s: float, reply: pb.PrefillEvent) -> None:
        """Records an event of the node other than its first token."""
        at_s = reply.at_s if reply.HasField("at_s") else None
        self.clock.seen(now_s, at_s)
        self.parts.extend(reply.parts)
        match reply.WhichOneof("event"):
            case "scheduled":
                self.scheduled = reply.scheduled
            case "progress":
                self.progress.append((now_s, at_s, reply.progress.computed_tokens))
            case "sent":
                self.sent, self.sent_at = reply.sent, (now_s, at_s)

    def first_token(self, now_s: float, mark: FirstToken) -> None:
        self.clock.seen(now_s, mark.at_s)
        self.parts.extend(mark.parts)

    def part_began_s(self) -> float:
        """Time at which the first KV was sent; the beginning of the call if the node does not report it."""
        return self.clock.began_s + min((part.started_s for part in self.parts), default=0.0)

    def spans(self, parent_id: int, end_s: float, new_id: NewId) -> list[Span]:
        """The span of the call and those below it. `end_s` is the end of a call that has not ended."""
        began_s, called = self.clock.began_s, self.called
        span = Span(PREFILL.name, self.span_id, parent_id, began_s, self._end_s(end_s), self.place, links=self.links)
        span.attributes = {
            Attribute.NODE: called.node,
            Attribute.ADDRESS: called.address,
            Attribute.TOKEN_START: called.token_start,
            Attribute.TOKEN_STOP: called.token_stop,
        }
        below: list[Span] = []
        if self.scheduled is not None:
            span.attributes[Attribute.QUEUE_S] = queue_s = self.scheduled.queue_s
            span.attributes[Attribute.NODE_CACHED] = self.scheduled.cached_tokens
            below = [Span(PREFILL_QUEUE.name, new_id(), self.span_id, began_s, began_s + queue_s, self.place)]
            below += chunk_spans(self._chunks(), span, began_s + queue_s, new_id)
        if self.failure is not None and self.sent is None:
            span.error = self.failure.text
            span.attributes[Attribute.ERROR_TYPE] = self.failure.reason
        return [span, *below, *self._sends(began_s, new_id)]

    def _end_s(self, end_s: float) -> float:
        if self.sent is not None:
            return self.clock.at(*self.sent_at)
        return end_s if self.ended_at_s is None else self.ended_at_s

    def _chunks(self) -> list[ChunkDone]:
        assert self.scheduled is not None
        computed = self.scheduled.cached_tokens
        chunks = []
        for now_s, at_s, stop in self.progress:
            chunks.append(ChunkDone(self.clock.at(now_s, at_s), computed, stop))
            computed = stop
        return chunks

    def _sends(self, began_s: float, new_id: NewId) -> list[Span]:
        spans = []
        for group in merged(self.parts):
            start_s, end_s = began_s + group[0].started_s, began_s + group[-1].ended_s
            span = Span(SEND.name, new_id(), self.span_id, start_s, end_s, self.place)
            span.attributes = {
                Attribute.TOKEN_START: min(part.token_start for part in group),
                Attribute.TOKEN_STOP: max(part.token_stop for part in group),
                Attribute.SEGMENTS: sum(part.segments for part in group),
                Attribute.BYTES: sum(part.bytes for part in group),
                **_merged(len(group)),
            }
            spans.append(span)
        return spans


def chunk_spans(chunks: Sequence[ChunkDone], prefill: Span, start_s: float, new_id: NewId) -> list[Span]:
    """The spans of chunks that were computed in order from `start_s`, below the span `prefill`."""
    spans = []
    for group in merged(chunks):
        end_s = group[-1].ended_s
        span = Span(CHUNK.name, new_id(), prefill.span_id, min(start_s, end_s), end_s, prefill.place)
        span.attributes = {
            Attribute.TOKEN_START: min(chunk.token_start for chunk in group),
            Attribute.TOKEN_STOP: max(chunk.token_stop for chunk in group),
            **_merged(sum(chunk.steps for chunk in group)),
        }
        spans.append(span)
        start_s = end_s
    return spans


def merged(items: Sequence[T]) -> list[Sequence[T]]:
    """Groups the items, in order, into at most `_SPANS_MAX` groups of neighbours."""
    size = max(1, -(-len(items) // _SPANS_MAX))
    return [items[start : start + size] for start in range(0, len(items), size)]


def _merged(count: int) -> dict[Attribute, int]:
    return {Attribute.MERGED: count} if count > 1 else {}
