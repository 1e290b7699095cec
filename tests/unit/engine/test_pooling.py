"""Pooled hidden states equal those of one forward over the whole prompt, however it is batched, cut and cached."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.errors import InternalError, InvalidRequest
from baton.core.sampling import ResolvedSampling
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.pooled_states import pool_states
from baton.engine.pooling import PoolRow, PoolSpan, PoolSum
from baton.engine.request import EngineRequest, int_array
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import runner_of
from tests.unit.engine.scheduling import launch, make
from tests.unit.engine.tiny import build, greedy, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

Llama = tuple[Path, Any]
TOLERANCE = 2e-4


def pooling(name: str, prompt: tuple[int, ...], span: PoolSpan) -> EngineRequest:
    return EngineRequest(name, prompt, ResolvedSampling(max_tokens=1), prefill_only=True, pool=span)


def last(prompt: tuple[int, ...], **head: Any) -> PoolSpan:
    return PoolSpan(len(prompt) - 1, len(prompt), **head)


def mean(prompt: tuple[int, ...]) -> PoolSpan:
    return PoolSpan(0, len(prompt))


def states_of(model: Any, prompt: tuple[int, ...]) -> Tensor:
    """transformers' hidden states [prompt tokens, channels] after the last norm, in one forward."""
    with torch.no_grad():
        states: Tensor = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def assert_right(values: Any, span: PoolSpan, prompt: tuple[int, ...], model: Any) -> None:
    assert values.dtype == np.float32
    expected = states_of(model, prompt)[span.start : span.stop].mean(dim=0)
    assert values == pytest.approx(expected.numpy(), abs=TOLERANCE)


@pytest.mark.parametrize("max_batch_tokens", [256, 7, 1])
async def test_every_span_equals_one_forward_next_to_requests_that_decode(
    llama: Llama, built: BuiltRunner, max_batch_tokens: int
) -> None:
    prompts = {str(length): prompt_of(length, seed=length) for length in (1, 2, 9, 30)}
    spans = {f"last {name}": (prompt, last(prompt)) for name, prompt in prompts.items()}
    spans |= {f"mean {name}": (prompt, mean(prompt)) for name, prompt in prompts.items()}
    spans |= {"first": (prompts["30"], PoolSpan(0, 1)), "inner": (prompts["30"], PoolSpan(5, 21))}
    async with running(built, max_batch_tokens=max_batch_tokens) as (engine, events):
        engine.submit(request("plain", prompt_of(5, seed=5), greedy(20)))
        for name, (prompt, span) in spans.items():
            engine.submit(pooling(name, prompt, span))
        await events.until(lambda: spans.keys() <= events.pooled.keys() and "plain" in events.reasons)
    for name, (prompt, span) in spans.items():
        assert_right(events.pooled[name], span, prompt, llama[1])
        assert not events.ids(name), "nothing is sampled"


@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_a_mean_has_the_same_bits_however_its_prompt_is_cut(built: BuiltRunner, scale: float) -> None:
    length, generator = 500, np.random.default_rng(3)
    hidden_TD = torch.from_numpy(generator.normal(size=(length, 64)).astype(np.float32)) * scale
    means = set()
    for cuts in ((), range(1, length), *(generator.integers(1, length, 5) for _ in range(10))):
        stops = sorted({*map(int, cuts), length})
        pooled = PoolSum(PoolSpan(3, length))
        for start, stop in zip((0, *stops), stops, strict=False):
            if (row := pooled.row(start, stop)) is not None:
                # Another row comes first in the step.
                rows = ((0, PoolRow(0, 2)), (1, row))
                pooled.add(pool_states(built.runner.model, hidden_TD, (0, start), rows).outputs()[1])
        means.add(pooled.mean().tobytes())
    assert len(means) == 1
    mean = np.frombuffer(means.pop(), np.float32)
    assert mean == pytest.approx(hidden_TD[3:].double().mean(dim=0).numpy(), rel=1e-7, abs=1e-9)


