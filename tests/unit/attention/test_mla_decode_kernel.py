"""Latent decodes equal attention by its definition for any split, in a poisoned cache."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention.kernels.mla.decode import mla_decode_attention
from attention.kernels.mla.plan import MLADecodePlan, make_mla_decode_plan
from baton.kvcache.fp8 import dequantize, quantize
from tests.device import DEVICE

SCALE = 0.3
# On a GPU the sizes of the DeepSeek models, which Hopper has a kernel of its own for.
LATENT, ROTARY = (512, 64) if DEVICE == "cuda" else (12, 4)
# The products' operands are rounded; the interpreter truncates where it stores bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
RAGGED = [0, 200, 0, 0, 70, 1, 130, 64, 0]


@dataclass(frozen=True)
class Decodes:
    """`latents`: each request's, as the cache holds them, times its scale."""

    q_RHC: Tensor
    kv_layer: Tensor
    seq_lens: Tensor
    block_table: Tensor
    latents: list[Tensor]
    kv_scale: Tensor | None

    def run(self, plan: MLADecodePlan) -> tuple[Tensor, Tensor]:
        num_reqs, num_heads, _ = self.q_RHC.shape
        out = torch.full((num_reqs, num_heads, LATENT), torch.nan, dtype=self.q_RHC.dtype, device=DEVICE)
        lse_HR = torch.full((num_heads, num_reqs), torch.nan, device=DEVICE)
        self.decode(plan, out, lse_HR)
        return out, lse_HR

    def decode(self, plan: MLADecodePlan, out: Tensor, lse_HR: Tensor | None = None) -> None:
        mla_decode_attention(
            self.q_RHC,
            self.kv_layer,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            plan=plan,
            scale=SCALE,
            kv_scale=self.kv_scale,
            out=out,
            lse_HR=lse_HR,
        )

    def check(self, plan: MLADecodePlan) -> None:
        out, lse_HR = self.run(plan)
        tolerance = TOLERANCE[self.q_RHC.dtype]
        for request, latents_SC in enumerate(self.latents):
            if not len(latents_SC):
                assert not out[request].any()
                assert (lse_HR[:, request] == -torch.inf).all()
                continue
            scores_HS = torch.einsum("hc,sc->hs", self.q_RHC[request].double(), latents_SC) * SCALE
            expected = scores_HS.softmax(-1) @ latents_SC[:, :LATENT]
            assert (out[request].double() - expected).norm() <= tolerance * expected.norm()
            torch.testing.assert_close(lse_HR[:, request].double(), scores_HS.logsumexp(-1), atol=1e-4, rtol=1e-5)


