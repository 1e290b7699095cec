"""Runs models whole, and split over ranks, over the same tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch import distributed as dist

from baton.core.expert_load import ExpertLoad
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.moe.router import Router
from baton.models.layers.parallel import SINGLE, TensorParallel, with_experts_placed
from baton.models.loading.loader import load_model
from baton.models.loading.local_config import local_config
from tests.unit.models.paged import PagedDriver, backend_for

PROMPT_TOKENS, CHUNK, DECODED_TOKENS = 11, 7, 4


def ranks(size: int) -> list[TensorParallel]:
    """All ranks without a process group, for work that needs no other rank."""
    return [TensorParallel(rank, size) for rank in range(size)]


@dataclass(frozen=True)
class Run:
    """What a run of a model left.

    Attributes:
        logits: of every token of the prompt, and of those decoded.
        tokens: decoded greedily.
        cache: [L, K, B, N, H, C]; NaN where nothing was written.
        state: the same of recurrent layers; None: the model has none.
        routed: tokens of each expert, by layer, added up from what the routers gave.
        counted: tokens of each place, by layer, as the model counted them; None: it does not.
    """

    logits: Tensor
    tokens: list[int]
    cache: Tensor
    state: Tensor | None
    routed: dict[int, tuple[int, ...]]
    counted: dict[int, tuple[int, ...]] | None


def run_model(directory: Path, parallel: TensorParallel = SINGLE, *, kv_dtype: str = "") -> Run:
    """A prompt in two chunks, then decodes."""
    config = read_config(directory)
    backend = backend_for(local_config(config, parallel), kv_dtype=kv_dtype)
    model = load_model(
        directory, config, backend=backend, dtype="float32", device="cpu", kv_dtype=kv_dtype, parallel=parallel
    )
    driver = PagedDriver(model, backend, kv_dtype=kv_dtype)
    routed = routed_by(model)
    prompt = torch.randint(config.vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = [driver.step({"r": prompt[:CHUNK]})["r"], driver.step({"r": prompt[CHUNK:]})["r"]]
    tokens: list[int] = []
    for _ in range(DECODED_TOKENS):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(driver.step({"r": tokens[-1:]})["r"])
    return Run(
        torch.cat(logits),
        tokens,
        driver.cache.view.clone(),
        None if driver.cache.state is None else driver.cache.state.view.clone(),
        {layer: tuple(tokens_E.tolist()) for layer, tokens_E in routed.items()},
        None if model.expert_counts is None else dict(model.expert_counts.fetch().wait()),
    )


def routed_by(model: CausalLM) -> dict[int, Tensor]:
    """Tokens of each expert with weights, by layer, which grow with every step from now on."""
    routed: dict[int, Tensor] = {}

    def count(index: int, router: Router, chosen: tuple[Tensor, Tensor]) -> None:
        num_experts = router.moe.num_experts
        routed[index] += chosen[1].flatten().cpu().bincount(minlength=num_experts)[:num_experts]

    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if isinstance(module, Router):
                routed[index] = torch.zeros(module.moe.num_experts, dtype=torch.int64)
                module.register_forward_hook(lambda router, _, chosen, index=index: count(index, router, chosen))
    return routed


def run_split(
    rank: TensorParallel,
    models: Mapping[str, Path],
    sizes: Mapping[str, tuple[int, ...]],
    whole_experts: frozenset[str] = frozenset(),
    placed: Mapping[str, tuple[int, ExpertLoad | None]] = MappingProxyType({}),
) -> dict[tuple[str, int], Run]:
    """Every model over each of its numbers of ranks, by name and number; a rank has those that it is part of.

    Args:
        whole_experts: names of the models whose ranks hold whole experts.
        placed: of those with a plan for their experts, the redundant ones and the load.
    """
    groups = {
        size: dist.new_group(list(range(size))) for size in sorted({size for each in sizes.values() for size in each})
    }
    return dict(_runs(rank, models, sizes, groups, whole_experts, placed))


def _runs(
    rank: TensorParallel,
    models: Mapping[str, Path],
    sizes: Mapping[str, tuple[int, ...]],
    groups: Mapping[int, dist.ProcessGroup],
    whole_experts: frozenset[str],
    placed: Mapping[str, tuple[int, ExpertLoad | None]],
) -> Iterator[tuple[tuple[str, int], Run]]:
    for name, directory in models.items():
        for size in sizes[name]:
            if rank.rank < size:
                own = TensorParallel(rank.rank, size, groups[size], whole_experts=name in whole_experts)
                if name in placed:
                    redundant, load = placed[name]
                    own = with_experts_placed(own, read_config(directory), redundant=redundant, load=load)
                yield (name, size), run_model(directory, own)
