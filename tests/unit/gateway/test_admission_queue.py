"""Requests that wait at a gateway whose nodes are full, between real gRPC connections."""

import asyncio
from time import monotonic

import pytest

from baton.core.errors import Cancelled, DeadlineExceeded, Overloaded
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import ServedModel
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway.scripted_nodes import scripted_nodes
from tests.unit.gateway.test_serving import BOUND_S, Client, Running, model, running, settings_of

__all__ = ["model", "running"]


def report(running: Running, *, requests: int) -> None:
    """The decode node, which has two seats, reports so many requests."""
    node = running.connections.fleet.decodes[running.decode.address]
    status = node_status_pb2.NodeStatus()
    status.CopyFrom(node.status)
    status.requests_running, status.max_batch_requests = requests, 2
    node.take_status(status, "", 0.0)


def waiting(serving: Serving) -> int:
    return serving._admission_queue._admission.num_waiting


async def until_waiting(running: Running, number: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while waiting(running.serving) != number:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_request_waits_until_a_node_reports_room(running: Running) -> None:
    report(running, requests=4)
    request = running.generate(Client())
    await until_waiting(running, 1)
    assert running.decode.received.empty()
    report(running, requests=3)
    await running.decode.submission()
    assert waiting(running.serving) == 0
    request.cancel()
    await asyncio.wait([request])


async def test_a_waiting_request_is_aborted_like_a_running_one(running: Running) -> None:
    report(running, requests=4)
    request = running.generate(Client())
    await until_waiting(running, 1)
    (found,) = running.serving._requests
    assert await running.serving.abort([found.record.request_id]) == [found.record.request_id]
    with pytest.raises(Cancelled):
        await asyncio.wait_for(request, BOUND_S)
    assert (waiting(running.serving), running.serving.running) == (0, 0)


async def test_a_client_that_leaves_while_its_request_waits_leaves_nothing(running: Running) -> None:
    report(running, requests=4)
    request = running.generate(Client())
    await until_waiting(running, 1)
    request.cancel()
    await asyncio.wait([request])
    assert (waiting(running.serving), running.serving.running) == (0, 0)
    assert running.decode.received.empty()


async def test_a_request_that_cannot_be_in_time_is_refused_and_counted(running: Running) -> None:
    report(running, requests=4)
    pace = running.serving._admission_queue._admission.pace
    capacity = running.serving._admission_queue._capacity(0.0)
    pace.first_token(1e9, 0, capacity, asyncio.get_running_loop().time())
    with pytest.raises(Overloaded, match="it would take") as refused:
        await asyncio.wait_for(running.generate(Client(), budget_s=30.0), BOUND_S)
    assert refused.value.retry_after_s is not None
    assert refused.value.request_id
    assert running.serving.counters.refused == {"full": 0, "queue": 0, "deadline": 1, "shed": 0}


class Unread:
    """Texts that nobody may work on."""

    async def run(self, *_: object) -> None:
        raise AssertionError("the text was read")


async def test_a_request_that_may_not_wait_is_refused_before_its_text_is_read(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(running, requests=4)
    pace = running.serving._admission_queue._admission.pace
    pace.first_token(1e9, 0, running.serving._admission_queue._capacity(0.0), asyncio.get_running_loop().time())
    monkeypatch.setattr(running.serving, "texts", Unread())
    message = pb.GenerateRequest(text="a text " * 50)
    with pytest.raises(Overloaded, match="it would take") as refused:
        await running.serving.generate(message, Client().write, budget_s=30.0)
    assert refused.value.retry_after_s is not None
    assert running.serving.counters.refused["deadline"] == 1
    assert running.serving.running == 0


async def test_a_broken_node_is_no_room_while_another_one_serves(running: Running) -> None:
    fleet, room = running.connections.fleet, running.serving._admission_queue
    now_s = asyncio.get_running_loop().time()
    for _ in range(3):
        fleet.breakers.failed(fleet.decodes[running.decode.address].incarnation, now_s)
    assert room._look_at_nodes(now_s).decodes, "the only node is better than none"
    other = fleet.add(node_status_pb2.ROLE_DECODE, "elsewhere:1")
    status = node_status_pb2.NodeStatus()
    status.CopyFrom(fleet.decodes[running.decode.address].status)
    status.info.incarnation, status.requests_running = 77, 5
    other.take_status(status, "", 0.0)
    assert [node.load for node in room._look_at_nodes(now_s).decodes] == [5]


async def test_requests_leave_the_queue_to_wait_for_a_lost_node(model: ServedModel) -> None:
    """The decode node is full, and the only prefill node, without which nothing may be decoded, restarts."""
    async with scripted_nodes(model.identity) as (prefill, decode):
        nodes = ["--prefill", prefill.address, "--decode", decode.address]
        settings = settings_of(*nodes, "--local-policy", "strict", "--max-queue-s", "3600", failover_wait_s=3600.0)
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            running = Running(Serving(settings, model, connections), connections, prefill, decode)
            report(running, requests=4)
            requests = [running.generate(Client())]
            await until_waiting(running, 1)
            status = node_status_pb2.NodeStatus()
            status.CopyFrom(connections.fleet.prefills[prefill.address].status)
            connections.fleet.lost(node_status_pb2.ROLE_PREFILL, prefill.address, "gone", monotonic())
            requests.append(running.generate(Client()))
            async with asyncio.timeout(BOUND_S):
                while len(running.serving._admission_queue._outputs) != len(requests):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert waiting(running.serving) == 0
            assert decode.received.empty()
            connections._status_received(node_status_pb2.ROLE_PREFILL, prefill.address, status)
            async with asyncio.timeout(BOUND_S):
                while not running.serving._admission_queue.waiting_for_nodes.take_all_places:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert decode.received.empty()
            report(running, requests=0)
            connections._notify()
            for _ in requests:
                await decode.submission()
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)


async def test_a_wait_for_a_node_says_nothing_about_the_nodes_that_serve(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_nodes(model.identity) as (prefill, decode):
        nodes = ["--prefill", prefill.address, "--decode", decode.address]
        settings = settings_of(*nodes, "--local-policy", "strict", failover_wait_s=3600.0)
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            running = Running(Serving(settings, model, connections), connections, prefill, decode)
            learned: list[float] = []
            pace = running.serving._admission_queue._admission.pace
            monkeypatch.setattr(pace, "first_token", lambda seconds, *_: learned.append(seconds))
            connections.fleet.lost(node_status_pb2.ROLE_PREFILL, prefill.address, "gone", monotonic())
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(running.generate(Client(), budget_s=0.05), BOUND_S)
            assert learned == []
