"""The decode kernel equals attention by its definition for any split, layout and features; padding has no effect."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from attention.kernels.decode.attend import decode_attention
from attention.kernels.decode.plan import DecodePlan, DecodeTiling, decode_tiling, new_decode_plan, new_partials
from attention.quantized_output import QuantizedOutput
from baton.core.errors import InternalError
from baton.models.formats.fp8 import quantize_blocks
from tests.device import DEVICE
from tests.unit.attention.paged import ORDERS, SCALE, Asked, Decodes, decodes

# Lengths around the edges of tiles and blocks of 16.
RAGGED = [33, 16, 0, 20]
TILING = DecodeTiling(tile_keys=16, num_warps=4, num_stages=3, programs_per_sm=2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
SLOPES_H = torch.linspace(0.5, 0.1, 2, device=DEVICE)
SINKS_H = torch.linspace(-1.0, 2.0, 2, device=DEVICE)
ASKED = {
    "window of 1": Asked(sliding_window=1),
    "window of 7": Asked(sliding_window=7),
    "window of 17": Asked(sliding_window=17),
    "chunks of 32": Asked(attention_chunk_size=32),
    "chunks of 9": Asked(attention_chunk_size=9),
    "soft cap": Asked(logits_soft_cap=1.5),
    "ALiBi": Asked(alibi_slopes_H=SLOPES_H),
    "sinks": Asked(sinks_H=SINKS_H),
    "all": Asked(18, 32, 1.5, SLOPES_H, SINKS_H),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the test launches."""
    names: list[str] = []
    launch = KernelInterface.__getitem__

    def recorded(kernel: Any, grid: Any) -> Any:
        names.append(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", recorded)
    return names


def plan_of(
    batch: Decodes,
    asked: Asked,
    *,
    num_workers: int = 3,
    max_num_reqs: int = 8,
) -> DecodePlan:
    _, num_heads, head_size = batch.q_RHD.shape
    partials = new_partials(
        max_num_reqs=max_num_reqs,
        num_workers=num_workers,
        num_heads=num_heads,
        head_size=head_size,
        device=batch.q_RHD.device,
    )
    plan = new_decode_plan(
        tiling=TILING,
        max_num_reqs=max_num_reqs,
        num_workers=num_workers,
        partials=partials,
        sliding_window=asked.sliding_window,
        attention_chunk_size=asked.attention_chunk_size,
    )
    plan.fill(batch.seq_lens)
    return plan


def attend(
    batch: Decodes,
    asked: Asked,
    plan: DecodePlan,
    *,
    out: Tensor | QuantizedOutput | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_reqs, num_heads, _ = batch.q_RHD.shape
    if out is None:
        out = torch.full_like(batch.q_RHD, torch.nan)
    lse_HR = torch.full((num_heads, num_reqs), torch.nan, device=DEVICE)
    decode_attention(
        batch.q_RHD,
        batch.kv_layer,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        plan=plan,
        scale=SCALE,
        logits_soft_cap=asked.logits_soft_cap,
        alibi_slopes_H=asked.alibi_slopes_H,
        sinks_H=asked.sinks_H,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        lse_HR=lse_HR,
    )
    return out.stored_THD if isinstance(out, QuantizedOutput) else out, lse_HR


def check(batch: Decodes, asked: Asked | None = None, *, num_workers: int = 3) -> None:
    asked = asked or Asked()
    plan = plan_of(batch, asked, num_workers=num_workers)
    out, lse_HR = attend(batch, asked, plan)
    expected, expected_lse_HR = batch.expected(asked)
    assert relative_error(out, expected) < TOLERANCE[batch.q_RHD.dtype]
    keys_R = batch.seq_lens.cpu() > 0
    tolerance = 1e-5 if batch.q_RHD.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(lse_HR.cpu().double()[:, keys_R], expected_lse_HR[:, keys_R], atol=tolerance, rtol=0)
    assert not out[~keys_R].any()


def relative_error(out: Tensor, expected: Tensor) -> float:
    error = torch.linalg.vector_norm(out.cpu().double() - expected) / torch.linalg.vector_norm(expected)
    return float(error.nan_to_num(nan=torch.inf))


@pytest.mark.parametrize("num_workers", [1, 3, 20])
def test_any_number_of_workers_gives_the_same_result(num_workers: int) -> None:
    check(decodes(RAGGED), num_workers=num_workers)


@pytest.mark.parametrize("order", ORDERS)
def test_caches_are_read_by_their_strides(order: str) -> None:
    check(decodes([1, 33, 16], num_heads=4, num_kv_heads=2, order=order))


@pytest.mark.parametrize("block_size", [1, 12, 32, 128])
def test_any_block_size_is_read(block_size: int) -> None:
    check(decodes(RAGGED, block_size=block_size))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (5, 1), (6, 2), (20, 1)])