def decodes(
    seq_lens: list[int],
    *,
    num_heads: int = 3,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layers_of_a_block: int = 1,
) -> Decodes:
    """Requests in a cache whose unwritten slots are NaN, with wild entries in the table past each request's blocks."""
    torch.manual_seed(0)
    channels, kv_dtype = LATENT + ROTARY, kv_dtype or dtype
    kv_scale = torch.tensor(0.25, device=DEVICE) if kv_dtype != dtype else None
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    storage = torch.full((sum(num_blocks) + 2, layers_of_a_block, block_size, channels), torch.nan)
    free = (torch.randperm(sum(num_blocks) + 1) + 1).tolist()
    table = torch.full((len(seq_lens), max(*num_blocks, 1)), 10**8, dtype=torch.int32)
    latents = []
    for request, seq_len in enumerate(seq_lens):
        written_SC = quantize(torch.randn(seq_len, channels).to(dtype), None if kv_scale is None else kv_scale.cpu(),
                              kv_dtype)  # fmt: skip
        for place in range(num_blocks[request]):
            block = table[request, place] = free.pop()
            piece = written_SC[place * block_size : (place + 1) * block_size]
            storage[block, -1, : len(piece)] = piece.float()
        scale = None if kv_scale is None else kv_scale.cpu()
        latents.append(dequantize(written_SC, scale, torch.float32).double().to(DEVICE))
    kv_layer = storage.to(kv_dtype).to(DEVICE)[:, -1][None, :, :, None, :]
    q_RHC = torch.randn(len(seq_lens), num_heads, channels).to(dtype).to(DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    return Decodes(q_RHC, kv_layer, lens, table.to(DEVICE), latents, kv_scale)


def plan_for(num_heads: int = 3, *, num_sms: int = 3, split_tokens: int | None = None) -> MLADecodePlan:
    """A plan whose memory for partial results is poisoned."""
    plan = make_mla_decode_plan(
        num_heads=num_heads,
        latent_channels=LATENT,
        max_num_reqs=len(RAGGED),
        max_model_len=256,
        num_sms=num_sms,
        device=DEVICE,
        split_tokens=split_tokens,
    )
    plan.partial_output.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    return plan


@pytest.mark.parametrize("num_sms", [1, 3, 8])
def test_any_number_of_workers_gives_the_same(num_sms: int) -> None:
    decodes(RAGGED).check(plan_for(num_sms=num_sms))


@pytest.mark.parametrize("num_heads", [1, 20, 70])
def test_any_number_of_heads_is_computed(num_heads: int) -> None:
    decodes([70, 130], num_heads=num_heads).check(plan_for(num_heads, num_sms=6))


@pytest.mark.parametrize("block_size", [1, 48, 64, 128] if DEVICE == "cuda" else [1, 48])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_type_and_block_size_is_read(dtype: torch.dtype, block_size: int) -> None:
    decodes([0, 70, 130], block_size=block_size, dtype=dtype).check(plan_for(num_sms=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_heads", [16, 32, 64] if DEVICE == "cuda" else [5])
def test_half_precision_with_several_tiles_in_a_split(num_heads: int, block_size: int, dtype: torch.dtype) -> None:
    lens = [0, 1000, 64, 300, 65] if DEVICE == "cuda" else [0, 130, 64]
    decodes(lens, num_heads=num_heads, block_size=block_size, dtype=dtype).check(plan_for(num_heads, num_sms=2))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_in_8_bits_is_read_times_its_scale(kv_dtype: torch.dtype) -> None:
    decodes([0, 70, 130], kv_dtype=kv_dtype).check(plan_for(num_sms=2))


def test_blocks_may_hold_other_layers_in_between() -> None:
    decodes([70, 130], layers_of_a_block=3).check(plan_for())
    decodes([70, 130], layers_of_a_block=3, dtype=torch.bfloat16, num_heads=16).check(plan_for(16))


@pytest.mark.parametrize("split_tokens", [64, 100])
def test_a_fixed_split_gives_the_same(split_tokens: int) -> None:
    decodes([0, 70, 130], dtype=torch.bfloat16).check(plan_for(split_tokens=split_tokens))


def test_a_batch_without_any_keys_is_computed() -> None:
    decodes([0, 0]).check(plan_for())


def test_with_a_fixed_split_a_request_is_the_same_in_every_batch() -> None:
    plan = plan_for(split_tokens=128)
    together = decodes(RAGGED, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    in_batch = together.run(plan)[0]
    for request in (1, 6):
        alone = Decodes(
            together.q_RHC[request : request + 1],
            together.kv_layer,
            together.seq_lens[request : request + 1],
            together.block_table[request : request + 1],
            together.latents[request : request + 1],
            None,
        )
        assert torch.equal(alone.run(plan)[0][0], in_batch[request])


def test_no_requests_are_no_work() -> None:
    nothing = decodes([70])
    mla_decode_attention(
        nothing.q_RHC[:0],
        nothing.kv_layer,
        seq_lens=nothing.seq_lens[:0],
        block_table=nothing.block_table[:0],
        plan=plan_for(),
        scale=SCALE,
        out=torch.empty(0, 3, LATENT, device=DEVICE),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 64])
def test_a_captured_graph_replays_with_other_lengths(num_heads: int) -> None:
    plan = plan_for(num_heads, num_sms=torch.cuda.get_device_properties(0).multi_processor_count)
    batch = decodes([200, 200, 200, 200], num_heads=num_heads, block_size=64, dtype=torch.bfloat16)
    out = torch.full((4, num_heads, LATENT), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    batch.decode(plan, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.decode(plan, out)
    for lens in ([1, 0, 200, 64], [200, 3, 0, 0], [65, 128, 127, 200]):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        shorter = [latents[:seq_len] for latents, seq_len in zip(batch.latents, lens, strict=True)]
        Decodes(batch.q_RHC, batch.kv_layer, batch.seq_lens, batch.block_table, shorter, None).check(plan)
        assert torch.equal(out, batch.run(plan)[0])
