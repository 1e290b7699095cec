"""Builds the spans of one output's attempts from its journal. Pure."""

from dataclasses import dataclass, field

from baton.core.errors import BatonError
from baton.core.log_lines import loggable
from baton.gateway.core import events as e
from baton.gateway.observe.tracing.node_clock import NodeClock
from baton.gateway.observe.tracing.prefill_spans import CallNotes, Failure, NewId, chunk_spans
from baton.gateway.request import commands as c
from baton.gateway.request.journal import (
    CallMade,
    FirstToken,
    Journal,
    LocalPrefillDone,
    LocalPrefillOrdered,
    Submitted,
)
from baton.gateway.request.receipt import DECODE as DECODE_STAGE
from baton.gateway.request.receipt import PREFILL as PREFILL_STAGE
from baton.metrics.declared import LOST
from baton.metrics.metric import ProcessRole
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.error_detail import from_detail
from baton.tracing.declared import (
    ADMIT,
    ATTEMPT,
    DECODE,
    LEFT_EVENT,
    PREFILL,
    PREFILL_QUEUE,
    RESERVE,
    RETRY_EVENT,
    TRANSFER,
    Attribute,
)
from baton.tracing.span import Event, Span, SpanPlace

_LEFT = Failure(LOST, "the gateway left the node")


@dataclass(frozen=True)
class OutputFacts:
    """Data of an output that its journal does not have.

    Args:
        end_s: time at which the output ended.
        completion_tokens: number of tokens of the whole output.
        several: whether the request has other outputs too.
    """

    end_s: float
    completion_tokens: int
    local_prefill: LocalPrefillDone | None = None
    several: bool = False


@dataclass
class _Attempt:
    submitted: Submitted
    span: Span
    clock: NodeClock
    calls: list[CallNotes] = field(default_factory=list)
    answered: tuple[float, pb.Reserved | pb.Accepted] | None = None
    admitted: tuple[float, pb.Admitted] | None = None
    failure: Failure | None = None

    @property
    def place(self) -> SpanPlace:
        prefills = self.submitted.role == node_status_pb2.ROLE_PREFILL
        return SpanPlace(ProcessRole.PREFILL if prefills else ProcessRole.DECODE, self.submitted.node)


