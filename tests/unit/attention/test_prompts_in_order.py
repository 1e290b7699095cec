"""Prompts computed in the order of decodes: each row has the bits of the decode of its token, for any features, chunks
and neighbours, and equals attention by its definition."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attention.kernels.in_order import prompts
from attention.kernels.in_order.prompts import attend_prompts
from tests.device import DEVICE
from tests.unit.attention.in_order import attend_in_order, in_order_plan
from tests.unit.attention.paged import SCALE, Asked, Decodes, decodes
from tests.unit.attention.test_decode_kernel import ASKED, TOLERANCE, relative_error

LENGTHS = [34, 16, 1, 53]
MAX_SPLITS = 2


def queries_of(batch: Decodes, request: int) -> Tensor:
    length = int(batch.seq_lens[request])
    torch.manual_seed(request)
    return torch.randn(length, *batch.q_RHD.shape[1:]).to(batch.q_RHD)


def decoded(batch: Decodes, request: int, asked: Asked) -> Tensor:
    """All tokens of a request, each as the newest token of a sequence in one batch of decodes."""
    q_THD = queries_of(batch, request)
    seq_lens = torch.arange(1, len(q_THD) + 1, dtype=torch.int32, device=DEVICE)
    table = batch.block_table[request].expand(len(q_THD), -1)
    each = Decodes(q_THD, batch.kv_layer, seq_lens, table, [], [])
    return attend_in_order(each, asked, in_order_plan(each, asked, rows=len(q_THD), max_splits=MAX_SPLITS))


def computed(batch: Decodes, chunks: list[tuple[int, int, int]], asked: Asked) -> list[Tensor]:
    """Some tokens of some requests, as (request, start, stop), in one batch of prompts."""
    queries = [queries_of(batch, request)[start:stop] for request, start, stop in chunks]
    starts = torch.tensor([5, *(len(q_THD) for q_THD in queries)], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    requests = [request for request, _, _ in chunks]
    q_THD = torch.cat([torch.zeros_like(batch.q_RHD[:1]).expand(5, -1, -1), *queries])
    out = torch.full_like(q_THD, torch.nan)
    attend_prompts(
        q_THD,
        batch.kv_layer,
        query_start_loc=starts,
        seq_lens=torch.tensor([stop for _, _, stop in chunks], dtype=torch.int32, device=DEVICE),
        block_table=batch.block_table[requests],
        plan=in_order_plan(batch, asked, rows=1, max_splits=MAX_SPLITS),
        scale=SCALE,
        logits_soft_cap=asked.logits_soft_cap,
        alibi_slopes_H=asked.alibi_slopes_H,
        sinks_H=asked.sinks_H,
        out=out,
    )
    assert out[:5].isnan().all()
    return [out[start:stop] for start, stop in pairwise(starts.tolist())]


@pytest.mark.parametrize("asked", [Asked(), *ASKED.values()], ids=["plain", *ASKED])
def test_rows_of_a_prompt_have_the_bits_of_decodes(asked: Asked) -> None:
    # Nothing is left out of the cache, because all tokens are computed.
    batch = decodes(LENGTHS)
    requests = range(len(LENGTHS))
    expected = [decoded(batch, request, asked) for request in requests]
    whole = computed(batch, [(request, 0, LENGTHS[request]) for request in requests], asked)
    for ours, theirs in zip(whole, expected, strict=True):
        assert torch.equal(ours, theirs)
    for request in requests:
        last = Decodes(
            queries_of(batch, request)[-1:], batch.kv_layer, batch.seq_lens, batch.block_table,
            [batch.k[request]], [batch.v[request]],
        )  # fmt: skip
        assert relative_error(whole[request][-1:], last.expected(asked)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("asked", [Asked(), ASKED["all"]], ids=["plain", "all"])
def test_any_cut_and_any_neighbours_give_the_same_bits(asked: Asked) -> None:
    batch = decodes(LENGTHS)
    expected = [decoded(batch, request, asked) for request in range(len(LENGTHS))]
    chunks = [(3, 0, 1), (0, 7, 33), (3, 31, 53), (1, 15, 16), (0, 33, 34), (2, 0, 1), (3, 1, 31), (0, 16, 32)]
    for (request, start, stop), ours in zip(chunks, computed(batch, chunks, asked), strict=True):
        assert torch.equal(ours, expected[request][start:stop])


@pytest.mark.parametrize("heads", [(3, 3), (20, 1), (66, 1)])
def test_query_heads_share_kv_heads_in_any_group(heads: tuple[int, int]) -> None:
    batch = decodes([20], num_heads=heads[0], num_kv_heads=heads[1])
    (ours,) = computed(batch, [(0, 3, 20)], Asked())
    assert torch.equal(ours, decoded(batch, 0, Asked())[3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_any_dtype_is_computed(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    batch = decodes([150], head_size=24, dtype=dtype, cache_dtype=cache_dtype)
    (ours,) = computed(batch, [(0, 3, 150)], Asked())
    assert torch.equal(ours, decoded(batch, 0, Asked())[3:])


def test_requests_without_queries_are_padding() -> None:
    batch = decodes(LENGTHS)
    ours = computed(batch, [(0, 4, 4), (1, 2, 9), (2, 0, 0), (3, 52, 53)], Asked())
    assert torch.equal(ours[1], decoded(batch, 1, Asked())[2:9])
    assert torch.equal(ours[3], decoded(batch, 3, Asked())[52:])


def test_padding_of_a_captured_step_has_queries_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In sizes that the kernel for Hopper takes, which is not asked."""
    monkeypatch.setattr(prompts, "has_hopper_kernels", lambda *_: pytest.fail("the kernel for Hopper was asked"))
    padding = 200
    batch = decodes([9], num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    q_THD = torch.cat([queries_of(batch, 0), torch.zeros_like(batch.q_RHD[:1]).expand(padding, -1, -1)])
    out = torch.zeros_like(q_THD)
    attend_prompts(
        q_THD,
        batch.kv_layer,
        query_start_loc=torch.tensor([0, 9, 9, 9 + padding], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([9, 0, 0], dtype=torch.int32, device=DEVICE),
        block_table=batch.block_table.expand(3, -1).contiguous(),
        plan=in_order_plan(batch, Asked(), rows=1, max_splits=MAX_SPLITS),
        scale=SCALE,
        padded=True,
        out=out,
    )
    assert torch.equal(out[:9], decoded(batch, 0, Asked()))
