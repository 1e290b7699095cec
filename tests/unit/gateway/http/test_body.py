"""Every way in which a body can be wrong has one answer that names the field."""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from baton.gateway.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton.gateway.http.body_reader import parse, parse_object, read_body
from baton.gateway.http.checking import Model, checked
from baton.gateway.http.errors import HttpRefusal
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.translate import chat_request

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
    with pytest.raises(HttpRefusal) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_many_brackets_that_are_not_nested_are_allowed() -> None:
    assert len(parse_object(b'{"a": [' + b"[]," * 300 + b"[]]}")["a"]) == 301


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": 1, "a": 1}', "a"),
        (b'{"a": 1, "\\u0061": 1}', "a"),
        (b'{"b": [{"a": 1, "a" : 2}]}', "b[0].a"),
        (b'{"c": {"b:": [3, [{}, {"x": ":", "a": 1, "a" : {"a": 2}}]]}}', "c.b:[1][1].a"),
    ],
)
def test_a_key_given_twice_is_refused_at_its_place(body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest, match="'a' twice") as caught:
        parse_object(body)
    assert caught.value.field == field


@pytest.mark.parametrize("values", [b"1," * 600_000 + b"1", b'"a",' * 600_000 + b"1"])
def test_too_many_values_are_refused_before_they_are_read(values: bytes) -> None:
    with pytest.raises(HttpRefusal) as caught:
        parse_object(b'{"a": [' + values + b"]}")
    assert caught.value.status == 413


def test_a_text_may_have_any_number_of_commas() -> None:
    assert len(parse_object(b'{"a": "' + rb"\"," * 100 + b"," * 600_000 + b'"}')["a"]) == 600_200


def test_a_key_given_twice_is_found_among_many() -> None:
    keys = b",".join(b'"%d": 1' % number for number in range(100_000))
    with pytest.raises(InvalidRequest, match="'99999' twice"):  # within a second, not an hour
        parse_object(b"{" + keys + b', "99999": 1}')


MANY = 10_000
KEYS = {f"k{number}": 1 for number in range(MANY)}
LONG = {"k" * 65 + str(number): "x" * 513 for number in range(MANY)}
HI = {"role": "user", "content": "hi"}
CALLS: dict[type[Model], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [HI]},
    TokenizeBody: {"prompt": "a"},
    DetokenizeBody: {"tokens": [1]},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"max_tokens": 5, "messages": [HI]},
    CountTokensRequest: {"messages": [HI]},
}
ODD: list[Any] = [None, -1, "", [], [-1], {}]
HOSTILE: list[dict[str, Any]] = [
    KEYS,
    {"stream_options": KEYS, "stream": True},
    {"response_format": KEYS},
    {"structured_outputs": KEYS},
    {"text": {"format": KEYS}},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, **KEYS}}},
    {"reasoning": KEYS},
    {"thinking": {"type": "disabled", **KEYS}},
    {"output_config": KEYS},
    {"cache_control": {"type": "ephemeral", **KEYS}},
    {"metadata": KEYS},
    {"metadata": LONG},
    {"metadata": {"user_id": "u", **KEYS}},
    {"logit_bias": {f"x{number}": "a" for number in range(1024)}},
    {"logit_bias": LONG},
    {"tool_choice": {"type": "tool", "name": "f", **KEYS}},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}] * MANY}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}] * MANY}}},
    {"tools": [KEYS]},
    {"tools": [{"name": "f", "input_schema": {}, **KEYS}]},
    {"tools": [{"type": "function", "name": "f", **KEYS}]},
    {"messages": [{**HI, **KEYS}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **KEYS}]}]},
    {"input": [{**HI, **KEYS}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", **KEYS}]}]},
    *(
        {name: [wrong] * MANY}
        for name in ("prompt", "stop", "stop_sequences", "stop_token_ids", "tools", "messages", "input", "system",
                     "tokens", "documents", "guided_choice", "include", "modalities")
        for wrong in ODD
    ),
    *({"baton": {"output_token_ids": [wrong] * MANY}} for wrong in ODD),
]  # fmt: skip


@pytest.mark.parametrize("model", CALLS)
def test_of_many_wrong_values_few_are_described(model: type[Model]) -> None:
    """pydantic takes microseconds to describe one, and holds the interpreter lock for all of them."""
    for wrong in HOSTILE:
        with suppress(InvalidRequest):
            checked(model, {**CALLS[model], **wrong})  # also builds the one message
        described = 0
        try:
            model.model_validate({**CALLS[model], **wrong})
        except ValidationError as error:
            described = error.error_count()
        assert described <= (2 * 1024 if "logit_bias" in wrong else 8), list(wrong)


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
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 2, "a"]}, "prompt[2]"),
        ({"prompt": [1, [2]]}, "prompt[1]"),
        ({"prompt": ["a", "b", ""]}, "prompt[2]"),
        ({"prompt": ["a", "b", 1]}, "prompt[2]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"prompt": [[1], [2, [3]]]}, "prompt[1][1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [[1]] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1024 + [1]}, "prompt"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", ["b"]]}, "stop[1]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {"1": 1, "2": "x"}}, "logit_bias.2"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": [1]}, "guided_json"),
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


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1, -1], "prompt[1] is -1; allowed: at least 0"),
        ([1, 1 << 40], "prompt[1] is 1099511627776; allowed: below 4294967296"),
        (["a"] * 1025, "prompt has 1025 items; allowed: up to 1024"),
        ([[1]] * 1025, "prompt has 1025 items; allowed: up to 1024"),
        (["a", [1]], "prompt[1] is a list; allowed: a string"),
        ([], "prompt has 0 items; allowed: 1 or more"),
    ],
)
def test_the_element_that_is_wrong_is_the_one_that_is_named(prompt: list[Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"messages": [HI, 1]}, "messages[1]"),
        ({"messages": [HI, {"role": "user", "content": ["a", {"type": "text"}]}]}, "messages[1].content[1].text"),
        ({"messages": [HI, {"role": "user", "content": ["a", 1]}]}, "messages[1].content[1]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}, 3]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}, {}]}, "tools[1].type"),
        ({"tool_choice": "maybe", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ],
)
def test_a_wrong_part_of_a_chat_is_refused_by_its_name(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(chat(**fields))
    assert caught.value.field == wrong


def test_an_integer_of_more_bits_than_any_field_has_is_not_called_a_number() -> None:
    with pytest.raises(InvalidRequest, match=r"seed is .*; allowed: an integer of at most 64 bits"):
        completion(**parse_object(b'{"seed": 18446744073709551616}'))
    with pytest.raises(InvalidRequest, match=r"seed is 0\.5; allowed: an integer$"):
        completion(seed=0.5)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="messages is missing") as caught:
        parse(ChatBody, b"{}")
    assert caught.value.field == "messages"


def test_a_field_with_several_forms_lists_them_all() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=3)
    assert caught.value.allowed == ("a string, token ids, or a list of either",)


