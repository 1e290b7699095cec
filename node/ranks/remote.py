"""The KV transfer of another rank, as the node's own process sees it: calls go there, answers and events come back."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from baton.errors import Draining
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.link import LinkSpeed
from kvtransfer.records import LinkMeasure, SegmentRefused, SendJob, TransferCounters, WarmUp
from kvtransfer.segments import Segment
from node.ranks.channel import AsyncChannel, Channel
from node.ranks.messages import Answer, Beat, Call, Cancel, Close, Report, Start

_CLOSE_TIMEOUT_S = 5.0


class RemoteTransfer:
    """Has the methods of `KVTransfer` that a node uses, and their meaning.

    Args:
        channel: to that rank, which this object closes.
        on_filled, on_refused: called on the event loop that `start` ran on.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        *,
        incarnation: int,
        on_filled: Callable[[LeaseTotals], None],
        on_refused: Callable[[SegmentRefused], None],
    ) -> None:
        self._rank = rank
        self._blocking = channel
        self._incarnation = incarnation
        self._on_filled = on_filled
        self._on_refused = on_refused
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._channel: AsyncChannel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._gone = False
        self._beat = Beat(TransferCounters({}, {}), "")
        self._beat_s = time.monotonic()

    async def start(self) -> None:
        """Returns when the rank has loaded its part of the model, and its transfer is open."""
        self._channel = await AsyncChannel.over(self._blocking)
        self._reader = asyncio.create_task(self._read(self._channel), name=f"rank-{self._rank}")
        number, future = self._expect()
        self._channel.send(Start(number, self._incarnation))
        await future
        self._beat_s = time.monotonic()

    async def close(self) -> None:
        """Asks the rank to end, and returns when it has, or after a while."""
        if self._channel is None or self._reader is None:
            return
        self._channel.send(Close())
        await asyncio.wait([self._reader], timeout=_CLOSE_TIMEOUT_S)
        self._reader.cancel()
        await self._channel.close()

    async def listen(self, peer: int) -> bytes:
        address: bytes = await self._ask("listen", peer)
        return address

    async def connect(
        self,
        peer: int,
        address: bytes,
        *,
        message_bytes: int | None = None,
        group: int,
        conversion: KVConversion | None = None,
    ) -> None:
        await self._ask("connect", peer, address, message_bytes=message_bytes, group=group, conversion=conversion)

    async def disconnect(self, peer: int) -> tuple[int, ...]:
        leases: tuple[int, ...] | None = await self._ask_unless_gone("disconnect", peer)
        return leases or ()

    async def warm_up(self, peer: int, sender_number: int) -> WarmUp:
        sent: WarmUp = await self._ask("warm_up", peer, sender_number)
        return sent

    async def warmed_up(self, peer: int, messages: int, bytes: int, *, timeout_s: float) -> LinkMeasure:
        measure: LinkMeasure = await self._ask("warmed_up", peer, messages, bytes, timeout_s=timeout_s)
        return measure

    async def use_link(self, peer: int, link: LinkSpeed) -> None:
        await self._ask("use_link", peer, link)

    async def send(self, job: SendJob) -> tuple[Segment, ...]:
        sent: tuple[Segment, ...] = await self._ask("send", job)
        return sent

    async def quiet(self, peer: int, lease: int) -> None:
        await self._ask_unless_gone("quiet", peer, lease)

    def open_lease(self, lease: LeaseGrant) -> "asyncio.Future[None]":
        return asyncio.shield(self._post("open_lease", lease)[1])

    async def close_lease(self, number: int) -> LeaseTotals:
        totals: LeaseTotals | None = await self._ask_unless_gone("close_lease", number)
        return totals or LeaseTotals(number, 0, 0, 0.0)

    def counters(self) -> TransferCounters:
        """As they were at most a second ago."""
        return self._beat.counters

    def stuck(self, *, after_s: float) -> str:
        silent_s = time.monotonic() - self._beat_s
        if self._gone or silent_s > after_s:
            return f"rank {self._rank} has said nothing for {silent_s:.0f} s"
        return f"rank {self._rank}: {self._beat.stuck}" if self._beat.stuck else ""

    # ---- calls

    async def _ask(self, method: str, *arguments: object, **named: object) -> Any:
        number, future = self._post(method, *arguments, **named)
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise

    async def _ask_unless_gone(self, method: str, *arguments: object) -> Any:
        """A rank that is gone writes and reads nothing any more."""
        try:
            return await self._ask(method, *arguments)
        except Draining:
            return None

    def _post(self, method: str, *arguments: object, **named: object) -> tuple[int, asyncio.Future[Any]]:
        number, future = self._expect()
        if self._gone:
            future.set_exception(self._is_gone())
        else:
            self._send(Call(number, method, arguments, named))
        return number, future

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return number, future

    def _send(self, message: Call | Cancel) -> None:
        assert self._channel is not None, "start comes first"
        self._channel.send(message)

    def _is_gone(self) -> Draining:
        return Draining(f"rank {self._rank} is gone, and the node ends", cure="send the request to another node")

    # ---- what comes back

    async def _read(self, channel: AsyncChannel) -> None:
        try:
            while True:
                self._take(await channel.receive())
        except EOFError:
            self._gone = True
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(self._is_gone())

    def _take(self, report: Report) -> None:
        match report:
            case Answer(number=number, result=result, error=error):
                future = self._waiting.get(number)
                if future is None or future.done():
                    return  # it was cancelled
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            case LeaseTotals():
                self._on_filled(report)
            case SegmentRefused():
                self._on_refused(report)
            case Beat():
                self._beat, self._beat_s = report, time.monotonic()
