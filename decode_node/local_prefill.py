"""When a decode node prefills a prompt itself although a prefill node could: when its streams hardly notice. Pure."""

from dataclasses import dataclass

from baton.core.costs import StepCosts, StepWork, chunk_pairs

# A step may become longer by this part of a plain decode step, or by this time, whichever is more.
_EXTRA_PART = 0.1
_EXTRA_S = 0.001
_TOKENS_WITHOUT_COSTS = 32


@dataclass(frozen=True, slots=True)
class Streams:
    """What the node's decoding requests cost.

    Args:
        costs: of this node's steps; None: not measured yet.
        rows, keys: requests that decode, and the sum of their contexts.
        step_tokens: most tokens of one step.
    """

    costs: StepCosts | None
    rows: int
    keys: int
    step_tokens: int


UNKNOWN = Streams(costs=None, rows=0, keys=0, step_tokens=0)


def local_prefill_reason(tokens: int | None, uncached: int, cached: int, *, streams: Streams) -> str:
    """Why the node prefills `uncached` tokens after `cached` ones itself; empty: a prefill node should.

    Args:
        tokens: the operator's threshold; None: by costs.
    """
    idle = not streams.rows and uncached < _TOKENS_WITHOUT_COSTS  # nobody waits, and a hand-over takes longer
    if tokens is None and streams.costs is not None and not idle:
        return _by_costs(streams.costs, uncached, cached, streams)
    threshold = _TOKENS_WITHOUT_COSTS if tokens is None else tokens
    if uncached < threshold:
        return f"{uncached} uncached prompt tokens, under the threshold of {threshold}"
    return ""


def _by_costs(costs: StepCosts, uncached: int, cached: int, streams: Streams) -> str:
    rows = max(1, streams.rows)  # an idle node may have its first stream by the next step
    if rows + uncached > streams.step_tokens:
        return ""
    plain_s = costs.seconds(StepWork(rows, streams.keys))
    mixed_s = costs.seconds(StepWork(rows, streams.keys, uncached, chunk_pairs(cached, cached + uncached)))
    extra_s = mixed_s - plain_s
    if extra_s >= max(_EXTRA_S, _EXTRA_PART * plain_s):
        return ""
    return (
        f"{uncached} uncached prompt tokens, which make a step of {1e3 * plain_s:.3g} ms {1e3 * extra_s:.2g} ms longer"
    )
