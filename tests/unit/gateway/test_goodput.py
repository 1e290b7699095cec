"""Elastic nodes serve at least what the better of both fixed modes does, in the simulation of `baton plan`, with step
costs that an H200 has measured."""

from dataclasses import replace

import pytest

from baton.core.types import LocalPolicy
from baton.gateway.fleet.placement import Route
from baton.load.goals import Goal
from baton.load.lengths import Lognormal, Uniform
from baton.load.workload import LengthSpan, Synthetic
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.measured import LLAMA_8B_H200
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome

NODE = NodeSpec(LLAMA_8B_H200, step_tokens=2048)
CHAT, CHAT_TTFT_S = Synthetic(Lognormal(250, 0.8), Lognormal(200, 0.8)), 0.4
LONG, LONG_TTFT_S = Synthetic(Uniform(4096, 8192), Uniform(128, 256)), 2.0
PAIR = ClusterSpec(1, 1, NODE, NODE)


def run(
    load: Synthetic, goal: Goal, rate: float, *, seconds: float = 3.0, cluster: ClusterSpec = PAIR
) -> SimulatedOutcome:
    return simulate(cluster, goal, load.plan(rate, LengthSpan(duration_s=seconds, warmup_s=seconds), 1))


def modes(cluster: ClusterSpec) -> tuple[ClusterSpec, ClusterSpec]:
    """The same nodes colocated, and with all prompts on prefill nodes."""
    colocated = replace(cluster, prefills=0, decodes=cluster.prefills + cluster.decodes, policy=LocalPolicy.LOCAL)
    return colocated, replace(cluster, policy=LocalPolicy.STRICT)


# At each rate the better one of the fixed modes just serves 90 %, mostly the colocated one.
@pytest.mark.parametrize(
    ("load", "goal", "rate", "seconds"),
    [
        (CHAT, Goal(CHAT_TTFT_S, tpot_s=0.006), 36.0, 3.0),
        (CHAT, Goal(CHAT_TTFT_S, tpot_s=0.010), 128.0, 3.0),
        (CHAT, Goal(CHAT_TTFT_S, gap_s=0.010), 125.0, 3.0),
        (CHAT, Goal(CHAT_TTFT_S, tpot_s=0.030), 165.0, 3.0),
        (LONG, Goal(LONG_TTFT_S, tpot_s=0.007), 6.2, 15.0),
        (LONG, Goal(LONG_TTFT_S, tpot_s=0.010), 8.5, 15.0),
        (LONG, Goal(LONG_TTFT_S, tpot_s=0.050), 10.5, 15.0),
    ],
)
def test_elastic_nodes_serve_what_the_better_fixed_mode_serves(
    load: Synthetic, goal: Goal, rate: float, seconds: float
) -> None:
    elastic = run(load, goal, rate, seconds=seconds).share()
    colocated, strict = (run(load, goal, rate, seconds=seconds, cluster=mode).share() for mode in modes(PAIR))
    assert elastic >= max(0.9, max(colocated, strict) - 0.03), (elastic, colocated, strict)


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 3), (3, 1)])
def test_the_ratio_of_the_roles_does_not_matter(prefills: int, decodes: int) -> None:
    cluster = replace(PAIR, prefills=prefills, decodes=decodes)
    goal, rate = Goal(CHAT_TTFT_S, tpot_s=0.02), 300.0
    assert run(CHAT, goal, rate, seconds=2.0, cluster=cluster).share() > 0.9
    assert run(CHAT, goal, rate, seconds=2.0, cluster=modes(cluster)[1]).share() < 0.6


def test_prefill_nodes_that_do_not_decode_are_no_worse_than_static_ones() -> None:
    only_prefill = replace(PAIR, also_decodes=False)
    for load, goal, rate, seconds in (
        (CHAT, Goal(CHAT_TTFT_S, tpot_s=0.010), 100.0, 3.0),
        (LONG, Goal(LONG_TTFT_S, tpot_s=0.010), 8.0, 15.0),
    ):
        elastic = run(load, goal, rate, seconds=seconds, cluster=only_prefill)
        assert elastic.share() >= 0.9
        assert not any(job.route is Route.LOCAL and job.decode == 1 for job in elastic.jobs)


def test_without_an_slo_neither_first_tokens_nor_further_ones_suffer() -> None:
    for load, rate, seconds in ((CHAT, 130.0, 3.0), (LONG, 7.0, 15.0)):
        elastic = run(load, Goal(), rate, seconds=seconds)
        better = min((run(load, Goal(), rate, seconds=seconds, cluster=mode) for mode in modes(PAIR)), key=_end_s)
        assert _end_s(elastic) <= 1.05 * _end_s(better)
        assert elastic.mean_ttft_s <= better.mean_ttft_s + 0.1


@pytest.mark.parametrize("error", [0.7, 1.3])
def test_costs_that_are_wrong_by_30_percent_still_share_the_load(error: float) -> None:
    wrong = replace(NODE, reports_factor=error)
    cluster = replace(PAIR, prefill=wrong, decode=wrong)
    assert run(CHAT, Goal(CHAT_TTFT_S, tpot_s=0.02), 135.0, cluster=cluster).share() >= 0.9
    assert run(LONG, Goal(LONG_TTFT_S, tpot_s=0.02), 8.5, seconds=15.0, cluster=cluster).share() >= 0.9


def test_twice_the_load_is_served_no_worse_than_by_colocated_nodes() -> None:
    goal = Goal(CHAT_TTFT_S, tpot_s=0.02)
    elastic, colocated = (run(CHAT, goal, 300.0, seconds=2.0, cluster=each) for each in (PAIR, modes(PAIR)[0]))
    assert elastic.mean_ttft_s <= 1.2 * colocated.mean_ttft_s


def _end_s(outcome: SimulatedOutcome) -> float:
    return sum(job.last_s - job.arrived_s for job in outcome.counted)
