"""Decides how many more requests the nodes can take now, from their reports. Pure.

Other gateways share the nodes, so it goes by the nodes' reports and by what this gateway has sent since. A node with n
seats gets more than n requests, because prompts are on their way and reports are old: sqrt(n) more, as in square-root
staffing. While a client with few requests is present, one with many gets only the rows that give nearly all of the
throughput.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, sqrt

from baton.core.costs import StepCosts, StepWork
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.router import mean_token_ratio

REPORT_S = 0.1  # about the interval of node reports: a prefill node must have enough prompts until its next one
_AHEAD_SHARE = 0.25  # of the seats that may at least be on their way: many short outputs end between reports
_PREFILL_WAIT_S = 3 * REPORT_S  # longest wait of prompts on a prefill node, unless the gateway's TTFT allows more
_ENOUGH = 0.9  # of the best throughput
LIGHT_SHARE = 0.1  # of the nodes' capacity, or of the largest client's requests: this little counts as light
_CONTEXT_TOKENS = 512  # assumed context of a request while none is decoding
_SEATS_UNKNOWN = 64


def spare_requests(seats: int) -> int:
    """Requests beyond the seats that keep the seats occupied although arrivals and ends vary."""
    return ceil(sqrt(seats))


@dataclass(frozen=True)
class DecodeCapacity:
    """One decode node."""

    load: int  # requests on it, or on their way to it
    most: int  # requests that it should have at most
    most_shared: int  # the same of clients with many requests, next to one with few
    slots: int  # tokens for which it has free blocks
    waits: bool = False  # more requests may wait for blocks there
    seats: int = _SEATS_UNKNOWN  # requests that decode there at most


@dataclass(frozen=True)
class ClusterCapacity:
    """All nodes together. Times that are not known are None or 0."""

    decodes: tuple[DecodeCapacity, ...] = ()
    prefill_wait_s: float = 0.0  # until the prefill node that is free first would compute a prompt
    prefill_most_s: float = _PREFILL_WAIT_S  # how long prompts may wait there
    step_s: float | None = None  # predicted time per token with one more request, on the least loaded node
    prompt_token_s: float = 0.0  # predicted time for one token of a prompt, in full steps
    alone_s: float | None = None  # predicted time per token of a single request
    is_promised: bool = False  # the next places are those of requests that waited until a node came

    @property
    def load(self) -> int:
        """Requests on all nodes, or on their way to them."""
        return sum(node.load for node in self.decodes)

    @property
    def most_shared(self) -> int:
        return sum(node.most_shared for node in self.decodes)

    @property
    def spare_requests(self) -> int:
        return sum(spare_requests(node.seats) for node in self.decodes)

    def has(self, prompt_tokens: int, outputs: int, *, shared: bool, most: float = inf) -> bool:
        """Whether a request may be sent to the nodes now. Idle nodes take any, and nodes that cannot be seen take the
        decision themselves.

        Args:
            shared: it is of a client with many requests, next to one with few.
            most: requests that all nodes together should have then.
        """
        if self.is_promised and self.decodes:  # without nodes, it waits for one like the others
            return False
        if not (load := self.load):
            return True
        limits = [node.most_shared if shared else node.most for node in self.decodes]
        # NOTE: which node gets it is not decided here. Seats on one node must not fill another one without end.
        if load >= sum(limits) or (shared and load + 1 > most):
            return False
        if self.prefill_wait_s > (REPORT_S if shared else self.prefill_most_s):
            return False
        return any(
            node.load + min(outputs, max(1, limit // 4)) <= limit and (node.slots > prompt_tokens or node.waits)
            for node, limit in zip(self.decodes, limits, strict=True)
        )

    @property
    def is_light(self) -> bool:
        """Whether nodes have so little to do that one more request hardly slows the others."""
        return not self.decodes or any(node.load <= max(1, LIGHT_SHARE * node.most_shared) for node in self.decodes)


class CapacityReader:
    """Finds the capacity of nodes that are open.

    Args:
        ttft_s: the gateway's own; prompts may wait for half of it.
    """

    def __init__(self, ttft_s: float | None = None) -> None:
        self._prefill_most_s = max(_PREFILL_WAIT_S, (ttft_s or 0.0) / 2)

    def of(
        self, decodes: Sequence[NodeView], prefills: Sequence[NodeView], *, elastic: bool = False
    ) -> ClusterCapacity:
        """The capacity now.

        Args:
            decodes, prefills: with `queue_s` as of now. Without prefill nodes, decode nodes compute the prompts.
            elastic: decode nodes compute prompts, too.
        """
        # Decode nodes do not count requests whose KV is on its way. Prefill nodes do, and those that also decode do not
        # say which prompts are for themselves.
        both = {view.address for view in prefills}
        alone = [view for view in decodes if view.address not in both]
        on_their_way = sum(max(0, view.requests - view.decode_rows) for view in prefills) // len(alone) if alone else 0
        computing = [*prefills, *alone] if elastic else prefills or decodes
        step_s = alone_s = None
        least = min(decodes, key=lambda view: view.load, default=None)
        if least is not None and least.costs is not None:
            rows = least.load + 1
            context = least.context_tokens / least.decode_rows if least.decode_rows else _CONTEXT_TOKENS
            ratio = 1.0 if least.pace is None else mean_token_ratio(decodes)
            step_s, alone_s = (ratio * _decode_s(least.costs, each, context) for each in (rows, 1))
        return ClusterCapacity(
            tuple(
                _decode_capacity(view, view.decode_rows + view.requests_since)
                if alone and view.address in both
                else _decode_capacity(view, view.load + on_their_way)
                for view in decodes
            ),
            prefill_wait_s=min((view.queue_s for view in computing if view.queue_s < inf), default=0.0),
            prefill_most_s=self._prefill_most_s,
            step_s=step_s,
            prompt_token_s=min(
                (view.step_s / view.step_tokens for view in computing if view.step_s < inf), default=0.0
            ),
            alone_s=alone_s,
        )


def _decode_capacity(view: NodeView, load: int) -> DecodeCapacity:
    seats = view.max_batch_requests or _SEATS_UNKNOWN
    enough = seats if view.costs is None else enough_rows(view.costs, seats)
    most = seats + max(spare_requests(seats), int(_AHEAD_SHARE * seats))
    waits = view.load - view.decode_rows < spare_requests(seats)
    return DecodeCapacity(load, most, enough + spare_requests(enough), view.room_tokens, waits, seats)


def _decode_s(costs: StepCosts, rows: int, context: float = _CONTEXT_TOKENS) -> float:
    return costs.seconds(StepWork(rows, round(rows * context)))


@lru_cache(maxsize=256)  # asked 50 times a second for each node; its costs change with its reports only
def enough_rows(costs: StepCosts, seats: int) -> int:
    """The fewest rows with which a node decodes nearly as many tokens per second as with any number of rows."""
    rates, rows = {seats: seats / _decode_s(costs, seats)}, 1
    while rows < seats:
        rates[rows] = rows / _decode_s(costs, rows)
        rows += max(1, rows // 16)
    wanted = _ENOUGH * max(rates.values())
    return min(rows for rows, rate in rates.items() if rate >= wanted)
