"""One node as this gateway sees it: its connection, what it last said of itself, what was sent to it since.

A node is reachable while its Watch stream stands and has spoken. Whoever finds it silent calls `lose`: it is then out
of the question until it speaks again. Knows no other node and no request.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import grpc

from baton.rpc.server import connect
from baton.rpc.status import last_cause
from gateway.model import ServedModel
from gateway.prefill_call import PrefillCall, PrefillFailed, PrefillSaid
from gateway.router import NodeView
from gateway.session import Session
from protos.baton.v1 import common_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc

log = logging.getLogger("baton")

_WATCH_INTERVAL_S = 0.1
_FIRST_WORD_TIMEOUT_S = 5.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.05, 1.0

_UNHEARD = "not heard of yet"
_UNKNOWN = NodeView("", 0, (), False, 0, 1, 0, 0, 0, frozenset())


class Node:
    """Watches one node from `start` to `close`.

    Args:
        on_change: called when it comes, goes, or says something new.
    """

    role: common_pb2.Role.ValueType

    def __init__(self, address: str, model: ServedModel, *, on_change: Callable[[], None]) -> None:
        self.address = address
        self.reachable = False
        self.detail = _UNHEARD
        self.status = node_pb2.NodeStatus()
        self.peers: dict[int, common_pb2.PeerState] = {}  # by incarnation
        self.heard_at = 0.0
        self.picks = 0
        self.retired = False  # no longer in the directory: finishes what runs, then is closed
        self._view = _UNKNOWN
        self._requests_since = self._tokens_since = 0
        self._model = model
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._channel = connect(address)
        self._stub = node_pb2_grpc.NodeStub(self._channel)
        self._watching: asyncio.Task[str] | None = None
        self._task = asyncio.create_task(self._stay_in_touch(), name=f"node-{address}")

    @property
    def name(self) -> str:
        return self.status.info.name or self.address

    @property
    def incarnation(self) -> int:
        return self.status.info.incarnation

    @property
    def open(self) -> bool:
        """Whether it may get new requests."""
        return self.reachable and not (self.detail or self.status.draining or self.retired)

    @property
    def busy(self) -> bool:
        """Whether requests of this gateway are still there."""
        raise NotImplementedError

    def view(self) -> NodeView:
        return replace(
            self._view,
            open=self.open,
            requests_since=self._requests_since,
            tokens_since=self._tokens_since,
            picks=self.picks,
        )

    def note_sent(self, num_tokens: int) -> None:
        """A request has been sent to it."""
        self.picks += 1
        self._requests_since += 1
        self._tokens_since += num_tokens

    def lose(self, reason: str) -> None:
        """It is silent or its connection broke: nothing more is sent to it until it speaks again."""
        self._gone(reason)
        if self._watching is not None:
            self._watching.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.reachable, self.detail = False, "the gateway has let go of it"
        self._drop_connections(self.detail)
        await self._channel.close()

    # ---- staying in touch

    async def _stay_in_touch(self) -> None:
        retry_s = _RETRY_S_MIN
        while True:
            self._watching = asyncio.create_task(self._watch(), name=f"watch-{self.address}")
            try:
                await asyncio.wait([self._watching])
            finally:
                self._watching.cancel()
            retry_s = _RETRY_S_MIN if self.reachable else min(2 * retry_s, _RETRY_S_MAX)
            if not self._watching.cancelled():  # else `lose` has said why
                reason = self._watching.result()
                if self.detail == _UNHEARD:
                    log.warning("%s is not there, and is tried again and again: %s", self.address, reason)
                self._gone(reason)
            await asyncio.sleep(retry_s)

    async def _watch(self) -> str:
        """Hears the node until its stream ends; returns why it did."""
        call = self._stub.Watch(node_pb2.WatchRequest(interval_s=_WATCH_INTERVAL_S))
        try:
            status = await asyncio.wait_for(call.read(), _FIRST_WORD_TIMEOUT_S)
            while isinstance(status, node_pb2.NodeStatus):
                self._hear(status)
                status = await call.read()
        except grpc.aio.AioRpcError as error:
            return last_cause(error)
        except TimeoutError:
            return f"connected, and silent for {_FIRST_WORD_TIMEOUT_S:g} s"
        finally:
            call.cancel()
        return "it ended the stream"

    def _hear(self, status: node_pb2.NodeStatus) -> None:
        self.heard_at = self._loop.time()
        if status.info.role != self.role:
            wrong = f"it is no {_role_name(self.role)} node but a {_role_name(status.info.role)} node"
            if self.detail != wrong:
                log.warning("%s is not used: %s", self.address, wrong)
            self._gone(wrong)
            return
        if not self.reachable or status.info.incarnation != self.incarnation:
            self._greet(status.info)
        if status.info.incarnation != self.incarnation:
            self._drop_connections("it was restarted")
        self.status = status
        self.peers = {peer.incarnation: peer for peer in status.peers if peer.incarnation}
        self._requests_since = self._tokens_since = 0
        self.reachable, self.detail = True, self._foreign(status.info.model)
        self._view = _to_view(self.address, status, self.peers)
        self._on_change()

    def _greet(self, info: common_pb2.NodeInfo) -> None:
        shape = info.cache_shape
        log.info("%s is there: %s, KV %s x %d", info.name, self.address, shape.layout, shape.block_size)
        if foreign := self._foreign(info.model):
            log.warning("%s gets no requests: %s", info.name, foreign)

    def _foreign(self, theirs: common_pb2.ModelIdentity) -> str:
        """Why requests to this gateway's model are not for this node; empty when they are."""
        ours = self._model
        if theirs.config_digest == ours.config_digest:
            return ""
        return (
            f"it serves {theirs.name} ({theirs.architecture}, config digest {theirs.config_digest[:12]}), this gateway "
            f"{ours.name} ({ours.architecture}, config digest {ours.config_digest[:12]}); start both with one model"
        )

    def _gone(self, reason: str) -> None:
        if self.reachable:
            log.warning("%s is gone: %s", self.name, reason)
        self.reachable, self.detail = False, reason
        self._drop_connections(reason)
        self._on_change()

    def _drop_connections(self, reason: str) -> None:
        """What stood to the node besides the Watch stream."""


