"""TTFT, TPOT and session of a request over HTTP."""

import pytest

from baton.core.types import Slo
from baton.gateway.http.bodies import CompletionBody
from baton.gateway.http.common_fields import CommonFields, fill, set_slo
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import slo_from_proto


def test_fields_of_the_body_are_in_milliseconds() -> None:
    for given in (
        CompletionBody(prompt="x", ttft_ms=250, tpot_ms=12.5, session_id="s"),
        CommonFields(ttft_ms=250, tpot_ms=12.5, session_id="s"),
    ):
        message = pb.GenerateRequest()
        fill(message, given)
        assert slo_from_proto(message.slo) == Slo(0.25, 0.0125)
        assert message.session_id == "s"


def test_absent_fields_leave_the_gateways_bounds() -> None:
    message = pb.GenerateRequest()
    fill(message, CommonFields())
    assert slo_from_proto(message.slo).over(Slo(0.5, 0.01)) == Slo(0.5, 0.01)


def test_a_header_does_not_change_what_the_body_says() -> None:
    message = pb.GenerateRequest()
    message.slo.ttft_s = 0.1
    set_slo(message.slo, ttft_ms=900.0, tpot_ms=20.0)
    assert slo_from_proto(message.slo) == Slo(0.1, 0.02)


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
def test_a_bound_is_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CommonFields.model_validate({name: 0})
