"""The engine one step ahead of its device: the same tokens, and the device never waits for the event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, TokenOutput
from baton.engine.batch import Batch, RowResult
from baton.engine.build import BuiltRunner
from baton.engine.device.launched_step import LaunchedStep
from baton.engine.device.layer_marks import OnMark
from baton.engine.engine import Engine
from tests.unit.engine.ahead import one_step_at_a_time, varied_requests
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
Launch = Callable[[Batch, OnMark], LaunchedStep]


class Watched:
    """A runner that records every batch, and may call a hook before the real launch."""

    def __init__(self, built: BuiltRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        self.launched = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.before: Callable[[Batch], None] = lambda batch: None
        self._launch: Launch = built.runner.launch
        monkeypatch.setattr(built.runner, "launch", self.launch)

    def launch(self, batch: Batch, on_mark: OnMark) -> LaunchedStep:
        self.batches.append(batch)
        self.threads.add(threading.current_thread().name)
        self.before(batch)
        self.launched.release()
        return self._launch(batch, on_mark)

    @property
    def rows_ahead(self) -> int:
        return sum(row.token_source is not None for batch in self.batches for row in batch.rows)


async def test_tokens_are_those_of_one_step_at_a_time(built: BuiltRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(varied_requests())
    expected = one_step_at_a_time(built, requests)
    watched = Watched(built, monkeypatch)
    async with running(built, max_batch_tokens=24, prefix_cache=False) as (engine, events):
        for one in requests:
            engine.submit(one)
        await events.finished(*expected)
    assert watched.rows_ahead > 40
    assert watched.threads == {"device"}
    for name, tokens in expected.items():
        assert [(token.token_id, token.index) for token in events.tokens[name]] == [
            (token.token_id, token.index) for token in tokens
        ]
        for again, once in zip(events.tokens[name], tokens, strict=True):
            assert again.logprob == pytest.approx(once.logprob, abs=1e-4)
    assert FinishReason.STOP in events.reasons.values()


async def test_a_step_is_launched_while_the_previous_one_runs(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step ends before the next one is launched, so an engine that waits for its end would hang."""
    watched = Watched(built, monkeypatch)
    waiting: deque[threading.Event] = deque()
    late: list[int] = []

    def wait(step: LaunchedStep) -> list[RowResult]:
        if len(watched.batches) < 12 and not waiting.popleft().wait(timeout=60):
            late.append(len(watched.batches))
        return real_wait(step)

    def release_the_previous_step(batch: Batch) -> None:
        if batch.step > 1:
            launched_next[batch.step - 2].set()

    launched_next = [threading.Event() for _ in range(12)]
    waiting.extend(launched_next)
    real_wait = LaunchedStep.wait
    monkeypatch.setattr(LaunchedStep, "wait", wait)
    watched.before = release_the_previous_step
    async with running(built) as (engine, events):
        engine.submit(request("a", prompt_of(5), greedy(12)))
        await events.finished("a")
    assert late == []
    assert [len(events.ids("a")), len(watched.batches)] == [12, 12]


