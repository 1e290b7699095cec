"""How clients say for how long their prompts should stay cached, in the words of each API."""

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.anthropic.translate import to_message as of_messages
from baton.gateway.http.bodies import ChatBody, CompletionBody
from baton.gateway.http.body_reader import parse
from baton.gateway.http.checking import checked
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.translate import to_message as of_responses
from baton.gateway.http.translate import chat_message, completion_messages
from baton.protos.v1 import generation_pb2 as pb

USER = {"role": "user", "content": "hi"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
MINUTES = {"type": "ephemeral"}


def chat(**fields: Any) -> pb.GenerateRequest:
    return chat_message(parse(ChatBody, json.dumps({"messages": [USER], **fields}).encode()), "r")


def completion(**fields: Any) -> pb.GenerateRequest:
    return completion_messages(parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode()), "r")[0]


def messages(**fields: Any) -> pb.GenerateRequest:
    return of_messages(checked(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [USER], **fields}))


def responses(**fields: Any) -> pb.GenerateRequest:
    return of_responses(checked(ResponsesRequest, {"model": "m", "input": "hi", **fields}))


DOORS = (chat, completion, messages, responses)


@pytest.mark.parametrize("door", DOORS)
def test_who_asks_for_nothing_gets_nothing(door: Any) -> None:
    assert not door().HasField("kv_keep_s")
    assert door().session_id == ""


@pytest.mark.parametrize("door", DOORS)
def test_our_own_field_wins_and_0_is_a_time(door: Any) -> None:
    hints = {"prompt_cache_retention": "24h"} if door is not messages else {"cache_control": HOUR}
    assert door(baton={"kv_keep_s": 12.5}, **hints).kv_keep_s == 12.5
    ended = door(baton={"kv_keep_s": 0}, **hints)
    assert ended.HasField("kv_keep_s")
    assert ended.kv_keep_s == 0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("seconds", [-1, 86401, "60", True])
def test_a_time_that_is_not_possible_is_refused(door: Any, seconds: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        door(baton={"kv_keep_s": seconds})
    assert refused.value.field == "baton.kv_keep_s"


@pytest.mark.parametrize("door", [chat, completion, responses])
def test_openais_retention_is_a_time_and_its_cache_key_a_session(door: Any) -> None:
    assert door(prompt_cache_retention="24h").kv_keep_s == 86400
    assert door(prompt_cache_retention="in_memory").kv_keep_s == 300
    assert door(prompt_cache_key="thread-7").session_id == "thread-7"
    assert door(prompt_cache_key="thread-7", baton={"session_id": "mine"}).session_id == "mine"


@pytest.mark.parametrize("key", ["x" * 10_000, "Grüße", "line\nbreak"])
def test_a_cache_key_that_no_session_can_have_becomes_one_by_its_digest(key: str) -> None:
    session = chat(prompt_cache_key=key).session_id
    assert len(session) == 64
    assert session == chat(prompt_cache_key=key).session_id
    assert session != chat(prompt_cache_key=key + "x").session_id


@pytest.mark.parametrize("hint", ["forever", "", {"ttl": 3}, [1], None, True])
def test_hints_that_cannot_be_read_have_no_effect(hint: object) -> None:
    given: dict[str, object] = {"promptCacheKey": hint if not isinstance(hint, str) else None}
    if hint is None or isinstance(hint, str):
        given["prompt_cache_retention"] = hint
    message = chat(**given)
    assert not message.HasField("kv_keep_s")
    assert message.session_id == ""


def test_the_longest_ttl_of_a_conversation_counts() -> None:
    text = {"type": "text", "text": "hi", "cache_control": MINUTES}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{**text, "cache_control": HOUR}]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert messages(system=[text]).kv_keep_s == 300
    assert messages(system=[text], messages=turns).kv_keep_s == 3600
    assert messages(tools=[{"name": "f", "input_schema": {"type": "object"}, "cache_control": HOUR}]).kv_keep_s == 3600
    assert messages(cache_control=MINUTES).kv_keep_s == 300


def test_chats_read_what_proxies_pass_on_from_anthropics_api() -> None:
    part = {"type": "text", "text": "hi", "cache_control": HOUR}
    tool = {"type": "function", "function": {"name": "f", "cache_control": MINUTES}}
    assert chat(messages=[{"role": "user", "content": [part]}]).kv_keep_s == 3600
    assert chat(tools=[tool]).kv_keep_s == 300
    assert chat(cache_control="junk").kv_keep_s == 300, "some mark, without a ttl"


def test_a_deep_body_does_not_end_the_process() -> None:
    content: object = "hi"
    for _ in range(60):
        content = [{"type": "text", "content": content}]
    assert not chat(messages=[{"role": "user", "content": content}]).HasField("kv_keep_s")
