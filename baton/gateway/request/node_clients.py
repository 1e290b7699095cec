"""The gateway's connection to one node: the calls to it, the session with it, and the end of both.

`baton.gateway.request.node_watch` has what the node reports by itself.
"""

from collections.abc import AsyncGenerator, Callable

import grpc

from baton.core.errors import BatonError, PeerRefused
from baton.gateway.fleet.connect_pace import ConnectPace
from baton.gateway.fleet.watch_pace import WatchPace
from baton.gateway.request.decode_session import DecodeSession
from baton.gateway.request.node_channel import NodeChannel
from baton.gateway.request.node_watch import NodeWatch, WatchCallbacks
from baton.gateway.request.prefill_stream import PrefillStream
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc, prefill_pb2
from baton.protos.v1 import node_status_pb2
from baton.rpc.status import from_rpc_error
from baton.security.tls import Dial
from baton.settings.gateway_config import GATEWAY_KEEPALIVE_S

_CONNECT_TIMEOUT_S = 20.0
_DESCRIBE_TIMEOUT_S = 5.0
_LAST_MESSAGES_S = 2.0  # a node that has ended its status stream ends its session within this time

_CLOSED = "the gateway has closed the connection"


class NodeClient:
    """Client of one node: its channel, its Prefill calls, its Session stream, and its Watch stream.

    Decode nodes serve only sessions, prefill nodes only Prefill calls; a prefill node that also decodes serves both.

    Args:
        on_message: called at every message of the session, as a sign of life.
        keepalive_s: time without an answer to a ping after which the node is lost.
        dial: credentials of the channel.
        pace: limits attempts to connect; shared with other clients.
        watch_pace: how often nodes report; shared with other clients.

    Attributes:
        watch: what the node reports while `watch.run` runs.
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
        self._channel = NodeChannel(address, keepalive_s=keepalive_s, dial=dial)
        self._on_message = on_message
        self._on_lost = callbacks.lost
        self._calls: list[PrefillStream] = []
        self._num_pooling = 0
        self._session: DecodeSession | None = None
        self.watch = NodeWatch(
            address,
            self._channel,
            callbacks,
            pace=pace or ConnectPace(),
            watch_pace=watch_pace or WatchPace(),
            is_idle=self._is_idle,
            last_messages=self._last_messages,
        )

    @property
    def busy(self) -> bool:
        """Whether the node has requests of this gateway."""
        calls = self._num_pooling > 0 or any(call.running for call in self._calls)
        return calls or (self._session is not None and self._session.num_unreleased > 0)

    async def close(self) -> None:
        self.watch.close()
        if self._session is not None:
            await self._session.close(_CLOSED)
        await self._channel.close()

    async def retire(self, error: BatonError) -> None:
        """Closes the connection after waiting a moment for the node's last messages. Remaining requests end with the
        error."""
        try:
            await self._last_messages()
        finally:
            for call in self._calls:
                call.end(error)
            await self.close()

    def _is_idle(self) -> bool:
        """Whether no call of a request and no session uses the channel."""
        return not self.busy and (self._session is None or not self._session.open)

    async def _last_messages(self) -> None:
        """Waits a moment for the session's last messages."""
        if self._session is not None:
            await self._session.until_ended(_LAST_MESSAGES_S)

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
        call = PrefillStream(self._channel.prefill.Prefill(request, timeout=timeout_s), on_event, on_end)
        self._calls = [*(running for running in self._calls if running.running), call]
        return call

    async def pool(self, request: prefill_pb2.PoolRequest, *, timeout_s: float) -> prefill_pb2.PoolResponse:
        """Makes one Pool call. Cancel the task to cancel the call.

        Raises:
            BatonError: the call failed.
        """
        self._num_pooling += 1
        try:
            return await self._channel.prefill.Pool(request, timeout=timeout_s)
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
            return await self._channel.prefill.Connect(request, timeout=_CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def describe(self) -> node_status_pb2.NodeStatus:
        """The node's present status.

        Raises:
            BatonError: the call failed.
        """
        try:
            return await self._channel.node.Describe(node_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
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
        async with self._channel.another() as channel:  # this client is retired when the node has switched
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
            return await self._channel.node.DropKv(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise PeerRefused("its version cannot drop KV", cure="upgrade or restart it") from None
            raise from_rpc_error(error) from None

    def session(self) -> DecodeSession:
        """The Session stream for all requests that the node decodes for this gateway. Opens it if it is not open."""
        if self._session is None or not self._session.open:
            self._session = DecodeSession(
                self._channel.decode.Session(),
                name=self._address,
                on_message=self._on_message,
                on_lost=self._session_lost,
            )
        return self._session

    def drop_session(self, reason: str) -> None:
        if self._session is not None:
            self._session.drop(reason)

    def _session_lost(self, reason: str) -> None:
        self._on_lost(reason)
        self.watch.end()