def test_query_heads_share_kv_heads_in_any_group(heads: tuple[int, int]) -> None:
    check(decodes(RAGGED, num_heads=heads[0], num_kv_heads=heads[1]))


def test_a_group_larger_than_a_program_takes() -> None:
    check(decodes([20, 3], num_heads=66, num_kv_heads=1))


@pytest.mark.parametrize("num_queries", [3, 9])
def test_several_queries_of_a_request_read_its_keys_together(num_queries: int) -> None:
    batch = decodes([20, 0], num_heads=4, num_kv_heads=2)
    q_RHD = torch.randn(2 * num_queries, 4, 16, device=DEVICE)
    out, lse_HR = torch.full_like(q_RHD, torch.nan), torch.full((4, 2 * num_queries), torch.nan, device=DEVICE)
    partials = new_partials(max_num_reqs=2, num_workers=2, num_heads=4 * num_queries, head_size=16, device=q_RHD.device)
    plan = new_decode_plan(tiling=TILING, max_num_reqs=2, num_workers=2, partials=partials)
    plan.fill(batch.seq_lens)
    decode_attention(
        q_RHD,
        batch.kv_layer,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        plan=plan,
        scale=SCALE,
        queries_per_request=num_queries,
        out=out,
        lse_HR=lse_HR,
    )
    for query in range(num_queries):
        rows = slice(query, None, num_queries)
        one = Decodes(q_RHD[rows], batch.kv_layer, batch.seq_lens, batch.block_table, batch.k, batch.v)
        expected, expected_lse_HR = one.expected(Asked())
        assert relative_error(out[rows], expected) < TOLERANCE[torch.float32]
        torch.testing.assert_close(lse_HR[:, rows].cpu().double(), expected_lse_HR, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head_size", [8, 24, 80])
def test_any_head_size_is_computed(head_size: int) -> None:
    check(decodes([33, 5], head_size=head_size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_dtype_is_computed(dtype: torch.dtype) -> None:
    check(decodes(RAGGED, dtype=dtype))


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_any_feature_is_computed(asked: Asked) -> None:
    check(decodes(RAGGED, asked=asked), asked)


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.float16),
        (torch.float8_e5m2, torch.bfloat16),
    ],
)
def test_caches_of_eight_bits_are_read(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    batch = decodes(RAGGED, dtype=dtype, cache_dtype=cache_dtype, k_scale=0.5, v_scale=0.25)
    k_scale, v_scale = torch.tensor([0.5, 0.25], device=DEVICE)
    out, _ = attend(batch, Asked(), plan_of(batch, Asked()), k_scale=k_scale, v_scale=v_scale)
    assert relative_error(out, batch.expected(Asked())[0]) < TOLERANCE[dtype]


def test_queries_of_eight_bits_are_read() -> None:
    batch = decodes(RAGGED, dtype=torch.float8_e4m3fn, k_scale=0.5)
    q_scale, k_scale = torch.tensor([2.0, 0.25], device=DEVICE)
    out = torch.full(batch.q_RHD.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    attend(batch, Asked(), plan_of(batch, Asked()), out=out, q_scale=q_scale, k_scale=k_scale)
    wide = Decodes(batch.q_RHD.float(), batch.kv_layer, batch.seq_lens, batch.block_table, batch.k, batch.v)
    assert relative_error(out, wide.expected(Asked())[0]) < TOLERANCE[torch.bfloat16]


def test_padded_requests_give_zeros_and_no_keys() -> None:
    out, lse_HR = attend(decodes([0, 17, 0]), Asked(), plan_of(decodes([0, 17, 0]), Asked()))
    assert not out[[0, 2]].any()
    assert lse_HR[:, [0, 2]].isneginf().all()


def test_a_batch_of_padding_only_has_no_effect() -> None:
    batch = decodes([0, 0])
    out, _ = attend(batch, Asked(), plan_of(batch, Asked()))
    assert not out.any()


def test_sinks_count_in_the_sum_of_a_request_without_keys() -> None:
    asked = Asked(sinks_H=SINKS_H)
    batch = decodes([0, 3])
    _, lse_HR = attend(batch, asked, plan_of(batch, asked))
    torch.testing.assert_close(lse_HR[:, 0], SINKS_H)


def test_queries_and_output_may_be_slices_of_wider_tensors() -> None:
    batch = decodes(RAGGED)
    plan = plan_of(batch, Asked())
    expected, _ = attend(batch, Asked(), plan)
    wide = torch.cat((batch.q_RHD, batch.q_RHD), 1)
    sliced = Decodes(wide[:, :2], batch.kv_layer, batch.seq_lens, batch.block_table, batch.k, batch.v)
    around = torch.full_like(wide, torch.nan)
    attend(sliced, Asked(), plan, out=around[:, 2:])
    assert torch.equal(around[:, 2:], expected)
    assert around[:, :2].isnan().all()


@pytest.mark.parametrize("num_workers", [1, 5, 8, 20])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("head_size", [128, 256])
def test_a_quantized_output_has_the_bits_of_one_that_is_quantized_afterwards(
    num_workers: int, power_of_two: bool, head_size: int
) -> None:
    batch = decodes([70, 0, 3], num_heads=4, num_kv_heads=2, head_size=head_size, dtype=torch.bfloat16)
    plan = plan_of(batch, Asked(), num_workers=num_workers)
    plain, _ = attend(batch, Asked(), plan)
    expected_TK, expected_TC = quantize_blocks(plain.flatten(1), power_of_two=power_of_two)
    scale_CT = torch.full(expected_TC.T.shape, torch.nan, device=DEVICE)
    stored = torch.full_like(plain, torch.nan, dtype=torch.float8_e4m3fn)
    attend(batch, Asked(), plan, out=QuantizedOutput(stored, scale_CT, power_of_two, torch.bfloat16))
    assert torch.equal(scale_CT.T, expected_TC)
    assert torch.equal(stored.flatten(1).view(torch.uint8), expected_TK.view(torch.uint8))


def test_the_last_worker_merges_what_few_share_and_counts_from_zero_in_the_next_call(
    launched: list[str],
) -> None:
    batch = decodes([90, 70, 3])
    plan = plan_of(batch, Asked(), num_workers=5)
    expected, _ = attend(batch, Asked(), plan)
    again, _ = attend(batch, Asked(), plan)
    assert launched.count("_decode_kernel") == 2
    assert "_merge_kernel" not in launched
    assert torch.equal(again, expected)
    assert not plan.partials.arrived.any()


@pytest.mark.parametrize("num_workers", [8, 20])
def test_a_second_kernel_merges_what_more_workers_share(num_workers: int, launched: list[str]) -> None:
    check(decodes([90, 0, 3]), num_workers=num_workers)
    assert launched[-2:] == ["_decode_kernel", "_merge_kernel"]


def test_a_refilled_plan_forgets_the_batch_before() -> None:
    before, after = decodes([90, 70, 3, 4, 5]), decodes([5, 21])
    plan = plan_of(before, Asked())
    attend(before, Asked(), plan)
    plan.fill(after.seq_lens)
    out, _ = attend(after, Asked(), plan)
    assert relative_error(out, after.expected(Asked())[0]) < TOLERANCE[torch.float32]


def test_a_batch_beyond_the_plans_buffers_is_refused_before_anything_is_written() -> None:
    plan = plan_of(decodes([5]), Asked())
    beyond = torch.ones(plan.unit_starts.shape[0], dtype=torch.int32, device=DEVICE)
    with pytest.raises(InternalError, match=rf"{len(beyond)} requests in a plan for {len(beyond) - 1}"):
        plan.fill(beyond)


def test_workers_share_the_units_equally_however_ragged_the_batch() -> None:
    batch = decodes([16 * 9, 1, 0, 40, 16 * 5])
    plan = plan_of(batch, Asked(), num_workers=4)
    assert plan.unit_starts[:6].tolist() == [0, 9, 10, 11, 14, 19]  # the request without keys has one too
    assert plan.first_requests.tolist() == [0, 0, 2, 4]  # units 0, 5, 10 and 15


def test_only_units_that_are_seen_are_dealt_out() -> None:
    asked = Asked(sliding_window=17)
    plan = plan_of(decodes([16 * 9, 1, 0, 40], asked=asked), asked)
    assert plan.unit_starts[:5].tolist() == [0, 2, 3, 4, 6]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("head_size", [16, 80, 128, 192, 256])
def test_tiles_are_powers_of_two_that_a_product_takes(head_size: int, cache_dtype: torch.dtype) -> None:
    tile_keys = decode_tiling(head_size, cache_dtype).tile_keys
    assert tile_keys >= 16
    assert tile_keys & (tile_keys - 1) == 0


@pytest.mark.gpu
def test_a_captured_call_follows_lengths_and_blocks_that_change_in_place() -> None:
    batches = [decodes(lens) for lens in ([300, 200, 100, 50], [1, 0, 0, 0], [0, 513, 7, 64])]
    largest = batches[0]
    blocks = max(batch.kv_layer.shape[1] for batch in batches)
    cache = torch.zeros(2, blocks, *largest.kv_layer.shape[2:], device=DEVICE)
    q_RHD, seq_lens = torch.zeros_like(largest.q_RHD), torch.zeros_like(largest.seq_lens)
    block_table = torch.zeros(4, 64, dtype=torch.int32, device=DEVICE)
    static = Decodes(q_RHD, cache, seq_lens, block_table, [], [])
    plan = plan_of(static, Asked(), num_workers=7)
    out = torch.empty_like(q_RHD)
    attend(static, Asked(), plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(static, Asked(), plan, out=out)
    for batch in batches:
        cache.fill_(torch.nan)
        cache[:, : batch.kv_layer.shape[1]] = batch.kv_layer
        q_RHD.copy_(batch.q_RHD)
        seq_lens.copy_(batch.seq_lens)
        block_table[:, : batch.block_table.shape[1]] = batch.block_table
        plan.fill(seq_lens)
        graph.replay()
        assert relative_error(out, batch.expected(Asked())[0]) < TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_32_bits_count() -> None:
    batch = decodes([40], head_size=128, dtype=torch.bfloat16)
    per_block = batch.kv_layer[0, 0].numel()
    far = 2**31 // per_block + 5
    cache = torch.empty(
        2, far + batch.kv_layer.shape[1], *batch.kv_layer.shape[2:], dtype=torch.bfloat16, device=DEVICE
    )
    cache[:, far:] = batch.kv_layer
    moved = Decodes(batch.q_RHD, cache, batch.seq_lens, batch.block_table + far, batch.k, batch.v)
    check(moved)
