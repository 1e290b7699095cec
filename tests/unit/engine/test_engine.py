"""A whole engine on a tiny model: its tokens are transformers' tokens, whatever happens to a request on its way."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import Cancelled, InternalError, InvalidRequest, Overloaded
from baton.types import FinishReason, SamplingParams, TokenOutput
from engine.build import Built
from engine.engine import Engine
from engine.events import StepEvents
from engine.request import Reservation
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import BLOCK_SIZE, Listener, build, greedy, prompt_of, request, running, transformers_greedy

Llama = tuple[Path, Any]
LENGTHS = (1, 3, 4, 17, 30)


@pytest.mark.parametrize("max_batch_tokens", [256, 7])
async def test_batched_tokens_equal_transformers_whether_or_not_prompts_are_cut(
    llama: Llama, built: Built, max_batch_tokens: int
) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(built, max_batch_tokens=max_batch_tokens) as (engine, heard):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(9)))
        await heard.finished(*prompts)
    for name, prompt in prompts.items():
        assert heard.ids(name) == transformers_greedy(llama[1], prompt, 9)
        assert [token.index for token in heard.tokens[name]] == list(range(9))
        assert heard.reasons[name] is FinishReason.LENGTH


async def test_requests_that_join_a_running_batch_change_nothing(llama: Llama, built: Built) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(built, max_batch_tokens=8) as (engine, heard):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(9)))
            await heard.until(lambda name=name: len(heard.ids(name)) >= 2)  # type: ignore[misc]
        await heard.finished(*prompts)
    for name, prompt in prompts.items():
        assert heard.ids(name) == transformers_greedy(llama[1], prompt, 9)


async def test_requests_that_were_sent_back_give_the_same_tokens(llama: Llama) -> None:
    prompts = {name: prompt_of(9, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(llama[0], num_blocks=12), prefix_cache=False) as (engine, heard):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(20)))
        await heard.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert heard.ids(name) == transformers_greedy(llama[1], prompt, 20)
        assert [token.index for token in heard.tokens[name]] == list(range(20))


async def test_a_prefix_hit_gives_the_same_tokens(llama: Llama, built: Built) -> None:
    prompt = prompt_of(16)
    longer = (*prompt, *prompt_of(5, seed=1))
    async with running(built) as (engine, heard):
        for name, tokens in (("first", prompt), ("same", prompt), ("longer", longer)):
            engine.submit(request(name, tokens, greedy(6)))
            await heard.finished(name)
    assert [heard.started[name].cached_tokens for name in ("first", "same", "longer")] == [0, 12, 16]
    assert heard.ids("first") == heard.ids("same") == transformers_greedy(llama[1], prompt, 6)
    assert heard.ids("longer") == transformers_greedy(llama[1], longer, 6)


async def test_a_continued_request_goes_on_where_it_was(built: Built) -> None:
    sampling = SamplingParams(
        max_tokens=12, seed=5, temperature=1.3, top_p=0.95, repetition_penalty=1.2, logprobs=2, ignore_eos=True
    )
    prompt = prompt_of(10)
    async with running(built, prefix_cache=False) as (engine, heard):
        engine.submit(request("whole", prompt, sampling))
        await heard.finished("whole")
        given = tuple(heard.ids("whole")[:5])
        engine.submit(request("rest", prompt, sampling, output=given))
        await heard.finished("rest")
    assert heard.ids("rest") == heard.ids("whole")[5:]
    for again, once in zip(heard.tokens["rest"], heard.tokens["whole"][5:], strict=True):
        assert again.index == once.index
        assert again.logprob == pytest.approx(once.logprob, abs=1e-4)


async def test_a_request_without_a_seed_gets_one(built: Built) -> None:
    async with running(built) as (engine, heard):
        for name in ("a", "b"):
            engine.submit(request(name, prompt_of(4), SamplingParams(max_tokens=12, temperature=3.0, ignore_eos=True)))
        await heard.finished("a", "b")
    assert heard.ids("a") != heard.ids("b")


@pytest.mark.parametrize("min_tokens", [0, 12])
async def test_end_of_sequence_ends_a_request_but_not_before_min_tokens(
    llama: Llama, built: Built, min_tokens: int
) -> None:
    (eos,) = built.config.eos_token_ids
    sampling = SamplingParams(max_tokens=20, min_tokens=min_tokens, temperature=0.0)
    prompts = {f"r{seed}": prompt_of(17, seed=seed) for seed in range(6)}
    async with running(built) as (engine, heard):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, sampling))
        await heard.finished(*prompts)
    expected = {
        name: transformers_greedy(llama[1], prompt, 20, min_tokens=min_tokens, eos_token_id=eos)
        for name, prompt in prompts.items()
    }
    assert {name: heard.ids(name) for name in prompts} == expected
    assert {name for name, reason in heard.reasons.items() if reason is FinishReason.STOP} == {
        name for name, tokens in expected.items() if tokens[-1] == eos
    }
    assert FinishReason.STOP in heard.reasons.values()


async def test_a_stop_token_ends_a_request_and_is_named(llama: Llama, built: Built) -> None:
    prompt = prompt_of(6)
    expected = transformers_greedy(llama[1], prompt, 8)
    stop = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(expected[3],))
    async with running(built) as (engine, heard):
        engine.submit(request("a", prompt, stop))
        await heard.finished("a")
    assert heard.ids("a") == expected[: expected.index(expected[3]) + 1]
    assert heard.reasons["a"] is FinishReason.STOP
    (last,) = [sampled for events in heard.steps for sampled in events.tokens if sampled.finish_reason]
    assert last.stop_reason == str(expected[3])


# ---- the hand-over


def copy_kv(built: Built, source: tuple[int, ...], target: tuple[int, ...], start: int, stop: int) -> None:
    """What a transfer does: KV of positions [start, stop) goes from one request's blocks to another's."""
    view = built.cache.view
    for position in range(start, stop):
        block, offset = divmod(position, BLOCK_SIZE)
        view[:, :, target[block], offset] = view[:, :, source[block], offset]


async def prefill(engine: Engine, heard: Listener, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], TokenOutput]:
    """Blocks and first token of a prefilled request named "p", which holds them."""
    engine.submit(request("p", prompt, greedy(8), prefill_only=True))
    await heard.until(lambda: "p" in heard.tokens)
    return heard.chunks["p"][-1].block_ids, heard.tokens["p"][0]


async def test_an_admitted_request_decodes_from_kv_that_came_from_elsewhere(llama: Llama, built: Built) -> None:
    prompt = prompt_of(18)
    expected = transformers_greedy(llama[1], prompt, 8)
    async with running(built, prefix_cache=False, max_batch_tokens=5) as (engine, heard):
        source, first = await prefill(engine, heard, prompt)
        assert [(chunk.token_start, chunk.token_stop) for chunk in heard.chunks["p"]] == [
            (0, 5), (5, 10), (10, 15), (15, 18)
        ]  # fmt: skip
        assert (first.token_id, first.index) == (expected[0], 0)
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        assert set(reservation.block_ids).isdisjoint(source)
        assert engine.load().blocks_leased == 10
        copy_kv(built, source, reservation.block_ids, 0, 18)
        await engine.abort("p")
        assert engine.admit("d", first) is None
        await heard.finished("d")
    assert heard.ids("d") == expected[1:]
    assert "d" not in heard.started


async def test_only_what_the_prefix_cache_lacks_has_to_come(llama: Llama, built: Built) -> None:
    prompt = prompt_of(18)
    async with running(built) as (engine, heard):
        engine.submit(request("before", prompt[:9], greedy(1)))
        await heard.finished("before")
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        assert reservation.cached_tokens == 8
        source, first = await prefill(engine, heard, prompt)
        assert source[2:] != reservation.block_ids[2 : len(source)]
        copy_kv(built, source, reservation.block_ids, 8, 18)
        engine.admit("d", first)
        await heard.finished("d")
        await engine.abort("p")
    assert heard.ids("d") == transformers_greedy(llama[1], prompt, 8)[1:]


async def test_a_reservation_whose_hand_over_failed_is_prefilled_here(llama: Llama, built: Built) -> None:
    prompt = prompt_of(18)
    expected = transformers_greedy(llama[1], prompt, 8)
    async with running(built) as (engine, heard):
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        built.cache.view[:, :, list(reservation.block_ids)] = torch.nan  # half a transfer
        engine.prefill_here("d", tuple(expected[:2]))
        await heard.finished("d")
    assert heard.ids("d") == expected[2:]
    assert heard.tokens["d"][0].index == 2


# ---- coming and going while steps run


async def test_reserve_and_submit_are_answered_while_a_step_runs(built: Built) -> None:
    answers: list[Reservation] = []
    async with running(built) as (engine, heard):
        engine.submit(request("a", prompt_of(40), greedy(30)))
        await heard.until(lambda: len(heard.ids("a")) >= 3)
        assert engine._scheduler._in_flight  # the next step began before anybody was woken by the last one
        answers.append(engine.reserve(request("b", prompt_of(9, seed=1), greedy(3))))
        engine.submit(request("c", prompt_of(9, seed=2), greedy(3)))
        await engine.abort("b")
        await heard.finished("a", "c")
    assert len(answers[0].block_ids) == 3


@pytest.mark.parametrize("tokens_before", [0, 1, 4])
async def test_abort_returns_when_the_blocks_are_free_and_nothing_more_is_told(
    built: Built, tokens_before: int
) -> None:
    async with running(built, max_batch_tokens=8) as (engine, heard):
        engine.submit(request("stays", prompt_of(5, seed=1), greedy(24)))
        engine.submit(request("goes", prompt_of(20), greedy(200)))
        await heard.until(lambda: len(heard.ids("goes")) >= tokens_before)
        await asyncio.gather(engine.abort("goes"), engine.abort("goes"), engine.abort("unknown"))
        told = len(heard.ids("goes"))
        assert engine.load().requests_running + engine.load().requests_waiting == 1
        await heard.finished("stays")
        assert len(heard.ids("goes")) == told
        assert "goes" not in heard.reasons


async def test_abort_of_a_held_and_of_a_reserved_request(built: Built) -> None:
    async with running(built) as (engine, heard):
        await prefill(engine, heard, prompt_of(9))
        engine.reserve(request("d", prompt_of(9, seed=1), greedy(2)))
        await engine.abort("p")
        await engine.abort("d")
        await engine.abort("p")


async def test_bad_and_excess_requests_are_refused_at_once(llama: Llama) -> None:
    async with running(build(llama[0], num_blocks=4), max_waiting=0) as (engine, _):
        assert engine.max_context_tokens == 16
        with pytest.raises(InvalidRequest, match="at most 15 tokens"):
            engine.submit(request("a", prompt_of(16), greedy(2)))
        engine.reserve(request("b", prompt_of(9), greedy(2)))
        with pytest.raises(Overloaded):
            engine.reserve(request("c", prompt_of(9), greedy(2)))
        with pytest.raises(Overloaded):
            engine.submit(request("c", prompt_of(9), greedy(2)))
        await engine.abort("b")


# ---- failures


async def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    llama: Llama, built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(6)
    norm = built.runner.model.model.norm
    weight = norm.weight
    async with running(built) as (engine, heard):
        norm.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)  # does not fit: every forward raises
        engine.submit(request("a", prompt, greedy(4)))
        await heard.finished("a")
        norm.weight = weight
        engine.submit(request("b", prompt, greedy(4)))
        await heard.finished("b")
    assert isinstance(heard.errors["a"], InternalError)
    assert isinstance(heard.errors["a"].__cause__, RuntimeError)
    assert "an engine step failed" in caplog.text
    assert heard.ids("b") == transformers_greedy(llama[1], prompt, 4)


async def test_requests_that_are_left_when_the_engine_closes_are_told(built: Built) -> None:
    heard = Listener()
    async with Engine(built.runner, limits(), on_step=heard) as engine:
        engine.submit(request("a", prompt_of(6), greedy(400)))
        engine.reserve(request("b", prompt_of(6), greedy(4)))
        await heard.until(lambda: len(heard.ids("a")) >= 2)
    assert {name: type(error) for name, error in heard.errors.items()} == {"a": Cancelled, "b": Cancelled}
    assert engine.load().blocks_free == engine.load().blocks_total
    with pytest.raises(Cancelled):
        engine.submit(request("c", prompt_of(6), greedy(4)))


async def test_a_callback_that_raises_ends_the_engine_and_all_requests_are_told(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Listener()

    def first_raises(heard: Listener) -> Callable[[StepEvents], None]:
        def on_step(events: StepEvents) -> None:
            if events.tokens:
                raise LookupError("nobody of that name")
            heard(events)

        return on_step

    async with Engine(built.runner, limits(), on_step=first_raises(heard)) as engine:
        engine.submit(request("a", prompt_of(6), greedy(40)))
        engine.submit(request("b", prompt_of(6), greedy(40)))
        await heard.finished("a", "b")
        with pytest.raises(InternalError, match="nobody of that name"):
            engine.submit(request("c", prompt_of(6), greedy(4)))
    assert engine.load().blocks_free == engine.load().blocks_total
    assert "the engine's loop ended" in caplog.text
