"""A link (`tests.link`) in a thread of its own, because tests block their event loop while processes start."""

import asyncio
import os
import random
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.link import Link


class Proxy:
    """A context manager: inside it, forwards from `address` to `target`, which nobody needs to listen on yet."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{target}")
        self._link: Link | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self) -> None:
        """Resets every connection; new ones are forwarded."""
        self._call(lambda link: link.reset())

    def cut(self) -> None:
        """Forwards nothing any more, in either direction, and closes nothing; new connections get no answer."""
        self._call(lambda link: link.silence("both"))

    def mend(self) -> None:
        """Forwards again, beginning with what was held back."""
        self._call(lambda link: link.heal())

    def _call(self, what: Callable[[Link], None]) -> None:
        async def run() -> None:
            assert self._link is not None
            what(self._link)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _open(self) -> None:
        self._link = await Link(self._target, self._target).__aenter__()
        self.address = self._link.address

    async def _close(self) -> None:
        assert self._link is not None
        await self._link.__aexit__(None, None, None)


def free_address() -> str:
    """An address for a process that starts later, or again: nobody listens there, and nobody else gets it meanwhile.

    A free port of 127.0.0.1 may be taken before it is used, by any outgoing connection. So the port is below those that
    the kernel gives away, on a loopback address that only this process uses.
    """
    host = "127.{}.{}.{}".format(*(64 + os.getpid()).to_bytes(4, "big")[1:])
    while True:
        address = host, random.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
        return "{}:{}".format(*address)
