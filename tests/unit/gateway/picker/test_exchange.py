"""One request's messages, as a proxy sends them in each of its modes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from google.protobuf.json_format import MessageToDict

from baton.core.errors import BatonError, NoNode, Overloaded
from baton.gateway.picker.choice import Picked, PickRequest
from baton.gateway.picker.exchange import Exchange
from baton.gateway.picker.prompt import LOOK_BYTES, look
from baton.protos.ext_proc import external_processor_pb2 as pb

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
CHAT = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
Request = pb.ProcessingRequest


@dataclass
class Notes:
    """Picks the same gateways for all, and notes what was wanted."""

    error: BatonError | None = None
    wanted: list[PickRequest] = field(default_factory=list)
    reported: list[tuple[str, str]] = field(default_factory=list)

    def pick(self, wanted: PickRequest) -> Picked:
        self.wanted.append(wanted)
        if self.error is not None:
            raise self.error
        return Picked((A, B), "none")

    def served(self, picked: Picked, address: str) -> None:
        self.reported.append((picked.addresses[0], address))


def headers(
    mode: int | None = pb.FULL_DUPLEX_STREAMED, *, end: bool = False, subset: object = None, **given: str
) -> Request:
    """The first message; mode None: of a proxy that does not say how it sends bodies."""
    values = [pb.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode()) for name, value in given.items()]
    request = Request(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=end))
    if mode is not None:
        request.protocol_config.request_body_mode = mode  # type: ignore[assignment]
        request.protocol_config.response_body_mode = mode  # type: ignore[assignment]
    if subset is not None:
        struct = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        struct.update({"x-gateway-destination-endpoint-subset": subset})  # type: ignore[dict-item]
    return request


def body(data: bytes, *, end: bool = False) -> Request:
    return Request(request_body=pb.HttpBody(body=data, end_of_stream=end))


def answers(notes: Notes, *requests: Request, sheddable: str = "batch") -> list[list[pb.ProcessingResponse]]:
    exchange = Exchange(notes, frozenset({sheddable}))
    return [exchange.receive(each) for each in requests]


def kinds(responses: list[pb.ProcessingResponse]) -> list[str]:
    return [str(each.WhichOneof("response")) for each in responses]


def picked_by(response: pb.ProcessingResponse) -> str:
    """The pick, which must be the same in header and metadata."""
    changed: Any = getattr(response, str(response.WhichOneof("response"))).response
    (header,) = changed.header_mutation.set_headers
    assert header.header.key == "x-gateway-destination-endpoint"
    # A client that sends the header itself must not be able to choose.
    assert header.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert changed.clear_route_cache
    metadata = MessageToDict(response.dynamic_metadata)
    text = str(header.header.raw_value.decode())
    assert metadata == {"envoy.lb": {"x-gateway-destination-endpoint": text}}
    return text


def passed_on(responses: list[pb.ProcessingResponse]) -> list[tuple[bytes, bool]]:
    streamed = [each.request_body.response.body_mutation.streamed_response for each in responses]
    return [(each.body, each.end_of_stream) for each in streamed]


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED, pb.FULL_DUPLEX_STREAMED, None])
def test_a_request_without_a_body_is_picked_at_its_headers(mode: int | None) -> None:
    ((answer,),) = answers(Notes(), headers(mode, end=True))
    assert picked_by(answer) == f"{A},{B}"


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED])
def test_a_request_is_picked_at_its_headers_if_the_body_comes_too_late(mode: int) -> None:
    notes = Notes()
    first, second = answers(notes, headers(mode, content_length="4000", x_session_id="s"), body(CHAT, end=True))
    assert picked_by(first[0]) == f"{A},{B}"
    assert kinds(second) == ["request_body"]
    assert not second[0].request_body.HasField("response")
    assert [each.key for each in notes.wanted] == [look(b"", whole=False, session="s").key]
    assert notes.wanted[0].tokens > 1000


@pytest.mark.parametrize("mode", [pb.BUFFERED, pb.BUFFERED_PARTIAL])
def test_a_buffered_body_is_seen_before_the_pick(mode: int) -> None:
    notes = Notes()
    first, second = answers(notes, headers(mode), body(CHAT, end=True))
    assert kinds(first) == ["request_headers"]
    assert not first[0].request_headers.HasField("response")
    assert picked_by(second[0]) == f"{A},{B}"
    assert not second[0].request_body.response.HasField("body_mutation")
    assert notes.wanted[0].key == look(CHAT, whole=True).key


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, None])
def test_pieces_of_a_body_are_held_until_the_pick_and_passed_on_as_they_came(mode: int | None) -> None:
    notes = Notes()
    silent, silent_too, last = answers(notes, headers(mode), body(CHAT[:20]), body(CHAT[20:], end=True))
    assert silent == silent_too == []
    assert picked_by(last[0]) == f"{A},{B}"
    assert passed_on(last[1:]) == [(CHAT[:20], False), (CHAT[20:], True)]
    assert notes.wanted[0].key == look(CHAT, whole=True).key


def test_a_long_body_is_picked_by_its_beginning_and_nothing_of_it_is_kept() -> None:
    notes = Notes()
    piece = b"x" * (LOOK_BYTES // 2)
    _, first, second, third, last = answers(notes, headers(), *[body(piece)] * 3, body(b"", end=True))
    assert first == []
    assert kinds(second) == ["request_headers", "request_body", "request_body"]
    assert passed_on(third) == [(piece, False)]
    assert passed_on(last) == [(b"", True)]
    assert len(notes.wanted) == 1


def test_trailers_end_a_body() -> None:
    _, _, last = answers(Notes(), headers(), body(CHAT), Request(request_trailers=pb.HttpTrailers()))
    assert kinds(last) == ["request_headers", "request_body", "request_trailers"]


@pytest.mark.parametrize(
    "subset", [[A, "10.0.0.9:1"], f"{A}, 10.0.0.9:1", [f"{A},10.0.0.9:1"], [A, 7, "10.0.0.9:1", None]]
)
def test_the_subset_is_a_list_or_a_text(subset: object) -> None:
    notes = Notes()
    answers(notes, headers(end=True, subset=subset))
    assert notes.wanted[0].subset == frozenset({A, "10.0.0.9:1"})


@pytest.mark.parametrize("subset", [[], "", 7, float("inf"), {"a": "b"}])
def test_an_empty_subset_allows_nothing(subset: object) -> None:
    notes = Notes()
    answers(notes, headers(end=True, subset=subset))
    assert notes.wanted[0].subset == frozenset()


def test_without_a_subset_all_are_allowed() -> None:
    notes = Notes()
    answers(notes, headers(end=True))
    assert notes.wanted[0].subset is None


def test_an_objective_may_be_sheddable() -> None:
    notes = Notes()
    for name in ("batch", "chat"):
        answers(notes, headers(end=True, x_gateway_inference_objective=name))
    assert [each.sheddable for each in notes.wanted] == [True, False]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(NoNode("none"), 503, "service_unavailable_error"), (Overloaded("full"), 429, "rate_limit_error")],
)
@pytest.mark.parametrize("mode", [pb.NONE, pb.BUFFERED, pb.FULL_DUPLEX_STREAMED])
def test_a_request_that_gets_no_gateway_is_answered_at_once(
    error: BatonError, status: int, kind: str, mode: int
) -> None:
    exchange = Exchange(Notes(error), frozenset())
    found = [each for message in (headers(mode), body(CHAT, end=True)) for each in exchange.receive(message)]
    refusal = next(each.immediate_response for each in found if each.HasField("immediate_response"))
    given = {each.header.key: each.header.raw_value.decode() for each in refusal.headers.set_headers}
    assert exchange.ended
    assert refusal.status.code == status
    assert orjson.loads(refusal.body)["error"]["type"] == kind
    assert given["content-type"] == "application/json"
    assert int(given["retry-after"]) > 0


def test_a_refusal_has_the_shape_of_the_clients_api() -> None:
    request = headers(end=True)
    request.request_headers.headers.headers.append(pb.HeaderValue(key=":path", value="/v1/messages?beta=true"))
    ((answer,),) = answers(Notes(NoNode("none")), request)
    assert orjson.loads(answer.immediate_response.body)["type"] == "error"


def response(kind: str, served: Mapping[str, object] | None = None) -> Request:
    message = {
        "response_headers": Request(response_headers=pb.HttpHeaders()),
        "response_body": Request(response_body=pb.HttpBody(body=b"data: 1\n\n", end_of_stream=True)),
        "response_trailers": Request(response_trailers=pb.HttpTrailers()),
    }[kind]
    if served is not None:
        message.metadata_context.filter_metadata["envoy.lb"].update(served)  # type: ignore[arg-type]
    return message


def test_the_gateway_that_served_is_reported() -> None:
    notes = Notes()
    served = {"x-gateway-destination-endpoint-served": B}
    _, answer = answers(notes, headers(end=True), response("response_headers", served))
    assert kinds(answer) == ["response_headers"]
    assert notes.reported == [(A, B)]


@pytest.mark.parametrize("served", [None, {}, {"x-gateway-destination-endpoint-served": 7}])
def test_a_proxy_need_not_say_who_served(served: Mapping[str, object] | None) -> None:
    notes = Notes()
    answers(notes, headers(end=True), response("response_headers", served))
    answers(notes, response("response_headers", {"x-gateway-destination-endpoint-served": B}))  # nothing was picked
    assert notes.reported == []


def test_answers_pass_as_they_come() -> None:
    kinds_of_response = ("response_body", "response_trailers")
    _, (streamed,), (trailers,) = answers(Notes(), headers(end=True), *map(response, kinds_of_response))
    mutation = streamed.response_body.response.body_mutation.streamed_response
    assert (mutation.body, mutation.end_of_stream) == (b"data: 1\n\n", True)
    assert trailers.HasField("response_trailers")
    _, (plain,) = answers(Notes(), headers(pb.BUFFERED, end=True), response("response_body"))
    assert not plain.response_body.HasField("response")


def test_a_proxy_that_only_observes_gets_no_answers() -> None:
    request = headers(end=True)
    request.observability_mode = True
    assert answers(Notes(), request) == [[]]


def test_messages_that_make_no_sense_break_nothing() -> None:
    exchange = Exchange(Notes(), frozenset())
    assert exchange.receive(Request()) == []
    assert kinds(exchange.receive(response("response_headers"))) == ["response_headers"]
    assert kinds(exchange.receive(body(b"", end=True))) == ["request_headers", "request_body"]
    assert kinds(exchange.receive(headers(content_length="9" * 5000, end=True))) == ["request_headers"]
