"""Conversations with a model with recurrent states: where a turn begins, and what a hand-over of it still needs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.events import ChunkComputed
from baton.engine.request import Reservation
from baton.kvcache.cache import PagedKVCache
from baton.settings.node_config import NodeSettings
from tests.unit.engine.tiny import greedy, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

BLOCK_SIZE = 4
MODELS = ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "nemotron-h"))]
Model = tuple[Path, Any]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_tiny(request.param, directory)


def build(model: Model, *, num_blocks: int = 256, state_slots: int = 0) -> BuiltRunner:
    built = build_runner(
        NodeSettings(
            model=model[0],
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            device="cpu",
            dtype="float32",
            state_slots=state_slots,
            threads=1,
        )
    )
    _state_of(built).storage.fill_(float("nan"))  # a state that is read before it is written shows
    return built


@pytest.fixture
def built(model: Model) -> BuiltRunner:
    return build(model)


@torch.inference_mode()
def best(model: Model, prompt: Sequence[int], ours: Sequence[int]) -> list[int]:
    """transformers' best token after the prompt and after each of our tokens but the last."""
    tokens = torch.tensor([[*prompt, *ours[:-1]]])
    ids: list[int] = model[1](tokens, use_cache=False).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return ids


@pytest.mark.parametrize("state_slots", [0, 4])
async def test_a_turn_begins_at_the_last_multiple_of_64_tokens_of_the_turn_before(
    model: Model, state_slots: int
) -> None:
    """Also when few states can be kept: of an answer's states only the last one stays."""
    prompt = prompt_of(100)
    async with running(build(model, state_slots=state_slots)) as (engine, events):
        for turn, expected in enumerate((0, 192, 320)):
            name = str(turn)
            engine.submit(request(name, prompt, greedy(100)))
            await events.finished(name)
            assert events.ids(name) == best(model, prompt, events.ids(name))
            assert events.started[name].cached_tokens == expected
            prompt = (*prompt, *events.ids(name), *prompt_of(40, seed=turn + 1))
        assert engine.leaked_blocks(lambda _: True) == 0


@pytest.mark.parametrize(("length", "reused"), [(64, 0), (65, 64), (66, 64), (128, 64), (200, 192)])
async def test_a_prompt_that_comes_again_is_reused_up_to_its_last_multiple_of_64_tokens(
    model: Model, built: BuiltRunner, length: int, reused: int
) -> None:
    """At least one token is computed. The first prompt is not cut for the state."""
    prompt = prompt_of(length)
    async with running(built) as (engine, events):
        for name in ("first", "second", "third"):
            engine.submit(request(name, prompt, greedy(3)))
            await events.finished(name)
        assert engine.leaked_blocks(lambda _: True) == 0
    names = ("first", "second", "third")
    assert [events.started[name].cached_tokens for name in names] == [0, reused, reused]
    assert [len(events.chunks[name]) for name in names] == [1, 1, 1]
    assert {tuple(events.ids(name)) for name in names} == {tuple(best(model, prompt, events.ids("third")))}


async def test_a_preempted_request_continues_at_its_last_multiple_of_64_tokens(model: Model) -> None:
    prompts = {name: prompt_of(100, seed=seed) for seed, name in enumerate("ab")}
    async with running(build(model, num_blocks=86)) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(80)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert events.ids(name) == best(model, prompt, events.ids(name))
    again = [chunk.token_start for chunks in events.chunks.values() for chunk in chunks[1:]]
    assert again
    assert min(again) >= 128


async def test_a_hand_over_of_a_turn_needs_its_new_blocks_and_the_state(model: Model, built: BuiltRunner) -> None:
    """Also where the decode node has kept no state at all, because it has no slot for one."""
    other, prompt = build(model, state_slots=1), prompt_of(90)
    async with running(built) as (prefill, sent), running(other) as (decode, events):
        for turn, expected in enumerate((0, 108, 160)):
            name = str(turn)
            prefill.submit(request(name, prompt, greedy(20), prefill_only=True))
            await sent.until(partial(sent.tokens.__contains__, name))
            reserved = decode.reserve(request(name, prompt, greedy(20)))
            assert (reserved.cached_tokens, reserved.skipped_tokens) == (expected, 0)
            _send(built, sent.chunks[name][-1], other, reserved, stop=len(prompt))
            first = sent.ids(name)[0]
            assert decode.admit(name, TokenOutput(first, 0)) is None
            await events.finished(name)
            await prefill.abort(name)
            output = (first, *events.ids(name))
            assert [*output] == best(model, prompt, output)
            prompt = (*prompt, *output, *prompt_of(32, seed=turn + 1))
        assert prefill.leaked_blocks(lambda _: True) == decode.leaked_blocks(lambda _: True) == 0


