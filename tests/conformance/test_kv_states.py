"""Every order of events around one receiver: arrivals, messages sent twice, ends of requests and copies, leases closed
and peers lost at any moment. I1, I3 and I6 hold in every world that can be reached, and no slot is lost for good.

The smaller cases run always, the larger ones with BATON_TEST_FULL=1.
"""

import os

import pytest

from tests.conformance.kv_world import World, explore

PEERS = (7, 8)
SMALL = [
    pytest.param(1, 2, 2, 1, id="one peer, a message twice"),
    pytest.param(2, 1, 1, 0, id="two peers, one slot"),
]
LARGE = [
    pytest.param(2, 1, 2, 0, id="two peers"),
    pytest.param(1, 3, 2, 1, id="one peer, three segments, a message twice"),
    pytest.param(2, 2, 2, 0, id="two peers, two segments"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peers", "segments", "slots", "repeats"), SMALL + (LARGE if os.environ.get("BATON_TEST_FULL") == "1" else [])
)
def test_no_order_of_events_breaks_an_invariant(peers: int, segments: int, slots: int, repeats: int) -> None:
    found = explore(World(PEERS[:peers], segments=segments, slots=slots, repeats=repeats))
    assert found.worlds > 300
    assert found.ends > 10


def test_the_explorer_finds_a_slot_that_is_not_given_back() -> None:
    world = World(PEERS[:1], segments=1, slots=1, repeats=0)
    world.pool.take()
    with pytest.raises(AssertionError, match="no slot is lost"):
        explore(world)
