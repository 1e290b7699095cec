"""Which traces are exported: some by their id or their caller's wish, and those that failed, were slow or retried."""

import random

import pytest

from baton.metrics.declared import Outcome
from baton.tracing.context import TraceContext
from baton.tracing.sampling import FAILED, HEAD, RETRIED, SLOW, Sampling


def test_the_ratio_is_the_share_of_requests_that_are_sampled_when_they_arrive() -> None:
    numbers, sampling = random.Random(1), Sampling(0.1)
    sampled = sum(sampling.at_head(numbers.getrandbits(128), None) for _ in range(10_000))
    assert 900 < sampled < 1100


@pytest.mark.parametrize(("ratio", "sampled"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("trace_id", [1, 1 << 64, (1 << 128) - 1])
def test_none_and_all_are_exact(ratio: float, trace_id: int, sampled: bool) -> None:
    assert Sampling(ratio).at_head(trace_id, None) is sampled


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_callers_decision_holds(ratio: float, sampled: bool) -> None:
    assert Sampling(ratio).at_head(1, TraceContext(1, 2, sampled)) is sampled


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_sampled_request_is_exported_however_it_ended(outcome: Outcome) -> None:
    assert Sampling(0.0, 1.0).at_end(sampled=True, outcome=outcome, total_s=9.0, retried=True) == HEAD


@pytest.mark.parametrize(
    ("outcome", "total_s", "retried", "why"),
    [
        (Outcome.FINISHED, 0.5, False, ""),
        (Outcome.CANCELLED, 0.5, False, ""),
        (Outcome.CLIENT_ERROR, 0.5, False, ""),
        (Outcome.FAILED, 0.5, False, FAILED),
        (Outcome.DEADLINE, 0.5, False, FAILED),
        (Outcome.FINISHED, 1.5, False, SLOW),
        (Outcome.CANCELLED, 1.5, False, SLOW),
        (Outcome.FINISHED, 0.5, True, RETRIED),
        (Outcome.FAILED, 1.5, True, FAILED),
    ],
)
def test_a_request_that_is_not_sampled_is_exported_for_its_end(
    outcome: Outcome, total_s: float, retried: bool, why: str
) -> None:
    assert Sampling(0.0, 1.0).at_end(sampled=False, outcome=outcome, total_s=total_s, retried=retried) == why


def test_without_a_bound_no_request_is_slow() -> None:
    assert Sampling(0.0).at_end(sampled=False, outcome=Outcome.FINISHED, total_s=1e6, retried=False) == ""
