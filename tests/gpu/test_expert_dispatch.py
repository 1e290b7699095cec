"""Tokens sent to the ranks of their experts and back by ranks that run at the same time: processes that share one GPU,
or have one each. Graphs replay while one rank after the other comes late, and a whole layer has the bits of a gather
and a sum in order."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.peer_memory import with_dispatch_memory
from baton.models.config.model_config import ModelConfig
from baton.models.families.reader import read_config
from baton.models.kernels.moe import expert_dispatch
from baton.models.kernels.moe.expert_dispatch import ExpertRanks
from baton.models.kernels.rank_sums import sum_parts_in_torch
from baton.models.layers.moe.moe import MoE
from baton.models.layers.parallel import TensorParallel, with_experts_placed
from baton.models.layers.token_exchange import TokenExchange, TokenShares
from baton.models.loading.local_config import local_config
from baton.settings.config import DEMO_MODELS
from tests.ranks import run_gpu_ranks, run_ranks_on_one_gpu

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
WIDTH, EXPERTS, CHOICES = 7168, 64, 8
# Rows of ranks 0, 1, ... in the steps of one graph, repeated for more ranks.
STEPS = ((3, 3), (1, 40), (128, 90))
REPLAYS = 60
DELAY_CYCLES = 1_000_000  # about half a millisecond


class Step:
    """One step's tokens of all ranks, the same on every rank, and what its sums must be."""

    def __init__(self, size: int, counts: tuple[int, ...], seed: int) -> None:
        self.size, self.counts = size, [counts[rank % len(counts)] for rank in range(size)]
        self.width = max(self.counts)
        generator = torch.Generator().manual_seed(seed)
        shape = (size, self.width)
        self.x = torch.randn(*shape, WIDTH, generator=generator).to(torch.bfloat16).cuda()
        self.weights = torch.rand(*shape, CHOICES, generator=generator).cuda()
        self.experts = torch.rand(*shape, EXPERTS, generator=generator).topk(CHOICES, dim=-1).indices.cuda()

    def turned(self, by: int) -> "Step":
        """The same tokens with other numbers and experts."""
        other = object.__new__(Step)
        other.size, other.counts, other.width, other.weights = self.size, self.counts, self.width, self.weights
        other.x, other.experts = self.x.roll(by, dims=-1), (self.experts + by) % EXPERTS
        return other

    def own(self, rank: int) -> list[Tensor]:
        return [each[rank, : self.counts[rank]].contiguous() for each in (self.x, self.weights, self.experts)]

    def expected(self, rank: int) -> Tensor:
        own = self.own(rank)
        return sum_parts_in_torch(torch.stack([part(each, self.size, *own) for each in range(self.size)]))


