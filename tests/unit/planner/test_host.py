"""Times of hosts and gateways in the simulation, against what can be computed by hand."""

from dataclasses import replace

import pytest

from baton.core.costs import StepWork
from baton.core.types import LocalPolicy
from baton.load.goals import Goal
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.host import HostTimes
from baton.planner.measured import SERVED_HOST
from baton.planner.outcome import SimulatedOutcome
from tests.unit.planner.test_cluster import COSTS, NODE, request

NO_SLO = Goal()
PAIR = ClusterSpec(1, 1, NODE, NODE, LocalPolicy.STRICT, host=HostTimes(hop_s=0.0, hand_over_s=0.0))
ALONE = replace(PAIR, prefills=0, policy=LocalPolicy.LOCAL)


def with_host(spec: ClusterSpec, **times: float) -> ClusterSpec:
    return replace(spec, host=HostTimes(**{**vars(spec.host), **times}))


def run(spec: ClusterSpec, *requests: tuple[float, int, int]) -> SimulatedOutcome:
    return simulate(spec, NO_SLO, [request(1.0 + at_s, prompt, output) for at_s, prompt, output in requests])


def test_a_request_that_comes_after_the_launch_of_the_next_step_misses_it() -> None:
    stream_s = COSTS.prompt_s(0, 100, step_tokens=1024)
    # The tenth step of the stream runs.
    middle_s = stream_s + sum(COSTS.seconds(StepWork(1, 101 + step)) for step in range(9)) + 0.003
    load = (0.0, 100, 200), (middle_s, 20, 2)
    early, late = run(ALONE, *load).jobs[1], run(with_host(ALONE, lead_s=0.002), *load).jobs[1]
    assert late.first_s - early.first_s == pytest.approx(COSTS.seconds(StepWork(1, 111)), rel=0.01)


def test_a_prompt_that_finds_its_node_empty_waits_for_no_launch() -> None:
    first, second = run(with_host(PAIR, lead_s=0.002), (0.0, 100, 1), (1.0, 100, 1)).jobs
    assert [first.ttft_s, second.ttft_s] == pytest.approx([COSTS.prompt_s(0, 100, step_tokens=1024)] * 2)


def test_a_request_decodes_in_the_step_after_its_own_prompt() -> None:
    (job,) = run(with_host(ALONE, lead_s=0.002), (0.0, 100, 3)).jobs
    assert job.second_s - job.first_s == pytest.approx(COSTS.seconds(StepWork(1, 101)))


def test_a_step_takes_the_host_time_of_its_rows_at_least() -> None:
    jobs = run(with_host(ALONE, row_s=0.01), *((0.0, 10, 20) for _ in range(3))).jobs
    assert jobs[0].gap_quantile_s(0.9) == pytest.approx(0.03)


def test_later_slices_of_a_prompt_take_longer() -> None:
    (job,) = run(with_host(PAIR, later_token_s=1e-5), (0.0, 1500, 1)).jobs
    assert job.ttft_s == pytest.approx(COSTS.prompt_s(0, 1500, step_tokens=1024) + (1500 - 1024) * 1e-5)


def test_some_tokens_of_each_request_are_late() -> None:
    spec = with_host(ALONE, stall_share=0.02, stall_s=0.004)
    (smooth,), (stalled,) = run(ALONE, (0.0, 10, 201)).jobs, run(spec, (0.0, 10, 201)).jobs
    assert stalled.tpot_s == smooth.tpot_s
    assert stalled.gap_quantile_s(0.9) == pytest.approx(smooth.gap_quantile_s(0.9), rel=0.01)
    assert stalled.gap_quantile_s(0.99) == pytest.approx(smooth.gap_quantile_s(0.99) + 0.004, rel=0.01)
    assert sum(count for _, count in stalled.gaps()) == pytest.approx(200)


def test_a_message_waits_longer_at_a_busy_gateway_and_shorter_at_several() -> None:
    times = HostTimes(token_s=50e-6)
    idle, busy = times.wait_s([(0, 1.0)]), times.wait_s([(80, 0.008)])
    assert idle == 0.0
    assert busy == pytest.approx(0.5 * 80 * 50e-6 / 2)  # the gateway sends for 4 of 8 ms
    assert replace(times, gateways=2).wait_s([(80, 0.008)]) == pytest.approx(busy / 4)
    assert replace(times, token_s=1.0).wait_s([(80, 0.008)]) == pytest.approx(80 / 2)


def test_the_served_times_are_part_of_a_plan_and_make_first_tokens_later() -> None:
    load = [(0.02 * number, 200, 50) for number in range(100)]
    plain, served = run(PAIR, *load), run(replace(PAIR, host=SERVED_HOST), *load)
    assert 0.006 < served.ttft_s(0.5) - plain.ttft_s(0.5) < 0.02


@pytest.mark.parametrize(("spec", "later_s"), [(PAIR, 0.003), (ALONE, 0.0)])
def test_a_prompt_of_a_prefill_node_waits_for_room_on_the_decode_node_first(spec: ClusterSpec, later_s: float) -> None:
    (early,), (late,) = run(spec, (0.0, 100, 2)).jobs, run(with_host(spec, remote_s=0.003), (0.0, 100, 2)).jobs
    assert late.ttft_s - early.ttft_s == pytest.approx(later_s)
