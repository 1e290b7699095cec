"""Timeline of one output, on the gateway's clock, for the bars of the gateway's page. Pure.

It is read from the journal, as traces are, when the page is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.gateway.core import events as e
from baton.gateway.observe.tracing.prefill_spans import merged
from baton.gateway.request.journal import CallMade, Journal, LocalPrefillOrdered, Submitted
from baton.protos.internal.v1 import decode_pb2, prefill_pb2

_FAILURES_MAX = 8


class Moment(StrEnum):
    """Kind of a moment."""

    CALLED = "called"  # a decode node has reserved blocks, and the prompt goes to a prefill node
    ACCEPTED = "accepted"  # the node that decodes also computes the prompt
    SCHEDULED = "scheduled"  # the prompt's first step on a prefill node
    SENT = "sent"  # the prefill node has sent all KV
    ADMITTED = "admitted"  # the decode node has all KV


_AFTER_FIRST_TOKEN = (Moment.SENT, Moment.ADMITTED)


@dataclass
class Timeline:
    """The moments of one output, without those of attempts that failed before the first token.

    Attributes:
        at_s: times of the moments of the attempt that gave the first token.
        chunks: times at which a prefill node had computed so many tokens; neighbours are merged if there are many.
        failed_at_s: times of retries; only the first and the last ones if there are many.
    """

    at_s: dict[Moment, float] = field(default_factory=dict)
    chunks: list[tuple[float, int]] = field(default_factory=list)
    failed_at_s: list[float] = field(default_factory=list)


def read(journal: Journal, first_token_at_s: float | None) -> Timeline:
    """Reads the timeline from a journal. `first_token_at_s` is None if the output had no token."""
    reader = _Reader()
    for now_s, mark in journal.marks:
        reader.begun = first_token_at_s is not None and now_s > first_token_at_s
        reader.read(now_s, mark)
    found = reader.found
    found.chunks = [group[-1] for group in merged(found.chunks)]
    if len(found.failed_at_s) > _FAILURES_MAX:
        del found.failed_at_s[1 : 1 - _FAILURES_MAX]
    return found


class _Reader:
    """A fold over a journal.

    Attributes:
        begun: whether the client has the first token. From then on, only the end of the attempt's hand-over matters.
    """

    def __init__(self) -> None:
        self.found = Timeline()
        self.begun = False
        self._attempt: int | None = None
        self._call: int | None = None  # number of the attempt's call
        self._lost_later = False

    def read(self, now_s: float, mark: object) -> None:
        match mark:
            case Submitted():
                if self._attempt is not None:
                    self._failed(now_s)
                self._attempt, self._call = mark.attempt, None
            case CallMade():
                if self._call is not None:
                    self._failed(now_s)
                self._call = mark.call
                self._note(Moment.CALLED, now_s)
            case LocalPrefillOrdered():
                if self._call is not None:
                    self._failed(now_s)
                self._call = None
            case e.DecodeReplied(number, message) if number == self._attempt:
                if isinstance(message, decode_pb2.Accepted):
                    self._note(Moment.ACCEPTED, now_s)
                elif isinstance(message, decode_pb2.Admitted):
                    self._note(Moment.ADMITTED, now_s)
            case e.PrefillReplied(number, reply) if number == self._call:
                self._prefill_replied(now_s, reply)

    def _prefill_replied(self, now_s: float, reply: prefill_pb2.PrefillEvent) -> None:
        match reply.WhichOneof("event"):
            case "scheduled":
                called_at_s = self.found.at_s.get(Moment.CALLED, now_s)
                begun_at_s = max(called_at_s, min(now_s, called_at_s + reply.scheduled.queue_s))
                self._note(Moment.SCHEDULED, begun_at_s)
            case "progress" if not self.begun:
                self.found.chunks.append((now_s, reply.progress.computed_tokens))
            case "sent":
                self._note(Moment.SENT, now_s)

    def _note(self, moment: Moment, now_s: float) -> None:
        if not self.begun:
            self.found.at_s[moment] = now_s
        elif moment in _AFTER_FIRST_TOKEN and not self._lost_later:
            self.found.at_s.setdefault(moment, now_s)

    def _failed(self, now_s: float) -> None:
        """Notes a retry after a failure."""
        found = self.found
        found.failed_at_s.append(now_s)
        if self.begun:
            self._lost_later = True
        else:
            found.at_s.clear()
            found.chunks.clear()


Phase = tuple[str, float, float]  # name, start and stop in seconds from the request's arrival


def phases(
    timeline: Timeline,
    *,
    started_at_s: float,
    admitted_s: float | None,
    queue_s: float,
    ttft_s: float | None,
    total_s: float,
) -> Sequence[Phase]:
    """The phases of a request in order. Only `transfer` overlaps others.

    Args:
        admitted_s: time from arrival to admission; None: the request was not admitted.
        queue_s: wait on the node that decodes, used if that node also computed the prompt.
        ttft_s: time to first token; None: there was none.
    """
    if admitted_s is None:
        return [("admission", 0.0, total_s)]
    at_s = {moment: at - started_at_s for moment, at in timeline.at_s.items()}
    first_s = total_s if ttft_s is None else min(ttft_s, total_s)
    found: list[Phase] = [("admission", 0.0, min(admitted_s, total_s))]
    now_s = found[0][2]

    def until(name: str, stop_s: float) -> None:
        nonlocal now_s
        stop_s = min(max(stop_s, now_s), first_s)
        if stop_s > now_s:
            found.append((name, now_s, stop_s))
            now_s = stop_s

    if lost := [at - started_at_s for at in timeline.failed_at_s if at - started_at_s <= first_s]:
        until("lost", lost[-1])
    if (called_s := at_s.get(Moment.CALLED)) is not None:
        until("blocks", called_s)
        until("queue", at_s.get(Moment.SCHEDULED, first_s))
    elif Moment.ACCEPTED in at_s:
        until("queue", now_s + queue_s)
    else:
        until("blocks", first_s)
    until("prefill", first_s)
    if Moment.SCHEDULED in at_s and Moment.ADMITTED in at_s:
        begun_s = timeline.chunks[0][0] - started_at_s if timeline.chunks else at_s[Moment.SCHEDULED]
        stop_s = min(at_s[Moment.ADMITTED], total_s)
        found.append(("transfer", min(begun_s, stop_s), stop_s))
    if ttft_s is not None:
        found.append(("tokens", first_s, total_s))
    return found
