"""A decode step advanced in place, against the metadata built for the longer batch."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.advance import advance_on_device, advance_on_host, advance_step
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from baton.core.errors import InternalError
from tests.device import DEVICE


def decodes(context_lens: list[int], block_size: int) -> tuple[CommonAttentionMetadata, torch.Tensor]:
    """Each with room for 30 tokens."""
    tables = [[100 * row + place for place in range(-(-30 // block_size))] for row in range(len(context_lens))]
    return build_common_metadata(
        query_lens=[1] * len(context_lens),
        context_lens=context_lens,
        block_tables=tables,
        block_size=block_size,
        device=DEVICE,
    )


def assert_equal(advanced: CommonAttentionMetadata, built: CommonAttentionMetadata) -> None:
    for field in dataclasses.fields(CommonAttentionMetadata):
        ours, theirs = getattr(advanced, field.name), getattr(built, field.name)
        if isinstance(ours, torch.Tensor):
            assert ours.tolist() == theirs.tolist(), field.name
            assert ours.dtype == theirs.dtype, field.name
        else:
            assert ours == theirs, field.name


CONTEXTS = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(CONTEXTS, st.sampled_from([1, 3, 8, 16]), st.integers(1, 8))
def test_advancing_equals_building_the_longer_batch(context_lens: list[int], block_size: int, steps: int) -> None:
    common, _ = decodes(context_lens, block_size)
    pointers = [common.seq_lens.data_ptr(), common.slot_mapping.data_ptr()]
    for _ in range(steps):
        positions = advance_step(common, block_size)
    built, built_positions = decodes([context + steps for context in context_lens], block_size)
    assert_equal(common, built)
    assert positions.tolist() == built_positions.tolist()
    assert positions.dtype == built_positions.dtype
    assert pointers == [common.seq_lens.data_ptr(), common.slot_mapping.data_ptr()]


@settings(deadline=None, max_examples=50)
@given(CONTEXTS)
def test_copies_that_are_tensors_of_their_own_advance_once_too(context_lens: list[int]) -> None:
    common, _ = decodes(context_lens, 4)
    common = dataclasses.replace(common, seq_lens=common.seq_lens.clone())
    advance_step(common, 4)
    assert_equal(common, decodes([context + 1 for context in context_lens], 4)[0])


def test_padding_stays_padding() -> None:
    common, _ = decodes([5, 6], 4)
    pad = torch.zeros(2, dtype=torch.int32)
    padded = dataclasses.replace(
        common,
        seq_lens=torch.cat((common.seq_lens, pad.to(DEVICE))),
        seq_lens_cpu=torch.cat((common.seq_lens_cpu, pad)),
        num_computed_tokens_cpu=torch.cat((common.num_computed_tokens_cpu, pad)),
        block_table_tensor=common.block_table_tensor.repeat(2, 1),
        slot_mapping=torch.cat((common.slot_mapping, pad.to(DEVICE).long())),
        num_reqs=4,
    )
    positions = advance_step(padded, 4)
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu.tolist() == [7, 8, 0, 0]
    assert padded.num_computed_tokens_cpu.tolist() == [6, 7, 0, 0]
    assert padded.slot_mapping.tolist() == [1 * 4 + 2, 101 * 4 + 3, -1, -1]
    assert positions.tolist() == [6, 7, 0, 0]


def test_the_parts_that_a_graph_replays_apart_make_one_step() -> None:
    common, _ = decodes([3, 7], 4)
    common = dataclasses.replace(common, seq_lens=common.seq_lens.clone())
    advance_on_device(common, 4)
    assert common.seq_lens_cpu.tolist() == [4, 8]
    advance_on_host(common, 4)
    assert_equal(common, decodes([4, 8], 4)[0])


def test_on_the_device_a_token_past_the_block_table_is_not_written() -> None:
    common, _ = build_common_metadata(
        query_lens=[1, 1], context_lens=[3, 1], block_tables=[[5], [6]], block_size=4, device=DEVICE
    )
    advance_on_device(common, 4)
    assert common.slot_mapping.tolist() == [-1, 6 * 4 + 2]


def test_a_full_block_table_is_refused() -> None:
    common, _ = build_common_metadata(
        query_lens=[1], context_lens=[7], block_tables=[[0, 1]], block_size=4, device=DEVICE
    )
    with pytest.raises(InternalError, match="would have 9 tokens, and its block table holds 8"):
        advance_step(common, 4)
    assert common.seq_lens.tolist() == [8]


def test_a_batch_with_a_prefill_is_refused() -> None:
    common, _ = build_common_metadata(
        query_lens=[1, 2], context_lens=[0, 0], block_tables=[[0], [1]], block_size=4, device=DEVICE
    )
    with pytest.raises(InternalError, match="has 2 new tokens; allowed: 1"):
        advance_step(common, 4)
