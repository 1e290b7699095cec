"""Caches, keys, a store in memory and an `Offloader` driven by hand in one thread, for the tests of offloading."""

import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from baton.core.block_keys import KeyChain, root_digest
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, EntryState, KeepTime, Sources, StoreChanges
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.mover import Mover
from kvtransfer.offload import Offloader
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.parts import parts_of
from kvtransfer.settings import OpenStore, TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.store import StoreCounters
from tests.conformance.kv import DEADLINE_S, scattered_blocks

T = TypeVar("T")

IDENTITY = "a model"
SPEC = KVCacheSpec(KVKind.GQA, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
LIMIT_S = 30.0


def keys_of(count: int, *, salt: str = "", seed: int = 0) -> tuple[EntryKey, ...]:
    """Keys of a sequence of that many entries."""
    generator = torch.Generator().manual_seed(seed)
    tokens = array("i", torch.randint(1000, (count * ENTRY_TOKENS,), generator=generator).tolist())
    chain = KeyChain(identity=IDENTITY, cache_salt=salt, block_size=ENTRY_TOKENS)
    root = root_digest(IDENTITY, salt)
    return tuple(EntryKey(chain.key(index, tokens), root, index) for index in range(count))


def blocks_of(cache: PagedKVCache, count: int, seed: int) -> tuple[int, ...]:
    """Blocks for that many entries, in no order."""
    return scattered_blocks(cache, count * ENTRY_TOKENS, seed)


def fill_randomly(cache: PagedKVCache, seed: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in cache.parts:
        part.view.copy_(torch.randn(part.view.shape, generator=generator))


def transfer_settings(
    spec: KVCacheSpec, *, places: int, stores: Sequence[OpenStore] = (), heads: tuple[range, ...] = ()
) -> TransferSettings:
    """With room for that many entries in host memory, and where there are stores, for one more on its way to a load."""
    return TransferSettings(
        incarnation=1,
        transport="loopback",
        segment_bytes=1000,
        staging_slots=3,
        digests=True,
        peers_are_known=True,
        heads=heads,
        host_cache_bytes=(places + bool(stores)) * EntryLayout(parts_of(spec)).entry_bytes,
        stores=tuple(stores),
    )


@dataclass
class MemoryStore:
    """A store in memory. Its calls wait while `gate` is closed.

    Attributes:
        read_s: how far each read moves the clock, if there is one.
        other_form: entries that it has in another form than it is given them.
    """

    name: str = "memory"
    gate: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: dict[EntryKey, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    keeps: list[tuple[tuple[EntryKey, ...], KeepTime]] = field(default_factory=list)
    error: Exception | None = None
    is_closed: bool = False
    read_s: float = 0.0
    clock: "Clock | None" = None
    lists: bool = False
    lost: list[bytes] = field(default_factory=list)
    other_form: set[EntryKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()

    def has(self, keys: Sequence[EntryKey]) -> int:
        self._call("has")
        return next((number for number, key in enumerate(keys) if key not in self.kept), len(keys))

    def first(self, keys: Sequence[EntryKey]) -> int:
        self._call("first")
        return next((number for number, key in enumerate(keys) if key in self.kept), len(keys))

    def get(self, key: EntryKey, into: memoryview) -> bool:
        self._call("get")
        if self.clock is not None:
            with self.lock:
                self.clock.now_s += self.read_s
        if key not in self.kept:
            return False
        into[:] = self.kept[key]
        return True

    def put(self, key: EntryKey, entry: memoryview) -> bool:
        self._call("put")
        self.other_form.discard(key)
        self.kept[key] = bytes(entry)
        return True

    def keep(self, keys: Sequence[EntryKey], keep: KeepTime) -> None:
        self._call("keep")
        self.keeps.append((tuple(keys), keep))

    def drop(self, keys: Sequence[EntryKey]) -> None:
        self._call("drop")
        for key in keys:
            self.kept.pop(key, None)

    def drop_roots(self, roots: frozenset[bytes]) -> int:
        self._call("drop_roots")
        found = [key for key in self.kept if key.root in roots]
        for key in found:
            del self.kept[key]
        return len(found)

    def knows(self, digest: bytes) -> bool:
        return any(key.block.digest == digest for key in list(self.kept) if key not in self.other_form)

    def take_lost(self) -> Sequence[bytes]:
        lost, self.lost = self.lost, []
        return lost

    def found(self, most: int) -> Sequence[EntryKey]:
        if not self.lists:
            return ()
        self._call("found")
        return tuple(self.kept)[:most]

    def counters(self) -> StoreCounters:
        return StoreCounters(entries=len(self.kept))

    def close(self) -> None:
        self.is_closed = True

    def _call(self, verb: str) -> None:
        self.calls.append(verb)
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """Host memory and stores of one rank, and caches that share them."""

    def __init__(self, spec: KVCacheSpec = SPEC, *, places: int = 8, stores: Sequence[MemoryStore] = ()) -> None:
        self.spec = spec
        self.clock = Clock()
        self.stores = stores
        self.layout = EntryLayout(parts_of(spec))
        openers = [partial(_opened, store) for store in stores]
        settings = transfer_settings(spec, places=places, stores=openers)
        self.tiers = EntryTiers(self.layout, settings, clock=self.clock)
        self.users: list[User] = []

    def user(self, cache: PagedKVCache, make_mover: Callable[..., Mover] = CpuMover) -> "User":
        mover = make_mover(cache, lambda: None)
        if not self.users:
            self.tiers.open(mover.open_host_memory)
            self._passing = len(self.tiers._reads.passing)
        user = User(self, cache, Offloader(mover, self.tiers, self.clock))
        self.users.append(user)
        return user

    def run(self) -> None:
        """Steps until only a held operation, a store or the clock can change anything."""
        moved = True
        while moved:
            moved = False
            for user in self.users:
                moved = user.offloader.step() or moved

    def run_until(self, holds: Callable[[], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < end_s
            self.run()

    def result(self, future: "Future[T]") -> T:
        self.run_until(future.done)
        return future.result()

    def changes(self) -> StoreChanges:
        """Waits until something has changed in the stores."""
        found: list[StoreChanges] = []

        def has_changed() -> bool:
            if (changes := self.tiers.take_changes()) is not None:
                found.append(changes)
            return bool(found)

        self.run_until(has_changed)
        return found[0]

    def settle(self) -> None:
        """Runs until all writes behind are over."""
        self.run_until(lambda: not self.tiers.is_busy)

    def forget_host(self, keys: Sequence[EntryKey]) -> None:
        """As if they had been evicted from host memory."""
        self.tiers._host.drop(keys)

    def find(self, keys: tuple[EntryKey, ...]) -> int:
        future: Future[int] = Future()
        self.users[0].offloader.find(keys, future)
        return self.result(future)

    def check_nothing_is_left(self) -> None:
        """No call, pin, staging slot or answer of a store is left."""
        self.settle()
        for user in self.users:
            pool = user.offloader._pool
            assert user.offloader.in_flight == 0
            assert pool.available == pool.slots
        assert not self.tiers._saving
        assert len(self.tiers._reads.passing) == self._passing
        assert not any(place.users for place in self.tiers._host._places.values())


class SavedSequence(Future[Any]):
    """The future of a save of one sequence; its result is that sequence's number."""

    def result(self, timeout: float | None = None) -> int:
        (count,) = super().result(timeout)
        return int(count)


class LoadedSequence(Future[Any]):
    """The future of a load; its result is the number of entries, and of states, that are in their blocks.

    Attributes:
        sources: where each of them was.
    """

    @property
    def sources(self) -> Sources:
        return tuple(super().result())

    def result(self, timeout: float | None = None) -> int:
        return len(super().result(timeout))


@dataclass
class User:
    """One cache of a `World`."""

    world: World
    cache: PagedKVCache
    offloader: Offloader

    def begin_save(
        self, keys: tuple[EntryKey, ...], blocks: tuple[int, ...], state: EntryState | None = None
    ) -> "Future[int]":
        future = SavedSequence()
        self.offloader.save((EntryBlocks(keys, blocks, state=state),), future)
        return future

    def begin_load(
        self,
        keys: tuple[EntryKey, ...],
        blocks: tuple[int, ...],
        timeout_s: float = LIMIT_S,
        entry_s: float = math.inf,
        state: EntryState | None = None,
    ) -> "Future[int]":
        future = LoadedSequence()
        self.offloader.load(EntryBlocks(keys, blocks, state=state), timeout_s, entry_s, future)
        return future

    def save(self, keys: tuple[EntryKey, ...], blocks: tuple[int, ...]) -> int:
        """Saves entries, one by one if there are stores, because few may wait to be written."""
        if not self.world.stores:
            return self.world.result(self.begin_save(keys, blocks))
        saved = 0
        for key in keys:
            saved += self.world.result(self.begin_save((key,), blocks))
            self.world.settle()
        return saved

    def load(self, keys: tuple[EntryKey, ...], blocks: tuple[int, ...]) -> int:
        return self.world.result(self.begin_load(keys, blocks))


def _opened(store: MemoryStore, layout: EntryLayout) -> MemoryStore:
    assert layout.namespace
    return store
