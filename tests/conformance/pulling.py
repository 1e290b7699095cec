"""Nodes that pull entries from each other: real transfers, links and gRPC servers, without an engine. In this process,
or in a child that tests stop and kill."""

import asyncio
import os
import signal
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, KeptPrefix
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.node import pull_link, pulls
from baton.node.pulls import Pulls
from baton.node.service import NodeParts, NodeService
from baton.protos.internal.v1 import node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.guard import CertificateGuard
from baton.rpc.secure_server import Protection
from baton.rpc.server import GrpcServer
from baton.security.tls import InternalTls
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.parts import parts_of
from kvtransfer.ranked import RankedTransfer
from kvtransfer.settings import OpenStore, TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import DEADLINE_S, as_bytes, make_cache, tokens_of
from tests.unit.kvtransfer.offloading import blocks_of, fill_randomly, keys_of

# 1 MiB an entry, which fits into no queue.
SPEC = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32")
ENTRIES = 12
KEYS = keys_of(ENTRIES)
OWNER, READER = 0xA, 0xB


class PullingNode:
    """A node with a cache and host memory.

    Args:
        places: of entries in its host memory.
        namespace: of its entries.
    """

    def __init__(
        self,
        incarnation: int,
        layout: KVCacheLayout,
        block_size: int,
        *,
        places: int = 3 * ENTRIES,
        namespace: bytes = b"one model",
        transport: str = "ucx",
        stores: tuple[OpenStore, ...] = (),
        tls: InternalTls | None = None,
    ) -> None:
        self.cache = make_cache(SPEC, layout, block_size, 2 * ENTRIES * ENTRY_TOKENS)
        self.address = ""
        self.info = node_status_pb2.NodeInfo(
            name=f"node-{incarnation:x}", role=node_status_pb2.ROLE_DECODE, incarnation=incarnation
        )
        self.info.cache_spec.num_layers = self.info.cache_spec.num_kv_heads = self.info.cache_spec.head_dim = 1
        self.info.cache_shape.block_size = self.info.cache_shape.num_blocks = 1
        settings = TransferSettings(
            incarnation=incarnation,
            transport=transport,
            segment_bytes=1 << 20,
            staging_slots=3,
            digests=True,
            peers_are_known=True,
            host_cache_bytes=(places + bool(stores)) * EntryLayout(parts_of(SPEC)).entry_bytes,
            stores=stores,
        )
        self.rank: KVTransfer
        self.transfer = RankedTransfer([partial(self._make, settings)], message_bytes=settings.message_bytes)
        self.transfer.deliver_to(lambda _: None, lambda _: None)
        self.pulls = Pulls(
            self.transfer,
            lambda: self.info,
            namespace=namespace,
            entry_bytes=EntryLayout(parts_of(SPEC)).entry_bytes,
            ranks=1,
            costs=lambda: None,
            step_tokens=lambda: 512,
            keepalive_s=DEADLINE_S,
            tls=tls,
        )
        self._protection = None if tls is None else Protection(tls.server(), CertificateGuard())
        self._server: GrpcServer

    def _make(self, settings: TransferSettings, on_filled: Any, on_refused: Any) -> KVTransfer:
        self.rank = KVTransfer(self.cache, settings, on_filled=on_filled, on_refused=on_refused)
        return self.rank

    async def __aenter__(self) -> Self:
        await self.transfer.start()
        self._server = GrpcServer("127.0.0.1:0", advertise=None, protection=self._protection)
        unused: Any = None
        service = NodeService(node_status_pb2.NodeStatus)
        service.serve(NodeParts(unused, unused, unused, unused, unused, unused, unused, unused, owner=self.pulls.owner))
        node_pb2_grpc.add_NodeServicer_to_server(service, self._server.grpc)
        self.address = self._server.address
        await self._server.start(())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.pulls.close()
        await self._server.stop()
        await self.transfer.close()

    # ---- what a test does to it, also from another process

    def kept(self) -> KeptPrefix:
        """What a gateway says of it."""
        return KeptPrefix(self.address, self.info.incarnation, ENTRIES * ENTRY_TOKENS)

    async def keep(self, seed: int = 4) -> int:
        """Keeps the entries of one sequence."""
        fill_randomly(self.cache, seed)
        return await self.transfer.save_entries(EntryBlocks(KEYS, blocks_of(self.cache, ENTRIES, 1)))

    async def pull(self, kept: KeptPrefix, keys: tuple[EntryKey, ...] = KEYS) -> int:
        return await self.pulls.pull(keys, kept)

    async def forget(self, first: int) -> None:
        """Loses all entries from this one on, as others would displace them."""
        await self._on_thread(lambda tiers: tiers._host.drop(KEYS[first:]))

    async def damage(self, number: int) -> None:
        """Flips a bit of an entry in host memory."""

        def flip(tiers: EntryTiers) -> None:
            place = tiers._host.pin(KEYS[number])
            assert place is not None
            place.tensor[len(place.tensor) // 3] ^= 4
            tiers._host.unpin(place)

        await self._on_thread(flip)

    def stop_after(self, entries: int) -> None:
        """Stops this process when it has sent that many entries, or received them."""
        counts = iter(range(1, entries + 1))

        def stopping(count: Any) -> Any:
            def call(tiers: EntryTiers, *arguments: Any) -> None:
                count(tiers, *arguments)
                if next(counts, 0) == entries:
                    os.kill(os.getpid(), signal.SIGSTOP)

            return call

        EntryTiers.served = stopping(EntryTiers.served)  # type: ignore[method-assign]
        EntryTiers.commit_pulled = stopping(EntryTiers.commit_pulled)  # type: ignore[method-assign]

    def held(self) -> list[str]:
        """What is held for pulls: places, pins, links."""
        tiers, thread = self.rank._tiers, self.rank._thread
        assert tiers is not None
        users = [f"a user of entry {place.key.number}" for place in tiers._host._places.values() if place.users]
        coming = [f"the place of entry {key.number}" for key in tiers._saving]
        pulls = [f"pull {number:x}" for _, number in thread.pulls._pulls] + ["a pull that is served"] * len(
            thread.pulls._serving
        )
        return [*users, *coming, *pulls, *(f"link {number:x}" for number in self.transfer._pairs)]

    def count_served(self) -> int:
        return self.transfer.counters().entries.served

    async def load(self, seed: int = 2) -> tuple[int, torch.Tensor]:
        """Loads the entries that host memory has. Returns their number, and the bytes of the loaded tokens."""
        self.cache.memory.zero_()
        blocks = blocks_of(self.cache, ENTRIES, seed)
        count = await self.transfer.load_entries(EntryBlocks(KEYS, blocks), timeout_s=DEADLINE_S)
        return count, as_bytes(tokens_of(self.cache, blocks, count * ENTRY_TOKENS))

    async def _on_thread(self, do: Any) -> None:
        tiers, thread = self.rank._tiers, self.rank._thread

        def call(future: "Future[None]") -> None:
            do(tiers)
            future.set_result(None)

        await asyncio.wrap_future(thread.call(call))


def an_owner() -> PullingNode:
    return PullingNode(OWNER, KVCacheLayout.NHD, 16)


def a_reader_elsewhere() -> PullingNode:
    """A reader in a process of its own, which waits as long as it takes."""
    pulls.PULL_S_MIN = pulls.PULL_S_MAX = pull_link._OPEN_S = DEADLINE_S
    return a_reader()


def a_reader() -> PullingNode:
    """A node of another layout and block size than the owner."""
    return PullingNode(READER, KVCacheLayout.HND, 32)


def computed(entries: int) -> torch.Tensor:
    """The bytes of the owner's first tokens."""
    cache: PagedKVCache = make_cache(SPEC, KVCacheLayout.NHD, 16, 2 * ENTRIES * ENTRY_TOKENS)
    fill_randomly(cache, 4)
    return as_bytes(tokens_of(cache, blocks_of(cache, ENTRIES, 1), entries * ENTRY_TOKENS))
