"""Cascade attention: a prefix that all requests share changes the work, never the result."""

import pytest
import torch

from attention.cascade import SharedPrefix, share_prefix, worth_sharing
from tests.conformance.attention.settings import SETTINGS, Setting
from tests.unit.attention.paged_batches import (
    BLOCK_SIZE,
    PagedBatch,
    needs_of,
    paged_batch,
    relative_error,
    triton_backend,
)

PLAIN = SETTINGS[0]
BY_NAME = {setting.name: setting for setting in SETTINGS}
PREFIX = 2 * BLOCK_SIZE
BATCHES = {
    "decodes": [(1, PREFIX), (1, PREFIX + 3), (1, PREFIX + BLOCK_SIZE + 5)],
    "prefills": [(9, PREFIX), (2, PREFIX + 5)],
    "decodes and prefills": [(1, PREFIX), (1, PREFIX + 11), (9, PREFIX), (2, PREFIX + 5)],
}


def run(batch: PagedBatch, common_prefix_len: int, *, num_sms: int = 4) -> torch.Tensor:
    backend = triton_backend(batch.setting, num_sms=num_sms)
    return batch.run(backend, backend.builder.build(common_prefix_len, batch.common))


@pytest.mark.parametrize("num_sms", [1, 7], ids=["prefix in one piece", "prefix split"])
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
def test_the_result_is_that_of_attention_to_all_keys(sizes: list[tuple[int, int]], num_sms: int) -> None:
    batch = paged_batch(sizes, PLAIN, prefix_blocks=2)
    prefix = share(batch, num_sms=num_sms)
    assert prefix is not None
    assert (prefix.plan is None) is (num_sms == 1)
    assert relative_error(run(batch, PREFIX, num_sms=num_sms), batch.expected()) < 1e-5


def share(batch: PagedBatch, *, num_sms: int = 4) -> SharedPrefix | None:
    return share_prefix(batch.common, PREFIX, needs_of(batch.setting), num_sms=num_sms)


@pytest.mark.parametrize("name", ["soft cap", "sinks", "fp8 e4m3 cache"])
def test_features_that_count_no_positions(name: str) -> None:
    batch = paged_batch(BATCHES["decodes and prefills"], BY_NAME[name], prefix_blocks=2)
    assert relative_error(run(batch, PREFIX), batch.expected()) < 1e-5


@pytest.mark.parametrize("name", ["window 7", "window and sinks", "chunks of 128", "ALiBi"])
def test_a_layer_that_counts_positions_reads_each_requests_keys_as_usual(name: str) -> None:
    """In a model some of whose layers could share the prefix."""
    batch = paged_batch(BATCHES["decodes and prefills"], BY_NAME[name], prefix_blocks=2)
    assert relative_error(run(batch, PREFIX), batch.expected()) < 1e-5


def test_the_prefix_is_read_through_one_request_only() -> None:
    batch = paged_batch(BATCHES["decodes and prefills"], PLAIN, prefix_blocks=2)
    expected = batch.expected()
    batch.common.block_table_tensor[1:, :2] = 2**30
    assert relative_error(run(batch, PREFIX), expected) < 1e-5


def test_only_whole_blocks_before_every_query_are_shared() -> None:
    batch = paged_batch([(1, PREFIX + 3), (4, BLOCK_SIZE + 2)], PLAIN, prefix_blocks=1)
    prefix = share(batch)
    assert prefix is not None
    assert prefix.seq_lens.tolist() == [BLOCK_SIZE]
    assert prefix.rest.seq_lens_cpu.tolist() == [PREFIX + 4 - BLOCK_SIZE, 6]
    assert relative_error(run(batch, PREFIX), batch.expected()) < 1e-5


@pytest.mark.parametrize("sizes", [[(1, 20), (4, 0)], [(1, 20), (4, BLOCK_SIZE - 1)]])
def test_nothing_is_shared_where_a_query_lies_in_the_first_block(sizes: list[tuple[int, int]]) -> None:
    batch = paged_batch(sizes, PLAIN)
    assert share(batch) is None


def test_queries_that_see_later_keys_share_nothing() -> None:
    batch = paged_batch([(1, PREFIX)], Setting("plain"), prefix_blocks=2)
    batch.common.causal = False
    assert share(batch) is None


@pytest.mark.parametrize(
    ("prefix_len", "query_lens", "worth"),
    [
        (4096, [1] * 64, True),
        (4096, [1] * 2, False),  # little is read twice
        (64, [1] * 64, False),  # three more launches
        (4096, [512] * 8, False),  # prefills fill their tiles alone
    ],
)
def test_a_prefix_is_shared_where_that_saves_more_than_it_costs(
    prefix_len: int, query_lens: list[int], worth: bool
) -> None:
    assert worth_sharing(prefix_len, query_lens, num_query_heads=32, num_kv_heads=8, num_sms=132) is worth


@pytest.mark.parametrize(("use_alibi", "use_sliding_window"), [(True, False), (False, True)])
def test_the_builder_shares_nothing_where_positions_count(use_alibi: bool, use_sliding_window: bool) -> None:
    assert not triton_backend(PLAIN).builder.use_cascade_attention(
        4096,
        [1] * 64,
        num_query_heads=32,
        num_kv_heads=8,
        use_alibi=use_alibi,
        use_sliding_window=use_sliding_window,
        num_sms=132,
    )
