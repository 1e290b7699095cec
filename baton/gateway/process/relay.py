"""Passes a worker's question on to the other workers. The parent process has one."""

import asyncio

from baton.gateway.process.worker_channel import Message, WorkerChannel


class Relay:
    """The channels of all workers, by row.

    A worker that starts is not asked: it knows no request and no stored answer, and answers only once it has read the
    model's files, which may take longer than the others can wait.

    Attributes:
        ready: rows of the workers that serve.
    """

    def __init__(self) -> None:
        self.ready: set[int] = set()
        self._channels: dict[int, WorkerChannel] = {}

    def add(self, row: int, channel: WorkerChannel) -> None:
        """Adds a worker that starts."""
        self._channels[row] = channel

    def remove(self, row: int) -> None:
        """Forgets a worker that has ended."""
        del self._channels[row]

    async def ask_others(self, row: int, question: Message, *, within_s: float) -> list[Message]:
        """The answers of the other workers, as far as they come in time."""
        others = [channel for other, channel in self._channels.items() if other != row and other in self.ready]
        answers = await asyncio.gather(*(channel.ask(question, within_s=within_s) for channel in others))
        return [answer for answer in answers if answer]
