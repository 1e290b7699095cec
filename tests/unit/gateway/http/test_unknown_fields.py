"""With --unknown-fields warn, fields that no endpoint has are left out, named in headers and counted, on every door."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.bodies import ChatBody
from baton.gateway.http.checking import Model, checked
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.unknown_fields import JsonBody, UnknownFields
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway

TURN = {"role": "user", "content": "Hello."}
TAIL = "is not a parameter of this endpoint and has no effect"


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway("--unknown-fields", "warn") as opened:
        yield opened


def warnings_of(answer: Answer) -> list[str]:
    return [value for name, value in answer.all_headers if name == "x-baton-warning"]


def accept(model: type[Model], body: dict[str, Any]) -> tuple[Model, list[str]]:
    unknown = UnknownFields()
    read = JsonBody(body, unknown)
    return checked(model, read), unknown.warnings(read)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_quoted(name: str) -> None:
    _, warnings = accept(ChatBody, {"messages": [TURN], name: 1})
    assert warnings == [f"{name!r} {TAIL}"]


def test_unknown_fields_are_refused_by_default() -> None:
    with pytest.raises(InvalidRequest, match="colour is not a parameter"):
        checked(ChatBody, JsonBody({"messages": [TURN], "colour": 1}, None))


@pytest.mark.parametrize(
    ("model", "body", "places"),
    [
        (ChatBody, {"messages": [TURN], "colour": 1}, ["colour"]),
        (
            ChatBody,
            {"messages": [TURN], "stream": True, "stream_options": {"more": 1}, "baton": {"less": 2}},
            ["baton.less", "stream_options.more"],
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}], "y": {}},
            ["input[0].content[0].x", "y"],
        ),
        (
            MessagesRequest,
            {
                "max_tokens": 5,
                "messages": [TURN, {**TURN, "weight": 1}],
                "tools": [{"name": "f", "input_schema": {}, "z": 1}],
            },
            ["messages[1].weight", "tools[0].z"],
        ),
    ],
)
def test_each_unknown_field_is_named_at_its_place(model: type[Model], body: dict[str, Any], places: list[str]) -> None:
    _, warnings = accept(model, body)
    assert sorted(warnings) == [f"{place} {TAIL}" for place in places]


def test_the_name_that_was_meant_is_named() -> None:
    _, warnings = accept(ChatBody, {"messages": [TURN], "temprature": 1.0})
    assert warnings == [f"temprature {TAIL}; did you mean temperature?"]


def test_a_wrong_value_of_a_known_field_is_refused_all_the_same() -> None:
    with pytest.raises(InvalidRequest, match="temperature is 'hot'"):
        accept(ChatBody, {"messages": [TURN], "colour": 1, "temperature": "hot"})


def test_unknown_fields_that_are_null_need_no_warning() -> None:
    assert accept(ChatBody, {"messages": [TURN], "colour": None, "baton": {"less": None}})[1] == []


def test_of_many_unknown_fields_the_first_are_named_and_all_are_counted() -> None:
    body = {"messages": [TURN], **{f"k{number}": 1 for number in range(200_000)}}
    unknown = UnknownFields()
    read = JsonBody(body, unknown)
    checked(ChatBody, read)
    assert unknown.count == 200_000
    assert len(unknown.warnings(read)) == 16


def test_the_search_for_a_place_ends_in_a_body_of_many_objects() -> None:
    """With 300,000 objects before the field, its place is not worth the time."""
    body = {"messages": [TURN], "metadata": {"a": [{} for _ in range(300_000)]}, "baton": {"less": 2}}
    assert accept(ChatBody, body)[1] == [f"less {TAIL}"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [TURN], "max_tokens": 4, "extra_body": {"colour": 1}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4, "colour": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4, "colour": 1}),
        ("/v1/messages", {"messages": [TURN], "max_tokens": 4, "colour": 1}),
    ],
)
async def test_every_door_serves_the_rest_and_says_so(door: HttpGateway, path: str, body: dict[str, Any]) -> None:
    wire = await door.connect()
    wire.send("POST", path, json.dumps(body).encode(), content_type="application/json")
    await door.accept()
    door.finish(0)
    answer = await wire.answer()
    assert (answer.status, warnings_of(answer)) == (200, [f"colour {TAIL}"])
    metrics = (await door.call("GET", "/metrics")).body.decode()
    (line,) = [each for each in metrics.splitlines() if each.startswith("baton_http_unknown_fields_total{")]
    assert line.endswith(" 1.0")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": [TURN]}),
    ],
)
async def test_doors_that_generate_nothing_do_so_too(door: HttpGateway, path: str, body: dict[str, Any]) -> None:
    answer = await door.call("POST", path, {**body, "colour": 1}, content_type="application/json")
    assert (answer.status, warnings_of(answer)) == (200, [f"colour {TAIL}"])


async def test_a_name_cannot_break_the_header(door: HttpGateway) -> None:
    body = {"prompt": "a", "x\r\nset-cookie: a=b\u2028é": 1}
    answer = await door.call("POST", "/tokenize", body, content_type="application/json")
    assert answer.status == 200
    assert "set-cookie" not in answer.headers
    (warning,) = warnings_of(answer)
    assert warning.isascii()


async def test_a_long_body_is_read_in_a_thread_and_warns_as_well(door: HttpGateway) -> None:
    body = {"prompt": "a", "colour": "x" * 100_000}
    answer = await door.call("POST", "/tokenize", body, content_type="application/json")
    assert (answer.status, warnings_of(answer)) == (200, [f"colour {TAIL}"])
