"""A whole engine on a model with recurrent states: tokens equal transformers', also after reuse or a hand-over."""

from pathlib import Path
from typing import Any

import pytest

from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import greedy, prompt_of, request, running, transformers_greedy
from tests.unit.models.tiny import save_tiny

Lfm2 = tuple[Path, Any]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Lfm2:
    directory = tmp_path_factory.mktemp("lfm2")
    return directory, save_tiny("lfm2", directory)


def build(directory: Path, *, num_blocks: int = 256, state_slots: int = 0) -> BuiltRunner:
    settings = NodeSettings(
        model=directory, num_blocks=num_blocks, block_size=4, device="cpu", state_slots=state_slots, threads=1
    )
    return build_runner(settings)


@pytest.fixture
def built(lfm2: Lfm2) -> BuiltRunner:
    built = build(lfm2[0])
    assert built.cache.state is not None
    built.cache.state.storage.fill_(float("nan"))  # a state that is read before it is written shows
    return built


async def test_tokens_equal_transformers_whether_or_not_prompts_are_cut(lfm2: Lfm2, built: BuiltRunner) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (1, 2, 3, 17, 150)}
    async with running(built, max_batch_tokens=70) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(7)))
        await events.finished(*prompts)
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(lfm2[1], prompt, 7)
        assert all(chunk.state_slot >= 0 for chunk in events.chunks[name])


async def test_a_prefix_is_reused_up_to_a_snapshot(lfm2: Lfm2, built: BuiltRunner) -> None:
    prompt = prompt_of(300)
    longer = (*prompt, *prompt_of(40, seed=1))
    departing = (*prompt[:270], *prompt_of(20, seed=2))
    again = (*prompt[:270], *prompt_of(25, seed=3))
    names = {"first": prompt, "same": prompt, "longer": longer, "departing": departing, "again": again}
    async with running(built) as (engine, events):
        for name, tokens in names.items():
            engine.submit(request(name, tokens, greedy(5)))
            await events.finished(name)
        assert engine.leaked_blocks(lambda _: True) == 0
    assert [events.started[name].cached_tokens for name in names] == [0, 256, 256, 256, 256]
    for name, tokens in names.items():
        assert events.ids(name) == transformers_greedy(lfm2[1], tokens, 5)


async def test_a_shared_prefix_is_reused_from_its_third_prompt_on(lfm2: Lfm2, built: BuiltRunner) -> None:
    """The second one leaves the state where it departs from the first."""
    shared = prompt_of(350)
    prompts = {str(seed): (*shared, *prompt_of(100, seed=seed)) for seed in (1, 2, 3)}
    async with running(built) as (engine, events):
        for name, tokens in prompts.items():
            engine.submit(request(name, tokens, greedy(3)))
            await events.finished(name)
    assert [events.started[name].cached_tokens for name in prompts] == [0, 256, 320]
    assert [len(events.chunks[name]) for name in prompts] == [2, 1, 1]
    for name, tokens in prompts.items():
        assert events.ids(name) == transformers_greedy(lfm2[1], tokens, 3)


async def test_preempted_requests_give_the_same_tokens(lfm2: Lfm2) -> None:
    prompts = {name: prompt_of(9, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(lfm2[0], num_blocks=12)) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(20)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
        assert engine.leaked_blocks(lambda _: True) == 0
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(lfm2[1], prompt, 20)


async def test_more_requests_than_slots_wait_for_each_other(lfm2: Lfm2) -> None:
    prompts = {f"r{seed}": prompt_of(5 + 13 * seed, seed=seed) for seed in range(9)}
    async with running(build(lfm2[0], state_slots=2)) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(6)))
        await events.until(lambda: len(events.ids("r0")) > 1)
        await engine.abort("r8")
        await events.finished(*(name for name in prompts if name != "r8"))
        assert engine.load().requests_waiting == 0
    for name, prompt in prompts.items():
        if name != "r8":
            assert events.ids(name) == transformers_greedy(lfm2[1], prompt, 6)


async def test_evicted_snapshots_cost_only_time(lfm2: Lfm2) -> None:
    prompts = {f"r{seed}": prompt_of(280, seed=seed % 3) for seed in range(6)}
    async with running(build(lfm2[0], num_blocks=400, state_slots=3)) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(3)))
            await events.finished(name)
    expected = {seed: transformers_greedy(lfm2[1], prompt_of(280, seed=seed), 3) for seed in range(3)}
    for seed in range(6):
        assert events.ids(f"r{seed}") == expected[seed % 3]


async def test_a_request_decodes_after_its_kv_and_state_were_handed_over(lfm2: Lfm2, built: BuiltRunner) -> None:
    """As a prefill and a decode node do it, with copies by hand in place of a transfer."""
    prompt, other = prompt_of(75), build(lfm2[0])
    async with running(built) as (prefill, sent), running(other) as (decode, events):
        prefill.submit(request("p", prompt, greedy(8), prefill_only=True))
        await sent.until(lambda: bool(sent.ids("p")))
        chunk = sent.chunks["p"][-1]
        decode.submit(request("before", prompt_of(30, seed=4), greedy(3)))
        await events.finished("before")
        reserved = decode.reserve(request("d", prompt, greedy(8)))
        assert built.cache.state is not None
        assert other.cache.state is not None
        for source, target in zip(chunk.block_ids, reserved.block_ids, strict=False):
            other.cache.view[:, :, target] = built.cache.view[:, :, source]
        other.cache.state.view[:, :, reserved.state_slot] = built.cache.state.view[:, :, chunk.state_slot]
        first = sent.ids("p")[0]
        assert decode.admit("d", TokenOutput(first, 0)) is None
        await events.finished("d")
        await prefill.abort("p")
        assert prefill.leaked_blocks(lambda _: True) == decode.leaked_blocks(lambda _: True) == 0
    assert [first, *events.ids("d")] == transformers_greedy(lfm2[1], prompt, 8)


async def test_a_reserved_request_whose_kv_never_came_computes_it_here(lfm2: Lfm2, built: BuiltRunner) -> None:
    prompt = prompt_of(300)
    async with running(built) as (engine, events):
        engine.submit(request("first", prompt, greedy(2)))
        await events.finished("first")
        reserved = engine.reserve(request("again", prompt, greedy(6)))
        assert (reserved.cached_tokens, reserved.skipped_tokens) == (296, 256)
        assert built.cache.state is not None
        built.cache.state.view[:, :, reserved.state_slot] = float("nan")  # what a lost transfer left
        engine.prefill_here("again", ())
        await events.finished("again")
    assert events.ids("again") == transformers_greedy(lfm2[1], prompt, 6)


@pytest.mark.parametrize("max_tokens", [0, 256])
def test_padded_steps_equal_steps_outside_of_graphs(built: BuiltRunner, max_tokens: int) -> None:
    graphs = GraphSettings(max_requests=8, max_context_tokens=128, max_tokens=max_tokens)
    ids = []
    for settings in (None, graphs):
        runner = runner_of(built, graphs=settings)
        assert runner._cache.state is not None
        runner._cache.state.storage.fill_(float("nan"))
        runner.prepare()
        driver = Driver(runner, ahead=settings is not None)
        for name, length in (("a", 9), ("b", 21), ("c", 30)):
            driver.add(name, prompt_of(length, seed=length))
        driver.step("a", "b")
        driver.step("a", "b", "c", chunk=7)
        for _ in range(5):
            driver.step("a", "b", "c", chunk=11)
        driver.step("c")
        driver.step("a", "c")
        ids.append({name: driver.ids(name) for name in "abc"})
    assert ids[0] == ids[1]
