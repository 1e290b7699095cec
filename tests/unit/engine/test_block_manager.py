"""Blocks: reference counts, prefix reuse, and which free block is taken first."""

import pytest

from baton.core import block_keys
from baton.core.block_keys import KeyChain
from baton.engine.request import int_array
from baton.engine.scheduling.block_manager import BlockManager

BLOCK_SIZE = 4


def chain(*, identity: str = "model", cache_salt: str = "") -> KeyChain:
    return KeyChain(identity=identity, cache_salt=cache_salt, block_size=BLOCK_SIZE)


def cache(blocks: BlockManager, tokens: list[int], keys: KeyChain) -> list[int]:
    """Holds, registers and gives back the full blocks of `tokens`."""
    held = blocks.take((), len(tokens) // BLOCK_SIZE)
    for index, block_id in enumerate(held):
        blocks.register(block_id, keys.key(index, int_array(tokens)))
    blocks.give_back(held)
    return held


def test_a_prefix_is_found_block_by_block_up_to_the_first_difference() -> None:
    blocks = BlockManager(8)
    held = cache(blocks, list(range(12)), chain())
    other = int_array([*range(8), 99, 9, 10, 11])
    assert blocks.match(chain(), other, 3) == held[:2]
    assert blocks.match(chain(), int_array(list(range(12))), 3) == held
    assert blocks.match(chain(), int_array(list(range(12))), 1) == held[:1]


def test_a_cached_prefix_is_found_without_hashing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, tokens = BlockManager(8), list(range(12))
    held, other = cache(blocks, tokens, chain()), chain()
    monkeypatch.setattr(block_keys, "_digest", None)
    assert blocks.match(other, int_array([*tokens[:8], 99, 9, 10, 11]), 3) == held[:2]


def test_a_block_that_left_the_cache_is_not_found_by_its_tokens() -> None:
    blocks, tokens = BlockManager(3), int_array(list(range(12)))
    held = cache(blocks, list(tokens), chain())
    known = chain()
    assert blocks.match(known, tokens, 3) == held
    blocks.forget(held[1:2])
    assert blocks.match(chain(), tokens, 3) == blocks.match(known, tokens, 3) == held[:1]


def test_equal_tokens_after_another_parent_are_another_block() -> None:
    blocks = BlockManager(8)
    cache(blocks, [1, 1, 1, 1, 7, 7, 7, 7], chain())
    assert blocks.match(chain(), int_array([7, 7, 7, 7]), 1) == []


@pytest.mark.parametrize(
    "keys", [chain(identity="another"), chain(cache_salt="mine"), chain(identity="", cache_salt="model")]
)
def test_another_model_or_salt_shares_nothing(keys: KeyChain) -> None:
    blocks = BlockManager(8)
    cache(blocks, list(range(8)), chain())
    assert blocks.match(keys, int_array(list(range(8))), 2) == []


def test_a_digest_that_two_contents_share_is_not_a_hit() -> None:
    blocks = BlockManager(8)
    keys = chain()
    tokens = int_array([1, 2, 3, 4])
    (held,) = blocks.take((), 1)
    blocks.register(held, keys.key(0, tokens)._replace(tokens=int_array([5, 6, 7, 8]).tobytes()))
    assert blocks.match(keys, tokens, 1) == []


def test_a_block_is_free_again_when_its_last_holder_gives_it_back() -> None:
    blocks = BlockManager(4)
    keys = chain()
    held = blocks.take((), 1)
    blocks.register(held[0], keys.key(0, int_array([1, 2, 3, 4])))
    again = blocks.take(held, 1)
    assert (blocks._references[held[0]], blocks.num_free) == (2, 2)
    blocks.give_back(held)
    assert blocks.num_free == 2
    blocks.give_back(again)
    assert blocks.num_free == 4


def test_blocks_without_content_are_taken_first_then_the_least_recently_used() -> None:
    blocks = BlockManager(5)
    old = cache(blocks, [1] * 8, chain())
    new = cache(blocks, [2] * 8, chain())
    taken = blocks.take((), 3)
    assert set(taken[:1]).isdisjoint(old + new)
    # The last block of the older sequence is taken before its first one.
    assert taken[1:] == [old[1], old[0]]
    assert blocks.match(chain(), int_array([2] * 8), 2) == new


def test_a_hit_makes_a_block_recently_used() -> None:
    blocks = BlockManager(2)
    (first,) = cache(blocks, [1] * 4, chain())
    (second,) = cache(blocks, [2] * 4, chain())
    blocks.give_back(blocks.take([first], 0))
    assert blocks.take((), 1) == [second]


def test_a_block_that_is_taken_for_new_content_is_no_hit_any_more() -> None:
    blocks = BlockManager(1)
    cache(blocks, [1] * 4, chain())
    blocks.take((), 1)
    assert blocks.match(chain(), int_array([1] * 4), 1) == []


def test_the_first_block_of_a_key_keeps_it() -> None:
    blocks = BlockManager(4)
    keys = chain()
    first, second = blocks.take((), 2)
    for block_id in (first, second):
        blocks.register(block_id, keys.key(0, int_array([1] * 4)))
    blocks.give_back([second])
    assert blocks.match(chain(), int_array([1] * 4), 1) == [first]
    assert blocks.take((), 1) == [second]


def test_num_free_without_does_not_count_cached_blocks_that_are_about_to_be_held() -> None:
    blocks = BlockManager(3)
    held = cache(blocks, [1] * 8, chain())
    assert blocks.num_free_without(held) == 1
    blocks.take(held, 0)
    assert blocks.num_free_without(held) == 1


@pytest.mark.parametrize(("window_blocks", "found"), [(0, 6), (1, 6), (2, 6), (3, 0), (6, 0)])
def test_blocks_that_lack_windows_serve_only_requests_that_do_not_read_them(window_blocks: int, found: int) -> None:
    blocks = BlockManager(8)
    tokens, keys = int_array(list(range(24))), chain()
    held = blocks.take((), 6)
    for index, block_id in enumerate(held):
        blocks.register(block_id, keys.key(index, tokens), windowless=index < 4)
    assert blocks.match(keys, tokens, 6, window_blocks=window_blocks) == held[:found]
    assert blocks.match(keys, tokens, 5, window_blocks=window_blocks) == held[: 5 if window_blocks < 2 else 0]


def test_blocks_are_lacking_unless_they_serve_every_sequence() -> None:
    blocks = BlockManager(8)
    tokens, keys = int_array(list(range(24))), chain()
    digests = [key.digest for key in keys.run(0, 6, tokens)]
    for index, block_id in enumerate(blocks.take((), 4)):
        blocks.register(block_id, keys.key(index, tokens))
    assert blocks.lacking(digests) == digests[4:]
    (windowless,) = blocks.take((), 1)
    blocks.register(windowless, keys.key(4, tokens), windowless=True)
    assert blocks.lacking(digests) == digests[4:]
    assert [digest for digest in digests if blocks.cached_key(digest) is None] == digests[4:]


def test_a_shorter_run_that_reads_no_lacking_block_is_found() -> None:
    blocks = BlockManager(8)
    tokens, keys = int_array(list(range(24))), chain()
    held = blocks.take((), 6)
    for index, block_id in enumerate(held):
        blocks.register(block_id, keys.key(index, tokens), windowless=index == 4)
    assert blocks.match(keys, tokens, 6, window_blocks=2) == held[:4]
    assert blocks.match(keys, tokens, 6, window_blocks=1) == held


def test_a_whole_block_takes_the_place_of_one_that_lacks_windows_and_not_the_other_way_round() -> None:
    blocks = BlockManager(8)
    tokens, keys = int_array([1, 2, 3, 4]), chain()
    lacking, whole, late = blocks.take((), 3)
    blocks.register(lacking, keys.key(0, tokens), windowless=True)
    assert blocks.match(keys, tokens, 1, window_blocks=1) == []
    blocks.register(whole, keys.key(0, tokens))
    blocks.register(late, keys.key(0, tokens), windowless=True)
    assert blocks.match(keys, tokens, 1, window_blocks=1) == [whole]
    blocks.give_back([lacking, whole, late])
    assert blocks.match(keys, tokens, 1, window_blocks=1) == [whole]
