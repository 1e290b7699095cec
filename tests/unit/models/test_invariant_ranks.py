"""Batch-invariant models split over ranks: a request's logits in float32 have the same bits alone and in any batch, in
any chunks, and as decodes. Four ranks, because two numbers have one sum in any order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.kernels.rank_sums import sum_parts, sum_parts_by_kernel
from baton.models.kernels.row_squares import mean_squares, mean_squares_by_kernel
from baton.models.layers import parallel as layers_parallel
from baton.models.layers.parallel import ParallelModule, TensorParallel
from tests.device import DEVICE
from tests.invariance import Invariant, Lengths, differences, drawn_tokens, hidden_states
from tests.ranks import run_ranks
from tests.unit.models.tiny import save_tiny

RANKS = 4
SIZES = (9,)
LENGTHS = Lengths(prompt=21, outputs=4, chunk=16, longest=30)
CHUNKS = (1, 5, 20)
WHOLE_EXPERTS = "qwen2-moe with whole experts"
FAMILIES = (
    "llama-llama3-tied",
    "olmo2",
    "gemma3n",
    "deepseek-v3",
    WHOLE_EXPERTS,
    "falcon-multi-query-five-heads",
    "falcon-h1-norm-groups-biases",
    "qwen3.5",
)
LIBRARY_SUMS = "llama-llama3-tied with the library's sums"


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one model.

    Attributes:
        differing: steps whose bits depend on the batch, by its size.
        by_chunk: digests of a sequence's hidden states, one for each size of chunks.
        logits: of the last token.
    """

    differing: dict[int, list[int]]
    by_chunk: list[Tensor]
    logits: Tensor


def compare(rank: TensorParallel, models: Mapping[str, Path]) -> dict[str, Seen]:
    return {name: _compare(replace(rank, whole_experts=name == WHOLE_EXPERTS), name, models[name]) for name in models}


def _compare(rank: TensorParallel, name: str, directory: Path) -> Seen:
    model = Invariant(directory, device="cpu", dtype="float32", parallel=rank)
    for module in model.model.modules():
        if isinstance(module, ParallelModule) and name == LIBRARY_SUMS:
            module.parallel = rank
    tokens = drawn_tokens(model, 20)
    by_chunk = [hidden_states(model, tokens, chunk=chunk) for chunk in CHUNKS]
    return Seen(differences(model, LENGTHS, SIZES), by_chunk, by_chunk[-1][-1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    """By rank and model."""
    root = tmp_path_factory.mktemp("models")
    models = {name: root / name for name in (*FAMILIES, LIBRARY_SUMS)}
    for name, directory in models.items():
        save_tiny(name.partition(" with")[0], directory)
    return run_ranks(compare, RANKS, tmp_path_factory.mktemp("ranks"), models)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_has_the_same_bits_alone_and_in_any_batch_on_every_rank(
    name: str, seen: list[dict[str, Seen]]
) -> None:
    for rank in seen:
        assert rank[name].differing == {size: [] for size in SIZES}
        assert torch.equal(rank[name].logits, seen[0][name].logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_decodes_and_chunks_of_any_size_have_the_same_bits(name: str, seen: list[dict[str, Seen]]) -> None:
    first, *others = seen[0][name].by_chunk
    assert float(first.std()) > 0, "zeros prove nothing"
    assert all(torch.equal(other, first) for other in others)


def test_with_the_library_s_sums_they_differ(seen: list[dict[str, Seen]]) -> None:
    assert any(seen[0][LIBRARY_SUMS].differing.values())


def parts_of(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of some rows, the same for each number of them."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(64, 24, generator=generator) * 10 ** torch.randn(64, 24, generator=generator)).to(dtype)[:rows]


def sums(rank: TensorParallel, shared_from_bytes: int) -> list[list[Tensor]]:
    """Sums of 1, 8 and 64 rows by an all-reduce, then those of 8 and 64 by a reduce-scatter, gathered; by dtype."""
    layers_parallel._SHARED_SUM_BYTES = shared_from_bytes  # in this process, which ends after it
    in_order = replace(rank, in_order=True)

    def scattered(part: Tensor) -> Tensor:
        return in_order.all_gather(in_order.reduce_scatter(part)).flatten(0, 1)

    how: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
        (in_order.all_reduce, (1, 8, 64)),
        (scattered, (8, 64)),
    ]
    return [
        [function(parts_of(rank.rank, rows, dtype)) for function, counts in how for rows in counts]
        for dtype in (torch.float32, torch.bfloat16)
    ]


@pytest.mark.parametrize("shared_from_bytes", [0, 1 << 20], ids=["in shares", "whole"])
def test_sums_in_order_are_the_same_by_every_method_and_for_any_number_of_rows(
    shared_from_bytes: int, tmp_path: Path
) -> None:
    by_rank = run_ranks(sums, RANKS, tmp_path, shared_from_bytes)
    for index, dtype in enumerate((torch.float32, torch.bfloat16)):
        parts = [parts_of(rank, 64, dtype).float() for rank in range(RANKS)]
        expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]).to(dtype)
        if dtype is torch.float32:
            assert not torch.equal(expected, parts[3] + parts[2] + parts[1] + parts[0]), "another order must show"
        for rank in by_rank:
            for found in rank[index]:
                assert torch.equal(found, expected[: len(found)])


def whole_number(rank: TensorParallel) -> int:
    """A sum that float32 would round."""
    part = torch.tensor([20_000_001 if rank.rank == 0 else 0])
    return int(replace(rank, in_order=True).all_reduce(part).item())


def test_whole_numbers_are_added_up_exactly(tmp_path: Path) -> None:
    assert run_ranks(whole_number, 2, tmp_path) == [20_000_001] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_of_sums_gives_the_bits_of_its_twin(dtype: torch.dtype) -> None:
    parts = torch.stack([parts_of(rank, 64, dtype) for rank in range(RANKS)])
    for part in (parts, parts[:, :1].contiguous(), parts[:2], parts[:, :0].contiguous()):
        assert torch.equal(sum_parts_by_kernel(part.to(DEVICE)).cpu(), sum_parts(part))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_of_squares_gives_a_row_the_same_bits_alone(dtype: torch.dtype) -> None:
    x_TX = torch.randn(5, 70, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)[:, 3:66]
    means_T = mean_squares_by_kernel(x_TX)
    torch.testing.assert_close(means_T.cpu(), mean_squares(x_TX.cpu()))
    for row in range(5):
        assert torch.equal(mean_squares_by_kernel(x_TX[row : row + 1]), means_T[row : row + 1])
