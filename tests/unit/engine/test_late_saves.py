"""Entries that are saved only when their blocks will soon be taken, and only where that pays."""

from random import Random

import pytest

from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, KeepTime
from baton.core.sampling import ResolvedSampling
from baton.engine.request import int_array
from baton.engine.scheduling import entry_saves, late_saves
from baton.engine.scheduling.entry_plans import entries_of
from baton.engine.scheduling.offload import Offload
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import BLOCK_SIZE, make, request, step

BLOCKS_PER_ENTRY = ENTRY_TOKENS // BLOCK_SIZE
NUM_BLOCKS = 1024
# The longest sequence that waits, and the tokens of the blocks that are taken next.
SHORT, OLDEST = NUM_BLOCKS * BLOCK_SIZE // 8, NUM_BLOCKS * BLOCK_SIZE // 4

ENTRIES = (SHORT - 8) // ENTRY_TOKENS  # of `prompt_of`


@pytest.fixture(autouse=True)
def _small_pools_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_saves, "_POOL_TOKENS_MIN", 0)


def late(*, num_blocks: int = NUM_BLOCKS, owners: int = 1) -> Scheduler:
    return make(num_blocks=num_blocks, tokens=1024, context=4000, owners=owners, offloads=True, saves_all=False)


def offload(scheduler: Scheduler) -> Offload:
    assert scheduler.offload is not None
    return scheduler.offload


def prompt_of(number: int, tokens: int = SHORT - 8) -> tuple[int, ...]:
    """No other number's prompt begins with the same tokens."""
    return (number, *range(1, tokens))


def serve(scheduler: Scheduler, prompt: tuple[int, ...], *, keep: KeepTime | None = None) -> None:
    """Runs a request that draws one token."""
    sampling = ResolvedSampling(max_tokens=1, temperature=0.0)
    scheduler.submit(request("a", prompt, sampling=sampling, keep=keep), 0.0)
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)


def save_all(scheduler: Scheduler) -> list[EntryBlocks]:
    """Saves what is offered now."""
    finished = offload(scheduler).saves.take_finished()
    for entries in finished:
        offload(scheduler).saves.saved(entries, len(entries))
    return finished


def numbers(saves: list[EntryBlocks]) -> list[int]:
    return sorted(key.number for entries in saves for key in entries.keys)


