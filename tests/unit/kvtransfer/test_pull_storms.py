"""Random pulls in both directions between two nodes that save, load, drop, evict and lose their links meanwhile: a load
reports only what was computed, and no pin or place is left."""

import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from baton.core.errors import DataLoss
from baton.core.kv_entries import DroppedEntries, EntryKey
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape
from kvtransfer.entry_pulls import EntryPulls
from kvtransfer.records import EntryLink, PullJob
from kvtransfer.transports.loopback import LoopbackTransport
from tests.conformance.kv import DEADLINE_S
from tests.unit.kvtransfer.offloading import MemoryStore, World
from tests.unit.kvtransfer.test_offload_storms import BLOCK, EACH, SEQUENCES, SPEC, Begun, check, write

ACTIONS = 150
SHAPE = KVCacheShape(KVCacheLayout.NHD, BLOCK, 16)
BLOCKS = tuple(range(4 * EACH))


class Side:
    """One node: its host memory, a store below it or none, one cache, and its ends of pulls."""

    def __init__(self, *, places: int, has_store: bool, store: MemoryStore | None = None) -> None:
        stores = [store or MemoryStore()] if has_store or store else []
        self.world = World(SPEC, places=places, stores=stores)
        self.user = self.world.user(PagedKVCache(SPEC, SHAPE))
        self.transport = LoopbackTransport()
        self.pulls = EntryPulls(self.world.tiers, self.transport, self.world.clock)

    def step(self) -> None:
        self.transport.progress()
        while (arrival := self.transport.probe()) is not None:
            self.pulls.receiver.arrived(arrival)
        self.pulls.step()
        self.user.offloader.step()

    def drop_root(self, root: bytes) -> "Future[DroppedEntries]":
        """As the transfer thread does."""
        dropped: Future[DroppedEntries] = Future()
        self.pulls.drop_root(root)
        self.user.offloader.drop_roots(frozenset({root}), dropped)
        return dropped

    def place_to_damage(self, rng: random.Random) -> None:
        places = [place for place in self.world.tiers._host._places.values() if place.is_written]
        if places:
            rng.choice(places).tensor[rng.randrange(100)] ^= 1

    def check_nothing_is_left(self) -> None:
        assert not self.pulls.receiver.pulls
        assert not self.pulls.sender.serving
        self.world.check_nothing_is_left()


@dataclass
class Running:
    """A pull that its reader has begun."""

    number: int
    keys: tuple[EntryKey, ...]
    is_asked: bool = False
    served: Future[int] | None = None
    ended: Future[int] | None = None


@dataclass
class Way:
    """A link, and the pulls over it."""

    reader: Side
    owner: Side
    link: int = 0
    is_up: bool = False
    pull: Running | None = None

    def connect(self, link: int) -> None:
        self.link, self.is_up = link, True
        addresses = [side.transport.listen(link) for side in (self.reader, self.owner)]
        self.reader.transport.connect(link, addresses[1])
        self.owner.transport.connect(link, addresses[0])

    def disconnect(self, side: Side) -> None:
        """One end notices first that the link is gone."""
        self.is_up = False
        side.pulls.lost(self.link)
        side.transport.disconnect(self.link)

    def act(self, rng: random.Random) -> None:
        pull = self.pull
        if pull is None:
            keys = rng.choice(SEQUENCES)[rng.randrange(3) :]
            begun: Future[int] = Future()
            number = rng.randrange(1 << 40)
            self.reader.pulls.receiver.begin(PullJob(number, keys), (EntryLink(self.link),), begun)
            self.pull = Running(number, keys[: begun.result()])
        elif pull.served is None and pull.keys and self.is_up and rng.random() < 0.8:
            pull.served = Future()
            self.owner.pulls.sender.serve(EntryLink(self.link), PullJob(pull.number, pull.keys), pull.served)
        elif pull.ended is None and (pull.served is None or pull.served.done() or not self.is_up):
            first = pull.served.result() if pull.served is not None and pull.served.done() else 0
            pull.ended = Future()
            self.reader.pulls.receiver.end(pull.number, first, rng.choice([0.0, 5.0]), pull.ended)
        elif pull.ended is not None and pull.ended.done():
            assert isinstance(pull.ended.exception(), DataLoss) or 0 <= pull.ended.result() <= len(pull.keys)
            self.pull = None


