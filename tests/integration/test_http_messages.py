"""Anthropic's own client, unpatched, uses /v1/messages."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, ToolUseBlock

from tests.integration.chatting import chat_gateway

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PROMPT = "Return the name of the"
ASKED: Any = [{"role": "user", "content": PROMPT}]
GREEDY: Any = {"temperature": 0}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anthropic]:
    with (
        chat_gateway(tmp_path_factory.mktemp("chat")) as url,
        Anthropic(base_url=url, api_key="none", max_retries=0) as connected,
    ):
        yield connected


def test_a_message_has_text_and_usage(client: Anthropic) -> None:
    answer = client.messages.create(model="llama", messages=ASKED, max_tokens=8, extra_body=GREEDY)
    assert answer.stop_reason == "max_tokens"
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.usage.output_tokens == 8
    again = client.messages.create(model="llama", messages=ASKED, max_tokens=8, extra_body=GREEDY)
    assert again.content == answer.content
    cached = again.usage.cache_read_input_tokens
    assert cached is not None
    assert again.usage.input_tokens + cached == answer.usage.input_tokens


def test_a_message_of_no_tokens_fills_the_prefix_cache_for_the_next_one(client: Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Which of these names is the name of a fruit? " * 20}]
    warmed = client.messages.create(model="llama", messages=asked, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    answer = client.messages.create(model="llama", messages=asked, max_tokens=2)
    assert answer.usage.cache_read_input_tokens


def test_the_stream_helper_builds_the_same_message(client: Anthropic) -> None:
    whole = client.messages.create(model="llama", messages=ASKED, max_tokens=12, extra_body=GREEDY)
    with client.messages.stream(model="llama", messages=ASKED, max_tokens=12, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.model_dump(exclude_none=True) for block in final.content] == [{"type": "text", "text": text}]
    assert final.content[0].model_dump()["text"] == whole.content[0].model_dump()["text"]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 0


def test_a_stop_sequence_ends_the_answer(client: Anthropic) -> None:
    with client.messages.stream(
        model="llama", messages=ASKED, max_tokens=200, stop_sequences=["."], extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ".")
    assert "." not in text


def test_tokens_are_counted_as_they_are_used(client: Anthropic) -> None:
    request: Any = {"model": "llama", "messages": ASKED, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**request).input_tokens
    used = client.messages.create(**request, max_tokens=1).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model="llama", messages=ASKED).input_tokens


def call_of(answer: Message) -> ToolUseBlock:
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert isinstance(call, ToolUseBlock)
    return call


@pytest.mark.parametrize("choice", [ONE_CALL, {**ONE_CALL, "type": "tool", "name": "weather"}])
def test_a_tool_is_used_and_its_result_sent_back(client: Anthropic, choice: Any) -> None:
    answer = client.messages.create(
        model="llama", messages=ASKED, tools=[WEATHER], tool_choice=choice, max_tokens=200, extra_body=GREEDY
    )
    assert answer.stop_reason == "tool_use"
    call = call_of(answer)
    assert call.name == "weather"
    assert call.input["city"] in ("Rome", "Oslo")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*ASKED, answer.to_param(), {"role": "user", "content": [result]}]
    after = client.messages.create(model="llama", messages=turns, tools=[WEATHER], max_tokens=4, extra_body=GREEDY)
    assert after.usage.output_tokens == 4


def test_a_call_streams_its_input(client: Anthropic) -> None:
    with client.messages.stream(
        model="llama", messages=ASKED, tools=[WEATHER], tool_choice=ONE_CALL, max_tokens=200, extra_body=GREEDY
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    call = call_of(final)
    assert json.loads("".join(pieces)) == call.input
    assert call.input["city"] in ("Rome", "Oslo")
    assert final.stop_reason == "tool_use"


def test_a_format_is_obeyed(client: Anthropic) -> None:
    schema = WEATHER["input_schema"]
    answer = client.messages.create(
        model="llama", messages=ASKED, max_tokens=200, extra_body=GREEDY,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    (block,) = answer.content
    assert block.type == "text"
    assert '"city"' in block.text
    assert answer.stop_reason == "end_turn"


def test_thinking_is_a_block_of_its_own(client: Anthropic) -> None:
    with client.messages.stream(
        model="llama", messages=ASKED, max_tokens=6, thinking={"type": "adaptive"}, extra_body=GREEDY
    ) as stream:
        thoughts = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "thinking"
    assert (block.thinking, bool(block.signature)) == (thoughts, True)
    assert thoughts


def test_the_beginning_of_an_answer_is_continued(client: Anthropic) -> None:
    turns: Any = [*ASKED, {"role": "assistant", "content": "archive as a list"}]
    begun = client.messages.create(model="llama", messages=turns, max_tokens=3, extra_body=GREEDY)
    joined: Any = [{"role": "user", "content": f"{PROMPT} archive as a list"}]
    counted = client.messages.count_tokens(model="llama", messages=turns).input_tokens
    # Only the question's answer has a prompt for thinking at its end.
    assert counted < client.messages.count_tokens(model="llama", messages=joined).input_tokens
    assert begun.usage.output_tokens == 3


def test_errors_are_anthropics(client: Anthropic) -> None:
    wrong: Any = [{"role": "user", "content": 3}]
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="llama", messages=wrong, max_tokens=5)
    body: Any = bad.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content is 3" in body["error"]["message"]
    assert bad.value.request_id == body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", messages=ASKED, max_tokens=5)
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_a_prompt_that_is_too_long_is_refused_by_its_field(client: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": PROMPT * 10_000}]
    for call in (
        lambda: client.messages.create(model="llama", messages=turns, max_tokens=5),
        lambda: client.messages.count_tokens(model="llama", messages=turns),
    ):
        with pytest.raises(anthropic.BadRequestError) as raised:
            call()  # type: ignore[no-untyped-call]
        assert "maximum" in raised.value.message


def test_the_beta_endpoint_and_its_headers_are_accepted(client: Anthropic) -> None:
    answer = client.beta.messages.create(
        model="llama", messages=ASKED, max_tokens=2, betas=["interleaved-thinking-2025-05-14"]
    )
    assert answer.usage.output_tokens == 2
    assert answer._request_id


def test_a_stream_begins_with_the_prompts_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="llama", messages=ASKED, system="Be exact.").input_tokens
    with client.messages.stream(model="llama", messages=ASKED, system="Be exact.", max_tokens=4) as stream:
        (start,) = (event for event in stream if event.type == "message_start")
        used = start.message.usage
        final = stream.get_final_message().usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == counted
    assert (used.input_tokens, used.cache_read_input_tokens) == (final.input_tokens, final.cache_read_input_tokens)


def test_a_billing_header_spoils_no_cached_prefix(client: Anthropic) -> None:
    def cached(checksum: str) -> int:
        header = f"x-anthropic-billing-header: cc_version=2.1.0; cch={checksum};"
        texts = (header, "Return the name of the class and of each of its methods. " * 8)
        system: Any = [{"type": "text", "text": text} for text in texts]
        answer = client.messages.create(model="llama", messages=ASKED, system=system, max_tokens=1)
        return answer.usage.cache_read_input_tokens or 0

    cached("1a2b3")
    assert cached("4d5e6") > 64


def test_an_agents_request_is_served_and_names_what_has_no_effect(client: Anthropic) -> None:
    searched: Any = {**WEATHER, "defer_loading": True}
    reference: Any = {"type": "tool_reference", "tool_name": "weather"}
    search: Any = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    call: Any = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}}
    turns: Any = [
        *ASKED,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [reference]}]},
        {"role": "system", "content": "Use the tool.", "clear_at": "next_user_message"},
    ]
    with client.beta.messages.stream(
        model="llama", messages=turns, max_tokens=200, extra_body=GREEDY, betas=["context-management-2025-06-27"],
        tools=[search, searched, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "tool", "name": "weather"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    ) as stream:  # fmt: skip
        final = stream.get_final_message()
        warnings = stream.response.headers.get_list("x-baton-warning")
    (block,) = final.content
    assert block.type == "tool_use"
    assert final.context_management is not None
    assert final.context_management.applied_edits == []
    assert ["web_search_20250305" in warnings[0], "clear_tool_uses_20250919" in warnings[1]] == [True, True]


def test_a_tool_runner_goes_on_without_a_thread(client: Anthropic) -> None:
    cities: list[str] = []

    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "Rain."

    tool: Any = anthropic.beta_tool(weather)
    runner = client.beta.messages.tool_runner(
        model="llama", messages=ASKED, max_tokens=200, tools=[tool], tool_choice=ONE_CALL, max_iterations=2
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert cities


def test_models_are_listed_as_anthropic_lists_them(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("llama", "model", "llama")
    assert client.models.retrieve("llama") == model
