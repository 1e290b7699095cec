"""Random pulls of entries and of the recurrent states after them, with damage, evictions, drops and lost links: a state
that is loaded whole is the one that was computed, and no pin or place is left."""

import random
from concurrent.futures import Future
from dataclasses import replace

import pytest

from baton.core.kv_entries import EntryState
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.entry_pulls import EntryPulls
from kvtransfer.records import EntryLink, PullJob
from kvtransfer.transports.loopback import LoopbackTransport
from tests.unit.kvtransfer.offloading import World, keys_of
from tests.unit.kvtransfer.test_offload_storms import BLOCK, EACH, SPEC, value_of, write

# A piece has one head of one layer.
STATE = KVCacheSpec(KVKind.STATE, num_layers=2, num_kv_heads=3, head_dim=1000, dtype="float32")
STATEFUL = replace(SPEC, state=STATE)
SEQUENCES = [keys_of(4, seed=seed, salt=str(seed % 2)) for seed in range(3)]
BLOCKS = tuple(range(4 * EACH))
LINK = 1 << 40
ACTIONS = 120


class Side:
    """One node with states: its host memory, its cache, and its ends of pulls."""

    def __init__(self, *, places: int) -> None:
        self.world = World(STATEFUL, places=places)
        self.user = self.world.user(PagedKVCache(STATEFUL, KVCacheShape(KVCacheLayout.NHD, BLOCK, 16, state_slots=3)))
        self.transport = LoopbackTransport()
        self.pulls = EntryPulls(self.world.tiers, self.transport, self.world.clock)

    def step(self) -> None:
        self.transport.progress()
        while (arrival := self.transport.probe()) is not None:
            self.pulls.receiver.arrived(arrival)
        self.pulls.step()
        self.user.offloader.step()

    def compute(self, number: int, after: int) -> None:
        """Computes and saves the first entries of a sequence, and the state after them."""
        keys = SEQUENCES[number][:after]
        write(self.user, keys, BLOCKS)
        assert self.user.cache.state is not None
        self.user.cache.state.view[:, :, 1] = value_of(keys[-1])
        saved = self.user.begin_save(keys, BLOCKS, EntryState(keys[-1], 1))
        self.world.run_until(saved.done)

    def load(self, number: int, after: int) -> bool:
        """Loads what is kept of entries and their state, and checks it. Returns whether all of it was there."""
        keys, cache = SEQUENCES[number][:after], self.user.cache
        assert cache.state is not None
        for part in cache.parts:
            part.view.zero_()
        loaded = self.user.begin_load(keys, BLOCKS, 1e9, 1e9, EntryState(keys[-1], 2))
        self.world.run_until(loaded.done)
        for key in keys[: loaded.result()]:
            for block in BLOCKS[key.number * EACH : (key.number + 1) * EACH]:
                assert bool((cache.view[:, :, block] == value_of(key)).all())
        is_whole = loaded.result() == after + 1
        if is_whole:
            assert bool((cache.state.view[:, :, 2] == value_of(keys[-1])).all())
        return is_whole

    def harm(self, rng: random.Random) -> None:
        """Flips a bit of some entry or piece, or loses it."""
        places = [place for place in self.world.tiers._host._places.values() if place.is_written and not place.users]
        if not places:
            return
        place = rng.choice(places)
        if rng.random() < 0.5:
            place.tensor[rng.randrange(100)] ^= 1
        else:
            self.world.forget_host((place.key,))


@pytest.mark.parametrize("seed", range(12))
def test_a_state_comes_whole_or_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    owner, reader = Side(places=rng.choice([14, 40])), Side(places=rng.choice([20, 60]))
    owner.transport.connect(LINK, _listening(owner, reader))
    whole = 0
    for pull in range(ACTIONS):
        number, after = rng.randrange(len(SEQUENCES)), rng.randint(1, 4)
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.5:
                owner.compute(number, after)
            else:
                rng.choice((owner, reader)).harm(rng)
        job = PullJob(pull, SEQUENCES[number][rng.randrange(after) : after], SEQUENCES[number][after - 1])
        begun, served, ended = Future[int](), Future[int](), Future[int]()
        reader.pulls.receiver.begin(job, (EntryLink(LINK),), begun)
        sent = 0
        if begun.result() == len(job):
            owner.pulls.sender.serve(EntryLink(LINK), job, served)
            while not served.done():
                if rng.random() < 0.05:
                    owner.harm(rng)
                rng.choice((owner, reader)).step()
            sent = served.result()
        reader.pulls.receiver.end(pull, sent, 60.0, ended)
        while not ended.done():
            rng.choice((owner, reader)).step()
        assert 0 <= ended.result() <= len(job)
        whole += reader.load(number, after)
    assert whole > 0
    for side in (owner, reader):
        side.transport.disconnect(LINK)
        for _ in range(20):
            side.step()
        assert not side.pulls.receiver.pulls
        assert not side.pulls.sender.serving
        side.world.check_nothing_is_left()


def _listening(owner: Side, reader: Side) -> bytes:
    """Connects the reader's end of the link. Returns its address."""
    ours, theirs = owner.transport.listen(LINK), reader.transport.listen(LINK)
    reader.transport.connect(LINK, ours)
    return theirs
