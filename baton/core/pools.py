"""Counts blocks of pools. A request takes all its blocks from one pool, so free blocks of two pools do not add up.

A node's admission and the gateways that predict it count alike. Pure.
"""

from collections.abc import Iterable


def take_from_roomiest(open_blocks: list[int], blocks: int) -> None:
    """Takes a request's blocks from the pool with most of them left, which may fall below 0."""
    open_blocks[open_blocks.index(max(open_blocks))] -= blocks


def left_after(open_blocks: Iterable[int], needed: Iterable[int]) -> list[int]:
    """The blocks that each pool has left after other requests have taken theirs; `needed` has the number for each."""
    left = list(open_blocks)
    for blocks in needed if left else ():
        take_from_roomiest(left, blocks)
    return [max(0, blocks) for blocks in left]


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