def fill(scheduler: Scheduler, tokens: int, *, first: int = 100) -> list[EntryBlocks]:
    """Serves other prompts of so many tokens in all. Returns what is saved meanwhile."""
    saves = []
    for number in range(first, first + -(-tokens // (SHORT - 8))):
        serve(scheduler, prompt_of(number))
        saves += save_all(scheduler)
    return saves


def test_a_short_sequence_is_saved_when_its_blocks_will_soon_be_taken_the_end_included() -> None:
    scheduler = late()
    serve(scheduler, prompt_of(0))
    assert save_all(scheduler) == []
    assert fill(scheduler, NUM_BLOCKS * BLOCK_SIZE - OLDEST - 2 * SHORT) == []
    saves = fill(scheduler, 2 * SHORT, first=200)
    mine = [
        entries
        for entries in saves
        if entries.keys[0].block.tokens[:4] == int_array([0]).tobytes() or entries.keys[0].number
    ]
    assert set(range(ENTRIES)) <= set(numbers(mine))
    assert scheduler.load().blocks_free == NUM_BLOCKS


def test_each_entry_is_offered_with_its_blocks() -> None:
    scheduler = late()
    serve(scheduler, prompt_of(0))
    pool = scheduler._requests.blocks._pools[0]
    content = {key.digest: block_id for block_id, key in enumerate(pool._keys) if key is not None}
    chain = offload(scheduler).entry_keys(request("a", prompt_of(0)))
    blocks = scheduler._requests.blocks.search.keys(request("a", prompt_of(0)))
    saves = fill(scheduler, NUM_BLOCKS * BLOCK_SIZE)
    tokens, found = int_array(prompt_of(0)), set()
    for entries in saves:
        for key in entries.keys:
            if key.block != chain.key(key.number, tokens):
                continue
            found.add(key.number)
            places = range(key.number * BLOCKS_PER_ENTRY, (key.number + 1) * BLOCKS_PER_ENTRY)
            assert [entries.block_ids[place] for place in places] == [
                content[blocks.key(place, tokens).digest] for place in places
            ]
    assert found == set(range(ENTRIES))


def test_saved_blocks_are_taken_as_soon_as_if_they_had_not_been_saved() -> None:
    def order(*, pays: bool) -> list[bytes]:
        scheduler = late()
        if not pays:
            credit = offload(scheduler).saves.credit
            assert credit is not None
            credit.saved(credit.tokens)
        fill(scheduler, NUM_BLOCKS * BLOCK_SIZE + OLDEST)
        pool = scheduler._requests.blocks._pools[0]
        keys = (pool._keys[block_id] for block_id in (*pool._oldest, *pool._free))
        return [key.digest for key in keys if key is not None]

    saved, not_saved = order(pays=True), order(pays=False)
    # Those of a call are given back together, but none leaves the oldest ones.
    oldest = OLDEST // BLOCK_SIZE
    assert set(saved[oldest:]) <= set(not_saved)
    assert set(not_saved[oldest:]) <= set(saved)
    places = {digest: place for place, digest in enumerate(not_saved)}
    assert max(abs(place - places[digest]) for place, digest in enumerate(saved) if digest in places) <= oldest


def test_a_long_sequence_and_one_that_is_to_be_kept_are_offered_at_once() -> None:
    scheduler = late()
    serve(scheduler, prompt_of(0, SHORT + ENTRY_TOKENS))
    assert numbers(save_all(scheduler)) == list(range(ENTRIES + 2))
    serve(scheduler, prompt_of(1), keep=KeepTime(60.0, 1))
    assert numbers(save_all(scheduler)) == list(range(ENTRIES))


def test_a_conversation_that_has_become_long_is_offered_from_its_beginning() -> None:
    scheduler = late()
    serve(scheduler, prompt_of(0))
    serve(scheduler, prompt_of(0, SHORT + ENTRY_TOKENS))
    assert numbers(save_all(scheduler)) == list(range(ENTRIES + 2))


def test_nothing_is_offered_when_it_does_not_pay_until_a_lost_prompt_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry_saves, "_CREDIT_MIN", 0)
    scheduler = late()
    everything = NUM_BLOCKS * BLOCK_SIZE
    saves = fill(scheduler, 5 * everything)
    saved = sum(len(entries) for entries in saves) * ENTRY_TOKENS
    assert everything <= saved <= everything + OLDEST  # once what the cache holds
    serve(scheduler, prompt_of(1, SHORT + ENTRY_TOKENS))
    assert save_all(scheduler) == []
    fill(scheduler, everything, first=500)
    serve(scheduler, prompt_of(1, SHORT + 2 * ENTRY_TOKENS))  # lost by the cache
    assert numbers(save_all(scheduler)) == list(range(ENTRIES + 3))


def test_what_a_client_asks_to_keep_is_saved_though_nothing_else_is() -> None:
    scheduler = late()
    credit = offload(scheduler).saves.credit
    assert credit is not None
    credit.saved(credit.tokens)
    serve(scheduler, prompt_of(0), keep=KeepTime(60.0, 1))
    assert numbers(save_all(scheduler)) == list(range(ENTRIES))
    assert credit.tokens == 0


def test_what_waits_is_not_saved_after_its_root_is_dropped() -> None:
    scheduler = late()
    serve(scheduler, prompt_of(0))
    root = offload(scheduler).entry_keys(request("a", prompt_of(0))).root
    scheduler.drop_roots(frozenset({root}))
    fill(scheduler, 0)
    saves = save_all(scheduler)
    for number in range(40):
        serve(scheduler, (500 + number, *range(1, SHORT - 8)))
        saves += save_all(scheduler)
    first = int_array([0]).tobytes()
    assert not [key for entries in saves for key in entries.keys if key.block.tokens[:4] == first]


def test_another_node_gets_what_waits() -> None:
    scheduler = late()
    serve(scheduler, prompt_of(0))
    chain, tokens = offload(scheduler).entry_keys(request("a", prompt_of(0))), int_array(prompt_of(0))
    wanted = entries_of(chain, tokens, 0, ENTRIES)
    assert offload(scheduler).saves.num_to_save_again(wanted, 0) == ENTRIES
    entries = offload(scheduler).saves.begin_again(wanted, 0)
    assert entries is not None
    offload(scheduler).saves.saved(entries, ENTRIES)
    assert offload(scheduler).kept.has(wanted[-1])


@pytest.mark.parametrize("owners", [1, 2])
def test_with_room_in_the_stores_no_entry_is_lost(owners: int) -> None:
    scheduler, source = late(owners=owners), Random(0)
    served: list[tuple[int, ...]] = []
    for number in range(250):
        if served and source.random() < 0.4:
            prompt = source.choice(served[-40:]) + (number,) * source.randrange(1, 60)
        else:
            prompt = prompt_of(number, source.randrange(10, SHORT))
        prompt = prompt[: SHORT + 3 * ENTRY_TOKENS]
        serve(scheduler, prompt)
        served.append(prompt)
        save_all(scheduler)
    saves, kept = offload(scheduler).saves, offload(scheduler).kept
    assert saves.skipped == 0
    pools = scheduler._requests.blocks._pools
    for prompt in served:
        tokens, asked = int_array(prompt), request("a", prompt)
        chain, blocks = offload(scheduler).entry_keys(asked), scheduler._requests.blocks.search.keys(asked)
        for index in range(len(prompt) // ENTRY_TOKENS):
            keys = blocks.run(index * BLOCKS_PER_ENTRY, (index + 1) * BLOCKS_PER_ENTRY, tokens)
            is_cached = any(pool.cached_blocks(keys) for pool in pools)
            (entry,) = entries_of(chain, tokens, index, index + 1)
            assert is_cached or kept.has(entry), (number, index)
    assert scheduler.load().blocks_free == scheduler.load().blocks_total
    assert scheduler.leaked_blocks(lambda _: True) == 0


def test_nothing_waits_in_a_small_pool_or_where_a_block_is_longer_than_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = late()._requests.blocks._pools
    assert late_saves.LateSaves.suits(pools, block_size=BLOCK_SIZE)
    assert not late_saves.LateSaves.suits(pools, block_size=128)
    monkeypatch.undo()
    assert not late_saves.LateSaves.suits(pools, block_size=BLOCK_SIZE)


def test_a_conversation_that_began_when_saving_did_not_pay_is_saved_from_its_beginning_when_it_does() -> None:
    scheduler = late()
    credit = offload(scheduler).saves.credit
    assert credit is not None
    credit.saved(credit.tokens)
    serve(scheduler, prompt_of(0, SHORT - ENTRY_TOKENS))
    credit.returned(1 << 20)
    serve(scheduler, prompt_of(0, SHORT - 8))
    chain = offload(scheduler).entry_keys(request("a", prompt_of(0)))
    fill(scheduler, NUM_BLOCKS * BLOCK_SIZE)
    kept = offload(scheduler).kept
    assert all(map(kept.has, entries_of(chain, int_array(prompt_of(0)), 0, ENTRIES)))
