"""What followers of a cache see of the stores outside of it: blocks in host memory, and blocks below it."""

from array import array
from collections.abc import Iterator

import pytest

from baton.core.block_keys import KeyChain
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.engine.scheduling import kept_blocks
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.entry_plans import entries_of
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.prefixes import PooledPrefixes

TOKENS = array("i", range(100, 100 + 6 * ENTRY_TOKENS))


def entries(salt: str = "") -> tuple[EntryKey, ...]:
    chain = KeyChain(identity="m", cache_salt=salt, block_size=ENTRY_TOKENS)
    return entries_of(chain, TOKENS, 0, len(TOKENS) // ENTRY_TOKENS)


def block_chain(block_size: int, salt: str = "") -> KeyChain:
    return KeyChain(identity="m", cache_salt=salt, block_size=block_size)


def take(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


@pytest.mark.parametrize("block_size", [16, 48, 64, 80, 128, 512])
def test_entries_that_a_store_had_at_its_start_are_the_blocks_that_were_saved(block_size: int) -> None:
    saved, found = KeptBlocks(block_size), KeptBlocks(block_size)
    for salt in ("", "a tenant"):
        saved.kept(entries(salt), block_chain(block_size, salt), TOKENS)
    take(found.found(sorted((*entries(), *entries("a tenant")), key=lambda key: key.number)))
    assert set(found.cached_keys()) == set(saved.cached_keys())
    assert found._by_entry == saved._by_entry
    digests = [key.digest for key in found.cached_keys()]
    assert found.only_below(digests) == digests
    assert saved.only_below(digests) == []


def test_entries_without_the_beginning_of_their_sequence_are_not_seen() -> None:
    found = KeptBlocks(16)
    keys = entries()
    take(found.found((*keys[1:3], keys[0], keys[4])))
    assert [found.has(key) for key in keys] == [True, False, False, False, False, False]


def test_a_block_to_which_a_file_gave_a_second_name_is_seen_until_its_last_name_is_lost() -> None:
    kept = KeptBlocks(16)
    (first,) = entries()[:1]
    second = first._replace(block=first.block._replace(digest=b"another"))
    take(kept.found((first, second)))
    block = kept.cached_keys()[0]
    kept.follow()
    kept.lost([first.block.digest])
    assert kept.cached_key(block.digest) == block
    kept.lost([b"another"])
    assert kept.cached_key(block.digest) is None
    changes = kept.take_changes()
    assert changes is not None
    assert set(changes.values()) == {None}
    assert len(changes) == ENTRY_TOKENS // 16


def test_what_is_known_already_stays_where_it_is() -> None:
    kept = KeptBlocks(16)
    kept.kept(entries()[:2], block_chain(16), TOKENS)
    take(kept.found(entries()[:3]))
    firsts = [kept._by_entry[key.block.digest][0].digest for key in entries()[:3]]
    assert kept.only_below(firsts) == firsts[2:]


def test_keys_of_entries_are_known_while_the_stores_have_them_if_they_were_computed_here() -> None:
    kept, keys = KeptBlocks(16), entries()
    kept.kept(keys[:3], block_chain(16), TOKENS)
    take(kept.found(keys[:5]))
    chain = KeyChain(identity="m", cache_salt="", block_size=ENTRY_TOKENS)
    chain.add_known(TOKENS, 6, kept.entry_keys)
    assert chain.known_keys(6) == [key.block for key in keys[:3]]
    kept.lost([keys[1].block.digest])
    fewer = KeyChain(identity="m", cache_salt="", block_size=ENTRY_TOKENS)
    fewer.add_known(TOKENS, 6, kept.entry_keys)
    assert fewer.known_keys(6) == [keys[0].block]
    assert kept.blocks_of_lost(keys[1])
    kept.lost_roots(frozenset({keys[0].root}))
    assert not kept.entry_keys
    assert not any(kept.blocks_of_lost(key) for key in keys), "nothing of a dropped tenant is left"


def test_followers_see_again_what_moves_and_what_is_lost() -> None:
    kept = KeptBlocks(16)
    cache = PooledPrefixes((), kept)
    cache.follow()
    keys = entries()[:2]
    kept.kept(keys, block_chain(16), TOKENS)
    (first, second), seen = (key.block.digest for key in keys), cache.take_changes()
    assert seen is not None
    assert len(seen) == 8
    kept.below([second, b"of nobody"])
    moved = cache.take_changes()
    assert moved is not None
    assert set(moved) == {key.digest for key in kept._by_entry[second]}
    assert cache.outside(moved) == cache.only_below(moved) == list(moved)
    kept.below([second])
    assert cache.take_changes() == {}
    kept.kept(keys, block_chain(16), TOKENS)  # loaded into host memory again
    again = cache.take_changes()
    assert again is not None
    assert set(again) == set(moved)
    assert cache.only_below(moved) == []
    kept.below([second])
    kept.lost([first, second])
    gone = cache.take_changes()
    assert gone is not None
    assert set(gone.values()) == {None}
    assert not kept._below
    assert not kept._ends


def test_only_so_many_blocks_below_host_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "_BELOW_MAX", 3)
    kept = KeptBlocks(16)
    take(kept.found(entries()))
    assert [kept.has(key) for key in entries()] == [False, False, False, True, True, True]
    kept.kept(entries()[:3], block_chain(16), TOKENS)
    assert all(kept.has(key) for key in entries())


def test_what_is_lost_while_found_entries_are_added_is_not_added() -> None:
    kept, keys = KeptBlocks(16), entries()
    steps = kept.found(keys)
    for _ in range(3):
        next(steps)
    kept.lost([keys[1].block.digest, keys[4].block.digest])
    take(steps)
    assert [kept.has(key) for key in keys] == [True, False, True, True, False, False]
    assert kept._lost_since == []


def test_what_is_lost_or_dropped_before_found_entries_are_added_is_not_added() -> None:
    kept, mine, theirs = KeptBlocks(16), entries(), entries("a tenant")
    dropped: set[bytes] = set()
    steps = kept.found(key for key in (*mine, *theirs) if key.root not in dropped)
    kept.lost([mine[1].block.digest])
    for _ in (*mine, theirs[0]):
        next(steps)
    dropped.add(theirs[0].root)
    kept.lost_roots(frozenset(dropped))
    take(steps)
    assert [kept.has(key) for key in mine] == [True, False, False, False, False, False]
    assert not any(map(kept.has, theirs))
    assert kept._lost_since == []


def test_followers_see_no_change_from_a_save_whose_blocks_are_in_the_cache() -> None:
    pool, kept, chain = BlockManager(64), KeptBlocks(16), block_chain(16)
    cache = PooledPrefixes((pool,), kept)
    cache.follow()
    blocks = pool.take((), 4)
    for index, block_id in enumerate(blocks):
        pool.register(block_id, chain.key(index, TOKENS), reported=index < 3)
    digests = [chain.key(index, TOKENS).digest for index in range(4)]
    assert set(cache.take_changes() or {}) == set(digests[:3])
    kept.kept(entries()[:1], chain, TOKENS)
    assert set(cache.take_changes() or {}) == {digests[3]}  # the one that they have not seen
    pool.give_back(blocks)
    pool.take((), 64)
    assert set(cache.take_changes() or {}) == set(digests)  # now they must be loaded first
    assert cache.outside(digests) == digests
    kept.lost(key.block.digest for key in entries()[:1])
    assert cache.take_changes() == dict.fromkeys(digests)
