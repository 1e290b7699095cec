"""Which tools of a Messages request the model sees, and how."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.anthropic.no_effect import without_effect
from baton.gateway.http.anthropic.translate import to_chat
from baton.gateway.http.checking import checked
from baton.gateway.text.chat.types import ChatRequest, NamedTool

USER = {"role": "user", "content": "Hello"}
SEARCH = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def hidden(name: str) -> dict[str, Any]:
    return tool(name, defer_loading=True)


def request(*messages: dict[str, Any], **body: Any) -> MessagesRequest:
    return checked(MessagesRequest, {"max_tokens": 9, "messages": list(messages or [USER]), **body})


def chat(*messages: dict[str, Any], **body: Any) -> ChatRequest:
    return to_chat(request(*messages, **body))


def names(*messages: dict[str, Any], **body: Any) -> list[str]:
    return [each["function"]["name"] for each in chat(*messages, **body).tools]


def turns(name: str, arguments: Any, *content: dict[str, Any]) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    call = {"type": "tool_use", "id": name, "name": name, "input": arguments}
    result = {"type": "tool_result", "tool_use_id": name, "content": list(content)}
    return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name}


def test_a_deferred_tool_is_hidden_until_a_reference_names_it() -> None:
    tools = [hidden("a"), tool("ToolSearch"), hidden("b"), hidden("c")]
    assert names(tools=tools) == ["ToolSearch"]
    found = turns("ToolSearch", {"query": "c"}, reference("c"), reference("x"))
    made = chat(*found, tools=tools)
    assert [each["function"]["name"] for each in made.tools] == ["ToolSearch", "c"]
    assert [part["text"] for part in made.messages[2]["content"]] == ["c can be called now.", "x does not exist."]
    later = [*found, *turns("c", {}), *turns("ToolSearch", {}, reference("a"))[1:]]
    assert names(*later, tools=tools) == ["ToolSearch", "c", "a"]


def test_a_deferred_tool_is_shown_when_a_call_a_choice_or_an_addition_names_it() -> None:
    tools = [tool("a"), hidden("b")]
    assert names(*turns("b", {}), tools=tools) == ["a", "b"]
    assert names(tools=tools, tool_choice={"type": "tool", "name": "b"}) == ["a", "b"]
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "b"}}
    assert names(USER, {"role": "system", "content": [addition]}, tools=tools) == ["a", "b"]


def test_nobody_searches_for_anthropics_servers_so_no_tool_is_hidden() -> None:
    tools = [SEARCH, tool("a"), hidden("b")]
    assert names(tools=tools) == ["a", "b"]
    assert without_effect(request(tools=tools)) == [
        "tools: nobody runs tool_search_tool_regex_20251119 here, so the model does not see it",
        "tools: defer_loading has no effect, because nobody searches the tools here",
    ]
    found = {"type": "tool_search_tool_search_result", "tool_references": [reference("b")]}
    result = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": found}
    before = {"role": "assistant", "content": [{"type": "text", "text": "I search."}, result]}
    assert names(USER, before, USER, tools=[tool("a"), hidden("b"), hidden("c")]) == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "name", "commands"),
    [
        ("bash_20250124", "bash", None),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["view", "create", "str_replace", "insert"]),
        ("text_editor_20250124", "str_replace_editor", ["view", "create", "str_replace", "insert", "undo_edit"]),
        ("memory_20250818", "memory", ["view", "create", "str_replace", "insert", "delete", "rename"]),
    ],
)
def test_a_tool_that_anthropic_defines_and_the_client_runs_gets_its_schema(
    kind: str, name: str, commands: list[str] | None
) -> None:
    (function,) = (each["function"] for each in chat(tools=[{"type": kind, "name": name}]).tools)
    assert function["name"] == name
    assert function["description"]
    properties = function["parameters"]["properties"]
    assert commands == properties["command"].get("enum")
    assert set(function["parameters"]["required"]) <= set(properties)
    assert without_effect(request(tools=[{"type": kind, "name": name}])) == []


@pytest.mark.parametrize(
    "kind",
    ["web_search_20250305", "web_fetch_20260318", "code_execution_20260521", "advisor_20260301", "web_search_20991231"],
)
def test_a_tool_that_anthropics_servers_run_is_left_out_and_named(kind: str) -> None:
    server = {"type": kind, "name": "it", "max_uses": 3}
    assert names(tools=[server, tool("a")]) == ["a"]
    assert without_effect(request(tools=[server, tool("a")])) == [
        f"tools: nobody runs {kind} here, so the model does not see it"
    ]
    for choice in ({"type": "any"}, {"type": "tool", "name": "it"}):
        with pytest.raises(InvalidRequest) as raised:
            chat(tools=[server], tool_choice=choice)
        assert raised.value.cure == "give tools that you run yourself".replace(
            "tools that", "a tool that" if choice["type"] == "tool" else "tools that"
        )


def test_tools_of_mcp_servers_are_left_out_and_named() -> None:
    body: dict[str, Any] = {
        "mcp_servers": [{"type": "url", "url": "https://example.com", "name": "jira", "authorization_token": "secret"}],
        "tools": [{"type": "mcp_toolset", "mcp_server_name": "jira", "default_config": {"defer_loading": True}}],
    }
    assert names(**body) == []
    assert without_effect(request(**body)) == [
        "tools: nobody runs mcp_toolset here, so the model does not see it",
        "mcp_servers: nobody asks jira for tools",
    ]


def test_a_tool_that_only_code_may_call_is_called_by_the_model() -> None:
    coded = tool("a", allowed_callers=["code_execution_20260120"])
    assert names(tools=[coded, tool("b", allowed_callers=["direct", "code_execution_20260120"])]) == ["a", "b"]
    assert without_effect(request(tools=[coded])) == [
        "tools: allowed_callers of a have no effect: the model calls every tool itself"
    ]


def test_a_choice_of_a_tool_names_it() -> None:
    assert chat(tools=[tool("a")], tool_choice={"type": "tool", "name": "a"}).tool_choice == NamedTool("a")
