"""How much of a prompt a step takes that also decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import MIN_SLICE_TOKENS, StepCosts, StepWork, chunk_pairs
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.slices import Slicer, StepBound, StreamBound, decodes_bound_s
from baton.engine.speculation.speculator import Speculator
from baton.engine.step_meter import StepMeter
from tests.unit.engine.scheduling import Meter, finish, request
from tests.unit.engine.speculation.request import teach_waits

# 5 ms for up to 100 tokens, then 10 us for each.
COSTS = StepCosts(((1, 0.005), (100, 0.005), (1100, 0.015)))


def make(meter: Meter) -> Scheduler:
    limits = EngineLimits(max_batch_tokens=8192, max_batch_requests=8, max_waiting=8, prefix_cache=False)
    facts = ModelFacts(2000, 16, vocab_size=1000, max_context_tokens=20000, eos_token_ids=(), identity="m")
    return Scheduler(limits, facts, meter)


def prompt_tokens(scheduler: Scheduler, now: float = 0.0) -> int:
    """Prompt tokens of one step, which ends."""
    batch = scheduler.schedule(now)
    assert batch is not None
    finish(scheduler, batch)
    return sum(len(row.token_ids) for row in batch.rows if len(row.token_ids) > 1)


def decoding(meter: Meter, *tpots: float | None) -> Scheduler:
    """One request decodes for each TPOT."""
    scheduler = make(meter)
    for index, tpot_s in enumerate(tpots):
        scheduler.submit(request(f"d{index}", 4, tpot_s=tpot_s), 0.0)
    prompt_tokens(scheduler)
    return scheduler


def _stream(tpot_s: float | None) -> StreamBound:
    return StreamBound(tpot_s, gap_factor=1.5)


def test_a_step_that_also_decodes_keeps_the_tightest_tpot() -> None:
    scheduler = decoding(Meter(COSTS), 0.02, 0.008, None)
    scheduler.submit(request("p", 4000), 0.0)
    assert prompt_tokens(scheduler) == 100 + 220 - 3  # 7.2 of 8 ms


def test_prompts_that_decode_elsewhere_do_not_loosen_the_bound() -> None:
    scheduler = decoding(Meter(COSTS), 0.01)
    scheduler.submit(request("p", 4000, prefill_only=True), 0.0)
    assert [prompt_tokens(scheduler, 5.0) for _ in range(3)] == [100 + 400 - 1] * 3


def test_the_tightest_tpot_leaves_with_its_request() -> None:
    scheduler = decoding(Meter(COSTS), 0.02, 0.01)
    scheduler.submit(request("p", 4000), 0.0)
    scheduler.abort("d1")
    assert prompt_tokens(scheduler) == 100 + 1300 - 1


def test_keys_of_decodes_and_pairs_of_prompts_count() -> None:
    costs = StepCosts(COSTS.points, key_s=0.0002, pair_s=1e-8)
    meter = Meter(costs)
    scheduler = decoding(meter, 0.01, 0.01)
    scheduler.submit(request("p", 4000), 0.0)
    first, second = prompt_tokens(scheduler), prompt_tokens(scheduler)
    work = StepWork(2, 12, second, chunk_pairs(first, first + second))
    assert meter.observed[-1][0] == work
    assert costs.seconds(work) <= 0.009 < costs.seconds(StepWork(2, 12, second + 1, work.pairs + first + second + 1))
    assert second < first


def test_a_step_without_decodes_is_not_bounded() -> None:
    scheduler = make(Meter(COSTS))
    scheduler.submit(request("p", 9000, prefill_only=True, tpot_s=0.01), 0.0)
    assert prompt_tokens(scheduler) == 8192


def test_without_costs_a_prompt_takes_the_whole_budget() -> None:
    scheduler = decoding(Meter(None), 0.01)
    scheduler.submit(request("p", 9000), 0.0)
    assert prompt_tokens(scheduler) == 8191


def test_where_no_slice_is_worth_its_step_a_prompt_gets_one_now_and_then() -> None:
    scheduler = decoding(Meter(COSTS), 0.005)
    scheduler.submit(request("p", 4000), 0.0)
    slices = [prompt_tokens(scheduler) for _ in range(8)]
    # 1.25 times the 5 ms of a step with 64 tokens, or with one; and 125 more at 10 us.
    assert slices == [0, 0, 0, 100 + 125 - 1, 0, 0, 0, 100 + 125 - 1]


@pytest.mark.parametrize("stretch", [1.0, 40.0])
def test_a_forced_slice_is_as_large_as_costs_little_more(stretch: float) -> None:
    """Where each step with prompts takes 200 ms, one with 64 tokens would waste it."""
    flat = StepCosts(((1, 0.005), (1000, 0.005 * stretch)), prompt_step_s=0.2)
    scheduler = decoding(Meter(flat), 0.005)
    scheduler.submit(request("p", 4000), 0.0)
    found = [prompt_tokens(scheduler) for _ in range(4)][-1]
    work = StepWork(1, 5, found, chunk_pairs(0, found))
    least = StepWork(1, 5, MIN_SLICE_TOKENS, chunk_pairs(0, MIN_SLICE_TOKENS))
    assert found == 4000 if stretch == 1.0 else MIN_SLICE_TOKENS < found < 1000
    assert flat.seconds(work) <= 1.25 * flat.seconds(least)


def test_prompts_next_to_streams_do_not_crawl_where_each_step_with_prompts_takes_long() -> None:
    """As with experts over ranks: a step with prompts takes 0.3 s however few tokens they have, and a captured decode
    step 10 to 50 ms. The node's profile does not know that. With forced slices of 64 tokens, it took 168 such steps."""
    captured = StepCosts(((1, 0.0101), (32, 0.023), (256, 0.049), (512, 0.049), (768, 0.075)))
    meter = StepMeter(captured)
    limits = EngineLimits(max_batch_tokens=768, max_batch_requests=256, max_waiting=32, prefix_cache=False)
    facts = ModelFacts(20000, 16, vocab_size=1000, max_context_tokens=20000, eos_token_ids=(), identity="m")
    scheduler = Scheduler(limits, facts, meter)
    for index in range(32):
        scheduler.submit(request(f"p{index}", 1024, sampling=ResolvedSampling(max_tokens=48, ignore_eos=True)), 0.0)
    now, with_prompts = 0.0, 0
    while (batch := scheduler.schedule(now)) is not None:
        has_prompts = any(len(row.token_ids) > 1 for row in batch.rows)
        seconds = 0.3 if has_prompts else captured.dense_s(len(batch.rows))
        results = [TokenOutput(5, row.sample.output_index) if row.sample else None for row in batch.rows]
        scheduler.complete(results, seconds, {})
        now, with_prompts = now + seconds, with_prompts + has_prompts
    assert with_prompts < 100  # 43 steps of 768 tokens are the fewest


