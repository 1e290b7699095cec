"""However a test's server ends, it leaves no socket open and hides no error."""

import asyncio
import gc
import socket
from contextlib import AsyncExitStack, suppress

import pytest

from tests.tcp_server import tcp_server


async def until_the_client_leaves(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize("iterations", range(6))
async def test_connections_that_arrive_as_it_ends_are_closed(iterations: int) -> None:
    """asyncio accepts a connection over several iterations of its loop: in none of them is the socket lost."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(tcp_server(until_the_client_leaves))
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        for _ in range(iterations):
            await asyncio.sleep(0)
    assert len(clients) == 3
    gc.collect()  # a lost socket is a warning here, so an error


async def test_an_error_of_a_handler_fails_the_test() -> None:
    async def fail(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        raise AssertionError(await reader.read(1))

    async def ask() -> None:
        async with tcp_server(fail) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"a")
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

    with pytest.raises(ExceptionGroup, match="connections that were not served"):
        await ask()
