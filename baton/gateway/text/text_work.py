"""Runs work on texts in threads. Small texts never wait for large ones.

It limits how many bytes of large texts run at once, because tokenizing takes a hundred times a text's memory.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from baton.core.errors import Overloaded
from baton.settings.config import MIB

T = TypeVar("T")

_SMALL_BYTES = 1 << 16
_RUNNING_BYTES = 4 << 20
_HELD_BYTES = 256 << 20
# A held text takes about 1.5 times its bytes, and a process without texts takes 150 MiB.
_SHARE_OF_MEMORY = 8
_THREADS = 4
_RETRY_AFTER_S = 1.0


def text_budget(memory_bytes: int, *, processes: int) -> int:
    """Returns how many bytes of large texts one process may hold.

    Args:
        memory_bytes: memory that all processes of the gateway may use together.
    """
    return min(_HELD_BYTES, memory_bytes // _SHARE_OF_MEMORY // processes)


@dataclass(eq=False)
class _Waiting:
    size_bytes: int
    turn: "asyncio.Future[None]"


class TextWork:
    """Runs work on the texts of one process. Create it on the process's event loop.

    Args:
        running_bytes: most bytes of large texts in work at the same time; a larger text runs alone.
        held_bytes: most bytes of large texts that wait or are in work; a single text may be larger.
    """

    def __init__(self, *, running_bytes: int = _RUNNING_BYTES, held_bytes: int = _HELD_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._running_max, self._held_max = running_bytes, held_bytes
        self._running = self._held = 0
        self._waiting: deque[_Waiting] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, "text")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs `work` in a thread and returns its result. A large text waits for earlier large texts.

        Args:
            size_bytes: approximate size of the text.

        Raises:
            Overloaded: too many bytes are held already.
        """
        if size_bytes <= _SMALL_BYTES:
            return await asyncio.to_thread(work)
        with self.holding() as hold:
            hold(size_bytes)
            share = min(size_bytes, self._running_max)
            await self._turn(share)
            running = self._threads.submit(work)
            running.add_done_callback(partial(self._thread_done, share))  # a cancelled call's thread keeps running
            return await asyncio.wrap_future(running)

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that adds bytes to those that are held until the block ends.

        The function raises Overloaded if too many bytes are held already.
        """
        mine = 0

        def hold(size_bytes: int) -> None:
            nonlocal mine
            is_small = mine + size_bytes <= _SMALL_BYTES
            if not is_small and self._held > mine and self._held + size_bytes > self._held_max:
                message = f"texts of {self._held // MIB} MiB are waiting, of at most {self._held_max // MIB} MiB"
                raise Overloaded(message, cure="retry later", retry_after_s=_RETRY_AFTER_S)
            mine += size_bytes
            self._held += size_bytes

        try:
            yield hold
        finally:
            self._held -= mine

    async def _turn(self, size_bytes: int) -> None:
        waiting = _Waiting(size_bytes, self._loop.create_future())
        self._waiting.append(waiting)
        self._give_turns()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():
                self._done(size_bytes)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._give_turns()
            raise

    def _give_turns(self) -> None:
        while self._waiting and self._running + self._waiting[0].size_bytes <= self._running_max:
            waiting = self._waiting.popleft()
            if not waiting.turn.done():
                self._running += waiting.size_bytes
                waiting.turn.set_result(None)

    def _done(self, size_bytes: int) -> None:
        self._running -= size_bytes
        self._give_turns()

    def _thread_done(self, size_bytes: int, _: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._done, size_bytes)
