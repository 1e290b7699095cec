"""What the Messages API refuses, and the field that it names."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from baton.gateway.http.checking import checked

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def refused(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        checked(MessagesRequest, {"max_tokens": 5, "messages": [USER], **body})
    return raised.value


def blocks(*content: object, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


@pytest.mark.parametrize(
    "harmless",
    [
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "inference_geo": "eu", "speed": "standard"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}, "mcp_servers": [], "container": None},
        {
            "tools": [],
            "thinking": {"type": "between_tools"},
            "speed": "fast",
            "diagnostics": {"previous_message_id": "m"},
        },
        {"tools": [{"type": None, **TOOL, "defer_loading": True, "allowed_callers": ["code_execution_20260120"]}]},
        {
            "thinking": {"type": "adaptive", "display": "updates", "block_binding": {}},
            "betas": ["x"],
            "fallbacks": "default",
        },
        {"output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 9}}, "billing_policy": {}},
        {
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]
            }
        },
        {"stop_sequences": [str(number) for number in range(200)]},
        {"tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}]},
        {"thinking": {"type": "adaptive", "display": "summarized"}, "stream": False, "top_k": 5},
    ],
)
def test_harmless_parameters_are_accepted(harmless: dict[str, Any]) -> None:
    checked(MessagesRequest, {"max_tokens": 5, "messages": [USER], **harmless})


def test_counting_needs_no_limit() -> None:
    checked(CountTokensRequest, {"model": "m", "messages": [USER]})


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 2**40}),
        ("max_tokens", {"max_tokens": "5"}),
        ("max_tokens", {"max_tokens": True}),
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi"}),
        ("messages[1]", {"messages": [USER, None]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].name", {"messages": [{**USER, "name": "x"}]}),
        ("messages[0].content[0]", {"messages": blocks("Hi")}),
        ("messages[0].content[0].type", {"messages": blocks({"text": "Hi"})}),
        ("messages[0].content[0].type", {"messages": blocks({"type": "image", "source": {}})}),
        ("messages[0].content[0].text", {"messages": blocks({"type": "text", "text": None})}),
        ("messages[0].content[0].input", {"messages": blocks({**CALL, "input": []})}),
        ("messages[0].content[0].id", {"messages": blocks({**CALL, "id": ""})}),
        ("messages[0].content[0].content[0].type", {"messages": blocks(
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "hologram"}]}
        )}),
        ("system", {"system": 4}),
        ("system[0].type", {"system": [{"type": "image"}]}),
        ("tools[0].type", {"tools": [{"type": "teleport_20250305", "name": "teleport"}]}),
        ("tools[0].type", {"tools": [{"type": "computer_20251124", "name": "computer", "display_width_px": 8}]}),
        ("tools[0].name", {"tools": [{**TOOL, "name": ""}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
        ("tools[0].defer_loading", {"tools": [{**TOOL, "defer_loading": "yes"}]}),
        ("tools[0].name", {"tools": [{"type": "bash_20250124"}]}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice.type", {"tool_choice": {"type": "required"}}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
        ("thinking.type", {"thinking": {"type": "always"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 10}}),
        ("output_config.effort", {"output_config": {"effort": "huge"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        ("stop_sequences[0]", {"stop_sequences": [""]}),
        ("stop_sequences", {"stop_sequences": "x"}),
        ("temperature", {"temperature": float("inf")}),
        ("top_k", {"top_k": 1.5}),
        ("mcp_servers", {"mcp_servers": "x"}),
        ("speed", {"speed": "slow"}),
        ("compaction", {"compaction": {"type": "summarize"}}),
        ("thread", {"thread": {"type": "create"}}),
        ("context_management.edits[0].type", {"context_management": {"edits": [{}]}}),
        ("messages[0].content[0].source.type", {"messages": blocks(
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
        )}),
        ("messages[0].content[0].source.content[0].type", {"messages": blocks(
            {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}
        )}),
        ("messages[0].clear_at", {"messages": [{**USER, "clear_at": "never"}]}),
        ("messages[0].content[0].cache_control.type", {"messages": blocks(
            {"type": "text", "text": "a", "cache_control": {"type": "forever"}}
        )}),
        ("metadata.x", {"metadata": {"x": 1}}),
        ("max_output_tokens", {"max_output_tokens": 5}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_by_its_field(field: str, body: dict[str, Any]) -> None:
    assert refused(**body).field == field


@pytest.mark.parametrize("kind", ["teleport_20250305", "", "bash"])
def test_an_unknown_type_of_tool_lists_all_types_that_are_served(kind: str) -> None:
    assert refused(tools=[{"type": kind, "name": "x"}]).allowed == (
        "'custom'", "'bash_*'", "'text_editor_*'", "'memory_*'", "'web_search_*'", "'web_fetch_*'",
        "'code_execution_*'", "'tool_search_tool_*'", "'advisor_*'", "'mcp_toolset'",
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrap",
    [
        lambda block: block,
        lambda block: {"type": "tool_result", "tool_use_id": "a", "content": [block]},
        lambda block: {"type": "document", "source": {"type": "content", "content": [block]}},
        lambda block: {"type": "document", "source": block},
    ],
)
def test_an_unknown_block_lists_only_what_is_accepted(wrap: Callable[[dict[str, str]], dict[str, Any]]) -> None:
    error = refused(messages=blocks(wrap({"type": "hologram"})))
    assert "'text'" in error.allowed
    assert {"'image'", "'base64'", "'url'", "'file'", "''"}.isdisjoint(error.allowed)


@pytest.mark.parametrize("kind", ["base64", "url", "file"])
def test_a_document_that_is_no_text_is_refused_with_the_cure(kind: str) -> None:
    error = refused(messages=blocks({"type": "document", "source": {"type": kind, "data": "x"}}))
    assert error.field == "messages[0].content[0].source.type"
    assert "text" in str(error.cure)
