"""Requests with different adapters in one engine: each has the tokens of its adapter merged into the weights, and no
other's KV; adapters come and go while requests run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from baton.core.errors import Overloaded, UnknownModel
from baton.core.types import AdapterRef
from baton.engine.adapters import AdapterSlots
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.engine import Engine
from baton.engine.request import EngineRequest
from baton.models.adapters.adapter import Adapter, read_adapter
from baton.settings.node_config import NodeSettings
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import BLOCK_SIZE, EventRecorder, greedy, prompt_of, transformers_greedy
from tests.unit.models.lora import merge, save_adapter
from tests.unit.models.tiny import save_tiny

TOKENS, SLOTS = 9, 2
PROMPT = prompt_of(13)


class Models(NamedTuple):
    """Adapters and, by the same names and "" for the base, transformers' models with them."""

    built: BuiltRunner
    adapters: dict[str, Adapter]
    merged: dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    save_tiny("llama-llama3-tied", root / "base")
    settings = NodeSettings(
        model=root / "base", num_blocks=64, block_size=BLOCK_SIZE, device="cpu", max_adapters=SLOTS, max_adapter_rank=8
    )
    built = build_runner(settings)
    assert built.runner.adapters is not None
    adapters, directories = {}, {"": root / "base"}
    for seed, name in enumerate(("a", "b", "c")):
        directory = save_adapter(root / "base", root / name, seed=seed, rank=4 + seed)
        adapters[name] = read_adapter(directory, built.runner.adapters.layers, max_rank=8)
        directories[name] = merge(root / "base", directory, root / f"merged-{name}")
    merged = {name: transformers.AutoModelForCausalLM.from_pretrained(path) for name, path in directories.items()}
    return Models(built, adapters, merged)


@asynccontextmanager
async def running(models: Models, *, padded: bool = False, **given: Any) -> AsyncIterator[tuple[Engine, EventRecorder]]:
    built, events = models.built, EventRecorder()
    runner = built.runner
    if padded:
        runner = ModelRunner(
            runner.model,
            runner.backend,
            built.cache,
            runner.facts,
            graphs=GraphSettings(max_requests=8, max_context_tokens=128, max_tokens=64),
            grammars=built.grammars,
            adapters=runner.adapters,
        )
    async with Engine(runner, limits(**given), on_step=events, grammars=built.grammars, num_adapters=SLOTS) as engine:
        yield engine, events


def asks(name: str, adapter: AdapterRef | None, tokens: int = TOKENS) -> EngineRequest:
    return EngineRequest(name, PROMPT, greedy(tokens), adapter=adapter)


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
async def test_each_request_of_a_mixed_batch_has_the_tokens_of_its_adapter(models: Models, padded: bool) -> None:
    expected = {name: transformers_greedy(model, PROMPT, TOKENS) for name, model in models.merged.items()}
    assert len({tuple(each) for each in expected.values()}) == len(expected), "adapters that change nothing"
    async with running(models, padded=padded, max_batch_tokens=20) as (engine, events):
        loaded: dict[str, AdapterRef | None] = {"": None}
        for name in ("a", "b"):
            loaded[name] = await engine.load_adapter(name, models.adapters[name])
        for repeat in range(2):
            for name, adapter in loaded.items():
                engine.submit(asks(f"{name}{repeat}", adapter))
        await events.finished(*(f"{name}{repeat}" for name in loaded for repeat in range(2)))
    for name in loaded:
        assert events.ids(f"{name}0") == events.ids(f"{name}1") == expected[name]


async def test_decodes_without_adapters_run_as_steps_that_have_no_part_of_them(models: Models) -> None:
    model, used = models.built.runner.model, []
    async with running(models, padded=True) as (engine, events):
        a = await engine.load_adapter("a", models.adapters["a"])
        for name, adapter in (("base", None), ("adapted", a), ("base again", None)):
            engine.submit(asks(name, adapter))
            await events.finished(name)
            used.append(model.adapter_rows is not None)
    assert used == [False, True, False]


async def test_cached_prefixes_are_shared_within_one_revision_of_one_adapter(models: Models) -> None:
    async with running(models) as (engine, events):
        a = await engine.load_adapter("a", models.adapters["a"])
        same_numbers = await engine.load_adapter("other name", models.adapters["a"])
        order = (None, a, same_numbers, a, None)
        for number, adapter in enumerate(order):
            engine.submit(asks(f"r{number}", adapter))
            await events.finished(f"r{number}")
        cached = [events.started[f"r{number}"].cached_tokens for number in range(len(order))]
        engine.adapters.unload("other name")
        other = await engine.load_adapter("a", models.adapters["b"])
        engine.submit(asks("revised", other))
        await events.finished("revised")
    assert [tokens > 0 for tokens in cached] == [False, False, False, True, True]
    assert events.started["revised"].cached_tokens == 0
    assert events.ids("revised") == transformers_greedy(models.merged["b"], PROMPT, TOKENS)


async def test_a_request_goes_on_with_an_adapter_that_is_unloaded_or_replaced(models: Models) -> None:
    expected = transformers_greedy(models.merged["a"], PROMPT, 60)
    async with running(models) as (engine, events):
        first = await engine.load_adapter("x", models.adapters["a"])
        engine.submit(asks("runs", first, 60))
        await events.until(lambda: len(events.ids("runs")) > 2)
        second = await engine.load_adapter("x", models.adapters["b"])
        assert engine.adapters.loaded == [second]
        with pytest.raises(UnknownModel, match=first.revision):
            engine.submit(asks("late", first))
        with pytest.raises(Overloaded, match="all 2 slots"):
            await engine.load_adapter("y", models.adapters["c"])
        assert "runs" not in events.reasons
        assert engine.adapters.unload("x")
        assert not engine.adapters.unload("x")
        await events.finished("runs")
        for name in ("y", "z"):
            await engine.load_adapter(name, models.adapters["c"])
    assert events.ids("runs") == expected


async def test_what_is_loaded_already_takes_no_other_slot(models: Models) -> None:
    async with running(models) as (engine, _):
        for _ in range(SLOTS + 1):
            await engine.load_adapter("a", models.adapters["a"])
        assert len(engine.adapters.loaded) == 1


def test_a_slot_is_taken_once_and_is_free_again_after_a_failure() -> None:
    slots = AdapterSlots(2, in_use=lambda slot: slot == 1)
    assert slots.take() == 0
    with pytest.raises(Overloaded):
        slots.take()
    slots.failed(0)
    assert slots.take() == 0
    slots.filled(0, AdapterRef("a", "1"))
    assert slots.slot_of(AdapterRef("a", "1")) == 0
    with pytest.raises(UnknownModel, match="not loaded"):
        slots.slot_of(AdapterRef("a", "2"))


def test_settings_name_adapters() -> None:
    settings = NodeSettings(adapter="sql=/a, chat=/b/c")
    assert settings.adapters == {"sql": Path("/a"), "chat": Path("/b/c")}
    assert settings.adapter_slots == 8
    assert NodeSettings().adapter_slots == 0
    assert settings.model_copy(update={"max_adapters": 3}).adapter_slots == 3
    assert settings.watched_adapters is None
    watching = NodeSettings(adapter="/all, sql=/a")
    assert (watching.watched_adapters, watching.adapters) == (Path("/all"), {"sql": Path("/a")})
    assert watching.adapter_slots == 8
    with pytest.raises(ValueError, match="only one is watched"):
        NodeSettings(adapter="/all,/more")
    for wrong in ("=x", "sql=", "two words=/a"):
        with pytest.raises(ValueError, match="name=directory"):
            NodeSettings(adapter=wrong)
