"""The union of all nodes' prefix caches, as a stream of changes, for routers that see the cluster as one engine. Pure.

Each tier has a union of its own: a block is stored in a tier when the first node has it there and removed from the tier
when the last node has lost it there. A node counts for the fastest tier in which it has the block. Only blocks without
a salt whose predecessors are all known are followed: others could not be found by their tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from baton.protos.internal.v1 import node_pb2

_TOKEN_BYTES = 4


class Tier(IntEnum):
    """Where blocks are, from the fastest to the slowest place."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


class StoredBlocks(NamedTuple):
    """A run of blocks in one tier, each the parent of the next one.

    Args:
        parent: the block before the first one, which may be in another tier; None: the run begins a prompt.
        blocks: number and tokens of each block.
    """

    tier: Tier
    parent: int | None
    blocks: list[tuple[int, bytes]]


class UnionChanges(NamedTuple):
    """Changes of the union after one message.

    Args:
        removed: tier and number of each block.
    """

    stored: list[StoredBlocks]
    removed: list[tuple[Tier, int]]


class CacheUnion:
    """The union for nodes with one cache identity and block size.

    Args:
        root: parent of the first block of a prompt without a salt.
        block_size: tokens per block.
    """

    def __init__(self, root: int, block_size: int) -> None:
        self._root = root
        self._block_bytes = block_size * _TOKEN_BYTES
        self._counts: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}  # nodes with each block, by tier
        self._nodes: defaultdict[str, dict[int, Tier]] = defaultdict(dict)
        self._snapshots: dict[str, list[node_pb2.WatchCacheResponse]] = {}  # not complete yet

    def take(self, node: str, message: node_pb2.WatchCacheResponse, *, below: Tier = Tier.DISK) -> UnionChanges:
        """Applies a node's change or a part of its snapshot, with tokens. A snapshot applies once it is complete.

        Args:
            below: tier of the node's blocks that are neither in its cache nor in host memory.
        """
        if message.snapshot:
            self._snapshots[node] = []
        parts = self._snapshots.get(node)
        if parts is None:
            changes = self._store(node, _blocks([message], self._block_bytes, below))
            return UnionChanges(changes.stored, [*changes.removed, *self._remove(node, message.removed)])
        parts.append(message)
        if message.more:
            return UnionChanges([], [])
        del self._snapshots[node]
        blocks = _blocks(parts, self._block_bytes, below)
        gone = [block for block in self._nodes[node] if block not in blocks]
        changes = self._store(node, blocks)
        return UnionChanges(changes.stored, [*changes.removed, *self._remove(node, gone)])

    def forget(self, node: str) -> list[tuple[Tier, int]]:
        """Removes a lost node; returns the blocks that no other node has in the same tier."""
        self._snapshots.pop(node, None)
        removed = self._remove(node, list(self._nodes[node]))
        del self._nodes[node]
        return removed

    def _store(self, node: str, blocks: "dict[int, _Block]") -> UnionChanges:
        has = self._nodes[node]
        runs: list[StoredBlocks] = []
        left: list[tuple[Tier, int]] = []
        for number, block in self._in_order(blocks):
            tier, earlier = block.tier, has.get(number)
            if earlier is tier:
                continue
            has[number] = tier
            counts = self._counts[tier]
            counts[number] = counts.get(number, 0) + 1
            if earlier is not None:
                left += self._leave(earlier, number)
            if counts[number] > 1:
                continue
            if runs and runs[-1].tier is tier and runs[-1].blocks[-1][0] == block.parent:
                runs[-1].blocks.append((number, block.tokens))
            else:
                parent = None if block.parent == self._root else block.parent
                runs.append(StoredBlocks(tier, parent, [(number, block.tokens)]))
        # A known block that moves after all nodes have lost its parent could not be found at its new place.
        lost = [number for number, block in blocks.items() if has.get(number, block.tier) is not block.tier]
        return UnionChanges(runs, [*left, *self._remove(node, lost)])

    def _in_order(self, blocks: "dict[int, _Block]") -> "Iterator[tuple[int, _Block]]":
        """Yields parents before their children and leaves out blocks with unknown parents."""
        children = defaultdict(list)
        for number, block in blocks.items():
            children[block.parent].append(number)
        waiting = [
            number
            for parent, its_children in children.items()
            if parent not in blocks and (parent == self._root or self._knows(parent))
            for number in its_children
        ]
        while waiting:
            number = waiting.pop()
            yield number, blocks[number]
            waiting += children.get(number, ())

    def _knows(self, block: int) -> bool:
        return any(block in counts for counts in self._counts.values())

    def _remove(self, node: str, blocks: Iterable[int]) -> list[tuple[Tier, int]]:
        has = self._nodes.get(node, {})
        removed: list[tuple[Tier, int]] = []
        for block in blocks:
            if (tier := has.pop(block, None)) is not None:
                removed += self._leave(tier, block)
        return removed

    def _leave(self, tier: Tier, block: int) -> list[tuple[Tier, int]]:
        """Counts a node less; returns the block if it was the tier's last one."""
        counts = self._counts[tier]
        counts[block] -= 1
        if counts[block]:
            return []
        del counts[block]
        return [(tier, block)]


class _Block(NamedTuple):
    tier: Tier
    parent: int
    tokens: bytes


def _blocks(messages: Iterable[node_pb2.WatchCacheResponse], block_bytes: int, below: Tier) -> dict[int, _Block]:
    """The stored blocks by number."""
    blocks = {}
    for message in messages:
        tiers = dict.fromkeys(message.outside, Tier.HOST) | dict.fromkeys(message.below, below)
        for index, (number, parent) in enumerate(zip(message.stored, message.parents, strict=True)):
            tokens = message.tokens[index * block_bytes : (index + 1) * block_bytes]
            blocks[number] = _Block(tiers.get(number, Tier.DEVICE), parent, tokens)
    return blocks
