"""A whole engine on a tiny model: its tokens equal transformers' tokens, through every event of a request."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import Cancelled, InternalError, InvalidRequest, Overloaded
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, TokenOutput
from baton.engine.build import BuiltRunner
from baton.engine.engine import Engine
from baton.engine.events import StepEvents
from baton.engine.request import Reservation
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import (
    BLOCK_SIZE,
    EventRecorder,
    build,
    greedy,
    prompt_of,
    request,
    running,
    transformers_greedy,
)

Llama = tuple[Path, Any]
LENGTHS = (1, 3, 4, 17, 30)


@pytest.mark.parametrize("max_batch_tokens", [256, 7])
async def test_batched_tokens_equal_transformers_whether_or_not_prompts_are_cut(
    llama: Llama, built: BuiltRunner, max_batch_tokens: int
) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(built, max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(9)))
        await events.finished(*prompts)
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(llama[1], prompt, 9)
        assert [token.index for token in events.tokens[name]] == list(range(9))
        assert events.reasons[name] is FinishReason.LENGTH


async def test_requests_that_join_a_running_batch_change_nothing(llama: Llama, built: BuiltRunner) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(built, max_batch_tokens=8) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(9)))
            await events.until(lambda name=name: len(events.ids(name)) >= 2)  # type: ignore[misc]
        await events.finished(*prompts)
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(llama[1], prompt, 9)


async def test_preempted_requests_give_the_same_tokens(llama: Llama) -> None:
    prompts = {name: prompt_of(9, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(llama[0], num_blocks=12), prefix_cache=False) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(20)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(llama[1], prompt, 20)
        assert [token.index for token in events.tokens[name]] == list(range(20))


async def test_a_prefix_hit_gives_the_same_tokens(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(16)
    longer = (*prompt, *prompt_of(5, seed=1))
    async with running(built) as (engine, events):
        for name, tokens in (("first", prompt), ("same", prompt), ("longer", longer)):
            engine.submit(request(name, tokens, greedy(6)))
            await events.finished(name)
    assert [events.started[name].cached_tokens for name in ("first", "same", "longer")] == [0, 12, 16]
    assert events.ids("first") == events.ids("same") == transformers_greedy(llama[1], prompt, 6)
    assert events.ids("longer") == transformers_greedy(llama[1], longer, 6)


async def test_a_continued_request_resumes_at_its_next_token(built: BuiltRunner) -> None:
    sampling = ResolvedSampling(
        max_tokens=12, seed=5, temperature=1.3, top_p=0.95, repetition_penalty=1.2, logprobs=2, ignore_eos=True
    )
    prompt = prompt_of(10)
    async with running(built, prefix_cache=False) as (engine, events):
        engine.submit(request("whole", prompt, sampling))
        await events.finished("whole")
        given = tuple(events.ids("whole")[:5])
        engine.submit(request("rest", prompt, sampling, output=given))
        await events.finished("rest")
    assert events.ids("rest") == events.ids("whole")[5:]
    for again, once in zip(events.tokens["rest"], events.tokens["whole"][5:], strict=True):
        assert again.index == once.index
        assert again.logprob == pytest.approx(once.logprob, abs=1e-4)


@pytest.mark.parametrize("min_tokens", [0, 12])
async def test_end_of_sequence_ends_a_request_but_not_before_min_tokens(
    llama: Llama, built: BuiltRunner, min_tokens: int
) -> None:
    (eos,) = built.config.eos_token_ids
    sampling = ResolvedSampling(max_tokens=20, min_tokens=min_tokens, temperature=0.0)
    prompts = {f"r{seed}": prompt_of(17, seed=seed) for seed in range(6)}
    async with running(built) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, sampling))
        await events.finished(*prompts)
    expected = {
        name: transformers_greedy(llama[1], prompt, 20, min_tokens=min_tokens, eos_token_id=eos)
        for name, prompt in prompts.items()
    }
    assert {name: events.ids(name) for name in prompts} == expected
    assert {name for name, reason in events.reasons.items() if reason is FinishReason.STOP} == {
        name for name, tokens in expected.items() if tokens[-1] == eos
    }
    assert FinishReason.STOP in events.reasons.values()


async def test_a_stop_token_ends_a_request_and_is_named(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(6)
    expected = transformers_greedy(llama[1], prompt, 8)
    stop = ResolvedSampling(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(expected[3],))
    async with running(built) as (engine, events):
        engine.submit(request("a", prompt, stop))
        await events.finished("a")
    assert events.ids("a") == expected[: expected.index(expected[3]) + 1]
    assert events.reasons["a"] is FinishReason.STOP
    (last,) = [sampled for step in events.steps for sampled in step.tokens if sampled.finish_reason]
    assert last.stop_reason == str(expected[3])


# ---- the hand-over


def copy_kv(built: BuiltRunner, source: tuple[int, ...], target: tuple[int, ...], start: int, stop: int) -> None:
    """Does the work of a transfer: copies KV of positions [start, stop) from one request's blocks to another's."""
    view = built.cache.view
    for position in range(start, stop):
        block, offset = divmod(position, BLOCK_SIZE)
        view[:, :, target[block], offset] = view[:, :, source[block], offset]


async def prefill(
    engine: Engine, events: EventRecorder, prompt: tuple[int, ...]
) -> tuple[tuple[int, ...], TokenOutput]:
    """The blocks and first token of a prefilled request "p", which keeps its blocks."""
    engine.submit(request("p", prompt, greedy(8), prefill_only=True))
    await events.until(lambda: "p" in events.tokens)
    return events.chunks["p"][-1].block_ids, events.tokens["p"][0]


async def test_an_admitted_request_decodes_from_kv_that_came_from_elsewhere(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(18)
    expected = transformers_greedy(llama[1], prompt, 8)
    async with running(built, prefix_cache=False, max_batch_tokens=5) as (engine, events):
        source, first = await prefill(engine, events, prompt)
        assert [(chunk.token_start, chunk.token_stop) for chunk in events.chunks["p"]] == [
            (0, 5), (5, 10), (10, 15), (15, 18)
        ]  # fmt: skip
        assert (first.token_id, first.index) == (expected[0], 0)
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        assert set(reservation.block_ids).isdisjoint(source)
        assert engine.load().blocks_leased == 10
        copy_kv(built, source, reservation.block_ids, 0, 18)
        await engine.abort("p")
        assert engine.admit("d", first) is None
        await events.finished("d")
    assert events.ids("d") == expected[1:]
    assert "d" not in events.started


async def test_only_tokens_that_the_prefix_cache_lacks_are_received(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(18)
    async with running(built) as (engine, events):
        engine.submit(request("before", prompt[:9], greedy(1)))
        await events.finished("before")
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        assert reservation.cached_tokens == 8
        source, first = await prefill(engine, events, prompt)
        assert source[2:] != reservation.block_ids[2 : len(source)]
        copy_kv(built, source, reservation.block_ids, 8, 18)
        engine.admit("d", first)
        await events.finished("d")
        await engine.abort("p")
    assert events.ids("d") == transformers_greedy(llama[1], prompt, 8)[1:]


async def test_a_reservation_whose_hand_over_failed_is_prefilled_here(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(18)
    expected = transformers_greedy(llama[1], prompt, 8)
    async with running(built) as (engine, events):
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        built.cache.view[:, :, list(reservation.block_ids)] = torch.nan  # half a transfer
        engine.prefill_here("d", tuple(expected[:2]))
        await events.finished("d")
    assert events.ids("d") == expected[2:]
    assert events.tokens["d"][0].index == 2


async def test_a_prompt_is_computed_in_two_parts_by_two_requests(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(30)
    async with running(built, prefix_cache=False, max_batch_tokens=7) as (engine, events):
        engine.submit(replace(request("p", prompt, greedy(8), prefill_only=True), stop_tokens=16))
        await events.until(lambda: any(chunk.token_stop == 16 for chunk in events.chunks.get("p", ())))
        reservation = engine.reserve(request("d", prompt, greedy(8)))
        built.cache.view[:, :, list(reservation.block_ids)] = torch.nan
        copy_kv(built, events.chunks["p"][-1].block_ids, reservation.block_ids, 0, 16)
        await engine.abort("p")
        engine.prefill_here("d", (), received_tokens=16)
        await events.finished("d")
    assert events.ids("d") == transformers_greedy(llama[1], prompt, 8)
    assert [chunk.token_start for chunk in events.chunks["d"]] == [16, 23]
    assert "p" not in events.tokens


async def test_a_request_that_is_late_while_it_waits_is_refused(built: BuiltRunner) -> None:
    now = [0.0]
    events = EventRecorder()
    async with Engine(built.runner, limits(), on_step=events, grammars=built.grammars, clock=lambda: now[0]) as engine:
        late = replace(request("a", prompt_of(9), greedy(2), prefill_only=True), due_s=1.0, refuse_late=True)
        engine.submit(late)
        now[0] = 2.0
        await events.finished("a")
        with pytest.raises(Overloaded):
            engine.submit(replace(late, request_id="b"))
        assert engine.load().refused_late == 2
    assert isinstance(events.errors["a"], Overloaded)


# ---- arrivals and aborts while steps run


async def test_reserve_and_submit_are_answered_while_a_step_runs(built: BuiltRunner) -> None:
    answers: list[Reservation] = []
    async with running(built) as (engine, events):
        engine.submit(request("a", prompt_of(40), greedy(30)))
        await events.until(lambda: len(events.ids("a")) >= 3)
        assert engine._scheduler._in_flight  # the next step began before the last one woke any waiter
        answers.append(engine.reserve(request("b", prompt_of(9, seed=1), greedy(3))))
        engine.submit(request("c", prompt_of(9, seed=2), greedy(3)))
        await engine.abort("b")
        await events.finished("a", "c")
    assert len(answers[0].block_ids) == 3


@pytest.mark.parametrize("tokens_before", [0, 1, 4])
async def test_abort_returns_when_the_blocks_are_free_and_no_event_follows(
    built: BuiltRunner, tokens_before: int
) -> None:
    async with running(built, max_batch_tokens=8) as (engine, events):
        engine.submit(request("stays", prompt_of(5, seed=1), greedy(24)))
        engine.submit(request("goes", prompt_of(20), greedy(200)))
        await events.until(lambda: len(events.ids("goes")) >= tokens_before)
        await asyncio.gather(engine.abort("goes"), engine.abort("goes"), engine.abort("unknown"))
        num_tokens = len(events.ids("goes"))
        assert engine.load().requests_running + engine.load().requests_waiting == 1
        await events.finished("stays")
        assert len(events.ids("goes")) == num_tokens
        assert "goes" not in events.reasons


async def test_held_and_reserved_requests_can_be_aborted(built: BuiltRunner) -> None:
    async with running(built) as (engine, events):
        await prefill(engine, events, prompt_of(9))
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


async def test_a_step_that_raises_fails_its_requests_and_the_engine_continues(
    llama: Llama, built: BuiltRunner, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(6)
    norm = built.runner.model.model.norm
    weight = norm.weight
    async with running(built) as (engine, events):
        norm.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)  # does not fit: every forward raises
        engine.submit(request("a", prompt, greedy(4)))
        await events.finished("a")
        norm.weight = weight
        engine.submit(request("b", prompt, greedy(4)))
        await events.finished("b")
    assert isinstance(events.errors["a"], InternalError)
    assert isinstance(events.errors["a"].__cause__, RuntimeError)
    assert "an engine step failed" in caplog.text
    assert events.ids("b") == transformers_greedy(llama[1], prompt, 4)


async def test_remaining_requests_fail_when_the_engine_closes(built: BuiltRunner) -> None:
    events = EventRecorder()
    async with Engine(built.runner, limits(), on_step=events, grammars=built.grammars) as engine:
        engine.submit(request("a", prompt_of(6), greedy(400)))
        engine.reserve(request("b", prompt_of(6), greedy(4)))
        await events.until(lambda: len(events.ids("a")) >= 2)
    assert {name: type(error) for name, error in events.errors.items()} == {"a": Cancelled, "b": Cancelled}
    assert engine.load().blocks_free == engine.load().blocks_total
    with pytest.raises(Cancelled):
        engine.submit(request("c", prompt_of(6), greedy(4)))


async def test_a_callback_that_raises_ends_the_engine_and_all_requests_fail(
    built: BuiltRunner, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventRecorder()

    def first_raises(events: EventRecorder) -> Callable[[StepEvents], None]:
        def on_step(step: StepEvents) -> None:
            if step.tokens:
                raise LookupError("no such name")
            events(step)

        return on_step

    async with Engine(built.runner, limits(), on_step=first_raises(events), grammars=built.grammars) as engine:
        engine.submit(request("a", prompt_of(6), greedy(40)))
        engine.submit(request("b", prompt_of(6), greedy(40)))
        await events.finished("a", "b")
        with pytest.raises(InternalError, match="no such name"):
            engine.submit(request("c", prompt_of(6), greedy(4)))
    assert engine.load().blocks_free == engine.load().blocks_total
    assert "the engine's loop failed" in caplog.text