async def test_a_turn_whose_hand_over_fails_is_computed_from_the_last_kept_state_on(
    model: Model, built: BuiltRunner
) -> None:
    """Not from the cached blocks on, and not into them: another request that reads them goes on."""
    prompt = prompt_of(100)
    async with running(built) as (engine, events):
        engine.submit(request("first", prompt, greedy(50)))
        await events.finished("first")
        assert len(engine.prefix_cache.cached_keys()) * BLOCK_SIZE == 128, "gateways know where a prompt would begin"
        turn = (*prompt, *events.ids("first"), *prompt_of(9, seed=1))
        reader = engine.reserve(request("reader", turn, greedy(5)))
        reserved = engine.reserve(request("turn", turn, greedy(20)))
        assert (reserved.cached_tokens, reserved.skipped_tokens) == (148, 128)
        assert reserved.block_ids[:37] == reader.block_ids[:37]
        _state_of(built).view[:, :, reserved.state_slot] = float("nan")  # what a lost transfer left
        engine.prefill_here("turn", ())
        await events.finished("turn")
        assert events.started["turn"].cached_tokens == 128
        assert not set(events.chunks["turn"][0].block_ids[32:]) & set(reader.block_ids)
        await engine.abort("reader")
        assert engine.leaked_blocks(lambda _: True) == 0
    assert events.ids("turn") == best(model, turn, events.ids("turn"))


async def test_a_failed_turn_without_free_blocks_waits_for_some(model: Model) -> None:
    built, prompt = build(model, num_blocks=82), prompt_of(100)
    async with running(built) as (engine, events):
        engine.submit(request("first", prompt, greedy(50)))
        await events.finished("first")
        turn = (*prompt, *events.ids("first"), *prompt_of(9, seed=1))
        for name in ("reader", "turn"):
            engine.reserve(request(name, turn, greedy(5)))
        engine.reserve(request("filler", prompt_of(4 * engine.load().blocks_free - 1, seed=2), greedy(1)))
        assert engine.load().blocks_free == 0
        engine.prefill_here("turn", ())
        assert engine.load().preemptions == 1
        await engine.abort("filler")
        await events.finished("turn")
        await engine.abort("reader")
    assert events.ids("turn") == best(model, turn, events.ids("turn"))


async def test_a_first_part_of_a_turn_is_reused_before_its_last_block(model: Model, built: BuiltRunner) -> None:
    """The decode node has the KV of the whole first part, but not the state after it: that comes with a block."""
    prompt, other = prompt_of(100), build(model, state_slots=1)
    async with running(built) as (prefill, sent), running(other) as (decode, events):
        decode.submit(request("before", prompt, greedy(2)))
        await events.finished("before")
        longer = (*prompt, *prompt_of(30, seed=1))
        prefill.submit(replace(request("p", longer, greedy(12), prefill_only=True), stop_tokens=80))
        await sent.until(lambda: "p" in sent.chunks and sent.chunks["p"][-1].token_stop == 80)
        reserved = decode.reserve(request("d", longer, greedy(12)), arriving_tokens=80)
        assert (reserved.cached_tokens, reserved.skipped_tokens) == (76, 0)
        _send(built, sent.chunks["p"][-1], other, reserved, stop=80)
        decode.prefill_here("d", (), received_tokens=80)
        await events.finished("d")
        await prefill.abort("p")
        assert events.chunks["d"][0].token_start == 80
        assert prefill.leaked_blocks(lambda _: True) == decode.leaked_blocks(lambda _: True) == 0
    assert events.ids("d") == best(model, longer, events.ids("d"))


def _state_of(built: BuiltRunner) -> PagedKVCache:
    assert built.cache.state is not None
    return built.cache.state


def _send(source: BuiltRunner, chunk: ChunkComputed, target: BuiltRunner, reserved: Reservation, *, stop: int) -> None:
    """What a transfer sends: the KV from the cached tokens on, and the state."""
    for index in range(reserved.cached_tokens // BLOCK_SIZE, -(-stop // BLOCK_SIZE)):
        target.cache.view[:, :, reserved.block_ids[index]] = source.cache.view[:, :, chunk.block_ids[index]]
    states = _state_of(source), _state_of(target)
    states[1].view[:, :, reserved.state_slot] = states[0].view[:, :, chunk.state_slot]
