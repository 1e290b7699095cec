"""The router and its index, driven by conversations in virtual time: more hits and shorter waits than without them."""

import json
import lzma
from pathlib import Path
from random import Random

import pytest

from baton.types import Slo
from bench.routing import LLAMA_8B, faster, read
from bench.routing_nodes import Arrival, Choose, Served, by_router, in_turn, least_loaded, simulate

BLOCK_SIZE = 512


def conversations(seed: int, *, requests: int) -> list[Arrival]:
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
        arrivals.append(Arrival(now_s, len(turns) * BLOCK_SIZE - random.randrange(BLOCK_SIZE), tuple(turns)))
        if random.random() < 0.2 or len(turns) > 150:
            open_ones.remove(turns)
    return arrivals


ARRIVALS = conversations(1, requests=1500)


def served(choose: Choose, *, slo: Slo | None = None, rate: float = 1.5, nodes: int = 4) -> Served:
    return simulate(
        faster(ARRIVALS, rate),
        choose,
        LLAMA_8B,
        nodes=nodes,
        cache_tokens=500_000,
        block_size=BLOCK_SIZE,
        slo=slo or Slo(),
    )


def test_prompts_find_twice_as_many_cached_blocks_and_wait_less() -> None:
    ours, turns, load = served(by_router), served(in_turn()), served(least_loaded)
    assert ours.hit_rate() > 2 * turns.hit_rate()
    assert ours.hit_rate() > 2 * load.hit_rate()
    for share in (0.5, 0.99):
        assert ours.ttft_percentile(share) < turns.ttft_percentile(share)
        assert ours.ttft_percentile(share) < load.ttft_percentile(share)


def test_time_that_an_slo_leaves_is_spent_on_hits() -> None:
    slo = Slo(ttft_s=20.0)
    patient = served(by_router, slo=slo)
    assert patient.hit_rate() > served(by_router).hit_rate()
    assert patient.ttft_percentile(0.99) < 20.0


def test_no_node_is_left_out_under_load() -> None:
    assert served(by_router, rate=6.0).mean_s() < served(least_loaded, rate=6.0).mean_s()


def test_a_trace_is_read_as_it_is_published(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.xz"
    line = json.dumps({"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 8]})
    path.write_bytes(lzma.compress(f"{line}\n{line}\n".encode()))
    assert read(path) == [Arrival(1.5, 700, (4, 8))] * 2


@pytest.mark.parametrize("nodes", [1, 30])
def test_every_request_is_served_once(nodes: int) -> None:
    done = served(by_router, nodes=nodes, rate=10.0)
    assert len(done.ttft_s) == len(ARRIVALS)
    assert min(done.ttft_s) > 0
