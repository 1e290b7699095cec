"""Token ids are copied and checked as a whole, from every form in which they come."""

from array import array
from collections.abc import Sequence

import pytest

from baton.core.errors import InvalidRequest
from baton.core.token_ids import first_outside, token_array
from baton.protos.v1 import generation_pb2 as pb

IDS = [5, 0, 127_999, 2**31 - 1]


@pytest.mark.parametrize("ids", [IDS, tuple(IDS), array("i", IDS), pb.TokenIds(ids=IDS).ids, range(7)])
def test_ids_of_every_form_become_an_array_of_their_own(ids: Sequence[int]) -> None:
    tokens = token_array(ids, field="prompt")
    assert (tokens.typecode, tokens.tolist()) == ("i", list(ids))
    assert tokens is not ids


def test_no_ids_are_an_empty_array() -> None:
    assert token_array(pb.TokenIds().ids, field="prompt") == array("i")


@pytest.mark.parametrize("wrong", [2**31, 2**32 - 1])
def test_an_id_that_no_vocabulary_has_is_refused_by_its_own_value(wrong: int) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt has token id {wrong}; allowed: 0 to 99$") as refused:
        token_array(pb.TokenIds(ids=[1, wrong]).ids, field="prompt", vocab_size=100)
    assert refused.value.value == str(wrong)


@pytest.mark.parametrize("make", [list, tuple, lambda ids: array("i", ids)])
def test_the_first_id_outside_of_a_vocabulary_is_found(make: type) -> None:
    assert first_outside(make([]), 10) is None
    assert first_outside(make([0, 9]), 10) is None
    assert first_outside(make([0, 10, 12]), 10) == 10
    assert first_outside(make([3, -1, 12]), 10) == -1
