"""An event loop in a thread of its own, and how other threads wait for its coroutines and streams."""

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from baton.client.outputs import Event
from baton.core.errors import Cancelled

Answer = TypeVar("Answer")

_CANCEL_S = 5.0  # how long an interrupted call may take to end its request


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run_loop, name="baton-client", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Runs the coroutine and returns its result. An interrupt such as Ctrl-C cancels the coroutine first.

        Raises:
            RuntimeError: the client is closed, or belongs to the process that forked this one.
            Cancelled: it was closed meanwhile.
        """
        if os.getpid() != self._process:  # its thread is not in this process, and its lock may be held for ever
            cure = "close clients before a fork, or start processes with multiprocessing's spawn"
            raise RuntimeError(f"this client belongs to the process that forked this one; {cure}")
        call = Call(work)
        try:
            with self._closing:  # what is submitted before `close` is cancelled by it; nothing is submitted after it
                if self._closed:
                    raise _ClosedClient("the client is closed")
                self._loop.call_soon_threadsafe(call.begin)
            ended = call.done.get()
        except _ClosedClient:
            raise
        except BaseException:
            with suppress(RuntimeError, queue.Empty):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(call.stop)
                call.done.get(timeout=_CANCEL_S)
            raise
        assert ended is not None, "only a stopped call has not begun"
        answer, error = ended
        if error is not None:
            raise error
        return cast(Answer, answer)

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts the work unless the client is closed, and does not wait for it.

        The garbage collector calls this in any thread, also in the loop's own, and when the program ends, where the
        loop stands still. So it takes no lock.
        """
        if not self._closed and os.getpid() == self._process:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(work()))

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ends what still runs, runs `last`, and ends the thread."""
        ended = self.abandon(last)
        if ended is not None:
            with suppress(queue.Empty):
                ended.get(timeout=_CANCEL_S)
            self._thread.join(_CANCEL_S)

    def abandon(self, last: Callable[[], Coroutine[Any, Any, None]]) -> "queue.SimpleQueue[None] | None":
        """As `close`, but does not wait: returns a queue that gets None at the end. Returns None if that happened
        before."""
        if os.getpid() != self._process:
            return None
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        async def end() -> None:
            try:
                await _end_with(last)
            finally:
                ended.put(None)
                self._loop.stop()

        with self._closing:
            if self._closed:
                return None
            self._closed = True
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(end()))
        return ended

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


@dataclass(eq=False)
class Call(Generic[Answer]):
    """A call of a thread that waits for it.

    Attributes:
        work: makes the coroutine, on the loop: one that was made and never begun would leave a warning.
        done: gets the answer or the error, or None if a stopped call has not begun. A queue, because it needs no lock
            of Python: Ctrl-C can strike between any two steps of the thread, and a lock that it left held would stop
            the loop.
    """

    work: Callable[[], Coroutine[Any, Any, Answer]]
    done: "queue.SimpleQueue[tuple[Answer | None, BaseException | None] | None]" = field(
        default_factory=queue.SimpleQueue
    )
    task: "asyncio.Task[Answer] | None" = None

    def begin(self) -> None:
        try:
            self.task = asyncio.get_running_loop().create_task(self.work())
        except Exception as error:  # noqa: BLE001  the waiting thread raises it
            self.done.put((None, error))
        else:
            self.task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Answer]") -> None:
        if task.cancelled():
            self.done.put((None, Cancelled("the client was closed while the request ran")))
        elif (error := task.exception()) is not None:
            self.done.put((None, error))
        else:
            self.done.put((task.result(), None))

    def stop(self) -> None:
        """Comes after `begin`, if that comes at all."""
        if self.task is None:
            self.done.put(None)
        else:
            self.task.cancel()


class Stream:
    """A stream of events on the loop that may be ended while its next event is awaited."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._reader: asyncio.Task[Any] | None = None  # waits for the next event

    async def next(self) -> Event | None:
        """Returns None after the last event."""
        self._reader = asyncio.current_task()
        try:
            return await anext(self._events, None)
        finally:
            self._reader = None

    async def end(self) -> None:
        """Ends the request. A Ctrl-C may leave `next` running, because it can strike before anyone waits for it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        await self._events.aclose()


class _ClosedClient(RuntimeError):
    """A call of a client that was closed before."""


async def _end_with(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancels every other task of this loop, such as the calls of other threads, and awaits their ends, then `last`."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await last()
