"""Every order of events around one receiver: arrivals, messages sent twice and late, ends of requests and copies,
leases closed (cancelled or timed out) and peers lost at any moment. I1, I3 and I6 hold in every state that can be
reached, no slot is lost for good, every lease ends, and every refusal has its reason.

Two peers, two leases and three segments always; with a message sent twice, and with slots enough for two messages of
each peer, with BATON_TEST_FULL=1 (minutes).
"""

import os
import random
from collections import deque

import pytest

from tests.conformance import kv_plants as plants
from tests.conformance.kv_explore import explore
from tests.conformance.kv_rules import close, look, lose
from tests.conformance.kv_sides import Side, choices
from tests.conformance.kv_world import KEPT, LEFT_OUT, State, World, passing_of

# Peers and leases, segments of each, slots, messages sent twice; then the least number of states: a change of the
# receiver may reduce it, but so would an explorer that overlooks states.
ALWAYS = [
    pytest.param(1, 3, 2, 1, 1000, id="1 peer x 3 segments, 1 sent twice"),
    pytest.param(2, 2, 1, 0, 1000, id="2 peers x 2 segments, one slot for both"),
    pytest.param(2, 3, 2, 0, 14000, id="2 peers x 3 segments"),
]
FULL = [
    pytest.param(2, 2, 4, 0, 7000, id="2 peers x 2 segments, 2 slots each"),
    pytest.param(2, 3, 2, 1, 80000, id="2 peers x 3 segments, 1 sent twice"),
    pytest.param(2, 3, 4, 0, 120000, id="2 peers x 3 segments, 2 slots each"),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("peers", "segments", "slots", "repeats", "states"),
    ALWAYS + (FULL if os.environ.get("BATON_TEST_FULL") == "1" else []),
)
def test_no_order_of_events_breaks_an_invariant(
    peers: int, segments: int, slots: int, repeats: int, states: int
) -> None:
    found = explore(World(peers, segments=segments, slots=slots), repeats=repeats)
    assert found.states >= states
    assert found.ends > 10


@pytest.mark.parametrize(
    ("plant", "match"),
    [
        (plants.slot_is_not_given_back, "no slot is lost"),
        (plants.slot_is_not_given_back_when_cancelled, "no slot is lost"),
        (plants.slots_of_lost_peers_are_given_back_at_once, "not given back while it is used"),
        (plants.slot_is_given_back_before_the_scatter, "none is given back before its message is over"),
        (plants.parked_messages_of_lost_peers_are_kept, "I6"),
        (plants.lost_peers_hold_their_share_for_good, "I6"),
        (plants.close_waits_for_nothing, "I1"),
        (plants.scatter_begins_after_close, "I3: scattered after its lease was closed"),
        (plants.claim_comes_before_the_check, "I1: a lease's end waits for its scatters"),
        (plants.duplicates_are_taken, "every refusal is counted, with its reason"),
        (plants.duplicates_are_scattered, "I3: written to twice"),
        (plants.closed_lease_is_filled, "its owner no longer waits"),
        (plants.lease_is_filled_one_segment_early, "I2"),
        (plants.refusals_are_not_counted, "every refusal is counted"),
        (plants.parked_messages_are_forgotten, "it waits although there is room"),
        (plants.last_peer_may_hold_no_slot, "it waits although there is room"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant: plants.Plant, match: str) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=match):
        explore(World(2, segments=2, slots=2), repeats=1)


def test_a_state_has_every_attribute_that_matters() -> None:
    """New attributes of the code under test belong into the state, or into the list of omitted attributes."""
    world = World(1, segments=1, slots=1)
    arrive, receiver = choices(world.save(0).sides[0], 0)[-1], world.receiver
    world.load(State((arrive.side,), (), 0))
    look(world)
    lease = receiver._leases._leases[0]
    for thing in (receiver, receiver._receptions[0], receiver._leases, lease, lease.coverage, world.pool, world.ledger):
        assert vars(thing).keys() == KEPT[type(thing)] | LEFT_OUT[type(thing)]


@pytest.mark.parametrize("seed", range(40))
def test_a_receiver_loaded_with_a_state_continues_like_one_that_reached_it(seed: int) -> None:
    rng = random.Random(seed)
    lived, loaded = World(2, segments=3, slots=4), World(2, segments=3, slots=4)
    repeats = 1
    for _ in range(40):
        before = lived.save(repeats)
        chosen = [rng.choice(choices(side, 0 if index else repeats)) for index, side in enumerate(before.sides)]
        repeats -= chosen[0].repeats
        sides = tuple(choice.side for choice in chosen)
        loaded.load(State(sides, before.parked, repeats))
        for index, side in enumerate(sides):
            _let_happen(lived, index, before.sides[index], side)
        open_leases = [index for index, side in enumerate(sides) if not side.is_called]
        links = [index for index, side in enumerate(sides) if side.is_there]
        call, on = rng.choice([(close, open_leases), (lose, links), *[(None, [])] * 12])
        for world in (lived, loaded):
            if call is not None and on:
                call(world, on[0])
            look(world)
        assert lived.save(repeats) == loaded.save(repeats)


def _let_happen(world: World, index: int, before: Side, after: Side) -> None:
    """Applies a choice to the objects as it applies to a state."""
    stages = deque(after.under_way)  # in order of number and stage
    receptions = [passing_of(item) for item in world.receiver._receptions]
    for passing in sorted(receptions, key=lambda passing: (passing.message.number, passing.stage)):
        if passing.message.side == index:
            number, passing.stage = stages.popleft()
            assert number == passing.message.number
    world.blocks[index], world.sent[index] = after.blocks, after.sent
    queue = world.surroundings.queues[world.numbers[index]]
    queue.extend(world.messages[index][number - 1] for number in after.queue[len(before.queue) :])
