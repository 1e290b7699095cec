"""The prefix cache of a simulated node."""

from baton.planner.prefix_cache import SimulatedPrefixCache


def test_only_leading_ids_count() -> None:
    cache = SimulatedPrefixCache(10)
    cache.use((1, 2, 3))
    assert [cache.count(ids) for ids in ((1, 2, 9), (9, 2, 3), (1, 2, 3, 4), ())] == [2, 0, 3, 0]


def test_the_least_recently_used_prompt_goes_and_its_end_goes_first() -> None:
    cache = SimulatedPrefixCache(5)
    cache.use((1, 2, 3))
    cache.use((7, 8, 9))
    assert len(cache) == 5
    assert (cache.count((1, 2, 3)), cache.count((7, 8, 9))) == (2, 3)


def test_a_prompt_longer_than_the_cache_leaves_its_start() -> None:
    cache = SimulatedPrefixCache(2)
    cache.use((1, 2, 3))
    assert cache.count((1, 2, 3)) == 2
