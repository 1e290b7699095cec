"""The simulated cluster against times that can be computed by hand, and against simulating every step."""

import random
from dataclasses import replace

import pytest

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.core.pull_costs import PullCosts
from baton.core.types import LocalPolicy
from baton.gateway.fleet.placement import Route
from baton.load.goals import Goal
from baton.load.lengths import Uniform
from baton.load.workload import LengthSpan, PlannedRequest, Synthetic
from baton.planner.baselines import least_loaded, round_robin
from baton.planner.cluster import ClusterSpec, Simulation, simulate
from baton.planner.job import PlanJob
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome

COSTS = StepCosts(((1, 4e-3), (256, 8e-3), (4096, 100e-3)), key_s=3e-8, pair_s=6e-10)
NODE = NodeSpec(COSTS, step_tokens=1024, kv_tokens=1_000_000)
GOAL = Goal(ttft_s=1.0, tpot_s=0.02)
PAIR = ClusterSpec(1, 1, NODE, NODE, LocalPolicy.STRICT)


def run(spec: ClusterSpec, *requests: PlannedRequest, goal: Goal = GOAL) -> SimulatedOutcome:
    return simulate(spec, goal, requests)


def request(at_s: float, prompt: int, output: int, ids: tuple[int, ...] = (), tokens: int = 0) -> PlannedRequest:
    return PlannedRequest(0, at_s, prompt, output, ids, tokens)


def test_one_request_takes_its_chunks_its_transfer_and_its_decode_steps() -> None:
    (job,) = run(PAIR, request(0.0, 2000, 11)).jobs
    prompt_s = COSTS.prompt_s(0, 2000, step_tokens=1024)
    assert job.ttft_s == pytest.approx(PAIR.host.hop_s + prompt_s)
    # The first chunk's KV is sent while the second one computes.
    sent_s = 976 * NODE.kv_bytes_per_token / PAIR.link_bytes_per_s + PAIR.link_latency_s + PAIR.host.hand_over_s
    steps_s = sum(COSTS.seconds(StepWork(1, 2001 + step)) for step in range(10))
    assert job.last_s - job.first_s == pytest.approx(sent_s + steps_s)
    assert job.gap_quantile_s(1.0) == pytest.approx(sent_s + COSTS.seconds(StepWork(1, 2001)))


def test_a_local_prompt_is_a_step_of_the_decode_node() -> None:
    spec = replace(PAIR, prefills=0, policy=LocalPolicy.LOCAL)
    (job,) = run(spec, request(0.0, 500, 2)).jobs
    assert job.route is Route.LOCAL
    assert job.ttft_s == pytest.approx(spec.host.hop_s + COSTS.seconds(StepWork(0, 0, 500, chunk_pairs(0, 500))))
    assert job.tpot_s == pytest.approx(COSTS.seconds(StepWork(1, 501)))


def test_short_prompts_stay_on_the_decode_node_where_it_is_told_so() -> None:
    spec = replace(PAIR, local_tokens=32)
    outcome = run(spec, request(0.0, 32, 4), request(1.0, 33, 4))
    assert [job.route for job in outcome.jobs] == [Route.LOCAL, Route.REMOTE]


def test_streams_wait_for_a_whole_prompt_unless_steps_are_bounded() -> None:
    colocated = replace(PAIR, prefills=0, policy=LocalPolicy.LOCAL)
    eager = replace(colocated, decode=replace(NODE, bounded=False, mixed_floor_s=0.04))
    load = request(0.0, 100, 200), request(0.3, 4000, 10)
    (stream, _), (stalled, _) = run(colocated, *load).jobs, run(eager, *load).jobs
    assert GOAL.tpot_s is not None
    assert stream.gap_quantile_s(1.0) <= 0.9 * GOAL.tpot_s + 1e-9
    assert stalled.gap_quantile_s(1.0) >= 0.04


def test_cached_pieces_of_a_prompt_are_not_computed_again() -> None:
    prompt = (1, 2, 3), 512
    outcome = run(PAIR, request(0.0, 1536, 1, *prompt), request(1.0, 1600, 1, *prompt))
    first, second = outcome.jobs
    assert (first.cached, second.cached) == (0, 1536)
    assert second.ttft_s == pytest.approx(PAIR.host.hop_s + COSTS.prompt_s(1536, 1600, step_tokens=1024))
    assert outcome.hit_share() == 0.5


def test_a_prompt_that_cannot_be_in_time_goes_after_those_that_can() -> None:
    load = request(0.0, 5000, 1), request(0.001, 20000, 1), request(0.002, 100, 1)
    _, late, short = run(PAIR, *load, goal=Goal(ttft_s=0.3)).jobs
    assert short.ttft_s < 0.3
    assert short.first_s < late.first_s


def test_requests_wait_for_room_in_the_cache() -> None:
    spec = replace(PAIR, decode=replace(NODE, kv_tokens=1600))
    first, second = run(spec, request(0.0, 1000, 500), request(0.0, 1000, 500)).jobs
    assert second.first_s > first.last_s


def test_seats_limit_the_rows() -> None:
    spec = replace(PAIR, decode=replace(NODE, seats=2))
    outcome = run(spec, *(request(0.0, 16, 100) for _ in range(6)))
    ends = sorted(job.last_s for job in outcome.jobs)
    assert ends[2] > ends[1] + 0.3
    assert ends[4] > ends[3] + 0.3


