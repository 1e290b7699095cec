"""The persistent kernel of prefills gives the bits of the kernel with one program per tile, in any batch, and follows
the lengths of each replay."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from attention.backends.triton_attn import TritonAttention
from attention.kernels.paged.call import AttentionCall, KernelFeatures, Keys
from attention.kernels.paged.work_list import WorkList, list_work
from attention.platform import probe_platform
from tests.conformance.attention.batches import batches
from tests.conformance.attention.gqa import Shape, gqa_case, needs_of
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.settings import SETTINGS, Setting

pytestmark = pytest.mark.gpu

HEADS = [(32, 8), (8, 8), (7, 1), (40, 1)]
SIZES = [(64, 64), (128, 128), (192, 128), (80, 80), (256, 256)]
FEATURES = {
    "none": KernelFeatures(),
    "window": KernelFeatures(sliding_window=200),
    "chunks": KernelFeatures(attention_chunk_size=96),
    "soft cap": KernelFeatures(logits_soft_cap=1.5),
}
CAUSAL = [setting for setting in SETTINGS if setting.causal and not setting.kv_dtype and not setting.blocksparse]


def starts_of(lens: list[int], first: int = 0) -> Tensor:
    return torch.tensor([*accumulate(lens, initial=first)], dtype=torch.int32, device="cuda")


def fresh_call(
    query_lens: list[int], *, heads: tuple[int, int] = (32, 8), sizes: tuple[int, int] = (128, 128),
    features: KernelFeatures = FEATURES["none"], first: int = 0,
) -> AttentionCall:  # fmt: skip
    """Prompts without context, over their own keys, after `first` tokens of others."""
    torch.manual_seed(0)
    num_tokens, starts = first + sum(query_lens), starts_of(query_lens, first)
    q, k, v, out = (
        torch.randn(num_tokens, count, size, dtype=torch.bfloat16, device="cuda")
        for count, size in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]), (heads[0], sizes[1]))
    )
    keys = Keys(k.unsqueeze(0), v.unsqueeze(0), starts, None, None, expected_len=256)
    lse_HT = torch.full((heads[0], num_tokens), math.nan, device="cuda")
    return AttentionCall(q, keys, starts, max(query_lens), sizes[0] ** -0.5, features, out.fill_(math.nan), lse_HT)


def work_of(call: AttentionCall, seq_lens: Tensor) -> WorkList:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    tokens = 128 // min(call.group, 128)
    return list_work(
        call.query_start_loc, seq_lens, num_tokens=call.q_THD.shape[0], tokens=tokens, num_programs=num_sms
    )


def both(call: AttentionCall, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs with log-sum-exps, by one program per tile and by the persistent kernel, several times."""
    from attention.kernels.paged import hopper, persistent

    assert call.lse_HT is not None
    other_lse_HT = torch.full_like(call.lse_HT, math.nan)
    other = replace(call, out=torch.full_like(call.out, math.nan), lse_HT=other_lse_HT)
    assert hopper.launch(call)
    for _ in range(5):
        assert persistent.launch(other, work_of(other, seq_lens))
    one = torch.cat([call.out.float().flatten(), call.lse_HT.flatten()])
    return one.nan_to_num(nan=-7.0), torch.cat([other.out.float().flatten(), other_lse_HT.flatten()]).nan_to_num(
        nan=-7.0
    )


def lens_of(call: AttentionCall) -> Tensor:
    return call.query_start_loc.diff().int()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_the_bits_are_those_of_one_program_per_tile(name: str, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    call = fresh_call([5, 700, 1, 0, 129, 128, 1500, 33], heads=heads, sizes=sizes, features=FEATURES[name])
    one, other = both(call, lens_of(call))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "query_lens",
    [
        [random.Random(0).randrange(8, 2000) for _ in range(40)],
        [37, 610, 1333, 4096, 6007],
        [8] * 300,
        [1],
        [20000],
    ],
    ids=["40 prompts", "5 prompts", "300 short ones", "one token", "one long one"],
)
def test_batches_of_any_shape_have_equal_bits(query_lens: list[int]) -> None:
    call = fresh_call(query_lens)
    one, other = both(call, lens_of(call))
    assert torch.equal(one, other)


def test_tokens_of_others_in_front_stay() -> None:
    call = fresh_call([40, 300], first=77)
    one, other = both(call, lens_of(call))
    assert torch.equal(one, other)
    assert (other[: 77 * 32 * 128] == -7.0).all()


def test_queries_that_are_not_aligned_have_equal_bits() -> None:
    call = fresh_call([40, 300, 7])
    wide = torch.randn(*call.q_THD.shape[:2], 136, dtype=torch.bfloat16, device="cuda")
    call = replace(call, q_THD=wide[..., :128])
    assert call.q_THD.stride(1) % 16
    one, other = both(call, lens_of(call))
    assert torch.equal(one, other)


def test_queries_of_requests_without_keys_are_zero_and_others_keep_their_bits() -> None:
    call = fresh_call([40, 70, 130, 3])
    seq_lens = torch.tensor([300, 0, 200, 0], dtype=torch.int32, device="cuda")
    table = torch.randperm(4 * 24, device="cuda").int().view(4, 24)
    k, v = (torch.full((4 * 24, 16, 8, 128), math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for request, length in enumerate(seq_lens.tolist()):
        places = torch.arange(length, device="cuda")
        for cache in (k, v):
            cache[table[request, places // 16].long(), places % 16] = torch.randn_like(cache[0, 0]).expand(
                length, 8, 128
            )
    call = replace(call, keys=Keys(k, v, None, seq_lens, table, expected_len=384))
    one, other = both(call, seq_lens)
    assert torch.equal(one, other)
    rows = other[: 243 * 32 * 128].view(243, -1)
    assert not rows[40:110].any()
    assert not rows[240:].any()
    assert rows[:40].any()


@pytest.mark.parametrize("setting", CAUSAL, ids=lambda setting: setting.name)
@pytest.mark.parametrize("block_size", [16, 128])
def test_the_backend_with_it_equals_the_definition(setting: Setting, block_size: int) -> None:
    shape = Shape(block_size=block_size, dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=128)
    made = TritonAttention(
        needs_of(setting, shape), probe_platform("cuda"), context_workspace_tokens=1, persistent_prefills=True
    )
    for name, sizes in batches(block_size).items():
        case = gqa_case(made, sizes, setting, shape)
        assert relative_error(case.run(), case.expected()) < 8e-3, name


def test_a_captured_list_and_kernel_follow_the_lengths_of_each_replay() -> None:
    from attention.kernels.paged import hopper, persistent

    call = fresh_call([300, 200, 100, 424])
    seq_lens = lens_of(call)
    persistent.launch(call, work_of(call, seq_lens))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        persistent.launch(call, work_of(call, seq_lens))
    for lens in ([1, 1, 1, 1021], [1024, 0, 0, 0], [256, 256, 256, 256], [7, 500, 13, 504]):
        call.query_start_loc.copy_(starts_of(lens))
        seq_lens.copy_(lens_of(call))
        graph.replay()
        expected = replace(call, out=torch.empty_like(call.out))
        assert hopper.launch(expected)
        assert torch.equal(call.out, expected.out), lens
