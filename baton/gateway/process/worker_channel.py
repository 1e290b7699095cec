"""Request and reply between a gateway's worker and its parent: lines of JSON on a socket pair.

Each side may ask at any time, and answers may come in a different order.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]

_LINE_BYTES_MAX = 16 << 20
# A worker that has ended closes its end. A slow one answers late: "not found" would be false in place of its answer.
ANSWER_S = 10.0


class WorkerChannel:
    """One end of the socket pair. `run` reads until the other end is closed.

    Args:
        answer: answers a question of the other side.
    """

    def __init__(self, end: socket.socket, answer: Callable[[Message], Awaitable[Message]]) -> None:
        self._end = end
        self._answer = answer
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Message]] = {}  # by number of the question
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []  # lines from before `run`

    async def run(self) -> None:
        """Reads and answers until the other side is closed."""
        reader, self._writer = await asyncio.open_connection(sock=self._end, limit=_LINE_BYTES_MAX)
        self._writer.writelines(self._unsent)
        try:
            while line := await reader.readline():
                self._received(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._writer.close()
            self._writer = None
            for pending in self._pending.values():
                pending.cancel()
            for task in self._answering:
                task.cancel()

    async def ask(self, question: Message, *, within_s: float = ANSWER_S) -> Message | None:
        """Sends a question; returns its answer, or None if the other side is closed or does not answer in time."""
        number = next(self._numbers)
        pending = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, **question})
            done, _ = await asyncio.wait([pending], timeout=within_s)
        finally:  # the client that waits for it may leave
            del self._pending[number]
        return pending.result() if done and not pending.cancelled() else None

    def _received(self, message: Message) -> None:
        if "ask" in message:
            task = asyncio.create_task(self._reply(message.pop("ask"), message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (pending := self._pending.get(message.pop("to"))) is not None and not pending.done():
            pending.set_result(message)

    async def _reply(self, number: int, question: Message) -> None:
        self._send({"to": number, **await self._answer(question)})

    def _send(self, message: Message) -> None:
        line = json.dumps(message).encode() + b"\n"
        if self._writer is None:
            self._unsent.append(line)
        else:
            self._writer.write(line)
