"""An engine whose model drafts with its own MTP layer gives the tokens that decoding alone gives, in fewer steps if
the layer is good."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.engine.request import EngineRequest
from baton.engine.speculation.speculator import Speculator
from baton.models.adapters.adapter import read_adapter
from baton.settings.node_config import NodeSettings
from tests.unit.engine.ahead import one_step_at_a_time, varied_requests
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import EventRecorder, greedy, prompt_of, request
from tests.unit.models.lora import save_adapter
from tests.unit.models.tiny_mtp import save_with_good_layer, save_with_mtp

COUNT = 40


def built_of(directory: Path, **settings: Any) -> BuiltRunner:
    given = {"model": directory, "num_blocks": 192, "block_size": 8, "device": "cpu"}
    return build_runner(NodeSettings.model_validate(given | settings))


class LayerOnly(Speculator):
    """Drafts that come from the model's own layer alone."""

    def begin(self, request: Any, *, root: bytes | None, grammar: Any, tpot_s: float | None = None) -> None:
        super().begin(request, root=None, grammar=None, tpot_s=tpot_s)
        self.proposer._drafts[request.request_id]._search = lambda count: None  # type: ignore[method-assign]


class WithHoles(LayerOnly):
    """Drafts after every third step, also for requests that have tokens which the layer has not computed."""

    def __init__(self) -> None:
        super().__init__(always=True)
        self.asked = self.without = 0

    def count_layer_drafts(self, *args: Any, **given: Any) -> int:
        self.asked += 1
        return 0 if self.asked % 3 else super().count_layer_drafts(*args, **given)

    def writes_layer_kv(self, requests: Any) -> bool:
        self.without += 1
        return False


@asynccontextmanager
async def engine_of(
    built: BuiltRunner, speculator: Speculator | None, *, num_adapters: int = 0, **given: Any
) -> AsyncIterator[tuple[Engine, EventRecorder]]:
    events = EventRecorder()
    bounds = limits(**{"max_batch_tokens": 24} | given)
    async with Engine(
        built.runner,
        bounds,
        on_step=events,
        grammars=built.grammars,
        num_adapters=num_adapters,
        speculator=speculator,
    ) as engine:
        yield engine, events


async def answered(
    built: BuiltRunner, requests: list[EngineRequest], speculator: Speculator | None = None, **given: Any
) -> EventRecorder:
    async with engine_of(built, speculator or Speculator(always=True), **given) as (engine, events):
        for one in requests:
            engine.submit(one)
        await events.finished(*(one.request_id for one in requests))
        assert events.errors == {}
    return events


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    save_with_good_layer(directory)
    return directory


@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v32", "glm4-moe", "qwen3-next", "good"])
async def test_every_way_to_draw_gives_the_tokens_of_decoding(family: str, good: Path, tmp_path: Path) -> None:
    if family != "good":
        save_with_mtp(family, tmp_path)
    directory = good if family == "good" else tmp_path
    requests = list(varied_requests())
    expected = one_step_at_a_time(built_of(directory), requests)
    built = built_of(directory, speculation="always")
    assert built.runner.facts.drafts
    events = await answered(built, requests, prefix_cache=True)
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens], name
    assert events.draft_counts[0] > 0


async def test_steps_without_the_layer_change_no_token(good: Path) -> None:
    requests, speculator = list(varied_requests()), WithHoles()
    expected = one_step_at_a_time(built_of(good), requests)
    events = await answered(built_of(good, speculation="always"), requests, speculator, prefix_cache=True)
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens], name
    assert speculator.without > 0
    assert events.draft_counts[0] > 0


async def test_a_cache_of_fp8_gives_the_tokens_of_decoding(good: Path) -> None:
    requests = list(varied_requests())
    expected = one_step_at_a_time(built_of(good, kv_cache_dtype="fp8_e4m3"), requests)
    built = built_of(good, kv_cache_dtype="fp8_e4m3", speculation="always")
    events = await answered(built, requests, prefix_cache=False)
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens], name
    assert events.draft_counts[1] > 0


async def test_requests_with_an_adapter_get_its_tokens_and_drafts_of_the_base_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_with_mtp("glm4-moe", base)
    directory = save_adapter(
        base, tmp_path / "adapter", seed=3, targets=("layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj")
    )
    answers = []
    for speculation in ("off", "always"):
        built = built_of(base, speculation=speculation, max_adapters=1, max_adapter_rank=8)
        assert built.runner.adapters is not None
        assert built.runner.facts.drafts == (speculation == "always")
        adapter = read_adapter(directory, built.runner.adapters.layers, max_rank=8)
        speculator = Speculator(always=True) if speculation == "always" else None
        async with engine_of(built, speculator, num_adapters=1) as (engine, events):
            used = await engine.load_adapter("a", adapter)
            for name, adapter_of in (("base", None), ("adapted", used)):
                engine.submit(EngineRequest(name, prompt_of(20), greedy(COUNT), adapter=adapter_of))
            await events.finished("base", "adapted")
        answers.append((events.ids("base"), events.ids("adapted")))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


async def test_a_good_layer_saves_most_steps(good: Path) -> None:
    requests = [request(f"r{seed}", prompt_of(30 + seed, seed=seed), greedy(COUNT)) for seed in range(4)]
    expected = one_step_at_a_time(built_of(good), requests)
    built = built_of(good, speculation="always")
    async with engine_of(built, LayerOnly(always=True)) as (engine, events):
        for one in requests:
            engine.submit(one)
        await events.finished(*expected)
    for name, tokens in expected.items():
        assert events.ids(name) == [each.token_id for each in tokens]
    drafted, accepted = events.draft_counts
    assert accepted > drafted * 0.8
    # Alone, the requests would take a step for each token.
    assert len(events.steps) < 0.6 * COUNT


async def test_a_prefix_from_the_cache_has_the_layers_kv(good: Path) -> None:
    """Requests with the same prompt draft as well when it comes from the cache."""
    built = built_of(good, speculation="always")
    rates, prompt = [], prompt_of(70, seed=9)
    async with engine_of(built, LayerOnly(always=True), prefix_cache=True) as (engine, events):
        for turn in range(2):
            before = events.draft_counts
            engine.submit(request(f"r{turn}", prompt, greedy(COUNT)))
            await events.finished(f"r{turn}")
            rates.append((events.draft_counts[1] - before[1]) / (events.draft_counts[0] - before[0]))
        assert events.started["r1"].cached_tokens >= 64
    assert events.ids("r0") == events.ids("r1")
    assert rates[1] == pytest.approx(rates[0], abs=0.1)
    assert rates[0] > 0.8
