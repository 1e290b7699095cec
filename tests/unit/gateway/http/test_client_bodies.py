"""Bodies that agents and their libraries send are served, and headers name the fields without effect."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.bodies import ChatBody
from baton.gateway.http.checking import checked
from baton.gateway.http.client_fields import with_extra_body, without_effect
from baton.gateway.http.translate import chat_message, chat_request
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway

FOLDER = Path(__file__).parent / "bodies"
CLIENTS = ("ai_sdk", "cline", "continue", "langchain", "litellm", "llamaindex", "open_webui", "opencode")
RECORDED = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")) if path.stem.startswith(CLIENTS)
}
TURN = {"role": "user", "content": "Hello."}


def chat(**fields: object) -> ChatBody:
    return checked(ChatBody, {"messages": [TURN], **fields})


def variables(**fields: object) -> dict[str, Any]:
    return dict(chat_request(chat(**fields)).template_kwargs)


async def served(door: HttpGateway, path: str, body: dict[str, Any]) -> Answer:
    wire = await door.connect()
    wire.send("POST", path, json.dumps(body).encode(), content_type="application/json")
    key = await door.accept()
    door.finish(0, key=key)
    if not body.get("stream"):
        return await wire.answer()
    head = await wire.head()
    head.body = await wire.chunks()
    return head


def test_each_client_has_recorded_bodies() -> None:
    assert {client for client in CLIENTS for name in RECORDED if name.startswith(client)} == set(CLIENTS)


async def test_every_clients_body_is_served() -> None:
    async with open_http_gateway() as door:
        for name, recorded in RECORDED.items():
            answer = await served(door, recorded["path"], recorded["body"])
            assert answer.status == 200, name
            warnings = [value for header, value in answer.all_headers if header == "x-baton-warning"]
            assert warnings == recorded["warnings"], name


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning": {"effort": "high"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
        ),
        ({"reasoning_effort": "default"}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"chat_template_args": {"mode": 1}, "chat_template_kwargs": {"mode": 2}}, {"mode": 2}),
        (
            {"thinking": {"type": "enabled", "clear_thinking": False}},
            {"clear_thinking": False, "enable_thinking": True, "thinking": True},
        ),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": False},
        ),
    ],
)
def test_each_way_to_turn_reasoning_on_or_off_reaches_the_template(
    fields: dict[str, object], expected: dict[str, object]
) -> None:
    assert variables(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"functions": [{"name": "f"}]}, "give `tools`"),
        ({"function_call": {"name": "f"}}, "give `tool_choice`"),
        ({"audio": {"voice": "a"}}, "text only"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice needs tools"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed: at least 1"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"thinking": "yes"}, "true, false, or an object"),
        ({"thinking": {"type": "maybe"}}, "thinking.type is 'maybe'"),
        ({"reasoning": {"colour": 1}}, "reasoning.colour is not a parameter"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_a_cure(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        chat(**fields)


def test_no_limit_may_be_written_as_minus_one() -> None:
    body = chat(max_tokens=-1, max_completion_tokens=-1)
    assert not chat_message(body, "r").sampling.HasField("max_tokens")


def test_excluded_reasoning_is_not_sent() -> None:
    assert chat().shows_reasoning
    assert not chat(reasoning={"exclude": True}).shows_reasoning


def test_openrouters_usage_asks_for_the_last_chunk() -> None:
    assert chat(stream=True, usage={"include": True}).include_usage
    assert not chat(stream=True, usage={"include": False}).include_usage


def test_harmless_and_empty_fields_pass_in_silence() -> None:
    quiet = chat(
        transforms=[], plugins=[], vllm_xargs={}, function_call="auto", functions=[], tool_choice="auto", tools=[],
        logit_bias={}, stream_options={"include_usage": True}, top_logprobs=0, parallel_tool_calls=True,
    )  # fmt: skip
    assert list(without_effect(quiet)) == []
    assert chat_request(quiet).tool_choice == "none"


def test_reasoning_parts_of_an_earlier_turn_become_its_reasoning() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "one"}]},
        {"type": "reasoning", "reasoning": "two"},
        {"type": "text", "text": "said"},
    ]
    (message, _) = chat_request(chat(messages=[{"role": "assistant", "content": parts}, TURN])).messages
    assert message["reasoning_content"] == "one\ntwo"
    assert message["content"] == [{"type": "text", "text": "said"}]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "thinking", "thinking": 3}, "content[0].thinking"),
        ({"type": "reasoning", "text": [{"type": "image"}]}, "content[0].text[0].type"),
        ({"type": ["thinking"]}, "content[0].type"),
    ],
)
def test_a_malformed_reasoning_part_is_named(part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(chat(messages=[{"role": "assistant", "content": [part]}, TURN]))
    assert caught.value.field == f"messages[0].{field}"


def test_a_turn_of_reasoning_alone_has_an_empty_answer() -> None:
    parts = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking"}]
    (message, _) = chat_request(chat(messages=[{"role": "assistant", "content": parts}, TURN])).messages
    assert (message["content"], "reasoning_content" in message) == ("", False)


def test_marks_for_a_cache_do_not_reach_the_prompt() -> None:
    mark = {"type": "ephemeral"}
    tool = {"type": "function", "function": {"name": "f", "cache_control": mark}, "cache_control": mark}
    request = chat_request(chat(tools=[tool]))
    assert request.tools == [{"type": "function", "function": {"name": "f"}}]


def test_members_of_extra_body_count_as_given_next_to_the_others() -> None:
    body = checked(ChatBody, with_extra_body({"messages": [TURN], "extra_body": {"top_k": 5}}))
    assert chat_message(body, "r").sampling.top_k == 5


@pytest.mark.parametrize(
    "extra", [{"seed": 1, "extra_body": {"seed": 2}}, {"extra_body": {"extra_body": {}}}, {"extra_body": 3}]
)
def test_an_extra_body_that_contradicts_or_is_no_object_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="extra_body"):
        checked(ChatBody, with_extra_body({"messages": [TURN], **extra}))
