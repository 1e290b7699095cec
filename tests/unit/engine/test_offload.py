"""Which entries the scheduler offers to the stores outside of its cache, and which blocks it holds for copies."""

from array import array
from contextlib import suppress
from random import Random

import pytest

from baton.core.block_keys import KeyChain
from baton.core.errors import InternalError, Overloaded
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, KeepTime
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.request import EngineRequest
from baton.engine.scheduling import entry_saves
from baton.engine.scheduling.entry_plans import LoadPlan, entries_of
from baton.engine.scheduling.offload import Offload
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.state import RequestState
from tests.unit.engine.scheduling import BLOCK_SIZE, finish, launch, make, request, step

BLOCKS_PER_ENTRY = ENTRY_TOKENS // BLOCK_SIZE
PROMPT = tuple(range(100, 100 + 2 * ENTRY_TOKENS + 10))


def tiered(*, num_blocks: int = 256, owners: int = 1, window: int = 0) -> Scheduler:
    return make(num_blocks=num_blocks, tokens=256, context=1000, owners=owners, window=window, offloads=True)


def offload(scheduler: Scheduler) -> Offload:
    assert scheduler.offload is not None
    return scheduler.offload


def offer_at_once(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_saves, "_ENTRIES_AT_ONCE", entries)
    monkeypatch.setattr(entry_saves, "_AT_ONCE_SHARE", 1.0)


def decode_all(scheduler: Scheduler, name: str, prompt: tuple[int, ...] = PROMPT, *, tokens: int = 1) -> None:
    """Runs one request to its end."""
    scheduler.submit(request(name, prompt, sampling=ResolvedSampling(max_tokens=tokens, temperature=0.0)), 0.0)
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)


def save_all(scheduler: Scheduler) -> list[EntryBlocks]:
    """Takes what was offered as saved."""
    finished = offload(scheduler).saves.take_finished()
    for entries in finished:
        offload(scheduler).saves.saved(entries, len(entries))
    return finished


def plan_for(scheduler: Scheduler, wanted_by: EngineRequest, *, found: int, pool: int = 0) -> LoadPlan | None:
    wanted = scheduler.wanted(wanted_by)
    assert wanted is not None
    return scheduler.begin_load(wanted, pool, stop=wanted.starts[pool] + found)


def free_blocks(scheduler: Scheduler) -> int:
    return scheduler.load().blocks_free


def test_each_entry_is_offered_once_when_its_last_token_is_computed() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a")
    (entries,) = offload(scheduler).saves.take_finished()
    assert [key.number for key in entries.keys] == [0, 1]
    assert entries.token_stop == 2 * ENTRY_TOKENS
    assert len(entries.block_ids) == 2 * BLOCKS_PER_ENTRY
    assert offload(scheduler).saves.take_finished() == []


def test_keys_are_those_of_a_chain_of_entries_so_block_sizes_do_not_matter() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a")
    (entries,) = offload(scheduler).saves.take_finished()
    chain = KeyChain(identity="m", cache_salt="", block_size=ENTRY_TOKENS)
    assert [key.block for key in entries.keys] == [chain.key(index, array("i", PROMPT)) for index in (0, 1)]
    assert {key.root for key in entries.keys} == {chain.root}


def test_decoded_tokens_are_offered_too() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a", PROMPT[: ENTRY_TOKENS - 3], tokens=5)
    (entries,) = offload(scheduler).saves.take_finished()
    assert [key.number for key in entries.keys] == [0]


def test_what_came_from_the_cache_is_not_offered_again() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a")
    save_all(scheduler)
    decode_all(scheduler, "b", PROMPT + tuple(range(ENTRY_TOKENS)))
    (entries,) = save_all(scheduler)
    assert [key.number for key in entries.keys] == [2]


