"""The unchanged code holds every invariant under every seed. The seeds are split into several tests, so that two
processes can share them.

`make test` runs the first 2,000: two and a half times as many as any planted fault needs to be caught. The others are a
sweep. `make simulate` runs all 10,000."""

from collections import Counter
from typing import get_args

import pytest

from baton.gateway.core import events as gateway_events
from baton.gateway.request import commands as gateway_commands
from decode_node import commands as decode_commands
from decode_node import events as decode_events
from prefill_node import commands as prefill_commands
from prefill_node import events as prefill_events
from tests.simulation.cluster import run_seed
from tests.simulation.faults import BUSY_PREFILL_NODES, KINDS, USUAL
from tests.simulation.many import run_seeds
from tests.simulation.mutants import MUTANTS

SEEDS = 10_000
SEEDS_ALWAYS = 2_000
PARTS = 20
PART_SEEDS = SEEDS // PARTS
PARTS_ALWAYS = SEEDS_ALWAYS // PART_SEEDS


@pytest.mark.parametrize(
    "part",
    [*range(PARTS_ALWAYS), *(pytest.param(part, marks=pytest.mark.sweep) for part in range(PARTS_ALWAYS, PARTS))],
)
def test_every_seed_holds_the_invariants(part: int) -> None:
    ends = Counter(
        end for outcome in run_seeds(range(part * PART_SEEDS, (part + 1) * PART_SEEDS)) for end in outcome.ends
    )
    # Most requests outlive the faults. If they did not, no seed would say much about tokens.
    assert ends["finished"] > 0.7 * ends.total(), f"few requests finish: {ends}"


def test_every_kind_of_fault_hits_prefill_nodes_while_they_also_decode() -> None:
    hit = frozenset[str]().union(*(run_seed(seed, BUSY_PREFILL_NODES).hit_both for seed in range(140)))
    assert hit == BUSY_PREFILL_NODES.weights.keys()


def test_every_event_and_command_of_the_machines_occurs() -> None:
    seen = frozenset[type]().union(*(run_seed(seed).kinds for seed in range(300)))
    events = gateway_events.Event | prefill_events.Event | decode_events.Event
    commands = gateway_commands.Command | prefill_commands.Command | decode_commands.Command
    kinds = {*get_args(events), *get_args(commands)}
    # The simulated transfer raises no errors of its own.
    assert kinds - seen == {prefill_events.StopFailed, decode_events.LeaseFailed}


def test_a_seed_replays_event_by_event() -> None:
    first, second = run_seed(7, traced=True), run_seed(7, traced=True)
    assert first == second
    assert len(first.trace) > 100


def test_the_trace_changes_nothing() -> None:
    traced, silent = run_seed(8, traced=True), run_seed(8)
    assert (traced.ends, traced.events, traced.seconds) == (silent.ends, silent.events, silent.seconds)


def test_no_planted_fault_needs_as_many_seeds_as_always_run() -> None:
    assert max(mutant.seeds for mutant in MUTANTS.values()) < SEEDS_ALWAYS


def test_every_kind_of_fault_is_drawn() -> None:
    assert USUAL.weights.keys() == KINDS.keys()
