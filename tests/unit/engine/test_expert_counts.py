"""A running engine counts the experts that its routers choose: each token once, and no padding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.engine import Engine
from baton.engine.request import EngineRequest
from baton.models.config.expert_places import ExpertPlacement, place_experts
from baton.models.layers.expert_counts import ExpertCounts, expert_load
from baton.models.layers.moe.router import Router
from baton.models.loading.loader import _place
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import EventRecorder, build, greedy, prompt_of
from tests.unit.models.tiny import save_tiny

TOKENS, LENGTHS = 6, (13, 5, 9)


@pytest.fixture
def mixture(tmp_path: Path) -> tuple[BuiltRunner, ExpertPlacement]:
    """All places are on this rank; ranks of several processes count alike."""
    save_tiny("qwen3-moe-dense-layers-between", tmp_path)
    built = build(tmp_path)
    moe = built.config.moe
    assert moe is not None
    plan = place_experts(moe.layers, moe.num_experts, ranks=1)
    _place(built.runner.model, plan, 0)
    return built, plan


def watch_routers(built: BuiltRunner, counts: ExpertCounts) -> dict[int, Tensor]:
    """Tokens of each expert by layer, from what routers give for rows with a slot."""
    routed: dict[int, Tensor] = {}

    def count(index: int, chosen: tuple[Tensor, Tensor]) -> None:
        assert counts.slots_T is not None
        routed[index] += chosen[1][counts.slots_T >= 0].flatten().bincount(minlength=len(routed[index]))

    for index, layer in enumerate(built.runner.model.model.layers):
        for module in layer.modules():
            if isinstance(module, Router):
                routed[index] = torch.zeros(module.moe.num_experts, dtype=torch.int64)
                module.register_forward_hook(lambda _, __, chosen, index=index: count(index, chosen))
    return routed


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
async def test_every_token_counts_once_in_each_layer(
    mixture: tuple[BuiltRunner, ExpertPlacement], padded: bool
) -> None:
    built, plan = mixture
    runner, events = built.runner, EventRecorder()
    if padded:
        runner = ModelRunner(
            runner.model,
            runner.backend,
            built.cache,
            runner.facts,
            graphs=GraphSettings(max_requests=8, max_context_tokens=64, max_tokens=64),
            grammars=built.grammars,
        )
    counts = runner.model.expert_counts
    assert counts is not None
    routed = watch_routers(built, counts)
    async with Engine(runner, limits(max_batch_tokens=16), on_step=events, grammars=built.grammars) as engine:
        before = await engine.expert_counts()
        for number, length in enumerate(LENGTHS):
            engine.submit(EngineRequest(f"r{number}", prompt_of(length, seed=number), greedy(TOKENS)))
        await events.finished(*(f"r{number}" for number in range(len(LENGTHS))))
        load = expert_load(plan, await engine.expert_counts(), model="mixture")
    assert not any(map(any, before.values())), "the steps that prepare a runner serve nobody"
    assert load.tokens == {layer: tuple(tokens_E.tolist()) for layer, tokens_E in routed.items()}
    moe = built.config.moe
    assert moe is not None
    expected = (sum(LENGTHS) + len(LENGTHS) * (TOKENS - 1)) * moe.experts_per_token
    assert [sum(tokens) for tokens in load.tokens.values()] == [expected] * sum(moe.layers)
    assert list(load.tokens) == [index for index, has in enumerate(moe.layers) if has]
    assert load.rank_tokens == (expected * sum(moe.layers),)


async def test_an_engine_without_whole_experts_has_no_counts(tmp_path: Path) -> None:
    save_tiny("qwen3-moe", tmp_path)
    built = build(tmp_path)
    async with Engine(built.runner, limits(), on_step=EventRecorder(), grammars=built.grammars) as engine:
        assert await engine.expert_counts() == {}
