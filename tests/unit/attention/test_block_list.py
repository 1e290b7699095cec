"""Listing the blocks of a batch for libraries that want one list. Legend: R requests, B blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.backend import AttentionNeeds
from attention.backends.flashinfer_plan import BlockLister
from attention.kernels.block_list import list_blocks
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from baton.core.errors import InternalError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from tests.device import DEVICE

NEEDS = AttentionNeeds(KVKind.GQA, DEVICE, "bfloat16", 64, 16, KVCacheLayout.NHD, max_num_reqs=4, max_model_len=100)
TABLES = [[7, 3], [5], [2, 9, 4], [8]]


def batch(query_lens: list[int], context_lens: list[int]) -> CommonAttentionMetadata:
    common, _ = build_common_metadata(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=TABLES[: len(query_lens)],
        block_size=16,
        device=DEVICE,
    )
    return common


@pytest.mark.parametrize("columns", [3, 2000])
def test_blocks_are_listed_request_after_request_and_no_more(columns: int) -> None:
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.integers(0, 1 << 20, (5, columns), dtype=np.int32)).to(DEVICE)
    counts = [columns, 0, 1, columns - 1, 2]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    out = torch.full((int(starts[-1]) + 7,), -1, dtype=torch.int32, device=DEVICE)
    list_blocks(table, torch.from_numpy(starts).to(DEVICE), out=out)
    expected = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    assert torch.equal(out[: int(starts[-1])], expected)
    assert (out[int(starts[-1]) :] == -1).all()


def test_lists_have_the_number_of_tokens_in_each_last_block() -> None:
    lists = BlockLister(NEEDS).list(batch([1, 1, 9, 16], [31, 4, 24, 0]))
    assert lists.start_loc.tolist() == [0, 2, 3, 6, 7]
    assert lists.block_ids[:7].tolist() == [7, 3, 5, 2, 9, 4, 8]
    assert lists.last_block_lens.tolist() == [16, 5, 1, 16]
    assert lists.seq_lens.tolist() == [32, 5, 33, 16]


def test_some_requests_lists_start_at_their_own_blocks() -> None:
    lists = BlockLister(NEEDS).list(batch([1, 1, 9, 16], [31, 4, 24, 0])).of(1, 3)
    assert lists.start_loc.tolist() == [0, 1, 4]
    assert lists.block_ids[:4].tolist() == [5, 2, 9, 4]
    assert (lists.last_block_lens.tolist(), lists.seq_lens.tolist()) == ([5, 1], [5, 33])


def test_leading_blocks_can_be_left_out() -> None:
    lists = BlockLister(NEEDS).list(batch([1, 1, 9], [31, 15, 24]), skipped_blocks=1)
    assert lists.start_loc.tolist() == [0, 1, 1, 3]
    assert lists.block_ids[:3].tolist() == [3, 9, 4]
    assert lists.last_block_lens.tolist() == [16, 0, 1]
    assert lists.seq_lens.tolist() == [16, 0, 17]


def test_a_padded_request_has_no_blocks() -> None:
    common = batch([1, 1, 1], [31, 4, 24])
    common.seq_lens_cpu[1:] = 0
    lists = BlockLister(NEEDS).list(common)
    assert lists.start_loc.tolist() == [0, 2, 2, 2]
    assert lists.last_block_lens.tolist() == [16, 0, 0]


def test_lists_of_later_batches_lie_in_the_same_memory() -> None:
    lister = BlockLister(NEEDS)
    first = lister.list(batch([1], [31])).block_ids.data_ptr()
    assert lister.list(batch([1, 1, 9], [31, 4, 24])).block_ids.data_ptr() == first == lister.buffer.data_ptr()


@pytest.mark.parametrize(("max_num_reqs", "max_model_len"), [(2, 100), (4, 16)])
def test_a_batch_beyond_the_planned_size_is_refused(max_num_reqs: int, max_model_len: int) -> None:
    lister = BlockLister(replace(NEEDS, max_num_reqs=max_num_reqs, max_model_len=max_model_len))
    with pytest.raises(InternalError, match="a batch of 3 requests and 6 blocks"):
        lister.list(batch([1, 1, 9], [31, 4, 24]))
