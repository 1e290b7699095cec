"""Every way in which a body can be wrong has one answer that names the field."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import InvalidRequest
from gateway.http.bodies import ChatBody, CompletionBody
from gateway.http.body import parse, parse_object, read_body
from gateway.http.errors import Refused

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: object) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields: object) -> ChatBody:
    return parse(ChatBody, json.dumps({**CHAT, **fields}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'{"prompt": NaN}',
        b'{"prompt": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
def test_what_is_no_json_object_is_a_syntax_error(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_many_brackets_that_are_not_nested_are_allowed() -> None:
    assert len(parse_object(b'{"a": [' + b"[]," * 300 + b"[]]}")["a"]) == 301


@pytest.mark.parametrize("body", [b'{"a": 1, "a": 1}', b'{"b": [{"a": 1, "a" : 2}]}'])
def test_a_key_given_twice_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="'a' twice") as caught:
        parse_object(body)
    assert caught.value.field == "a"


@pytest.mark.parametrize("values", [b"1," * 600_000 + b"1", b'"a",' * 600_000 + b"1"])
def test_too_many_values_are_refused_before_they_are_read(values: bytes) -> None:
    with pytest.raises(Refused) as caught:
        parse_object(b'{"a": [' + values + b"]}")
    assert caught.value.status == 413


def test_a_text_may_have_any_number_of_commas() -> None:
    assert len(parse_object(b'{"a": "' + rb"\"," * 100 + b"," * 600_000 + b'"}')["a"]) == 600_200


def test_a_key_given_twice_is_found_among_many() -> None:
    keys = b",".join(b'"%d": 1' % number for number in range(100_000))
    with pytest.raises(InvalidRequest, match="'99999' twice"):  # within a second, not an hour
        parse_object(b"{" + keys + b', "99999": 1}')


def test_of_many_wrong_values_few_are_described() -> None:
    biases = {f"x{number}": 1 for number in range(1025)}
    wrong = {"prompt": [-1] * 1000, "stop_token_ids": [-1] * 1000, "stop": [1] * 1000, "logit_bias": biases}
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate(wrong)
    assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1 << 32}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1000000}, "n"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"stream_options": {"more": 1}, "stream": True}, "stream_options.more"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_choice": []}, "guided_choice"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.field == wrong


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="messages is missing") as caught:
        parse(ChatBody, b"{}")
    assert caught.value.field == "messages"


def test_a_field_with_several_forms_lists_them_all() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=3)
    assert {"a valid string", "a valid list"} <= set(caught.value.allowed)


@pytest.mark.parametrize(
    ("field", "cure"),
    [
        ("temprature", "did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("colour", "leave it out; /docs lists all fields"),
    ],
)
def test_an_unknown_field_that_nearly_has_a_name_gets_that_name(field: str, cure: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: 1})
    assert str(caught.value) == f"unknown field '{field}'; {cure}"


def test_a_list_that_is_too_short_says_how_long_it_is_to_be() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[])
    assert str(caught.value) == "messages is []; allowed: at least 1 item"


def test_null_is_as_if_absent_also_for_unknown_fields() -> None:
    assert completion(max_tokens=None, colour=None).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "only echo"),
        ({"best_of": 1, "n": 2}, "less than n"),
        ({"best_of": 2, "stream": True}, "exclude"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
        ({"echo": True, "truncate_prompt_tokens": 3}, "exclude"),
        ({"stream": True, "prompt_logprobs": 1}, "exclude"),
        ({"spaces_between_special_tokens": False}, "only true"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        completion(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude"),
        ({"chat_template": "{% for i in x %}{% endfor %}"}, "chat_template"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_chat_fields_that_cannot_be_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        chat(**fields)


def test_fields_of_other_servers_that_change_nothing_are_accepted() -> None:
    chat(user="me", store=True, metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k", modalities=["text"])


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_body_that_grows_too_large_is_refused_while_it_is_read() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 10

    with pytest.raises(Refused) as caught:
        await read_body(endless(), {}, bytes_max=25)
    assert (caught.value.status, read) == (413, 3)


async def test_a_body_that_is_declared_too_large_is_not_read() -> None:
    with pytest.raises(Refused) as caught:
        await read_body(chunks(), {"content-length": "26"}, bytes_max=25)
    assert caught.value.headers["connection"] == "close"


async def test_a_body_of_another_type_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        await read_body(chunks(b"{}"), {"content-type": "text/plain"}, bytes_max=25)
    assert caught.value.status == 415


async def test_a_body_arrives_in_pieces() -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert await read_body(chunks(b"{", b"}"), headers, bytes_max=2) == b"{}"
