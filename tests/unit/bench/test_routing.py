"""The router and its index, driven by conversations in virtual time: more hits and shorter waits than without them."""

from random import Random

import pytest

from baton.gateway.fleet.placement import place
from baton.load.workload import PlannedRequest
from baton.planner.baselines import round_robin, shortest_queue
from baton.planner.cluster import Choose
from baton.planner.outcome import SimulatedOutcome
from bench.routing import LLAMA_8B, faster, prefilled

BLOCK_SIZE = 512


def conversations(seed: int, *, requests: int) -> list[PlannedRequest]:
    """Turns of conversations that come and go, as in chats: each turn repeats all turns before it, and half of all
    conversations begin with one of three long system prompts."""
    random, blocks = Random(seed), iter(range(1 << 30))
    systems = [[next(blocks) for _ in range(8)] for _ in range(3)]
    open_ones: list[list[int]] = []
    arrivals, now_s = [], 0.0
    for _ in range(requests):
        now_s += random.expovariate(3.4)
        if len(open_ones) < 60 or random.random() < 0.3:
            open_ones.append(list(random.choice(systems)) if random.random() < 0.5 else [])
        turns = random.choice(open_ones)
        turns += [next(blocks) for _ in range(1 + int(random.expovariate(1 / 8)))]
        tokens = len(turns) * BLOCK_SIZE - random.randrange(BLOCK_SIZE)
        arrivals.append(PlannedRequest(0, now_s, tokens, 1, tuple(turns), BLOCK_SIZE))
        if random.random() < 0.2 or len(turns) > 150:
            open_ones.remove(turns)
    return arrivals


ARRIVALS = conversations(1, requests=1500)


def served(
    choose: Choose = place, *, ttft_s: float | None = None, rate: float = 1.5, nodes: int = 4
) -> SimulatedOutcome:
    requests = faster(ARRIVALS, rate)
    return prefilled(requests, LLAMA_8B, nodes=nodes, cache_tokens=500_000, ttft_s=ttft_s, choose=choose)


def hits(outcome: SimulatedOutcome) -> float:
    """In the second half, when caches are full."""
    return outcome.hit_share(outcome.jobs[len(outcome.jobs) // 2 :])


def test_prompts_find_twice_as_many_cached_blocks_and_wait_less() -> None:
    ours, turns, load = served(), served(round_robin()), served(shortest_queue)
    assert hits(ours) > 2 * hits(turns)
    assert hits(ours) > 2 * hits(load)
    for share in (0.5, 0.99):
        assert ours.ttft_s(share) < turns.ttft_s(share)
        assert ours.ttft_s(share) < load.ttft_s(share)


def test_time_that_an_slo_leaves_is_spent_on_hits() -> None:
    patient = served(ttft_s=20.0)
    assert hits(patient) > hits(served())
    assert patient.ttft_s(0.99) < 20.0


def test_no_node_is_left_out_under_load() -> None:
    assert served(rate=6.0).mean_ttft_s < served(shortest_queue, rate=6.0).mean_ttft_s


@pytest.mark.parametrize("nodes", [1, 30])
def test_every_request_is_served_once(nodes: int) -> None:
    done = served(nodes=nodes, rate=10.0)
    assert all(job.arrived_s < job.first_s < float("inf") for job in done.jobs)