def part(rank: int, size: int, x_AD: Tensor, weights_AK: Tensor, experts_AK: Tensor) -> Tensor:
    """Stands for a rank's experts: each multiplies a row by a number of its own."""
    factors_A = torch.where(experts_AK * size // EXPERTS == rank, weights_AK * (experts_AK + 1), 0).sum(1)
    return (x_AD.float() * factors_A.unsqueeze(1)).to(x_AD.dtype)


def replays(rank: TensorParallel) -> int:
    """Number of wrong sums, outside a graph and in its replays."""
    device = torch.device("cuda", torch.cuda.current_device())
    joined = with_dispatch_memory(rank, width=WIDTH, choices=CHOICES, dtype=torch.bfloat16, device=device)
    memory, size = joined.dispatch, rank.size
    assert memory is not None, "the log says why"
    ranks_E = torch.arange(EXPERTS, device=device) * size // EXPERTS
    ranks = ExpertRanks(ranks_E.to(torch.int32).unsqueeze(1), torch.ones(EXPERTS, dtype=torch.int32, device=device))
    steps = [Step(size, counts, seed) for seed, counts in enumerate(STEPS)]
    static = [step.own(rank.rank) for step in steps]

    def compute() -> list[Tensor]:
        return [one(step.width, *own) for step, own in zip(steps, static, strict=True)]

    def one(width: int, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        asked_T = expert_dispatch.send(memory, x_TD, weights_TK, experts_TK, ranks, width=width)
        received = expert_dispatch.receive(memory, ranks, width=width, experts_dtype=torch.int64)
        part_AD = part(rank.rank, size, received.x_AD, received.weights_AK, received.experts_AK)
        expert_dispatch.send_back(memory, part_AD, received, width=width)
        return expert_dispatch.add_up(memory, asked_T, width=width)

    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def check(outputs: list[Tensor], now: list[Step]) -> None:
        nonlocal wrong
        for ours_TD, step in zip(outputs, now, strict=True):
            wrong += (ours_TD != step.expected(rank.rank)).any()

    check(compute(), steps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    for replay in range(REPLAYS):
        now = [step.turned(replay) for step in steps]
        for places, step in zip(static, now, strict=True):
            for place, each in zip(places, step.own(rank.rank), strict=True):
                place.copy_(each)
        if replay // 3 % size == rank.rank:
            torch.cuda._sleep(DELAY_CYCLES)
        graph.replay()
        check(outputs, now)
    return int(wrong.item())


def layer_of(parallel: TensorParallel, config: ModelConfig) -> MoE:
    """One rank's part of a layer. An expert has the same weights on every rank that holds it."""
    moe = local_config(config, parallel).moe
    assert moe is not None
    assert parallel.placement is not None
    with torch.device("cuda"):
        layer = MoE(config.hidden_size, moe, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        layer.experts.place(next(places for _, places in parallel.placement.mixtures), parallel.rank)
    for index, (name, parameter) in enumerate(layer.named_parameters()):
        held = layer.experts.held if name.startswith("experts.") else (0,)
        for expert, weights in zip(held, parameter if len(held) > 1 else parameter.unsqueeze(0), strict=True):
            generator = torch.Generator(device="cuda").manual_seed(1000 * index + expert)
            weights.normal_(std=0.1, generator=generator)
    layer.gate.batch_invariant = layer.experts.batch_invariant = True
    return layer


@torch.inference_mode()
def layer_sums(rank: TensorParallel) -> list[tuple[Tensor, Tensor]]:
    """The layer's result for this rank's tokens, and the one that it must have, for several steps."""
    config, device = read_config(DEMO_MODELS / "deepseek"), torch.device("cuda", torch.cuda.current_device())
    assert config.moe is not None
    parts = [replace(rank, rank=each, whole_experts=True, own_attention=True, share_memory=True) for each in range(2)]
    ranks = [with_experts_placed(each, config, redundant=2, load=None) for each in parts]
    layers = [layer_of(each, config) for each in ranks]
    choices, width = config.moe.experts_per_token, config.hidden_size
    joined = with_dispatch_memory(ranks[rank.rank], width=width, choices=choices, dtype=torch.bfloat16, device=device)
    assert joined.dispatch is not None, "the log says why"
    own = layers[rank.rank]
    own.parallel, own.exchange = joined, TokenExchange(joined)
    found = []
    for seed, counts in enumerate(((2, 2), (40, 33), (1, 2))):
        shares = own.exchange.shares = TokenShares.of(counts)
        generator = torch.Generator(device="cuda").manual_seed(seed)
        all_AD = torch.randn(shares.num_places, width, generator=generator, device=device).to(torch.bfloat16)
        x_TD = own.exchange.own(all_AD)
        ours_TD = own.of_own_tokens(x_TD)
        chosen = own.gate(all_AD)
        sums_AD = sum_parts_in_torch(torch.stack([layer.experts(all_AD, *chosen) for layer in layers]))
        shared_TD = own._shared(x_TD)
        assert shared_TD is not None
        found.append((ours_TD.cpu(), (own.exchange.own(sums_AD) + shared_TD).cpu()))
    return found


def test_a_layer_has_the_bits_of_a_gather_and_a_sum_in_order(tmp_path: Path) -> None:
    for rank in run_ranks_on_one_gpu(layer_sums, 2, tmp_path):
        for ours_TD, expected_TD in rank:
            assert float(expected_TD.float().std()) > 0.01
            assert torch.equal(ours_TD, expected_TD)


def test_replays_of_a_graph_are_right_for_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    assert run_ranks_on_one_gpu(replays, 2, tmp_path) == [0, 0]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_replays_of_a_graph_are_right_with_a_gpu_for_each_rank(tmp_path: Path) -> None:
    size = 4 if GPUS >= 4 else 2
    assert run_gpu_ranks(replays, size, tmp_path) == [0] * size