def test_the_rest_of_a_prompt_that_fits_is_taken_however_short() -> None:
    scheduler = decoding(Meter(COSTS), 0.01)
    scheduler.submit(request("p", 20), 0.0)
    assert prompt_tokens(scheduler) == 20


def test_several_prompts_share_the_time_of_one_step() -> None:
    scheduler = decoding(Meter(COSTS), 0.01)
    for name in ("p", "q", "r"):
        scheduler.submit(request(name, 240), 0.0)
    assert prompt_tokens(scheduler) == 480  # the last one's 19 are not worth it
    assert prompt_tokens(scheduler) == 240


def test_without_a_tpot_steps_stay_near_plain_ones_until_prompts_wait_for_longer_than_they_should() -> None:
    scheduler = decoding(Meter(COSTS), None)
    scheduler.submit(request("p", 19000), 0.0)
    assert prompt_tokens(scheduler) == 100 + 250 - 1  # 1.5 times 5 ms
    assert prompt_tokens(scheduler, 9.0) == 100 + 250 - 1, "a prompt in progress does not wait"
    scheduler.submit(request("q", 9100), 9.0)
    alone_s = COSTS.prompt_s(0, 9100, step_tokens=8192)
    assert prompt_tokens(scheduler, 9.0 + 4 * alone_s) == 100 + 1000 - 1  # 15 ms
    assert prompt_tokens(scheduler, 9.0 + 8 * alone_s) == 100 + 1750 - 1  # 22.5 ms
    assert prompt_tokens(scheduler, 19.0) == 100 + 5500 - 1, "twelve plain steps, however long it waits"


def test_a_request_chooses_its_own_gaps_and_how_long_it_waits_for_longer_steps() -> None:
    scheduler = make(Meter(COSTS))
    scheduler.submit(request("d0", 4, gap_factor=3.0), 0.0)
    scheduler.submit(request("d1", 4, gap_factor=2.0), 0.0)
    prompt_tokens(scheduler)
    scheduler.submit(request("p", 1000, ttft_factor=20.0, gap_factor=9.0), 0.0)  # takes 14 ms alone
    assert prompt_tokens(scheduler) == 100 + 500 - 2  # 10 ms
    scheduler.submit(request("q", 1000, ttft_factor=20.0, gap_factor=9.0), 1.0)
    assert prompt_tokens(scheduler, 1.28) == 402 + 1000, "twice as long, which both prompts fit into"


