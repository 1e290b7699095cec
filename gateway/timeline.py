"""When a request's events reached the gateway, all by its own clock: what the bars of a waterfall are drawn from. Pure.

It costs nothing per token: nodes send these events once per request, and one for each chunk of a prompt.
"""

from collections.abc import Sequence
from enum import StrEnum

_CHUNKS_MAX = 32
_FAILURES_MAX = 8


class Moment(StrEnum):
    """What happened."""

    RESERVED = "reserved"  # a decode node holds blocks, and the prompt may be sent to a prefill node
    ACCEPTED = "accepted"  # a node computes the prompt itself
    SCHEDULED = "scheduled"  # the prompt's first step on a prefill node
    SENT = "sent"  # the prefill node has sent all KV
    ADMITTED = "admitted"  # the decode node has all KV


_AFTER_FIRST_TOKEN = (Moment.SENT, Moment.ADMITTED)


class Timeline:
    """The moments of one output. Those of attempts that failed before the first token are forgotten.

    Attributes:
        at_s: the moments of the attempt that gave the first token.
        chunks: when a prefill node had computed how many tokens; every second one is dropped when they are many.
        failed_at_s: when attempts failed.
    """

    def __init__(self) -> None:
        self.at_s: dict[Moment, float] = {}
        self.chunks: list[tuple[float, int]] = []
        self.failed_at_s: list[float] = []
        self._lost_later = False

    def note(self, moment: Moment, now_s: float, *, begun: bool) -> None:
        """Args:
        begun: the client has the first token: then only the end of that attempt's hand-over is of interest.
        """
        if not begun:
            self.at_s[moment] = now_s
        elif moment in _AFTER_FIRST_TOKEN and not self._lost_later:
            self.at_s.setdefault(moment, now_s)

    def scheduled(self, now_s: float, queue_s: float, *, begun: bool) -> None:
        """The prompt's first step is over, and had begun `queue_s` after the prompt reached its node."""
        sent_at_s = self.at_s.get(Moment.RESERVED, now_s)
        self.note(Moment.SCHEDULED, max(sent_at_s, min(now_s, sent_at_s + queue_s)), begun=begun)

    def computed(self, now_s: float, tokens: int, *, begun: bool) -> None:
        """A prefill node has computed this many tokens of the prompt."""
        if begun:
            return
        if len(self.chunks) >= _CHUNKS_MAX:
            del self.chunks[::2]
        self.chunks.append((now_s, tokens))

    def failed(self, now_s: float, *, begun: bool) -> None:
        """An attempt has failed, and another one may follow."""
        if len(self.failed_at_s) >= _FAILURES_MAX:
            del self.failed_at_s[1]
        self.failed_at_s.append(now_s)
        self._lost_later = begun
        if not begun:
            self.at_s.clear()
            self.chunks.clear()


Phase = tuple[str, float, float]  # name, start and stop in seconds from the request's arrival


def phases(
    timeline: Timeline,
    *,
    started_at_s: float,
    admitted_s: float | None,
    queue_s: float,
    first_token_s: float | None,
    total_s: float,
) -> Sequence[Phase]:
    """What a request spent its time on, in order; only `transfer` overlaps others.

    Args:
        admitted_s: until it was its turn; None: it never was.
        queue_s: that a node which computed the prompt itself let it wait.
        first_token_s: None: there was none.
    """
    if admitted_s is None:
        return [("admission", 0.0, total_s)]
    at_s = {moment: at - started_at_s for moment, at in timeline.at_s.items()}
    first_s = total_s if first_token_s is None else min(first_token_s, total_s)
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
    if (reserved_s := at_s.get(Moment.RESERVED)) is not None:
        until("blocks", reserved_s)
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
    if first_token_s is not None:
        found.append(("tokens", first_s, total_s))
    return found
