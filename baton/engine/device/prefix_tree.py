"""Which requests have their first blocks in common: a radix tree over block tables. Pure.

A node stands for the blocks on the way to it, and knows the requests that begin with them. Nodes are only where block
tables differ, so a request passes few of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from baton.engine.request import IntArray, int_array


class SharedBlocks(NamedTuple):
    """The requests that have their first `num_blocks` blocks in common."""

    num_blocks: int
    requests: frozenset[str]


class _Node:
    """The blocks from the parent's end to its own.

    Attributes:
        stop: number of blocks from the root to the node's end.
        children: by their first block.
    """

    __slots__ = ("blocks", "children", "requests", "stop")

    def __init__(self, blocks: IntArray, stop: int, requests: set[str]) -> None:
        self.blocks = blocks
        self.stop = stop
        self.requests = requests
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """The first blocks of some requests."""

    def __init__(self) -> None:
        self._root = _Node(int_array(), 0, set())
        self._blocks: dict[str, IntArray] = {}

    def add(self, request_id: str, blocks: IntArray) -> None:
        """Adds a request that is not in the tree."""
        assert request_id not in self._blocks
        self._blocks[request_id] = blocks
        node, count = self._root, len(blocks)
        node.requests.add(request_id)
        while node.stop < count:
            child = node.children.get(blocks[node.stop])
            if child is None:
                node.children[blocks[node.stop]] = _Node(blocks[node.stop :], count, {request_id})
                return
            rest = blocks[node.stop : child.stop]
            if rest != child.blocks:
                child = _split(node, child, _num_equal(rest, child.blocks))
            child.requests.add(request_id)
            node = child

    def remove(self, request_id: str) -> None:
        blocks = self._blocks.pop(request_id)
        parent, node = None, self._root
        while True:
            node.requests.remove(request_id)
            if parent is not None and not node.requests:
                del parent.children[node.blocks[0]]
                _absorb_only_child(parent)
                return
            if node.stop == len(blocks):
                _absorb_only_child(node)
                return
            parent, node = node, node.children[blocks[node.stop]]

    def blocks_of(self, request_id: str) -> "IntArray | None":
        """The blocks with which the request was added; None: it is not in the tree."""
        return self._blocks.get(request_id)

    def shared(self, least_requests: int) -> Iterator[SharedBlocks]:
        """All prefixes of `least_requests` requests or more, each as long as it can be for its requests."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if node.stop:
                yield SharedBlocks(node.stop, frozenset(node.requests))
            nodes += [child for child in node.children.values() if len(child.requests) >= least_requests]


def _split(parent: _Node, child: _Node, at: int) -> _Node:
    """Puts a node between, after the first `at` blocks of the child. Returns it."""
    between = _Node(child.blocks[:at], parent.stop + at, set(child.requests))
    parent.children[child.blocks[0]] = between
    child.blocks = child.blocks[at:]
    between.children[child.blocks[0]] = child
    return between


def _absorb_only_child(node: _Node) -> None:
    """Joins a node and its only child, if the same requests pass both."""
    if not node.stop or len(node.children) != 1:
        return
    (child,) = node.children.values()
    if len(child.requests) == len(node.requests):
        node.blocks, node.stop, node.children = node.blocks + child.blocks, child.stop, child.children


def _num_equal(first: IntArray, second: IntArray) -> int:
    """How many blocks are equal at the beginning of two different tables: a binary search, because arrays compare
    faster than their elements."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
