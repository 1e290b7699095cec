"""The table of Pool calls: a window of prompts in the engine, turns, refusals and ends."""

from collections.abc import Sequence

import numpy as np

from baton.core.errors import BatonError, DataLoss, Overloaded
from baton.core.sampling import ResolvedSampling
from baton.engine.events import PromptPooled, RequestFailed, RequestStarted, StepEvents
from baton.engine.pooling import PoolSpan
from baton.engine.request import EngineRequest
from prefill_node.pool_calls import AbortPooled, EndPoolCall, PoolCall, PoolCalls, PoolCommand, SubmitPooled


def call(number: int, *lengths: int) -> PoolCall:
    sampling = ResolvedSampling(max_tokens=1)
    requests = [
        EngineRequest("", tuple(range(length)), sampling, prefill_only=True, pool=PoolSpan(0, length))
        for length in lengths
    ]
    return PoolCall(number, requests, 0.0)


def submitted(commands: Sequence[PoolCommand]) -> list[str]:
    return [each.request.request_id for each in commands if isinstance(each, SubmitPooled)]


def ends(commands: Sequence[PoolCommand]) -> list[tuple[int, BatonError | None]]:
    return [(each.call, each.error) for each in commands if isinstance(each, EndPoolCall)]


def pooled(*request_ids: str) -> StepEvents:
    return StepEvents(1, 0.1, pooled=tuple(PromptPooled(each, np.ones(2, np.float32)) for each in request_ids))


def test_a_window_of_two_steps_is_in_the_engine_and_calls_take_turns() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    assert submitted(calls.begin(call(1, 5, 5, 5, 5, 5, 5), 0.0)) == ["1:0", "1:1", "1:2", "1:3"]
    assert submitted(calls.begin(call(2, 5, 5), 0.0)) == []
    assert submitted(calls.step(pooled("1:0", "1:1"), 0.1)) == ["1:4", "2:0"]
    assert submitted(calls.step(pooled("1:2", "1:3"), 0.2)) == ["1:5", "2:1"]


def test_a_prompt_larger_than_the_window_runs_alone() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    assert submitted(calls.begin(call(1, 100, 3), 0.0)) == ["1:0"]
    assert submitted(calls.step(pooled("1:0"), 0.1)) == ["1:1"]


def test_no_more_prompts_than_seats_of_two_steps() -> None:
    calls = PoolCalls(step_tokens=1000, max_requests=2)
    assert len(submitted(calls.begin(call(1, *[1] * 9), 0.0))) == 4


def test_a_call_ends_with_its_last_result_and_knows_its_times() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    mine = call(1, 4, 4)
    calls.begin(mine, 0.0)
    assert calls.knows("1:0")
    calls.step(StepEvents(1, 0.1, started=(RequestStarted("1:0", 2, 0.5),)), 0.6)
    assert ends(calls.step(pooled("1:1"), 0.7)) == []
    assert ends(calls.step(pooled("1:0"), 0.9)) == [(1, None)]
    assert (mine.queue_s, round(mine.pool_s, 6)) == (0.5, 0.4)
    assert [mine.results[index].cached_tokens for index in (0, 1)] == [2, 0]
    assert not calls.busy
    assert not calls.knows("1:0")


def test_a_call_without_prompts_ends_at_once() -> None:
    assert ends(PoolCalls(step_tokens=10, max_requests=8).begin(call(1), 0.0)) == [(1, None)]


def test_a_refusal_for_lack_of_room_waits_for_the_calls_own_prompts_else_ends_it() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    calls.begin(call(1, 4, 4), 0.0)
    assert calls.refused("1:1", Overloaded("full"), 0.0) == []
    assert submitted(calls.step(pooled("1:0"), 0.1)) == ["1:1"]
    ((number, error),) = ends(calls.refused("1:1", Overloaded("full"), 0.2))
    assert (number, type(error)) == (1, Overloaded)


def test_a_failed_prompt_ends_its_call_only_and_its_others_leave_the_engine() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    calls.begin(call(1, 4, 4), 0.0)
    calls.begin(call(2, 4), 0.0)
    failed = StepEvents(1, 0.1, failed=(RequestFailed("1:0", DataLoss("broken")),))
    commands = calls.step(failed, 0.1)
    assert [each.request_id for each in commands if isinstance(each, AbortPooled)] == ["1:1"]
    assert [number for number, _ in ends(commands)] == [1]
    assert ends(calls.step(pooled("2:0", "1:1"), 0.2)) == [(2, None)]


def test_a_cancelled_call_makes_room_for_the_next_one() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    calls.begin(call(1, 10, 10, 10), 0.0)
    calls.begin(call(2, 10), 0.0)
    commands = calls.cancel(1, 0.1)
    assert submitted(commands) == ["2:0"]
    assert calls.cancel(1, 0.1) == []
    assert calls.busy


def test_a_closing_node_ends_every_call_and_submits_nothing_more() -> None:
    calls = PoolCalls(step_tokens=10, max_requests=8)
    calls.begin(call(1, 10, 10, 10), 0.0)
    calls.begin(call(2, 10), 0.0)
    commands = calls.end_all(Overloaded("closing"), 0.1)
    assert submitted(commands) == []
    assert [number for number, _ in ends(commands)] == [1, 2]
    assert not calls.busy
