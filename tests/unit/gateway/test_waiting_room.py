"""Requests that wait at a gateway whose nodes are full, between real gRPC connections."""

import asyncio

import pytest

from baton.errors import Cancelled, Overloaded
from gateway.serving import Serving
from protos.baton.v1 import node_pb2
from tests.unit.gateway.test_serving import BOUND_S, Client, Running, model, running

__all__ = ["model", "running"]


def report(running: Running, *, requests: int) -> None:
    """The decode node, which has two seats, reports so many requests."""
    node = running.connections.fleet.decodes[running.decode.address]
    status = node_pb2.NodeStatus()
    status.CopyFrom(node.status)
    status.requests_running, status.max_batch_requests = requests, 2
    node.take_status(status, "")


def waiting(serving: Serving) -> int:
    return serving._waiting_room._admission.num_waiting


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
    assert await running.serving.abort([found.request_id]) == [found.request_id]
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
    pace = running.serving._waiting_room._admission.pace
    room = running.serving._waiting_room._room(0.0)
    pace.first_token(100.0, 0, room, asyncio.get_running_loop().time())
    with pytest.raises(Overloaded, match="it would take") as refused:
        await asyncio.wait_for(running.generate(Client(), budget_s=30.0), BOUND_S)
    assert refused.value.retry_after_s is not None
    assert refused.value.request_id
    assert running.serving.counters.refused == {"full": 0, "queue": 0, "deadline": 1, "shed": 0}