def test_offered_blocks_stay_held_until_they_are_saved() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a")
    (entries,) = offload(scheduler).saves.take_finished()
    assert free_blocks(scheduler) == 256 - 2 * BLOCKS_PER_ENTRY
    assert scheduler.leaked_blocks(lambda _: True) == 0
    offload(scheduler).saves.saved(entries, 2)
    assert free_blocks(scheduler) == 256
    assert scheduler.leaked_blocks(lambda _: True) == 0


def test_saves_hold_at_most_a_share_of_the_blocks() -> None:
    scheduler = tiered(num_blocks=3 * BLOCKS_PER_ENTRY)
    decode_all(scheduler, "a")
    (entries,) = offload(scheduler).saves.take_finished()
    assert [key.number for key in entries.keys] == [0]
    assert offload(scheduler).saves.skipped == 1
    assert free_blocks(scheduler) == 2 * BLOCKS_PER_ENTRY


def test_blocks_whose_windows_are_missing_are_not_offered() -> None:
    scheduler = tiered(window=8)
    reserved = request("a", PROMPT)
    scheduler.reservations.reserve(reserved, 0.0)
    scheduler.reservations.admit("a", TokenOutput(5, 0))
    assert offload(scheduler).saves.take_finished() == []


def test_received_tokens_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_at_once(2, monkeypatch)
    scheduler = tiered()
    scheduler.reservations.reserve(request("a", PROMPT), 0.0)
    scheduler.reservations.admit("a", TokenOutput(5, 0))
    (entries,) = offload(scheduler).saves.take_finished()
    assert [key.number for key in entries.keys] == [0, 1]


def test_a_running_request_offers_many_entries_at_a_time_and_the_rest_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer_at_once(3, monkeypatch)
    scheduler = tiered()
    prompt = tuple(range(100, 100 + 4 * ENTRY_TOKENS - 2))
    scheduler.submit(request("a", prompt, sampling=ResolvedSampling(max_tokens=4, temperature=0.0)), 0.0)
    step(scheduler)
    assert [len(entries.keys) for entries in offload(scheduler).saves.take_finished()] == [3]
    while scheduler.load().requests_running:
        assert offload(scheduler).saves.take_finished() == []
        step(scheduler)
    (rest,) = offload(scheduler).saves.take_finished()
    assert [key.number for key in rest.keys] == [3]


def test_a_preempted_request_offers_nothing_because_its_blocks_are_needed_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer_at_once(3, monkeypatch)
    scheduler = tiered(num_blocks=2 * BLOCKS_PER_ENTRY + 3)
    scheduler.submit(request("a", PROMPT[: ENTRY_TOKENS + 1]), 0.0)
    scheduler.submit(request("b", PROMPT[-ENTRY_TOKENS - 1 :]), 0.0)
    while not scheduler.load().preemptions:
        step(scheduler)
    assert offload(scheduler).saves.take_finished() == []
    assert offload(scheduler).num_held == 0


@pytest.mark.parametrize("window", [0, 8])
def test_a_preempted_request_offers_what_the_cache_still_has_when_it_goes_on(window: int) -> None:
    """Otherwise the entries after them would be saved without them, and be of no use."""
    scheduler = tiered(num_blocks=4 * BLOCKS_PER_ENTRY + 3, window=window)
    for name, start in (("a", 100), ("b", 500)):
        prompt = tuple(range(start, start + ENTRY_TOKENS + 1))
        sampling = ResolvedSampling(max_tokens=2 * ENTRY_TOKENS, temperature=0.0)
        scheduler.submit(request(name, prompt, sampling=sampling), 0.0)
    saved: list[EntryKey] = []
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
        saved += [key for entries in save_all(scheduler) for key in entries.keys]
    assert scheduler.load().preemptions
    assert sorted(key.number for key in saved)[:4] == [0, 0, 1, 1]


