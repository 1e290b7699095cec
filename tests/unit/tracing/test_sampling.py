"""Which traces are exported: some by their id or their caller's wish, and those that failed, were slow or retried."""

import random

import pytest

from baton.core.types import Slo
from baton.metrics.metric import Outcome
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
    assert Sampling(0.0).at_end(sampled=True, outcome=outcome, slow=True, retried=True) == HEAD


@pytest.mark.parametrize(
    ("outcome", "slow", "retried", "why"),
    [
        (Outcome.FINISHED, False, False, ""),
        (Outcome.CANCELLED, False, False, ""),
        (Outcome.CLIENT_ERROR, False, False, ""),
        (Outcome.FAILED, False, False, FAILED),
        (Outcome.DEADLINE, False, False, FAILED),
        (Outcome.FINISHED, True, False, SLOW),
        (Outcome.CANCELLED, True, False, SLOW),
        (Outcome.FINISHED, False, True, RETRIED),
        (Outcome.FAILED, True, True, FAILED),
    ],
)
def test_a_request_that_is_not_sampled_is_exported_for_its_end(
    outcome: Outcome, slow: bool, retried: bool, why: str
) -> None:
    assert Sampling(0.0).at_end(sampled=False, outcome=outcome, slow=slow, retried=retried) == why


@pytest.mark.parametrize(
    ("slo", "ttft_s", "decode_s", "tokens", "missed"),
    [
        (Slo(1.0, 0.1), 1.0, 0.9, 10, False),
        (Slo(1.0, 0.1), 1.1, 0.9, 10, True),
        (Slo(1.0, 0.1), 1.0, 1.0, 10, True),
        (Slo(tpot_s=0.1), 9.0, 9.0, 1, False),
        (Slo(ttft_s=1.0), 0.5, 1e6, 10, False),
    ],
)
def test_a_request_is_slow_if_it_missed_its_ttft_or_its_tpot(
    slo: Slo, ttft_s: float, decode_s: float, tokens: int, missed: bool
) -> None:
    assert slo.missed(ttft_s, decode_s, tokens) is missed


def test_without_a_bound_no_request_is_slow() -> None:
    assert not Slo().missed(1e6, 1e6, 10)
