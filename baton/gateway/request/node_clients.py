"""The gateway's connection to one node: its channel, its Watch stream, the Prefill calls and the session with it.

Callbacks receive what the node sends; `baton.gateway.fleet.fleet` keeps the node's state.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc

from baton.core.errors import BatonError, PeerRefused
from baton.gateway.fleet.connect_pace import ConnectPace
from baton.gateway.fleet.watch_pace import WatchPace
from baton.gateway.request.decode_session import DecodeSession
from baton.protos.internal.v1 import decode_pb2_grpc, node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import SHORT_ATTEMPT_S, connect
from baton.rpc.convert_node import take_unchanged
from baton.rpc.status import from_rpc_error, last_cause
from baton.security.tls import Dial
from baton.settings.gateway_config import GATEWAY_KEEPALIVE_S

log = logging.getLogger("baton")

_SILENT_S = 1.0  # a connected node without a first status counts as silent after this time
_FIRST_STATUS_TIMEOUT_S = 5.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.05, 1.0
_CONNECT_TIMEOUT_S = 20.0
_LAST_MESSAGES_S = 2.0  # a node that has ended its status stream ends its session within this time

_CLOSED = "the gateway has closed the connection"


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


class PrefillStream:
    """One Prefill call. It makes no callbacks after `cancel`.

    Its task is not part of a TaskGroup: nothing waits for a cancelled call, and its failure concerns one request only.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent],
        on_event: Callable[[prefill_pb2.PrefillEvent], None],
        on_end: Callable[[BatonError | None], None],
    ) -> None:
        self.running = True
        self._call = call
        self._on_event = on_event
        self._on_end = on_end
        self._task = asyncio.create_task(self._follow(), name="prefill-call")

    def cancel(self) -> None:
        if self.running:
            self.running = False
            self._task.cancel()
            self._call.cancel()

    def end(self, error: BatonError) -> None:
        """Cancels the call and reports the error as its end."""
        if self.running:
            self.cancel()
            self._on_end(error)

    async def _follow(self) -> None:
        error: BatonError | None = None
        try:
            async for event in self._call:
                self._on_event(event)
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
        self.running = False
        self._on_end(error)


