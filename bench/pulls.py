"""Pulls of KV between two nodes of one machine, without engines: their rate and the time of the shortest one, against a
plain copy of messages of an entry's size over the same transport."""

import asyncio
import multiprocessing
import time
from array import array
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc

from baton.core import pull_costs
from baton.core.block_keys import KeyChain
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, KeptPrefix, NodeRanks
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.node import pulls
from baton.node.pulls import Pulls
from baton.node.service import NodeParts, NodeService
from baton.protos.internal.v1 import node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import channel_options
from bench.table import Row
from bench.transport import transport_gigabytes_per_s
from kvtransfer.ranked import RankedTransfer
from kvtransfer.settings import TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.transfer import KVTransfer

ROUNDS = 9
# KV of Llama-3.1-8B's shape: 8 MiB an entry.
SPEC = KVCacheSpec(KVKind.GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
ENTRIES = 32
_BLOCK_TOKENS = 16
_BLOCKS = ENTRY_TOKENS // _BLOCK_TOKENS
_TIMEOUT_S = 120.0


def rows(progress: Callable[[str], None]) -> list[Row]:
    """Needs two processes with about 600 MiB each."""
    progress(f"kept KV: pulls of 64 and of {ENTRIES * ENTRY_TOKENS} tokens from another node")
    pull_costs.UNMEASURED_TOKENS, pull_costs.SHARE = 1, 1e9
    pulls.PULL_S_MIN = _TIMEOUT_S
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(theirs,), daemon=True)
    owner.start()
    try:
        kept: KeptPrefix = ours.recv()
        small_s, large_s = asyncio.run(_pull_all(kept))
    finally:
        owner.kill()
        owner.join()
    entry_bytes = EntryLayout(_settings(0xB).parts(SPEC)).entry_bytes
    copied, _ = transport_gigabytes_per_s(entry_bytes)
    rate = ENTRIES * entry_bytes / large_s / 1e9
    work = f"{ENTRIES * ENTRY_TOKENS} tokens of Llama-3.1-8B's KV"
    plain_ms = entry_bytes / copied / 1e6
    return [
        Row("pull from another node", work, rate, "GB/s", "plain copy", copied, 0.85),
        Row("pull, shortest", "64 tokens of it", 1e3 * small_s, "ms", "plain copy", plain_ms, less_is_better=True),
    ]


async def _pull_all(kept: KeptPrefix) -> tuple[float, float]:
    """Seconds of a pull of one entry, and of one of all entries; the best of several, as for the plain copy."""
    transfer, pulled = _make(0xB)
    async with transfer:
        await pulled.pull(_keys(ENTRIES), kept)  # makes the link, and touches the memory
        seconds = []
        for count in (1, ENTRIES):
            took = []
            for _ in range(ROUNDS):
                await transfer.entries.drop_entries(_keys(ENTRIES))
                begun_s = time.perf_counter()
                if await pulled.pull(_keys(count), kept) != count:
                    raise SystemExit("bench: a pull has failed; see the log")
                took.append(time.perf_counter() - begun_s)
            seconds.append(min(took))
        await pulled.close()
    return seconds[0], seconds[1]


def _own(connection: Connection) -> None:
    asyncio.run(_serve(connection))


async def _serve(connection: Connection) -> None:
    transfer, pulled = _make(0xA)
    async with transfer:
        blocks = tuple(range(_BLOCKS)) * ENTRIES
        for key in _keys(ENTRIES):
            await transfer.entries.save_entries(EntryBlocks((key,), blocks))
        unused: Any = None
        service = NodeService(node_status_pb2.NodeStatus)
        service.serve(NodeParts(unused, unused, unused, unused, unused, unused, unused, unused, owner=pulled.owner))
        server = grpc.aio.server(options=channel_options())
        node_pb2_grpc.add_NodeServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        connection.send(KeptPrefix(f"127.0.0.1:{port}", 0xA, ENTRIES * ENTRY_TOKENS))
        await server.wait_for_termination()


def _make(incarnation: int) -> tuple[RankedTransfer, Pulls]:
    settings = _settings(incarnation)
    cache = PagedKVCache(SPEC, KVCacheShape(KVCacheLayout.NHD, _BLOCK_TOKENS, _BLOCKS))
    transfer = RankedTransfer([partial(_rank, cache, settings)], message_bytes=settings.message_bytes)
    transfer.deliver_to(lambda _: None, lambda _: None)
    info = node_status_pb2.NodeInfo(name="node", role=node_status_pb2.ROLE_DECODE, incarnation=incarnation)
    info.cache_spec.num_layers = info.cache_spec.num_kv_heads = info.cache_spec.head_dim = 1
    info.cache_shape.block_size = info.cache_shape.num_blocks = 1
    pulled = Pulls(
        transfer,
        lambda: info,
        namespace=b"one model",
        entry_bytes=EntryLayout(settings.parts(SPEC)).entry_bytes,
        spec=SPEC,
        ranks=NodeRanks(),
        costs=lambda: None,
        step_tokens=lambda: 512,
        keepalive_s=_TIMEOUT_S,
        tls=None,
    )
    return transfer, pulled


def _rank(cache: PagedKVCache, settings: TransferSettings, on_filled: Any, on_refused: Any) -> KVTransfer:
    return KVTransfer(cache, settings, on_filled=on_filled, on_refused=on_refused)


def _settings(incarnation: int) -> TransferSettings:
    settings = partial(
        TransferSettings,
        incarnation=incarnation,
        transport="ucx",
        segment_bytes=8 << 20,
        staging_slots=3,
        digests=True,
        peers_are_known=True,
    )
    size = EntryLayout(settings().parts(SPEC)).entry_bytes
    return settings(host_cache_bytes=2 * (ENTRIES + 1) * size)


def _keys(count: int) -> tuple[EntryKey, ...]:
    tokens = array("i", range(count * ENTRY_TOKENS))
    chain = KeyChain(identity="a model", cache_salt="", block_size=ENTRY_TOKENS)
    return tuple(EntryKey(chain.key(number, tokens), chain.root, number) for number in range(count))
