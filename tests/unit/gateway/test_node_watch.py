"""What a node reports: its statuses, changes of its prefix cache, and the last messages of a node that ends."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.gateway.fleet.watch_pace import WatchPace
from baton.gateway.request import node_clients, node_watch
from baton.gateway.request.decode_session import TokenReceiver
from baton.gateway.request.node_clients import NodeClient
from baton.gateway.request.node_watch import WatchCallbacks
from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import channel_options
from tests.unit.gateway.fleets import DECODE, status

BOUND_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes for a node's first status."""
    monkeypatch.setattr(node_watch, "_FIRST_STATUS_TIMEOUT_S", BOUND_S)


class Publishing(node_pb2_grpc.NodeServicer):
    """A node that publishes a snapshot to everyone who follows its cache."""

    def __init__(self) -> None:
        self.asked_after: list[int] = []
        self.watches: list[node_pb2.WatchRequest] = []

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchRequest, context: object
    ) -> AsyncIterator[node_status_pb2.NodeStatus]:
        self.watches.append(request)
        yield status(DECODE, 1)
        await asyncio.Event().wait()

    async def WatchCache(  # noqa: N802
        self, request: node_pb2.WatchCacheRequest, context: object
    ) -> AsyncIterator[node_pb2.WatchCacheResponse]:
        self.asked_after.append(request.after_sequence)
        yield node_pb2.WatchCacheResponse(sequence=7, incarnation=1, snapshot=True)
        await asyncio.Event().wait()

    async def Describe(self, request: object, context: object) -> node_status_pb2.NodeStatus:  # noqa: N802
        return status(DECODE, 1)

    async def DropKv(self, request: object, context: object) -> node_pb2.DropKvResponse:  # noqa: N802
        return node_pb2.DropKvResponse()

    def Pull(self, requests: object, context: object) -> AsyncIterator[node_pb2.PullResponse]:  # noqa: N802
        raise NotImplementedError

    async def Drain(self, request: object, context: object) -> node_pb2.DrainResponse:  # noqa: N802
        return node_pb2.DrainResponse()

    async def SwitchRole(  # noqa: N802
        self, request: object, context: object
    ) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
        yield node_status_pb2.RoleSwitchProgress()

    async def LoadAdapter(self, request: object, context: object) -> node_pb2.LoadAdapterResponse:  # noqa: N802
        return node_pb2.LoadAdapterResponse()

    async def UnloadAdapter(self, request: object, context: object) -> node_pb2.UnloadAdapterResponse:  # noqa: N802
        return node_pb2.UnloadAdapterResponse()

    async def GetExpertLoad(self, request: object, context: object) -> node_pb2.GetExpertLoadResponse:  # noqa: N802
        return node_pb2.GetExpertLoadResponse()


