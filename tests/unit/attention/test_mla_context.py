"""Context chunks cover each prefill's context once, in order, in a workspace that is full but for the last chunk."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.metadata import build_common_metadata
from attention.mla_context import plan_context_chunks, plan_prefill
from baton.core.errors import InternalError

PREFILLS = st.lists(st.tuples(st.integers(2, 5), st.integers(0, 30)), min_size=1, max_size=6)


@given(st.integers(0, 3), PREFILLS, st.integers(1, 40))
def test_chunks_cover_the_context_exactly(
    num_decodes: int, prefills: list[tuple[int, int]], workspace_tokens: int
) -> None:
    sizes = [(1, 9)] * num_decodes + prefills
    block_tables = [list(range(10 * request, 10 * request + 9)) for request in range(len(sizes))]
    common, _ = build_common_metadata(
        query_lens=[size[0] for size in sizes],
        context_lens=[size[1] for size in sizes],
        block_tables=block_tables,
        block_size=4,
    )
    chunks = plan_context_chunks(common, num_decodes, workspace_tokens=workspace_tokens)
    own = plan_prefill(common, num_decodes)
    assert own is not None
    assert tuple(own.query_start_loc.tolist()) == own.query_start_loc_cpu
    start_loc = own.query_start_loc_cpu
    covered = [0] * len(prefills)
    for chunk in chunks:
        first = start_loc.index(chunk.query_start)
        last = start_loc.index(chunk.query_stop)
        assert chunk.lens.query_start_loc_cpu == tuple(
            start - chunk.query_start for start in start_loc[first : last + 1]
        )
        assert chunk.lens.query_start_loc_cpu == tuple(chunk.lens.query_start_loc.tolist())
        assert chunk.lens.key_start_loc_cpu == tuple(chunk.lens.key_start_loc.tolist())
        assert chunk.lens.key_start_loc_cpu[-1] == chunk.num_tokens <= workspace_tokens
        table = torch.tensor(block_tables[num_decodes + first : num_decodes + last])
        assert torch.equal(chunk.tokens.block_table[:, :9].long(), table)
        for place, prefill in enumerate(range(first, last)):
            num_keys = chunk.lens.key_start_loc_cpu[place + 1] - chunk.lens.key_start_loc_cpu[place]
            assert not num_keys or chunk.tokens.first_position[place] == covered[prefill]
            covered[prefill] += num_keys
            assert covered[prefill + 1 :] == [0] * (len(prefills) - prefill - 1)
    assert covered == [context_len for _, context_len in prefills]
    assert all(chunk.num_tokens == workspace_tokens for chunk in chunks[:-1])


def test_prefills_that_are_not_causal_are_refused() -> None:
    common, _ = build_common_metadata(query_lens=[2], context_lens=[1], block_tables=[[0]], block_size=4)
    common.causal = False
    with pytest.raises(InternalError, match="not causal"):
        plan_prefill(common, 0)


def test_a_batch_of_decodes_has_no_prefills() -> None:
    common, _ = build_common_metadata(query_lens=[1], context_lens=[9], block_tables=[[0, 1, 2]], block_size=4)
    assert plan_prefill(common, 1) is None
    assert plan_context_chunks(common, 1, workspace_tokens=4) == ()
