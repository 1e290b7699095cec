"""Plans of requests: arrivals, lengths, prefixes, sessions and traces, all by seed."""

import random
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.load.arrivals import Arrivals, arrival_times
from baton.load.lengths import Fixed, Lengths, Lognormal, Uniform, parse_lengths
from baton.load.prompts import Contents, PromptMaker
from baton.load.traces import TraceRequest
from baton.load.workload import PRESETS, LengthSpan, PlannedRequest, Synthetic, TraceReplay

COUNT = 4000


def gaps(kind: Arrivals, rate: float, burstiness: float = 1.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = list(islice(arrival_times(kind, rate, random.Random(1), burstiness=burstiness), COUNT))
    return np.diff(np.asarray(times))


@pytest.mark.parametrize("kind", list(Arrivals))
def test_the_mean_rate_is_the_one_asked_for(kind: Arrivals) -> None:
    assert gaps(kind, 50.0, burstiness=2.0).mean() == pytest.approx(1 / 50, rel=0.1)


def test_burstiness_is_the_squared_variation_of_the_gaps() -> None:
    for kind, burstiness in ((Arrivals.POISSON, 1.0), (Arrivals.GAMMA, 4.0), (Arrivals.GAMMA, 0.25)):
        found = gaps(kind, 10.0, burstiness)
        assert found.var() / found.mean() ** 2 == pytest.approx(burstiness, rel=0.2)
    assert gaps(Arrivals.CONSTANT, 10.0).std() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1e9, 1.0)])
def test_a_rate_or_burstiness_out_of_bounds_is_refused_with_them(rate: float, burstiness: float) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: above 0, below 1e\+09"):
        arrival_times(Arrivals.GAMMA, rate, random.Random(1), burstiness=burstiness)


@pytest.mark.parametrize("lengths", [Fixed(7), Uniform(3, 9), Lognormal(250, 0.6), Lognormal(2000, 0.0)])
def test_lengths_have_the_mean_asked_for_and_read_back(lengths: Lengths) -> None:
    rng = random.Random(2)
    drawn = [lengths.draw(rng) for _ in range(COUNT)]
    mean = {"7": 7, "3-9": 6}.get(str(lengths)) or getattr(lengths, "mean", 0)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert min(drawn) >= 1
    assert parse_lengths(str(lengths)) == lengths


@pytest.mark.parametrize("text", ["", "0", "9-3", "x", "1-2-3", "lognormal:250", "lognormal:0,1", "lognormal:9,-1"])
def test_unknown_lengths_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: 256, 4096-8192, lognormal:250,0.6"):
        parse_lengths(text)


def test_equal_seeds_give_equal_plans_and_another_rate_the_same_lengths() -> None:
    workload = Synthetic(*PRESETS["chat"])
    plan = workload.plan(5.0, LengthSpan(requests=50), seed=3)
    assert plan == workload.plan(5.0, LengthSpan(requests=50), seed=3)
    assert plan != workload.plan(5.0, LengthSpan(requests=50), seed=4)
    faster = workload.plan(10.0, LengthSpan(requests=50), seed=3)
    assert [each.prompt_tokens for each in faster] == [each.prompt_tokens for each in plan]
    assert [each.at_s for each in faster] == pytest.approx([each.at_s / 2 for each in plan])


def test_the_warm_up_comes_before_and_does_not_count() -> None:
    workload = Synthetic(Fixed(8), Fixed(2), Arrivals.CONSTANT)
    plan = workload.plan(10.0, LengthSpan(requests=20, warmup_s=1.0), seed=0)
    assert sum(each.counted for each in plan) == 20
    assert all(each.counted == (each.at_s >= 1.0) for each in plan)
    assert [each.index for each in plan] == list(range(len(plan)))
    timed = workload.plan(10.0, LengthSpan(duration_s=2.05, warmup_s=1.0), seed=0)
    assert timed[-1].at_s == pytest.approx(3.0)


def test_a_run_without_requests_or_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="would send no request"):
        Synthetic(Fixed(8), Fixed(2), Arrivals.CONSTANT).plan(0.1, LengthSpan(duration_s=1.0), seed=0)
    with pytest.raises(InvalidRequest, match="without end"):
        LengthSpan()


def test_lengths_that_do_not_fit_are_drawn_again() -> None:
    plan = Synthetic(Uniform(1, 100), Uniform(1, 100), tokens_max=60).plan(1.0, LengthSpan(requests=200), seed=0)
    assert max(each.prompt_tokens + each.output_tokens for each in plan) <= 60
    with pytest.raises(InvalidRequest, match="fit into 60 tokens"):
        Synthetic(Fixed(100), Fixed(1), tokens_max=60).plan(1.0, LengthSpan(requests=1), seed=0)


