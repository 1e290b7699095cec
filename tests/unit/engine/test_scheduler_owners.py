"""Which rank owns a request, where each rank has a pool of blocks: attention data parallelism."""

import pytest

from baton.core.errors import Overloaded
from baton.engine.batch import Batch
from tests.unit.engine.scheduling import BLOCK_SIZE, finish, make, request


def owners_of(batch: Batch | None) -> dict[str, int]:
    assert batch is not None
    return {row.request_id: row.owner for row in batch.rows}


def test_requests_go_to_the_pool_with_most_room() -> None:
    scheduler = make(owners=2, tokens=64)
    for name, length in (("a", 20), ("b", 4), ("c", 4), ("d", 4)):
        scheduler.submit(request(name, length), 0.0)
    assert owners_of(scheduler.schedule(0.0)) == {"a": 0, "b": 1, "c": 1, "d": 1}


def test_a_request_fits_into_one_pool_or_waits() -> None:
    """Free blocks of two pools do not add up."""
    scheduler = make(owners=2, num_blocks=4)
    assert scheduler.max_context_tokens == 4 * BLOCK_SIZE
    for name in "ab":
        scheduler.reservations.reserve(request(name, 3 * BLOCK_SIZE - 2), 0.0)
    assert scheduler.load().blocks_free == 2
    with pytest.raises(Overloaded, match="no room for the request's blocks"):
        scheduler.reservations.reserve(request("c", BLOCK_SIZE), 0.0)
    scheduler.reservations.reserve(request("d", 2), 0.0)


def test_a_reservation_and_a_chunk_name_their_owner_where_there_are_several() -> None:
    for owners, expected in ((1, [None, None]), (2, [0, 1])):
        scheduler = make(owners=owners)
        assert [scheduler.reservations.reserve(request(name, 4), 0.0).owner for name in "ab"] == expected
        scheduler.submit(request("c", 4), 0.0)
        batch = scheduler.schedule(0.0)
        assert batch is not None
        (chunk,) = finish(scheduler, batch).chunks
        assert chunk.owner == expected[0]


def test_a_request_goes_where_its_prefix_is() -> None:
    scheduler = make(owners=2, num_blocks=32, tokens=64)
    conversations = {"a": range(24), "b": range(100, 124)}
    for name, prompt in conversations.items():
        scheduler.submit(request(name, tuple(prompt)), 0.0)
    batch = scheduler.schedule(0.0)
    first = owners_of(batch)
    assert sorted(first.values()) == [0, 1]
    assert batch is not None
    finish(scheduler, batch)
    for name in conversations:
        scheduler.abort(name)
    for name, prompt in conversations.items():
        reserved = scheduler.reservations.reserve(request(f"{name}2", (*prompt, 1, 2)), 0.0)
        assert (reserved.owner, reserved.cached_tokens) == (first[name], 24)


def test_a_short_prefix_that_all_requests_share_does_not_bring_them_to_one_rank() -> None:
    scheduler = make(owners=2, num_blocks=64, tokens=256)
    shared = tuple(range(2 * BLOCK_SIZE))
    owners = []
    for name in "abcdef":
        scheduler.submit(request(name, (*shared, *[ord(name)] * 24)), 0.0)
        batch = scheduler.schedule(0.0)
        owners.append(owners_of(batch)[name])
        assert batch is not None
        finish(scheduler, batch)
    assert sorted(owners) == [0, 0, 0, 1, 1, 1]
    assert scheduler.load().cache_hits == 4 * len(shared)


def test_a_decode_without_a_block_preempts_one_of_its_own_rank() -> None:
    scheduler = make(owners=2, num_blocks=4, tokens=64, prefix_cache=False)
    for name, length in (("a", 7), ("b", 3), ("c", 3), ("d", 3)):
        scheduler.submit(request(name, length), 0.0)
    owners: dict[str, int] = {}
    while not scheduler.load().preemptions:
        batch = scheduler.schedule(0.0)
        owners |= owners_of(batch)
        assert batch is not None
        finish(scheduler, batch)
    last = {owner: max(name for name in owners if owners[name] == owner) for owner in (0, 1)}
    waiting = [state.request_id for state in scheduler._roster.waiting]
    assert waiting
    assert set(waiting) <= set(last.values())


def test_the_prefix_cache_of_a_node_is_that_of_all_its_ranks() -> None:
    scheduler = make(owners=2, num_blocks=64, tokens=64)
    followed = scheduler.prefix_cache
    followed.follow()
    for name in "ab":
        scheduler.submit(request(name, tuple(range(8))), 0.0)
    batch = scheduler.schedule(0.0)
    assert sorted(owners_of(batch).values()) == [0, 1]
    assert batch is not None
    finish(scheduler, batch)
    changes = followed.take_changes()
    assert changes is not None
    assert len(changes) == len(followed.cached_keys()) == 2
    first = scheduler._blocks._pools[0]
    first.forget(range(64))
    assert followed.take_changes() == changes, "the other rank has them still"
    scheduler._blocks._pools[1].forget(range(64))
    assert followed.take_changes() == dict.fromkeys(changes)
    assert followed.cached_keys() == []
