"""Nodes that pull entries from each other: real transfers, links and gRPC servers, without an engine. In this process,
or in a child that tests stop and kill. All ranks of a node are in its process."""

import asyncio
import signal
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from baton.core import pull_costs
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, EntryState, KeptPrefix, NodeRanks
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
from tests.conformance.kv import DEADLINE_S, eventually, make_cache, tokens_of
from tests.conformance.ranked_nodes import held_by, of_rank
from tests.unit.kvtransfer.offloading import blocks_of, keys_of

# 1 MiB an entry, which fits into no queue.
SPEC = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32")
ENTRIES = 12
KEYS = keys_of(ENTRIES)
OWNER, READER = 0xA, 0xB
ONE_RANK = NodeRanks()


class PullingNode:
    """A node with a cache and host memory.

    Args:
        places: of entries in its host memory.
        namespace: of its entries.
        spec: of the whole model.
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
        spec: KVCacheSpec = SPEC,
        ranks: NodeRanks = ONE_RANK,
    ) -> None:
        self.spec, self.layout, self.block_size, self.ranks = spec, layout, block_size, ranks
        self.heads = [held_by(spec, rank, ranks.size) for rank in range(ranks.size)]
        self.caches = [
            make_cache(of_rank(spec, heads), layout, block_size, 2 * ENTRIES * ENTRY_TOKENS) for heads in self.heads
        ]
        self.cache = self.caches[0]
        self.address = ""
        # By rank, the entries that its cache alone has, and how often each was saved.
        self.only_cached: dict[int, dict[EntryKey, int]] = {}
        self.info = node_status_pb2.NodeInfo(
            name=f"node-{incarnation:x}",
            role=node_status_pb2.ROLE_DECODE,
            incarnation=incarnation,
            tensor_parallel_size=ranks.size,
            attention_data_parallel=ranks.own_requests,
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
            host_cache_bytes=(places + bool(stores)) * self._entry_bytes,
            stores=stores,
        )
        self.of_ranks: list[KVTransfer] = []
        makers = [partial(self._make, settings, rank) for rank in range(ranks.size)]
        self.transfer = RankedTransfer(makers, message_bytes=settings.message_bytes)
        self.transfer.leases.deliver_to(lambda _: None, lambda _: None)
        self.pulls = Pulls(
            self.transfer,
            lambda: self.info,
            namespace=namespace,
            entry_bytes=self._entry_bytes,
            spec=spec,
            ranks=ranks,
            costs=lambda: None,
            step_tokens=lambda: 512,
            save_again=self._save_again,
            num_to_save=self._num_to_save,
            keepalive_s=DEADLINE_S,
            tls=tls,
        )
        self._protection = None if tls is None else Protection(tls.server(), CertificateGuard())
        self._server: GrpcServer

    def _make(self, settings: TransferSettings, rank: int, on_filled: Any, on_refused: Any) -> KVTransfer:
        settings = replace(settings, heads=self.heads[rank])
        self.of_ranks.append(KVTransfer(self.caches[rank], settings, on_filled=on_filled, on_refused=on_refused))
        return self.of_ranks[rank]

    @property
    def _entry_bytes(self) -> int:
        """Size of an entry of rank 0, and so of each rank."""
        return EntryLayout(parts_of(of_rank(self.spec, self.heads[0]), self.heads[0])).entry_bytes

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
        return KeptPrefix(self.address, self.info.incarnation, ENTRIES * ENTRY_TOKENS, self.ranks)

    async def keep(self, seed: int = 4, owner: int | None = None) -> int:
        """Keeps the entries of one sequence, those of its owner if it has one."""
        whole = computed(ENTRIES, spec=self.spec, seed=seed)
        blocks = blocks_of(self.cache, ENTRIES, 1)
        for cache, heads in zip(self.caches, self.heads, strict=True):
            for token in range(ENTRIES * ENTRY_TOKENS):
                place = blocks[token // self.block_size], token % self.block_size
                cache.view[:, :, *place] = whole[:, :, token, heads[0].start : heads[0].stop]
        (saved,) = await self.transfer.entries.save_entries(EntryBlocks(KEYS, blocks, owner))
        return saved

    async def pull(self, kept: KeptPrefix, keys: tuple[EntryKey, ...] = KEYS, *, owner: int | None = None) -> int:
        return await self.pulls.pull(keys, kept, owner=owner)

    async def keep_state(self, after: int) -> int:
        """Keeps the recurrent state after that many entries."""
        whole = computed_state(self.spec, after)
        for cache, heads in zip(self.caches, self.heads, strict=True):
            assert cache.state is not None
            cache.state.view[:, 0, 1, 0] = whole[:, heads[-1].start : heads[-1].stop]
        state = EntryState(KEYS[after - 1], 1)
        (saved,) = await self.transfer.entries.save_entries(EntryBlocks((), (), state=state))
        return saved

    async def pull_state(
        self, kept: KeptPrefix, keys: tuple[EntryKey, ...] = KEYS, *, held: int = 0, every: int = 1, resumed: int = 0
    ) -> int:
        return await self.pulls.pull_state(keys, kept, held=held, every=every, resumed=resumed)

    async def load_state(self, after: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Loads that many entries and the state after them. Returns how many of both came, the tokens as `load` does,
        and the state as [L, H, C]."""
        for cache in self.caches:
            assert cache.state is not None
            cache.state.memory.zero_()
        count, tokens = await self.load(state=EntryState(KEYS[after - 1], 0), entries=after)
        state = torch.cat([cache.state.view[:, 0, 0, 0] for cache in self.caches if cache.state is not None], dim=1)
        return count, tokens, state

    async def forget_state(self, after: int, rank: int = 0) -> None:
        """Loses a piece of the state after that many entries."""
        await self._on_thread(lambda tiers: tiers._host.drop(_state_keys(tiers, after)[-1:]), rank)

    async def damage_state(self, after: int, rank: int = 0) -> None:
        """Flips a bit of a piece of the state after that many entries."""
        await self._on_thread(lambda tiers: _flip(tiers, _state_keys(tiers, after)[0]), rank)

    async def forget(self, first: int, rank: int = 0) -> None:
        """Loses all entries of a rank from this one on, as others would displace them."""
        await self._on_thread(lambda tiers: tiers._host.drop(KEYS[first:]), rank)

    async def forget_but_in_cache(self, first: int, stop: int = ENTRIES, rank: int = 0) -> None:
        """Loses all entries from this one on, but the cache has those before `stop` still."""
        await self.forget(first, rank)
        self.only_cached[rank] = dict.fromkeys(KEYS[first:stop], 0)

    async def _save_again(self, wanted: tuple[EntryKey, ...], owner: int | None) -> None:
        keys = wanted[: self._num_to_save(wanted, owner)]
        if keys:
            cached = self.only_cached[owner or 0]
            cached |= {key: cached[key] + 1 for key in keys}
            await self.transfer.entries.save_entries(EntryBlocks(keys, blocks_of(self.cache, ENTRIES, 1), owner))

    def _num_to_save(self, wanted: tuple[EntryKey, ...], owner: int | None) -> int:
        cached = self.only_cached.get(owner or 0, {})
        return len(list(takewhile(cached.__contains__, wanted)))

    async def damage(self, number: int, rank: int = 0) -> None:
        """Flips a bit of an entry in a rank's host memory."""

        await self._on_thread(lambda tiers: _flip(tiers, KEYS[number]), rank)

    def stop_after(self, entries: int) -> None:
        """Stops this process when it has sent that many entries, or received them."""
        counts = iter(range(1, entries + 1))

        def stopping(count: Any) -> Any:
            def call(tiers: EntryTiers, *arguments: Any) -> None:
                count(tiers, *arguments)
                if next(counts, 0) == entries:
                    # To this thread: one that is sent to the process waits for its main thread, and this one goes on.
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

            return call

        EntryTiers.served = stopping(EntryTiers.served)  # type: ignore[method-assign]
        EntryTiers.commit_pulled = stopping(EntryTiers.commit_pulled)  # type: ignore[method-assign]

    def held(self) -> list[str]:
        """What is held for pulls: places, pins, links."""
        of_ranks = [each for rank in self.of_ranks for each in self._held_by(rank)]
        return [*of_ranks, *(f"link {number:x}" for number in self.transfer._pairs)]

    def _held_by(self, rank: KVTransfer) -> list[str]:
        tiers, thread = rank._tiers, rank._thread
        assert tiers is not None
        users = [f"a user of entry {place.key.number}" for place in tiers._host._places.values() if place.users]
        coming = [f"the place of entry {key.number}" for key in tiers._saving]
        pulls = [f"pull {number:x}" for number in thread.pulls.receiver.pulls]
        return [*users, *coming, *pulls, *["a pull that is served"] * len(thread.pulls.sender.serving)]

    def count_served(self) -> int:
        return self.transfer.counters().entries.served

    def count_damaged(self) -> int:
        return self.transfer.counters().entries.damaged

    async def load(
        self, owner: int | None = None, *, state: EntryState | None = None, entries: int = ENTRIES
    ) -> tuple[int, torch.Tensor]:
        """Loads the entries that host memory has. Returns their number, and the loaded tokens as [L, K, T, H, C], those
        of their owner if they have one, else of all ranks together. A state counts as one more."""
        blocks = blocks_of(self.cache, ENTRIES, 2)
        for cache in self.caches:
            cache.memory.zero_()
        wanted = EntryBlocks(KEYS[:entries], blocks, owner, state)
        count = len(await self.transfer.entries.load_entries(wanted, timeout_s=DEADLINE_S))
        ranks = range(self.ranks.size) if owner is None else [owner]
        tokens = min(count, entries) * ENTRY_TOKENS
        shape = self.spec.num_layers, self.spec.kv_factor, tokens, self.spec.num_kv_heads
        whole = torch.zeros(*shape, self.spec.head_dim, dtype=self.cache.view.dtype)
        for rank in ranks if count else ():
            heads = self.heads[rank][0]
            whole[:, :, :, heads.start : heads.stop] = tokens_of(self.caches[rank], blocks, tokens)
        return count, whole

    async def _on_thread(self, do: Any, rank: int) -> None:
        tiers, thread = self.of_ranks[rank]._tiers, self.of_ranks[rank]._thread

        def call(future: "Future[None]") -> None:
            do(tiers)
            future.set_result(None)

        await asyncio.wrap_future(thread.call(call))


