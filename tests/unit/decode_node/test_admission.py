"""Requests get free blocks in order of arrival, each within its own time."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest, Overloaded
from baton.core.sampling import ResolvedSampling
from baton.engine.request import EngineRequest
from baton.engine.scheduling.slices import DEFAULT_TTFT_S
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.error_detail import from_detail
from decode_node.admission import BlockQueue
from decode_node.commands import Abort, Command, Reserve
from decode_node.events import EngineRefused, SessionClosed, SessionMessage, SessionOpened
from tests.unit.decode_node.scene import SESSION, Scene, names, sent

FULL = Overloaded("no room for the request's blocks", retry_after_s=1.0)


@pytest.fixture
def scene() -> Scene:
    """The first request waits for blocks, for up to 5 s."""
    scene = Scene(waiting_max=3)
    assert reserves(scene.submit(1, max_queue_s=5.0)) == [1]
    assert refuse(scene, 1) == []
    return scene


def refuse(scene: Scene, key: int) -> list[Command]:
    """The engine refuses that request for lack of room."""
    return scene.on(EngineRefused(f"{SESSION}.{key}", FULL))


def enter(queue: BlockQueue, engine_id: str, *, max_queue_s: float = 1.0, now_s: float = 0.0, **given: Any) -> None:
    request = EngineRequest(engine_id, (1,), ResolvedSampling(max_tokens=9), **given)
    queue.enter(request, max_queue_s=max_queue_s, now_s=now_s)


def order(queue: BlockQueue) -> list[str]:
    served = []
    while (first := queue.first) is not None:
        served.append(first)
        assert queue.leave(first)
    return served


def reserves(commands: list[Command]) -> list[int]:
    """The keys of the requests for which blocks are to be reserved."""
    return [int(each.request.request_id.split(".")[1]) for each in commands if isinstance(each, Reserve)]


def error(commands: list[Command]) -> Overloaded:
    (message,) = [message for message in sent(commands) if message.HasField("failed")]
    found = from_detail(message.failed.error)
    assert isinstance(found, Overloaded)
    return found


# ---- the queue alone


def test_only_the_first_may_reserve_and_the_next_follows_when_it_leaves() -> None:
    queue = BlockQueue(waiting_max=3)
    for engine_id in ("1.1", "1.2", "1.3"):
        enter(queue, engine_id)
    assert (queue.first, len(queue)) == ("1.1", 3)
    assert not queue.leave("1.2")
    assert queue.leave("1.1")
    assert queue.first == "1.3"
    assert not queue.leave("1.1")


def test_a_full_queue_takes_no_request() -> None:
    queue = BlockQueue(waiting_max=0)
    with pytest.raises(Overloaded, match="0 requests wait for room already") as full:
        enter(queue, "1.1", max_queue_s=9.0)
    assert full.value.retry_after_s == 1.0
    assert (queue.first, len(queue)) == (None, 0)


# ---- with the machine


def test_a_request_that_may_not_wait_gets_the_engines_refusal() -> None:
    scene = Scene()
    assert reserves(scene.submit(1)) == [1]
    commands = refuse(scene, 1)
    assert names(commands) == ["Send failed", "Abort"]
    assert (error(commands).message, error(commands).retry_after_s) == (FULL.message, 1.0)


def test_a_request_that_may_not_wait_is_refused_while_others_wait(scene: Scene) -> None:
    commands = scene.submit(2, max_queue_s=0.0)
    assert names(commands) == ["Send failed", "Send released"]
    assert (error(commands).message, error(commands).retry_after_s) == ("no room within 0 s", 1.0)


def test_requests_beyond_the_limit_are_refused_at_once(scene: Scene) -> None:
    assert scene.submit(2, max_queue_s=5.0) == []
    assert scene.submit(3, max_queue_s=5.0) == []
    assert scene.machine.waiting == 3
    assert error(scene.submit(4, max_queue_s=5.0)).message == "3 requests wait for room already"


def test_freed_blocks_go_to_the_first_and_the_rest_to_the_next(scene: Scene) -> None:
    scene.submit(2, max_queue_s=5.0)
    scene.submit(3, max_queue_s=5.0)
    assert reserves(scene.aborted(9)) == [1]
    assert reserves(scene.aborted(9)) == []  # it is being reserved already
    commands = scene.reserved(1)
    assert names(commands) == ["OpenLease", "Reserve"]
    assert reserves(commands) == [2]
    assert refuse(scene, 2) == []
    assert scene.machine.waiting == 2


def test_no_request_passes_one_that_does_not_fit(scene: Scene) -> None:
    assert scene.submit(2, max_queue_s=5.0, num_tokens=1) == []
    assert reserves(scene.aborted(9)) == [1]
    assert refuse(scene, 1) == []


def test_a_request_whose_time_is_over_makes_way(scene: Scene) -> None:
    scene.submit(2, max_queue_s=9.0)
    commands = scene.after(5.0)
    assert names(commands) == ["Send failed", "Abort", "Reserve"]
    assert (error(commands).message, error(commands).retry_after_s) == ("no room within 5 s", 1.0)
    assert reserves(commands) == [2]


def test_a_later_request_may_run_out_of_time_first(scene: Scene) -> None:
    scene.submit(2, max_queue_s=1.0)
    commands = scene.after(1.0)
    assert names(commands) == ["Send failed", "Abort"]
    assert scene.machine.waiting == 1


def test_the_budget_counts_while_a_request_waits(scene: Scene) -> None:
    scene.submit(2, max_queue_s=9.0, budget_s=2.0)
    (message,) = [message for message in sent(scene.after(2.0)) if message.HasField("failed")]
    assert message.failed.error.message == "the request's budget of 2 s is over"


def test_a_request_that_can_never_fit_makes_way(scene: Scene) -> None:
    scene.submit(2, max_queue_s=5.0)
    scene.aborted(9)
    commands = scene.on(EngineRefused(f"{SESSION}.1", InvalidRequest("longer than the context")))
    assert names(commands) == ["Send failed", "Abort", "Reserve"]
    assert reserves(commands) == [2]


def test_a_cancelled_request_makes_way(scene: Scene) -> None:
    scene.submit(2, max_queue_s=5.0)
    assert scene.cancel(1)[0] == Abort(f"{SESSION}.1")
    assert reserves(scene.aborted(1)) == []  # the second one has been reserving since the cancel


def test_a_session_that_breaks_reserves_nothing_for_its_own_requests(scene: Scene) -> None:
    scene.on(SessionOpened(2))
    scene.submit(2, max_queue_s=5.0)
    scene.submit(1, session=2, max_queue_s=5.0, policy=pb.LOCAL_POLICY_LOCAL)
    commands = scene.on(SessionClosed(SESSION))
    (reserve,) = [command for command in commands if isinstance(command, Reserve)]
    assert reserve.request.request_id == "2.1"


def test_released_is_sent_before_the_next_one_reserves(scene: Scene) -> None:
    scene.submit(2, max_queue_s=5.0)
    scene.aborted(9)
    scene.reserved(1)
    refuse(scene, 2)
    scene.opened(1)
    scene.cancel(1)
    scene.closed(1)
    assert names(scene.aborted(1)) == ["Send released", "Reserve"]


# ---- priority


def test_lower_priorities_go_first_and_equal_ones_in_order_of_arrival() -> None:
    queue = BlockQueue(waiting_max=9)
    for engine_id, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0)):
        enter(queue, engine_id, priority=priority)
    assert order(queue) == ["c", "a", "d", "b"]


def test_a_request_that_may_not_wait_is_served_at_once_if_it_goes_first() -> None:
    queue = BlockQueue(waiting_max=9)
    enter(queue, "a")
    with pytest.raises(Overloaded, match="no room within 0 s"):
        enter(queue, "b", max_queue_s=0.0)
    enter(queue, "c", max_queue_s=0.0, priority=-1)
    assert queue.first == "c"


def test_a_better_request_reserves_before_those_that_wait(scene: Scene) -> None:
    assert reserves(scene.submit(2, max_queue_s=5.0, priority=1)) == []
    (reserve,) = [each for each in scene.submit(3, max_queue_s=5.0, priority=-1) if isinstance(each, Reserve)]
    assert reserve.request.priority == -1
    refuse(scene, 3)
    assert reserves(scene.aborted(9)) == [3]
    assert reserves(scene.reserved(3)) == [1]


# ---- deadlines


def test_a_request_without_a_deadline_does_not_wait_for_ever_for_those_with_one() -> None:
    queue = BlockQueue(waiting_max=9)
    enter(queue, "none", now_s=5.0)
    for number in range(3):
        enter(queue, f"due-{number}", now_s=5.0 + 6 * number, due_s=10.0 + 6 * number)
    assert 10.0 < 5.0 + DEFAULT_TTFT_S < 16.0
    assert order(queue) == ["due-0", "none", "due-1", "due-2"]


def test_a_request_whose_client_has_tokens_goes_first() -> None:
    queue = BlockQueue(waiting_max=9)
    enter(queue, "new", due_s=0.1)
    enter(queue, "begun", output=(4,))
    enter(queue, "better", priority=-1)
    assert order(queue) == ["better", "begun", "new"]


def test_the_next_one_is_asked_for_as_soon_as_another_has_its_kv(scene: Scene) -> None:
    scene.submit(2, max_queue_s=5.0)
    scene.aborted(9)
    scene.reserved(1)
    refuse(scene, 2)  # because 1 is on its way
    scene.opened(1)
    scene.hand_over(1)
    scene.filled(1)
    assert names(scene.closed(1)) == ["Send admitted", "Admit", "Reserve"]


def test_the_next_one_is_asked_for_as_soon_as_another_is_left_to_this_node(scene: Scene) -> None:
    scene.submit(2, max_queue_s=5.0)
    scene.aborted(9)
    scene.reserved(1)
    refuse(scene, 2)
    scene.opened(1)
    scene.prefill_here(1, 1)
    assert names(scene.closed(1)) == ["Send accepted", "PrefillHere", "Reserve"]


def test_a_client_that_gives_up_soon_is_served_by_then_or_refused_before_it_costs() -> None:
    scene = Scene(waiting_max=3)
    (reserve,) = [each for each in scene.submit(1, budget_s=6.0) if isinstance(each, Reserve)]
    assert (reserve.request.due_s, reserve.request.refuse_late) == (scene.now_s + 6.0, True)
    (patient,) = [each for each in Scene().submit(1, budget_s=600.0) if isinstance(each, Reserve)]
    assert (patient.request.due_s, patient.request.refuse_late) == (None, False)


@pytest.mark.parametrize(
    "field", ["waited_s", "ttft_budget_s", "tpot_s", "budget_s", "max_queue_s", "gap_factor", "ttft_factor"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_time_that_no_gateway_sends_is_refused_and_others_keep_their_places(
    scene: Scene, field: str, value: float
) -> None:
    """A queue is sorted by times, so with a NaN it would lose requests of other gateways."""
    scene.submit(2, max_queue_s=5.0)
    scene.on(SessionOpened(SESSION + 1))
    sampling = common_pb2.SamplingParams(max_tokens=5)
    submit = pb.SubmitRequest(key=1, prompt_token_ids=range(9), sampling=sampling, max_queue_s=5.0)
    setattr(submit, field, value)
    commands = scene.on(SessionMessage(SESSION + 1, pb.SessionRequest(submit=submit)))
    assert names(commands) == ["Send failed", "Send released"]
    error = from_detail(sent(commands)[0].failed.error)
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    scene.on(SessionClosed(SESSION + 1))
    assert reserves(scene.cancel(1)) == [2]
