"""Places of entries in host memory."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.kv_entries import EntryKey
from kvtransfer.stores.host_memory import HostMemory, HostPlace
from tests.unit.kvtransfer.stores.entries import entry_keys, root_of

ENTRY_BYTES = 64


def host_memory(entries: int) -> HostMemory:
    return HostMemory(torch.zeros(entries * ENTRY_BYTES + 5, dtype=torch.uint8), ENTRY_BYTES)


def taken(memory: HostMemory, key: EntryKey, cost: float = 1.0) -> HostPlace:
    place = memory.take(key, cost)
    assert place is not None
    return place


def pinned(memory: HostMemory, key: EntryKey) -> HostPlace:
    place = memory.pin(key)
    assert place is not None
    return place


def fill(memory: HostMemory, *keys: EntryKey) -> None:
    for key in keys:
        memory.commit(taken(memory, key))


def test_an_entry_is_read_as_it_was_written() -> None:
    memory = host_memory(3)
    a, b, c = entry_keys(3)
    for number, key in enumerate((a, b, c)):
        place = taken(memory, key)
        place.tensor.fill_(number + 1)
        memory.commit(place)
    assert [bytes(pinned(memory, key).memory) for key in (a, b, c)] == [bytes([n]) * ENTRY_BYTES for n in (1, 2, 3)]


def test_memory_and_tensor_of_a_place_are_the_same_bytes() -> None:
    place = taken(host_memory(1), entry_keys(1)[0])
    place.memory[:] = bytes(range(ENTRY_BYTES))
    assert place.tensor.tolist() == list(range(ENTRY_BYTES))


def test_find_counts_the_leading_entries_and_only_those() -> None:
    memory = host_memory(4)
    keys = entry_keys(4)
    fill(memory, keys[0], keys[1], keys[3])
    assert [memory.find(keys), memory.find(keys[1:]), memory.find(keys[2:]), memory.find([])] == [2, 1, 0, 0]


def test_an_entry_is_found_only_after_its_commit() -> None:
    memory = host_memory(1)
    (key,) = entry_keys(1)
    place = taken(memory, key)
    assert (memory.find([key]), memory.pin(key), memory.counters.entries) == (0, None, 0)
    memory.commit(place)
    assert (memory.find([key]), memory.counters.entries) == (1, 1)


def test_a_key_with_the_same_digest_and_another_content_finds_nothing() -> None:
    memory = host_memory(2)
    (key,) = entry_keys(1)
    fill(memory, key)
    others = [
        key._replace(block=key.block._replace(tokens=b"other")),
        key._replace(block=key.block._replace(parent=b"other")),
        key._replace(root=root_of("tenant")),
    ]
    for other in others:
        assert (memory.find([other]), memory.pin(other), memory.take(other, 1.0)) == (0, None, None)
        memory.drop([other])
    assert memory.find([key]) == 1


def test_an_entry_gets_one_place() -> None:
    memory = host_memory(3)
    (key,) = entry_keys(1)
    place = taken(memory, key)
    assert memory.take(key, 1.0) is None
    memory.commit(place)
    assert memory.take(key, 1.0) is None


def test_a_full_memory_evicts_the_cheapest_and_counts_it() -> None:
    memory = host_memory(2)
    (dear,), (cheap,), (new,) = (entry_keys(1, first_token=start) for start in (1, 2, 3))
    memory.commit(taken(memory, dear, 5.0))
    memory.commit(taken(memory, cheap, 1.0))
    memory.commit(taken(memory, new, 1.0))
    assert [memory.find([key]) for key in (dear, cheap, new)] == [1, 0, 1]
    assert (memory.counters.evicted, memory.counters.entries, memory.counters.written) == (1, 2, 3)


def test_a_sequence_longer_than_the_memory_keeps_its_beginning() -> None:
    """An entry is of no use without those before it, so it must not take their places."""
    memory = host_memory(3)
    keys = entry_keys(5)
    fill(memory, *keys[:3])
    assert [memory.take(key, 1.0) for key in keys[3:]] == [None, None]
    assert memory.find(keys) == 3


def test_an_entry_is_kept_though_the_one_before_it_is_elsewhere() -> None:
    """It may be in a store below."""
    memory = host_memory(1)
    keys = entry_keys(3)
    fill(memory, keys[0], keys[2])
    assert [memory.find([key]) for key in keys] == [0, 0, 1]


def test_a_sequence_is_kept_again_when_there_is_room_for_it() -> None:
    memory = host_memory(2)
    (other,), keys = entry_keys(1, first_token=9), entry_keys(2)
    fill(memory, other)
    reading = pinned(memory, other)
    fill(memory, keys[0])
    assert memory.take(keys[1], 1.0) is None
    memory.unpin(reading)
    fill(memory, keys[1])
    assert memory.find(keys) == 2


def test_nothing_that_is_in_use_is_evicted() -> None:
    memory = host_memory(2)
    (read,), (written,), (new,) = (entry_keys(1, first_token=start) for start in (1, 2, 3))
    fill(memory, read)
    reading, again = pinned(memory, read), pinned(memory, read)
    writing = taken(memory, written)
    assert memory.take(new, 9.0) is None
    memory.unpin(reading)
    assert memory.take(new, 9.0) is None
    memory.unpin(again)
    assert taken(memory, new).number == again.number
    memory.abandon(writing)


def test_an_abandoned_place_is_free_again() -> None:
    memory = host_memory(1)
    a, b = entry_keys(2)
    memory.abandon(taken(memory, a))
    assert memory.find([a]) == 0
    fill(memory, b)
    assert memory.counters.evicted == 0


def test_a_dropped_entry_is_forgotten_at_once_and_its_place_is_free_after_its_readers() -> None:
    memory = host_memory(1)
    (key,) = entry_keys(1)
    fill(memory, key)
    place = pinned(memory, key)
    memory.drop([key])
    assert (memory.find([key]), memory.pin(key), memory.take(key, 1.0)) == (0, None, None)
    memory.unpin(place)
    fill(memory, key)
    assert memory.find([key]) == 1


def test_an_entry_that_is_dropped_while_it_is_written_is_never_found() -> None:
    memory = host_memory(2)
    committed, abandoned = entry_keys(2)
    places = taken(memory, committed), taken(memory, abandoned)
    memory.drop([committed, abandoned])
    memory.commit(places[0])
    memory.abandon(places[1])
    assert memory.find([committed]) == 0
    assert memory.counters.written == 0
    fill(memory, *entry_keys(2, first_token=9))


def test_an_entry_that_is_saved_again_after_a_drop_is_not_the_old_readers() -> None:
    memory = host_memory(2)
    (key,) = entry_keys(1)
    fill(memory, key)
    old = pinned(memory, key)
    memory.drop([key])
    fill(memory, key)
    memory.unpin(old)
    new = pinned(memory, key)
    assert new.number != old.number
    memory.unpin(new)
    fill(memory, *entry_keys(2, first_token=9))


def test_a_root_is_dropped_with_all_entries_and_no_others() -> None:
    memory = host_memory(6)
    ours, theirs = entry_keys(3, salt="ours"), entry_keys(2, salt="theirs")
    fill(memory, *ours[:2], *theirs)
    writing = taken(memory, ours[2])
    assert memory.drop_roots(frozenset({root_of("ours")})) == 3
    memory.commit(writing)
    assert (memory.find(ours), memory.find(theirs)) == (0, 2)
    assert memory.drop_roots(frozenset({root_of("ours")})) == 0


def test_hits_and_misses_are_counted() -> None:
    memory = host_memory(1)
    a, b = entry_keys(2)
    fill(memory, a)
    memory.unpin(pinned(memory, a))
    memory.pin(b)
    counters = memory.counters
    assert (counters.hits, counters.misses, counters.entries, counters.bytes) == (1, 1, 1, ENTRY_BYTES)


KEYS = [key for start in (1, 2) for salt in ("", "tenant") for key in entry_keys(4, salt=salt, first_token=start)]
PLACES = 5


class MemoryMachine(RuleBasedStateMachine):
    """Any calls that the rules allow, against sets of what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = host_memory(PLACES)
        self.writing: list[HostPlace] = []
        self.reading: list[HostPlace] = []
        self.contents: dict[EntryKey, int] = {}
        self.stamps = 0

    @rule(key=st.sampled_from(KEYS), cost=st.sampled_from([0.0, 1.0, 4.0]))
    def take(self, key: EntryKey, cost: float) -> None:
        place = self.memory.take(key, cost)
        if place is not None:
            assert place.number not in {each.number for each in (*self.writing, *self.reading)}
            self.stamps += 1
            place.tensor.fill_(self.stamps % 251)
            self.writing.append(place)
            self.contents[key] = self.stamps % 251

    @precondition(lambda self: self.writing)
    @rule(commits=st.booleans())
    def finish(self, commits: bool) -> None:
        place = self.writing.pop(0)
        (self.memory.commit if commits else self.memory.abandon)(place)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: EntryKey) -> None:
        place = self.memory.pin(key)
        if place is not None:
            assert set(place.tensor.tolist()) == {self.contents[key]}
            self.reading.append(place)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.memory.unpin(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: EntryKey) -> None:
        self.memory.drop([key])
        assert self.memory.find([key]) == 0

    @rule(salt=st.sampled_from(["", "tenant"]))
    def drop_root(self, salt: str) -> None:
        self.memory.drop_roots(frozenset({root_of(salt)}))
        assert not any(self.memory.find([key]) for key in KEYS if key.root == root_of(salt))

    @invariant()
    def counts_what_is_found(self) -> None:
        assert self.memory.counters.entries == sum(self.memory.find([key]) for key in KEYS) <= PLACES

    def teardown(self) -> None:
        """When nobody uses a place any more, all of them can be taken."""
        for place in self.reading:
            self.memory.unpin(place)
        for place in self.writing:
            self.memory.commit(place)
        for key in entry_keys(PLACES, salt="last"):
            taken(self.memory, key)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=40)
