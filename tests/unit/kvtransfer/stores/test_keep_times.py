"""Entries that are kept for a time: they leave last, and no client can fill a store with them."""

from random import Random

import pytest

from baton.core.kv_entries import KeepTime
from kvtransfer.stores.eviction import GreedyDual
from kvtransfer.stores.keep_times import ALL_SHARE, TENANT_SHARE

CAPACITY = 40
SHARE = int(CAPACITY * TENANT_SHARE)
US, THEM = 1, 2


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Full:
    """A store of CAPACITY entries, in which others leave for each one that comes."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.clock = Clock()
        self.order = GreedyDual(capacity, clock=self.clock)
        self.capacity = capacity
        self._others = 0

    def save(self, *names: bytes, cost: float = 1.0) -> tuple[bytes, ...]:
        """Adds the entries of a sequence that are not there, as a node does it."""
        for parent, name in zip((b"root", *names), names, strict=False):
            if name in self.order:
                continue
            self.order.add(name, cost, parent)
            self.order.pin(name)
            if len(self.order) > self.capacity:
                assert self.order.evict() is not None
            self.order.unpin(name)
        return names

    def flood(self, entries: int) -> None:
        """As many entries of others, each used once."""
        for _ in range(entries):
            self._others += 1
            self.save(b"other-%d" % self._others, cost=100.0)

    def left(self, names: tuple[bytes, ...]) -> int:
        return sum(name in self.order for name in names)

    def keep(self, names: tuple[bytes, ...], seconds: float, tenant: int = US) -> int:
        return self.order.keep(names, KeepTime(seconds, tenant))


def names_of(prefix: str, count: int) -> tuple[bytes, ...]:
    return tuple(f"{prefix}-{number}".encode() for number in range(count))


def test_kept_entries_leave_after_all_others_until_their_time_is_over() -> None:
    store = Full()
    ours = store.save(*names_of("a", SHARE))
    assert store.keep(ours, 300.0) == SHARE
    store.flood(10 * CAPACITY)
    assert store.left(ours) == SHARE
    store.clock.now_s += 300.0
    store.flood(10 * CAPACITY)
    assert store.left(ours) == 0


def test_each_use_keeps_anew_and_a_shorter_time_takes_nothing_away() -> None:
    store = Full()
    ours = store.save(*names_of("a", 3))
    store.keep(ours, 300.0)
    store.clock.now_s += 299.0
    store.keep(ours, 300.0)
    store.keep(ours, 1.0)
    store.clock.now_s += 299.0
    store.flood(10 * CAPACITY)
    assert store.left(ours) == 3


def test_of_kept_entries_only_the_end_leaves_when_nothing_else_is_left() -> None:
    store = Full(8)
    ours, theirs = store.save(*names_of("a", 2)), store.save(*names_of("b", 2))
    store.keep(ours, 300.0)
    store.keep(theirs, 300.0, THEM)
    assert [store.order.evict() for _ in range(4)] == [ours[1], ours[0], theirs[1], theirs[0]]


def test_a_tenant_keeps_no_more_than_its_share_and_the_beginning_counts() -> None:
    store = Full()
    ours = store.save(*names_of("a", CAPACITY))
    assert store.keep(ours, 1e4) == SHARE
    store.flood(10 * CAPACITY)
    assert [name in store.order for name in ours] == [True] * SHARE + [False] * (CAPACITY - SHARE)


def test_a_tenant_gets_its_room_back_when_its_time_is_over() -> None:
    store = Full()
    before, after = store.save(*names_of("a", SHARE)), store.save(*names_of("b", SHARE))
    assert store.keep(before, 300.0) == SHARE
    assert store.keep(after, 300.0) == 0
    store.clock.now_s += 300.0
    assert store.keep(after, 300.0) == SHARE


def test_a_tenant_gets_its_room_back_when_its_entries_are_dropped() -> None:
    store = Full()
    before, after = store.save(*names_of("a", SHARE)), store.save(*names_of("b", SHARE))
    store.keep(before, 300.0)
    for name in reversed(before):
        store.order.remove(name)
    assert store.keep(after, 300.0) == SHARE
    store.clock.now_s += 300.0
    assert store.keep(after, 300.0) == SHARE


def test_all_tenants_together_keep_no_more_than_half() -> None:
    store = Full()
    kept = [store.keep(store.save(*names_of(f"t{tenant}", 5)), 1e4, tenant) for tenant in range(8)]
    assert sum(kept) == int(CAPACITY * ALL_SHARE)


def test_a_sequence_is_kept_up_to_the_first_entry_that_is_not_there() -> None:
    store = Full()
    ours = store.save(*names_of("a", 4))
    assert store.keep((*ours[:2], b"missing", *ours[2:]), 300.0) == 2


def test_an_entry_is_kept_no_longer_than_those_before_it() -> None:
    store = Full()
    ours = store.save(*names_of("a", 4))
    store.keep(ours[:2], 100.0)
    store.keep(ours, 1000.0, THEM)  # takes the first two over
    store.keep(ours[:2], 50.0)
    store.clock.now_s += 999.0
    store.flood(10 * CAPACITY)
    assert store.left(ours) == 4
    store.clock.now_s += 1.0
    store.flood(10 * CAPACITY)
    assert store.left(ours) == 0


def test_a_session_that_is_over_leaves_before_all_others() -> None:
    store = Full()
    ours = store.save(*names_of("a", 5), cost=1e6)
    store.keep(ours, 300.0)
    theirs = store.save(*names_of("b", 5))
    store.order.end(ours, US)
    assert [store.order.evict() for _ in range(6)] == [*reversed(ours), theirs[-1]]


def test_what_is_used_after_the_end_of_its_session_is_worth_something_again() -> None:
    store = Full()
    ours, theirs = store.save(*names_of("a", 1), cost=9.0), store.save(*names_of("b", 1))
    store.order.end(ours, US)
    store.order.touch(ours[0])
    assert store.order.evict() == theirs[0]


def test_the_end_of_a_session_takes_nothing_from_others() -> None:
    store = Full()
    shared = names_of("system", 2)
    ours, theirs, kept = (store.save(*shared, *names_of(name, 2)) for name in "abc")
    store.keep(kept, 300.0, THEM)
    store.order.end(ours, US)
    store.order.end(kept, US)
    assert [store.order.evict() for _ in range(2)] == [ours[3], ours[2]]
    assert store.left(shared) == 2
    store.flood(10 * CAPACITY)
    assert store.left(kept) == 4
    assert store.left(theirs[2:]) == 0


def test_a_prefix_of_what_is_kept_cannot_be_ended_alone() -> None:
    """Else its room would be free again, while the rest still keeps it."""
    store = Full()
    ours = store.save(*names_of("a", SHARE))
    store.keep(ours, 300.0)
    store.order.end(ours[:-1], US)
    assert store.keep(store.save(*names_of("b", 1)), 300.0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_hostile_client_that_keeps_everything_it_can_leaves_the_rest_to_others(seed: int) -> None:
    """It saves, keeps, extends, ends and branches as it likes, and nothing of it stays beyond its share."""
    store, random = Full(), Random(seed)
    known: list[tuple[bytes, ...]] = [()]
    for number in range(400):
        base = random.choice(known)
        sequence = (*base[: random.randint(0, len(base))], *names_of(f"h{number}", random.randint(1, 6)))
        match random.randrange(6):
            case 0:
                store.order.end(random.choice(known), US)
            case 1:
                chosen = random.choice(known)
                store.order.end(chosen[: random.randint(0, len(chosen))], US)
            case 2:
                store.clock.now_s += random.choice((1.0, 1000.0))
            case _:
                store.save(*sequence)
                store.keep(sequence, random.choice((1.0, 300.0, 86400.0)))
                known.append(sequence)
    store.flood(10 * CAPACITY)
    ours = {name for sequence in known for name in sequence}
    assert store.left(tuple(ours)) <= SHARE
    assert len(store.order) == CAPACITY
