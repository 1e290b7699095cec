"""The unchanged code holds every invariant under every seed. Each part of the seeds is one test, for two processes."""

import gc
from collections import Counter

import pytest

from tests.simulation.cluster import run_seed
from tests.simulation.faults import KINDS, USUAL

SEEDS = 10_000
PARTS = 20
# A run leaves one large cycle. Collecting these together takes a third off the time of all seeds.
_COLLECT_EVERY = 50


@pytest.mark.parametrize("part", range(PARTS))
def test_every_seed_holds_the_invariants(part: int) -> None:
    size = SEEDS // PARTS
    ends: Counter[str] = Counter()
    gc.disable()
    try:
        for number, seed in enumerate(range(part * size, (part + 1) * size)):
            ends.update(run_seed(seed).ends)
            if number % _COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.enable()
    # Most requests outlive the faults. If they did not, no seed would say much about tokens.
    assert ends["finished"] > 0.7 * ends.total(), f"few requests finish: {ends}"


def test_a_seed_replays_event_by_event() -> None:
    first, second = run_seed(7, traced=True), run_seed(7, traced=True)
    assert first == second
    assert len(first.trace) > 100


def test_the_trace_changes_nothing() -> None:
    traced, silent = run_seed(8, traced=True), run_seed(8)
    assert (traced.ends, traced.events, traced.seconds) == (silent.ends, silent.events, silent.seconds)


def test_every_kind_of_fault_is_drawn() -> None:
    assert USUAL.weights.keys() == KINDS.keys()
