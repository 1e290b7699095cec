"""A prefill node without a model, in a process of its own that is killed: it pairs with a decode node, step by step."""

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

from baton.kvcache.cache import PagedKVCache
from baton.node.describe import from_addresses, from_info, from_warm_ups, to_addresses
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from kvtransfer.pair_ends import MOST_RANKS
from kvtransfer.plan import links_between
from kvtransfer.ranked import RankedTransfer
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer

# Steps of a handshake after which a node is killed.
STEPS = ("hello", "linked", "connected", "warming up", "warmed up", "ready")
_SEGMENT_BYTES = 256 << 10
_SLOTS = 4


def peers() -> "multiprocessing.context.ForkServerContext":
    """The processes are forked from one that has imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def live(decode: str, info: bytes, step: str, report: Connection) -> None:
    """Pairs up to a step, reports it, and waits for the kill."""
    asyncio.run(_live(decode, node_status_pb2.NodeInfo.FromString(info), step, report))


async def _live(decode: str, info: node_status_pb2.NodeInfo, step: str, report: Connection) -> None:
    async with connect(decode) as channel:
        pair: Any = decode_pb2_grpc.DecodeStub(channel).Pair  # the stubs know generators only
        call = pair()
        await call.write(pb.PairRequest(hello=pb.PairHello(info=info)))
        await _reached("hello", step, report)
        accepted = (await call.read()).accepted
        ours, theirs = from_info(info), from_info(accepted.info)
        settings = TransferSettings(
            incarnation=info.incarnation,
            transport="ucx",
            segment_bytes=_SEGMENT_BYTES,
            staging_slots=_SLOTS,
            digests=True,
            peers_are_known=True,
        )
        cache = PagedKVCache(ours.spec, ours.shape)
        transfer = RankedTransfer(
            [lambda filled, refused: KVTransfer(cache, settings, on_filled=filled, on_refused=refused)],
            message_bytes=settings.message_bytes,
        )
        transfer.leases.deliver_to(print, print)
        async with transfer:
            addresses = await transfer.listen(MOST_RANKS, links_between(ours, theirs), sends=True)
            await call.write(pb.PairRequest(linked=pb.PairLinked(worker_addresses=from_addresses(addresses))))
            await _reached("linked", step, report)
            await call.read()
            worker_addresses = to_addresses(accepted.worker_addresses)
            await transfer.connect(MOST_RANKS, worker_addresses, message_bytes=accepted.message_bytes)
            await _reached("connected", step, report)
            warming = asyncio.create_task(transfer.warm_up(MOST_RANKS, accepted.sender_number))
            await asyncio.sleep(0)
            await _reached("warming up", step, report)
            await call.write(pb.PairRequest(warmed_up=from_warm_ups(await warming)))
            await _reached("warmed up", step, report)
            assert (await call.read()).HasField("ready")
            await _reached("ready", step, report)
    os._exit(1)


async def _reached(this: str, step: str, report: Connection) -> None:
    if this == step:
        report.send(this)
        await asyncio.Event().wait()  # until the kill
