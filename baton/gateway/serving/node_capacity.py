"""How much more work nodes can take now, from their reports. Pure.

Other gateways share the nodes, so only what nodes report counts, and what this gateway has sent since. Decode nodes
take as many requests as they have seats, and some more, whose prompts are computed meanwhile. Where a client with few
requests is next to one with many, the latter gets only as many as give nearly all of the throughput: every further one
would slow all streams down and gain next to nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from baton.core.costs import StepCosts, StepWork
from baton.gateway.fleet.router import NodeView

# Requests beyond the seats: their prompts are on their way, or the report does not know yet that others have ended.
_AHEAD_SHARE, _AHEAD_SHARED, _AHEAD_LEAST = 0.25, 0.125, 2
# Requests that may wait on a decode node for blocks, so that it reserves blocks as soon as they are free.
_FOR_BLOCKS_SHARE, _FOR_BLOCKS_LEAST = 1 / 16, 8
# Prompts wait on a prefill node for at most so long, so that it never idles between two reports.
_PREFILL_WAIT_S, _PREFILL_WAIT_SHARED_S = 0.3, 0.1
_ENOUGH = 0.9  # of the best throughput
_SPARED_SLOWER = 2.0  # at most, against a single row, by costs alone
_LIGHT_SHARE, _LIGHT_LEAST = 0.05, 1
_CONTEXT_TOKENS = 512  # of a request, where none decodes
_SEATS_UNKNOWN = 64
_ROWS_TRIED = (*range(1, 16), *range(16, 64, 4), *range(64, 256, 16), *range(256, 8193, 64))


@dataclass(frozen=True)
class DecodeRoom:
    """One decode node.

    Args:
        load: requests on it, or on their way to it.
        most: requests that it should have at most; `most_shared`: of clients with many, next to one with few.
        slots: tokens for which it has free blocks.
        waits: more requests may wait for blocks there.
        seats: requests that decode there at most.
        spared: requests with which its steps take at most twice as long as with one, by their costs.
    """

    load: int
    most: int
    most_shared: int
    slots: int
    waits: bool = False
    seats: int = _SEATS_UNKNOWN
    spared: int = _SEATS_UNKNOWN


@dataclass(frozen=True)
class Room:
    """All nodes together.

    Args:
        prefill_wait_s: until a prompt would be computed on the prefill node that is free first; 0: not known.
        prefill_most_s: how long prompts may wait there.
        step_s: predicted time of a decode step with one more request, on the least loaded node; None: not known.
        prompt_token_s: predicted time for one token of a prompt, in full steps; 0: not known.
        alone_s: predicted time of a decode step with a single request; None: not known.
    """

    decodes: tuple[DecodeRoom, ...] = ()
    prefill_wait_s: float = 0.0
    prefill_most_s: float = _PREFILL_WAIT_S
    step_s: float | None = None
    prompt_token_s: float = 0.0
    alone_s: float | None = None

    @property
    def seats(self) -> int:
        return sum(node.seats for node in self.decodes)

    @property
    def spared(self) -> int:
        """With so many requests on all nodes, steps take at most twice as long as with one, by their costs."""
        return sum(node.spared for node in self.decodes)

    @property
    def load(self) -> int:
        """Requests on all nodes, or on their way to them."""
        return sum(node.load for node in self.decodes)

    def has(self, prompt_tokens: int, outputs: int, *, shared: bool, most: float = inf) -> bool:
        """Whether a request may be sent to the nodes now. Idle nodes take any, and nodes that cannot be seen take the
        decision themselves.

        Args:
            shared: it is of a client with many requests, next to one with few.
            most: requests that all nodes together should have then.
        """
        load = self.load
        if not load:
            return True
        if shared and load + 1 > most:
            return False
        # NOTE: which node gets it is not decided here. Room on one node must not fill another one without end.
        if load >= sum(node.most_shared if shared else node.most for node in self.decodes):
            return False
        if self.prefill_wait_s > (_PREFILL_WAIT_SHARED_S if shared else self.prefill_most_s):
            return False
        for node in self.decodes:
            most = node.most_shared if shared else node.most
            if node.load + min(outputs, max(1, most // 4)) <= most and (node.slots > prompt_tokens or node.waits):
                return True
        return False

    @property
    def is_light(self) -> bool:
        """Nodes have so little to do that one more request costs the others next to nothing."""
        return not self.decodes or any(
            node.load <= max(_LIGHT_LEAST, _LIGHT_SHARE * node.most_shared) for node in self.decodes
        )


class Rooms:
    """Finds the room of nodes that are open; remembers what follows from their costs.

    Args:
        ttft_s: the gateway's own; a longer one allows prompts to wait longer.
    """

    def __init__(self, ttft_s: float | None = None) -> None:
        self._prefill_most_s = max(_PREFILL_WAIT_S, 0.0 if ttft_s is None else ttft_s / 2)
        self._rows: dict[str, tuple[StepCosts, int, int, int]] = {}

    def of(self, decodes: Sequence[NodeView], prefills: Sequence[NodeView], *, elastic: bool = False) -> Room:
        """The room now.

        Args:
            decodes, prefills: with `queue_s` as of now. Without prefill nodes, decode nodes compute the prompts.
            elastic: decode nodes compute prompts, too.
        """
        # Decode nodes do not count requests whose KV is on its way. Prefill nodes do, and those that also decode do not
        # say which prompts are for themselves.
        both = {view.address for view in prefills}
        alone = [view for view in decodes if view.address not in both]
        on_their_way = sum(max(0, view.requests - view.decode_rows) for view in prefills)
        if alone:
            loads = [
                view.decode_rows + view.requests_since
                if view.address in both
                else view.load + int(on_their_way / len(alone))
                for view in decodes
            ]
        else:
            loads = [view.load for view in decodes]
        rooms = tuple(self._decode_room(view, load) for view, load in zip(decodes, loads, strict=True))
        computing = [*prefills, *alone] if elastic else prefills or decodes
        return _room(rooms, decodes, computing, self._prefill_most_s)

    def _decode_room(self, view: NodeView, load: int) -> DecodeRoom:
        seats = view.max_batch_requests or _SEATS_UNKNOWN
        shared, spared = self._rows_of(view, seats)
        waits = view.load - view.decode_rows < max(_FOR_BLOCKS_LEAST, seats * _FOR_BLOCKS_SHARE)
        most, most_shared = _with_ahead(seats, _AHEAD_SHARE), _with_ahead(shared, _AHEAD_SHARED)
        return DecodeRoom(load, most, most_shared, view.room_tokens, waits, seats, spared)

    def _rows_of(self, view: NodeView, seats: int) -> tuple[int, int]:
        """What `enough_rows` and `spared_rows` say of the node."""
        if view.costs is None:
            return seats, seats
        known = self._rows.get(view.address)
        if known is None or known[:2] != (view.costs, seats):  # each report has an object of its own
            known = view.costs, seats, enough_rows(view.costs, seats), spared_rows(view.costs, seats)
            self._rows[view.address] = known
        return known[2], known[3]


def _room(
    rooms: tuple[DecodeRoom, ...], decodes: Sequence[NodeView], computing: Sequence[NodeView], prefill_most_s: float
) -> Room:
    least = min(decodes, key=lambda view: view.load, default=None)
    step_s = alone_s = None
    if least is not None and least.costs is not None:
        rows = least.load + 1
        context = least.context_tokens / least.decode_rows if least.decode_rows else _CONTEXT_TOKENS
        step_s = least.costs.seconds(StepWork(rows, round(rows * context)))
        alone_s = least.costs.seconds(StepWork(1, round(context)))
    waits = [view.queue_s for view in computing if view.queue_s < inf]
    return Room(
        rooms,
        prefill_wait_s=min(waits, default=0.0),
        prefill_most_s=prefill_most_s,
        step_s=step_s,
        prompt_token_s=min((view.step_s / view.step_tokens for view in computing if view.step_s < inf), default=0.0),
        alone_s=alone_s,
    )


def _with_ahead(rows: int, share: float) -> int:
    return rows + max(_AHEAD_LEAST, int(share * rows))


def enough_rows(costs: StepCosts, seats: int) -> int:
    """The fewest rows with which a node decodes nearly as many tokens per second as with any number of rows."""
    tried: list[int] = [*(rows for rows in _ROWS_TRIED if rows < seats), seats]
    rates: list[float] = [rows / costs.seconds(StepWork(rows, rows * _CONTEXT_TOKENS)) for rows in tried]
    wanted = _ENOUGH * max(rates)
    return min(rows for rows, rate in zip(tried, rates, strict=True) if rate >= wanted)


def spared_rows(costs: StepCosts, seats: int) -> int:
    """The most rows with which a node's decode steps take at most twice as long as with one."""
    most_s = _SPARED_SLOWER * costs.seconds(StepWork(1, _CONTEXT_TOKENS))
    allowed = bisect_right(
        range(seats + 1), most_s, lo=1, key=lambda rows: costs.seconds(StepWork(rows, rows * _CONTEXT_TOKENS))
    )
    return max(1, allowed - 1)
