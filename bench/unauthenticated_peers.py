"""Nodes that do not exist, for `bench.connects`: each opens a pair with a real node and does not finish it.

`UnauthenticatedPrefillPeers` call a decode node. `UnauthenticatedDecodePeers` answer a prefill node that was asked to
connect to them.
"""

import asyncio
import ipaddress
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Any

import grpc

from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc, prefill_pb2_grpc
from baton.protos.internal.v1.prefill_pb2 import ConnectRequest
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from kvtransfer.transports.ucx import UcxTransport
from kvtransfer.transports.ucx_address import worker_address, wrap

Call = grpc.aio.StreamStreamCall[pb.PairRequest, pb.PairResponse]

_MESSAGE_BYTES = 1 << 20
# So many hosts of 127.0.0.0/8 have decode nodes.
_HOSTS = 1000
_UUID_STOP = 9
_LATE_S = 0.1


def dead_address() -> bytes:
    """Of a UCX worker of this machine that is gone."""
    with closing(UcxTransport()) as transport:
        return transport.listen(1)


def made_up(address: bytes, chosen: random.Random) -> bytes:
    """The address with some bytes changed, left out or cut off, and a right checksum."""
    worker = bytearray(worker_address(address))
    start, stop = sorted(chosen.sample(range(_UUID_STOP, len(worker)), 2))
    match chosen.randrange(4):
        case 0:
            worker[start] ^= 1 << chosen.randrange(8)
        case 1:
            worker[start:stop] = chosen.randbytes(stop - start)
        case 2:
            del worker[start:stop]
        case 3:
            del worker[stop:]
    return wrap(bytes(worker), on_gpu=False)


