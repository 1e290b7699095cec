"""Times, goals and summaries of requests, from records made by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.load.goals import Goal, parse_goal
from baton.load.metrics import spread, summarize
from baton.load.records import LoadOutcome, LoadRecord


def record(*times: float, counts: tuple[int, ...] = (), due: float = 0.0, end: float | None = None) -> LoadRecord:
    """An answered request with messages at those times after it was due."""
    counts = counts or (1,) * len(times)
    end = max(times, default=0.0) if end is None else end
    return LoadRecord(0, due, 0.001, 10, sum(counts), LoadOutcome.OK, end, times_s=times, counts=counts)


def test_times_of_one_request_are_computed() -> None:
    one = record(0.5, 0.6, 0.9)
    assert one.ttft_s == 0.5
    assert one.tpot_s == pytest.approx(0.2)
    assert one.gaps_s() == pytest.approx([0.1, 0.3])


def test_tokens_that_come_together_have_one_gap_and_zeros() -> None:
    merged = record(0.5, 0.9, counts=(2, 3))
    assert merged.gaps_s() == pytest.approx([0.0, 0.4, 0.0, 0.0])
    assert merged.tpot_s == pytest.approx(0.1)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 4)), min_size=1, max_size=30))
def test_gaps_are_one_less_than_tokens_and_sum_up_to_the_time_between_first_and_last(
    messages: list[tuple[float, int]],
) -> None:
    times = np.cumsum([wait for wait, _ in messages])
    one = record(*map(float, times), counts=tuple(count for _, count in messages))
    assert one.gaps_s().size == one.tokens - 1
    assert one.gaps_s().sum() == pytest.approx(times[-1] - times[0], abs=1e-9)
    if one.tpot_s is not None:
        assert one.tpot_s == pytest.approx(one.gaps_s().mean(), abs=1e-9)


def test_without_counts_the_usage_says_how_many_tokens_there_were() -> None:
    vague = replace(record(0.5, 0.9), exact=False, usage={"output": 5})
    assert vague.tokens == 5
    assert vague.tpot_s == pytest.approx(0.1)
    assert not summarize([vague]).exact


def test_a_request_of_one_token_has_no_time_per_token_and_meets_goals_for_it() -> None:
    one = record(0.5)
    assert one.tpot_s is None
    assert one.gap_quantile_s(0.99) is None
    assert Goal(ttft_s=0.5, tpot_s=0.01, gap_s=0.01).good(one)


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        (Goal(ttft_s=0.5), True),
        (Goal(ttft_s=0.49), False),
        (Goal(tpot_s=0.2001), True),
        (Goal(tpot_s=0.19), False),
        (Goal(gap_s=0.299), True),  # the p99 of two gaps lies between them
        (Goal(gap_s=0.2), False),
        (Goal(e2e_s=0.8), False),
        (Goal(ttft_s=0.5, tpot_s=0.21, gap_s=0.3, e2e_s=0.9), True),
    ],
)
def test_a_good_request_keeps_every_bound(goal: Goal, good: bool) -> None:
    assert goal.good(record(0.5, 0.6, 0.9)) is good


@pytest.mark.parametrize("outcome", [LoadOutcome.REFUSED, LoadOutcome.FAILED, LoadOutcome.UNFINISHED])
def test_a_request_that_was_not_answered_is_never_good(outcome: LoadOutcome) -> None:
    assert not Goal(ttft_s=9.0).good(replace(record(0.1), outcome=outcome))


def test_goals_are_read_from_the_command_line() -> None:
    assert parse_goal("ttft=400ms,tpot=15ms") == [Goal(0.4, 0.015)]
    assert parse_goal("ttft=2s, gap=30ms, e2e=1.5s, share=95%") == [Goal(2.0, None, 0.03, 1.5, 0.95)]
    assert [goal.tpot_s for goal in parse_goal("tpot=10/15/20ms")] == [0.01, 0.015, 0.02]
    assert len(parse_goal("ttft=1/2s,tpot=10/20/30ms")) == 6
    assert parse_goal("ttft=400ms/2s") == [Goal(0.4), Goal(2.0)]
    assert str(parse_goal("ttft=2s,tpot=15ms")[0]) == "ttft 2 s, tpot 15 ms for 90 %"


@pytest.mark.parametrize(
    "text", ["", "share=90%", "ttft=", "ttft=0ms", "ttft=5", "tpot=-1ms", "itl=5ms", "ttft=1s,share=0"]
)
def test_a_goal_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"ttft=400ms,tpot=15ms|share=90%"):
        parse_goal(text)


def test_a_summary_counts_every_outcome_by_its_type_and_leaves_the_warm_up_out() -> None:
    records = [
        replace(record(0.1, 0.2, due=0.0, end=5.0), counted=False),
        record(0.1, 0.2, 0.3, due=1.0),
        replace(record(0.1, due=2.0, end=0.5), output_tokens=4),
        LoadRecord(0, 3.0, 0.0, 10, 5, LoadOutcome.REFUSED, 0.1, error="Overloaded"),
        LoadRecord(0, 3.0, 0.0, 10, 5, LoadOutcome.FAILED, 0.1, error="BrokenStream", times_s=(0.05,), counts=(1,)),
        LoadRecord(0, 3.0, 0.0, 10, 5, LoadOutcome.FAILED, 0.1, error="Timeout"),
        LoadRecord(0, 3.0, 0.0, 10, 5, LoadOutcome.UNFINISHED, 1.0, error="Unfinished"),
    ]
    summary = summarize(records)
    assert (summary.requests, summary.ok, summary.refused, summary.failed, summary.unfinished) == (6, 2, 1, 2, 1)
    assert summary.short == 1
    assert summary.errors == {"BrokenStream": 1, "Timeout": 1}
    assert summary.refusals == {"Overloaded": 1}
    assert summary.window_s == pytest.approx(4.0)  # from the warm-up's last arrival at 0 s to 4 s
    assert summary.requests_per_s == pytest.approx(2 / 4)
    assert summary.output_tokens == 5  # tokens of the broken stream were sent too
    assert summary.ttft is not None
    assert summary.ttft.count == 2
    twice = summarize(records, records)
    assert twice.requests == 12
    assert twice.window_s == pytest.approx(8.0)
    assert twice.requests_per_s == pytest.approx(2 / 4)


def test_as_many_requests_as_gaps_are_at_the_planned_rate() -> None:
    due = [0.5, 1.5, 2.5, 3.5]
    run = [replace(record(0.1, due=each, end=0.0), counted=each > 1) for each in due]
    assert summarize(run).requests_per_s == pytest.approx(1.0)


def test_nothing_answered_gives_no_times() -> None:
    summary = summarize([LoadRecord(0, 0.0, 0.0, 10, 5, LoadOutcome.FAILED, 0.1, error="NoConnection")])
    assert summary.ttft is summary.gap is summary.e2e is None
    assert spread([]) is None
