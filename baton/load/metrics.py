"""Numbers of a whole run: distributions of times, throughput, and what went wrong by type. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.load.records import LoadOutcome, LoadRecord

QUANTILES = (0.5, 0.9, 0.95, 0.99)
SPREADS = ("ttft", "tpot", "gap", "gap_p99", "e2e", "late")  # fields of Summary that are distributions


@dataclass(frozen=True)
class Spread:
    """A distribution; times in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """Numbers of the counted requests of a run.

    Args:
        window_s: time from the last arrival that does not count, or from the run's start, to the last end; for several
            runs, the sum.
        ttft, tpot, e2e: one value for each answered request; None without any.
        gap: one value for each token after the first of its request, of all requests.
        gap_p99: one value for each request, the 99th percentile of its own gaps.
        short: requests that were answered with fewer tokens than asked for.
        errors: counts by type, without refusals.
        exact: whether messages reported how many tokens they have.
        merged: share of tokens that came in a message with others.
    """

    requests: int
    ok: int
    refused: int
    failed: int
    unfinished: int
    short: int
    window_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    gap_p99: Spread | None
    e2e: Spread | None
    late: Spread | None
    errors: dict[str, int]
    refusals: dict[str, int]
    exact: bool
    merged: float


def spread(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> Spread | None:
    """The distribution of the values. Returns None if there are none."""
    found = np.asarray(values, np.float64)
    if not found.size:
        return None
    p50, p90, p95, p99 = (float(each) for each in np.quantile(found, QUANTILES))
    return Spread(int(found.size), float(found.mean()), p50, p90, p95, p99, float(found.max()))


def summarize(*runs: Sequence[LoadRecord]) -> Summary:
    """Summarizes one run, or several runs together, without warm-up requests."""
    counted = [record for run in runs for record in run if record.counted]
    ok = [record for record in counted if record.outcome is LoadOutcome.OK]
    by_outcome = Counter(record.outcome for record in counted)
    window_s = sum(map(_window_s, runs))
    tokens = sum(record.tokens for record in counted)
    gaps = [record.gaps_s() for record in ok]
    in_messages = [count for record in ok for count in record.counts]
    return Summary(
        requests=len(counted),
        ok=len(ok),
        refused=by_outcome[LoadOutcome.REFUSED],
        failed=by_outcome[LoadOutcome.FAILED],
        unfinished=by_outcome[LoadOutcome.UNFINISHED],
        short=sum(record.tokens < record.output_tokens for record in ok),
        window_s=window_s,
        requests_per_s=len(ok) / window_s if window_s else 0.0,
        output_tokens_per_s=tokens / window_s if window_s else 0.0,
        prompt_tokens=sum(record.usage.get("prompt", record.prompt_tokens) for record in ok),
        cached_tokens=sum(record.usage.get("cached", 0) for record in ok),
        output_tokens=tokens,
        ttft=spread([record.ttft_s for record in ok if record.ttft_s is not None]),
        tpot=spread([record.tpot_s for record in ok if record.tpot_s is not None]),
        gap=spread(np.concatenate(gaps) if gaps else []),
        gap_p99=spread([float(np.quantile(each, 0.99)) for each in gaps if each.size]),
        e2e=spread([record.end_s for record in ok]),
        late=spread([record.late_s for record in counted]),
        errors=_types(counted, {LoadOutcome.FAILED}),
        refusals=_types(counted, {LoadOutcome.REFUSED}),
        exact=all(record.exact for record in ok),
        merged=sum(count for count in in_messages if count > 1) / max(1, sum(in_messages)),
    )


def _window_s(run: Sequence[LoadRecord]) -> float:
    # From the arrival before the first counted one: n requests come in n gaps. From the first one's own arrival there
    # are n - 1, and eight requests at one per second were 1.44 per second.
    begin = max((record.due_s for record in run if not record.counted), default=0.0)
    return max((record.due_s + record.end_s - begin for record in run if record.counted), default=0.0)


def _types(records: Sequence[LoadRecord], outcomes: set[LoadOutcome]) -> dict[str, int]:
    return dict(Counter(record.error for record in records if record.outcome in outcomes).most_common())
