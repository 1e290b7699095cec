"""Which recurrent states the scheduler offers to the stores outside of its cache, and how they come back."""

from contextlib import suppress
from random import Random

import pytest

from baton.core.costs import StepCosts
from baton.core.errors import InternalError, Overloaded
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks
from baton.core.sampling import ResolvedSampling
from baton.engine.scheduling.entry_plans import LoadPlan
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import BLOCK_SIZE, finish, launch, make, request, step
from tests.unit.engine.test_offload import free_blocks, offload, save_all, seen

BLOCKS_PER_ENTRY = ENTRY_TOKENS // BLOCK_SIZE
PROMPT = tuple(range(100, 100 + 3 * ENTRY_TOKENS + 10))


def tiered(
    *,
    slots: int = 6,
    num_blocks: int = 256,
    scan_tokens: int = 16,
    costs: StepCosts | None = None,
) -> Scheduler:
    return make(
        costs=costs,
        num_blocks=num_blocks,
        tokens=256,
        context=1000,
        state_slots=slots,
        scan_tokens=scan_tokens,
        offloads=True,
    )


def run(scheduler: Scheduler, name: str, prompt: tuple[int, ...] = PROMPT, *, tokens: int = 1, salt: str = "") -> int:
    """Runs a request to its end. Returns how many tokens of its prompt the cache had."""
    sampling = ResolvedSampling(max_tokens=tokens, temperature=0.0)
    scheduler.submit(request(name, prompt, sampling=sampling, cache_salt=salt), 0.0)
    cached = []
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        cached += [each.cached_tokens for each in step(scheduler)[1].started]
    return cached[0]


def states_of(finished: list[EntryBlocks]) -> list[int]:
    """The numbers of tokens after which states were offered."""
    return [entries.state.after.token_stop for entries in finished if entries.state is not None]


def pinned(scheduler: Scheduler) -> int:
    return scheduler._blocks.states.slots.num_pinned


def loaded(scheduler: Scheduler, name: str, *, known: bool = False) -> int:
    """Loads a prompt and its state. Returns how many tokens need not be computed any more."""
    wanted = scheduler.wanted(request(name, PROMPT))
    assert wanted is not None
    plan = scheduler.begin_load(wanted, 0, stop=wanted.stop)
    assert plan is not None
    assert (plan.entries.state is None) == known
    return offload(scheduler).loads.end(plan, len(plan.entries))


def test_the_state_before_the_end_of_a_prompt_is_offered_and_held() -> None:
    scheduler = tiered()
    run(scheduler, "a")
    finished = offload(scheduler).saves.take_finished()
    assert states_of(finished) == [3 * ENTRY_TOKENS]
    assert [key.number for entries in finished for key in entries.keys] == [0, 1, 2]
    assert pinned(scheduler) == 1
    for entries in finished:
        offload(scheduler).saves.saved(entries, len(entries))
    assert pinned(scheduler) == 0
    assert free_blocks(scheduler) == 256
    assert scheduler.leaked_blocks(lambda _: True) == 0


def test_of_the_states_after_decoded_tokens_the_last_is_offered() -> None:
    scheduler = tiered()
    run(scheduler, "a", PROMPT[: ENTRY_TOKENS + 10], tokens=3 * ENTRY_TOKENS)
    assert states_of(save_all(scheduler)) == [ENTRY_TOKENS, 4 * ENTRY_TOKENS]


def test_where_a_prompt_departs_from_another_a_state_is_offered_too() -> None:
    scheduler = tiered()
    run(scheduler, "a")
    save_all(scheduler)
    run(scheduler, "b", (*PROMPT[: 2 * ENTRY_TOKENS], *range(2 * ENTRY_TOKENS - 5)))
    assert states_of(save_all(scheduler)) == [2 * ENTRY_TOKENS, 3 * ENTRY_TOKENS]


def test_saves_leave_a_slot_for_requests() -> None:
    scheduler = tiered(slots=2)
    run(scheduler, "a")
    offload(scheduler)  # whose saves are not over
    run(scheduler, "b", tuple(range(500, 500 + len(PROMPT))))
    assert pinned(scheduler) <= 1
    save_all(scheduler)
    assert pinned(scheduler) == 0


