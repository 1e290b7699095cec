"""A batch's metadata against metadata computed one token at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention.host_to_device import to_device
from attention.metadata import (
    build_common_metadata,
    common_prefix_len,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from baton.core.errors import InternalError
from tests.device import DEVICE

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=7)


def tables_for(sizes: list[tuple[int, int]], block_size: int) -> list[list[int]]:
    """Block tables with a block more than needed, of numbers that identify request and place."""
    return [
        [100 * request + place for place in range(sum(size) // block_size + 2)] for request, size in enumerate(sizes)
    ]


@settings(deadline=None, max_examples=50)
@given(SIZES, st.sampled_from([1, 3, 4, 16]))
def test_the_builder_agrees_with_counting_tokens(sizes: list[tuple[int, int]], block_size: int) -> None:
    tables = tables_for(sizes, block_size)
    query_lens, context_lens = [size[0] for size in sizes], [size[1] for size in sizes]
    common, positions = build_common_metadata(
        query_lens=query_lens, context_lens=context_lens, block_tables=tables, block_size=block_size, device=DEVICE
    )
    expected_positions, expected_slots, starts = [], [], [0]
    for request, (query_len, context_len) in enumerate(sizes):
        for position in range(context_len, context_len + query_len):
            expected_positions.append(position)
            expected_slots.append(tables[request][position // block_size] * block_size + position % block_size)
        starts.append(len(expected_slots))
    assert positions.tolist() == expected_positions
    assert common.slot_mapping.tolist() == expected_slots
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == starts
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [sum(size) for size in sizes]
    assert common.num_computed_tokens_cpu.tolist() == context_lens
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (
        len(sizes),
        len(expected_slots),
        max(query_lens),
    )
    for row, blocks in zip(common.block_table_tensor.tolist(), tables, strict=True):
        assert row[: len(blocks)] == blocks


def test_arrays_reach_the_device_as_they_are_and_aligned() -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(3, dtype=np.int32),
        np.arange(10, dtype=np.int64).reshape(2, 5),
        np.empty(0, np.int32),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1:3],
    ]
    tensors = to_device(arrays, DEVICE)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.cpu().numpy().dtype == array.dtype
        assert DEVICE == "cpu" or tensor.data_ptr() % 16 == 0


def test_the_slot_mapping_after_the_tokens_is_minus_one() -> None:
    common, _ = build_common_metadata(query_lens=[2], context_lens=[1], block_tables=[[5]], block_size=4)
    common.slot_mapping = torch.tensor([21, 22, 0, 7])
    common.__post_init__()
    assert common.slot_mapping.tolist() == [21, 22, -1, -1]


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(1, 4))
def test_split_counts_decodes_and_prefills(sizes: list[tuple[int, int]], threshold: int) -> None:
    sizes.sort(key=lambda size: size[0] > threshold)
    common, _ = build_common_metadata(
        query_lens=[size[0] for size in sizes],
        context_lens=[size[1] for size in sizes],
        block_tables=tables_for(sizes, 4),
        block_size=4,
    )
    decodes = [size[0] for size in sizes if size[0] <= threshold]
    prefills = [size[0] for size in sizes if size[0] > threshold]
    assert split_decodes_and_prefills(common, threshold) == (len(decodes), len(prefills), sum(decodes), sum(prefills))


def test_a_short_request_after_a_prefill_is_a_prefill() -> None:
    sizes = [(1, 3), (5, 0), (1, 8)]
    common, _ = build_common_metadata(
        query_lens=[1, 5, 1], context_lens=[3, 0, 8], block_tables=tables_for(sizes, 4), block_size=4
    )
    assert split_decodes_and_prefills(common) == (1, 2, 1, 6)


@st.composite
def sharing_requests(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Block tables that begin alike, now and then for longer than the tokens that are computed."""
    block_size = draw(st.integers(1, 4))
    prefix = draw(st.lists(st.integers(0, 99), max_size=6))
    tables, computed = [], []
    for _ in range(draw(st.integers(1, 5))):
        blocks = prefix[: draw(st.integers(0, len(prefix)))] + draw(st.lists(st.integers(0, 99), max_size=3))
        tables.append(blocks)
        computed.append(draw(st.integers(0, len(blocks) * block_size)))
    return tables, computed, block_size


@settings(deadline=None, max_examples=50)
@given(sharing_requests())
def test_the_common_prefix_is_the_blocks_that_all_have_computed(case: tuple[list[list[int]], list[int], int]) -> None:
    tables, computed, block_size = case
    expected = 0
    while all(
        (expected + 1) * block_size <= tokens and blocks[expected] == tables[0][expected]
        for tokens, blocks in zip(computed, tables, strict=True)
    ):
        expected += 1
    assert common_prefix_len(tables, computed, block_size) == expected * block_size


def test_no_requests_share_nothing() -> None:
    assert common_prefix_len([], [], 16) == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 4))
def test_reordering_brings_decodes_to_the_front_by_the_fewest_swaps(query_lens: list[int], threshold: int) -> None:
    rows = list(enumerate(query_lens))
    swaps = []

    def swap(i: int, j: int) -> None:
        swaps.append((i, j))
        rows[i], rows[j] = rows[j], rows[i]

    reordered = reorder_batch_to_split_decodes_and_prefills(query_lens, swap, threshold)
    is_prefill = [query_len > threshold for _, query_len in rows]
    assert is_prefill == sorted(is_prefill)
    assert sorted(rows) == list(enumerate(query_lens))
    num_decodes = is_prefill.count(False)
    assert len(swaps) == sum(query_len > threshold for query_len in query_lens[:num_decodes])
    assert reordered == bool(swaps)


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "block_tables"),
    [
        ([1], [4], [[0]]),
        ([5], [0], [[0]]),
        ([0], [4], [[0]]),
        ([1], [-1], [[0]]),
        ([1, 1], [0], [[0]]),
        ([], [], []),
    ],
    ids=["context too long", "prompt too long", "nothing new", "negative", "uneven", "empty"],
)
def test_an_impossible_batch_is_refused(
    query_lens: list[int], context_lens: list[int], block_tables: list[list[int]]
) -> None:
    with pytest.raises(InternalError):
        build_common_metadata(query_lens=query_lens, context_lens=context_lens, block_tables=block_tables, block_size=4)
