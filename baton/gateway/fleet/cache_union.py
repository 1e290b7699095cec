"""The union of all nodes' prefix caches, as a stream of changes, for routers that see the cluster as one engine. Pure.

A block is stored when the first node has it and removed when the last node has lost it. Only blocks without a salt
whose predecessors are all known are followed: others could not be found by their tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.protos.internal.v1 import node_pb2

_TOKEN_BYTES = 4


class StoredBlocks(NamedTuple):
    """A run of blocks, each the parent of the next one.

    Args:
        parent: the block before the first one; None: the run begins a prompt.
        blocks: number and tokens of each block.
    """

    parent: int | None
    blocks: list[tuple[int, bytes]]


class UnionChanges(NamedTuple):
    """Changes of the union after one message."""

    stored: list[StoredBlocks]
    removed: list[int]


class CacheUnion:
    """The union for nodes with one cache identity and block size.

    Args:
        root: parent of the first block of a prompt without a salt.
        block_size: tokens per block.
    """

    def __init__(self, root: int, block_size: int) -> None:
        self._root = root
        self._block_bytes = block_size * _TOKEN_BYTES
        self._counts: dict[int, int] = {}  # how many nodes have each reported block
        self._nodes: defaultdict[str, set[int]] = defaultdict(set)
        self._snapshots: dict[str, list[node_pb2.WatchCacheResponse]] = {}  # not complete yet

    def take(self, node: str, message: node_pb2.WatchCacheResponse) -> UnionChanges:
        """Applies a node's change or a part of its snapshot, with tokens. A snapshot applies once it is complete."""
        if message.snapshot:
            self._snapshots[node] = []
        parts = self._snapshots.get(node)
        if parts is None:
            return UnionChanges(
                self._store(node, _blocks([message], self._block_bytes)), self._remove(node, message.removed)
            )
        parts.append(message)
        if message.more:
            return UnionChanges([], [])
        del self._snapshots[node]
        blocks = _blocks(parts, self._block_bytes)
        gone = [block for block in self._nodes[node] if block not in blocks]
        return UnionChanges(self._store(node, blocks), self._remove(node, gone))

    def forget(self, node: str) -> list[int]:
        """Removes a lost node; returns the blocks that no other node has."""
        self._snapshots.pop(node, None)
        removed = self._remove(node, list(self._nodes[node]))
        del self._nodes[node]
        return removed

    def _store(self, node: str, blocks: dict[int, tuple[int, bytes]]) -> list[StoredBlocks]:
        has, counts = self._nodes[node], self._counts
        runs: list[StoredBlocks] = []
        for block, parent, tokens in self._in_order(blocks):
            if block in has:
                continue
            has.add(block)
            counts[block] = counts.get(block, 0) + 1
            if counts[block] > 1:
                continue
            if runs and runs[-1].blocks[-1][0] == parent:
                runs[-1].blocks.append((block, tokens))
            else:
                runs.append(StoredBlocks(None if parent == self._root else parent, [(block, tokens)]))
        return runs

    def _in_order(self, blocks: dict[int, tuple[int, bytes]]) -> Iterator[tuple[int, int, bytes]]:
        """Yields parents before their children and leaves out blocks with unknown parents."""
        children = defaultdict(list)
        for block, (parent, _) in blocks.items():
            children[parent].append(block)
        waiting = [
            block
            for parent, its_children in children.items()
            if parent not in blocks and (parent == self._root or parent in self._counts)
            for block in its_children
        ]
        while waiting:
            block = waiting.pop()
            yield block, *blocks[block]
            waiting += children.get(block, ())

    def _remove(self, node: str, blocks: Iterable[int]) -> list[int]:
        has, counts = self._nodes.get(node, set()), self._counts
        removed = []
        for block in blocks:
            if block not in has:
                continue
            has.discard(block)
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                removed.append(block)
        return removed


def _blocks(messages: Iterable[node_pb2.WatchCacheResponse], block_bytes: int) -> dict[int, tuple[int, bytes]]:
    """Parent and tokens of each stored block, by block number."""
    blocks = {}
    for message in messages:
        for index, (block, parent) in enumerate(zip(message.stored, message.parents, strict=True)):
            blocks[block] = parent, message.tokens[index * block_bytes : (index + 1) * block_bytes]
    return blocks