def load_all(side: Side) -> None:
    """Loads every sequence, as far as it is kept, and checks it. A load waits for what is being pulled, within its
    bound."""
    for keys in SEQUENCES:
        future = side.user.begin_load(keys, BLOCKS, timeout_s=60.0)
        end_s = time.monotonic() + DEADLINE_S
        while not future.done():
            assert time.monotonic() < end_s
            side.world.run()
            side.world.clock.now_s += 0.01
        check(Begun(side.user, keys, BLOCKS, future, is_load=True), set())


@pytest.mark.parametrize("seed", range(16))
def test_pulls_leave_nothing_and_bring_only_what_was_computed(seed: int) -> None:
    rng = random.Random(seed)
    sides = [Side(places=rng.choice([3, 6, 20]), has_store=bool(seed % 3)) for _ in range(2)]
    links = iter(range(1 << 40, 1 << 41))
    ways = [Way(sides[0], sides[1]), Way(sides[1], sides[0])]
    for way in ways:
        way.connect(next(links))
    for _ in range(ACTIONS):
        way, side, keys = rng.choice(ways), rng.choice(sides), rng.choice(SEQUENCES)
        match rng.randrange(17):
            case 0 | 1:
                write(side.user, keys, BLOCKS)
                future = side.user.begin_save(keys, BLOCKS)
                side.world.run_until(future.done)
            case 2:
                load_all(side)
            case 3:
                side.user.offloader.drop(keys[rng.randrange(4) :], Future())
            case 4:
                side.drop_root(keys[0].root)
            case 5:
                side.world.forget_host(keys[rng.randrange(4) :])
            case 6:
                side.world.clock.now_s += rng.choice([0.1, 60.0])
            case 7 if way.is_up:
                way.disconnect(side)
            case 8:
                side.place_to_damage(rng)
            case _ if way.is_up:
                way.act(rng)
        for _ in range(rng.randrange(8)):
            rng.choice(sides).step()
        for each in ways:
            if not each.is_up:
                _renew(each, next(links), rng)
    for way in ways:
        way.disconnect(way.reader)
        _renew(way, next(links), rng)
    for side in sides:
        for way in ways:
            side.transport.disconnect(way.link)
        load_all(side)
        side.check_nothing_is_left()


def _renew(way: Way, link: int, rng: random.Random) -> None:
    """Ends the link at its other end too, and the pull at its reader, as nodes do. Then makes a new one."""
    for side in rng.sample([way.reader, way.owner], 2):
        side.pulls.lost(way.link)
        side.transport.disconnect(way.link)
    if way.pull is not None and way.pull.ended is None:
        way.pull.ended = Future()
        way.reader.pulls.receiver.end(way.pull.number, 0, 0.0, way.pull.ended)
    for _ in range(100):
        for side in (way.reader, way.owner):
            side.step()
    assert not way.reader.pulls.holds(way.link)
    assert not way.owner.pulls.holds(way.link)
    if way.pull is not None:
        assert way.pull.served is None or way.pull.served.done()
        assert way.pull.ended is not None
        assert way.pull.ended.done()
        way.pull = None
    way.connect(link)


