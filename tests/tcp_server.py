"""A TCP server for tests that leaves no socket open."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(serve: Serve, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[int]:
    """Serves on a free port, and gives the port. At the end it aborts the connections that are still open.

    Args:
        serve: serves one connection, which is closed when it returns. It may raise because the client has left, and is
            cancelled when the server ends. Any other error fails the test.
        options: of `asyncio.start_server`.
    """
    served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served[asyncio.create_task(serve_and_close(reader, writer))] = writer

    server = await asyncio.start_server(connected, host, 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await close_server(server)
        for task, writer in served.items():
            task.cancel()
            writer.transport.abort()
        ended = await asyncio.gather(*served, return_exceptions=True)
        await asyncio.gather(*(writer.wait_closed() for writer in served.values()), return_exceptions=True)
    failures = [error for error in ended if isinstance(error, Exception) and not isinstance(error, OSError | EOFError)]
    if failures:
        raise ExceptionGroup("connections that were not served", failures)


async def close_server(server: asyncio.Server) -> None:
    """Closes a server once each connection that it has accepted is with its handler.

    asyncio accepts a connection in a task of its own. One that begins after the server was closed loses its socket, and
    pytest reports that as the error of a later test.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    while accepting := [task for task in asyncio.all_tasks() if "_accept_connection" in repr(task.get_coro())]:
        await asyncio.wait(accepting)
    server.close()
