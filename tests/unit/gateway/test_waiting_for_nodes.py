"""Requests that waited because no node served, when nodes come one after the other, between real gRPC connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import pytest

from baton.core.errors import NoNode
from baton.gateway.request.connections import Connections
from baton.gateway.request.waiting_for_nodes import WaitingForNodes
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import ServedModel
from baton.node.waiting import until
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway import fleets
from tests.unit.gateway.scripted_nodes import ScriptedNode, scripted_nodes
from tests.unit.gateway.test_serving import BOUND_S, Client, model, settings_of

__all__ = ["model"]

PLACES = 4  # of a node with two seats


@dataclass
class Restarting:
    """A gateway of two decode nodes, which are both gone until they report again."""

    serving: Serving
    connections: Connections
    nodes: list[ScriptedNode]
    requests: list["asyncio.Task[None]"] = field(default_factory=list)

    async def generate(self, number: int, *, priority: int = 0) -> None:
        """Brings so many requests, which begin to wait."""
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 65)), priority=priority)
        message.sampling.max_tokens = 10
        for _ in range(number):
            serves = self.serving.generate(message, Client().write, budget_s=None)
            self.requests.append(asyncio.create_task(serves))
        async with asyncio.timeout(BOUND_S):
            # A pause would let turns end that are under way.
            while self.num_brought != len(self.requests):  # noqa: ASYNC110
                await asyncio.sleep(0)

    @property
    def num_brought(self) -> int:
        queue = self.serving._admission_queue
        return len(queue._outputs) + queue._admission.num_waiting

    def report(self, node: ScriptedNode, *, requests: int = 0, seats: int = 2, is_noticed: bool = True) -> None:
        status = node_status_pb2.NodeStatus()
        status.CopyFrom(node.status)
        status.requests_running, status.max_batch_requests = requests, seats
        if is_noticed:
            self.connections._status_received(node_status_pb2.ROLE_DECODE, node.address, status)
        else:
            self.connections.fleet.decodes[node.address].take_status(status, "", 0.0)

    async def num_sent(self, node: ScriptedNode) -> int:
        """How many requests were sent to the node since its last report, once no more are on their way to it."""
        waiting = self.serving._admission_queue.waiting_for_nodes
        assert await until(lambda: not (waiting._is_under_way or waiting._is_due), timeout_s=BOUND_S)
        return self.connections.fleet.decodes[node.address].view().requests_since


@pytest.fixture
async def restarting(model: ServedModel) -> AsyncIterator[Restarting]:
    async with AsyncExitStack() as open_:
        nodes = [(await open_.enter_async_context(scripted_nodes(model.identity)))[1] for _ in range(2)]
        nodes[1].status.info.incarnation += 1
        addresses = ",".join(node.address for node in nodes)
        settings = settings_of("--decode", addresses, "--local-policy", "local", failover_wait_s=3600.0)
        connections = await open_.enter_async_context(Connections(settings, model))
        known = connections.fleet.decodes
        await asyncio.wait_for(connections.until(lambda: all(node.open for node in known.values())), BOUND_S)
        for node in nodes:
            connections.fleet.lost(node_status_pb2.ROLE_DECODE, node.address, "gone", monotonic())
        restarting = Restarting(Serving(settings, model, connections), connections, nodes)
        yield restarting
        for request in restarting.requests:
            request.cancel()
        await asyncio.gather(*restarting.requests, return_exceptions=True)


async def test_nodes_that_come_one_after_the_other_share_the_requests_that_waited(restarting: Restarting) -> None:
    first, second = restarting.nodes
    await restarting.generate(3 * PLACES)
    restarting.report(first)
    assert await restarting.num_sent(first) == PLACES
    restarting.report(second)
    assert await restarting.num_sent(second) == PLACES
    restarting.report(first, requests=PLACES - 1)
    assert await restarting.num_sent(first) == 1
    assert not any(request.done() for request in restarting.requests)


async def test_requests_that_waited_go_before_those_that_come_later(restarting: Restarting) -> None:
    first, _ = restarting.nodes
    await restarting.generate(PLACES + 2)
    restarting.report(first)
    assert await restarting.num_sent(first) == PLACES
    restarting.report(first, requests=PLACES - 1, is_noticed=False)  # as when time frees a place, between reports
    await restarting.generate(1)
    queue = restarting.serving._admission_queue
    assert queue._admission.num_waiting == 1
    restarting.report(first, requests=PLACES - 2)
    assert await restarting.num_sent(first) == 2
    assert queue._admission.num_waiting == 1
    restarting.report(first, requests=PLACES - 1)
    assert await until(lambda: not queue._admission.num_waiting, timeout_s=BOUND_S)


async def test_requests_that_waited_go_before_those_that_come_during_their_turns(restarting: Restarting) -> None:
    first, _ = restarting.nodes
    await restarting.generate(18)
    restarting.report(first, seats=128)  # it has places for all of them
    await restarting.generate(1, priority=1)
    priorities = [(await first.submission()).priority for _ in range(19)]
    assert priorities == [*(0,) * 18, 1]


async def test_requests_come_and_wait_while_no_node_serves_although_turns_are_under_way(restarting: Restarting) -> None:
    await restarting.generate(50)
    restarting.connections._notify()
    await restarting.generate(1)
    queue = restarting.serving._admission_queue
    assert queue.waiting_for_nodes._is_under_way
    assert queue._admission.num_waiting == 0


async def test_requests_that_waited_go_in_order_of_arrival(restarting: Restarting) -> None:
    """Clients choose priorities, so these must not put one client before the others."""
    first, _ = restarting.nodes
    await restarting.generate(PLACES)
    await restarting.generate(1, priority=-1)
    restarting.report(first)
    assert await restarting.num_sent(first) == PLACES
    assert [(await first.submission()).priority for _ in range(PLACES)] == [0] * PLACES


def add_listeners(waiting: WaitingForNodes, number: int, calls: list[int]) -> None:
    """Adds some that go on waiting, and append their number when they are called."""
    waits = fleets.request()
    for each in range(number):
        waiting.add(waits, partial(calls.append, each))


async def test_changes_in_quick_succession_reach_all_that_wait(restarting: Restarting) -> None:
    calls: list[int] = []
    waiting = WaitingForNodes(restarting.connections, lambda _prompt_tokens: True)
    add_listeners(waiting, 50, calls)
    for _ in range(60):  # as many as there are turns, and a few more
        waiting._fleet_changed()
        await asyncio.sleep(0)
    assert calls == list(range(50))
    assert await until(lambda: len(calls) >= 100, timeout_s=BOUND_S)
    assert calls == 2 * list(range(50))


async def test_full_nodes_are_looked_at_once_for_many_reports(restarting: Restarting) -> None:
    looks: list[int] = []

    def has_place(prompt_tokens: int) -> bool:
        looks.append(prompt_tokens)
        return False

    waiting = WaitingForNodes(restarting.connections, has_place)
    add_listeners(waiting, 50, [])
    for _ in range(100):
        waiting._fleet_changed()
    assert len(looks) == 1
    assert waiting.take_all_places
    assert await until(lambda: len(looks) >= 2, timeout_s=BOUND_S)


async def test_a_change_that_brings_no_node_reaches_all_that_wait(restarting: Restarting) -> None:
    """Nobody waits longer for nodes that have gone for good."""
    await restarting.generate(3)
    for node in restarting.nodes:
        del restarting.connections.fleet.decodes[node.address]
    restarting.connections.fleet._lost_at_s.clear()
    restarting.connections._notify()
    for request in restarting.requests:
        with pytest.raises(NoNode):
            await asyncio.wait_for(request, BOUND_S)


async def test_a_request_that_has_begun_waits_for_no_place(restarting: Restarting) -> None:
    first, second = restarting.nodes
    restarting.report(first)
    await restarting.generate(1)
    await first.submission()
    restarting.connections._lost(node_status_pb2.ROLE_DECODE, first.address, "gone")
    listeners = restarting.connections._listeners
    others = len(listeners)
    assert await until(lambda: len(listeners) != others, timeout_s=BOUND_S)
    restarting.report(second, requests=2 * PLACES)
    await second.submission()
