"""Parts of a batch have the positions, blocks and slots that their tokens have in the whole batch."""

import itertools

import pytest
import torch

from attention.metadata import (
    CommonAttentionMetadata,
    build_common_metadata,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from attention.micro_batches import (
    MicroBatch,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    slice_query_start_locs,
    split_attn_metadata,
)
from baton.core.errors import InternalError

Row = tuple[int, int, int]


def batch(query_lens: list[int], context_lens: list[int]) -> CommonAttentionMetadata:
    tables = [[8 * row + block for block in range(8)] for row in range(len(query_lens))]
    common, _ = build_common_metadata(
        query_lens=query_lens, context_lens=context_lens, block_tables=tables, block_size=4
    )
    return common


def rows(common: CommonAttentionMetadata) -> list[Row]:
    """Of each token: its request's first block, its position, its slot."""
    found: list[Row] = []
    for request in range(common.num_reqs):
        start, stop = common.query_start_loc[request : request + 2].tolist()
        first = int(common.seq_lens[request]) - (stop - start)
        assert first == int(common.num_computed_tokens_cpu[request])
        block = int(common.block_table_tensor[request, 0])
        found += [(block, first + n, int(common.slot_mapping[start + n])) for n in range(stop - start)]
    assert len(found) == common.num_actual_tokens
    assert common.max_query_len == int(common.query_start_loc_cpu.diff().max())
    torch.testing.assert_close(common.seq_lens, common.seq_lens_cpu)
    return found


@pytest.mark.parametrize("cut", range(1, 12))
def test_micro_batches_have_the_tokens_of_the_batch_wherever_it_is_cut(cut: int) -> None:
    common = batch([1, 1, 3, 7], [9, 4, 0, 5])
    before = rows(common)
    owners = [0, 1, 2, 2, 2, *[3] * 7]
    parts = split_attn_metadata(
        [
            MicroBatch(slice(0, owners[cut - 1] + 1), slice(0, cut)),
            MicroBatch(slice(owners[cut], 4), slice(cut, 12)),
        ],
        common,
    )
    assert rows(parts[0]) + rows(parts[1]) == before
    assert rows(common) == before


def test_one_request_can_be_cut_on_both_sides() -> None:
    common = batch([2, 9], [3, 4])
    (part,) = split_attn_metadata([MicroBatch(slice(1, 2), slice(4, 8))], common)
    assert rows(part) == rows(common)[4:8]


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        (slice(0, 0), slice(0, 1)),
        (slice(0, 1), slice(0, 0)),
        (slice(0, 3), slice(0, 3)),
        (slice(0, 1), slice(0, 3)),
        (slice(1, 2), slice(0, 3)),
        (slice(0, 2), slice(0, 2)),
        (slice(0, 2), slice(2, 4)),
    ],
)
def test_a_micro_batch_of_other_requests_than_its_tokens_is_refused(requests: slice, tokens: slice) -> None:
    with pytest.raises(InternalError):
        split_attn_metadata([MicroBatch(requests, tokens)], batch([2, 2], [0, 0]))


def test_starts_are_counted_from_the_first_request_of_a_slice() -> None:
    assert slice_query_start_locs(torch.tensor([0, 1, 4, 9]), slice(1, 3)).tolist() == [0, 3, 8]


def test_layers_that_share_kv_compute_only_tokens_with_logits() -> None:
    common = batch([1, 5, 4], [7, 0, 2])
    whole = rows(common)
    fast = make_kv_sharing_fast_prefill_common_attn_metadata(common, torch.tensor([0, 5, 8, 9]))
    assert [row[:2] for row in rows(fast)] == [whole[index][:2] for index in (0, 5, 8, 9)]
    assert (fast.num_actual_tokens, fast.max_query_len) == (4, 2)
    assert fast.slot_mapping.tolist() == [-1] * 4
    assert rows(common) == whole
    decodes = batch([1, 1], [3, 4])
    assert make_kv_sharing_fast_prefill_common_attn_metadata(decodes, torch.tensor([0, 1])) is decodes


@pytest.mark.parametrize("logits_indices", [[0, 5], [0, 4, 9], [0, 3, 5, 9]])
def test_a_batch_with_logits_of_other_tokens_than_the_last_is_refused(logits_indices: list[int]) -> None:
    with pytest.raises(InternalError, match="not its last"):
        make_kv_sharing_fast_prefill_common_attn_metadata(batch([1, 5, 4], [7, 0, 2]), torch.tensor(logits_indices))


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "any_size"),
    [
        ([2, 2, 2], 3, (3, 0, 6, 0), (3, 0, 6, 0)),
        ([2, 2, 1, 2], 3, (2, 2, 4, 3), (4, 0, 7, 0)),
        ([2, 2, 9], 3, (2, 1, 4, 9), (2, 1, 4, 9)),
        ([9, 9], 3, (0, 2, 0, 18), (0, 2, 0, 18)),
        ([1, 1], 1, (2, 0, 2, 0), (2, 0, 2, 0)),
    ],
)
def test_decodes_may_have_to_be_of_one_size(
    query_lens: list[int],
    threshold: int,
    uniform: tuple[int, int, int, int],
    any_size: tuple[int, int, int, int],
) -> None:
    common = batch(query_lens, [5] * len(query_lens))
    assert split_decodes_and_prefills(common, threshold, require_uniform=True) == uniform
    assert split_decodes_and_prefills(common, threshold) == any_size


@pytest.mark.parametrize("last", range(3))
def test_three_classes_are_sorted_by_the_fewest_swaps(last: int) -> None:
    for classes in itertools.product(range(3), repeat=4):
        check_order((*classes, last))


def check_order(classes: tuple[int, ...]) -> None:
    """0: a decode; 1: a later chunk of a prompt; 2: a prompt without context, the last one of a single token."""
    context_lens = [0 if each == 2 else 4 for each in classes]
    query_lens = [(1, 6, 6)[each] for each in classes]
    if classes[-1] == 2:
        query_lens[-1] = 1
    order, swaps = list(classes), 0

    def swap(one: int, other: int) -> None:
        nonlocal swaps
        order[one], order[other] = order[other], order[one]
        swaps += 1

    moved = reorder_batch_to_split_decodes_and_prefills(query_lens, swap, context_lens=context_lens)
    assert order == sorted(classes)
    assert swaps == fewest_swaps(classes)
    assert moved == (swaps > 0)


def fewest_swaps(classes: tuple[int, ...]) -> int:
    """By trying: rows of one class are interchangeable, so a state is the tuple of classes."""
    wanted, reached, count = tuple(sorted(classes)), {classes}, 0
    while wanted not in reached:
        count += 1
        reached |= {
            tuple(state[{one: other, other: one}.get(at, at)] for at in range(len(state)))
            for state in reached
            for one, other in itertools.combinations(range(len(state)), 2)
        }
    return count
