"""TTFT, TPOT and session of a request over HTTP."""

import pytest

from baton.core.sampling_field import Door
from baton.core.types import Slo
from baton.gateway.http.bodies import CompletionBody
from baton.gateway.http.extras import fill, set_slo
from baton.gateway.http.responses.models import ResponsesRequest
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import slo_from_proto


def test_fields_of_the_body_are_in_milliseconds() -> None:
    for given, door in (
        (CompletionBody(prompt="x", ttft_ms=250, tpot_ms=12.5, session_id="s"), Door.COMPLETIONS),
        (ResponsesRequest(input="x", ttft_ms=250, tpot_ms=12.5, session_id="s"), Door.RESPONSES),
    ):
        message = pb.GenerateRequest()
        fill(message, given, door)
        assert slo_from_proto(message.slo) == Slo(0.25, 0.0125)
        assert message.session_id == "s"


def test_absent_fields_leave_the_gateways_bounds() -> None:
    message = pb.GenerateRequest()
    fill(message, ResponsesRequest(input="x"), Door.RESPONSES)
    assert slo_from_proto(message.slo).over(Slo(0.5, 0.01)) == Slo(0.5, 0.01)


def test_a_header_does_not_change_what_the_body_says() -> None:
    message = pb.GenerateRequest()
    message.slo.ttft_s = 0.1
    set_slo(message.slo, ttft_ms=900.0, tpot_ms=20.0)
    assert slo_from_proto(message.slo) == Slo(0.1, 0.02)


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
def test_a_bound_is_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ResponsesRequest.model_validate({"input": "x", name: 0})
