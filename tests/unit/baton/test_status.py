"""How handlers answer calls that end early."""

import asyncio

import grpc
import pytest

from baton.errors import NoNode
from baton.rpc.status import client_may_leave


@pytest.mark.parametrize("refusal", [grpc.aio.InternalError(), ExceptionGroup("tasks", [grpc.aio.InternalError()])])
def test_a_refused_write_cancels_the_handler(refusal: Exception) -> None:
    with pytest.raises(asyncio.CancelledError), client_may_leave():
        raise refusal


def test_other_errors_are_unchanged() -> None:
    error = NoNode("gone")
    with pytest.raises(NoNode) as raised, client_may_leave():
        raise error
    assert raised.value is error
