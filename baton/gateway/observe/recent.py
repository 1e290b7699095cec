"""The last finished requests of one process, for the gateway's page, without prompts and outputs. Pure.

Keeping a request costs about a microsecond; its JSON is made only when the page is read.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from baton.core.log_lines import printable
from baton.gateway.observe.timeline import Moment, Timeline, phases, read
from baton.gateway.request.journal import Journal
from baton.gateway.request.output import Ended

KEPT = 200  # requests per process
_TEXT_MAX, _NAME_MAX = 400, 128

Shown = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One finished request.

    Attributes:
        ended_at_s: unix time of the end.
        started_at_s: arrival, on the clock of the journal.
        reason: reason of the error that ended the request; empty: none.
        error: text of that error; empty: none.
        failures: failed attempts, as text.
        admitted_s: time from arrival to admission; None: it was not admitted.
        ttft_s: time to first token; None: no token was sent.
        ended: summary of the first output; None: it was not served to its end.
        journal: journal of the first output; None: no output began.
    """

    ended_at_s: float
    started_at_s: float
    request_id: str
    client: str
    outcome: str
    reason: str
    error: str
    failures: str
    admitted_s: float | None
    ttft_s: float | None
    total_s: float
    outputs: int
    completion_tokens: int
    ended: Ended | None
    journal: Journal | None


class Recent:
    """The last finished requests of this process.

    Args:
        process: index of this process in the gateway.
        kept: number of requests kept.
    """

    def __init__(self, process: int = 0, kept: int = KEPT) -> None:
        self._process = process
        self._finished: deque[FinishedRequest] = deque(maxlen=kept)

    def add(self, finished: FinishedRequest) -> None:
        self._finished.append(finished)

    def newest(self, most: int, client: str | None) -> list[Shown]:
        """At most `most` requests as JSON, newest first; only those of `client`, or of all clients if it is None.

        `key` identifies a request while it is kept. It is not a counter, whose gaps would show a client how many
        requests others send.
        """
        found: list[Shown] = []
        for finished in reversed(self._finished):
            if len(found) >= most:
                break
            if client in (None, finished.client):
                found.append({"key": f"{self._process} {finished.ended_at_s!r}", **shown(finished)})
        return found


def newest_of(processes: Iterable[list[Shown]], most: int) -> list[Shown]:
    """Merges the requests of several processes, newest first."""
    everything = [each for found in processes for each in found]
    return sorted(everything, key=lambda each: -float(each["ended_at_s"]))[:most]


def shown(finished: FinishedRequest) -> Shown:
    """The request as JSON. Times are rounded to microseconds; those of the timeline count from the arrival."""
    timeline = _timeline(finished)
    receipt = None if finished.ended is None else finished.ended.receipt
    usage = None if finished.ended is None else finished.ended.usage
    drawn = phases(
        timeline,
        started_at_s=finished.started_at_s,
        admitted_s=finished.admitted_s,
        queue_s=0.0 if receipt is None else receipt.queue_s,
        ttft_s=finished.ttft_s,
        total_s=finished.total_s,
    )
    later = finished.completion_tokens - finished.outputs
    return {
        "ended_at_s": round(finished.ended_at_s, 3),
        "request_id": printable(finished.request_id, _NAME_MAX),
        "client": printable(finished.client, _NAME_MAX),
        "outcome": finished.outcome,
        "reason": finished.reason,
        "error": printable(finished.error, _TEXT_MAX),
        "failures": printable(finished.failures, _TEXT_MAX),
        "ttft_s": _seconds(finished.ttft_s),
        "total_s": _seconds(finished.total_s),
        "gap_s": (
            _seconds(max(0.0, finished.total_s - finished.ttft_s) * finished.outputs / later)
            if finished.ttft_s is not None and later > 0
            else None
        ),
        "outputs": finished.outputs,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": finished.completion_tokens,
        "phases": [[name, _seconds(start), _seconds(stop)] for name, start, stop in drawn],
        "chunks": list(_chunks(timeline, finished.started_at_s)),
        "failed_at_s": [_seconds(at - finished.started_at_s) for at in timeline.failed_at_s],
        "sent_s": _moment(timeline, Moment.SENT, finished.started_at_s),
        "receipt": None
        if receipt is None
        else {
            "path": receipt.path.value,
            "why": printable(receipt.why, _TEXT_MAX),
            "prefill_node": printable(receipt.prefill_node, _NAME_MAX),
            "decode_node": printable(receipt.decode_node, _NAME_MAX),
            "transport": printable(receipt.transport, _NAME_MAX),
            "bytes_sent": receipt.bytes_sent,
            "segments": receipt.segments,
            "layer_groups": receipt.layer_groups,
            "kv_converted": printable(receipt.kv_converted, _NAME_MAX),
            "queue_s": _seconds(receipt.queue_s),
            "prefill_s": _seconds(receipt.prefill_s),
            "transfer_s": _seconds(receipt.transfer_s),
            "attempts": receipt.attempts,
            "prefill_cached_tokens": receipt.prefill_cached_tokens,
            "decode_cached_tokens": receipt.decode_cached_tokens,
            "prefill_loaded_tokens": receipt.prefill_loaded_tokens,
            "decode_loaded_tokens": receipt.decode_loaded_tokens,
            "prefill_loaded": asdict(receipt.prefill_loaded),
            "decode_loaded": asdict(receipt.decode_loaded),
            "drafted_tokens": receipt.drafted_tokens,
            "accepted_tokens": receipt.accepted_tokens,
            "split_tokens": receipt.split_tokens,
            "predicted_ttft_s": _seconds(receipt.predicted_ttft_s),
        },
    }


def _timeline(finished: FinishedRequest) -> Timeline:
    if finished.journal is None:
        return Timeline()
    first_s = finished.ttft_s
    return read(finished.journal, None if first_s is None else finished.started_at_s + first_s)


def _chunks(timeline: Timeline, started_at_s: float) -> Iterator[list[float | int | None]]:
    for at_s, tokens in timeline.chunks:
        yield [_seconds(at_s - started_at_s), tokens]


def _moment(timeline: Timeline, moment: Moment, started_at_s: float) -> float | None:
    at_s = timeline.at_s.get(moment)
    return None if at_s is None else _seconds(at_s - started_at_s)


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