def an_owner(spec: KVCacheSpec = SPEC, ranks: NodeRanks = ONE_RANK, places: int = 3 * ENTRIES) -> PullingNode:
    return PullingNode(OWNER, KVCacheLayout.NHD, 16, spec=spec, ranks=ranks, places=places)


def a_reader_elsewhere() -> PullingNode:
    """A reader in a process of its own, which waits as long as it takes."""
    pulls.PULL_S_MIN = pull_costs.PULL_S_MAX = pull_link._OPEN_S = DEADLINE_S
    return a_reader()


def a_reader(spec: KVCacheSpec = SPEC, ranks: NodeRanks = ONE_RANK, places: int = 3 * ENTRIES) -> PullingNode:
    """A node of another layout and block size than the owner."""
    return PullingNode(READER, KVCacheLayout.HND, 32, spec=spec, ranks=ranks, places=places)


def lift_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pulls wait as long as it takes, and tries a failed one again at once."""
    monkeypatch.setattr(pulls, "PULL_S_MIN", DEADLINE_S)
    monkeypatch.setattr(pull_costs, "PULL_S_MAX", DEADLINE_S)
    monkeypatch.setattr(pulls, "_BACK_OFF_S", 0.0)
    monkeypatch.setattr(pull_link, "_OPEN_S", DEADLINE_S)
    monkeypatch.setattr(pull_link, "_ARRIVE_S", DEADLINE_S)
    monkeypatch.setattr(pull_costs, "UNMEASURED_TOKENS", 64)
    monkeypatch.setattr(pull_costs, "SHARE", float("inf"))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def until_stopped(pid: int) -> None:
    await eventually(lambda: is_stopped(pid))


def _state_keys(tiers: EntryTiers, after: int) -> tuple[EntryKey, ...]:
    return tiers.layout.state_keys(KEYS[after - 1])


def _flip(tiers: EntryTiers, key: EntryKey) -> None:
    place = tiers._host.pin(key)
    assert place is not None
    place.tensor[len(place.tensor) // 3] ^= 4
    tiers._host.unpin(place)


def computed_state(spec: KVCacheSpec, after: int) -> torch.Tensor:
    """The owner's recurrent state after that many entries, as [L, H, C]."""
    assert spec.state is not None
    shape = spec.state.num_layers, spec.state.num_kv_heads, spec.state.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(after))


def computed(entries: int, *, spec: KVCacheSpec = SPEC, seed: int = 4) -> torch.Tensor:
    """The KV of the owner's first tokens, as [L, K, T, H, C]."""
    shape = spec.num_layers, spec.kv_factor, ENTRIES * ENTRY_TOKENS, spec.num_kv_heads, spec.head_dim
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, spec.dtype))
    return whole[:, :, : entries * ENTRY_TOKENS]