class UnauthenticatedPrefillPeers:
    """Handshakes with a decode node, each from an address of its own.

    Attributes:
        counts: of handshakes, by how they end.
    """

    def __init__(self, address: str, decode: node_status_pb2.NodeInfo, *, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._address = address
        self._decode = decode
        self._chosen = random.Random(seed)
        self._dead = dead_address()
        self._made = 0
        self._channel: grpc.aio.Channel | None = None
        self._kinds: tuple[Callable[[], Awaitable[None]], ...] = (
            self.another_model,
            self.impossible_sizes,
            self.no_hello,
            self.leaves,
            self.cancels,
            self.cancels_at_once,
            self.nonsense_address,
            self.made_up_address,
            self.address_of_a_dead_worker,
            self.aborts_its_connection,
            self.aborts_before_http,
        )

    async def one(self) -> None:
        """A handshake of any kind; returns when it has ended."""
        kind = self._chosen.choice(self._kinds)
        self.counts[kind.__name__.replace("_", " ")] += 1
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError, OSError):
            await kind()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def another_model(self) -> None:
        info = self._info()
        info.model.weights_digest = "another"
        await _end(await self._hello(info))

    async def impossible_sizes(self) -> None:
        info = self._info()
        info.tensor_parallel_size = 1 << 20
        await _end(await self._hello(info))

    async def no_hello(self) -> None:
        call = self._pair(self._shared())
        await call.write(pb.PairRequest(quiet=pb.Quiet(lease=1)))
        await _end(call)

    async def leaves(self) -> None:
        call = await self._accepted()
        await call.done_writing()
        await _end(call)

    async def cancels(self) -> None:
        (await self._accepted()).cancel()

    async def cancels_at_once(self) -> None:
        (await self._hello(self._info())).cancel()

    async def nonsense_address(self) -> None:
        await _end(await self._linked(b"nonsense"))

    async def made_up_address(self) -> None:
        call = await self._linked(made_up(self._dead, self._chosen))
        await call.read()  # that it is connected, or why not
        call.cancel()

    async def address_of_a_dead_worker(self) -> None:
        call = await self._linked(self._dead)
        await call.read()
        call.cancel()

    async def aborts_its_connection(self) -> None:
        async with connect(self._address) as channel:
            call = self._pair(channel)
            await call.write(pb.PairRequest(hello=pb.PairHello(info=self._info())))
            await call.read()

    async def aborts_before_http(self) -> None:
        host, _, port = self._address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(self._chosen.randbytes(self._chosen.randrange(1, 200)))
        writer.transport.abort()

    async def _accepted(self) -> Call:
        call = await self._hello(self._info())
        await call.read()
        return call

    async def _linked(self, address: bytes) -> Call:
        call = await self._accepted()
        await call.write(pb.PairRequest(linked=pb.PairLinked(worker_addresses=[pb.WorkerAddress(address=address)])))
        return call

    async def _hello(self, info: node_status_pb2.NodeInfo) -> Call:
        call = self._pair(self._shared())
        await call.write(pb.PairRequest(hello=pb.PairHello(info=info)))
        return call

    def _pair(self, channel: grpc.aio.Channel) -> Call:
        pair: Any = decode_pb2_grpc.DecodeStub(channel).Pair  # the stubs know generators only
        call: Call = pair()
        return call

    def _shared(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = connect(self._address)
        return self._channel

    def _info(self) -> node_status_pb2.NodeInfo:
        self._made += 1
        info = node_status_pb2.NodeInfo()
        info.CopyFrom(self._decode)
        info.role, info.name = node_status_pb2.ROLE_PREFILL, f"unauthenticated-{self._made}"
        info.address, info.incarnation = f"10.0.0.1:{self._made}", self._made
        return info


class UnauthenticatedDecodePeers(decode_pb2_grpc.DecodeServicer):
    """Decode nodes on many loopback addresses that answer a prefill node's hello in any way; an async context manager.

    Attributes:
        counts: of handshakes, by how they end.
    """

    def __init__(self, address: str, decode: node_status_pb2.NodeInfo, *, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._address = address
        self._decode = decode
        self._chosen = random.Random(seed)
        self._dead = dead_address()
        self._made = 0
        self._server = grpc.aio.server()
        self._port = 0
        self._stub: Any = None
        self._kinds = ("refuses", "ends", "fails", "nonsense address", "made up address", "dead address", "ends late")

    async def __aenter__(self) -> "UnauthenticatedDecodePeers":
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("0.0.0.0:0")
        await self._server.start()
        self._channel = connect(self._address)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._server.stop(None)

    async def one(self) -> None:
        """Has the prefill node connect; returns when that has failed, or is cancelled."""
        self._made += 1
        host = ipaddress.IPv4Address("127.1.0.0") + self._made % _HOSTS
        unreachable, cancelled = self._chosen.random() < 0.1, self._chosen.random() < 0.2
        port = _free_port() if unreachable else self._port
        if unreachable or cancelled:
            self.counts["unreachable" if unreachable else "cancelled by the caller"] += 1
        asked = self._stub.Connect(ConnectRequest(decode_address=f"{host}:{port}"))
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(0.01 if cancelled else None):
                await asked

    async def Pair(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """A prefill node's stream."""
        kind = self._chosen.choice(self._kinds)
        self.counts[kind] += 1
        await anext(aiter(request_iterator), None)
        match kind:
            case "refuses":
                mismatch = node_status_pb2.Mismatch(field="dtype", ours="a", theirs="b", cure="none")
                await context.write(pb.PairResponse(refused=pb.PairRefused(info=self._info(), mismatches=[mismatch])))
            case "fails":
                await context.abort(grpc.StatusCode.INTERNAL, "broken")
            case "nonsense address":
                await self._accept(request_iterator, context, b"nonsense")
            case "made up address":
                await self._accept(request_iterator, context, made_up(self._dead, self._chosen))
            case "dead address":
                await self._accept(request_iterator, context, self._dead)
            case "ends late":
                await asyncio.sleep(_LATE_S)

    async def Session(self, request_iterator: Any, _: Any) -> None:  # type: ignore[override]  # noqa: N802
        """No gateway calls it."""
        del request_iterator

    async def _accept(self, requests: Any, context: Any, address: bytes) -> None:
        accepted = pb.PairAccepted(
            info=self._info(),
            worker_addresses=[pb.WorkerAddress(address=address)],
            sender_number=1,
            wire_version=1,
            message_bytes=_MESSAGE_BYTES,
        )
        await context.write(pb.PairResponse(accepted=accepted))
        await anext(aiter(requests), None)  # the links of the prefill node
        await context.write(pb.PairResponse(connected=pb.PairConnected()))
        await anext(aiter(requests), None)  # that it has sent the warm-up, or its end

    def _info(self) -> node_status_pb2.NodeInfo:
        info = node_status_pb2.NodeInfo()
        info.CopyFrom(self._decode)
        info.incarnation, info.name = self._made + 1, f"unauthenticated-{self._made}"
        return info


async def _end(call: Call) -> None:
    """Reads what is left."""
    while isinstance(await call.read(), pb.PairResponse):
        pass


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
