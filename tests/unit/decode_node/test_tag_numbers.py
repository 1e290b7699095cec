"""No two peers have the same sender number, and a number is used again as late as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Overloaded
from decode_node.tag_numbers import SenderNumbers
from kvtransfer.segments import SENDER_BITS, Tag

LAST = (1 << SENDER_BITS) - 1


@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=40))
def test_no_two_peers_share_a_number(asked: list[tuple[int, bool]]) -> None:
    numbers = SenderNumbers()
    drawn: dict[int, range] = {}
    for count, gives_back in asked:
        if gives_back and drawn:
            first = min(drawn)
            numbers.give_back(first)
            del drawn[first]
        try:
            first = numbers.draw(count)
        except Overloaded:
            continue
        drawn[first] = range(first, first + count)
        assert Tag(drawn[first][0], 0, 0).sender >= 1
        assert Tag(drawn[first][-1], 0, 0).sender <= LAST
    had = [number for each in drawn.values() for number in each]
    assert len(had) == len(set(had))


def test_a_number_given_back_is_the_last_to_be_drawn_again() -> None:
    numbers = SenderNumbers()
    drawn = []
    for _ in range(LAST // 8):
        drawn.append(numbers.draw(8))
        numbers.give_back(drawn[-1])
    assert len(set(drawn)) == len(drawn)
    assert numbers.draw(8) == drawn[0]


def test_when_all_numbers_are_drawn_the_next_peer_is_refused() -> None:
    numbers = SenderNumbers()
    first = numbers.draw(LAST)
    with pytest.raises(Overloaded):
        numbers.draw(1)
    numbers.give_back(first)
    assert numbers.draw(LAST) == first
