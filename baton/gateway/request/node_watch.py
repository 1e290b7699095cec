"""Receives one node's statuses and the changes of its prefix cache, on streams that are reopened when they break.

Callbacks receive them; `baton.gateway.fleet.fleet` keeps the node's state.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from baton.gateway.fleet.connect_pace import ConnectPace
from baton.gateway.fleet.watch_pace import WatchPace
from baton.gateway.request.node_channel import NodeChannel
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import take_unchanged
from baton.rpc.status import last_cause

log = logging.getLogger("baton")

_SILENT_S = 1.0  # a connected node without a first status counts as silent after this time
_FIRST_STATUS_TIMEOUT_S = 5.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.05, 1.0

_Watch: TypeAlias = grpc.aio.UnaryStreamCall[node_pb2.WatchRequest, node_status_pb2.NodeStatus]


@dataclass(frozen=True)
class WatchCallbacks:
    """Callbacks for a node's statuses, for the loss of its connection, and for changes of its prefix cache.

    Args:
        cache: returns False if earlier changes are missing, so that a snapshot is needed.
        silent: called while the node is connected but sends no status; its interpreter may be busy for seconds.
    """

    status: Callable[[node_status_pb2.NodeStatus], None]
    lost: Callable[[str], None]
    cache: Callable[[node_pb2.WatchCacheResponse], bool]
    silent: Callable[[], None]


class NodeWatch:
    """The streams of statuses and cache changes of one node while `run` runs.

    Args:
        address: names the node in the log.
        channel: to the node; replaced while the node does not answer.
        pace: limits attempts to connect; shared with other nodes.
        watch_pace: how often nodes report; shared with other nodes.
        is_idle: says whether nothing else uses the channel.
        last_messages: waits a moment for the last messages of a node that has ended its statuses.
    """

    def __init__(
        self,
        address: str,
        channel: NodeChannel,
        callbacks: WatchCallbacks,
        *,
        pace: ConnectPace,
        watch_pace: WatchPace,
        is_idle: Callable[[], bool],
        last_messages: Callable[[], Awaitable[None]],
    ) -> None:
        self._address = address
        self._channel = channel
        self._callbacks = callbacks
        self._pace = pace
        self._watch_pace = watch_pace
        self._is_idle = is_idle
        self._last_messages = last_messages
        self._repeat_s = 0.0  # of the present Watch stream
        self._answered = False  # whether the node has ever sent a status
        self._silent = False
        self._status_received = False  # on the present Watch stream
        self._watching: asyncio.Task[str] | None = None

    def close(self) -> None:
        """Counts the node as silent no longer. Cancel `run` first."""
        self._set_silent(silent=False)

    async def run(self) -> None:
        """Watches the node and reconnects whenever the stream ends, until it is cancelled."""
        retry_s = _RETRY_S_MIN
        while True:
            self._status_received = False
            async with asyncio.TaskGroup() as tasks:
                self._watching = tasks.create_task(self._watch_once())
            # If `end` has cancelled it, its caller has reported the reason.
            if not self._watching.cancelled() and (reason := self._watching.result()):
                self._callbacks.lost(reason)
            if self._status_received:
                retry_s = _RETRY_S_MIN
            else:
                retry_s = min(2 * retry_s, _RETRY_S_MAX)
                await self._replace_channel()
            await asyncio.sleep(self._pace.pause_s(retry_s))

    async def _replace_channel(self) -> None:
        """Replaces the channel of a node that did not answer: a used channel reconnects by itself, at any pace."""
        self._set_silent(silent=True)
        if self._channel.is_used and self._is_idle():
            await self._channel.replace()

    def _set_silent(self, *, silent: bool) -> None:
        self._pace.silent += silent - self._silent
        self._silent = silent

    def end(self) -> None:
        """Ends the present Watch stream; `run` then opens another one."""
        if self._watching is not None:
            self._watching.cancel()

    def follow_pace(self) -> None:
        """Opens another Watch stream if the cluster has become so much larger or smaller that its pace is wrong."""
        wanted_s = self._watch_pace.repeat_s
        if self._status_received and not self._repeat_s / 2 <= wanted_s <= 2 * self._repeat_s:
            self.end()

    def cache_changes(
        self, request: node_pb2.WatchCacheRequest
    ) -> grpc.aio.UnaryStreamCall[node_pb2.WatchCacheRequest, node_pb2.WatchCacheResponse]:
        """Opens a stream of the changes of the node's prefix cache. The caller must cancel it."""
        return self._channel.node.WatchCache(request)

    async def _watch_once(self) -> str:
        """Receives statuses and cache changes until the stream ends; returns the reason.

        Returns "" if the node is connected but has sent no status for so long that another address gets the slot.
        """
        call: _Watch | None = None
        following: asyncio.Task[None] | None = None
        try:
            async with self._pace.turn(answered=self._answered):
                self._channel.is_used = True
                self._repeat_s = self._watch_pace.repeat_s
                wanted = node_pb2.WatchRequest(
                    interval_s=self._watch_pace.interval_s,
                    repeat_s=self._repeat_s,
                    while_loading=True,
                    without_unchanged=True,
                )
                call = self._channel.node.Watch(wanted)
                try:
                    status = await self._first_status(call)
                except (grpc.aio.AioRpcError, TimeoutError):
                    call.cancel()
                    await self._replace_channel()  # closes the connection before the next address gets the slot
                    raise
            following = asyncio.create_task(self._follow_cache(), name="follow-cache")
            last = node_status_pb2.NodeStatus()
            while isinstance(status, node_status_pb2.NodeStatus):
                self._status_received = self._answered = True
                self._set_silent(silent=False)
                take_unchanged(status, last)
                last = status
                self._callbacks.status(status)
                status = await call.read()
        except grpc.aio.AioRpcError as error:
            # NOTE: the error's frames refer to the call: it would keep the connection open until a garbage collection.
            return last_cause(error.with_traceback(None))
        except TimeoutError as error:
            return str(error)
        finally:
            if call is not None:
                call.cancel()
            if following is not None:
                following.cancel()
        # The node has drained and ended its session before this stream, but the session's last messages may come later.
        await self._last_messages()
        return "it ended the stream"

    async def _first_status(self, call: _Watch) -> object:
        """Waits for a node's first status.

        Raises:
            grpc.aio.AioRpcError: the node cannot be reached.
            TimeoutError: no status came. Its text is the reason, or "" if the node is connected and perhaps busy.
        """
        reporting = asyncio.create_task(self._report_silence())
        try:
            # NOTE: not `wait_for` or a task: their errors are part of a cycle that keeps the connection open until a
            # garbage collection.
            async with asyncio.timeout(_FIRST_STATUS_TIMEOUT_S):
                return await call.read()
        except TimeoutError:
            raise TimeoutError(
                "" if self._channel.is_connected else f"no connection for {_FIRST_STATUS_TIMEOUT_S:g} s"
            ) from None
        finally:
            reporting.cancel()

    async def _report_silence(self) -> None:
        while True:
            await asyncio.sleep(_SILENT_S)
            if self._channel.is_connected:
                self._callbacks.silent()

    async def _follow_cache(self) -> None:
        """Receives changes of the prefix cache until it is cancelled. Returns if the node does not publish them."""
        last = node_pb2.WatchCacheResponse()
        while True:
            call = self.cache_changes(
                node_pb2.WatchCacheRequest(after_sequence=last.sequence, incarnation=last.incarnation)
            )
            try:
                async for batch in call:
                    if not self._callbacks.cache(batch):
                        last = node_pb2.WatchCacheResponse()
                        break
                    if not batch.more:
                        last = batch
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # a node of an older version
            except Exception:  # a bug in our code; no caller would see the error, because nothing awaits this task
                log.exception("%s: its prefix cache cannot be followed; trying again with a snapshot", self._address)
                last = node_pb2.WatchCacheResponse()
            finally:
                call.cancel()
            await asyncio.sleep(_RETRY_S_MAX)
