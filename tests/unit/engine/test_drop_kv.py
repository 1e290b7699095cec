"""A tenant's KV is dropped: no later request finds it, whatever was computed, saved or loaded meanwhile."""

from baton.core.block_keys import KeyChain
from baton.core.sampling import ResolvedSampling
from baton.core.types import AdapterRef, TokenOutput
from baton.engine.request import int_array
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import BLOCK_SIZE, finish, launch, make, request, step
from tests.unit.engine.test_offload import decode_all, offload, plan_for, save_all, seen, tiered

PROMPT = tuple(range(100, 140))
LONG = tuple(range(100, 300))
OURS, THEIRS = "ours", "theirs"
ADAPTER = AdapterRef("tuned", "r1")
ONE_TOKEN = ResolvedSampling(max_tokens=1, temperature=0.0)


def run(scheduler: Scheduler, name: str, prompt: tuple[int, ...], salt: str, adapter: AdapterRef | None = None) -> int:
    """Runs a request to its end. Returns how many tokens of its prompt the cache had."""
    wanted = request(name, prompt, sampling=ONE_TOKEN, cache_salt=salt, adapter=adapter)
    scheduler.submit(wanted, 0.0)
    cached = []
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        cached += [each.cached_tokens for each in step(scheduler)[1].started]
    return cached[0]


def test_only_the_named_salts_blocks_are_dropped() -> None:
    scheduler = make(num_blocks=64, tokens=64)
    for salt in (OURS, THEIRS):
        run(scheduler, "a", PROMPT, salt)
    assert scheduler.drop_roots(frozenset({scheduler.root(OURS, None)})) == len(PROMPT) // BLOCK_SIZE
    assert run(scheduler, "b", PROMPT, THEIRS) > 0
    assert run(scheduler, "c", PROMPT, OURS) == 0
    assert run(scheduler, "d", PROMPT, OURS) > 0, "what is computed after the drop is kept"
    assert scheduler.load().blocks_free == 64


def test_an_adapter_has_a_root_of_its_own() -> None:
    scheduler = make(num_blocks=64, tokens=64)
    run(scheduler, "a", PROMPT, OURS, ADAPTER)
    assert scheduler.drop_roots(frozenset({scheduler.root(OURS, None)})) == 0
    assert scheduler.drop_roots(frozenset({scheduler.root(OURS, ADAPTER)})) == len(PROMPT) // BLOCK_SIZE


def test_a_block_whose_predecessor_is_gone_is_dropped_too() -> None:
    """Else it would be found as soon as a request has computed its predecessor again."""
    blocks, tokens = BlockManager(4), int_array(list(range(8)))
    keys = KeyChain(identity="m", cache_salt=OURS, block_size=4)
    held = blocks.take((), 2)
    blocks.register(held[1], keys.key(1, tokens), root=keys.root)
    assert blocks.forget_roots(frozenset({keys.root})) == 1
    blocks.register(held[0], keys.key(0, tokens), root=keys.root)
    assert blocks.match(keys, tokens, 2) == held[:1]


def test_a_request_that_runs_goes_on_and_leaves_nothing() -> None:
    scheduler = tiered()
    scheduler.submit(
        request("a", LONG, sampling=ResolvedSampling(max_tokens=90, temperature=0.0), cache_salt=OURS), 0.0
    )
    step(scheduler)
    step(scheduler)
    held = scheduler.load().blocks_free
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    assert scheduler.load().blocks_free == held
    while scheduler.load().requests_running:
        step(scheduler)
    assert offload(scheduler).saves.take_finished() == []
    assert seen(scheduler) == set()
    assert scheduler.load().blocks_free == 256
    assert run(scheduler, "b", LONG, OURS) == 0


def test_a_request_whose_kv_is_on_its_way_leaves_nothing() -> None:
    scheduler = tiered()
    scheduler.reservations.reserve(request("a", LONG, sampling=ONE_TOKEN, cache_salt=OURS), 0.0)
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    scheduler.reservations.admit("a", TokenOutput(5, 0))
    assert offload(scheduler).saves.take_finished() == []
    assert run(scheduler, "b", LONG, OURS) == 0


def test_a_request_that_has_run_leaves_nothing_although_it_was_preempted_during_the_drop() -> None:
    scheduler = make(num_blocks=2 * len(PROMPT) // BLOCK_SIZE + 3, tokens=64)
    sampling = ResolvedSampling(max_tokens=60, temperature=0.0)
    for salt in (THEIRS, OURS):
        scheduler.submit(request(salt, PROMPT, sampling=sampling, cache_salt=salt), 0.0)
    while not scheduler.load().preemptions:
        step(scheduler)
    assert scheduler.load().requests_waiting == 1
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
    assert run(scheduler, "b", PROMPT, OURS) == 0


def test_a_request_that_waits_leaves_its_blocks_as_it_comes_after_the_drop() -> None:
    scheduler = make(num_blocks=64, tokens=64)
    scheduler.submit(request("a", PROMPT, sampling=ONE_TOKEN, cache_salt=OURS), 0.0)
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    step(scheduler)
    assert run(scheduler, "b", PROMPT, OURS) > 0


def test_entries_that_wait_to_be_saved_are_not_saved() -> None:
    scheduler = tiered()
    run(scheduler, "a", LONG, OURS)
    run(scheduler, "b", LONG, THEIRS)
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    assert {key.root for entries in save_all(scheduler) for key in entries.keys} == {scheduler.root(THEIRS, None)}
    assert scheduler.load().blocks_free == 256
    assert scheduler.leaked_blocks(lambda _: True) == 0


def test_what_is_being_loaded_is_not_found() -> None:
    scheduler = tiered()
    ours = plan_for(scheduler, request("a", LONG, cache_salt=OURS), found=3)
    theirs = plan_for(scheduler, request("b", LONG, cache_salt=THEIRS), found=3)
    assert ours is not None
    assert theirs is not None
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    assert offload(scheduler).loads.end(ours, 3) == 0
    assert offload(scheduler).loads.end(theirs, 3) > 0
    assert run(scheduler, "c", LONG, OURS) == 0
    assert run(scheduler, "d", LONG, THEIRS) > 0
    assert scheduler.leaked_blocks(lambda _: True) == 0


def test_followers_no_longer_see_what_stores_had() -> None:
    scheduler = tiered(num_blocks=100)
    run(scheduler, "a", LONG, OURS)
    save_all(scheduler)
    decode_all(scheduler, "other", tuple(range(500, 890)))
    assert offload(scheduler).kept.cached_keys()
    scheduler.prefix_cache.follow()
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    changes = scheduler.prefix_cache.take_changes()
    assert changes
    assert set(changes.values()) == {None}


def test_a_recurrent_state_is_dropped_with_its_prefix() -> None:
    scheduler = make(num_blocks=64, tokens=64, state_slots=9, scan_tokens=8)
    for salt in (OURS, THEIRS):
        run(scheduler, "a", PROMPT, salt)
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    assert run(scheduler, "b", PROMPT, THEIRS) > 0
    assert run(scheduler, "c", PROMPT, OURS) == 0


def test_a_snapshot_that_a_step_is_writing_is_not_kept() -> None:
    scheduler = make(num_blocks=64, tokens=64, state_slots=9, scan_tokens=8)
    scheduler.submit(request("a", PROMPT, sampling=ONE_TOKEN, cache_salt=OURS), 0.0)
    batch = launch(scheduler)
    scheduler.drop_roots(frozenset({scheduler.root(OURS, None)}))
    finish(scheduler, batch)
    assert run(scheduler, "b", PROMPT, OURS) == 0
