"""The caches of several nodes, reported as the cache of one engine."""

import random

from baton.gateway.fleet.cache_union import CacheUnion, Tier, UnionChanges
from baton.protos.internal.v1 import node_pb2

ROOT, SALTED = 1000, 2000


def tokens(block: int) -> bytes:
    return bytes([block] * 8)


def message(*chains: tuple[int, ...], **fields: object) -> node_pb2.WatchCacheResponse:
    """Chains of blocks, each after its parent, which comes first."""
    batch = node_pb2.WatchCacheResponse(**fields)  # type: ignore[arg-type]
    pairs = [pair for chain in chains for pair in zip(chain[1:], chain, strict=False)]
    batch.stored.extend(block for block, _ in pairs)
    batch.parents.extend(parent for _, parent in pairs)
    batch.tokens = b"".join(tokens(block) for block, _ in pairs)
    return batch


class Subscriber:
    """Applies changes, and checks that parents come first and that nothing is stored twice in a tier."""

    def __init__(self) -> None:
        self.union = CacheUnion(ROOT, 2)
        self.places: set[tuple[Tier, int]] = set()

    @property
    def has(self) -> set[int]:
        return {block for _, block in self.places}

    def take(self, node: str, batch: node_pb2.WatchCacheResponse, *, below: Tier = Tier.DISK) -> UnionChanges:
        changes = self.union.take(node, batch, below=below)
        for run in changes.stored:
            assert run.parent is None or run.parent in self.has
            for block, content in run.blocks:
                assert content == tokens(block)
                assert (run.tier, block) not in self.places
                self.places.add((run.tier, block))
        self.drop(changes.removed)
        return changes

    def drop(self, removed: list[tuple[Tier, int]]) -> None:
        assert set(removed) <= self.places
        self.places -= set(removed)


def device(*blocks: int) -> list[tuple[Tier, int]]:
    return [(Tier.DEVICE, block) for block in blocks]


def test_a_block_is_there_from_its_first_node_to_its_last() -> None:
    subscriber = Subscriber()
    (run,) = subscriber.take("a", message((ROOT, 1, 2, 3), snapshot=True)).stored
    assert (run.tier, run.parent, [block for block, _ in run.blocks]) == (Tier.DEVICE, None, [1, 2, 3])
    (run,) = subscriber.take("b", message((ROOT, 1, 2, 4), snapshot=True)).stored
    assert (run.parent, [block for block, _ in run.blocks]) == (2, [4])
    assert subscriber.take("a", message(removed=[3, 2])).removed == device(3)
    assert subscriber.take("b", message(removed=[4, 2])).removed == device(4, 2)
    subscriber.drop(subscriber.union.forget("a"))
    assert subscriber.has == {1}


def test_a_block_that_moves_is_stored_in_its_new_tier_and_removed_from_the_old_one() -> None:
    subscriber = Subscriber()
    subscriber.take("a", message((ROOT, 1, 2, 3), snapshot=True))
    changes = subscriber.take("a", message((1, 2, 3), outside=[2, 3], below=[3]))
    assert [(run.tier, run.parent, [block for block, _ in run.blocks]) for run in changes.stored] == [
        (Tier.HOST, 1, [2]),
        (Tier.DISK, 2, [3]),
    ]
    assert changes.removed == device(2, 3)
    changes = subscriber.take("a", message((1, 2)))
    assert (subscriber.places, changes.removed) == ({*device(1, 2), (Tier.DISK, 3)}, [(Tier.HOST, 2)])
    assert subscriber.take("a", message((1, 2))) == UnionChanges([], [])


def test_each_tier_has_a_block_from_its_first_node_to_its_last() -> None:
    subscriber = Subscriber()
    subscriber.take("a", message((ROOT, 1), snapshot=True))
    subscriber.take("b", message((ROOT, 1), snapshot=True, outside=[1]))
    subscriber.take("c", message((ROOT, 1), snapshot=True, outside=[1], below=[1]), below=Tier.EXTERNAL)
    assert subscriber.places == {(Tier.DEVICE, 1), (Tier.HOST, 1), (Tier.EXTERNAL, 1)}
    assert subscriber.take("a", message((ROOT, 1), outside=[1])) == UnionChanges([], device(1))
    assert subscriber.take("b", message(removed=[1])) == UnionChanges([], [])
    assert subscriber.union.forget("a") == [(Tier.HOST, 1)]
    assert subscriber.union.forget("c") == [(Tier.EXTERNAL, 1)]


def test_a_block_that_moves_after_its_parent_was_lost_is_removed() -> None:
    subscriber = Subscriber()
    subscriber.take("a", message((ROOT, 1, 2, 3), snapshot=True))
    subscriber.take("a", message(removed=[1]))
    assert subscriber.take("a", message((1, 2, 3), outside=[2, 3])) == UnionChanges([], device(2, 3))
    subscriber.take("a", message((ROOT, 1, 2, 3), outside=[1, 2, 3]))
    assert subscriber.places == {(Tier.HOST, 1), (Tier.HOST, 2), (Tier.HOST, 3)}


def test_parents_come_first_whatever_the_order_of_a_snapshot() -> None:
    pairs = [(ROOT, 1), (1, 2), (2, 3), (1, 4), (4, 5), (ROOT, 6)]
    for seed in range(20):
        random.Random(seed).shuffle(pairs)
        subscriber = Subscriber()
        assert subscriber.take("a", message(*pairs[:3], snapshot=True, more=True)) == UnionChanges([], [])
        subscriber.take("a", message(*pairs[3:]))
        assert subscriber.has == {1, 2, 3, 4, 5, 6}


def test_blocks_with_a_salt_or_without_their_parents_are_not_reported() -> None:
    subscriber = Subscriber()
    subscriber.take("a", message((SALTED, 1, 2), (7, 8), (ROOT, 3), snapshot=True))
    assert subscriber.has == {3}
    assert subscriber.take("a", message(removed=[1, 8])) == UnionChanges([], [])


def test_a_new_snapshot_replaces_what_the_node_had() -> None:
    subscriber = Subscriber()
    subscriber.take("a", message((ROOT, 1, 2), snapshot=True))
    changes = subscriber.take("a", message((ROOT, 1, 3), snapshot=True))
    assert changes.removed == device(2)
    assert subscriber.has == {1, 3}
