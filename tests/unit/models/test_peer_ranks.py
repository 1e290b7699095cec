"""Ranks that run at the same time and add up their parts through each other's memory: kernels in the interpreter, in
processes that map the same files."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton.engine import peer_memory
from baton.engine.build import build_runner
from baton.models.families.reader import read_config
from baton.models.kernels import peer_sums
from baton.models.kernels.rank_sums import sum_parts_in_torch
from baton.models.layers.eagle import ReadStates
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import DeferredSum, TensorParallel
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import NodeSettings
from tests.ranks import run_ranks
from tests.unit.models.peer_files import with_peer_files
from tests.unit.models.split import DECODED_TOKENS, PROMPT_TOKENS, run_model
from tests.unit.models.tiny import save_tiny

WIDTH = 24
# Of sums that follow each other.
ROWS = (1, 5, 3, 3, 6, 2)
# Norms of a layer that compute a sum over ranks, by model.
FUSED_NORMS = {"llama-llama3-tied": 2, "glm4": 1}
STEPS = 2 + DECODED_TOKENS


def part_of(rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    shape = (ROWS[index], WIDTH)
    return torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)


class NormedSum(nn.Module):
    """Stands for a layer, which reads the update of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, eps=1e-5, dtype=torch.float32)
        nn.init.constant_(self.norm.weight, 2.0)

    def forward(self, stream_TD: Tensor, update_TD: Tensor | DeferredSum) -> Tensor:
        return self.norm.add_and_norm(stream_TD, update_TD)


@torch.inference_mode()
def sums(rank: TensorParallel, directory: Path) -> list[Tensor]:
    """Sums in one shot and in two, in turns. Every third is added to a stream and normalized, after an EAGLE-3 head has
    read it."""
    joined = with_peer_files(rank, directory, rows=max(ROWS), width=WIDTH, dtype=torch.float32)
    layers = nn.ModuleList([NormedSum()])
    read = ReadStates(layers, (0,))
    found = []
    for index, rows in enumerate(ROWS):
        peer_sums._TWO_SHOT_BYTES = (0, 1 << 30)[index % 2]  # in this process, which ends after it
        part = part_of(rank.rank, index)
        if index % 3 == 2:
            later, stream_TD = joined.all_reduce_later(part), torch.ones(rows, WIDTH)
            assert isinstance(later, DeferredSum)
            found += [layers[0](stream_TD, later), stream_TD, *read.take()]
        else:
            found.append(joined.all_reduce(part))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_every_rank_gets_the_sum_in_order_again_and_again(size: int, tmp_path: Path) -> None:
    by_rank = run_ranks(sums, size, tmp_path, tmp_path)
    found = iter(by_rank[0])
    for index in range(len(ROWS)):
        expected = sum_parts_in_torch(torch.stack([part_of(rank, index) for rank in range(size)]))
        if index % 3 == 2:
            expected += 1
            normed_TD = 2 * expected * (expected.square().mean(1, keepdim=True) + 1e-5).rsqrt()
            torch.testing.assert_close(next(found), normed_TD)
            assert torch.equal(next(found), expected)
        assert torch.equal(next(found), expected)
    for rank in by_rank:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rank, by_rank[0], strict=True))


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one model.

    Attributes:
        library, peers: logits by the library's sums, and by sums through peers' memory.
        fused: number of norms that computed a sum.
    """

    library: Tensor
    peers: Tensor
    fused: int


def compare(rank: TensorParallel, models: Mapping[str, Path]) -> dict[str, Seen]:
    return {name: _compare(rank, directory) for name, directory in models.items()}


def _compare(rank: TensorParallel, directory: Path) -> Seen:
    fused = 0
    fuse = peer_sums.add_sum_and_norm

    def count(*args: Any, **options: Any) -> object:
        nonlocal fused
        fused += 1
        return fuse(*args, **options)

    library = run_model(directory, rank)
    width = read_config(directory).hidden_size
    joined = with_peer_files(rank, directory, rows=PROMPT_TOKENS, width=width, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_sums, "add_sum_and_norm", count)
        peers = run_model(directory, joined)
    assert peers.tokens == library.tokens
    return Seen(library.logits, peers.logits, fused)


@pytest.mark.slow
@pytest.mark.sweep
def test_models_compute_the_same_with_sums_within_their_norms(tmp_path: Path) -> None:
    models = {name: tmp_path / name for name in FUSED_NORMS}
    for name, directory in models.items():
        save_tiny(name, directory)
    (tmp_path / "ranks").mkdir()
    by_rank = run_ranks(compare, 2, tmp_path / "ranks", models)
    for name, norms_of_a_layer in FUSED_NORMS.items():
        layers = read_config(models[name]).num_layers
        for rank in by_rank:
            torch.testing.assert_close(rank[name].peers, rank[name].library, rtol=1e-4, atol=1e-5)
            assert torch.equal(rank[name].peers, by_rank[0][name].peers)
            assert rank[name].fused == STEPS * layers * norms_of_a_layer


def without_gpus(rank: TensorParallel, directory: Path) -> list[str]:
    """The lines of the log when a node is built."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(peer_memory.__name__).addHandler(handler)
    build_runner(NodeSettings(model=directory, num_blocks=4, device="cpu"), parallel=replace(rank, share_memory=True))
    return lines


def test_ranks_that_cannot_map_memory_keep_to_the_library_and_say_so_once(tmp_path: Path) -> None:
    lines, *others = run_ranks(without_gpus, 2, tmp_path, DEMO_MODELS / "llama")
    assert len(lines) == 1
    assert lines[0].endswith("cannot map each other's memory: rank 0 has no GPU")
    assert others == [[]]