def test_a_prompt_is_of_use_only_up_to_a_state() -> None:
    wanted = tiered().wanted(request("b", PROMPT))
    assert wanted is not None
    assert (wanted.starts, list(wanted.states), wanted.stop) == ((0,), [1, 2, 3], 3)
    coarse = tiered(scan_tokens=2 * ENTRY_TOKENS).wanted(request("b", PROMPT))
    assert coarse is not None
    assert (list(coarse.states), coarse.stop) == ([2], 2)
    assert tiered(scan_tokens=4 * ENTRY_TOKENS).wanted(request("b", PROMPT)) is None


def test_nothing_is_wanted_where_the_cache_has_the_last_state() -> None:
    scheduler = tiered()
    run(scheduler, "a")
    assert scheduler.wanted(request("b", PROMPT)) is None


def test_a_request_begins_at_a_state_that_was_loaded() -> None:
    scheduler = tiered()
    assert loaded(scheduler, "b") == 3 * ENTRY_TOKENS
    assert run(scheduler, "b") == 3 * ENTRY_TOKENS
    assert states_of(save_all(scheduler)) == [], "it came from there"


def test_a_state_alone_is_loaded_where_the_cache_has_the_blocks() -> None:
    scheduler = tiered(slots=3)
    run(scheduler, "a")
    save_all(scheduler)
    for name in "cdef":
        run(scheduler, name, tuple(range(ord(name) * 7, ord(name) * 7 + 70)))
        save_all(scheduler)
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    plan = scheduler.begin_load(wanted, 0, stop=3)
    assert plan is not None
    assert (plan.entries.keys, len(plan.entries)) == ((), 1)
    assert offload(scheduler).loads.end(plan, 1) == 3 * ENTRY_TOKENS
    assert run(scheduler, "b") == 3 * ENTRY_TOKENS


def test_blocks_alone_are_loaded_where_the_cache_has_the_state() -> None:
    scheduler = tiered(num_blocks=70)
    run(scheduler, "a")
    save_all(scheduler)
    run(scheduler, "c", tuple(range(300, 300 + 250)))
    save_all(scheduler)
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    assert wanted.known == {3}
    assert loaded(scheduler, "b", known=True) == 3 * ENTRY_TOKENS
    assert run(scheduler, "b") == 3 * ENTRY_TOKENS


@pytest.mark.parametrize("arrived", [0, 2, 3])
def test_without_its_state_nothing_that_was_loaded_is_of_use(arrived: int) -> None:
    scheduler = tiered()
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    plan = scheduler.begin_load(wanted, 0, stop=3)
    assert plan is not None
    assert offload(scheduler).loads.end(plan, arrived) == 0
    assert free_blocks(scheduler) == 256
    assert seen(scheduler) == set()
    assert run(scheduler, "b") == 0
    save_all(scheduler)
    assert free_blocks(scheduler) == 256


def test_a_state_alone_spares_the_tokens_before_it() -> None:
    costs = StepCosts(((1, 1.0), (256, 256.0)))
    scheduler = tiered(slots=3, costs=costs)
    run(scheduler, "a")
    save_all(scheduler)
    for name in "cdef":
        run(scheduler, name, tuple(range(ord(name) * 7, ord(name) * 7 + 70)))
        save_all(scheduler)
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    plan = scheduler.begin_load(wanted, 0, stop=3)
    assert plan is not None
    assert plan.entries.keys == ()
    assert scheduler.entry_s(plan) == 3 * ENTRY_TOKENS
    offload(scheduler).loads.end(plan, 1)


def test_a_load_begins_only_if_all_of_it_has_room() -> None:
    scheduler = tiered(num_blocks=40)
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    assert scheduler.begin_load(wanted, 0, stop=3) is None
    assert scheduler.begin_load(wanted, 0, stop=2) is not None


def test_a_load_takes_no_slot_that_a_request_needs() -> None:
    scheduler = tiered(slots=1)
    wanted = scheduler.wanted(request("b", PROMPT))
    assert wanted is not None
    assert scheduler.begin_load(wanted, 0, stop=3) is None


def test_what_is_dropped_meanwhile_is_neither_saved_nor_found() -> None:
    scheduler = tiered()
    run(scheduler, "a")
    wanted = scheduler.wanted(request("b", PROMPT, cache_salt="other"))
    assert wanted is not None
    plan = scheduler.begin_load(wanted, 0, stop=3)
    assert plan is not None
    scheduler.drop_roots(frozenset({scheduler.root("", None), scheduler.root("other", None)}))
    assert offload(scheduler).saves.take_finished() == []
    assert offload(scheduler).loads.end(plan, len(plan.entries)) == 0
    assert pinned(scheduler) == 0
    assert run(scheduler, "b", salt="other") == 0
    assert run(scheduler, "c") == 0


