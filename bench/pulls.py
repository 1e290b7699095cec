"""Pulls of KV between two nodes of one machine, without engines: their rate and the time of the shortest one, against a
plain copy of as much memory over the same transport, in messages of an entry's size. First the nodes are alike, then
the one that has the KV has two ranks, another layout and another block size."""

import asyncio
import multiprocessing
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch

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
from kvtransfer.flows import heads_of
from kvtransfer.ranked import RankedTransfer
from kvtransfer.settings import TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.transfer import KVTransfer

ROUNDS = 9
# KV of Llama-3.1-8B's shape: 8 MiB an entry.
SPEC = KVCacheSpec(KVKind.GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
# The tokens of each pull, but for the shortest. The longest needs 4 GiB on either side: only on machines with GPUs.
TOKENS = (512, 2048, 32768)
_GOAL_TOKENS = 32768
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Form:
    """What of a node's KV may differ between two nodes."""

    ranks: int = 1
    layout: KVCacheLayout = KVCacheLayout.NHD
    block_tokens: int = 16

    @property
    def entry_blocks(self) -> int:
        return ENTRY_TOKENS // self.block_tokens


PULLING = Form()
OWNERS = {
    "a node like it": PULLING,
    "2 ranks, HND, blocks of 32": Form(ranks=2, layout=KVCacheLayout.HND, block_tokens=32),
}


def rows(progress: Callable[[str], None]) -> list[Row]:
    """Starts two processes for each pair of nodes. Each maps twice the memory of the longest pull and touches half of
    it."""
    counts = tuple(tokens // ENTRY_TOKENS for tokens in (TOKENS if torch.cuda.is_available() else TOKENS[:-1]))
    pull_costs.UNMEASURED_TOKENS, pull_costs.SHARE = 1, 1e9
    pulls.PULL_S_MIN = pull_costs.PULL_S_MAX = _TIMEOUT_S
    entry_bytes = EntryLayout(_settings(0xB, PULLING, 1)[0].parts(SPEC)).entry_bytes
    copied = {count: transport_gigabytes_per_s(entry_bytes, slots=count)[0] for count in counts}
    plain_ms = entry_bytes / transport_gigabytes_per_s(entry_bytes)[0] / 1e6
    found = []
    for name, form in OWNERS.items():
        progress(f"kept KV: pulls of 64 to {counts[-1] * ENTRY_TOKENS} tokens from {name}")
        seconds = _seconds_of(form, (1, *counts))
        for count in counts:
            work = f"{count * ENTRY_TOKENS} tokens of Llama-3.1-8B's KV"
            goal = 0.85 if count * ENTRY_TOKENS >= _GOAL_TOKENS else None
            rate = count * entry_bytes / seconds[count] / 1e9
            found.append(Row(f"pull from {name}", work, rate, "GB/s", "plain copy", copied[count], goal))
        shortest = 1e3 * seconds[1]
        found.append(
            Row(
                f"pull from {name}, shortest",
                "64 tokens of it",
                shortest,
                "ms",
                "plain copy",
                plain_ms,
                less_is_better=True,
            )
        )
    return found


def _seconds_of(form: Form, counts: tuple[int, ...]) -> dict[int, float]:
    """Seconds of pulls of each number of entries from a node of that form, which is a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(theirs, form, counts[-1]), daemon=True)
    owner.start()
    try:
        kept: KeptPrefix = ours.recv()
        return asyncio.run(_pull_all(kept, counts))
    finally:
        owner.kill()
        owner.join()


async def _pull_all(kept: KeptPrefix, counts: tuple[int, ...]) -> dict[int, float]:
    """Seconds of a pull of each number of entries; the best of several, as for the plain copy."""
    keys = _keys(counts[-1])
    transfer, pulled = _make(0xB, PULLING, counts[-1])
    best = dict[int, float]()
    async with transfer:
        await pulled.pull(keys, kept)  # makes the link, and touches the memory
        for count in counts:
            took = []
            for _ in range(ROUNDS):
                await transfer.entries.drop_entries(keys)
                begun_s = time.perf_counter()
                if await pulled.pull(keys[:count], kept) != count:
                    raise SystemExit("bench: a pull has failed; see the log")
                took.append(time.perf_counter() - begun_s)
            best[count] = min(took)
        await pulled.close()
    return best


def _own(connection: Connection, form: Form, entries: int) -> None:
    asyncio.run(_serve(connection, form, entries))


async def _serve(connection: Connection, form: Form, entries: int) -> None:
    transfer, pulled = _make(0xA, form, entries)
    async with transfer:
        blocks = tuple(range(form.entry_blocks)) * entries
        for key in _keys(entries):
            await transfer.entries.save_entries(EntryBlocks((key,), blocks))
        unused: Any = None
        service = NodeService(node_status_pb2.NodeStatus)
        service.serve(NodeParts(unused, unused, unused, unused, unused, unused, unused, unused, owner=pulled.owner))
        server = grpc.aio.server(options=channel_options())
        node_pb2_grpc.add_NodeServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        connection.send(KeptPrefix(f"127.0.0.1:{port}", 0xA, entries * ENTRY_TOKENS, NodeRanks(form.ranks)))
        await server.wait_for_termination()


async def _nothing_to_save(keys: tuple[EntryKey, ...], owner: int | None) -> None:
    """All entries are in the stores already."""


def _make(incarnation: int, form: Form, entries: int) -> tuple[RankedTransfer, Pulls]:
    of_ranks = _settings(incarnation, form, entries)
    shape = KVCacheShape(form.layout, form.block_tokens, form.entry_blocks)
    spec = replace(SPEC, num_kv_heads=SPEC.num_kv_heads // form.ranks)
    makers = [partial(_rank, PagedKVCache(spec, shape), settings) for settings in of_ranks]
    transfer = RankedTransfer(makers, message_bytes=of_ranks[0].message_bytes)
    transfer.leases.deliver_to(lambda _: None, lambda _: None)
    info = node_status_pb2.NodeInfo(
        name="node", role=node_status_pb2.ROLE_DECODE, incarnation=incarnation, tensor_parallel_size=form.ranks
    )
    info.cache_spec.num_layers = info.cache_spec.num_kv_heads = info.cache_spec.head_dim = 1
    info.cache_shape.block_size = info.cache_shape.num_blocks = 1
    pulled = Pulls(
        transfer,
        lambda: info,
        namespace=b"one model",
        entry_bytes=EntryLayout(of_ranks[0].parts(spec)).entry_bytes * form.ranks,
        spec=SPEC,
        ranks=NodeRanks(form.ranks),
        costs=lambda: None,
        step_tokens=lambda: 512,
        keepalive_s=_TIMEOUT_S,
        tls=None,
        save_again=_nothing_to_save,
        num_to_save=lambda *_: 0,
    )
    return transfer, pulled


def _rank(cache: PagedKVCache, settings: TransferSettings, on_filled: Any, on_refused: Any) -> KVTransfer:
    return KVTransfer(cache, settings, on_filled=on_filled, on_refused=on_refused)


def _settings(incarnation: int, form: Form, entries: int) -> list[TransferSettings]:
    """The settings of each rank, with host memory for twice as many entries and two more."""
    spec = replace(SPEC, num_kv_heads=SPEC.num_kv_heads // form.ranks)
    made = [
        TransferSettings(
            incarnation=incarnation,
            transport="ucx",
            segment_bytes=8 << 20,
            staging_slots=3,
            digests=True,
            peers_are_known=True,
            heads=(heads_of(rank, ranks=form.ranks, num_kv_heads=SPEC.num_kv_heads),),
        )
        for rank in range(form.ranks)
    ]
    entry_bytes = EntryLayout(made[0].parts(spec)).entry_bytes
    return [replace(settings, host_cache_bytes=2 * (entries + 1) * entry_bytes) for settings in made]


def _keys(count: int) -> tuple[EntryKey, ...]:
    tokens = array("i", range(count * ENTRY_TOKENS))
    chain = KeyChain(identity="a model", cache_salt="", block_size=ENTRY_TOKENS)
    return tuple(EntryKey(chain.key(number, tokens), chain.root, number) for number in range(count))
