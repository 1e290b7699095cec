"""Batch-invariant mode with a model split over GPUs: a request's logits in bf16 have the same bits alone, in any batch,
in any chunks and as decodes, with CUDA graphs and without.

With more than two GPUs, four take part: two numbers have one sum in any order.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.models.kernels.rank_sums import sum_parts_in_torch
from baton.models.layers.parallel import TensorParallel
from baton.settings.config import DEMO_MODELS
from tests.integration.cluster import Flags, machines
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.invariance import Invariant, Lengths, differences, drawn_tokens, hidden_states
from tests.ranks import run_gpu_ranks
from tests.unit.models.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
SIZES = (3, 12, 33)
LENGTHS = Lengths(prompt=90, outputs=6, chunk=64, longest=120)
CHUNKS = (1, 7, 64, 150)
WHOLE_EXPERTS = "qwen2-moe with whole experts"
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "max_position_embeddings": 512}
MIXTURE: dict[str, Any] = {
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
}
# By name, with the fields that differ from the tiny models'.
MODELS: dict[str, dict[str, Any]] = {
    "llama-llama3-tied": WIDE,
    "olmo2": {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512},
    "deepseek-v3": {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 128},
    "qwen2-moe": MIXTURE,
    WHOLE_EXPERTS: MIXTURE,
    "falcon-h1-norm-groups-biases": {},
}


def compare(
    rank: TensorParallel, models: Mapping[str, Path]
) -> dict[str, tuple[dict[int, list[int]], list[int], Tensor]]:
    """The steps whose bits depend on the batch, the sizes of chunks that change bits, and logits; by model."""
    return {name: _compare(rank, name, models[name]) for name in models}


def _compare(rank: TensorParallel, name: str, directory: Path) -> tuple[dict[int, list[int]], list[int], Tensor]:
    own = replace(rank, whole_experts=name == WHOLE_EXPERTS)
    model = Invariant(directory, device=f"cuda:{rank.rank}", dtype="bfloat16", parallel=own, block_size=16)
    tokens = drawn_tokens(model, 150)
    whole = hidden_states(model, tokens, chunk=len(tokens))
    changed = [chunk for chunk in CHUNKS if not torch.equal(hidden_states(model, tokens, chunk=chunk), whole)]
    return differences(model, LENGTHS, SIZES), changed, whole.cpu()


def test_a_request_has_the_same_bits_alone_in_any_batch_and_in_any_chunks(tmp_path: Path) -> None:
    models = {name: tmp_path / name for name in MODELS}
    for name, directory in models.items():
        save_tiny(name.partition(" with")[0], directory, changed=MODELS[name])
    (tmp_path / "ranks").mkdir()
    by_rank = run_gpu_ranks(compare, RANKS, tmp_path / "ranks", models)
    for name in MODELS:
        for rank in by_rank:
            differing, changed, whole = rank[name]
            assert (name, differing, changed) == (name, {size: [] for size in SIZES}, [])
            assert torch.equal(whole, by_rank[0][name][2])
            assert float(whole.std()) > 0


def part_of(rank: int, rows: int) -> Tensor:
    """This rank's part of some rows, the same for each number of them."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4096, 1024, generator=generator)[:rows]


def sums(rank: TensorParallel) -> list[Tensor]:
    """Sums of 1, 64 and 4,096 rows, in launches of their own and in graphs."""
    in_order = replace(rank, in_order=True)
    found = []

    def scattered(part: Tensor) -> Tensor:
        return in_order.all_gather(in_order.reduce_scatter(part.view(-1))).view(part.shape)

    for rows in (1, 64, 4096):
        part = part_of(rank.rank, rows).cuda()

        for function in (in_order.all_reduce, scattered):
            found.append(function(part).cpu())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = function(part)
            captured.zero_()
            graph.replay()
            found.append(captured.cpu())
    return found


def test_sums_in_order_are_the_same_by_every_method_and_in_graphs(tmp_path: Path) -> None:
    by_rank = run_gpu_ranks(sums, RANKS, tmp_path)
    expected = sum_parts_in_torch(torch.stack([part_of(rank, 4096) for rank in range(RANKS)]))
    for rank in by_rank:
        assert len(rank) == 12
        for found in rank:
            assert torch.equal(found, expected[: len(found)])


DRAWN = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, logprobs=0)
PROMPTS = [33, 64, 129, 300, 17, 90, 200, 5]
NODE: Flags = {
    "dtype": "bfloat16",
    "batch_invariant": True,
    "num_blocks": 512,
    "max_batch_tokens": 128,
    "device": "cuda:0",
    "prefix_cache": False,
    "tensor_parallel_size": RANKS,
}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama", {}),
        ("deepseek", {}),
        ("deepseek", {"expert_parallel": True, "attention_data_parallel": True}),
    ],
    ids=["llama", "deepseek", "deepseek with requests of each rank"],
)
def test_a_pair_gives_the_same_logprobs_alone_and_in_a_crowd(model: str, more: Flags, *, graphs: bool) -> None:
    directory = DEMO_MODELS / model
    prompts = Reference(directory).prompts(PROMPTS)
    flags: Flags = {**NODE, **more, "model": directory, "cuda_graphs": graphs}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", flags), ("decode", flags))
        gateway = start.gateway([prefill], [decode], model=directory, local_policy="strict")

        async def outputs(*asked: list[int]) -> list[tuple[list[int], list[float]]]:
            results = await asyncio.gather(*(generate(gateway, prompt, DRAWN) for prompt in asked))
            assert all(result.proof.path is RequestPath.REMOTE for result in results)
            return [(result.token_ids, result.logprobs) for result in results]

        together = asyncio.run(outputs(*prompts))
        for prompt, expected in zip(prompts, together, strict=True):
            assert len(expected[1]) == DRAWN.max_tokens
            assert asyncio.run(outputs(prompt)) == [expected]
        for node in (prefill, decode):
            assert start.end(node) == 0