class OutputSpans:
    """Builds the spans of one output, and adds its retries to the request's span."""

    def __init__(self, journal: Journal, root: Span, facts: OutputFacts, new_id: NewId) -> None:
        self._journal = journal
        self._root = root
        self._facts = facts
        self._new_id = new_id
        self._attempts: list[_Attempt] = []
        self._calls: dict[int, CallNotes] = {}

    def build(self) -> list[Span]:
        for now_s, mark in self._journal.marks:
            self._read(now_s, mark)
        given = [attempt.submitted.num_given for attempt in self._attempts[1:]] + [self._facts.completion_tokens]
        spans = []
        for attempt, tokens in zip(self._attempts, given, strict=True):
            spans += self._spans(attempt, max(0, tokens - attempt.submitted.num_given))
        return spans

    # ---- the journal

    def _read(self, now_s: float, mark: object) -> None:
        match mark:
            case Submitted():
                self._submitted(now_s, mark)
            case CallMade():
                self._called(now_s, mark)
            case LocalPrefillOrdered():
                self._lost_call(now_s)
            case FirstToken(call):
                if call in self._calls:
                    self._calls[call].first_token(now_s, mark)
            case e.PrefillReplied(call, reply):
                if call in self._calls:
                    self._calls[call].replied(now_s, reply)
            case e.PrefillEnded(call, error):
                self._call_ended(call, now_s, None if error is None else _failure(error))
            case c.CancelPrefill(call):
                self._call_ended(call, now_s, None)
            case e.DecodeReplied(number, message):
                self._decode_replied(now_s, number, message)
            case e.SessionLost(number, reason):
                if (attempt := self._attempt(number)) is not None:
                    attempt.failure = attempt.failure or Failure(LOST, reason)
            case c.LeaveDecode(number):
                if (attempt := self._attempt(number)) is not None:
                    attempt.span.end_s = now_s
            case c.LoseNode(_, address, reason):
                self._lost_node(now_s, address, reason)

    def _attempt(self, number: int) -> _Attempt | None:
        last = self._attempts[-1] if self._attempts else None
        return last if last is not None and last.submitted.attempt == number else None

    def _submitted(self, now_s: float, mark: Submitted) -> None:
        links = []
        if self._attempts:
            lost = self._attempts[-1]
            failed_call = lost.calls[-1].failure if lost.calls else None
            lost.failure = lost.failure or failed_call or _LEFT
            stage = PREFILL_STAGE if lost.failure is failed_call else DECODE_STAGE
            self._retry(now_s, stage, lost.submitted.node, lost.failure)
            links = [lost.span.span_id]
        span = Span(ATTEMPT.name, self._new_id(), self._root.span_id, now_s, self._facts.end_s, links=links)
        span.attributes = {
            Attribute.ATTEMPT: mark.attempt,
            Attribute.NODE: mark.node,
            Attribute.ADDRESS: mark.address,
            **({Attribute.OUTPUT: self._journal.index} if self._facts.several else {}),
        }
        self._attempts.append(_Attempt(mark, span, NodeClock(now_s)))

    def _called(self, now_s: float, mark: CallMade) -> None:
        if not self._attempts:
            return
        lost = self._lost_call(now_s)
        links = [] if lost is None else [lost.span_id]
        call = self._calls[mark.call] = CallNotes(mark, self._new_id(), now_s, links)
        self._attempts[-1].calls.append(call)

    def _lost_call(self, now_s: float) -> CallNotes | None:
        """Marks the attempt's last call, if there is one, as failed and retried; returns it."""
        if not self._attempts or not self._attempts[-1].calls:
            return None
        lost = self._attempts[-1].calls[-1]
        lost.failure = lost.failure or _LEFT
        self._retry(now_s, PREFILL_STAGE, lost.called.node, lost.failure)
        return lost

    def _retry(self, now_s: float, stage: str, node: str, failure: Failure) -> None:
        attributes = {
            Attribute.STAGE: stage,
            Attribute.NODE: node,
            Attribute.ERROR_TYPE: failure.reason,
            Attribute.REASON: failure.text,
        }
        self._root.events.append(Event(now_s, RETRY_EVENT, attributes))

    def _call_ended(self, number: int, now_s: float, failure: Failure | None) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.ended_at_s = now_s if call.ended_at_s is None else call.ended_at_s
            call.failure = call.failure or failure

    def _decode_replied(self, now_s: float, number: int, message: e.DecodeReply) -> None:
        attempt = self._attempt(number)
        if attempt is None:
            return
        match message:
            case pb.Reserved() | pb.Accepted():
                attempt.clock.seen(now_s, _at_s(message))
                attempt.answered = attempt.answered or (now_s, message)
            case pb.Admitted():
                attempt.clock.seen(now_s, _at_s(message))
                attempt.admitted = now_s, message
            case pb.Failed():
                attempt.failure = attempt.failure or _failure(from_detail(message.error))
            case pb.HandOverFailed():
                if attempt.calls:
                    call = attempt.calls[-1]
                    call.failure = call.failure or _failure(from_detail(message.error))

    def _lost_node(self, now_s: float, address: str, reason: str) -> None:
        self._root.events.append(Event(now_s, LEFT_EVENT, {Attribute.ADDRESS: address, Attribute.REASON: reason}))
        if not self._attempts:
            return
        attempt = self._attempts[-1]
        if attempt.submitted.address == address:
            attempt.failure = attempt.failure or Failure(LOST, reason)
        elif attempt.calls:
            attempt.calls[-1].failure = attempt.calls[-1].failure or Failure(LOST, reason)

    # ---- the spans

    def _spans(self, attempt: _Attempt, tokens: int) -> list[Span]:
        span = attempt.span
        if attempt.failure is not None:
            span.error = attempt.failure.text
            span.attributes[Attribute.ERROR_TYPE] = attempt.failure.reason
        local = self._facts.local_prefill
        if local is not None and not span.start_s <= local.at_s <= span.end_s:
            local = None  # belongs to another attempt
        if local is not None and local.chunks:
            attempt.clock.seen(local.at_s, local.chunks[-1].ended_s)
        below = [*self._reserve(attempt)]
        for call in attempt.calls:
            below += call.spans(span.span_id, span.end_s, self._new_id)
        decode_began_s = None
        if attempt.admitted is not None:
            transferred, decode_began_s = self._transferred(attempt, *attempt.admitted)
            below += transferred
        if local is not None:
            prefilled = self._prefilled_here(attempt, local)
            below += prefilled
            decode_began_s = prefilled[0].end_s
        if decode_began_s is not None:
            decode = self._below(attempt, DECODE.name, decode_began_s, span.end_s)
            decode.attributes = {Attribute.OUTPUT_TOKENS: tokens}
            below.append(decode)
        return [span, *below]

    def _below(self, attempt: _Attempt, name: str, start_s: float, end_s: float) -> Span:
        return Span(name, self._new_id(), attempt.span.span_id, min(start_s, end_s), end_s, attempt.place)

    def _reserve(self, attempt: _Attempt) -> list[Span]:
        if attempt.answered is None:
            return []
        now_s, message = attempt.answered
        end_s = attempt.clock.at(now_s, _at_s(message))
        span = self._below(attempt, RESERVE.name, attempt.clock.began_s, end_s)
        span.attributes = {Attribute.QUEUE_S: message.queue_s, Attribute.NODE_CACHED: message.cached_tokens}
        return [span]

    def _transferred(self, attempt: _Attempt, now_s: float, message: pb.Admitted) -> tuple[list[Span], float]:
        """The spans of transfer and admission, and the time at which the request was admitted."""
        clock = attempt.clock
        end_s = clock.at(now_s, _at_s(message))
        filled_s = min(end_s, clock.at(now_s, message.filled_s if message.HasField("filled_s") else None))
        handed_s = message.handed_over_s if message.HasField("handed_over_s") else None
        handed_over_s = min(end_s, clock.at(now_s, handed_s))
        call = attempt.calls[-1] if attempt.calls else None
        began_s = filled_s if call is None else call.part_began_s()
        transfer = self._below(attempt, TRANSFER.name, began_s, filled_s)
        transfer.attributes = {
            Attribute.BYTES: message.bytes_received,
            Attribute.SEGMENTS: message.segments,
            Attribute.EXPOSED_S: message.transfer_s,
        }
        if call is not None and call.sent is not None:
            transfer.attributes[Attribute.TRANSPORT] = call.sent.transport
            if call.sent.kv_converted:
                transfer.attributes[Attribute.CONVERTED] = call.sent.kv_converted
        # The hand-over does not wait for the end of the transfer.
        admit = self._below(attempt, ADMIT.name, max(filled_s, handed_over_s), end_s)
        return [transfer, admit], end_s

    def _prefilled_here(self, attempt: _Attempt, local: LocalPrefillDone) -> list[Span]:
        """The span of a prefill on the decode node, then the spans below it."""
        clock, chunks = attempt.clock, local.chunks
        end_s = clock.at(local.at_s, chunks[-1].ended_s if chunks else None)
        computed_from_s = max(attempt.span.start_s, end_s - local.prefill_s)
        began_s = max(attempt.span.start_s, computed_from_s - local.queue_s)
        span = self._below(attempt, PREFILL.name, began_s, end_s)
        span.attributes = {
            Attribute.NODE: attempt.submitted.node,
            Attribute.ADDRESS: attempt.submitted.address,
            Attribute.QUEUE_S: local.queue_s,
        }
        new_id = self._new_id
        queue = Span(PREFILL_QUEUE.name, new_id(), span.span_id, began_s, computed_from_s, attempt.place)
        placed = [chunk._replace(ended_s=clock.at(local.at_s, chunk.ended_s)) for chunk in chunks]
        return [span, queue, *chunk_spans(placed, span, computed_from_s, new_id)]


def _at_s(message: pb.Reserved | pb.Accepted | pb.Admitted) -> float | None:
    return message.at_s if message.HasField("at_s") else None


def _failure(error: BatonError) -> Failure:
    return Failure(error.reason, loggable(error))
