"""The fleet as the simulated gateway sees it, slightly late: nodes' last reports, requests sent since, and the blocks
in their prefix caches. Pure.

It accounts like `baton.gateway.fleet.fleet`, with the same `Backlog` and `PrefixIndex`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from baton.core.block_keys import BlockNumbers
from baton.gateway.fleet.backlog import Backlog
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.possible_pulls import with_possible_pull
from baton.gateway.fleet.prefix_index import PrefixIndex
from baton.gateway.fleet.prompt_lengths import PromptLengths
from baton.planner.job import PlanJob
from baton.planner.node import SimulatedNode
from baton.planner.prefix_cache import SimulatedChanges


@dataclass(eq=False)
class _NodeState:
    """One node, as the gateway sees it."""

    node: SimulatedNode
    peers: frozenset[int]
    speeds: dict[int, float]
    view: NodeView | None = None
    at_s: float = -inf
    requests_since: int = 0
    streams_since: int = 0
    tokens_since: int = 0
    turn: int = 0
    backlog: Backlog = field(default_factory=Backlog)

    def view_at(self, now_s: float, report_s: float) -> NodeView:
        if self.view is None or now_s - self.at_s > report_s:
            self.view, self.at_s = self.node.report(now_s, self.peers, self.speeds), now_s
            self.requests_since = self.streams_since = self.tokens_since = 0
            self.backlog.reported(self.view.backlog_s, now_s)
        return _changed(
            self.view,
            requests_since=self.requests_since,
            streams_since=self.streams_since,
            tokens_since=self.tokens_since,
            room_tokens=self.view.room_tokens - self.tokens_since,
            turn=self.turn,
            queue_s=self.backlog.at(now_s),
        )


class SimulatedFleet:
    """All nodes, as the gateway sees them.

    Args:
        also_decodes: whether prefill nodes may serve requests alone.
        link_bytes_per_s: speed that pairs are known to reach.
        report_s: maximum age of a report.
        events_s: delay until a change of a prefix cache is known.
    """

    def __init__(
        self,
        decodes: Sequence[SimulatedNode],
        prefills: Sequence[SimulatedNode],
        *,
        also_decodes: bool,
        link_bytes_per_s: float,
        report_s: float,
        events_s: float,
    ) -> None:
        decode_numbers = frozenset(node.number for node in decodes)
        prefill_numbers = frozenset(node.number for node in prefills)
        speeds = dict.fromkeys(decode_numbers, link_bytes_per_s)
        self._decodes = [_NodeState(node, prefill_numbers, {}) for node in decodes]
        self._prefills = [_NodeState(node, decode_numbers, speeds) for node in prefills]
        self._by_number = {state.node.number: state for state in (*self._decodes, *self._prefills)}
        self._names = [str(number) for number in self._by_number]
        self._also_decodes = also_decodes
        self._report_s, self._events_s = report_s, events_s
        self._index = PrefixIndex()
        self._turns = count(1)
        self.lengths = PromptLengths()
        self._changes: deque[tuple[float, str, SimulatedChanges]] = deque()  # not known yet

    def views(self, job: PlanJob, now_s: float) -> tuple[list[NodeView], list[NodeView]]:
        """The nodes that can decode and those that can prefill, for one request."""
        cached = self._cached(job, now_s)
        prefills = [self._view(state, cached, now_s) for state in self._prefills]
        decodes = [self._view(state, cached, now_s) for state in self._decodes]
        if self._also_decodes:
            decodes += [_changed(view, also_prefills=True) for view in prefills]
        return decodes, [view.computing for view in prefills]

    def sent(self, number: int, *, tokens: int, computing_s: float, decodes: bool, now_s: float) -> None:
        """Records a request sent to the node, which computes `tokens` of its prompt in `computing_s`, and decodes it or
        not."""
        state = self._by_number[number]
        state.requests_since += 1
        state.streams_since += decodes
        state.tokens_since += tokens
        state.turn = next(self._turns)
        if computing_s:
            state.backlog.add(computing_s, now_s)

    def cache_changed(self, number: int, changes: SimulatedChanges, now_s: float) -> None:
        self._changes.append((now_s + self._events_s, str(number), changes))

    def _view(self, state: _NodeState, cached: dict[str, tuple[int, int]], now_s: float) -> NodeView:
        view = state.view_at(now_s, self._report_s)
        if not cached:
            return view
        if view.address in cached:
            tokens, outside = cached[view.address]
            view.__dict__.update(cached_tokens=tokens, outside_tokens=outside)
        if not state.node.spec.host_tokens:
            return view
        source = max(cached, key=lambda name: cached[name][0])
        return view if source == view.address else with_possible_pull(view, cached[source][0], source)

    def _cached(self, job: PlanJob, now_s: float) -> dict[str, tuple[int, int]]:
        """Cached tokens of the request's prompt, and how many of them must be loaded first, by name of the node."""
        if not job.prefix_ids:
            return {}
        while self._changes and self._changes[0][0] <= now_s:
            _, name, changes = self._changes.popleft()
            self._index.store(name, [*changes.stored, *changes.outside], changes.outside)
            self._index.remove(name, changes.removed)
        numbers = _Numbers(job.prefix_ids)
        found = self._index.cached_blocks(numbers, self._names)
        inside = self._index.blocks_inside(numbers, found)
        return {
            name: (min(blocks * job.prefix_tokens, job.prompt - 1), (blocks - inside[name]) * job.prefix_tokens)
            for name, blocks in found.items()
        }


class _Numbers(BlockNumbers):
    """Block numbers that a load gives itself."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(range(len(numbers)), identity="", cache_salt="", block_size=1)
        self._numbers = list(numbers)


def _changed(view: NodeView, **changes: object) -> NodeView:
    """Does `dataclasses.replace` without its checks, because one is made for each node and request."""
    copy = object.__new__(NodeView)
    copy.__dict__.update(view.__dict__, **changes)
    return copy
