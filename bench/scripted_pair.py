"""A prefill and a decode node without a model, in one process: every prompt is handed over, and each step of a fixed
time has a token for every request that decodes. A collector of traces that keeps nothing is there too.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import uvloop

from baton.gateway.text.model import read_served_model
from baton.protos.internal.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    lease_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc.channels import channel_options
from bench.scripted_decode import MODEL, ScriptedDecode
from decode_node.events import SessionMessage

CHUNKS = 4
STEP_S = 0.02
_PREFILL_INCARNATION = 11
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_WORDS = range(300, 1300)

Context = grpc.aio.ServicerContext[Any, Any]


class Addresses(NamedTuple):
    """host:port of each server."""

    prefill: str
    decode: str
    collector: str


@dataclass
class _Row:
    """A request on the decode node; `index`: of its next token."""

    session: int
    request: decode_pb2.SubmitRequest
    index: int = 1

    @property
    def traced(self) -> bool:
        return bool(self.request.traceparent)


class PairedDecode(ScriptedDecode):
    """The decode node: a ticket for each request, and tokens from the hand-over on."""

    def __init__(self, identity: node_status_pb2.ModelIdentity) -> None:
        super().__init__(identity, ())
        self._leases = itertools.count(1)
        self._waiting: dict[int, _Row] = {}  # by lease
        self._rows: list[_Row] = []
        self._stepping: asyncio.Task[None] | None = None

    def handed_over(self, lease: int) -> None:
        """All KV of this lease has arrived."""
        row = self._waiting.pop(lease)
        admitted = decode_pb2.Admitted(key=row.request.key, bytes_received=1 << 28, segments=32)
        if row.traced:
            admitted.at_s, admitted.filled_s, admitted.handed_over_s = 0.01, 0.008, 0.009
        self._sessions.send(row.session, decode_pb2.SessionResponse(admitted=admitted))
        self._rows.append(row)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_on())

    def _deliver(self, event: object) -> None:
        if not isinstance(event, SessionMessage) or not event.message.HasField("submit"):
            return
        row = _Row(event.session, event.message.submit)
        lease = next(self._leases)
        self._waiting[lease] = row
        reserved = decode_pb2.Reserved(
            key=row.request.key,
            ticket=lease_pb2.Ticket(
                lease=lease_pb2.Lease(number=lease, incarnation=self.status.info.incarnation, remaining_s=60.0),
                decode_node=self.status.info.name,
                decode_address=self.status.info.address,
                token_stop=len(row.request.prompt_token_ids),
            ),
        )
        if row.traced:
            reserved.at_s = 0.001
        self._sessions.send(event.session, decode_pb2.SessionResponse(reserved=reserved))

    async def _step_on(self) -> None:
        while self._rows:
            await asyncio.sleep(STEP_S)
            steps: dict[int, decode_pb2.SessionResponse] = {}
            for row in self._rows:
                step = steps.setdefault(row.session, decode_pb2.SessionResponse(step=decode_pb2.Step()))
                token = common_pb2.Token(token_id=_WORDS[(row.request.key * 7 + row.index) % len(_WORDS)])
                added = step.step.tokens.add(key=row.request.key, token=token)
                added.token.index = row.index
                row.index += 1
                if row.index == row.request.sampling.max_tokens:
                    added.finish_reason = common_pb2.FINISH_REASON_LENGTH
            for session, step in steps.items():
                self._sessions.send(session, step)
            for row in self._rows:
                if row.index == row.request.sampling.max_tokens:
                    released = decode_pb2.SessionResponse(released=decode_pb2.Released(key=row.request.key))
                    self._sessions.send(row.session, released)
            self._rows = [row for row in self._rows if row.index < row.request.sampling.max_tokens]


class PairedPrefill(ScriptedDecode, prefill_pb2_grpc.PrefillServicer):
    """The prefill node: computes and sends each prompt in chunks, in no time."""

    def __init__(self, identity: node_status_pb2.ModelIdentity, decode: PairedDecode) -> None:
        super().__init__(identity, ())
        info = self.status.info
        info.name, info.role, info.incarnation = "prefill", node_status_pb2.ROLE_PREFILL, _PREFILL_INCARNATION
        self._decode = decode

    async def Pool(self, request: prefill_pb2.PoolRequest, context: Context) -> prefill_pb2.PoolResponse:
        raise NotImplementedError

    async def Connect(self, request: prefill_pb2.ConnectRequest, context: Context) -> node_status_pb2.PeerState:
        return self.status.peers[0]

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        for event in _events(request):
            yield event
        self._decode.handed_over(request.ticket.lease.number)

    def pair(self) -> None:
        """Shows that it is connected with the decode node."""
        peer = self._decode.status.info
        self.status.peers.add(
            name=peer.name, address=peer.address, incarnation=peer.incarnation, phase=node_status_pb2.PEER_PHASE_READY,
            transport="tcp", gigabytes_per_s=10.0, latency_s=1e-5,
        )  # fmt: skip


def _events(request: prefill_pb2.PrefillRequest) -> list[prefill_pb2.PrefillEvent]:
    """As a prefill node sends them: with times where the request is traced."""
    size = len(request.prompt_token_ids) // CHUNKS
    first = prefill_pb2.PrefillFirstToken(token=common_pb2.Token(token_id=_WORDS[0]), prefill_s=0.004)
    sent = prefill_pb2.PrefillSent(
        tokens_sent=CHUNKS * size, bytes_sent=1 << 28, segments=32, transport="tcp", segment_bytes=1 << 23
    )
    events = [prefill_pb2.PrefillEvent(scheduled=prefill_pb2.PrefillScheduled(queue_s=0.001))]
    for chunk in range(1, CHUNKS + 1):
        progress = prefill_pb2.PrefillProgress(computed_tokens=chunk * size)
        events.append(prefill_pb2.PrefillEvent(progress=progress))
    events += [prefill_pb2.PrefillEvent(first_token=first), prefill_pb2.PrefillEvent(sent=sent)]
    if request.traceparent:
        for number, event in enumerate(events):
            event.at_s = 0.001 * (number + 1)
            if event.HasField("progress"):
                stop = event.progress.computed_tokens
                event.parts.add(
                    started_s=event.at_s - 0.001, ended_s=event.at_s, token_start=stop - size, token_stop=stop,
                    segments=8, bytes=1 << 26,
                )  # fmt: skip
    return events


def serve(addresses: Connection) -> None:
    """The process of both nodes and the collector."""

    async def export(_: bytes, __: Context) -> bytes:
        return b""

    async def run() -> None:
        identity = read_served_model(MODEL, None).identity
        decode = PairedDecode(identity)
        prefill = PairedPrefill(identity, decode)
        found = []
        for node in (prefill, decode):
            server = grpc.aio.server(options=channel_options())
            node_pb2_grpc.add_NodeServicer_to_server(node, server)
            decode_pb2_grpc.add_DecodeServicer_to_server(node, server)
            if node is prefill:
                prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
            node.status.info.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            found.append((node.status.info.address, server))
        prefill.pair()
        collector = grpc.aio.server()
        service, _, method = _EXPORT.removeprefix("/").partition("/")
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_unary_rpc_method_handler(export)}
        collector.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = collector.add_insecure_port("127.0.0.1:0")
        await collector.start()
        addresses.send(Addresses(found[0][0], found[1][0], f"127.0.0.1:{port}"))
        await collector.wait_for_termination()

    uvloop.run(run())
