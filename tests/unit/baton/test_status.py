"""Errors as statuses: standard details next to ours, small trailers, and handlers whose calls end early."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import BatonError, InternalError, InvalidRequest, NoNode, Overloaded, PeerRefused, UnknownModel
from baton.protos.v1 import common_pb2
from baton.rpc.error_detail import from_detail, to_detail
from baton.rpc.status import client_may_leave, from_rpc_error, to_status


def detail(error: BatonError, kind: type[Message], request_id: str = "") -> Any:
    """The error's detail of this kind; None: it has none."""
    for packed in to_status(error, request_id=request_id).details:
        found = kind()
        if packed.Unpack(found):
            return found
    return None


@pytest.mark.parametrize("refusal", [grpc.aio.InternalError(), ExceptionGroup("tasks", [grpc.aio.InternalError()])])
def test_a_refused_write_cancels_the_handler(refusal: Exception) -> None:
    with pytest.raises(asyncio.CancelledError), client_may_leave():
        raise refusal


def test_other_errors_are_unchanged() -> None:
    error = NoNode("gone")
    with pytest.raises(NoNode) as raised, client_may_leave():
        raise error
    assert raised.value is error


def test_an_overload_says_when_to_retry() -> None:
    error = Overloaded("8 requests are running already", retry_after_s=1.25)
    retry = detail(error, error_details_pb2.RetryInfo)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 250_000_000)
    assert detail(error, error_details_pb2.BadRequest) is None
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("OVERLOADED", "baton.serving")


def test_a_wrong_field_is_a_violation_of_a_bad_request() -> None:
    error = InvalidRequest("top_p is 2", field="top_p", value=2, allowed=("up to 1",))
    (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("top_p", "top_p is 2; allowed: up to 1")
    assert detail(error, error_details_pb2.RetryInfo) is None
    assert detail(error, common_pb2.ErrorDetail).field == "top_p"


def test_the_request_is_named() -> None:
    assert detail(NoNode("gone"), error_details_pb2.RequestInfo, "req-1").request_id == "req-1"
    assert detail(NoNode("gone"), error_details_pb2.RequestInfo) is None


_TEXTS = st.text(st.characters(), max_size=40).flatmap(lambda text: st.integers(0, 400).map(lambda n: text * n))


@given(
    message=_TEXTS,
    value=_TEXTS,
    field=_TEXTS,
    cure=_TEXTS,
    request_id=_TEXTS,
    allowed=st.lists(_TEXTS, max_size=40).map(tuple),
)
def test_a_status_always_fits_into_a_trailer(
    message: str, value: str, field: str, cure: str, request_id: str, allowed: tuple[str, ...]
) -> None:
    error = InvalidRequest(message, field=field, value=value, cure=cure, allowed=allowed, retry_after_s=1.0)
    status = to_status(error, request_id=request_id)
    percent_encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in status.message.encode())
    assert percent_encoded + len(status.SerializeToString()) * 4 / 3 < 8000


def test_a_long_message_is_cut_visibly() -> None:
    status = to_status(PeerRefused("é" * 100_000))
    assert status.message.startswith("éé")
    assert status.message.endswith("...")


def test_every_error_is_bounded_where_it_is_made() -> None:
    long = "ü" * 1_000_000
    error = UnknownModel(f"model {long!r} is not served", field=long, value=long, allowed=(long,) * 1000, cure=long)
    assert len(str(error)) < 30_000
    assert error.message.startswith("model 'üü")
    assert error.message.endswith("üü' is not served")
    assert to_detail(error).ByteSize() < 60_000
    assert InvalidRequest("a\ud800b").message == "a?b"


def test_an_error_of_a_newer_peer_is_an_internal_one() -> None:
    detail = to_detail(NoNode("gone", cure="wait"))
    detail.reason = 99  # type: ignore[assignment]
    error = from_detail(detail)
    assert isinstance(error, InternalError)
    assert str(error) == "gone; wait"


@pytest.mark.parametrize("details", [b"\x0a\xff\xff", b"", b"text"])
def test_damaged_details_of_a_status_leave_its_code(details: bytes) -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", details))
    status = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="connection lost")
    error = from_rpc_error(status)
    assert isinstance(error, NoNode)
    assert error.message == "connection lost"


@pytest.mark.parametrize(
    ("details", "shown"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:7101: Failed to connect: refused",
            "failed to connect to all addresses; last error: UNKNOWN: Failed to connect: refused",
        ),
        ("ipv6:%5Bfd00::7%5D:7101: recvmsg: reset", "recvmsg: reset"),
        ("a text of ours", "a text of ours"),
    ],
)
def test_the_texts_of_grpc_lose_the_addresses_of_inner_connections(details: str, shown: str) -> None:
    """They reach clients in receipts and errors."""
    failed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert from_rpc_error(failed).message == shown