def replay(*requests: TraceRequest, tokens_max: int | None = None) -> TraceReplay:
    return TraceReplay(requests, tokens_max)


TRACE = (TraceRequest(0.0, 600, 5, (0, 7), 512), TraceRequest(4.0, 600, 0, (0, 8), 512), TraceRequest(10.0, 9000, 5))


def test_a_trace_is_scaled_to_a_rate_and_keeps_its_order() -> None:
    whole = replay(*TRACE)
    assert whole.rate == pytest.approx(0.3)
    plan = whole.plan(0.6, LengthSpan(duration_s=100.0), seed=0)
    assert [each.at_s for each in plan] == pytest.approx([0.0, 2.0, 5.0])
    assert [each.prefix_ids for each in plan] == [(0, 7), (0, 8), ()]
    assert plan[1].output_tokens == 1  # a request for nothing is none


def test_requests_of_a_trace_that_do_not_fit_are_left_out_and_counted() -> None:
    short = replay(*TRACE, tokens_max=4096)
    assert short.left_out == 1
    assert len(short.plan(short.rate, LengthSpan(duration_s=100.0), seed=0)) == 2
    with pytest.raises(InvalidRequest, match="fits into 10 tokens"):
        replay(*TRACE, tokens_max=10).plan(1.0, LengthSpan(requests=1), seed=0)


# ---- contents


def shared_start(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(
    ids=st.lists(st.integers(0, 5), max_size=4),
    other=st.lists(st.integers(0, 5), max_size=4),
    tokens=st.integers(1, 80),
    seed=st.integers(0, 3),
)
def test_prompts_share_the_prefix_of_their_equal_ids_and_no_more(
    ids: list[int], other: list[int], tokens: int, seed: int
) -> None:
    maker = PromptMaker(Contents(seed=seed, vocabulary=(0, 1 << 30)))
    one = maker.token_ids(PlannedRequest(0, 0.0, tokens, 1, tuple(ids), 16))
    two = maker.token_ids(PlannedRequest(1, 0.0, 80, 1, tuple(other), 16))
    assert len(one) == tokens
    common = next(
        (place for place, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other))
    )
    assert shared_start(one, two) == min(tokens, 16 * common)


def test_other_contents_share_nothing_and_ids_stay_in_the_vocabulary() -> None:
    request = PlannedRequest(0, 0.0, 300, 1, (1, 2), 128)
    one, two = (PromptMaker(Contents(seed=seed, vocabulary=(100, 900))).token_ids(request) for seed in (1, 2))
    assert shared_start(one, two) < 4
    assert all(100 <= token < 900 for token in one)


def test_texts_have_as_many_words_as_make_the_tokens_and_share_prefixes_too() -> None:
    maker = PromptMaker(Contents(tokens_per_word=1.25, extra_tokens=20))
    one, two = (maker.text(PlannedRequest(index, 0.0, 520, 1, (7, 8 + index), 250)).split() for index in (0, 1))
    assert len(one) == len(two) == 400
    assert one[:200] == two[:200]
    assert one[200:] != two[200:]


def test_each_prompt_of_a_session_continues_the_last_one() -> None:
    workload = Synthetic(Uniform(20, 40), Fixed(4), sessions=3, session_tokens=200)
    plan = workload.plan(1.0, LengthSpan(requests=60), seed=1)
    maker = PromptMaker(Contents(vocabulary=(0, 1 << 30)))
    by_session: dict[int, list[PlannedRequest]] = {}
    for each in plan:
        by_session.setdefault(each.session, []).append(each)
    assert len(by_session) > 3  # full ones start again
    assert max(each.prompt_tokens for each in plan) <= 200
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens // 16 * 16
            prompts = maker.token_ids(before), maker.token_ids(after)
            assert shared_start(*prompts) >= before.prompt_tokens // 16 * 16
    first, other = (turns[0] for turns in list(by_session.values())[:2])
    assert shared_start(maker.token_ids(first), maker.token_ids(other)) == 0


def test_a_shared_prefix_is_part_of_the_prompt() -> None:
    workload = Synthetic(Fixed(100), Fixed(4), shared_prefix_tokens=60, shared_prefixes=2)
    plan = workload.plan(1.0, LengthSpan(requests=40), seed=1)
    maker = PromptMaker(Contents(vocabulary=(0, 1 << 30)))
    starts = {tuple(maker.token_ids(each)[:60]) for each in plan}
    assert len(starts) == 2
    assert len({tuple(maker.token_ids(each)) for each in plan}) == 40
    with pytest.raises(InvalidRequest, match="exclude each other"):
        Synthetic(Fixed(100), Fixed(4), shared_prefix_tokens=60, sessions=2)
