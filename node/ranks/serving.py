"""The other end of `node.ranks.remote`: does what rank 0 asks of this rank's KV transfer, and tells what happens."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from baton.errors import BatonError, InternalError
from kvtransfer.ranked import OnFilled, OnRefused
from kvtransfer.transfer import KVTransfer
from node.ranks.channel import AsyncChannel, Channel
from node.ranks.messages import Answer, Beat, Call, Cancel, Close, Start

log = logging.getLogger("baton")

_BEAT_S = 1.0
_STUCK_AFTER_S = 4.0
# What rank 0 may ask of a KVTransfer.
_METHODS = frozenset(
    {
        "listen",
        "connect",
        "disconnect",
        "warm_up",
        "warmed_up",
        "use_link",
        "send",
        "quiet",
        "open_lease",
        "close_lease",
    }
)


class TransferServer:
    """Args:
    make: this rank's transfer, of the node of that incarnation.
    """

    def __init__(self, rank: int, make: Callable[[int, OnFilled, OnRefused], KVTransfer]) -> None:
        self._rank = rank
        self._make = make
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, calls: Channel) -> None:
        """Returns when it is told to close.

        Raises:
            EOFError: rank 0 is gone.
        """
        channel = await AsyncChannel.over(calls)
        try:
            start: Start = await channel.receive()
            async with self._make(start.incarnation, channel.send, channel.send) as transfer:
                channel.send(Answer(start.number))
                await self._follow(channel, transfer)
        finally:
            await channel.close()

    async def _follow(self, channel: AsyncChannel, transfer: KVTransfer) -> None:
        beat = asyncio.create_task(self._beat(channel, transfer), name="beat")
        try:
            while not isinstance(order := await channel.receive(), Close):
                self._take(order, channel, transfer)
        finally:
            beat.cancel()

    def _take(self, order: Call | Cancel, channel: AsyncChannel, transfer: KVTransfer) -> None:
        number = order.number
        if isinstance(order, Call):
            task = asyncio.create_task(self._answer(order, channel, transfer), name=f"call-{order.method}")
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif task_or_none := self._tasks.get(number):
            task_or_none.cancel()

    async def _answer(self, call: Call, channel: AsyncChannel, transfer: KVTransfer) -> None:
        assert call.method in _METHODS, call.method
        method: Callable[..., Any] = getattr(transfer, call.method)
        try:
            channel.send(Answer(call.number, await method(*call.arguments, **call.named)))
        except BatonError as error:
            channel.send(Answer(call.number, error=error))
        except Exception as error:
            log.exception("a call of %s failed", call.method)
            told = InternalError(f"{type(error).__name__} on rank {self._rank}", cure="see the node's log")
            channel.send(Answer(call.number, error=told))

    async def _beat(self, channel: AsyncChannel, transfer: KVTransfer) -> None:
        while True:
            channel.send(Beat(transfer.counters(), transfer.stuck(after_s=_STUCK_AFTER_S)))
            await asyncio.sleep(_BEAT_S)