class PrefillNode(Node):
    """A node that prefills prompts."""

    role = common_pb2.ROLE_PREFILL

    def __init__(self, address: str, model: ServedModel, *, on_change: Callable[[], None]) -> None:
        super().__init__(address, model, on_change=on_change)
        self._prefill_stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._calls: list[PrefillCall] = []

    @property
    def busy(self) -> bool:
        return any(call.running for call in self._calls)

    def prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        *,
        timeout_s: float,
        hear: Callable[[PrefillSaid | PrefillFailed], None],
    ) -> PrefillCall:
        """Starts one prefill; `hear` gets its events and its failure."""
        self.note_sent(len(request.prompt_token_ids) + len(request.output_token_ids))
        call = PrefillCall(self._prefill_stub.Prefill(request, timeout=timeout_s), hear=hear)
        self._calls = [*(running for running in self._calls if running.running), call]
        return call

    async def connect(self, decode_address: str, *, timeout_s: float) -> common_pb2.PeerState:
        """Asks it to make the pair with a decode node; says how the pair stands."""
        request = prefill_pb2.ConnectRequest(decode_address=decode_address)
        state = await self._prefill_stub.Connect(request, timeout=timeout_s)
        if state.incarnation:
            self.peers[state.incarnation] = state
            self._view = _to_view(self.address, self.status, self.peers)
            self._on_change()
        return state


class DecodeNode(Node):
    """A node that decodes, and keeps its requests' blocks."""

    role = common_pb2.ROLE_DECODE

    def __init__(self, address: str, model: ServedModel, *, on_change: Callable[[], None]) -> None:
        super().__init__(address, model, on_change=on_change)
        self._decode_stub = decode_pb2_grpc.DecodeStub(self._channel)
        self._session: Session | None = None

    @property
    def busy(self) -> bool:
        return self._session is not None and self._session.held > 0

    def session(self) -> Session:
        """The stream that carries all requests of this gateway; a new one when the last one broke."""
        if self._session is None or not self._session.open:
            self._session = Session(
                self._decode_stub.Session(), name=self.name, on_heard=self._heard, on_lost=self._session_lost
            )
        return self._session

    async def close(self) -> None:
        await super().close()
        if self._session is not None:
            await self._session.close()

    def _heard(self) -> None:
        self.heard_at = self._loop.time()

    def _session_lost(self, session: Session, reason: str) -> None:
        if session is self._session:
            self.lose(reason)

    def _drop_connections(self, reason: str) -> None:
        if self._session is not None:
            self._session.lose(reason)


def _role_name(role: common_pb2.Role.ValueType) -> str:
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def _to_view(address: str, status: node_pb2.NodeStatus, peers: Mapping[int, common_pb2.PeerState]) -> NodeView:
    info = status.info
    ready = (number for number, peer in peers.items() if peer.phase == common_pb2.PEER_PHASE_READY)
    return NodeView(
        address=address,
        incarnation=info.incarnation,
        model=(info.model.architecture, info.model.config_digest, info.model.weights_digest),
        open=True,
        max_context_tokens=info.max_context_tokens,
        block_size=info.cache_shape.block_size,
        blocks_free=status.blocks_free,
        requests=status.requests_running + status.requests_waiting,
        tokens_waiting=status.tokens_waiting,
        ready_peers=frozenset(ready),
    )
