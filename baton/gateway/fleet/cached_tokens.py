"""Looks up how much of one prompt each node has cached, and from which node others would pull it. Pure."""

from collections.abc import Iterable, Mapping

from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.possible_pulls import with_possible_pull, with_shared_read
from baton.gateway.fleet.prefix_index import PrefixIndex
from baton.gateway.fleet.router import RoutedRequest


class CachedTokens(dict[str, int]):
    """Number of cached prompt tokens of nodes, by address; nodes without any are left out.

    Attributes:
        outside: of these, the last ones, which the node must load from host memory first.
        below: of these in turn, those that it must read from files or a shared store before.
        most: of the nodes whose KV is of one kind, the one that has most, and its tokens.
        shared: of the nodes that share a store, the tokens of the one that has most: others may read them there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[str, int] = {}
        self.below: dict[str, int] = {}
        self.most: dict[tuple[object, ...], tuple[int, FleetNode]] = {}
        self.shared: dict[bytes, int] = {}

    @classmethod
    def find(cls, index: PrefixIndex, nodes: Iterable[FleetNode], wanted: RoutedRequest) -> "CachedTokens":
        """Looks the request's prompt up for these nodes."""
        cached = cls()
        if wanted.prompt is None:
            return cached
        known = [node for node in nodes if node.cache.known]
        kinds: dict[tuple[str, int], list[str]] = {}
        for node in known:
            kinds.setdefault(node.cache_kind, []).append(node.address)
        for (identity, block_size), addresses in kinds.items():
            numbers = wanted.prompt.numbers(identity, block_size)
            found = index.cached_blocks(numbers, addresses)
            # The last token is always computed.
            max_blocks = (wanted.num_tokens - 1) // block_size
            found = {address: min(blocks, max_blocks) for address, blocks in found.items()}
            for address, inside in index.blocks_inside(numbers, found).items():
                cached[address] = found[address] * block_size
                cached.outside[address] = (found[address] - inside) * block_size
            for address, below in index.blocks_below(numbers, found).items():
                cached.below[address] = below * block_size
        if cached:  # a prompt that no node knows is common, and a cluster may have 1,000 nodes
            cached._note_most({node.address: node for node in reversed(known)})
        return cached

    def _note_most(self, nodes: Mapping[str, FleetNode]) -> None:
        """Finds the nodes from which others may pull, and what a shared store is likely to have: nodes write to it what
        they keep."""
        for address, tokens in self.items():
            node = nodes[address]
            if node.kept_kind is None or not node.serves:
                continue
            if node.shared_store:
                self.shared[node.shared_store] = max(tokens, self.shared.get(node.shared_store, 0))
            if tokens > self.most.get(node.kept_kind, (0, node))[0]:
                self.most[node.kept_kind] = tokens, node

    def view(self, view: NodeView, node: FleetNode, now_s: float) -> NodeView:
        """One of the node's views for this prompt, with its queue and hand-overs now, without a pull."""
        if tokens := self.get(view.address):
            view = view.with_cached(tokens, self.outside[view.address], self.below.get(view.address, 0))
        return view.with_queue(node.queue_s(now_s), second_token_s=node.second_token.at(now_s))

    def pulling_view(self, view: NodeView, node: FleetNode, now_s: float) -> NodeView:
        """As `view`, with the pull that the node would begin if it computed the prompt, or with the read from a shared
        store, which it searches before."""
        view = self.view(view, node, now_s)
        if node.shared_store:
            view = with_shared_read(view, self.shared.get(node.shared_store, 0))
        if view.pull is not None or node.kept_kind is None or node.kept_kind not in self.most:
            return view
        most, source = self.most[node.kept_kind]
        return view if source is node else with_possible_pull(view, most, source.name)