def test_followers_see_the_entries_before_a_state_that_is_saved_and_no_others() -> None:
    scheduler = tiered(slots=3)
    run(scheduler, "a", PROMPT[: 2 * ENTRY_TOKENS + 1], tokens=ENTRY_TOKENS - 10)
    save_all(scheduler)
    assert len(offload(scheduler).kept.cached_keys()) == 2 * BLOCKS_PER_ENTRY


def test_a_state_of_logits_that_are_not_finite_is_dropped_with_the_entries_before_it() -> None:
    """Another request would save the entries, and find the state there already."""
    scheduler = tiered()
    scheduler.submit(request("a", PROMPT), 0.0)
    step(scheduler)
    assert states_of(save_all(scheduler)) == [3 * ENTRY_TOKENS]
    launch(scheduler)
    scheduler.complete([InternalError("its logits are not finite")], 0.0)
    assert [key.number for key in offload(scheduler).saves.take_forgotten()] == [0, 1, 2]
    assert offload(scheduler).saves.take_finished() == []
    assert offload(scheduler).kept.cached_keys() == []


def test_followers_do_not_see_what_could_not_be_saved() -> None:
    scheduler = tiered()
    run(scheduler, "a")
    for entries in offload(scheduler).saves.take_finished():
        offload(scheduler).saves.saved(entries, 0)
    assert offload(scheduler).kept.cached_keys() == []


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_blocks_and_slots_are_free_at_the_end(seed: int) -> None:
    random = Random(seed)
    scheduler = tiered(slots=random.choice((2, 3, 6)), num_blocks=random.choice((90, 256)))
    texts = [tuple(random.choices(range(900), k=64 * random.randint(1, 4))) for _ in range(3)]
    saving: list[EntryBlocks] = []
    loading: list[LoadPlan] = []
    names = iter(range(10_000))
    live: list[str] = []

    def arrive() -> None:
        prompt = random.choice(texts) + tuple(random.choices(range(900), k=random.randint(1, 90)))
        sampling = ResolvedSampling(max_tokens=random.randint(1, 150), temperature=0.0)
        arrived = request(f"r{next(names)}", prompt, sampling=sampling, cache_salt=random.choice("ab"))
        wanted = scheduler.wanted(arrived)
        if wanted is not None:
            stop = random.choice([0, *wanted.states])
            plan = scheduler.begin_load(wanted, 0, stop=stop) if stop else None
            loading.extend([] if plan is None else [plan])
        with suppress(Overloaded):
            scheduler.submit(arrived, 0.0)
            live.append(arrived.request_id)

    def end_load() -> None:
        if loading:
            plan = loading.pop(random.randrange(len(loading)))
            offload(scheduler).loads.end(plan, random.choice((0, len(plan.entries) // 2, len(plan.entries))))

    def end_save() -> None:
        saving.extend(offload(scheduler).saves.take_finished())
        if saving:
            entries = saving.pop(random.randrange(len(saving)))
            offload(scheduler).saves.saved(entries, random.choice((0, len(entries))))

    def compute() -> None:
        if scheduler.load().requests_running + scheduler.load().requests_waiting:
            batch = scheduler.schedule(0.0)
            if batch is not None:
                finish(scheduler, batch)

    def leave() -> None:
        if live:
            scheduler.abort(live.pop(random.randrange(len(live))))

    def drop() -> None:
        scheduler.drop_roots(frozenset({scheduler.root(random.choice("ab"), None)}))

    happens = [arrive, end_load, end_save, compute, leave, drop]
    for _ in range(400):
        random.choices(happens, (2, 3, 3, 12, 0.5, 0.1))[0]()
    for name in live:
        scheduler.abort(name)
    while loading:
        end_load()
    saving.extend(offload(scheduler).saves.take_finished())
    while saving:
        end_save()
    assert scheduler.load().blocks_free == scheduler.load().blocks_total
    assert scheduler.leaked_blocks(lambda _: True) == 0
    assert pinned(scheduler) == 0
    slots = scheduler._blocks.states.slots
    assert (slots.num_held, slots.num_available) == (0, slots.num_slots)
    assert offload(scheduler).num_held == 0
    assert offload(scheduler).saves._shown == {}
