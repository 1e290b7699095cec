"""However many addresses do not answer, few are tried at once; those that have answered do not wait for the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from baton.gateway.fleet import connect_pace
from baton.gateway.fleet.connect_pace import ConnectPace
from baton.gateway.request.node_clients import NodeClient
from baton.gateway.request.node_watch import WatchCallbacks
from tests.tcp_server import tcp_server

BOUND_S = 60.0
MANY = 200


NOT_FOUND = bytes([0, 0, 1, 1, 5, 0, 0, 0, 1, 0x8D])  # HTTP/2: 404 on the first stream, which ends


async def say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass


async def answer_http_1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")


async def serve_http_2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = b"") -> None:
    """Shakes hands, answers pings, and each call with `answer`."""
    settings, headers, ping = 4, 1, 6
    writer.write(bytes([0, 0, 0, settings, 0, 0, 0, 0, 0]))
    await reader.readexactly(24)
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, is_answer = head[3], head[4] & 1
        if kind == headers:
            writer.write(answer)
        elif kind == settings and not is_answer:
            writer.write(bytes([0, 0, 0, settings, 1, 0, 0, 0, 0]))
        elif kind == ping and not is_answer:
            writer.write(bytes([0, 0, 8, ping, 1, 0, 0, 0, 0]) + payload)


async def refuse_in_http_2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await serve_http_2(reader, writer, NOT_FOUND)


class Strange:
    """A server that is not a node. It counts the connections that its clients, which are in this process, have open: a
    busy server learns late that one has ended.
    """

    def __init__(self, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._talk = talk
        self.most_open = self.total = 0
        self.enough = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.total += 1
        port = writer.get_extra_info("sockname")[1]
        sockets = psutil.Process().net_connections("tcp")
        is_open = [each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port for each in sockets if each.raddr]
        self.most_open = max(self.most_open, sum(is_open))
        if self.total > connect_pace._SLOTS + 8:
            self.enough.set()
        await self._talk(reader, writer)


@asynccontextmanager
async def watching(port: int) -> AsyncIterator[list[NodeClient]]:
    """Clients of many addresses at which the same server listens."""
    pace = ConnectPace()
    callbacks = WatchCallbacks(lambda _: None, lambda _: None, lambda _: True, lambda: None)
    addresses = [f"127.0.{number // 250}.{number % 250 + 1}:{port}" for number in range(MANY)]
    clients = [NodeClient(address, callbacks, lambda: None, pace=pace) for address in addresses]
    watches = [asyncio.create_task(client.watch.run()) for client in clients]
    yield clients
    for watch in watches:
        watch.cancel()
    await asyncio.wait(watches)
    await asyncio.gather(*(client.close() for client in clients))
    assert pace.silent == 0


@pytest.mark.parametrize(
    "talk", [say_nothing, answer_http_1, pytest.param(serve_http_2, marks=pytest.mark.slow), refuse_in_http_2]
)
async def test_few_connections_are_open_to_addresses_that_do_not_answer(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    strange = Strange(talk)
    async with tcp_server(strange.serve, "0.0.0.0", backlog=MANY) as port, watching(port):
        await asyncio.wait_for(strange.enough.wait(), BOUND_S)
    # gRPC makes a new connection for one that was lost, which lasts for up to 2 s after its channel is closed.
    assert strange.most_open <= 2 * connect_pace._SLOTS


async def test_an_address_that_has_answered_does_not_wait_for_its_turn() -> None:
    pace = ConnectPace()
    async with AsyncTurns(pace, connect_pace._SLOTS):
        async with pace.turn(answered=True):
            pass
        waiting = asyncio.create_task(AsyncTurns(pace, 1).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, BOUND_S)


class AsyncTurns:
    """Holds so many turns."""

    def __init__(self, pace: ConnectPace, count: int) -> None:
        self._turns = [pace.turn(answered=False) for _ in range(count)]

    async def __aenter__(self) -> None:
        for turn in self._turns:
            await turn.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        for turn in self._turns:
            await turn.__aexit__(None, None, None)


async def test_a_turn_that_failed_is_taken_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_pace, "_SLOT_REST_S", 0.0)
    pace = ConnectPace()
    for _ in range(3 * connect_pace._SLOTS):
        with pytest.raises(OSError, match="refused"):
            async with pace.turn(answered=False):
                raise OSError("refused")


def test_the_more_addresses_do_not_answer_the_longer_are_the_pauses() -> None:
    pace = ConnectPace()
    assert pace.pause_s(1.0) == 1.0
    pace.silent = 20
    assert pace.pause_s(1.0) == 1.0
    pace.silent = 2000
    assert 2000 / pace.pause_s(1.0) <= connect_pace._RETRIES_PER_S