@pytest.mark.parametrize(
    ("field", "cure"),
    [
        ("temprature", "did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("session_id", "did you mean baton.session_id?"),
        ("ttft_ms", "did you mean baton.ttft_s?"),
        ("baton_receipt", "did you mean baton.receipt?"),
        ("colour", "leave it out; /docs lists all fields"),
    ],
)
def test_an_unknown_field_that_nearly_has_a_name_gets_that_name(field: str, cure: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: 1})
    assert str(caught.value) == f"{field} is not a parameter of this endpoint; {cure}"


def test_a_list_that_is_too_short_says_how_long_it_is_to_be() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[])
    assert str(caught.value) == "messages has 0 items; allowed: 1 or more"


def test_null_is_as_if_absent_also_for_unknown_fields() -> None:
    assert completion(max_tokens=None, colour=None).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "0 with echo"),
        ({"best_of": 1, "n": 2}, "less than n"),
        ({"best_of": 2, "stream": True}, "exclude"),
        ({"echo": True, "truncate_prompt_tokens": 3}, "exclude"),
        ({"prompt_logprobs": 1, "stream": True}, "exclude"),
        ({"spaces_between_special_tokens": False}, "allowed: true"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        completion(**fields)
    assert caught.value.field == next(iter(fields))


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
    with pytest.raises(InvalidRequest, match=says) as caught:
        chat(**fields)
    assert caught.value.field == next(iter(fields))


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

    with pytest.raises(HttpRefusal) as caught:
        await read_body(endless(), {}, bytes_max=25)
    assert (caught.value.status, read) == (413, 3)


async def test_a_body_that_is_declared_too_large_is_not_read() -> None:
    with pytest.raises(HttpRefusal) as caught:
        await read_body(chunks(), {"content-length": "26"}, bytes_max=25)
    assert caught.value.headers["connection"] == "close"


async def test_a_body_of_another_type_is_refused() -> None:
    with pytest.raises(HttpRefusal) as caught:
        await read_body(chunks(b"{}"), {"content-type": "text/plain"}, bytes_max=25)
    assert caught.value.status == 415


async def test_a_body_arrives_in_pieces() -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert await read_body(chunks(b"{", b"}"), headers, bytes_max=2) == b"{}"