def test_equal_steps_taken_together_give_what_single_steps_give() -> None:
    """A node whose arrivals interrupt its steps ends each request when step by step it would end."""
    rng = random.Random(5)
    load = [request(0.013 * number, rng.randint(1, 40), rng.randint(2, 60)) for number in range(80)]
    spec = replace(PAIR, prefills=0, policy=LocalPolicy.LOCAL)

    class OneByOne(Simulation):
        """Interrupts all runs every millisecond."""

        def run(self) -> SimulatedOutcome:
            for tick in range(2000):
                self._at(0.001 * tick, self._interrupt)
            return super().run()

        def _interrupt(self, now_s: float) -> None:
            for node in self.nodes:
                self._go(node, node.arrival(now_s))

    together, single = run(spec, *load), OneByOne(spec, GOAL, load).run()
    for one, other in zip(together.jobs, single.jobs, strict=True):
        assert (one.first_s, one.last_s) == pytest.approx((other.first_s, other.last_s))
        assert one.gap_quantile_s(0.99) == pytest.approx(other.gap_quantile_s(0.99), rel=1e-3)


@pytest.mark.parametrize("policy", [LocalPolicy.ELASTIC, LocalPolicy.STRICT])
def test_every_request_ends_and_equal_loads_give_equal_outcomes(policy: LocalPolicy) -> None:
    spec = ClusterSpec(2, 2, NODE, replace(NODE, kv_tokens=60_000, seats=8), policy)
    planned = Synthetic(Uniform(1, 6000), Uniform(1, 200)).plan(12.0, LengthSpan(requests=200), 3)
    first, second = simulate(spec, GOAL, planned), simulate(spec, GOAL, planned)
    for job, other, asked in zip(first.jobs, second.jobs, planned, strict=True):
        assert asked.at_s < job.first_s <= job.last_s < float("inf")
        assert (job.first_s, job.last_s, job.route) == (other.first_s, other.last_s, other.route)


def test_overload_fills_the_bottleneck_only() -> None:
    planned = Synthetic(Uniform(4000, 4000), Uniform(4, 8)).plan(30.0, LengthSpan(requests=300), 1)
    outcome = simulate(replace(PAIR, policy=LocalPolicy.STRICT), GOAL, planned)
    assert outcome.prefill_busy > 0.95
    assert outcome.decode_busy < 0.95
    assert outcome.share() < 0.5


def test_other_choices_can_be_simulated() -> None:
    spec = ClusterSpec(2, 2, NODE, NODE, LocalPolicy.STRICT)
    load = [request(0.5 * number, 100, 2) for number in range(4)]
    assert [job.prefill for job in simulate(spec, GOAL, load, choose=round_robin()).jobs] == [2, 3, 2, 3]
    assert {job.prefill for job in simulate(spec, GOAL, load, choose=least_loaded).jobs} == {2, 3}


# ---- host memory and pulls

# Of 512-token pieces, the cache holds 8 and host memory 100.
KEEPING = replace(NODE, kv_tokens=8 * 512, host_tokens=100 * 512)
IDS = tuple(range(8))


def computed_s(job: PlanJob) -> float:
    """Time of the part of a prompt that was not cached."""
    return COSTS.prompt_s(job.cached, job.prompt, step_tokens=1024)


def test_a_prompt_that_only_host_memory_has_takes_its_load_and_its_last_token() -> None:
    spec = replace(PAIR, prefills=0, decode=KEEPING, policy=LocalPolicy.LOCAL)
    others = tuple(range(100, 108))
    first, _, again = run(
        spec, request(0.0, 4096, 2, IDS, 512), request(2.0, 4096, 2, others, 512), request(4.0, 4096, 2, IDS, 512)
    ).jobs
    assert (first.cached, again.cached) == (0, 4095)
    assert again.ttft_s == pytest.approx(spec.host.hop_s + 4096 * KEEPING.load_token_s + computed_s(again))


@pytest.mark.parametrize(("byte_s", "pulls"), [(1e-10, True), (1e-8, False)])
def test_a_node_pulls_what_another_one_has_where_that_is_faster_than_computing(byte_s: float, pulls: bool) -> None:
    """One node has the prompt, and is busy with a long one when it comes again."""
    node = replace(KEEPING, kv_tokens=100_000, pull_costs=PullCosts(0.004, byte_s))
    spec = replace(PAIR, prefills=0, decodes=2, decode=node, policy=LocalPolicy.LOCAL)
    requests = [request(0.0, 4096, 2, IDS, 512), request(2.0, 4096, 2, IDS, 512), request(2.0, 4096, 2, IDS, 512)]
    simulation = Simulation(spec, GOAL, requests)
    first, *again = simulation.run().jobs
    other = next((job for job in again if job.decode != first.decode), None)
    assert other is not None
    assert simulation.pulled_tokens == (4096 if pulls else 0)
    if pulls:
        fetched_s = node.pull_costs.seconds(4096 * node.kv_bytes_per_token) + 4096 * node.load_token_s
        assert other.ttft_s == pytest.approx(spec.host.hop_s + fetched_s + computed_s(other))
    else:
        assert other.cached == 0


def test_nodes_without_host_memory_pull_nothing() -> None:
    node = replace(KEEPING, host_tokens=0, kv_tokens=100_000, pull_costs=PullCosts(0.0, 1e-12))
    spec = replace(PAIR, prefills=0, decodes=2, decode=node, policy=LocalPolicy.LOCAL)
    simulation = Simulation(spec, GOAL, [request(float(at), 4096, 2, IDS, 512) for at in (0, 2, 2)])
    simulation.run()
    assert simulation.pulled_tokens == 0
