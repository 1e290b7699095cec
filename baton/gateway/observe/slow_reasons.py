"""Finds the slow ones of the last requests, and the reasons. Pure."""

from collections.abc import Iterable, Sequence
from statistics import median

from baton.gateway.observe.recent import Shown

_TIMES_MEDIAN = 3.0  # without an SLO, a request is slow above this multiple of the median
_REQUESTS_MIN = 5  # with fewer requests there is no median
_TTFT_S_MIN, _GAP_S_MIN = 0.05, 0.01  # without an SLO, a request is never slow below these times

_WORDS = {
    "admission": "for its turn at the gateway",
    "lost": "on attempts that failed",
    "blocks": "for a node and its KV blocks",
    "queue": "for its first prefill step",
    "prefill": "on the prompt's computation",
}


def mark_slow(requests: Sequence[Shown], *, ttft_s: float | None, tpot_s: float | None) -> None:
    """Adds `slow` to each request: the reasons why it was slow or failed, as text.

    Args:
        ttft_s: TTFT bound of the gateway's SLO; None: three times the median of these requests.
        tpot_s: TPOT bound of the gateway's SLO; None: three times the median of these requests.
    """
    ttft_s = ttft_s or _limit((each["ttft_s"] for each in requests), _TTFT_S_MIN)
    tpot_s = tpot_s or _limit((each["gap_s"] for each in requests), _GAP_S_MIN)
    for each in requests:
        each["slow"] = list(_reasons(each, ttft_s, tpot_s))


def _reasons(request: Shown, ttft_s: float | None, tpot_s: float | None) -> Iterable[str]:
    if request["error"]:
        yield f"{request['outcome']}: {request['error']}"
    if request["failures"]:
        yield f"tried again: {request['failures']}"
    first_s, gap_s = request["ttft_s"], request["gap_s"]
    if first_s is not None and ttft_s is not None and first_s > ttft_s:
        yield f"first token after {_time(first_s)}, above {_time(ttft_s)}{_most_of(request)}"
    if gap_s is not None and tpot_s is not None and gap_s > tpot_s:
        yield f"{_time(gap_s)} between tokens, above {_time(tpot_s)}"


def _most_of(request: Shown) -> str:
    """The phase before the first token that took longest."""
    spent = {name: stop - start for name, start, stop in request["phases"] if name in _WORDS}
    if not spent:
        return ""
    name = max(spent, key=lambda each: spent[each])
    return f": {_time(spent[name])} {_WORDS[name]}"


def _limit(values: Iterable[float | None], least: float) -> float | None:
    known = [value for value in values if value is not None]
    return max(least, _TIMES_MEDIAN * median(known)) if len(known) >= _REQUESTS_MIN else None


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
