"""The kernel for Hopper that gathers selected tokens, compared with the one for any GPU: decodes and prompts, all
numbers of heads, lengths that no tile divides, both kinds of split, and under a captured graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.kernels.mla.decode import mla_decode_attention
from attention.kernels.mla.plan import MLADecodePlan, make_mla_decode_plan
from baton.tritonlib.hopper_check import is_hopper

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LATENT, ROTARY, BLOCK_SIZE, NUM_BLOCKS, TOP_K = 512, 64, 64, 600, 2048
SCALE = 192**-0.5
# Counts of selected tokens: none, one, full tiles and others, and all.
LENS = [0, 1, 63, 64, 65, 500, 2047, 2048, 128, 2048]


def plan_of(num_heads: int, *, split_tokens: int | None = None) -> MLADecodePlan:
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return make_mla_decode_plan(
        num_heads=num_heads, latent_channels=LATENT, max_num_reqs=512, max_model_len=TOP_K, num_sms=num_sms,
        device=DEVICE, split_tokens=split_tokens,
    )  # fmt: skip


def cache_of(dtype: torch.dtype, *, layers: int = 3) -> Tensor:
    """One layer's view of a cache whose blocks are apart; NaN in the slots that nobody selects."""
    kv = torch.randn(layers, NUM_BLOCKS, BLOCK_SIZE, 1, LATENT + ROTARY, device=DEVICE).to(dtype)
    kv[:, -1] = torch.nan
    return kv.transpose(0, 1).contiguous().transpose(0, 1)[1:2]


def queries_of(lens: list[int], num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, counts, slots); slots past a query's count are those of NaN."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    q_RHC = torch.randn(len(lens), num_heads, LATENT + ROTARY, device=DEVICE, generator=generator).to(dtype)
    slots_RK = torch.full((len(lens), TOP_K), NUM_BLOCKS * BLOCK_SIZE - 1, dtype=torch.int32, device=DEVICE)
    for row, count in enumerate(lens):
        chosen = torch.randperm((NUM_BLOCKS - 1) * BLOCK_SIZE, device=DEVICE, generator=generator)[:count]
        slots_RK[row, :count] = chosen.sort().values.int()
    return q_RHC, torch.tensor(lens, dtype=torch.int32, device=DEVICE), slots_RK


def attended(plan: MLADecodePlan, kv: Tensor, q_RHC: Tensor, counts: Tensor, slots_RK: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.full((len(q_RHC), q_RHC.shape[1], LATENT), torch.nan, dtype=q_RHC.dtype, device=DEVICE)
    lse_HR = torch.full((q_RHC.shape[1], len(q_RHC)), torch.nan, device=DEVICE)
    mla_decode_attention(
        q_RHC, kv, seq_lens=counts, block_table=slots_RK, plan=plan, scale=SCALE, selected=True, out=out, lse_HR=lse_HR
    )
    return out, lse_HR


def check_equal(new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> None:
    difference = (new[0].double() - old[0].double()).norm() / old[0].double().norm()
    assert float(difference) < 5e-3
    torch.testing.assert_close(new[1], old[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split_tokens", [None, 512])
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128, 40])
@pytest.mark.parametrize("lens", [LENS, [2048], [1], [2048] * 32, [2048 - row for row in range(300)]], ids=len)
def test_results_are_those_of_the_kernel_for_any_gpu(
    lens: list[int], num_heads: int, split_tokens: int | None, dtype: torch.dtype
) -> None:
    plan = plan_of(num_heads, split_tokens=split_tokens)
    assert (plan.gathered is not None) == is_hopper(DEVICE)
    kv, queries = cache_of(dtype), queries_of(lens, num_heads, dtype)
    old = attended(replace(plan, gathered=None), kv, *queries)
    for _ in range(3):
        check_equal(attended(plan, kv, *queries), old)


def test_the_same_call_has_the_same_bits() -> None:
    plan, kv = plan_of(128), cache_of(torch.bfloat16)
    queries = queries_of([2048] * 16 + LENS, 128, torch.bfloat16)
    first = attended(plan, kv, *queries)[0]
    for _ in range(200):
        assert torch.equal(attended(plan, kv, *queries)[0], first)


def test_a_captured_step_is_right_for_other_counts_and_slots() -> None:
    plan, kv = plan_of(128), cache_of(torch.bfloat16)
    q_RHC, counts, slots_RK = queries_of(LENS, 128, torch.bfloat16)
    out = torch.empty(len(LENS), 128, LATENT, dtype=torch.bfloat16, device=DEVICE)

    def step() -> None:
        mla_decode_attention(
            q_RHC, kv, seq_lens=counts, block_table=slots_RK, plan=plan, scale=SCALE, selected=True, out=out
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in (LENS[::-1], [7] * len(LENS), [2048] * len(LENS)):
        _, new_counts, new_slots = queries_of(lens, 128, torch.bfloat16)
        counts.copy_(new_counts)
        slots_RK.copy_(new_slots)
        graph.replay()
        torch.cuda.synchronize()
        old = attended(replace(plan, gathered=None), kv, q_RHC, counts, slots_RK)[0]
        assert float((out.double() - old.double()).norm() / old.double().norm()) < 5e-3