class Ending(Publishing, decode_pb2_grpc.DecodeServicer):
    """A node that has drained: it ends its statuses while the last message of a request is still on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted, self.sends_last = asyncio.Event(), asyncio.Event()

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchRequest, context: object
    ) -> AsyncIterator[node_status_pb2.NodeStatus]:
        yield status(DECODE, 1)
        await self.submitted.wait()

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: object
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        async for request in requests:
            self.submitted.set()
            await self.sends_last.wait()
            yield decode_pb2.SessionResponse(released=decode_pb2.Released(key=request.submit.key))
            return

    async def Pair(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: object
    ) -> AsyncIterator[decode_pb2.PairResponse]:
        async for _ in requests:
            yield decode_pb2.PairResponse()


@asynccontextmanager
async def watched(
    node: Publishing | None, callbacks: WatchCallbacks, pace: WatchPace | None = None
) -> AsyncIterator[NodeClient]:
    """A client that watches this node, on a server of its own; None: a server without our services."""
    server = grpc.aio.server(options=channel_options())
    if node is not None:
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
    if isinstance(node, Ending):
        decode_pb2_grpc.add_DecodeServicer_to_server(node, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = NodeClient(address, callbacks, lambda: None, watch_pace=pace)
    watching = asyncio.create_task(client.watch.run())
    try:
        yield client
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await client.close()
        await server.stop(None)


async def test_a_node_that_ended_its_statuses_is_lost_once_its_session_has_ended_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_clients, "_LAST_MESSAGES_S", BOUND_S)  # on however slow a machine
    happened: list[str] = []
    reported, lost = asyncio.Event(), asyncio.Event()

    def note_lost(reason: str) -> None:
        happened.append(reason)
        lost.set()
        client.drop_session(reason)  # as the fleet says

    node = Ending()
    async with watched(
        node, WatchCallbacks(lambda _: reported.set(), note_lost, lambda _: True, lambda: None)
    ) as client:
        await asyncio.wait_for(reported.wait(), BOUND_S)
        receiver = TokenReceiver(lambda _: None, lambda _: happened.append("released"), happened.append)
        client.session().submit(decode_pb2.SubmitRequest(), receiver)
        await asyncio.wait_for(node.submitted.wait(), BOUND_S)
        await asyncio.wait([asyncio.create_task(lost.wait())], timeout=0.2)
        node.sends_last.set()
        await asyncio.wait_for(lost.wait(), BOUND_S)
    assert happened[:2] == ["released", "it ended the session"]


async def test_a_message_about_the_cache_that_our_code_cannot_take_is_logged_and_a_snapshot_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken, failures = asyncio.Event(), ["the first message"]

    def take(_: node_pb2.WatchCacheResponse) -> bool:
        if failures:
            raise ArithmeticError(failures.pop())
        taken.set()
        return True

    node = Publishing()
    with caplog.at_level(logging.ERROR, "baton"):
        async with watched(node, WatchCallbacks(lambda _: None, lambda _: None, take, lambda: None)):
            await asyncio.wait_for(taken.wait(), BOUND_S)
    assert node.asked_after == [0, 0]
    assert "ArithmeticError: the first message" in caplog.text


async def test_a_node_of_an_older_release_is_lost_with_the_page_that_says_what_to_do() -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    async with watched(None, WatchCallbacks(lambda _: None, reasons.put_nowait, lambda _: True, lambda: None)):
        assert "docs/upgrades.md" in (reason := await asyncio.wait_for(reasons.get(), BOUND_S))
        assert "docs/upgrades.md" in reason


async def test_a_cluster_that_grows_much_makes_its_nodes_report_less_often() -> None:
    node, pace, received = Publishing(), WatchPace(10), asyncio.Queue[object]()
    lost: list[str] = []
    callbacks = WatchCallbacks(received.put_nowait, lost.append, lambda batch: True, lambda: None)
    async with asyncio.timeout(BOUND_S), watched(node, callbacks, pace) as client:
        await received.get()
        pace.num_nodes = 150
        client.watch.follow_pace()  # no reason for another stream
        pace.num_nodes = 1000
        client.watch.follow_pace()
        await received.get()
    assert [(request.interval_s, request.repeat_s) for request in node.watches] == [(0.1, 1.0), (0.5, 10.0)]
    assert all(request.without_unchanged for request in node.watches)
    assert lost == []


class Partial(Publishing):
    """A node that leaves out what has not changed."""

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchRequest, context: object
    ) -> AsyncIterator[node_status_pb2.NodeStatus]:
        yield status(DECODE, 1)
        yield node_status_pb2.NodeStatus(blocks_free=7, unchanged_fields=[1])
        await asyncio.Event().wait()


async def test_a_status_without_unchanged_parts_is_completed() -> None:
    received = asyncio.Queue[node_status_pb2.NodeStatus]()
    callbacks = WatchCallbacks(received.put_nowait, lambda reason: None, lambda batch: True, lambda: None)
    async with asyncio.timeout(BOUND_S), watched(Partial(), callbacks):
        first, second = await received.get(), await received.get()
    assert (second.info, second.blocks_free, len(second.unchanged_fields)) == (first.info, 7, 0)
