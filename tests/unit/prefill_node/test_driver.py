"""Calls through a real engine and a real transfer: the gateway and the decode node get their messages, and a call that
has ended keeps no blocks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.core.errors import Cancelled, DataLoss, Draining, NoNode, Overloaded
from baton.node.assembly import Node
from baton.node.waiting import until
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.error_detail import from_detail
from prefill_node.driver import PrefillDriver
from prefill_node.events import Closing, DrainStarted
from tests.unit.prefill_node.nodes import decode_node, prefill_node, prefill_settings


class Written:
    """The gateway's end of a call; `then` runs right after the first response of that kind has been written."""

    def __init__(self, kind: str = "", then: Callable[[], object] = lambda: None) -> None:
        self.events: list[pb.PrefillEvent] = []
        self._kind = kind
        self._then = then

    async def __call__(self, event: pb.PrefillEvent) -> None:
        self.events.append(event)
        if self.kinds.count(self._kind) == 1 and self.kinds[-1] == self._kind:
            self._then()

    @property
    def kinds(self) -> list[str]:
        return [str(event.WhichOneof("event")) for event in self.events]


@asynccontextmanager
async def calls(**settings: object) -> AsyncIterator[tuple[Node, PrefillDriver]]:
    values = prefill_settings(**settings)
    node = prefill_node(values)
    driver = PrefillDriver(node, values)
    async with node:
        try:
            yield node, driver
        finally:
            driver.deliver(Closing())
            await driver.peers.close()
        assert await until(lambda: not driver.busy, timeout_s=120.0)
        load = node.engine.load()
        assert load.blocks_free == load.blocks_total, "I1"


async def test_a_call_streams_its_events_and_the_decode_node_gets_kv_and_hand_over() -> None:
    async with decode_node() as decode, calls(max_batch_tokens=64) as (_, driver):
        written = Written()
        await driver.prefill(await decode.request(1, 100), written)
        assert written.kinds == ["scheduled", "progress", "progress", "first_token", "sent"]
        message = (await decode.message("hand_over")).hand_over
        assert message.lease == 1
        assert message.first_token == written.events[3].first_token.token
        assert await until(lambda: bool(decode.filled), timeout_s=120.0)
        (totals,), sent = decode.filled, written.events[4].sent
        assert (totals.number, totals.bytes, totals.segments) == (1, sent.bytes_sent, sent.segments)
        assert (sent.tokens_sent, sent.transport) == (100, "loopback")


async def test_a_gateway_that_reads_nothing_delays_no_kv() -> None:
    never = asyncio.Event()

    async def write(event: pb.PrefillEvent) -> None:
        await never.wait()

    async with decode_node() as decode, calls(max_batch_tokens=64) as (_, driver):
        call = asyncio.create_task(driver.prefill(await decode.request(1, 100), write))
        await decode.message("hand_over")
        assert driver.busy, "its responses are unwritten"
        call.cancel()
        await asyncio.wait([call])
        assert not driver.busy


async def test_a_cancelled_call_reports_that_its_lease_is_quiet() -> None:
    async with decode_node() as decode, calls() as (_, driver):
        call: asyncio.Task[None] | None = None
        written = Written("progress", lambda: call and call.cancel())
        call = asyncio.create_task(driver.prefill(await decode.request(1), written))
        await asyncio.wait([call])
        assert call.cancelled()
        assert isinstance(from_detail((await decode.message("quiet")).quiet.error), Cancelled)


async def test_a_lease_that_the_decode_node_takes_back_ends_its_call() -> None:
    async with decode_node() as decode, calls() as (_, driver):
        written = Written("progress", lambda: decode.end_lease(1))
        with pytest.raises(Cancelled, match="took the lease back"):
            await driver.prefill(await decode.request(1), written)
        assert (await decode.message("quiet")).quiet.lease == 1


async def test_a_decode_node_that_hangs_up_ends_its_calls() -> None:
    async with decode_node() as decode, calls() as (_, driver):
        written = Written("progress", decode.hang_up)
        with pytest.raises((NoNode, DataLoss)):  # the stream or the link ends first
            await driver.prefill(await decode.request(1), written)
        (state,) = driver.peers.states({})
        assert await until(lambda: state.phase == node_status_pb2.PEER_PHASE_LOST, timeout_s=120.0)


async def test_a_write_that_fails_ends_the_call() -> None:
    async def write(event: pb.PrefillEvent) -> None:
        raise ConnectionError("the gateway is gone")

    async with decode_node() as decode, calls() as (_, driver):
        with pytest.raises(ExceptionGroup):
            await driver.prefill(await decode.request(1), write)
        assert (await decode.message("quiet")).quiet.lease == 1
        assert not driver.busy


async def test_an_engine_that_is_full_refuses_and_the_decode_node_is_not_kept_waiting() -> None:
    async with decode_node() as decode, calls(max_batch_requests=1, max_waiting=0) as (_, driver):
        refused: list[asyncio.Task[None]] = []
        second = await decode.request(1, 50)
        written = Written("progress", lambda: refused.append(asyncio.create_task(driver.prefill(second, Written()))))
        await driver.prefill(await decode.request(2, 100), written)
        with pytest.raises(Overloaded) as raised:
            await refused[0]
        assert raised.value.retry_after_s is not None
        quiet = (await decode.message("quiet")).quiet
        assert (quiet.lease, from_detail(quiet.error).reason) == (1, "OVERLOADED")


async def test_a_draining_node_refuses_calls_before_it_connects_to_the_peer() -> None:
    async with decode_node() as decode, calls() as (_, driver):
        request = await decode.request(1)
        driver.deliver(DrainStarted())
        with pytest.raises(Draining):
            await driver.prefill(request, Written())
        assert driver.peers.states({}) == []


async def test_a_call_that_runs_when_draining_begins_is_completed() -> None:
    async with decode_node() as decode, calls() as (_, driver):
        written = Written("progress", lambda: driver.deliver(DrainStarted()))
        await driver.prefill(await decode.request(1, 20), written)
        assert written.kinds[-1] == "sent"


async def test_a_node_that_closes_ends_its_calls() -> None:
    async with decode_node() as decode, calls() as (_, driver):
        written = Written("progress", lambda: driver.deliver(Closing()))
        with pytest.raises(Draining):
            await driver.prefill(await decode.request(1), written)
        assert isinstance(from_detail((await decode.message("quiet")).quiet.error), Draining)


@pytest.mark.parametrize(("overlap_layers", "expected"), [(False, 1), (True, 6)])
async def test_layers_are_sent_in_groups_unless_whole_chunks_are_wanted(overlap_layers: bool, expected: int) -> None:
    async with decode_node() as decode, calls(max_batch_tokens=64, overlap_layers=overlap_layers) as (_, driver):
        request = await decode.request(1, 100)
        peer = await driver.peers.for_ticket(request.ticket)
        # A link on which a message costs nothing: every layer is worth a message of its own.
        assert peer.link is not None
        peer.link, peer.turn_s = replace(peer.link, latency_s=0.0, message_cost_s=0.0), 0.0
        written = Written()
        await driver.prefill(request, written)
        assert written.events[-1].sent.layer_groups == expected