class NodeClient:
    """Client of one node: its channel, its Watch stream while `watch` runs, its Prefill calls and its Session stream.

    Decode nodes serve only sessions, prefill nodes only Prefill calls; a prefill node that also decodes serves both.

    Args:
        on_message: called at every message of the session, as a sign of life.
        keepalive_s: time without an answer to a ping after which the node is lost.
        dial: credentials of the channel.
        pace: limits attempts to connect; shared with other clients.
        watch_pace: how often nodes report; shared with other clients.
    """

    def __init__(
        self,
        address: str,
        callbacks: WatchCallbacks,
        on_message: Callable[[], None],
        *,
        keepalive_s: float = GATEWAY_KEEPALIVE_S,
        dial: Dial | None = None,
        pace: ConnectPace | None = None,
        watch_pace: WatchPace | None = None,
    ) -> None:
        self._address = address
        # Pings are answered outside of Python, so a node that computes, loads or compiles is not lost.
        self._connect = partial(connect, address, keepalive_s=keepalive_s, dial=dial, attempt_s=SHORT_ATTEMPT_S)
        self._pace = pace or ConnectPace()
        self._watch_pace = watch_pace or WatchPace()
        self._repeat_s = 0.0  # of the present Watch stream
        self._answered = False  # whether the node has ever sent a status
        self._silent = False
        self._open()
        self._callbacks = callbacks
        self._on_message = on_message
        self._status_received = False  # on the present Watch stream
        self._watching: asyncio.Task[str] | None = None
        self._calls: list[PrefillStream] = []
        self._num_pooling = 0
        self._session: DecodeSession | None = None

    def _open(self) -> None:
        self._channel = self._connect()
        self._used = False  # a channel connects at its first call
        self._stub = node_pb2_grpc.NodeStub(self._channel)
        self._prefill_stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._decode_stub = decode_pb2_grpc.DecodeStub(self._channel)

    @property
    def busy(self) -> bool:
        """Whether the node has requests of this gateway."""
        calls = self._num_pooling > 0 or any(call.running for call in self._calls)
        return calls or (self._session is not None and self._session.num_unreleased > 0)

    async def close(self) -> None:
        self._set_silent(silent=False)
        if self._session is not None:
            await self._session.close(_CLOSED)
        await self._channel.close()

    async def retire(self, error: BatonError) -> None:
        """Closes the connection after waiting a moment for the node's last messages. Remaining requests end with the
        error."""
        try:
            if self._session is not None:
                await self._session.until_ended(_LAST_MESSAGES_S)
        finally:
            for call in self._calls:
                call.end(error)
            await self.close()

    # ---- requests

    def prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        *,
        timeout_s: float,
        on_event: Callable[[prefill_pb2.PrefillEvent], None],
        on_end: Callable[[BatonError | None], None],
    ) -> PrefillStream:
        """Starts one Prefill call. `on_end` gets the call's error, or None if the stream ended without one."""
        call = PrefillStream(self._prefill_stub.Prefill(request, timeout=timeout_s), on_event, on_end)
        self._calls = [*(running for running in self._calls if running.running), call]
        return call

    async def pool(self, request: prefill_pb2.PoolRequest, *, timeout_s: float) -> prefill_pb2.PoolResponse:
        """Makes one Pool call. Cancel the task to cancel the call.

        Raises:
            BatonError: the call failed.
        """
        self._num_pooling += 1
        try:
            return await self._prefill_stub.Pool(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error.with_traceback(None)) from None
        finally:
            self._num_pooling -= 1

    async def connect_to(self, decode_address: str) -> node_status_pb2.PeerState:
        """Asks the node to connect to a decode node; returns the pair's state.

        Raises:
            BatonError: the call failed.
        """
        request = prefill_pb2.ConnectRequest(decode_address=decode_address)
        try:
            return await self._prefill_stub.Connect(request, timeout=_CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def describe(self) -> node_status_pb2.NodeStatus:
        """The node's present status.

        Raises:
            BatonError: the call failed.
        """
        try:
            return await self._stub.Describe(node_pb2.DescribeRequest(), timeout=_FIRST_STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def switch_role(
        self, role: node_status_pb2.Role.ValueType, *, grace_s: float | None, dwell_s: float
    ) -> AsyncGenerator[node_status_pb2.RoleSwitchProgress, None]:
        """Makes the node switch to the role; yields its progress.

        Raises:
            BatonError: the node refuses, or the call failed.
        """
        request = node_pb2.SwitchRoleRequest(role=role, grace_s=grace_s, dwell_s=dwell_s)
        async with self._connect() as channel:  # this client is retired when the node has switched
            try:
                async for progress in node_pb2_grpc.NodeStub(channel).SwitchRole(request):
                    yield progress
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None

    async def drop_kv(self, request: node_pb2.DropKvRequest, *, timeout_s: float) -> node_pb2.DropKvResponse:
        """Makes the node drop the KV of a cache salt.

        Raises:
            BatonError: the node refuses, or the call failed.
        """
        try:
            return await self._stub.DropKv(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise PeerRefused("its release cannot drop KV", cure="upgrade it, or restart it") from None
            raise from_rpc_error(error) from None

    def session(self) -> DecodeSession:
        """The Session stream for all requests that the node decodes for this gateway. Opens it if it is not open."""
        if self._session is None or not self._session.open:
            self._session = DecodeSession(
                self._decode_stub.Session(), name=self._address, on_message=self._on_message, on_lost=self._session_lost
            )
        return self._session

    def drop_session(self, reason: str) -> None:
        if self._session is not None:
            self._session.drop(reason)

    def _session_lost(self, reason: str) -> None:
        self._callbacks.lost(reason)
        self.end_watch()

    # ---- what the node reports

    async def watch(self) -> None:
        """Watches the node and reconnects whenever the stream ends, until it is cancelled."""
        retry_s = _RETRY_S_MIN
        while True:
            self._status_received = False
            async with asyncio.TaskGroup() as tasks:
                self._watching = tasks.create_task(self._watch_once())
            # If `end_watch` has cancelled it, its caller has reported the reason.
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
        if self._used and not self.busy and (self._session is None or not self._session.open):
            used = self._channel
            self._open()
            await used.close()

    def _set_silent(self, *, silent: bool) -> None:
        self._pace.silent += silent - self._silent
        self._silent = silent

    def end_watch(self) -> None:
        """Ends the present Watch stream; `watch` then opens another one."""
        if self._watching is not None:
            self._watching.cancel()

    def follow_pace(self) -> None:
        """Opens another Watch stream if the cluster has become so much larger or smaller that its pace is wrong."""
        wanted_s = self._watch_pace.repeat_s
        if self._status_received and not self._repeat_s / 2 <= wanted_s <= 2 * self._repeat_s:
            self.end_watch()

    def watch_cache(
        self, request: node_pb2.WatchCacheRequest
    ) -> grpc.aio.UnaryStreamCall[node_pb2.WatchCacheRequest, node_pb2.WatchCacheResponse]:
        """Opens a stream of the changes of the node's prefix cache. The caller must cancel it."""
        return self._stub.WatchCache(request)

    async def _watch_once(self) -> str:
        """Receives statuses and cache changes until the stream ends; returns the reason.

        Returns "" if the node is connected but has sent no status for so long that another address gets the slot.
        """
        call: _Watch | None = None
        following: asyncio.Task[None] | None = None
        try:
            async with self._pace.turn(answered=self._answered):
                self._used = True
                self._repeat_s = self._watch_pace.repeat_s
                wanted = node_pb2.WatchRequest(
                    interval_s=self._watch_pace.interval_s,
                    repeat_s=self._repeat_s,
                    while_loading=True,
                    without_unchanged=True,
                )
                call = self._stub.Watch(wanted)
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
        if self._session is not None:
            await self._session.until_ended(_LAST_MESSAGES_S)
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
            raise TimeoutError("" if self._connected else f"no connection for {_FIRST_STATUS_TIMEOUT_S:g} s") from None
        finally:
            reporting.cancel()

    async def _report_silence(self) -> None:
        while True:
            await asyncio.sleep(_SILENT_S)
            if self._connected:
                self._callbacks.silent()

    @property
    def _connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def _follow_cache(self) -> None:
        """Receives changes of the prefix cache until it is cancelled. Returns if the node does not publish them."""
        last = node_pb2.WatchCacheResponse()
        while True:
            call = self.watch_cache(
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
