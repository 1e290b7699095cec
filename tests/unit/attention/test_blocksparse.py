"""The block-sparse pattern: against its definition in loops, over tensor-parallel ranks, and its refusals."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from attention.blocksparse import BlocksparseParams
from attention.blocksparse_mask import block_mask, token_mask
from baton.core.errors import ConfigError

PARAMS = BlocksparseParams(max_seqlen=4096, num_heads=4, num_kv_heads=2, block_size=4, local_blocks=2, vert_stride=3)


@pytest.mark.parametrize("local_blocks", [0, 1, 3])
@pytest.mark.parametrize("vert_stride", [1, 2, 5, 9])
def test_mask_is_the_definition(local_blocks: int, vert_stride: int) -> None:
    params = replace(PARAMS, local_blocks=local_blocks, vert_stride=vert_stride)
    mask = block_mask(params, 8, 8)
    step = max(1, int(vert_stride / 4))
    for head, i, j in product(range(4), range(8), range(8)):
        seen = j <= i and (i - j < local_blocks or (j + head * step + 1) % vert_stride == 0)
        assert mask[head, i, j] == seen


def test_fewer_query_blocks_are_the_end_of_the_sequence() -> None:
    assert np.array_equal(block_mask(PARAMS, 3, 11), block_mask(PARAMS, 11, 11)[:, -3:])


@pytest.mark.parametrize(
    ("changed", "step", "offsets"),
    [
        ({}, 1, (0, 1, 2, 3)),
        ({"vert_stride": 9}, 2, (0, 2, 4, 6)),
        ({"homo_head": True}, 0, (0, 0, 0, 0)),
        ({"homo_head_group": True}, -1, (0, 0, 1, 1)),
        ({"homo_head_group": True, "vert_stride": 9}, -4, (0, 0, 4, 4)),
        ({"homo_head": True, "homo_head_group": True}, 0, (0, 0, 0, 0)),
        ({"tp_rank": 2, "tp_size": 3}, 1, (8, 9, 10, 11)),
        ({"tp_rank": 1, "tp_size": 2, "vert_stride": 17}, 2, (8, 10, 12, 14)),
        ({"tp_rank": 1, "tp_size": 2, "homo_head_group": True, "vert_stride": 9}, -2, (4, 4, 6, 6)),
    ],
)
def test_where_heads_have_their_stripes(changed: dict[str, Any], step: int, offsets: tuple[int, ...]) -> None:
    params = replace(PARAMS, **changed)
    assert params.head_sliding_step == step
    assert params.head_offsets == offsets


@pytest.mark.parametrize("changed", [{}, {"homo_head": True}, {"homo_head_group": True}])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_ranks_patterns_together_are_the_whole_models(changed: dict[str, bool], tp_size: int) -> None:
    whole = BlocksparseParams(
        max_seqlen=64, num_heads=16, num_kv_heads=4, block_size=4, local_blocks=1, vert_stride=37, **changed
    )
    ranks = [
        replace(whole, num_heads=16 // tp_size, num_kv_heads=4 // tp_size, tp_rank=rank, tp_size=tp_size)
        for rank in range(tp_size)
    ]
    assert np.array_equal(np.concatenate([block_mask(rank, 40, 40) for rank in ranks]), block_mask(whole, 40, 40))
    assert [head for rank in ranks for head in range(*rank.active_head_range)] == list(range(16))


def test_tokens_see_whole_blocks_but_for_the_diagonal() -> None:
    positions = np.array([5, 14, 26])
    mask = token_mask(PARAMS, positions, 27)
    blocks = block_mask(PARAMS, 7, 7)
    for head, (row, position), key in product(range(4), enumerate(positions), range(27)):
        assert mask[head, row, key] == (key <= position and blocks[head, position // 4, key // 4])


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"max_seqlen": 0}, "max_seqlen"),
        ({"block_size": 0}, "block_size"),
        ({"local_blocks": -1}, "local_blocks"),
        ({"vert_stride": 0}, "vert_stride"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"tp_size": 0}, "tp_size"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(PARAMS, **changed)
    assert refused.value.field == field
