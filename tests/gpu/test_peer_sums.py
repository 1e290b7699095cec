"""Sums over ranks through each other's memory, with a GPU for each rank: the same bits on all ranks, in graphs and
outside, for ranks that arrive at different times, alone and within a norm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.peer_memory import ROWS, share_memory, with_peer_memory
from baton.models.kernels import norms
from baton.models.kernels.rank_sums import sum_parts_in_torch
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import TensorParallel
from tests.invariance import Invariant, Lengths, differences, drawn_tokens, hidden_states
from tests.ranks import run_gpu_ranks
from tests.unit.models.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
WIDTH = 4096
COUNTS = (1, 2, 33, 200, ROWS)
REPLAYS = 1000
DELAY_CYCLES = 1_000_000  # about half a millisecond


def drawn(rows: int) -> Tensor:
    """All ranks' parts [rank, row, channel], the same on every rank."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(RANKS, rows, WIDTH, generator=generator).to(torch.bfloat16).cuda()


def joined(rank: TensorParallel) -> TensorParallel:
    device = torch.device("cuda", rank.rank)
    found = with_peer_memory(rank, width=WIDTH, dtype=torch.bfloat16, device=device)
    assert found.peers is not None, "the log says why"
    return found


def norm_of_ones() -> RMSNorm:
    norm = RMSNorm(WIDTH, eps=1e-5, dtype=torch.bfloat16).cuda().requires_grad_(requires_grad=False)
    torch.nn.init.ones_(norm.weight)
    return norm


def sums(rank: TensorParallel) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Our sum, NCCL's, and the stream and its norm after a sum within the norm; by number of rows."""
    own, norm = joined(rank), norm_of_ones()
    found = []
    for rows in COUNTS:
        part_TD = drawn(rows)[rank.rank]
        stream_TD = torch.ones_like(part_TD)
        normed_TD = norm.add_and_norm(stream_TD, own.all_reduce_later(part_TD))
        ours_TD = own.all_reduce(part_TD)
        library_TD = replace(own, peers=None).all_reduce(part_TD.clone())
        found.append((ours_TD.cpu(), library_TD.cpu(), stream_TD.cpu(), normed_TD.cpu()))
    return found


def test_every_rank_has_the_bits_of_a_sum_in_order_and_of_a_norm_of_its_own(tmp_path: Path) -> None:
    by_rank = run_gpu_ranks(sums, RANKS, tmp_path)
    for index, rows in enumerate(COUNTS):
        parts = drawn(rows)
        expected = sum_parts_in_torch(parts)
        stream_TD = torch.ones_like(expected)
        normed_TD = norms.add_rms_norm(stream_TD, expected, norm_of_ones())
        # NCCL may round after each addition.
        bound = (RANKS - 1) * 2**-8 * parts.float().abs().sum(0)
        for rank in by_rank:
            ours_TD, library_TD, their_stream_TD, their_normed_TD = (each.cuda() for each in rank[index])
            assert torch.equal(ours_TD, expected)
            assert torch.all((library_TD.float() - ours_TD.float()).abs() <= bound)
            assert torch.equal(their_stream_TD, stream_TD)
            assert torch.equal(their_normed_TD, normed_TD)


def replays(rank: TensorParallel) -> int:
    """Number of replays of a graph whose outputs are wrong. Its sums have few rows, many, and few again; one rank after
    the other comes late."""
    own, norm = joined(rank), norm_of_ones()
    parts = [drawn(rows) for rows in (8, 300, 3)]
    static = [each[rank.rank].clone() for each in parts]
    stream_TD = torch.ones_like(static[2])

    def compute() -> list[Tensor]:
        few, many = own.all_reduce(static[0]), own.all_reduce(static[1])
        return [few, many, norm.add_and_norm(stream_TD, own.all_reduce_later(static[2]))]

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        now = [each.roll(replay, dims=2) for each in parts]
        for place, each in zip(static, now, strict=True):
            place.copy_(each[rank.rank])
        stream_TD.fill_(1.0)
        if replay // 3 % RANKS == rank.rank:
            torch.cuda._sleep(DELAY_CYCLES)
        graph.replay()
        expected = [sum_parts_in_torch(each) for each in now]
        expected[2] = norms.add_rms_norm(torch.ones_like(expected[2]), expected[2], norm)
        differ = [(ours != theirs).any() for ours, theirs in zip(outputs, expected, strict=True)]
        wrong += torch.stack(differ).any()
    return int(wrong.item())


def test_a_thousand_replays_of_a_graph_are_right_whoever_comes_late(tmp_path: Path) -> None:
    assert run_gpu_ranks(replays, RANKS, tmp_path) == [0] * RANKS


LENGTHS = Lengths(prompt=90, outputs=6, chunk=64, longest=120)
SIZES = (3, 12)
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "max_position_embeddings": 512}


def compare(rank: TensorParallel, directory: Path) -> tuple[dict[int, list[int]], Tensor, Tensor]:
    """Steps whose bits depend on the batch, and hidden states of a prompt, with peers' memory and without."""
    device = f"cuda:{rank.rank}"
    plain = Invariant(directory, device=device, dtype="bfloat16", parallel=rank, block_size=16)
    tokens = drawn_tokens(plain, 150)
    model = Invariant(directory, device=device, dtype="bfloat16", parallel=rank, block_size=16)
    share_memory(model.model, dtype=torch.bfloat16, device=torch.device(device))
    assert model.model.parallel.peers is not None, "the log says why"
    return (
        differences(model, LENGTHS, SIZES),
        hidden_states(model, tokens, chunk=50).cpu(),
        hidden_states(plain, tokens, chunk=50).cpu(),
    )


def test_a_batch_invariant_model_has_the_same_bits_with_peers_memory(tmp_path: Path) -> None:
    save_tiny("llama-llama3-tied", tmp_path / "model", changed=WIDE)
    (tmp_path / "ranks").mkdir()
    for differing, shared, plain in run_gpu_ranks(compare, RANKS, tmp_path / "ranks", tmp_path / "model"):
        assert differing == {size: [] for size in SIZES}
        assert float(plain.std()) > 0
        assert torch.equal(shared, plain)
