"""Chunked local attention as virtual requests, against what each token sees by definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.backend import AttentionNeeds
from attention.backends.torch_sdpa import TorchSDPA
from attention.local import local_attention_metadata, make_local_attention_virtual_batches
from attention.metadata import build_common_metadata, split_decodes_and_prefills
from attention.parameters import AttentionParameters
from attention.platform import Platform
from baton.core.errors import ConfigError, InternalError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind

# (new tokens, context) of each request; without new tokens it is the padding of a captured batch.
SIZES = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 30)), min_size=1, max_size=6)


def table_of(sizes: list[tuple[int, int]], block_size: int) -> torch.Tensor:
    """Numbers that identify request and place; past a request's own blocks lie values that must not be read."""
    table = torch.full((len(sizes), 60), -(10**6), dtype=torch.int32)
    for request, size in enumerate(sizes):
        count = -(-sum(size) // block_size)
        table[request, :count] = 100 * request + torch.arange(count)
    return table


@settings(deadline=None, max_examples=50)
@given(SIZES, st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_each_token_sees_exactly_the_keys_of_its_chunk_up_to_itself(
    sizes: list[tuple[int, int]], block_size: int, blocks_per_chunk: int
) -> None:
    chunk = block_size * blocks_per_chunk
    query_start_loc = np.concatenate(([0], np.cumsum([size[0] for size in sizes]))).astype(np.int32)
    seq_lens = np.array([sum(size) for size in sizes], dtype=np.int32)
    query_lens, starts, virtual_lens, tables = make_local_attention_virtual_batches(
        chunk, query_start_loc, seq_lens, table_of(sizes, block_size), block_size
    )
    seen: list[list[tuple[int, int]]] = []
    for query_len, seq_len, blocks in zip(query_lens, virtual_lens, tables.tolist(), strict=True):
        seen.extend(
            [(blocks[key // block_size], key % block_size) for key in range(position + 1)]
            for position in range(seq_len - query_len, seq_len)
        )
    expected = []
    for request, (query_len, context_len) in enumerate(sizes):
        for position in range(context_len, context_len + query_len):
            keys = range(position // chunk * chunk, position + 1)
            expected.append([(100 * request + key // block_size, key % block_size) for key in keys])
    assert seen == expected
    assert starts.tolist() == [0, *np.cumsum(query_lens)]
    assert not len(tables) or int(tables.min()) >= 0


def test_a_batch_becomes_virtual_requests() -> None:
    """Chunks of 4 and blocks of 2, worked out by hand: new tokens at positions 2-5, 7-16 and 4-8."""
    query_lens, starts, seq_lens, tables = make_local_attention_virtual_batches(
        4, np.array([0, 4, 14, 19], np.int32), np.array([6, 17, 9], np.int32), table_of([(4, 2), (10, 7), (5, 4)], 2), 2
    )
    assert query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert starts.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert tables[:, 0].tolist() == [0, 2, 102, 104, 106, 108, 202, 204]
    assert {array.dtype for array in (query_lens, starts, seq_lens)} == {np.dtype(np.int32)}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=4))
def test_plain_attention_to_the_virtual_requests_is_chunked_attention_to_the_batch(
    sizes: list[tuple[int, int]],
) -> None:
    sizes.sort(key=lambda size: size[0] > 1)
    tables = [list(range(10 * request, 10 * request + 9)) for request in range(len(sizes))]
    common, _ = build_common_metadata(
        query_lens=[size[0] for size in sizes],
        context_lens=[size[1] for size in sizes],
        block_tables=tables,
        block_size=4,
    )
    torch.manual_seed(0)
    kv_layer, q_THD = torch.randn(2, 40, 4, 1, 8), torch.randn(common.num_actual_tokens, 2, 8)
    needs = AttentionNeeds(KVKind.GQA, "cpu", "float32", 8, 4, KVCacheLayout.NHD)
    backend = TorchSDPA(needs, Platform("cpu"), context_workspace_tokens=0)
    outs = []
    for batch, chunk in ((common, 8), (local_attention_metadata(common, 8, 4), None)):
        outs.append(torch.full_like(q_THD, torch.nan))
        layer = AttentionParameters(scale=0.3, attention_chunk_size=chunk)
        backend.forward(q_THD, None, None, kv_layer, backend.builder.build(0, batch), layer=layer, out=outs[-1])
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)


def test_the_batch_of_virtual_requests_writes_where_the_batch_does() -> None:
    common, _ = build_common_metadata(
        query_lens=[1, 6], context_lens=[9, 3], block_tables=[[0, 1, 2], [3, 4, 5]], block_size=4
    )
    local = local_attention_metadata(common, 4, 4)
    assert local.slot_mapping is common.slot_mapping
    assert local.num_computed_tokens_cpu.tolist() == [1, 3, 0, 0]
    assert (local.num_reqs, local.max_query_len, local.num_actual_tokens) == (4, 4, 7)
    assert local.seq_lens.tolist() == local.seq_lens_cpu.tolist() == [2, 4, 4, 1]
    assert local.block_table_tensor.tolist() == [[2], [3], [4], [5]]
    # The first token of the second request fills its chunk, the last begins one; both are as decodes to a kernel,
    # but the last comes after a prefill.
    assert split_decodes_and_prefills(local) == (2, 2, 2, 5)


def test_padding_has_no_virtual_requests() -> None:
    """As in a captured graph: a row of the queries, and sequence length 0."""
    query_lens, starts, seq_lens, tables = make_local_attention_virtual_batches(
        4, np.array([0, 1, 2, 3], np.int32), np.array([6, 0, 0], np.int32), torch.tensor([[7, 8], [0, 0], [0, 0]]), 4
    )
    assert (query_lens.tolist(), starts.tolist(), seq_lens.tolist(), tables.tolist()) == ([1], [0, 1], [2], [[8]])


@pytest.mark.parametrize("chunk", [0, 3, 6])
def test_chunks_of_partial_blocks_are_refused(chunk: int) -> None:
    common, _ = build_common_metadata(query_lens=[2], context_lens=[1], block_tables=[[5]], block_size=4)
    with pytest.raises(ConfigError, match=f"attention_chunk_size is {chunk}.*multiple of the block size"):
        local_attention_metadata(common, chunk, 4)


def test_a_batch_that_is_not_causal_has_no_chunks() -> None:
    common, _ = build_common_metadata(query_lens=[2], context_lens=[1], block_tables=[[5]], block_size=4)
    common.causal = False
    with pytest.raises(InternalError, match="not causal"):
        local_attention_metadata(common, 4, 4)
