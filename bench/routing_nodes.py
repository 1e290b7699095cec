"""Prefill nodes with prefix caches in virtual time, for the gateway's router to choose among. Pure."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from baton.block_keys import BlockNumbers
from baton.costs import StepCosts
from baton.types import NO_SLO, LocalPolicy, Slo
from gateway.prefix_index import PrefixIndex
from gateway.router import NodeView, Wanted, pick_prefill

STEP_TOKENS = 4096
REPORT_S = 0.1  # between a node's reports to the gateway
EVENTS_S = 0.05  # until the gateway has a change of a node's cache


@dataclass(frozen=True)
class Arrival:
    """One request: its blocks by number, equal ones with equal tokens before them and in them."""

    at_s: float
    num_tokens: int
    blocks: tuple[int, ...]


@dataclass
class Served:
    """What became of the requests, in order of their start."""

    ttft_s: list[float] = field(default_factory=list)
    hit_blocks: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def hit_rate(self) -> float:
        """Share of cached blocks in the second half, when caches are full."""
        half = len(self.blocks) // 2
        return sum(self.hit_blocks[half:]) / max(1, sum(self.blocks[half:]))

    def mean_s(self) -> float:
        """Mean TTFT."""
        return sum(self.ttft_s) / len(self.ttft_s)

    def ttft_percentile(self, share: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Node:
    """Computes one prompt after the other. Its cache drops the least recently used blocks, the last ones of a prompt
    first."""

    def __init__(self, name: str, costs: StepCosts, *, block_size: int, cache_blocks: int) -> None:
        self.name = name
        self.costs = costs
        self.free_at_s = 0.0
        self.queue: deque[tuple[Arrival, float]] = deque()  # with the predicted time
        self._block_size = block_size
        self._cache_blocks = cache_blocks
        self._cache: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, arrival: Arrival) -> int:
        return min(self._num_cached(arrival) * self._block_size, arrival.num_tokens - 1)

    def compute_s(self, arrival: Arrival) -> float:
        return self.costs.prompt_s(self.cached_tokens(arrival), arrival.num_tokens, step_tokens=STEP_TOKENS)

    def backlog_s(self, now_s: float) -> float:
        return max(0.0, self.free_at_s - now_s) + sum(predicted_s for _, predicted_s in self.queue)

    def start_next(self) -> tuple[Arrival, int, list[int], list[int]]:
        """Computes the first waiting prompt; returns how many blocks of it were cached, and the cache's changes."""
        arrival, _ = self.queue.popleft()
        hits = self._num_cached(arrival)
        self.free_at_s = max(self.free_at_s, arrival.at_s) + self.compute_s(arrival)
        stored = [block for block in arrival.blocks if block not in self._cache]
        for block in reversed(arrival.blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        removed = [self._cache.popitem(last=False)[0] for _ in range(len(self._cache) - self._cache_blocks)]
        return arrival, hits, stored, removed

    def _num_cached(self, arrival: Arrival) -> int:
        for index, block in enumerate(arrival.blocks):
            if block not in self._cache:
                return index
        return len(arrival.blocks)


Choose = Callable[[Sequence[NodeView], Wanted], NodeView]

_DECODE = NodeView("decode", 0, (), True, 1 << 30, 1, 0, 0, 0, frozenset())


def by_router(views: Sequence[NodeView], wanted: Wanted) -> NodeView:
    """The gateway's choice."""
    picked = pick_prefill(views, _DECODE, wanted)
    assert picked is not None
    return picked


def least_loaded(views: Sequence[NodeView], wanted: Wanted) -> NodeView:
    """The node whose prompts take the least time, whatever caches have."""
    assert wanted.num_tokens
    return min(views, key=lambda view: (view.queue_s, view.picks, view.address))


def in_turn() -> Choose:
    """Each node in turn."""
    turns = count()

    def choose(views: Sequence[NodeView], wanted: Wanted) -> NodeView:
        assert wanted.num_tokens
        return views[next(turns) % len(views)]

    return choose


class _Numbers(BlockNumbers):
    """A trace's block numbers."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__(range(len(blocks)), identity="", cache_salt="", block_size=1)
        self._numbers = list(blocks)


def simulate(
    arrivals: Iterable[Arrival],
    choose: Choose,
    costs: StepCosts,
    *,
    nodes: int,
    cache_tokens: int,
    block_size: int,
    slo: Slo = NO_SLO,
) -> Served:
    """Serves all requests; each node has a cache of `cache_tokens`."""
    cluster = [
        Node(f"node-{number:03}", costs, block_size=block_size, cache_blocks=cache_tokens // block_size)
        for number in range(nodes)
    ]
    by_name = {node.name: node for node in cluster}
    places = {node.name: place for place, node in enumerate(cluster)}
    index, served = PrefixIndex(), Served()
    changes: list[tuple[float, int, str, list[int], list[int]]] = []  # that the gateway does not have yet
    order = count()
    views: list[NodeView] = []
    picks = dict.fromkeys(by_name, 0)
    sent: dict[str, tuple[int, int]] = {}
    reported_at_s = -REPORT_S

    def start(node: Node) -> None:
        arrival, hits, stored, removed = node.start_next()
        served.ttft_s.append(node.free_at_s - arrival.at_s)
        served.hit_blocks.append(hits)
        served.blocks.append(len(arrival.blocks))
        heapq.heappush(changes, (node.free_at_s + EVENTS_S, next(order), node.name, stored, removed))

    for arrival in arrivals:
        now_s = arrival.at_s
        for node in cluster:
            while node.queue and node.free_at_s <= now_s:
                start(node)
        while changes and changes[0][0] <= now_s:
            _, _, name, stored, removed = heapq.heappop(changes)
            index.store(name, stored)
            index.remove(name, removed)
        if now_s >= reported_at_s + REPORT_S:
            reported_at_s, sent = now_s, {}
            views = [_view(node, now_s, picks[node.name]) for node in cluster]
        numbers = _Numbers(arrival.blocks)
        cached = index.cached_blocks(numbers, by_name)
        most = arrival.num_tokens - 1
        picked = choose(
            [
                view.with_cached(min(cached[view.address] * block_size, most)) if view.address in cached else view
                for view in views
            ],
            Wanted(arrival.num_tokens, LocalPolicy.STRICT, slo=slo),
        )
        node = by_name[picked.address]
        picks[node.name] += 1
        requests, tokens = sent.get(node.name, (0, 0))
        sent[node.name] = requests + 1, tokens + arrival.num_tokens - picked.cached_tokens
        place = places[node.name]
        requests_since, tokens_since = sent[node.name]
        views[place] = replace(
            views[place], requests_since=requests_since, tokens_since=tokens_since, picks=picks[node.name]
        )
        node.queue.append((arrival, node.compute_s(arrival)))
    for node in cluster:
        while node.queue:
            start(node)
    return served


def _view(node: Node, now_s: float, picks: int) -> NodeView:
    view = NodeView(
        address=node.name,
        incarnation=1,
        model=(),
        open=True,
        max_context_tokens=1 << 30,
        block_size=1,
        blocks_free=1 << 30,
        requests=len(node.queue) + (node.free_at_s > now_s),
        tokens_waiting=sum(arrival.num_tokens for arrival, _ in node.queue),
        ready_peers=frozenset([0]),
        picks=picks,
        costs=node.costs,
        backlog_s=node.backlog_s(now_s),
        max_batch_tokens=STEP_TOKENS,
    )
    _ = view.queue_s
    return view
