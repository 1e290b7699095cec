"""The messages between proxy and picker about one HTTP request. Pure: the proxy's messages go in, answers come out.

When the picker chooses depends on how the proxy sends bodies:

    full duplex   once the body ended, or enough of it arrived; until then the picker holds it, and then returns it
    buffered      when the whole body arrives, in one message
    otherwise     at the headers, because the proxy continues before it sends the body
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import orjson

from baton.core.errors import BatonError
from baton.gateway.http.anthropic.errors import anthropic_error
from baton.gateway.http.errors import headers_of, openai_error, status_of
from baton.gateway.picker.choice import Picked, PickRequest
from baton.gateway.picker.prompt import LOOK_BYTES, look
from baton.protos.ext_proc import external_processor_pb2 as pb

ENDPOINT = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
OBJECTIVE = "x-gateway-inference-objective"
SESSION = "x-session-id"
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

_AT_HEADERS = (pb.NONE, pb.STREAMED)
_BUFFERED = (pb.BUFFERED, pb.BUFFERED_PARTIAL)

Response = pb.ProcessingResponse


class Picks(Protocol):
    """Chooses gateways, and learns which one served."""

    def pick(self, wanted: PickRequest) -> Picked:
        """Chooses the gateways for a request.

        Raises:
            BatonError: no gateway can take the request.
        """
        ...

    def served(self, picked: Picked, address: str) -> None:
        """Takes the address of the gateway that answered, as the proxy reports it."""
        ...


class Exchange:
    """Answers the proxy's messages about one request.

    Attributes:
        ended: whether the last answer ended the request.
    """

    def __init__(self, picks: Picks, sheddable: frozenset[str]) -> None:
        self.ended = False
        self._picks = picks
        self._sheddable = sheddable
        # The endpoint picker protocol requires full duplex, so that is the mode of proxies that announce none.
        self._request_mode: int = pb.FULL_DUPLEX_STREAMED
        self._response_mode: int = pb.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._picked: Picked | None = None
        self._held: list[pb.HttpBody] = []
        self._held_bytes = 0
        self._handlers: dict[str, Callable[[pb.ProcessingRequest], Iterable[Response]]] = {
            "request_headers": self._on_request_headers,
            "request_body": self._on_request_body,
            "request_trailers": self._on_request_trailers,
            "response_headers": self._on_response_headers,
            "response_body": self._on_response_body,
            "response_trailers": self._on_response_trailers,
        }

    def receive(self, request: pb.ProcessingRequest) -> list[Response]:
        """Returns the answers to one message."""
        handler = self._handlers.get(request.WhichOneof("request") or "")
        if handler is None:
            return []  # an unknown message, from a newer proxy
        try:
            answers = list(handler(request))
        except BatonError as error:
            self.ended, self._held = True, []
            answers = [_refuse(error, self._headers)]
        return [] if request.observability_mode else answers

    def _on_request_headers(self, request: pb.ProcessingRequest) -> Iterator[Response]:
        if request.HasField("protocol_config"):
            self._request_mode = request.protocol_config.request_body_mode
            self._response_mode = request.protocol_config.response_body_mode
        self._headers = _read_headers(request.request_headers.headers)
        self._subset = _read_subset(request.metadata_context)
        if request.request_headers.end_of_stream or self._request_mode in _AT_HEADERS:
            yield self._pick(b"", whole=False)
        elif self._request_mode in _BUFFERED:
            yield Response(request_headers=pb.HeadersResponse())

    def _on_request_body(self, request: pb.ProcessingRequest) -> Iterator[Response]:
        body = request.request_body
        if self._request_mode in _BUFFERED and self._picked is None:
            answer = self._pick(body.body, whole=body.end_of_stream)
            yield Response(
                request_body=pb.BodyResponse(response=answer.request_headers.response),
                dynamic_metadata=answer.dynamic_metadata,
            )
        elif self._request_mode in (*_AT_HEADERS, *_BUFFERED):
            yield Response(request_body=pb.BodyResponse())
        elif self._picked is not None:
            yield Response(request_body=_as_it_came(body))
        else:
            self._held.append(body)
            self._held_bytes += len(body.body)
            if body.end_of_stream or self._held_bytes >= LOOK_BYTES:
                yield from self._pick_by_held(whole=body.end_of_stream)

    def _on_request_trailers(self, _: pb.ProcessingRequest) -> Iterator[Response]:
        if self._picked is None:
            yield from self._pick_by_held(whole=True)
        yield Response(request_trailers=pb.TrailersResponse())

    def _on_response_headers(self, request: pb.ProcessingRequest) -> Iterator[Response]:
        served = _read_metadata(request.metadata_context, NAMESPACE, SERVED)
        if self._picked is not None and served and served[0]:
            self._picks.served(self._picked, served[0])
        yield Response(response_headers=pb.HeadersResponse())

    def _on_response_body(self, request: pb.ProcessingRequest) -> Iterator[Response]:
        if self._response_mode == pb.FULL_DUPLEX_STREAMED:
            yield Response(response_body=_as_it_came(request.response_body))
        else:
            yield Response(response_body=pb.BodyResponse())

    def _on_response_trailers(self, _: pb.ProcessingRequest) -> Iterator[Response]:
        yield Response(response_trailers=pb.TrailersResponse())

    def _pick_by_held(self, *, whole: bool) -> Iterator[Response]:
        yield self._pick(b"".join(each.body for each in self._held), whole=whole)
        for each in self._held:
            yield Response(request_body=_as_it_came(each))
        self._held = []

    def _pick(self, body: bytes, *, whole: bool) -> Response:
        """Chooses the gateways, and returns the answer to the request's headers.

        Raises:
            BatonError: no gateway can take the request.
        """
        length = self._headers.get("content-length", "")
        prompt = look(
            body,
            whole=whole,
            length=int(length) if length.isascii() and length.isdigit() and len(length) < 16 else None,
            session=self._headers.get(SESSION, ""),
        )
        sheddable = self._headers.get(OBJECTIVE) in self._sheddable
        self._picked = self._picks.pick(PickRequest(prompt.key, prompt.tokens, self._subset, sheddable))
        addresses = ",".join(self._picked.addresses)
        answer = Response(request_headers=pb.HeadersResponse(response=pb.CommonResponse(clear_route_cache=True)))
        _set(answer.request_headers.response.header_mutation, {ENDPOINT: addresses})
        answer.dynamic_metadata.update({NAMESPACE: {ENDPOINT: addresses}})
        return answer


def _as_it_came(body: pb.HttpBody) -> pb.BodyResponse:
    streamed = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))


def _set(mutation: pb.HeaderMutation, headers: dict[str, str]) -> None:
    """Sets headers, replacing what the client sent under these names."""
    for key, value in headers.items():
        header = pb.HeaderValue(key=key, raw_value=value.encode())
        action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        mutation.set_headers.append(pb.HeaderValueOption(header=header, append_action=action))


def _refuse(error: BatonError, headers: dict[str, str]) -> Response:
    """Returns the answer that the client gets in place of a gateway's."""
    shape = anthropic_error if headers.get(":path", "").startswith("/v1/messages") else openai_error
    answer = Response()
    refusal = answer.immediate_response
    refusal.status.code = status_of(error)
    refusal.body = orjson.dumps(shape(error, headers.get("x-request-id", "")))
    refusal.details = error.reason.lower()
    _set(refusal.headers, {"content-type": "application/json", **headers_of(error)})
    return answer


def _read_headers(given: pb.HeaderMap) -> dict[str, str]:
    return {each.key.lower(): each.value or each.raw_value.decode(errors="replace") for each in given.headers}


def _read_metadata(given: pb.Metadata, namespace: str, key: str) -> list[str] | None:
    """Returns the texts of a text or list value, without other values. Returns None if the value is missing."""
    if namespace not in given.filter_metadata or key not in given.filter_metadata[namespace].fields:
        return None
    value = given.filter_metadata[namespace].fields[key]
    values = value.list_value.values if value.HasField("list_value") else [value]
    return [each.string_value for each in values if each.HasField("string_value")]


def _read_subset(given: pb.Metadata) -> frozenset[str] | None:
    """Returns the gateways that the proxy allows, which it gives as a list or as text with commas; None: all."""
    texts = _read_metadata(given, SUBSET_NAMESPACE, SUBSET)
    if texts is None:
        return None
    parts = (part.strip() for text in texts for part in text.split(","))
    return frozenset(part for part in parts if part)
