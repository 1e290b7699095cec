"""Entries while the pages of host memory are still being page-locked."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from baton.kvcache.layout import KVCacheLayout
from kvtransfer.movers import host_pages
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.host_pages import FIRST_UNITS, HostPages
from tests.conformance.kv import make_cache
from tests.unit.kvtransfer.offloading import SPEC, MemoryStore, World, blocks_of, fill_randomly, keys_of
from tests.unit.kvtransfer.test_host_pages import Locks, wait_until_usable

PLACES = 24


@dataclass
class Opened:
    """The host memory that a mover has opened."""

    locks: Locks
    pages: HostPages | None = None


class LockingMover(CpuMover):
    """A CPU's mover whose host memory is page-locked slab by slab, as a GPU's."""

    def __init__(self, opened: Opened, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._opened = opened

    def open_host_memory(self, num_bytes: int, unit_bytes: int) -> HostPages:
        self._opened.pages = HostPages(num_bytes, unit_bytes=unit_bytes, locks=self._opened.locks)
        return self._opened.pages


@pytest.mark.parametrize("stores", [0, 1])
def test_entries_use_what_is_locked_and_later_the_rest(monkeypatch: pytest.MonkeyPatch, stores: int) -> None:
    monkeypatch.setattr(host_pages, "_SLAB_BYTES", 1 << 12)
    opened = Opened(Locks())
    world = World(places=PLACES, stores=[MemoryStore() for _ in range(stores)])
    cache = make_cache(SPEC, KVCacheLayout.NHD, 16, PLACES * 64)
    fill_randomly(cache)
    user = world.user(cache, partial(LockingMover, opened))
    assert opened.pages is not None
    usable = FIRST_UNITS - (PLACES + 1 - world.tiers.places if stores else 0)
    keys, blocks = keys_of(PLACES), blocks_of(cache, PLACES, 1)
    user.save(keys, blocks)
    assert world.tiers.counters().entries == usable
    opened.locks.gate.set()
    wait_until_usable(opened.pages, (PLACES + bool(stores)) * world.layout.entry_bytes)
    user.save(keys, blocks)
    assert world.tiers.counters().entries == world.tiers.places > usable
    assert world.tiers.counters().evicted == 0
    assert user.load(keys, blocks) >= world.tiers.places
    world.check_nothing_is_left()
    world.tiers.close()
    assert not opened.locks.locked
