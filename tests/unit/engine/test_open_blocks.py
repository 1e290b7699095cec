"""The open blocks that a node reports are the ones that its admission gives a new request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Overloaded
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import BLOCK_SIZE, make, request, step

BLOCKS = 12


def needs(blocks: int) -> int:
    """Tokens of a request that needs so many blocks, with the first decoded token."""
    return blocks * BLOCK_SIZE - 1


def reserves(scheduler: Scheduler, blocks: int) -> bool:
    """Whether a new request of so many blocks finds them; it holds none afterwards."""
    try:
        scheduler.reservations.reserve(request("probe", needs(blocks)), 0.0)
    except Overloaded:
        return False
    scheduler.abort("probe")
    return True


def test_free_blocks_of_two_ranks_do_not_add_up() -> None:
    scheduler = make(owners=2, num_blocks=BLOCKS, prefix_cache=False)
    for name in "ab":
        scheduler.reservations.reserve(request(name, needs(8)), 0.0)
    load = scheduler.load()
    assert (load.blocks_free, load.blocks_open) == (8, (4, 4))
    assert (reserves(scheduler, 4), reserves(scheduler, 5)) == (True, False)


def test_requests_that_decode_or_wait_get_their_blocks_first() -> None:
    scheduler = make(num_blocks=BLOCKS, prefix_cache=False, tokens=64)
    scheduler.submit(request("a", needs(4)), 0.0)
    step(scheduler)
    assert scheduler.load().blocks_open == (7,), "8 are free, and the next token of `a` may need one"
    scheduler.submit(request("b", needs(9)), 0.0)
    assert scheduler.load().blocks_open == (0,)
    assert not reserves(scheduler, 1)


def test_streams_of_a_node_that_computes_prompts_for_others_have_a_share() -> None:
    scheduler = make(num_blocks=BLOCKS, stream_share=0.75, prefix_cache=False)
    assert scheduler.load().blocks_open == (12,), "a stream alone may have all"
    scheduler.reservations.reserve(request("a", needs(4)), 0.0)
    assert scheduler.load().blocks_open == (5,)
    assert (reserves(scheduler, 5), reserves(scheduler, 6)) == (True, False)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([0.75, 1.0]),
    st.lists(
        st.tuples(st.sampled_from(["reserve", "submit", "prompt", "step", "abort"]), st.integers(1, 6)), max_size=12
    ),
)
def test_the_largest_number_fits_and_one_more_block_does_not(
    owners: int, share: float, changes: list[tuple[str, int]]
) -> None:
    scheduler = make(owners=owners, num_blocks=BLOCKS, stream_share=share, prefix_cache=False, requests=32, tokens=64)
    for number, (change, size) in enumerate(changes):
        name = f"r{number}"
        try:
            if change == "reserve":
                scheduler.reservations.reserve(request(name, needs(size)), 0.0)
            elif change == "submit":
                scheduler.submit(request(name, needs(size)), 0.0)
            elif change == "prompt":
                scheduler.submit(request(name, needs(size), prefill_only=True), 0.0)
            elif change == "abort":
                scheduler.abort(f"r{size}")
            elif scheduler.load().requests_running or scheduler.load().requests_waiting:
                step(scheduler)
        except Overloaded:
            pass
    most = max(scheduler.load().blocks_open)
    assert most == 0 or reserves(scheduler, most)
    assert most == BLOCKS or not reserves(scheduler, most + 1)


def test_a_model_whose_states_have_no_slot_left_is_full() -> None:
    scheduler = make(num_blocks=BLOCKS, prefix_cache=False, state_slots=1)
    scheduler.reservations.reserve(request("a", needs(2)), 0.0)
    assert scheduler.load().blocks_open == (0,)
    with pytest.raises(Overloaded):
        scheduler.reservations.reserve(request("b", needs(2)), 0.0)