def test_the_state_of_a_single_token_keeps_its_bits(built: BuiltRunner) -> None:
    hidden_TD = torch.full((4, 2), 1.234567e-10)
    pooled = PoolSum(PoolSpan(2, 3))
    rows = ((0, PoolRow(0, 2)), (1, PoolRow(2, 3)))
    pooled.add(pool_states(built.runner.model, hidden_TD, (0, 0), rows).outputs()[1])
    assert pooled.mean().tobytes() == hidden_TD[2].numpy().tobytes()


async def test_batch_invariant_engines_give_a_mean_the_same_bits_however_its_prompt_is_cut(
    llama: Llama,
) -> None:
    settings = NodeSettings(model=llama[0], device="cpu", num_blocks=64, block_size=4, batch_invariant=True)
    built, prompt, means = build_runner(settings), prompt_of(30), set()
    for max_batch_tokens in (256, 16, 7, 1):
        async with running(built, max_batch_tokens=max_batch_tokens, prefix_cache=False) as (engine, events):
            engine.submit(request("plain", prompt_of(5, seed=5), greedy(9)))
            engine.submit(pooling("mean", prompt, mean(prompt)))
            await events.until(lambda: "mean" in events.pooled and "plain" in events.reasons)
        means.add(events.pooled["mean"].tobytes())
    assert len(means) == 1


async def test_the_cache_serves_tokens_before_the_span_only_and_keeps_what_pooling_computed(
    llama: Llama, built: BuiltRunner
) -> None:
    prompt = prompt_of(22)
    spans = {"a": last(prompt), "b": last(prompt), "mean": mean(prompt), "inner": PoolSpan(9, 22)}
    async with running(built, max_batch_tokens=8) as (engine, events):
        for name, span in spans.items():
            engine.submit(pooling(name, prompt, span))
            await events.until(lambda name=name: name in events.pooled)  # type: ignore[misc]
    assert [events.started[name].cached_tokens for name in spans] == [0, 20, 0, 8]
    for name, span in spans.items():
        assert_right(events.pooled[name], span, prompt, llama[1])


async def test_a_preempted_prompt_is_summed_anew(llama: Llama) -> None:
    prompts = {name: prompt_of(17, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(llama[0], num_blocks=12), max_batch_tokens=6) as (engine, events):
        engine.submit(request("plain", prompt_of(9, seed=7), greedy(30)))
        for name, prompt in prompts.items():
            engine.submit(pooling(name, prompt, mean(prompt)))
        await events.until(lambda: prompts.keys() <= events.pooled.keys() and "plain" in events.reasons)
    for name, prompt in prompts.items():
        assert_right(events.pooled[name], mean(prompt), prompt, llama[1])


async def test_logits_of_some_tokens_come_in_place_of_the_state(llama: Llama, built: BuiltRunner) -> None:
    prompt, other = prompt_of(12), prompt_of(5, seed=2)
    async with running(built) as (engine, events):
        engine.submit(pooling("two", prompt, last(prompt, logits_of=(7, 3))))
        engine.submit(pooling("one", other, last(other, logits_of=(9,))))
        await events.until(lambda: len(events.pooled) == 2)
    for name, tokens, wanted in (("two", prompt, [7, 3]), ("one", other, [9])):
        with torch.no_grad():
            logits = llama[1](torch.tensor([tokens])).logits[0, -1]
        assert events.pooled[name] == pytest.approx(logits[wanted].numpy(), abs=TOLERANCE)


@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "gemma3", "bamba", "qwen3-next", "deepseek-v3-yarn"])
async def test_other_families_pool_alike(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path)
    prompt = prompt_of(40)
    async with running(build(tmp_path), max_batch_tokens=16) as (engine, events):
        engine.submit(pooling("last", prompt, last(prompt)))
        engine.submit(pooling("mean", prompt, mean(prompt)))
        await events.until(lambda: len(events.pooled) == 2)
    assert_right(events.pooled["last"], last(prompt), prompt, model)
    assert_right(events.pooled["mean"], mean(prompt), prompt, model)


async def test_an_aborted_request_pools_nothing_and_frees_its_blocks(built: BuiltRunner) -> None:
    prompt = prompt_of(30)
    async with running(built, max_batch_tokens=4) as (engine, events):
        engine.submit(pooling("gone", prompt, mean(prompt)))
        await events.until(lambda: "gone" in events.started)
        await engine.abort("gone")
    assert events.pooled == {}


