"""A link forwards, and is cut, reset, silent and healed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from tests.integration.proxy import free_address
from tests.link import Link
from tests.tcp_server import tcp_server


class Line:
    """A connection through a link to a server that sends everything back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def says(self, word: bytes) -> bytes:
        self.writer.write(word)
        await self.writer.drain()
        return await self.reader.readexactly(len(word))

    async def is_reset(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True


Dial = Callable[[Link], Awaitable[Line]]


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(1000):
                writer.write(piece)

    async with tcp_server(echo) as port, Link("one-two", f"127.0.0.1:{port}") as link:
        yield link


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    writers: list[asyncio.StreamWriter] = []

    async def connect(link: Link) -> Line:
        host, _, port = link.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return Line(reader, writer)

    yield connect
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_it_forwards_both_ways_for_several_connections(link: Link, dial: Dial) -> None:
    one, other = await dial(link), await dial(link)
    assert await one.says(b"a") == b"a"
    assert await other.says(b"b" * 100_000) == b"b" * 100_000
    assert await one.says(b"c") == b"c"


async def test_a_reset_ends_connections_and_new_ones_work(link: Link, dial: Dial) -> None:
    one = await dial(link)
    assert await one.says(b"a") == b"a"
    link.reset()
    assert await one.is_reset()
    assert await (await dial(link)).says(b"b") == b"b"


async def test_a_cut_link_refuses_until_it_is_healed(link: Link, dial: Dial) -> None:
    one = await dial(link)
    assert await one.says(b"a") == b"a"
    link.cut()
    assert await one.is_reset()
    assert await (await dial(link)).is_reset()
    link.heal()
    assert await (await dial(link)).says(b"b") == b"b"


@pytest.mark.parametrize("direction", ["there", "back", "both"])
async def test_a_silent_link_keeps_what_it_gets_until_it_is_healed(link: Link, dial: Dial, direction: str) -> None:
    one = await dial(link)
    assert await one.says(b"a") == b"a"
    link.silence(direction)
    asking = asyncio.create_task(one.says(b"b"))
    # Another link to the same server forwards meanwhile, so this one had its chance.
    async with Link("other", link._target) as other:
        assert await (await dial(other)).says(b"c") == b"c"
    assert not asking.done()
    link.heal()
    assert await asking == b"b"


async def test_what_is_slow_and_late_arrives_whole(link: Link, dial: Dial) -> None:
    link.delay_s, link.bytes_per_s = 0.001, 1e7
    assert await (await dial(link)).says(b"d" * 200_000) == b"d" * 200_000


async def test_a_target_that_is_gone_resets_the_caller(dial: Dial) -> None:
    async with Link("one-two", free_address()) as link:
        assert await (await dial(link)).is_reset()