def test_the_first_token_of_a_short_prompt_is_not_due_before_long_steps_would_be_seen() -> None:
    scheduler = decoding(Meter(COSTS), None)
    scheduler.submit(request("p", 4000), 0.0)
    prompt_tokens(scheduler)
    scheduler.submit(request("q", 20), 1.0)  # takes 5 ms alone
    assert prompt_tokens(scheduler, 1.02) == 100 + 325 - 1, "a tenth of the time until it is due has passed"
    assert prompt_tokens(scheduler, 1.2) > 1000


def test_what_a_prompt_has_waited_before_it_came_counts() -> None:
    """Gateways keep prompts that nodes would not compute soon."""
    scheduler = decoding(Meter(COSTS), None)
    alone_s = COSTS.prompt_s(0, 9100, step_tokens=8192)
    scheduler.submit(request("q", 9100, waited_s=3 * alone_s), 1.0)
    assert prompt_tokens(scheduler, 1.0 + alone_s) == 100 + 1000 - 1  # 15 ms


def test_drafts_that_make_a_step_long_leave_prompts_their_half() -> None:
    """Requests let a step with drafts take longer than the bound of steps with prompts."""
    limits = EngineLimits(max_batch_tokens=8192, max_batch_requests=256, max_waiting=8, prefix_cache=False)
    facts = ModelFacts(2000, 16, vocab_size=1000, max_context_tokens=20000, eos_token_ids=(), identity="m")
    meter = Meter(StepCosts(((1, 0.005), (8, 0.005), (1008, 0.105))))
    scheduler = Scheduler(limits, facts, meter, speculator=Speculator(always=True))
    sampling = ResolvedSampling(max_tokens=30)
    for index in range(8):
        scheduler.submit(EngineRequest(str(index), [5] * 40, sampling, gap_factor=4.0), 0.0)
    prompt_tokens(scheduler)
    scheduler.submit(request("p", 4000), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert sum(row.num_drafts for row in batch.rows) == 8 * 16, "17.8 ms, and 20 ms without leads"
    assert [len(row.token_ids) for row in batch.rows if not row.num_drafts] == [75]  # 7.5 ms


def test_a_step_with_drafts_keeps_the_tpot_with_the_wait_for_the_host() -> None:
    limits = EngineLimits(max_batch_tokens=8192, max_batch_requests=256, max_waiting=8, prefix_cache=False)
    facts = ModelFacts(2000, 16, vocab_size=1000, max_context_tokens=20000, eos_token_ids=(), identity="m")
    costs, speculator = StepCosts(((1, 0.005), (8, 0.005), (1008, 0.105))), Speculator(always=True)
    teach_waits(speculator, 8, 0.002, costs)
    scheduler = Scheduler(limits, facts, Meter(costs), speculator=speculator)
    for index in range(8):
        scheduler.submit(EngineRequest(str(index), [5] * 40, ResolvedSampling(max_tokens=30), tpot_s=0.04), 0.0)
    prompt_tokens(scheduler)
    scheduler.submit(request("p", 4000), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    rows = 8 + sum(row.num_drafts for row in batch.rows)
    wait_s = speculator.wait_s(8, rows, costs)
    assert rows == 8 + 8 * 16, "17.8 of 36 ms"
    assert wait_s == pytest.approx(0.002, rel=0.2)
    (slice_tokens,) = (len(row.token_ids) for row in batch.rows if not row.num_drafts)
    step_s, longer_s = (costs.seconds(StepWork(rows, 0, slice_tokens + more)) + wait_s for more in (0, 1))
    assert step_s <= 0.036 < longer_s


def test_without_a_tpot_slow_decodes_get_slow_steps() -> None:
    scheduler = decoding(Meter(StepCosts(((1, 0.1), (100, 0.1), (1100, 0.2)))), None)
    scheduler.submit(request("p", 9000), 0.0)
    assert prompt_tokens(scheduler) == 100 + 500 - 1  # 150 ms


def test_prompts_that_fit_do_not_keep_the_first_one_waiting_for_ever() -> None:
    costs = StepCosts(((1, 0.005), (60, 0.005), (1060, 0.015)))
    scheduler = decoding(Meter(costs), 0.00557)  # 60 tokens fit
    scheduler.submit(request("long", 4000, priority=-1), 0.0)
    for index in range(4):
        name = f"s{index}"
        scheduler.reservations.reserve(request(name, 50, tpot_s=1.0), 0.0)
        scheduler.reservations.prefill_here(name, (), 0.0)
        prompt_tokens(scheduler)
    # The last short one waits instead. 4 and 191 tokens take 1.25 times as long as 4 and 64.
    assert scheduler.load().tokens_waiting == 4000 - 191 + 50


def test_steps_that_read_shared_keys_once_teach_no_costs() -> None:
    meter = Meter(COSTS)
    scheduler = decoding(meter, None, None)
    taught = len(meter.observed)
    for shares_keys in (True, False):
        batch = scheduler.schedule(0.0)
        assert batch is not None
        samples = [row.at(batch.step).sample for row in batch.rows]
        tokens = [TokenOutput(5, sample.output_index) for sample in samples if sample is not None]
        scheduler.complete(tokens, 0.01, shares_keys=shares_keys)
    assert meter.observed[taught:] == [(StepWork(2, 12), 0.01)]


@pytest.mark.parametrize("seconds", [0.01, 5.0])
def test_observed_work_is_that_of_the_ended_step(seconds: float) -> None:
    meter = Meter(COSTS)
    scheduler = decoding(meter, None, None)
    scheduler.submit(request("p", 20), 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    finish(scheduler, first)
    finish(scheduler, second)
    assert [work for work, _ in meter.observed] == [
        StepWork(0, 0, 8, 20),
        StepWork(2, 10, 20, chunk_pairs(0, 20)),
        StepWork(3, 12 + 21, 0, 0),
    ]


@given(
    base=st.integers(0, 400),
    start=st.integers(0, 5000),
    length=st.integers(1, 5000),
    bound_ms=st.floats(1.0, 60.0),
    pair_ns=st.floats(0.0, 100.0),
)
def test_a_slice_is_the_longest_that_fits(base: int, start: int, length: int, bound_ms: float, pair_ns: float) -> None:
    costs = StepCosts(COSTS.points, pair_s=pair_ns * 1e-9)
    bound = StepBound(costs, bound_ms * 1e-3, least_tokens=1, forced=False)
    work = StepWork(1, 100, base, 0)

    def fits(tokens: int) -> bool:
        pairs = chunk_pairs(start, start + tokens)
        return costs.seconds(StepWork(1, 100, base + tokens, pairs)) <= bound_ms * 1e-3

    tokens = bound.tokens(work, start, start + length)
    assert tokens == 0 or fits(tokens)
    assert tokens == length or not fits(tokens + 1)


def test_a_skipped_step_counts_only_while_prompts_want_one() -> None:
    slicer = Slicer()
    work = StepWork(1, 10)
    for skipped in (True, True, True, False):
        slicer.launched(skipped=skipped)
    bound = slicer.bound(COSTS, work, [_stream(0.004)], overdue=0.0)
    assert bound is not None
    assert bound.tokens(work, 0, 1000) == 0


def test_steps_grow_with_the_wait_of_prompts_up_to_a_bound() -> None:
    streams = [_stream(None)]
    bounds = [decodes_bound_s(0.01, streams, overdue=overdue) for overdue in (0.0, 1.0, 3.0, 7.0, 1000.0)]
    assert bounds == [pytest.approx(1.5 * 0.01 * factor) for factor in (1, 2, 4, 8, 8)]


def test_a_tpot_out_of_reach_does_not_stop_prompts() -> None:
    work, slicer = StepWork(decode_rows=1, keys=10), Slicer()
    steady = slicer.bound(COSTS, work, [_stream(None)], overdue=0.0)
    hasty = slicer.bound(COSTS, work, [_stream(COSTS.seconds(work) / 10)], overdue=0.0)
    assert steady is not None
    assert hasty is not None
    assert hasty.tokens(work, 0, 1000) == steady.tokens(work, 0, 1000) > 0


@pytest.mark.parametrize("tpots", [(), (0.01,), (0.02, 0.007, None), (0.005,), (0.0052,), (None,), (0.001,)])
def test_the_pace_is_that_of_the_steps_that_follow(tpots: tuple[float | None, ...]) -> None:
    costs = StepCosts(COSTS.points, pair_s=1e-9)
    meter = Meter(costs)
    scheduler = make(meter)
    for index, tpot_s in enumerate(tpots):
        stays = ResolvedSampling(max_tokens=5000, temperature=0.0)
        scheduler.submit(request(f"d{index}", 4, tpot_s=tpot_s, sampling=stays), 0.0)
    if tpots:
        prompt_tokens(scheduler)
    decodes = StepWork(len(tpots), 5 * len(tpots))
    pace = Slicer().pace(costs, decodes, [_stream(tpot_s) for tpot_s in tpots], step_tokens=8192)
    scheduler.submit(request("p", 5000, prefill_only=True), 0.0)
    meter.observed.clear()
    while scheduler.load().tokens_waiting:
        batch = scheduler.schedule(1000.0)  # it has waited so long that streams without a TPOT give the longest step
        assert batch is not None
        finish(scheduler, batch)
    taken_s = sum(costs.seconds(work) for work, _ in meter.observed)
    assert pace.seconds(0, 5000) == pytest.approx(taken_s, rel=0.2)
