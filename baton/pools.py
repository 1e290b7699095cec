"""Blocks of a node's pools: a request takes all of its blocks from one pool, so free blocks of two pools do not add up.

A node's admission and the gateways that predict it count alike. Pure.
"""


def take_from_roomiest(open_blocks: list[int], blocks: int) -> None:
    """Takes a request's blocks from the pool with most of them left, which may fall below 0."""
    open_blocks[open_blocks.index(max(open_blocks))] -= blocks


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
