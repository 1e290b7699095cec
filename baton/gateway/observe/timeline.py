"""When what happened to an output, all by the gateway's clock: what the bars of a waterfall are drawn from. Pure.

Read from the journal, as traces are, when somebody looks.
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
    """What happened."""

    CALLED = "called"  # a decode node holds blocks, and the prompt goes to a prefill node
    ACCEPTED = "accepted"  # a node computes the prompt itself
    SCHEDULED = "scheduled"  # the prompt's first step on a prefill node
    SENT = "sent"  # the prefill node has sent all KV
    ADMITTED = "admitted"  # the decode node has all KV


_AFTER_FIRST_TOKEN = (Moment.SENT, Moment.ADMITTED)


@dataclass
class Timeline:
    """The moments of one output. Those of attempts that failed before the first token are forgotten.

    Attributes:
        at_s: the moments of the attempt that gave the first token.
        chunks: when a prefill node had computed how many tokens; neighbours are merged where they are many.
        failed_at_s: when something else was tried; of many, the first and the last ones.
    """

    at_s: dict[Moment, float] = field(default_factory=dict)
    chunks: list[tuple[float, int]] = field(default_factory=list)
    failed_at_s: list[float] = field(default_factory=list)


def read(journal: Journal, first_token_at_s: float | None) -> Timeline:
    """The timeline of an output whose first token was passed on then; None: it had none."""
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
        begun: the client has the first token: then only the end of that attempt's hand-over is of interest.
    """

    def __init__(self) -> None:
        self.found = Timeline()
        self.begun = False
        self._attempt: int | None = None
        self._call: int | None = None  # of the attempt
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
        """Something has failed, and another way is taken."""
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
    """What a request spent its time on, in order; only `transfer` overlaps others.

    Args:
        admitted_s: until it was its turn; None: it never was.
        queue_s: that a node which computed the prompt itself let it wait.
        ttft_s: None: there was none.
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
