"""Serves this rank's KV transfer to rank 0: performs calls, and reports lease events.

Rank 0's end is `baton.node.ranks.remote`.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from baton.core.errors import BatonError, Cancelled, InternalError
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
    SaveEntries,
    SendWarmUp,
    ServePull,
    Start,
    UseLink,
    Verb,
)
from kvtransfer.rank_transfer import OnFilled, OnRefused, RankTransfer
from kvtransfer.transfer import KVTransfer

log = logging.getLogger("baton")

_HEARTBEAT_S = 1.0
_STUCK_AFTER_S = 4.0


class TransferServer:
    """Serves one rank's transfer to rank 0.

    Args:
        make: makes this rank's transfer for the node's incarnation.
        guard: entered before the transfer opens, and again while it serves, so that it sees errors first.
    """

    def __init__(
        self,
        rank: int,
        make: Callable[[int, OnFilled, OnRefused], KVTransfer],
        *,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._rank = rank
        self._make = make
        self._guard = guard
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, calls: socket.socket) -> None:
        """Serves until rank 0 sends `Close`.

        Raises:
            EOFError: rank 0 is gone.
            Draining: the transfer cannot continue.
        """
        channel = await Channel.over(calls)
        try:
            start: Start = await channel.receive()
            transfer = self._make(start.incarnation, channel.send, channel.send)
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            transfer.watch(lambda peer, error: channel.send(LinkFailed(peer, error)), failed.set_exception)
            with self._guard():
                async with transfer:
                    with self._guard():
                        channel.send(RankAnswer(start.number))
                        await self._follow(channel, transfer, failed)
        finally:
            await channel.close()

    async def _follow(self, channel: Channel, transfer: KVTransfer, failed: "asyncio.Future[None]") -> None:
        # NOTE: a TaskGroup would wrap the EOFError that ends this function in a group, and cancel calls that the
        # transfer's close is about to answer.
        heartbeat = asyncio.create_task(self._send_heartbeats(channel, transfer), name="heartbeat")
        orders = asyncio.create_task(self._take_all(channel, transfer), name="orders")
        try:
            await asyncio.wait([orders, failed], return_when=asyncio.FIRST_COMPLETED)
            await (orders if orders.done() else failed)
        finally:
            orders.cancel()
            heartbeat.cancel()

    async def _take_all(self, channel: Channel, transfer: KVTransfer) -> None:
        while not isinstance(order := await channel.receive(), Close):
            self._take(order, channel, transfer)

    def _take(self, order: RankCall | Cancel, channel: Channel, transfer: KVTransfer) -> None:
        number = order.number
        if isinstance(order, RankCall):
            name = f"call-{type(order.verb).__name__}"
            task = asyncio.create_task(self._answer(order, channel, transfer), name=name)
            self._tasks[number] = task
            task.add_done_callback(partial(self._ended, number, channel))
        elif task_or_none := self._tasks.get(number):
            task_or_none.cancel()

    def _ended(self, number: int, channel: Channel, task: "asyncio.Task[None]") -> None:
        del self._tasks[number]
        if task.cancelled():  # maybe before it began
            channel.send(RankAnswer(number, error=Cancelled("the caller has cancelled this call")))

    async def _answer(self, call: RankCall, channel: Channel, transfer: KVTransfer) -> None:
        try:
            channel.send(RankAnswer(call.number, await perform(transfer, call.verb)))
        except BatonError as error:
            channel.send(RankAnswer(call.number, error=error))
        except Exception as error:
            log.exception("%s failed", call.verb)
            failure = InternalError(f"{type(error).__name__} on rank {self._rank}", cure="see the node's log")
            channel.send(RankAnswer(call.number, error=failure))

    async def _send_heartbeats(self, channel: Channel, transfer: KVTransfer) -> None:
        while True:
            channel.send(Heartbeat(transfer.counters(), transfer.stuck(after_s=_STUCK_AFTER_S)))
            await asyncio.sleep(_HEARTBEAT_S)


def perform(transfer: RankTransfer, verb: Verb[Any]) -> Awaitable[Any]:
    """Calls the transfer's method for a verb.

    Raises:
        InternalError: the verb is unknown.
    """
    match verb:
        case Listen():
            return transfer.listen(verb.peer)
        case RankConnect():
            return transfer.connect(
                verb.peer,
                verb.address,
                message_bytes=verb.message_bytes,
                group=verb.group,
                conversion=verb.conversion,
                incarnation=verb.incarnation,
                sealed=verb.sealed,
                has_draft=verb.has_draft,
            )
        case Disconnect():
            return transfer.disconnect(verb.peer)
        case SendWarmUp():
            return transfer.warm_up(verb.peer, verb.sender_number)
        case AwaitWarmUp():
            return transfer.warmed_up(verb.peer, verb.messages, verb.bytes, timeout_s=verb.timeout_s)
        case UseLink():
            return transfer.use_link(verb.peer, verb.link)
        case RankSend():
            return transfer.send(verb.job)
        case Quiet():
            return transfer.quiet(verb.peer, verb.lease)
        case RankOpenLease():
            return transfer.open_lease(verb.lease)
        case RankCloseLease():
            return transfer.close_lease(verb.number)
        case SaveEntries():
            return transfer.save_entries(*verb.saves)
        case FindEntries():
            return transfer.find_entries(verb.keys)
        case FindState():
            return transfer.find_state(verb.after)
        case LoadEntries():
            return transfer.load_entries(verb.entries, timeout_s=verb.timeout_s, entry_s=verb.entry_s)
        case BeginPull():
            return transfer.begin_pull(verb.job, verb.links)
        case EndPull():
            return transfer.end_pull(verb.number, first=verb.first, timeout_s=verb.timeout_s)
        case ServePull():
            return transfer.serve_pull(verb.link, verb.job)
        case KeepEntries():
            return transfer.keep_entries(verb.keys, verb.keep, with_state=verb.with_state)
        case DropEntries():
            return transfer.drop_entries(verb.keys)
        case DropEntriesOf():
            return transfer.drop_entries_of(verb.roots)
        case Reopen():
            return transfer.reopen(incarnation=verb.incarnation, receive_bytes_per_s=verb.receive_bytes_per_s)
    raise InternalError(f"a KV transfer has no verb {verb}")
