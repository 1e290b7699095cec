"""Layers cause events while their step still runs, once their KV is in the cache, for requests that ask for marks."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.layer_marks import LayerMark
from baton.engine.device.runner import ModelRunner
from baton.engine.events import LayersComputed, StepEvents
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from tests.unit.engine.driver import runner_of
from tests.unit.engine.tiny import build, greedy, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

PROMPT = prompt_of(11, seed=3)
BLOCKS = (7, 2, 9)


def batch_of(runner: ModelRunner, *, layers_per_group: int) -> Batch:
    assert runner.facts.block_size * len(BLOCKS) > len(PROMPT)
    sample = SampleRow(greedy(4), 0, (), int_array(), len(PROMPT))
    return Batch(0, (BatchRow("a", int_array(PROMPT), 0, int_array(BLOCKS), sample),), layers_per_group)


# One model for each way to iterate over the layers.
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "llama4", "deepseek-v2", "falcon-new", "bloom", "gpt-oss", "gemma3n", "longcat"]
)
def test_at_a_mark_the_first_layers_and_no_others_have_their_kv(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    runner = runner_of(build(tmp_path), graphs=None)
    cache, num_layers = runner._cache, runner._cache.spec.num_layers
    computed_after = len(runner.model.model.layers) > num_layers  # by layers without KV of their own
    marks: list[int] = []
    seen: list[torch.Tensor] = []

    def on_mark(mark: LayerMark) -> None:
        mark.wait()
        marks.append(mark.layer_stop)
        layers = [cache.layer(layer)[:, list(BLOCKS)] for layer in range(num_layers)]
        # The blocks have room for one more token.
        assert [not layer.isnan().all() for layer in layers] == [layer < mark.layer_stop for layer in range(num_layers)]
        seen.append(torch.stack(layers[: mark.layer_stop]).clone())

    runner.launch(batch_of(runner, layers_per_group=1), on_mark).wait()
    each = runner.model.config.attentions_per_layer
    assert marks == list(range(each, num_layers + computed_after, each))
    for layer_stop, kv in zip(marks, seen, strict=True):
        now = torch.stack([cache.layer(layer)[:, list(BLOCKS)] for layer in range(layer_stop)])
        assert torch.equal(kv.nan_to_num(-1), now.nan_to_num(-1))


def test_at_a_mark_the_index_of_the_first_layers_is_there_too(tmp_path: Path) -> None:
    """Of five layers the first and the third have one. The others attend to what these select."""
    save_tiny("glm-moe-dsa-shared-selection", tmp_path)
    runner = runner_of(build(tmp_path), graphs=None)
    index = runner._cache.index
    assert index is not None
    index.storage.fill_(torch.nan)
    stops: list[int] = []

    def on_mark(mark: LayerMark) -> None:
        mark.wait()
        stops.append(mark.index_stop)
        layers = [index.layer(layer)[:, list(BLOCKS)] for layer in range(index.spec.num_layers)]
        assert [not layer.isnan().all() for layer in layers] == [at < mark.index_stop for at in range(len(layers))]

    runner.launch(batch_of(runner, layers_per_group=1), on_mark).wait()
    assert stops == [1, 1, 2, 2]


def test_marks_come_after_each_group_of_layers_and_not_after_the_last(llama: tuple[Path, Any], tmp_path: Path) -> None:
    save_tiny("gemma2", tmp_path)
    runner = runner_of(build(tmp_path), graphs=None)
    for layers_per_group, expected in ((1, [1, 2, 3]), (2, [2]), (3, [3]), (4, []), (0, [])):
        marks: list[LayerMark] = []
        runner.launch(batch_of(runner, layers_per_group=layers_per_group), marks.append).wait()
        assert [mark.layer_stop for mark in marks] == expected


def layers_of(steps: list[StepEvents]) -> list[LayersComputed]:
    return [layers for step in steps for layers in step.layers]


async def test_layer_events_come_before_their_chunk_and_only_for_requests_that_ask(built: BuiltRunner) -> None:
    async with running(built, max_batch_tokens=16) as (engine, events):
        wanting = replace(request("wanting", prompt_of(40, seed=1), greedy(4), prefill_only=True), layers_per_group=1)
        engine.submit(wanting)
        engine.submit(request("other", prompt_of(20, seed=2), greedy(4)))
        await events.finished("other")
        await events.until(lambda: "wanting" in events.tokens)
        computed = layers_of(events.steps)
        assert {layers.request_id for layers in computed} == {"wanting"}
        chunks = events.chunks["wanting"]
        assert len(chunks) > 1
        assert [(layers.token_start, layers.token_stop) for layers in computed] == [
            (chunk.token_start, chunk.token_stop) for chunk in chunks
        ]
        assert {layers.layer_stop for layers in computed} == {1}
        for layers, chunk in zip(computed, chunks, strict=True):
            assert layers.block_ids == chunk.block_ids[: len(layers.block_ids)]
            assert len(layers.block_ids) * built.runner.facts.block_size >= layers.token_stop
        steps = [
            (kind, step.step)
            for step in events.steps
            for kind, part in (("layers", step.layers), ("chunk", step.chunks))
            if any(one.request_id == "wanting" for one in part)
        ]
        assert steps == [
            (kind, step) for step in dict.fromkeys(step for _, step in steps) for kind in ("layers", "chunk")
        ]
        await engine.abort("wanting")


async def test_an_ended_request_causes_no_layer_event(built: BuiltRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is aborted while its step runs: the mark arrives and causes no event."""
    launch, begun, ended = built.runner.launch, threading.Event(), threading.Event()

    def held_back(batch: Batch, on_mark: Any) -> Any:
        def later(mark: LayerMark) -> None:
            begun.set()
            ended.wait(120)
            on_mark(mark)

        return launch(batch, later)

    monkeypatch.setattr(built.runner, "launch", held_back)
    async with running(built) as (engine, events):
        engine.submit(replace(request("a", PROMPT, greedy(4), prefill_only=True), layers_per_group=1))
        assert await asyncio.to_thread(begun.wait, 120)
        aborting = asyncio.create_task(engine.abort("a"))
        await asyncio.sleep(0)
        ended.set()
        await aborting
        assert layers_of(events.steps) == []