@pytest.mark.parametrize("max_batch_tokens", [256, 4])
async def test_states_that_are_not_finite_fail_their_request_alone(llama: Llama, max_batch_tokens: int) -> None:
    built, wrong = build(llama[0]), 1  # `prompt_of` gives no token below 3
    with torch.inference_mode():
        built.runner.model.model.embed_tokens.weight[wrong] = torch.nan
    prompt = prompt_of(10)
    prompts = {"good": prompt, "last": (*prompt[:-1], wrong), "mean": (*prompt[:5], wrong, *prompt[5:])}
    spans = {"good": mean(prompt), "last": last(prompt), "mean": mean(prompts["mean"])}
    async with running(built, max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, span in spans.items():
            engine.submit(pooling(name, prompts[name], span))
        await events.until(lambda: len(events.pooled) + len(events.errors) == len(spans))
    assert_right(events.pooled.pop("good"), spans["good"], prompt, llama[1])
    assert events.pooled == {}
    for name in ("last", "mean"):
        assert isinstance(events.errors[name], InternalError)
        assert "pooled hidden states are not finite" in str(events.errors[name])


def test_a_step_that_fails_frees_the_blocks_of_the_prompts_that_it_pools() -> None:
    scheduler = make(tokens=8)
    scheduler.submit(pooling("a", tuple(range(20)), PoolSpan(0, 20)), 0.0)
    launch(scheduler)
    launch(scheduler)
    events = scheduler.fail(InternalError("the step failed"), 0.0)
    assert [failed.request_id for failed in events.failed] == ["a"]
    assert scheduler.load().blocks_free < scheduler.load().blocks_total, "the next step still writes to its blocks"
    scheduler.fail(InternalError("the step failed"), 0.0)
    assert scheduler.load().blocks_free == scheduler.load().blocks_total


@pytest.mark.parametrize(
    "span", [PoolSpan(0, 0), PoolSpan(3, 9), PoolSpan(-1, 2), PoolSpan(0, 2, (1,)), PoolSpan(0, 1, (10_000,))]
)
async def test_a_span_outside_of_the_prompt_is_refused(built: BuiltRunner, span: PoolSpan) -> None:
    async with running(built) as (engine, _):
        with pytest.raises(InvalidRequest):
            engine.submit(pooling("wrong", prompt_of(5), span))


def test_a_row_of_one_token_runs_outside_of_graphs(llama: Llama, built: BuiltRunner) -> None:
    runner = runner_of(built, graphs=GraphSettings(max_requests=4, max_context_tokens=64))
    runner.prepare()
    prompt = prompt_of(3)
    for place in range(len(prompt)):
        row = BatchRow("a", int_array(prompt[place : place + 1]), place, int_array([1]), None)
        launched = runner.launch(Batch(place + 1, (row,), pools=((0, PoolRow(0, 1)),)))
        launched.wait()
        assert_right(launched.pools[0], PoolSpan(place, place + 1), prompt, llama[1])


async def test_prompts_in_graphs_buffers_pool_alike(llama: Llama, built: BuiltRunner) -> None:
    runner = runner_of(built, graphs=GraphSettings(max_requests=4, max_context_tokens=64, max_tokens=64))
    runner.prepare()
    prompts = (prompt_of(1, seed=1), prompt_of(9, seed=2), prompt_of(20, seed=3))
    rows = tuple(
        BatchRow(
            str(place),
            int_array(prompt),
            0,
            int_array(list(range(place * 8, place * 8 + 8)))[: -(-len(prompt) // 4)],
            None,
        )
        for place, prompt in enumerate(prompts)
    )
    pools = tuple((place, PoolRow(0, len(prompt))) for place, prompt in enumerate(prompts))
    launched = runner.launch(Batch(1, rows, pools=pools))
    launched.wait()
    assert runner.launches["prompt_graph"] > 0
    for place, prompt in enumerate(prompts):
        assert_right((launched.pools[place] / len(prompt)).astype(np.float32), mean(prompt), prompt, llama[1])
