"""Tokens come from two nodes over two connections, some of them twice. The client gets each of them once, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InternalError
from baton.gateway.request.output import TokenOrder
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2


def step_token(index: int) -> decode_pb2.StepToken:
    return decode_pb2.StepToken(token=common_pb2.Token(token_id=100 + index, index=index))


def passed_on(order: TokenOrder, *given: int, hold: bool = False) -> list[int]:
    """The indices of the tokens whose turn it is when these have come together."""
    return [token.token.index for token in order.offer(map(step_token, given), hold=hold)]


def test_tokens_in_order_pass_at_once() -> None:
    order = TokenOrder()
    assert [passed_on(order, index) for index in range(3)] == [[0], [1], [2]]
    assert order.token_ids == [100, 101, 102]


def test_a_token_that_was_passed_on_before_is_dropped() -> None:
    order = TokenOrder()
    passed_on(order, 0)
    assert passed_on(order, 0) == []
    assert order.token_ids == [100]


def test_the_decode_node_may_be_faster_than_the_first_token() -> None:
    order = TokenOrder()
    assert passed_on(order, 1, hold=True) == []
    assert passed_on(order, 2, hold=True) == []
    assert passed_on(order, 0) == [0, 1, 2]


def test_a_missing_token_that_no_node_will_send_is_an_error() -> None:
    order = TokenOrder()
    with pytest.raises(InternalError, match="token 1 of the output arrived, but token 0 was expected"):
        passed_on(order, 1)


def test_a_gap_among_early_tokens_is_an_error() -> None:
    order = TokenOrder()
    passed_on(order, 1, hold=True)
    passed_on(order, 3, hold=True)
    with pytest.raises(InternalError, match="token 3 of the output arrived, but token 2 was expected"):
        passed_on(order, 0)


def test_early_tokens_of_a_lost_node_are_forgotten() -> None:
    order = TokenOrder()
    passed_on(order, 1, hold=True)
    order.forget_early()
    assert passed_on(order, 0) == [0]


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=6))
def test_in_any_order_and_with_repeats_each_token_is_passed_on_once(order_of: list[int], repeats: list[int]) -> None:
    order = TokenOrder()
    given_indices = []
    for index in [*repeats, *order_of]:
        try:
            given_indices += passed_on(order, index, hold=True)
        except InternalError:
            # Raised only for a gap after tokens that were held; it ends the request.
            break
    assert given_indices == sorted(set(given_indices))
    assert order.token_ids[: len(given_indices)] == [100 + index for index in given_indices]


@given(st.lists(st.integers(0, 5), max_size=12))
def test_tokens_that_come_together_pass_as_they_would_one_by_one(indices: list[int]) -> None:
    together, each = TokenOrder(), TokenOrder()
    try:
        one_by_one = [passed for index in indices for passed in passed_on(each, index, hold=True)]
    except InternalError as error:
        with pytest.raises(InternalError, match=error.message):
            passed_on(together, *indices, hold=True)
    else:
        assert passed_on(together, *indices, hold=True) == one_by_one
    assert together.token_ids == each.token_ids
