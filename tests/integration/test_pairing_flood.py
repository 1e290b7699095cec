"""A decode node that gets handshakes which do not finish: nothing is left of them, and a true prefill node can pair."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from baton.cli.processes import Process
from baton.rpc.server import connect
from kvtransfer.transports.ucx import UcxTransport
from protos.baton.v1 import common_pb2, decode_pb2_grpc
from protos.baton.v1 import decode_pb2 as pb
from tests.integration.cluster import DEADLINE_S, LLAMA, machines, status, until_status

ROUNDS_BEFORE, ROUNDS = 3, 9
# What pages of code, of gRPC and of the allocator take that were not used before; a worker of UCX has 2.5 MB.
MEMORY_SLACK_MB = 16.0
PAST_PEERS = 32

Call = grpc.aio.StreamStreamCall[pb.PairRequest, pb.PairResponse]


class Flood:
    """Makes handshakes of prefill nodes that do not exist, each from an address of its own."""

    def __init__(self, decode: common_pb2.NodeInfo, stub: decode_pb2_grpc.DecodeStub) -> None:
        self._decode = decode
        self._stub = stub
        self._made = 0
        self._transport = UcxTransport()
        # An address of a worker that is gone.
        self._dead = self._transport.listen(1)
        self._transport.disconnect(1)

    def close(self) -> None:
        self._transport.close()

    async def round(self) -> None:
        """One of each kind."""
        await self._is_refused(model="another")
        await self._is_refused(ranks=1 << 20)
        await self._is_refused(layout="unknown")
        await self._is_refused(name="two\\nlines\n")
        for address in (b"nonsense", self._dead, self._dead[:-7], b""):
            await self._links(address)
        await self._leaves()
        await self._leaves(cancels=True)

    async def _is_refused(self, *, model: str = "", ranks: int = 1, layout: str = "", name: str = "x") -> None:
        info = self._info()
        info.tensor_parallel_size, info.name = ranks, name
        info.model.weights_digest = model or info.model.weights_digest
        info.cache_shape.layout = layout or info.cache_shape.layout
        call = await self._hello(info)
        await _end(call)

    async def _links(self, address: bytes) -> None:
        call = await self._hello(self._info())
        reply = await call.read()
        assert isinstance(reply, pb.PairResponse)
        assert len(reply.accepted.worker_addresses) == 1
        linked = pb.PairLinked(worker_addresses=[pb.WorkerAddress(address=address)])
        await call.write(pb.PairRequest(linked=linked))
        if address == self._dead:  # it connects, and waits for a warm-up
            await call.read()
            call.cancel()
        await _end(call)

    async def _leaves(self, *, cancels: bool = False) -> None:
        call = await self._hello(self._info())
        await call.read()
        if cancels:
            call.cancel()
        else:
            await call.done_writing()
        await _end(call)

    async def _hello(self, info: common_pb2.NodeInfo) -> Call:
        pair: Any = self._stub.Pair  # the stubs know generators only
        call: Call = pair()
        await call.write(pb.PairRequest(hello=pb.PairHello(info=info)))
        return call

    def _info(self) -> common_pb2.NodeInfo:
        self._made += 1
        info = common_pb2.NodeInfo()
        info.CopyFrom(self._decode)
        info.role, info.name = common_pb2.ROLE_PREFILL, f"prefill-{self._made}"
        info.address, info.incarnation = f"127.0.0.1:{self._made}", self._made
        return info


async def _end(call: Call) -> None:
    """Reads what is left, an error included."""
    try:
        while isinstance(await call.read(), pb.PairResponse):
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return


def held(process: Process) -> tuple[int, float]:
    """The process's descriptors, and its memory in MB."""
    descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return descriptors, pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@asynccontextmanager
async def flooding(node: Process) -> AsyncIterator[Flood]:
    info = (await status(node)).info
    async with connect(node.address) as channel:
        source = Flood(info, decode_pb2_grpc.DecodeStub(channel))
        try:
            yield source
        finally:
            source.close()


async def settled(node: Process) -> tuple[int, float]:
    """What the process holds once no handshake is under way, and its descriptors have become no fewer for a second:
    closed links end in the transfer's next turns."""
    await until_status(node, lambda last: all(each.phase != common_pb2.PEER_PHASE_CONNECTING for each in last.peers))
    least, looks = held(node), 0
    while looks < 10:
        await asyncio.sleep(0.1)
        now = held(node)
        least, looks = (now, 0) if now[0] < least[0] else (least, looks + 1)
    return least


async def test_unfinished_handshakes_leave_nothing_behind() -> None:
    with machines() as start:
        prefill, decode = start.nodes(
            ("prefill", {"model": LLAMA, "num_blocks": 64}), ("decode", {"model": LLAMA, "num_blocks": 64})
        )
        async with flooding(decode) as source:
            for _ in range(ROUNDS_BEFORE):
                await source.round()
            descriptors, memory_mb = await settled(decode)
            for _ in range(ROUNDS):
                await source.round()
            # On a busy machine the last links take longer to end.
            async with asyncio.timeout(DEADLINE_S):
                while (await settled(decode))[0] > descriptors + 2:
                    pass
            _, memory_then_mb = held(decode)
        assert memory_then_mb <= memory_mb + MEMORY_SLACK_MB
        assert len((await status(decode)).peers) <= PAST_PEERS
        start.gateway([prefill], [decode], model=LLAMA)  # is ready once the pair is
        last = await status(decode)
        assert common_pb2.PEER_PHASE_READY in [peer.phase for peer in last.peers]
