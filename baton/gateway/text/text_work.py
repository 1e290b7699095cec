"""Work on texts in threads: few bytes of large texts at the same time, so that a crowd of them costs little memory.

Tokenizing takes a hundred times the memory of the text. Small texts wait for no large one.
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
_SHARE_OF_MEMORY = (
    8  # a large text costs its bytes about 1.5 times until it is refused, and a process 150 MiB without any
)
_THREADS = 4
_RETRY_AFTER_S = 1.0


def text_budget(memory_bytes: int, *, processes: int) -> int:
    """Bytes of large texts that one process may hold.

    Args:
        memory_bytes: that all processes of the gateway may use.
    """
    return min(_HELD_BYTES, memory_bytes // _SHARE_OF_MEMORY // processes)


@dataclass(eq=False)
class _Waiting:
    size_bytes: int
    turn: "asyncio.Future[None]"


class TextWork:
    """The large texts of one process. Create it on its event loop.

    Args:
        running_bytes: of large texts that are worked on at the same time; a larger one is worked on alone.
        held_bytes: of large texts that wait or are worked on; a single one may be larger.
    """

    def __init__(self, *, running_bytes: int = _RUNNING_BYTES, held_bytes: int = _HELD_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._running_max, self._held_max = running_bytes, held_bytes
        self._running = self._held = 0
        self._waiting: deque[_Waiting] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, "text")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; it runs in a thread, after the large texts that came before it.

        Args:
            size_bytes: of the text, roughly.

        Raises:
            Overloaded: too much waits already.
        """
        if size_bytes <= _SMALL_BYTES:
            return await asyncio.to_thread(work)
        with self.holding() as hold:
            hold(size_bytes)
            share = min(size_bytes, self._running_max)
            await self._turn(share)
            running = self._threads.submit(work)
            running.add_done_callback(partial(self._thread_done, share))  # a thread goes on after a cancellation
            return await asyncio.wrap_future(running)

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Counts bytes that are in memory within the block; yields the function that adds some.

        The function raises:
            Overloaded: too much is held already.
        """
        mine = 0

        def hold(size_bytes: int) -> None:
            nonlocal mine
            is_small = mine + size_bytes <= _SMALL_BYTES
            if not is_small and self._held > mine and self._held + size_bytes > self._held_max:
                message = f"texts of {self._held // MIB} MiB are waiting already, of at most {self._held_max // MIB}"
                raise Overloaded(message, cure="send it again later", retry_after_s=_RETRY_AFTER_S)
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
