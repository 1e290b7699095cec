"""The KV transfer of another rank, for the node's own process: sends calls, receives answers and lease events."""

import asyncio
import itertools
import math
import socket
import time
from typing import Any, TypeVar

from baton.core.errors import Draining
from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime
from baton.node.ranks.channel import Channel
from baton.node.ranks.messages import (
    AwaitWarmUp,
    BeginPull,
    Cancel,
    Close,
    Disconnect,
    DropEntries,
    DropEntriesOf,
    EndPull,
    FindEntries,
    FindState,
    Heartbeat,
    KeepEntries,
    LinkFailed,
    Listen,
    LoadEntries,
    Quiet,
    RankAnswer,
    RankCall,
    RankCloseLease,
    RankConnect,
    RankOpenLease,
    RankSend,
    Reopen,
    Report,
    SaveEntries,
    SendWarmUp,
    ServePull,
    Start,
    UseLink,
    Verb,
)
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.link import LinkSpeed
from kvtransfer.rank_transfer import OnFailed, OnFilled, OnLinkFailed, OnRefused, RankTransfer, until_done
from kvtransfer.records import EntryLink, LinkMeasure, PullJob, RefusedSegment, SendJob, TransferCounters, WarmUp
from kvtransfer.segments import Segment

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0


class RemoteTransfer(RankTransfer):
    """A `RankTransfer` whose verbs another process performs.

    Calls to a rank that is gone raise `Draining`. Closing a lease, `quiet` and `disconnect` succeed instead, because
    such a rank no longer reads or writes anything.

    Args:
        calls: the socket to that rank, which this object closes.
        incarnation: of the node.
    """

    def __init__(
        self, rank: int, calls: socket.socket, incarnation: int, on_filled: OnFilled, on_refused: OnRefused
    ) -> None:
        self._rank = rank
        self._calls = calls
        self._incarnation = incarnation
        self._on_filled = on_filled
        self._on_refused = on_refused
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._on_link_failed: OnLinkFailed | None = None
        self._channel: Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._gone = False
        self._heartbeat = Heartbeat(TransferCounters({}, {}), "")
        self._heartbeat_s = time.monotonic()

    def watch(self, on_link_failed: OnLinkFailed, on_failed: OnFailed) -> None:  # noqa: ARG002
        """Sets the callback for broken links. A rank that cannot continue exits, which `RankGroup` notices."""
        self._on_link_failed = on_link_failed

    async def start(self) -> None:
        """Returns when the rank has loaded its part of the model and its transfer is open."""
        self._channel = await Channel.over(self._calls)
        self._reader = asyncio.create_task(self._read(self._channel), name=f"rank-{self._rank}")
        number, future = self._expect()
        self._channel.send(Start(number, self._incarnation))
        await future
        self._heartbeat_s = time.monotonic()

    async def close(self) -> None:
        """Asks the rank to end. Returns when it has ended, or after a timeout."""
        if self._channel is None or self._reader is None:
            return
        self._channel.send(Close())
        await asyncio.wait([self._reader], timeout=_CLOSE_TIMEOUT_S)
        self._reader.cancel()
        await self._channel.close()

    async def reopen(self, *, incarnation: int, receive_bytes_per_s: float | None) -> None:
        await self._ask(Reopen(incarnation, receive_bytes_per_s))

    async def listen(self, peer: int) -> bytes:
        return await self._ask(Listen(peer))

    async def connect(
        self,
        peer: int,
        address: bytes,
        *,
        message_bytes: int | None = None,
        group: int | None = None,
        conversion: KVConversion | None = None,
        incarnation: int = 0,
        sealed: bool = False,
        has_draft: bool = True,
    ) -> None:
        verb = RankConnect(peer, address, message_bytes, group, conversion, incarnation, sealed, has_draft)
        await self._ask(verb)

    async def disconnect(self, peer: int) -> tuple[int, ...]:
        return await self._ask_unless_gone(Disconnect(peer), ())

    async def warm_up(self, peer: int, sender_number: int) -> WarmUp:
        return await self._ask(SendWarmUp(peer, sender_number))

    async def warmed_up(self, peer: int, messages: int, bytes: int, *, timeout_s: float) -> LinkMeasure:
        return await self._ask(AwaitWarmUp(peer, messages, bytes, timeout_s))

    async def use_link(self, peer: int, link: LinkSpeed) -> None:
        await self._ask(UseLink(peer, link))

    async def send(self, job: SendJob) -> tuple[Segment, ...]:
        return await self._ask(RankSend(job))

    async def quiet(self, peer: int, lease: int) -> None:
        await self._ask_unless_gone(Quiet(peer, lease), None)

    def open_lease(self, lease: LeaseGrant) -> "asyncio.Future[None]":
        return asyncio.shield(self._post(RankOpenLease(lease))[1])

    async def close_lease(self, number: int) -> LeaseTotals:
        return await self._ask_unless_gone(RankCloseLease(number), LeaseTotals(number, 0, 0, 0.0))

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        return await self._ask_to_end(SaveEntries(saves))

    async def find_entries(self, keys: tuple[EntryKey, ...]) -> int:
        return await self._ask(FindEntries(keys))

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        return await self._ask(FindState(after))

    async def load_entries(
        self, entries: EntryBlocks, *, timeout_s: float, entry_s: float = math.inf
    ) -> tuple[str, ...]:
        return await self._ask_to_end(LoadEntries(entries, timeout_s, entry_s))

    async def begin_pull(self, job: PullJob, links: tuple[EntryLink, ...]) -> int:
        return await self._ask(BeginPull(job, links))

    async def end_pull(self, number: int, *, first: int, timeout_s: float) -> int:
        return await self._ask(EndPull(number, first, timeout_s))

    async def serve_pull(self, link: EntryLink, job: PullJob) -> int:
        return await self._ask(ServePull(link, job))

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime, *, with_state: bool = False) -> None:
        await self._ask(KeepEntries(keys, keep, with_state))

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        await self._ask(DropEntries(keys))

    async def drop_entries_of(self, roots: frozenset[bytes]) -> DroppedEntries:
        return await self._ask(DropEntriesOf(roots))

    def counters(self) -> TransferCounters:
        """The counters of the rank's last heartbeat, which is at most a second old."""
        return self._heartbeat.counters

    def stuck(self, *, after_s: float) -> str:
        if self._gone:
            return f"rank {self._rank} is gone"
        silent_s = time.monotonic() - self._heartbeat_s
        if silent_s > after_s:
            return f"rank {self._rank} has sent nothing for {silent_s:.0f} s"
        return f"rank {self._rank}: {self._heartbeat.stuck}" if self._heartbeat.stuck else ""

    # ---- calls

    async def _ask(self, verb: Verb[T]) -> T:
        number, future = self._post(verb)
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise

    async def _ask_to_end(self, verb: Verb[T]) -> T:
        """If the caller is cancelled, returns only when the rank has ended the call too, or is gone."""
        number, future = self._post(verb)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._send(Cancel(number))
            await until_done(future)
            raise

    async def _ask_unless_gone(self, verb: Verb[T], otherwise: T) -> T:
        try:
            return await self._ask(verb)
        except Draining:
            return otherwise

    def _post(self, verb: Verb[T]) -> "tuple[int, asyncio.Future[T]]":
        number, future = self._expect()
        if self._gone:
            future.set_exception(self._is_gone())
        else:
            self._send(RankCall(number, verb))
        return number, future

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return number, future

    def _send(self, message: RankCall | Cancel) -> None:
        assert self._channel is not None, "start comes first"
        self._channel.send(message)

    def _is_gone(self) -> Draining:
        return Draining(f"rank {self._rank} is gone, so the node ends", cure="send the request to another node")

    # ---- reports

    async def _read(self, channel: Channel) -> None:
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
            case RankAnswer(number=number, result=result, error=error):
                future = self._waiting.get(number)
                if future is None or future.done():
                    return  # it was cancelled
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            case LeaseTotals():
                self._on_filled(report)
            case RefusedSegment():
                self._on_refused(report)
            case LinkFailed(peer=peer, error=error):
                if self._on_link_failed is not None:
                    self._on_link_failed(peer, error)
            case Heartbeat():
                self._heartbeat, self._heartbeat_s = report, time.monotonic()