@pytest.mark.parametrize("window", [0, 8])
def test_what_had_no_room_to_be_saved_is_offered_by_the_next_request_with_it(window: int) -> None:
    scheduler = tiered(num_blocks=6 * BLOCKS_PER_ENTRY, window=window)
    long = tuple(range(100, 100 + 4 * ENTRY_TOKENS + 1))
    decode_all(scheduler, "a", long)
    assert [key.number for entries in save_all(scheduler) for key in entries.keys] == [0, 1]
    assert offload(scheduler).saves.skipped == 2
    decode_all(scheduler, "b", long)
    assert [key.number for entries in save_all(scheduler) for key in entries.keys] == [2, 3]
    decode_all(scheduler, "c", long)
    assert save_all(scheduler) == []


def test_a_running_request_offers_later_what_has_no_room_now(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_at_once(2, monkeypatch)
    scheduler = tiered(num_blocks=6 * BLOCKS_PER_ENTRY)
    prompt = tuple(range(100, 100 + 4 * ENTRY_TOKENS))
    scheduler.submit(request("a", prompt, sampling=ResolvedSampling(max_tokens=9, temperature=0.0)), 0.0)
    saved: list[int] = []
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
        saved += [key.number for entries in save_all(scheduler) for key in entries.keys]
    assert saved == [0, 1, 2, 3]
    assert offload(scheduler).saves.skipped == 0


def test_a_request_that_follows_a_preempted_one_offers_no_block_that_came_without_its_windows() -> None:
    """The first entries were received without the KV that no later token reads, so a save of them would lack layers."""
    scheduler = tiered(window=8)
    scheduler.reservations.reserve(request("a", PROMPT, sampling=ResolvedSampling(max_tokens=70, temperature=0.0)), 0.0)
    scheduler.reservations.admit("a", TokenOutput(5, 0))
    state = scheduler._requests.roster.find("a")
    assert state is not None
    while scheduler.load().requests_running:
        step(scheduler)
    assert [key.number for entries in save_all(scheduler) for key in entries.keys] == [2]
    offload(scheduler).saves._remember(state, 0, 3)  # as a preemption does
    decode_all(scheduler, "b", (*state.tokens, *range(70)))
    assert [key.number for entries in save_all(scheduler) for key in entries.keys] == [2, 3]


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_saved_sequences_have_no_gap(seed: int, window: int) -> None:
    random = Random(seed)
    scheduler = tiered(num_blocks=random.choice((150, 250)), owners=random.choice((1, 2)), window=window)
    texts = [tuple(random.choices(range(900), k=ENTRY_TOKENS * random.randint(1, 4))) for _ in range(3)]
    saved: set[bytes] = set()
    live: dict[str, RequestState] = {}
    ended: list[RequestState] = []
    saving: list[EntryBlocks] = []

    def arrive() -> None:
        before = random.choice([*texts, *(tuple(state.tokens) for state in ended[-3:])])[:350]
        prompt = before + tuple(random.choices(range(900), k=random.randint(1, 90)))
        sampling = ResolvedSampling(max_tokens=random.randint(1, 150), temperature=0.0)
        arrived = request(f"{len(ended)}-{len(live)}-{random.random()}", prompt, sampling=sampling)
        with suppress(Overloaded):
            scheduler.submit(arrived, 0.0)
            live[arrived.request_id] = scheduler._requests.roster.find(arrived.request_id)  # type: ignore[assignment]

    def compute() -> None:
        batch = scheduler.schedule(0.0) if live else None
        if batch is not None:
            finish(scheduler, batch, random.randrange(900))
        over = [name for name in live if scheduler._requests.roster.find(name) is None]
        ended.extend(live.pop(name) for name in over)

    def save() -> None:
        saving.extend(offload(scheduler).saves.take_finished())
        if saving:
            entries = saving.pop(random.randrange(len(saving)))
            saved.update(key.block.digest for key in entries.keys)
            offload(scheduler).saves.saved(entries, len(entries))

    def leave() -> None:
        if live:
            name = random.choice(list(live))
            live.pop(name)
            scheduler.abort(name)

    for _ in range(400):
        random.choices((arrive, compute, save, leave), (2, 12, 3, 0.4))[0]()
    for name in live:
        scheduler.abort(name)
    saving += offload(scheduler).saves.take_finished()
    while saving:
        save()
    for state in ended:
        chain = offload(scheduler).entry_keys(state.request)
        keys = entries_of(chain, state.tokens, 0, state.num_tokens // ENTRY_TOKENS)
        found = [key.block.digest in saved for key in keys]
        assert found == sorted(found, reverse=True)
    assert scheduler.leaked_blocks(lambda _: True) == offload(scheduler).num_held == 0
    assert free_blocks(scheduler) == scheduler.load().blocks_total


def test_nothing_is_wanted_where_the_cache_has_it() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a")
    assert scheduler.wanted(request("b", PROMPT)) is None
    assert scheduler.wanted(request("b", PROMPT[: ENTRY_TOKENS - 1])) is None


def test_the_last_token_is_never_wanted() -> None:
    wanted = tiered().wanted(request("b", PROMPT[: 2 * ENTRY_TOKENS]))
    assert wanted is not None
    assert (wanted.starts, wanted.stop) == ((0,), 1)


def test_prompt_logprobs_need_every_token_computed() -> None:
    scored = ResolvedSampling(max_tokens=5, temperature=0.0, prompt_logprobs=1)
    assert tiered().wanted(request("b", PROMPT, sampling=scored)) is None


def test_nothing_is_wanted_for_tokens_that_no_vocabulary_has() -> None:
    assert tiered().wanted(request("b", (*PROMPT, 1 << 31))) is None


def test_a_request_finds_what_was_loaded_in_the_cache() -> None:
    scheduler = tiered()
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    assert [key.number for key in plan.entries.keys] == [0, 1]
    assert free_blocks(scheduler) == 256 - 2 * BLOCKS_PER_ENTRY
    assert offload(scheduler).loads.end(plan, 2) == 2 * ENTRY_TOKENS
    assert free_blocks(scheduler) == 256
    scheduler.submit(request("a", PROMPT), 0.0)
    computed, events = step(scheduler)
    assert computed == {"a": len(PROMPT) - 2 * ENTRY_TOKENS}
    assert events.started[0].cached_tokens == 2 * ENTRY_TOKENS


def test_what_was_loaded_is_not_offered_again() -> None:
    scheduler = tiered()
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    offload(scheduler).loads.end(plan, 2)
    decode_all(scheduler, "a")
    assert offload(scheduler).saves.take_finished() == []


def test_only_the_entries_that_arrived_are_cached() -> None:
    scheduler = tiered()
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    assert offload(scheduler).loads.end(plan, 1) == ENTRY_TOKENS
    scheduler.submit(request("a", PROMPT), 0.0)
    computed, _ = step(scheduler)
    assert computed == {"a": len(PROMPT) - ENTRY_TOKENS}


def test_a_load_that_failed_leaves_nothing() -> None:
    scheduler = tiered()
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    assert offload(scheduler).loads.end(plan, 0) == 0
    assert free_blocks(scheduler) == 256
    scheduler.submit(request("a", PROMPT), 0.0)
    computed, _ = step(scheduler)
    assert computed == {"a": len(PROMPT)}


def test_a_load_continues_what_is_cached_and_holds_it() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a", PROMPT[: ENTRY_TOKENS + 1])
    save_all(scheduler)
    plan = plan_for(scheduler, request("b", PROMPT), found=1)
    assert plan is not None
    assert [key.number for key in plan.entries.keys] == [1]
    assert len(plan.cached) == BLOCKS_PER_ENTRY
    assert free_blocks(scheduler) == 256 - 2 * BLOCKS_PER_ENTRY
    assert offload(scheduler).loads.end(plan, 1) == ENTRY_TOKENS


def test_the_eviction_of_one_rank_does_not_hide_what_another_has_saved() -> None:
    scheduler = tiered(owners=2)
    decode_all(scheduler, "a")
    save_all(scheduler)
    for pool in range(2):
        offload(scheduler).saves._pools[pool].forget(range(256))
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    offload(scheduler).kept.lost(key.block.digest for key in wanted.entries(0, 2))
    assert offload(scheduler).may_have(wanted)


def test_a_load_takes_no_more_than_is_free() -> None:
    scheduler = tiered(num_blocks=BLOCKS_PER_ENTRY + 3)
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    assert len(plan.entries.keys) == 1
    offload(scheduler).loads.end(plan, 1)
    assert plan_for(tiered(num_blocks=BLOCKS_PER_ENTRY - 1), request("a", PROMPT), found=2) is None


def test_what_was_found_is_useless_when_the_cache_has_lost_what_comes_before() -> None:
    scheduler = tiered(num_blocks=4 * BLOCKS_PER_ENTRY)
    decode_all(scheduler, "a", PROMPT[: ENTRY_TOKENS + 1])
    save_all(scheduler)
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    assert wanted.starts == (1,)
    decode_all(scheduler, "other", tuple(range(500, 500 + 4 * ENTRY_TOKENS - 4)))
    assert scheduler.begin_load(wanted, 0, stop=2) is None


def test_each_rank_loads_into_its_own_pool() -> None:
    scheduler = tiered(owners=2)
    plan = plan_for(scheduler, request("a", PROMPT), found=2, pool=1)
    assert plan is not None
    assert plan.entries.owner == 1
    offload(scheduler).loads.end(plan, 2)
    wanted = scheduler.wanted(request("a", PROMPT))
    assert wanted is not None
    assert wanted.starts == (0, 2)


def test_entries_of_logits_that_are_not_finite_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = tiered()
    scheduler.submit(request("a", PROMPT), 0.0)
    launch(scheduler)
    scheduler.complete([InternalError("its logits are not finite")], 0.0)
    assert [key.number for key in offload(scheduler).saves.take_forgotten()] == []
    offer_at_once(3, monkeypatch)
    scheduler.submit(request("b", PROMPT), 0.0)
    step(scheduler)
    launch(scheduler)
    scheduler.complete([InternalError("its logits are not finite")], 0.0)
    assert offload(scheduler).saves.take_finished() == []  # nor does the end of the request offer them
    offer_at_once(2, monkeypatch)
    scheduler.submit(request("c", PROMPT), 0.0)
    step(scheduler)
    save_all(scheduler)
    launch(scheduler)
    scheduler.complete([InternalError("its logits are not finite")], 0.0)
    assert [key.number for key in offload(scheduler).saves.take_forgotten()] == [0, 1]
    assert offload(scheduler).saves.take_forgotten() == ()


def test_a_request_that_ends_has_its_whole_sequence_kept() -> None:
    scheduler, keep = tiered(), KeepTime(300.0, 7)
    decode_all(scheduler, "a")
    save_all(scheduler)
    assert offload(scheduler).saves.take_kept() == []
    longer = ResolvedSampling(max_tokens=ENTRY_TOKENS, temperature=0.0)
    scheduler.submit(request("b", PROMPT, sampling=longer, keep=keep), 0.0)
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
    ((keys, wanted),) = offload(scheduler).saves.take_kept()
    assert [key.number for key in keys] == [0, 1, 2], "also those that came from the cache, and decoded ones"
    assert wanted == keep
    assert offload(scheduler).saves.take_kept() == []


def test_an_aborted_request_has_kept_what_was_computed() -> None:
    scheduler = tiered()
    scheduler.submit(request("a", PROMPT, keep=KeepTime(0.0, 7)), 0.0)
    step(scheduler)
    scheduler.abort("a")
    assert [key.number for keys, _ in offload(scheduler).saves.take_kept() for key in keys] == [0, 1]


# ---- what followers of the cache see


def seen(scheduler: Scheduler) -> set[bytes]:
    return {key.digest for key in scheduler.prefix_cache.cached_keys()}


def test_a_block_that_the_cache_lost_is_seen_while_a_store_has_it() -> None:
    scheduler = tiered(num_blocks=3 * BLOCKS_PER_ENTRY + 20)
    decode_all(scheduler, "a", PROMPT[: ENTRY_TOKENS + 2])
    save_all(scheduler)
    before = seen(scheduler)
    assert len(before) == BLOCKS_PER_ENTRY
    decode_all(scheduler, "other", tuple(range(500, 500 + 3 * ENTRY_TOKENS + 78)))
    assert before <= seen(scheduler)
    offload(scheduler).kept.lost([key.block.digest for key in entries_at(PROMPT[:ENTRY_TOKENS])])
    assert not before & seen(scheduler)


def test_followers_get_the_changes_of_stores_and_cache_together() -> None:
    scheduler = tiered(num_blocks=3 * BLOCKS_PER_ENTRY + 20)
    cache = scheduler.prefix_cache
    cache.follow()
    decode_all(scheduler, "a", PROMPT[: ENTRY_TOKENS + 2])
    save_all(scheduler)
    changes = cache.take_changes()
    assert changes is not None
    assert set(changes) == seen(scheduler)
    assert cache.outside(changes) == []
    first = set(changes)
    decode_all(scheduler, "other", tuple(range(500, 500 + 3 * ENTRY_TOKENS + 78)))
    changes = cache.take_changes()
    assert changes is not None
    assert None not in changes.values()
    assert set(cache.outside(changes)) == first, "they must be loaded now"
    (key,) = entries_at(PROMPT[:ENTRY_TOKENS])
    offload(scheduler).kept.lost([key.block.digest])
    changes = cache.take_changes()
    assert changes is not None
    assert len(changes) == BLOCKS_PER_ENTRY
    assert set(changes.values()) == {None}


def test_what_could_not_be_saved_is_seen_only_while_the_cache_has_it() -> None:
    scheduler = tiered(num_blocks=3 * BLOCKS_PER_ENTRY + 20)
    decode_all(scheduler, "a", PROMPT[: ENTRY_TOKENS + 2])
    (entries,) = offload(scheduler).saves.take_finished()
    offload(scheduler).saves.saved(entries, 0)
    assert len(seen(scheduler)) == BLOCKS_PER_ENTRY
    decode_all(scheduler, "other", tuple(range(500, 500 + 3 * ENTRY_TOKENS + 78)))
    assert not {key.digest for key in scheduler.prefix_cache.cached_keys() if key.tokens[:4] == b"d\0\0\0"}


def entries_at(prompt: tuple[int, ...]) -> tuple[EntryKey, ...]:
    chain = KeyChain(identity="m", cache_salt="", block_size=ENTRY_TOKENS)
    return entries_of(chain, array("i", prompt), 0, len(prompt) // ENTRY_TOKENS)


def test_what_went_through_a_store_without_staying_is_seen_only_while_the_cache_has_it() -> None:
    scheduler = tiered(num_blocks=3 * BLOCKS_PER_ENTRY + 20)
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    offload(scheduler).kept.lost(key.block.digest for key in plan.entries.keys)
    offload(scheduler).loads.end(plan, 2)
    assert offload(scheduler).kept.cached_keys() == []
    assert len(seen(scheduler)) == 2 * BLOCKS_PER_ENTRY


def test_entries_that_did_not_arrive_are_not_seen() -> None:
    scheduler = tiered()
    plan = plan_for(scheduler, request("a", PROMPT), found=2)
    assert plan is not None
    offload(scheduler).loads.end(plan, 1)
    assert len(offload(scheduler).kept.cached_keys()) == BLOCKS_PER_ENTRY


# ---- entries that the stores have lost, and the cache has still


def lose_all(scheduler: Scheduler, saved: list[EntryBlocks]) -> None:
    offload(scheduler).kept.lost(key.block.digest for entries in saved for key in entries.keys)


def test_entries_that_the_stores_have_lost_are_saved_again_from_the_cache() -> None:
    scheduler = tiered()
    decode_all(scheduler, "a")
    (saved,) = save_all(scheduler)
    saves, kept = offload(scheduler).saves, offload(scheduler).kept
    assert saves.begin_again(saved.keys, 0) is None, "the stores have them"
    assert saves.num_to_save_again(saved.keys, 0) == saves.num_to_save_again((), 0) == 0
    kept.lost([saved.keys[1].block.digest])
    assert saves.num_to_save_again(saved.keys[1:], 0) == len(saved.keys) - 1
    assert saves.begin_again(saved.keys, 0) is None, "the first is not lost"
    assert saves.num_to_save_again(saved.keys, 0) == 0
    again = saves.begin_again(saved.keys[1:], 0)
    assert again is not None
    assert again.keys == saved.keys[1:]
    assert again.block_ids[BLOCKS_PER_ENTRY:] == saved.block_ids[BLOCKS_PER_ENTRY:]
    assert free_blocks(scheduler) == 256 - BLOCKS_PER_ENTRY
    saves.saved(again, 1)
    assert free_blocks(scheduler) == 256
    assert kept.has(saved.keys[1])
    assert saves.begin_again(saved.keys, 0) is None
    lose_all(scheduler, [saved])
    failed = saves.begin_again(saved.keys, 0)
    assert failed is not None
    saves.saved(failed, 0)
    assert not any(map(kept.has, saved.keys))


def test_what_the_cache_has_lost_or_another_key_names_is_not_saved_again() -> None:
    scheduler = tiered(num_blocks=8 * BLOCKS_PER_ENTRY)
    decode_all(scheduler, "a")
    saved = save_all(scheduler)
    lose_all(scheduler, saved)
    (first, second) = (key for entries in saved for key in entries.keys)
    forged = first._replace(block=first.block._replace(tokens=second.block.tokens))
    for wrong in (forged, first._replace(number=1), first._replace(root=second.block.digest)):
        assert offload(scheduler).saves.begin_again((wrong,), 0) is None
    blocks = offload(scheduler).saves._pools[0]
    blocks.forget([saved[0].block_ids[0]])
    assert offload(scheduler).saves.begin_again((first, second), 0) is None, (
        "without the first, the second is of no use"
    )
    again = offload(scheduler).saves.begin_again((second,), 0)
    assert again is not None
    offload(scheduler).saves.saved(again, 0)
    decode_all(scheduler, "b", tuple(range(7 * ENTRY_TOKENS)))
    save_all(scheduler)
    assert offload(scheduler).saves.begin_again((second,), 0) is None


def test_what_is_saved_again_holds_at_most_a_share_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = tiered(num_blocks=12 * BLOCKS_PER_ENTRY)
    decode_all(scheduler, "a", tuple(range(5 * ENTRY_TOKENS + 1)))
    saved = save_all(scheduler)
    keys = tuple(key for entries in saved for key in entries.keys)
    assert len(keys) == 5
    lose_all(scheduler, saved)
    monkeypatch.setattr(entry_saves, "_SAVING_SHARE", 1 / 4)
    again = offload(scheduler).saves.begin_again(keys, 0)
    assert again is not None
    assert again.keys == keys[:3]


def test_each_rank_saves_again_what_its_own_cache_has() -> None:
    scheduler = tiered(owners=2)
    kept, saves, loads = offload(scheduler).kept, offload(scheduler).saves, offload(scheduler).loads
    keys: tuple[EntryKey, ...] = ()
    for pool, found in enumerate((1, 2)):
        plan = plan_for(scheduler, request("a", PROMPT), found=found, pool=pool)
        assert plan is not None
        keys = plan.entries.keys
        loads.end(plan, found)
    kept.lost(key.block.digest for key in keys)
    assert [saves.num_to_save_again(keys, pool) for pool in range(2)] == [1, 2]
    again = saves.begin_again(keys, 1)
    assert again is not None
    assert (again.keys, again.owner) == (keys, 1)
