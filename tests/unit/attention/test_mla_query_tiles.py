"""Prompts of latent attention in query tiles: each token has the bits of its decode, for any heads, cuts and
neighbours, and the plan of the tiles holds every token once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from attention.kernels.mla.decode import mla_decode_attention
from attention.kernels.mla.plan import MLADecodePlan, tile_tokens_of
from attention.metadata import CommonAttentionMetadata, PaddedBatch, build_common_metadata
from attention.mla_query_tiles import cut_padded, plan_query_tiles
from tests.device import DEVICE
from tests.unit.attention.test_mla_decode_kernel import LATENT, SCALE, Decodes, decodes, plan_for

# Whole query tiles and partial ones, whole tiles of keys, and several splits.
LENGTHS = [150, 1, 64]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def queries_of(batch: Decodes, request: int) -> Tensor:
    torch.manual_seed(request)
    return torch.randn(int(batch.seq_lens[request]), *batch.q_RHC.shape[1:]).to(batch.q_RHC)


def plan_of(batch: Decodes) -> MLADecodePlan:
    return plan_for(batch.q_RHC.shape[1], split_tokens=64)


def common_of(batch: Decodes, chunks: Sequence[tuple[int, int, int]]) -> CommonAttentionMetadata:
    """The batch of some tokens of some requests, each as (request, start, stop)."""
    block_size = batch.kv_layer.shape[2]
    return build_common_metadata(
        query_lens=[stop - start for _, start, stop in chunks],
        context_lens=[start for _, start, _ in chunks],
        block_tables=[batch.block_table[request, : -(-stop // block_size)].tolist() for request, _, stop in chunks],
        block_size=block_size,
        device=DEVICE,
    )[0]


def decoded(batch: Decodes, request: int) -> Tensor:
    """All tokens of a request, a few at a time, each as the newest token of a sequence in a batch of decodes."""
    parts = []
    for first in range(0, int(batch.seq_lens[request]), 9):
        q_RHC = queries_of(batch, request)[first : first + 9]
        seq_lens = torch.arange(first + 1, first + len(q_RHC) + 1, dtype=torch.int32, device=DEVICE)
        table = batch.block_table[request].expand(len(q_RHC), -1)
        each = Decodes(q_RHC, batch.kv_layer, seq_lens, table, [], batch.kv_scale)
        parts.append(each.run(plan_of(batch))[0])
    return torch.cat(parts)


def computed(batch: Decodes, chunks: Sequence[tuple[int, int, int]], *, num_decodes: int = 0) -> list[Tensor]:
    """Some tokens of some requests in one batch of prompts; `num_decodes` of the chunks are left out."""
    plan, common = plan_of(batch), common_of(batch, chunks)
    q_THC = torch.cat([queries_of(batch, request)[start:stop] for request, start, stop in chunks[num_decodes:]])
    out = torch.full((*q_THC.shape[:2], LATENT), torch.nan, dtype=q_THC.dtype, device=DEVICE)
    for run in plan_query_tiles(common, num_decodes, plan):
        mla_decode_attention(
            q_THC[run.start : run.stop],
            batch.kv_layer,
            seq_lens=run.seq_lens,
            block_table=common.block_table_tensor,
            plan=plan,
            scale=SCALE,
            kv_scale=batch.kv_scale,
            tiles=run.tiles,
            out=out[run.start : run.stop],
        )
    return list(out.split([stop - start for _, start, stop in chunks[num_decodes:]]))


@pytest.mark.parametrize("num_heads", [16, 32, 128] if DEVICE == "cuda" else [1, 3, 20, 70])
def test_tokens_of_a_prompt_have_the_bits_of_decodes_with_any_number_of_heads(num_heads: int) -> None:
    batch = decodes([70], num_heads=num_heads, block_size=64, dtype=DTYPE)
    (ours,) = computed(batch, [(0, 0, 70)])
    assert torch.equal(ours, decoded(batch, 0))


def test_tokens_of_a_prompt_are_attention_by_its_definition() -> None:
    batch = decodes([100], num_heads=16, block_size=64, dtype=DTYPE)
    (ours,) = computed(batch, [(0, 0, 100)])
    scores_HTS = torch.einsum("thc,sc->hts", queries_of(batch, 0).double(), batch.latents[0]) * SCALE
    scores_HTS.masked_fill_(torch.ones(100, 100, device=DEVICE).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hts,sc->thc", scores_HTS.softmax(-1), batch.latents[0][:, :LATENT])
    assert (ours.double() - expected).norm() <= (1.2e-2 if DEVICE == "cuda" else 1e-5) * expected.norm()


def test_any_cut_and_any_neighbours_give_the_same_bits() -> None:
    batch = decodes(LENGTHS, num_heads=16, block_size=64, dtype=DTYPE)
    expected = [decoded(batch, request) for request in range(len(LENGTHS))]
    chunks = [(0, 149, 150), (0, 0, 1), (2, 7, 64), (0, 63, 130), (1, 0, 1), (0, 130, 131), (0, 131, 149), (0, 1, 63)]
    for (request, start, stop), ours in zip(chunks[1:], computed(batch, chunks, num_decodes=1), strict=True):
        assert torch.equal(ours, expected[request][start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_any_dtype_is_computed(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    batch = decodes([80], num_heads=16, block_size=64, dtype=dtype, kv_dtype=kv_dtype)
    (ours,) = computed(batch, [(0, 59, 80)])
    assert torch.equal(ours, decoded(batch, 0)[59:])


def test_runs_hold_every_token_once_and_their_partial_results_fit() -> None:
    batch = decodes(LENGTHS, num_heads=16)
    plan = plan_of(batch)
    plan = replace(plan, partial_lse=plan.partial_lse[:14])
    common = common_of(batch, [(1, 0, 1), (0, 3, 150), (2, 0, 64)])
    runs = plan_query_tiles(common, 1, plan)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == 147 + 64
    keys = []
    for run in runs:
        splits = -(-run.seq_lens // 64) * plan.tile_tokens
        assert splits.sum() <= 14
        for seq_len, (last_row, count, table_row) in zip(run.seq_lens.tolist(), run.tiles.tolist(), strict=True):
            assert (seq_len - count) // plan.tile_tokens == (seq_len - 1) // plan.tile_tokens
            assert 0 <= last_row - count + 1 <= last_row < run.stop - run.start
            keys += [(table_row, run.start + last_row - back, seq_len - back) for back in reversed(range(count))]
    expected = [(1, row, row + 4) for row in range(147)] + [(2, 147 + row, row + 1) for row in range(64)]
    assert sorted(keys) == expected


def test_requests_without_new_tokens_have_no_query_tiles() -> None:
    common = common_of(decodes(LENGTHS), [(0, 0, 5), (1, 0, 1)])
    starts = torch.tensor([0, 0, 1], dtype=torch.int32)
    common = replace(common, query_start_loc_cpu=starts, num_computed_tokens_cpu=torch.tensor([5, 0]))
    (run,) = plan_query_tiles(common, 0, plan_for(split_tokens=64))
    assert run.tiles.tolist() == [[0, 1, 1]]


def test_a_long_prompt_is_cut_into_runs_of_bounded_memory() -> None:
    plan = plan_for(128, split_tokens=4096)
    common = build_common_metadata(
        query_lens=[3000], context_lens=[0], block_tables=[list(range(47))], block_size=64, device=DEVICE
    )[0]
    many = replace(plan, partial_lse=plan.partial_lse.new_empty(4096, 128))
    runs = plan_query_tiles(common, 0, many)
    assert [(run.start, run.stop) for run in runs] == [*pairwise(range(0, 2561, 512)), (2560, 3000)]
    # Short and long sequences alternate, so that each worker gets both.
    assert runs[0].seq_lens[:4].tolist() == [1, 512, 2, 511]
    wide = replace(plan, partial_lse=plan.partial_lse.new_empty(4096, 1024))
    assert [run.stop for run in plan_query_tiles(common, 0, wide)][:2] == [128, 256]


@pytest.mark.parametrize(
    ("num_heads", "tokens"), [(1, 16), (3, 16), (4, 16), (8, 8), (16, 4), (20, 2), (32, 2), (33, 1), (128, 1)]
)
def test_the_heads_of_a_query_tile_fit_one_program(num_heads: int, tokens: int) -> None:
    assert tile_tokens_of(num_heads) == tokens


@pytest.mark.parametrize("partials", [4096, 40])
def test_the_device_cuts_prompts_of_a_padded_batch_as_the_host_does(partials: int) -> None:
    lengths, decodes, size = [5, 150, 2, 64, 7], 3, 256
    starts = [decodes, *(decodes + stop for stop in accumulate(lengths))]
    padding = [starts[-1], size]
    batch = PaddedBatch(
        decode_seq_lens=torch.tensor([9, 8, 7], dtype=torch.int32, device=DEVICE),
        decode_table=torch.zeros(3, 4, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.tensor([*starts, *padding], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([*lengths, 0, 0], dtype=torch.int32, device=DEVICE),
        block_table=torch.zeros(7, 4, dtype=torch.int32, device=DEVICE),
        max_query_len=size,
        slot_mapping=torch.zeros(size, dtype=torch.int64, device=DEVICE),
    )
    plan = plan_for(16, split_tokens=64)
    plan = replace(plan, partial_lse=plan.partial_lse.new_empty(partials, 16))
    runs = cut_padded(batch, plan)
    assert (len(runs) == 1) == (partials == 4096)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == size
    found: dict[int, tuple[int, int]] = {}
    for run in runs:
        assert (-(-run.seq_lens // 64) * plan.tile_tokens).sum() <= partials
        for length, (last, count, request) in zip(run.seq_lens.tolist(), run.tiles.tolist(), strict=True):
            assert count <= plan.tile_tokens
            for after in range(count):
                row = run.start + last - after
                assert run.start <= row < run.stop
                assert row not in found
                found[row] = (length - after if length else 0, request)
    expected = dict.fromkeys(range(starts[-1], size), (0, 6))
    for request, length in enumerate(lengths):
        expected |= {starts[request] + token: (token + 1, request) for token in range(length)}
    assert found == expected
