"""What coding agents add to a Messages request: headers in the system prompt, instructions between turns, documents,
edits of the context, and blocks that Anthropic's servers wrote."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.conversation import stable_first
from baton.gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from baton.gateway.http.anthropic.no_effect import without_effect
from baton.gateway.http.anthropic.translate import to_chat, to_message
from baton.gateway.http.checking import checked

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=1a2b3;"


def request(*messages: dict[str, Any], **body: Any) -> MessagesRequest:
    return checked(MessagesRequest, {"max_tokens": 9, "messages": list(messages or [USER]), **body})


def talk(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in to_chat(request(*messages, **body)).messages]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def texts(*given: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}} for text in given]


@pytest.mark.parametrize("header", [BILLING, f"{BILLING}\n", BILLING.upper(), f"{BILLING}\nx-anthropic-other: 1"])
def test_a_billing_header_is_no_part_of_the_prompt(header: str) -> None:
    assert talk(system=texts(header, "You are an agent."))[0] == {"role": "system", "content": "You are an agent."}
    assert talk(system=f"{header.rstrip()}\nYou are an agent.")[0]["content"] == "You are an agent."
    assert talk(system=header) == [USER]


def test_a_header_in_the_middle_of_a_text_stays() -> None:
    assert talk(system=f"Explain this:\n{BILLING}")[0]["content"] == f"Explain this:\n{BILLING}"


@pytest.mark.parametrize(
    "clock",
    ["Today's date is 2026-11-28.", "Current time: 10:31:07", "The current date and time is Nov 28 2026, 10:31"],
)
def test_a_block_with_only_the_date_comes_last(clock: str) -> None:
    assert stable_first([clock, "You are an agent.", "Be brief."]) == ["You are an agent.", "Be brief.", clock]


@pytest.mark.parametrize("text", ["Time is 5 letters", "Current date formats vary", "Today's date is 2026.\nBe brief."])
def test_a_block_with_more_than_the_date_keeps_its_place(text: str) -> None:
    assert stable_first([text, "Be brief."]) == [text, "Be brief."]


def test_many_blocks_with_the_date_are_moved_at_once() -> None:
    clocks = [f"Current time: 10:31:07.{number}" for number in range(100_000)]
    assert stable_first([*clocks, "Be brief."])[0] == "Be brief."


def test_instructions_between_turns_keep_their_places() -> None:
    note = {"role": "system", "content": [{"type": "text", "text": "5 files changed"}]}
    assert [turn["role"] for turn in talk(USER, note, ANSWER, USER, note)] == [
        "user", "system", "assistant", "user", "system",
    ]  # fmt: skip


def test_an_instruction_for_one_turn_goes_with_the_next_message_of_the_user() -> None:
    note = {"role": "system", "content": "Plan first.", "clear_at": "next_user_message"}
    assert talk(USER, note, ANSWER)[1]["content"] == "Plan first."
    assert talk(USER, note, ANSWER, USER) == [USER, ANSWER, USER]
    assert talk(USER, {**note, "clear_at": "never"}, ANSWER, USER)[1]["content"] == "Plan first."


def test_an_instruction_may_only_change_the_effort() -> None:
    change = {"role": "system", "output_config": {"effort": "low"}}
    made = to_chat(request(USER, change, output_config={"effort": "high"}))
    assert made.messages == [USER]
    assert made.template_kwargs["reasoning_effort"] == "low"


def test_a_text_document_becomes_text() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A"}, "title": "T"}
    parts = {"type": "document", "context": "C", "source": {"type": "content", "content": texts("A", "B")}}
    found = {"type": "search_result", "source": "http://x", "title": "T", "content": texts("A")}
    assert talk(user(plain))[0]["content"] == "T\nA"
    assert talk(user(parts))[0]["content"] == "C\nA\nB"
    assert talk(user(found))[0]["content"] == "T\nhttp://x\nA"


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "image", "source": {"type": "url", "url": "x"}}, "messages[0].content[0].type"),
        ({"type": "document", "source": {"type": "file", "file_id": "x"}}, "messages[0].content[0].source.type"),
    ],
)
def test_what_is_no_text_is_refused_by_name_with_a_cure(block: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        request(user(block))
    assert raised.value.field == field
    assert "the model reads text only" in str(raised.value)


def test_blocks_that_anthropics_servers_wrote_are_left_out_and_named() -> None:
    answer = {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
            {"type": "text", "text": "Found."},
        ],
    }
    assert talk(USER, answer, USER)[1] == {"role": "assistant", "content": "Found."}
    assert without_effect(request(USER, answer, USER)) == [
        "left out of the prompt: messages[1].content[0] (server_tool_use), "
        "messages[1].content[1] (web_search_tool_result)"
    ]


def test_a_long_list_in_a_warning_is_cut() -> None:
    blocks = [{"type": "server_tool_use", "id": "s", "name": "x", "input": {}}] * 50_000
    (warning,) = without_effect(request(USER, {"role": "assistant", "content": blocks}, USER))
    assert warning.endswith(" and 49995 more")


def test_edits_of_the_context_have_no_effect_and_are_named() -> None:
    edits = [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}},
        {"type": "compact_20260112"},
    ]
    (warning,) = without_effect(request(context_management={"edits": edits}))
    assert "clear_tool_uses_20250919, compact_20260112 has no effect" in warning
    for keep in ("all", {"type": "all"}):  # what happens anyway
        all_kept = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
        assert without_effect(request(context_management=all_kept)) == []


def test_each_field_without_effect_is_named() -> None:
    body: dict[str, Any] = {
        "speed": "fast",
        "container": {"skills": []},
        "diagnostics": {"previous_message_id": None},
        "fallbacks": "default",
        "output_config": {"task_budget": {"type": "tokens", "total": 5}},
    }
    found = [warning.split()[0].removesuffix(":") for warning in without_effect(request(**body))]
    assert found == ["speed", "output_config.task_budget", "container", "diagnostics", "fallbacks"]
    assert without_effect(request(speed="standard", metadata={"user_id": "u"}, service_tier="auto", betas=["x"])) == []


def test_reasoning_is_off_between_tools() -> None:
    assert to_chat(request(thinking={"type": "between_tools"})).template_kwargs["enable_thinking"] is False


def test_interleaved_reasoning_may_have_a_larger_budget_than_one_answer() -> None:
    thinking = {"type": "enabled", "budget_tokens": 31_999}
    assert to_message(request(thinking=thinking), interleaved=True).sampling.max_tokens == 9
    with pytest.raises(InvalidRequest):
        to_message(request(thinking=thinking))


def test_the_older_name_of_the_format_is_taken() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert to_chat(request(output_format=form)).grammar == to_chat(request(output_config={"format": form})).grammar
    with pytest.raises(InvalidRequest) as raised:
        to_chat(request(output_format=form, output_config={"format": form}))
    assert raised.value.field == "output_format"


def test_counting_takes_what_answering_takes() -> None:
    body: dict[str, Any] = {"messages": [USER], "stream": True, "max_tokens": 9, "metadata": {"user_id": "u"}}
    body |= {"temperature": 1, "speed": "fast", "context_management": {"edits": []}, "betas": ["x"], "container": "c"}
    counted = checked(CountTokensRequest, body)
    assert to_chat(counted) == to_chat(checked(MessagesRequest, body))
    assert without_effect(counted) == without_effect(checked(MessagesRequest, body))
    assert set(MessagesRequest.model_fields) == set(CountTokensRequest.model_fields)