async def test_an_end_token_in_the_middle_of_others_leaves_a_void_row(
    llama: Llama, built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(built, monkeypatch)
    prompt = prompt_of(6)
    expected = transformers_greedy(llama[1], prompt, 12)
    end = max(expected, key=expected.index)  # the one that comes first the latest
    ends_at = expected.index(end) + 1
    stops = ResolvedSampling(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(end,))
    other = prompt_of(9, seed=1)
    async with running(built) as (engine, events):
        engine.submit(request("stays", other, greedy(20)))
        engine.submit(request("ends", prompt, stops))
        await events.finished("ends", "stays")
    assert events.ids("ends") == expected[:ends_at]
    assert events.reasons["ends"] is FinishReason.STOP
    assert events.ids("stays") == transformers_greedy(llama[1], other, 20)
    computed = sum(row.request_id == "ends" for batch in watched.batches for row in batch.rows)
    assert computed == ends_at + 1


async def test_requests_of_one_block_too_few_are_preempted_and_give_the_same_tokens(llama: Llama) -> None:
    prompts = {name: prompt_of(7, seed=seed) for seed, name in enumerate("abc")}
    async with running(build(llama[0], num_blocks=8), prefix_cache=False) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(15)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(llama[1], prompt, 15)


async def test_an_abort_returns_when_no_step_in_flight_has_a_row_of_the_request(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(built, monkeypatch)
    async with running(built) as (engine, events):
        engine.submit(request("stays", prompt_of(5, seed=1), greedy(30)))
        engine.submit(request("goes", prompt_of(20), greedy(200)))
        await events.until(lambda: len(events.ids("goes")) >= 3)
        assert engine._scheduler.steps_in_flight == 2
        before = engine.load().blocks_free
        abort = asyncio.create_task(engine.abort("goes"))
        await asyncio.sleep(0)
        assert not abort.done()
        assert engine.load().blocks_free == before
        await abort
        assert engine.load().blocks_free >= before + 20 // BLOCK_SIZE
        num_tokens, launched = len(events.ids("goes")), len(watched.batches)
        await events.finished("stays")
    assert len(events.ids("goes")) == num_tokens
    assert not any(row.request_id == "goes" for batch in watched.batches[launched:] for row in batch.rows)


async def test_a_prompt_that_arrives_while_a_last_step_runs_is_launched_after_it(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(built, monkeypatch)
    hold = threading.Event()
    real_wait = LaunchedStep.wait

    def wait(step: LaunchedStep) -> list[RowResult]:
        assert hold.wait(timeout=60)
        return real_wait(step)

    monkeypatch.setattr(LaunchedStep, "wait", wait)
    async with running(built) as (engine, events):
        engine.submit(request("a", prompt_of(5), greedy(1)))
        assert await asyncio.to_thread(watched.launched.acquire, timeout=60)
        engine.submit(request("b", prompt_of(5, seed=1), greedy(1)))
        assert await asyncio.to_thread(watched.launched.acquire, timeout=60)
        assert events.steps == []
        hold.set()
        await events.finished("a", "b")


# ---- launches just in time


class KnownCosts:
    """Every step is known to take a thousand seconds."""

    costs = StepCosts(((1, 1000.0), (2, 1000.0)))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns nothing."""


async def test_a_request_admitted_while_a_step_runs_joins_the_next_one(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still, so the next step is not due before the running one ends or the clock is set. The thread
    that launches always reads zero, so launches take no time."""
    watched = Watched(built, monkeypatch)
    now = [0.0]
    ended = threading.Semaphore(0)
    real_wait = LaunchedStep.wait

    def wait(step: LaunchedStep) -> list[RowResult]:
        assert ended.acquire(timeout=60)
        return real_wait(step)

    async def launched() -> list[set[str]]:
        assert await asyncio.to_thread(watched.launched.acquire, timeout=60)
        return [{row.request_id for row in batch.rows} for batch in watched.batches]

    monkeypatch.setattr(LaunchedStep, "wait", wait)
    events = EventRecorder()
    async with Engine(
        built.runner,
        limits(),
        on_step=events,
        grammars=built.grammars,
        meter=KnownCosts(),
        clock=lambda: 0.0 if threading.current_thread().name == "device" else now[0],
    ) as engine:
        for number in range(40):  # earlier steps that took as long as predicted, with launches that took no time
            engine._steps._pace.launched(0.0)
            engine._steps._pace.started(0.0, 1000.0, has_prompts=number % 2 == 0, now=0.0)
            engine._steps._pace.ended(launched_s=0.0, ended_s=1000.0)
        engine.submit(request("a", prompt_of(5), greedy(3)))
        assert await launched() == [{"a"}]
        engine.reserve(request("b", prompt_of(6, seed=1), greedy(9)))
        assert engine.admit("b", TokenOutput(5, 0)) is None
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(watched.batches) == 1
        now[0] = 1000.0
        ended.release()  # nothing was launched in time: that step follows at once
        assert await launched() == [{"a"}, {"a", "b"}]
        engine.submit(request("c", prompt_of(4, seed=2), greedy(9)))
        now[0] = 1999.9999  # that step nears its predicted end
        engine._steps.wake()
        assert await launched() == [{"a"}, {"a", "b"}, {"a", "b", "c"}]
        assert len(events.steps) == 1
        ended.release(50)
        await events.finished("a", "b", "c")


# ---- failures


@pytest.mark.parametrize("where", ["launch", "wait"])
async def test_a_failing_step_fails_its_requests_and_no_others(
    llama: Llama, built: BuiltRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    prompts = {name: prompt_of(5, seed=seed) for seed, name in enumerate("ab")}
    watched = Watched(built, monkeypatch)
    failing: list[LaunchedStep] = []
    real_launch, real_wait = watched._launch, LaunchedStep.wait

    def launch(batch: Batch, on_mark: OnMark) -> LaunchedStep:
        if where == "launch" and batch.step == 3:
            raise RuntimeError("the third step")
        step = real_launch(batch, on_mark)
        if batch.step == 3:
            failing.append(step)
        return step

    def wait(step: LaunchedStep) -> list[RowResult]:
        if where == "wait" and step in failing:
            raise RuntimeError("the third step")
        return real_wait(step)

    watched._launch = launch
    monkeypatch.setattr(LaunchedStep, "wait", wait)

    async with running(built) as (engine, events):
        engine.submit(request("a", prompts["a"], greedy(40)))
        await events.finished("a")
        engine.submit(request("b", prompts["b"], greedy(12)))
        await events.finished("b")
    assert isinstance(events.errors["a"], InternalError)
    assert "the third step" in str(events.errors["a"])
    assert len(events.ids("a")) == 2
    assert "an engine step failed" in caplog.text
    assert events.ids("b") == transformers_greedy(llama[1], prompts["b"], 12)
    assert "b" not in events.errors


async def test_when_the_engine_closes_the_steps_in_flight_are_reported_first(built: BuiltRunner) -> None:
    events = EventRecorder()
    async with Engine(built.runner, limits(), on_step=events, grammars=built.grammars) as engine:
        engine.submit(request("a", prompt_of(6), greedy(400)))
        await events.until(lambda: len(events.ids("a")) >= 3)
        in_flight = engine._scheduler.steps_in_flight
        num_tokens = len(events.ids("a"))
    assert in_flight == 2
    assert len(events.ids("a")) == num_tokens + in_flight
    assert [token.index for token in events.tokens["a"]] == list(range(num_tokens + in_flight))
    assert list(events.errors) == ["a"]


# ---- before the first step


async def test_the_runner_is_prepared_by_the_thread_that_launches_before_entry_returns(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(built.runner, "prepare", lambda: prepared.append(threading.current_thread().name))
    async with running(built) as (engine, events):
        assert prepared == ["device"]
        engine.submit(request("a", prompt_of(4), greedy(2)))
        await events.finished("a")
    assert prepared == ["device"]


async def test_an_engine_whose_runner_cannot_be_prepared_is_not_entered(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> None:
        raise InternalError("no memory for a graph")

    monkeypatch.setattr(built.runner, "prepare", prepare)
    others = set(threading.enumerate())  # of other tests
    with pytest.raises(InternalError, match="no memory for a graph"):
        async with Engine(built.runner, limits(), on_step=EventRecorder(), grammars=built.grammars):
            pass
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("device")]