@pytest.mark.parametrize("steps", range(6))
def test_a_pull_brings_back_nothing_of_a_root_that_is_dropped_meanwhile(steps: int) -> None:
    """Its owner may drop it later, or not be there when the others do."""
    keys = SEQUENCES[0]
    reader, owner = (Side(places=20, has_store=False) for _ in range(2))
    write(owner.user, keys, BLOCKS)
    saved = owner.user.begin_save(keys, BLOCKS)
    owner.world.run_until(saved.done)
    way = Way(reader, owner)
    way.connect(1 << 40)
    begun, served, ended = Future[int](), Future[int](), Future[int]()
    reader.pulls.receiver.begin(PullJob(7, keys), (EntryLink(way.link),), begun)
    assert begun.result() == len(keys)
    owner.pulls.sender.serve(EntryLink(way.link), PullJob(7, keys), served)
    for _ in range(steps):
        owner.step()
        reader.step()
    reader.drop_root(keys[0].root)
    reader.pulls.receiver.end(7, len(keys), 60.0, ended)
    for _ in range(100):
        owner.step()
        reader.step()
    assert served.result() == len(keys)
    assert ended.result() == 0
    assert not reader.world.tiers.count(keys)
    again, later = Future[int](), Future[int]()
    reader.pulls.receiver.begin(PullJob(8, keys), (EntryLink(way.link),), again)
    assert again.result() == 0
    reader.world.clock.now_s += 60.0
    reader.pulls.receiver.begin(PullJob(9, keys), (EntryLink(way.link),), later)
    assert later.result() == len(keys)


def test_a_place_that_a_message_is_written_to_is_given_back_only_after_that() -> None:
    keys, (other, another) = SEQUENCES[0], SEQUENCES[1][:2]
    reader, owner = Side(places=2, has_store=False), Side(places=20, has_store=False)
    write(owner.user, keys, BLOCKS)
    owner.world.run_until(owner.user.begin_save(keys, BLOCKS).done)
    way, tiers = Way(reader, owner), reader.world.tiers
    way.connect(1 << 40)
    reader.pulls.receiver.begin(PullJob(7, keys[:1]), (EntryLink(way.link),), Future())
    assert tiers.take(other) is not None
    owner.pulls.sender.serve(EntryLink(way.link), PullJob(7, keys[:1]), Future())
    owner.step()
    reader.transport.progress()
    arrival = reader.transport.probe()
    assert arrival is not None
    reader.pulls.receiver.arrived(arrival)
    reader.pulls.lost(way.link)
    assert reader.pulls.holds(way.link)
    assert tiers.take(another) is None
    reader.step()
    assert not reader.pulls.holds(way.link)
    assert tiers.take(another) is not None


class DropsLate(MemoryStore):
    """A store whose drops wait for the test, as those behind many writes do."""

    def drop_roots(self, roots: frozenset[bytes]) -> int:
        assert self.may_drop.wait(DEADLINE_S)
        return super().drop_roots(roots)

    may_drop: threading.Event


@pytest.mark.parametrize("is_served", ["before the drop", "after the drop", "after a switch of roles"])
def test_an_owner_reads_nothing_back_of_a_root_that_its_store_is_still_dropping(is_served: str) -> None:
    keys, store = SEQUENCES[0], DropsLate()
    store.may_drop = threading.Event()
    owner, reader = Side(places=20, has_store=False, store=store), Side(places=20, has_store=False)
    write(owner.user, keys, BLOCKS)
    owner.world.run_until(owner.user.begin_save(keys, BLOCKS).done)
    owner.world.settle()
    owner.world.forget_host(keys)
    way = Way(reader, owner)
    way.connect(1 << 40)
    served = Future[int]()
    reader.pulls.receiver.begin(PullJob(7, keys), (EntryLink(way.link),), Future())
    if is_served == "before the drop":
        owner.pulls.sender.serve(EntryLink(way.link), PullJob(7, keys), served)
        owner.pulls.step()
    dropped = owner.drop_root(keys[0].root)
    if is_served == "after a switch of roles":
        owner.pulls.close()
        owner.pulls = EntryPulls(owner.world.tiers, owner.transport, owner.world.clock)
    if is_served != "before the drop":
        owner.pulls.sender.serve(EntryLink(way.link), PullJob(7, keys), served)

    def is_over() -> bool:
        for side in (owner, reader):
            side.step()
        return served.done()

    owner.world.run_until(is_over)
    store.may_drop.set()
    assert owner.world.result(dropped).counts["memory"] == len(keys)
    assert served.result() == 0
    assert owner.world.tiers.count(keys) == 0
    way.disconnect(owner)
    owner.step()
    owner.check_nothing_is_left()
