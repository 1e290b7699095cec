"""Events of prefix caches for routers: also those that look at no tier must end up with what is there."""

from baton.gateway.fleet.cache_union import CacheUnion, UnionChanges
from baton.gateway.grpc.kv_events import _to_events
from tests.unit.gateway.test_cache_union import ROOT, message


def seen_without_tiers(known: set[int], changes: UnionChanges) -> None:
    for event in _to_events(changes, 2):
        known |= {block.block_hash for block in event.stored.blocks}
        known -= set(event.removed.block_hashes)


def test_a_block_that_moves_is_there_for_subscribers_that_look_at_no_tier() -> None:
    union, known = CacheUnion(ROOT, 2), set[int]()
    seen_without_tiers(known, union.take("a", message((ROOT, 1, 2, 3), snapshot=True)))
    assert known == {1, 2, 3}
    seen_without_tiers(known, union.take("a", message((ROOT, 1, 2, 3), outside=[1, 2, 3])))
    assert known == {1, 2, 3}
    seen_without_tiers(known, union.take("a", message((ROOT, 1, 2), removed=[3])))
    assert known == {1, 2}
