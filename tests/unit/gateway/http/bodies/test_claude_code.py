"""Claude Code's requests over a session: the prompt's prefix stays, and tokens are counted from the beginning."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.gateway.http.bodies.test_bodies import CACHED_TOKENS, Recorded, agent_door, served
from tests.unit.gateway.http.chat_stream import events
from tests.unit.gateway.http.http_gateway import HttpGateway

STREAMED = ["claude_code_first_turn", "claude_code_tool_turn", "claude_code_older_thinking", "claude_code_title"]


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with agent_door() as opened:
        yield opened


async def counted(door: HttpGateway, recorded: Recorded) -> int:
    got = await served(door, replace(recorded, path="/v1/messages/count_tokens?beta=true"))
    tokens = got.answer.json["input_tokens"]
    assert isinstance(tokens, int)
    return tokens


@pytest.mark.parametrize("name", STREAMED)
async def test_message_start_has_the_tokens_that_counting_gives(door: HttpGateway, name: str) -> None:
    recorded = Recorded.of(name)
    tokens = await counted(door, recorded)
    got = await served(door, recorded)
    found = events(got.answer.body)
    assert [event.name for event in found][:2] == ["message_start", "ping"]
    assert [event.name for event in found][-2:] == ["message_delta", "message_stop"]
    usage = found[0].data["message"]["usage"]
    assert tokens == got.prompt_tokens
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens
    assert usage["cache_read_input_tokens"] == CACHED_TOKENS
    assert found[-2].data["usage"]["input_tokens"] == usage["input_tokens"]


async def test_context_edits_are_answered_with_none(door: HttpGateway) -> None:
    recorded = Recorded.of("claude_code_older_thinking")
    got = await served(door, recorded)
    assert events(got.answer.body)[-2].data["context_management"] == {"applied_edits": []}
    whole = await served(door, replace(recorded, body={**recorded.body, "stream": False}))
    assert whole.answer.json["context_management"] == {"applied_edits": []}
    count = await served(door, replace(recorded, path="/v1/messages/count_tokens"))
    assert count.answer.json["context_management"] == {"original_input_tokens": count.answer.json["input_tokens"]}
    assert count.warnings == got.warnings == whole.warnings


async def test_the_header_that_changes_with_every_request_does_not_change_the_prompt(door: HttpGateway) -> None:
    recorded = Recorded.of("claude_code_first_turn")
    again = json.loads(json.dumps(recorded.body).replace("cch=0f3e2", "cch=99999"))
    assert again != recorded.body
    assert (await served(door, recorded)).prompt == (await served(door, replace(recorded, body=again))).prompt


def cut(body: dict[str, Any], messages: int) -> dict[str, Any]:
    return {**body, "messages": body["messages"][:messages]}


async def test_a_turn_begins_with_the_prompt_of_the_one_before_it(door: HttpGateway) -> None:
    recorded = Recorded.of("claude_code_tool_turn")
    recorded = replace(recorded, body={**recorded.body, "tools": recorded.body["tools"][:4]})
    prompts = [
        (await served(door, replace(recorded, body=cut(recorded.body, messages)))).prompt.removesuffix("<|assistant|>")
        for messages in (5, 8)
    ]
    assert prompts[1].startswith(prompts[0])
