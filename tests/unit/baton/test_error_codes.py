"""Each error is the same at every door: gRPC status, HTTP status, OpenAI's and Anthropic's body."""

import re
from collections.abc import Iterator

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from baton.core import errors
from baton.core.error_codes import BY_GRPC, BY_REASON, TABLE, ErrorCode, code_of
from baton.core.errors import BatonError
from baton.gateway.http.anthropic.errors import anthropic_error
from baton.gateway.http.errors import HttpRefusal, headers_of, openai_error, status_of
from baton.protos.v1 import common_pb2
from baton.rpc.error_detail import from_detail, to_detail
from baton.rpc.status import to_status

RETRYABLE_GRPC, RETRYABLE_HTTP = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}, {429, 503}


def classes(above: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    for each in above.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from classes(each)


EVERY = tuple(classes())


def test_every_class_of_errors_has_one_row() -> None:
    assert sorted(row.error.__name__ for row in TABLE) == sorted(each.__name__ for each in EVERY)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.error.__name__)
def test_both_doors_agree_on_whether_a_retry_may_help(row: ErrorCode) -> None:
    assert (row.grpc in RETRYABLE_GRPC) == (row.http in RETRYABLE_HTTP) == row.retryable
    assert ("retry-after" in headers_of(row.error("x"))) == row.retryable


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_the_grpc_status_has_code_reason_and_domain(kind: type[BatonError]) -> None:
    status = to_status(kind("a sentence", field="model", value="x"))
    assert code_pb2.Code.Name(status.code) == code_of(kind).grpc
    info = detail(status, error_details_pb2.ErrorInfo())
    assert (info.reason, info.domain) == (kind.reason, "baton.serving")
    assert re.fullmatch("[A-Z]+(_[A-Z]+)*", info.reason)
    assert f"ERROR_REASON_{info.reason}" in common_pb2.ErrorReason.DESCRIPTOR.values_by_name


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_the_http_answers_have_status_type_and_code(kind: type[BatonError]) -> None:
    error, row = kind("a sentence", field="model"), code_of(kind)
    assert status_of(error) == row.http
    openai, anthropic = openai_error(error, "r1")["error"], anthropic_error(error, "r1")["error"]
    assert (openai["type"], openai["code"], anthropic["type"]) == (row.openai_type, row.openai_code, row.anthropic_type)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_an_error_that_went_through_a_message_has_the_same_codes(kind: type[BatonError]) -> None:
    received = from_detail(to_detail(kind("a sentence")))
    assert (code_of(received).grpc, code_of(received).http) == (code_of(kind).grpc, code_of(kind).http)
    assert isinstance(received, BY_REASON[kind.reason])


def test_a_status_of_another_program_becomes_the_plainest_error_of_its_code() -> None:
    assert BY_GRPC["UNAVAILABLE"] is errors.NoNode
    assert BY_GRPC["INVALID_ARGUMENT"] is errors.InvalidRequest
    assert BY_GRPC["INTERNAL"] is errors.InternalError


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (403, "permission_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (415, "invalid_request_error", "invalid_request_error"),
        (501, "server_error", "api_error"),
    ],
)
def test_a_refusal_by_http_itself_has_the_type_of_its_status(status: int, openai: str, anthropic: str) -> None:
    refused = HttpRefusal(status, "code", "a sentence")
    assert (status_of(refused), openai_error(refused, "")["error"]["code"]) == (status, "code")
    assert openai_error(refused, "")["error"]["type"] == openai
    assert anthropic_error(refused, "")["error"]["type"] == anthropic


def detail(status: status_pb2.Status, wanted: error_details_pb2.ErrorInfo) -> error_details_pb2.ErrorInfo:
    assert any(packed.Unpack(wanted) for packed in status.details)
    return wanted
