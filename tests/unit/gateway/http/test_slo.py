"""TTFT, TPOT and session of a request over HTTP."""

import pytest

from baton.core.sampling_field import Door
from baton.core.types import Slo
from baton.gateway.http.baton_options import BatonOptions, set_slo
from baton.gateway.http.bodies import CompletionBody
from baton.gateway.http.common_fields import fill
from baton.gateway.http.responses.models import ResponsesRequest
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import slo_from_proto

OPTIONS = BatonOptions(ttft_s=0.25, tpot_s=0.0125, session_id="s")


def test_the_object_baton_has_bounds_in_seconds_and_a_session() -> None:
    for given, door in (
        (CompletionBody(prompt="x", baton=OPTIONS), Door.COMPLETIONS),
        (ResponsesRequest(input="x", baton=OPTIONS), Door.RESPONSES),
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
    set_slo(message.slo, ttft_s=0.9, tpot_s=0.02)
    assert slo_from_proto(message.slo) == Slo(0.1, 0.02)


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s"])
def test_a_bound_is_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BatonOptions.model_validate({name: 0})
