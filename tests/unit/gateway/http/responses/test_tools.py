"""Tools that are not functions reach the model as functions, and their calls come back as the client's own items."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.checking import checked
from baton.gateway.http.responses.answer import Identity, ResponseObject
from baton.gateway.http.responses.items import sealed, unsealed
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.stream import ResponsesStream
from baton.gateway.http.responses.translate import Conversation, to_conversation
from baton.gateway.text.chat.types import NamedTool
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.chat_stream import called, chat_message, ended
from tests.unit.gateway.http.responses.test_stream import checked_events

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR}
NOTE = {"type": "custom", "name": "note"}
SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object"}}
DOCS = {"type": "namespace", "name": "mcp__docs", "description": "Pages.", "tools": [SEARCH, NOTE]}
SHELLS = [{"type": "local_shell"}, {"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}]
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
USER = {"role": "user", "content": "Hi"}


def request(**body: Any) -> ResponsesRequest:
    return checked(ResponsesRequest, {"model": "m", "input": [USER], **body})


def conversation(**body: Any) -> Conversation:
    return to_conversation(request(**body))


def items(messages: list[pb.GenerateResponse], **body: Any) -> list[dict[str, Any]]:
    """The items of a streamed answer; its whole answer has the same."""
    asked = request(**body)
    stream = ResponsesStream(ResponseObject(asked, Identity("k", "m", 1), to_conversation(asked)))
    found = checked_events(b"".join([*map(stream.push, messages), stream.finish()]))
    done = [event.data["item"] for event in found if event.name == "response.output_item.done"]
    assert done == found[-1].data["response"]["output"]
    checked(ResponsesRequest, {"input": [USER, *done]})
    return done


def shown(**body: Any) -> list[str]:
    return [tool["function"]["name"] for tool in conversation(**body).chat.tools]


def test_tools_of_all_kinds_are_functions_for_the_model() -> None:
    assert shown(tools=[PATCH, DOCS, *SHELLS]) == [
        "patch", "mcp__docs__search", "mcp__docs__note", "local_shell", "shell", "apply_patch",
    ]  # fmt: skip
    function = conversation(tools=[PATCH]).chat.tools[0]["function"]
    assert function["description"] == "Edits."
    assert "start: /a+/" in function["parameters"]["properties"]["input"]["description"]


def test_the_namespace_functions_is_none() -> None:
    assert shown(tools=[{**DOCS, "name": "functions"}]) == ["search", "note"]


def test_tools_that_run_at_openai_are_left_out_and_named() -> None:
    hosted = [
        {"type": "web_search", "filters": {"any": [1]}},
        {"type": "mcp", "server_label": "x"},
        {"type": "tool_search"},
    ]
    asked = conversation(tools=[*hosted, {"type": "shell", "environment": {"type": "container_auto"}}, SEARCH])
    assert [tool["function"]["name"] for tool in asked.chat.tools] == ["search"]
    assert asked.warnings == (
        "tools: web_search, mcp, tool_search at OpenAI, shell in a container: these run at OpenAI only, so the model "
        "does not see them",
    )


def test_two_tools_with_one_name_are_refused() -> None:
    other = {"type": "function", "name": "mcp__docs__search"}
    with pytest.raises(InvalidRequest) as raised:
        conversation(tools=[DOCS, other])
    assert (raised.value.field, raised.value.value) == ("tools[1]", "mcp__docs__search")
    assert shown(tools=[DOCS, DOCS]) == ["mcp__docs__search", "mcp__docs__note"]


def test_tools_that_come_as_items_are_there_too() -> None:
    found = {"type": "tool_search_output", "call_id": "c", "tools": [DOCS]}
    search = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "docs"}, "execution": "client"}
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    assert shown(input=[USER, more, search, found]) == ["patch", "mcp__docs__search", "mcp__docs__note"]


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
def test_the_only_tool_with_a_grammar_gets_the_output_as_its_input(choice: Any) -> None:
    asked = conversation(tools=[PATCH], tool_choice=choice)
    assert asked.chat.grammar == Grammar(GrammarKind.LARK, "start: /a+/")
    assert asked.chat.raw_tool == "patch"
    assert not asked.warnings
    messages = [called(0, id="c1", name="patch", arguments='{"input"'), called(0, arguments=': "a'), ended()]
    (call,) = items(messages, tools=[PATCH], tool_choice=choice)
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", '{"input": "a')
    assert call["call_id"] == "c1"


def test_a_tool_with_a_grammar_may_have_an_empty_input() -> None:
    (call,) = items([called(0, id="c1", name="patch"), ended()], tools=[PATCH], tool_choice="required")
    assert (call["type"], call["input"], call["call_id"]) == ("custom_tool_call", "", "c1")


def test_a_grammar_that_is_not_enforced_is_named() -> None:
    asked = conversation(tools=[PATCH, SEARCH], tool_choice="required")
    assert not asked.chat.raw_tool
    assert asked.warnings == ("tools: the grammar of patch is enforced only if tool_choice names the tool",)


def test_a_custom_tool_without_a_grammar_is_forced_as_a_function() -> None:
    asked = conversation(tools=[NOTE], tool_choice={"type": "custom", "name": "note"})
    assert asked.chat.tool_choice == NamedTool("note")
    assert not asked.chat.raw_tool


def test_a_call_of_a_custom_tool_streams_its_text() -> None:
    asked = request(tools=[PATCH])
    stream = ResponsesStream(ResponseObject(asked, Identity("k", "m", 1), to_conversation(asked)))
    messages = [
        called(0, id="c1", name="patch", arguments='{"in'),
        called(0, arguments='put": "one\\'),
        called(0, arguments='ntwo"'),
        called(0, arguments="}"),
        ended(),
    ]
    found = checked_events(b"".join([*map(stream.push, messages), stream.finish()]))
    deltas = [event.data["delta"] for event in found if event.name == "response.custom_tool_call_input.delta"]
    assert deltas == ["one", "\ntwo"]
    (done,) = [event.data for event in found if event.name == "response.custom_tool_call_input.done"]
    assert done["input"] == "one\ntwo"


def test_a_call_in_a_namespace_has_both_parts_of_its_name() -> None:
    messages = [
        called(0, id="c1", name="mcp__docs__search", arguments="{}"),
        called(1, id="c2", name="mcp__docs__note", arguments='{"input": "x"}'),
        called(2, id="c3", name="unheard_of", arguments="{}"),
        ended(),
    ]
    function, custom, unknown = items(messages, tools=[DOCS])
    assert (function["type"], function["namespace"], function["name"]) == ("function_call", "mcp__docs", "search")
    assert (custom["type"], custom["namespace"], custom["input"]) == ("custom_tool_call", "mcp__docs", "x")
    assert (unknown["type"], unknown["name"]) == ("function_call", "unheard_of")
    assert "namespace" not in unknown


def test_calls_of_shells_and_patches_have_items_of_their_own() -> None:
    messages = [
        called(0, id="c1", name="local_shell", arguments='{"command": ["ls"], "timeout_ms": 5}'),
        called(1, id="c2", name="shell", arguments='{"commands": "ls"}'),
        called(2, id="c3", name="apply_patch", arguments='{"type": "delete_file", "path": "a"}'),
        ended(),
    ]
    local, shell, patch = items(messages, tools=SHELLS)
    assert local["action"] == {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}
    assert shell["action"]["commands"] == ["ls"]
    assert patch["operation"] == {"type": "delete_file", "path": "a"}
    assert [each["type"] for each in (local, shell, patch)] == ["local_shell_call", "shell_call", "apply_patch_call"]


def test_calls_and_outputs_of_every_kind_are_part_of_the_conversation() -> None:
    history = [
        USER,
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a"b'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "function_call", "call_id": "2", "name": "search", "namespace": "mcp__docs", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "none"},
        {"type": "local_shell_call", "id": "3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "3", "output": "a"},
        {"type": "shell_call", "call_id": "4", "action": {"commands": ["ls"], "timeout_ms": None}},
        {"type": "shell_call_output", "call_id": "4", "output": [{"stdout": "a", "outcome": {"type": "timeout"}}]},
        {"type": "apply_patch_call", "call_id": "5", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "5", "status": "failed", "output": "no such file"},
    ]  # fmt: skip
    messages = conversation(input=history, tools=[PATCH, DOCS, *SHELLS]).chat.messages
    calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("patch", '{"input": "a\\"b"}'),
        ("mcp__docs__search", "{}"),
        ("local_shell", '{"command": ["ls"]}'),
        ("shell", '{"commands": ["ls"]}'),
        ("apply_patch", '{"type": "delete_file", "path": "a"}'),
    ]
    outputs = [message["content"] for message in messages if message["role"] == "tool"]
    assert outputs[0] == "done"
    assert outputs[4] == "failed\nno such file"


def test_an_image_in_a_tools_output_leaves_a_hint_for_the_model() -> None:
    history = [
        USER,
        {"type": "function_call", "call_id": "1", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:,"}]},
    ]
    asked = conversation(input=history)
    assert asked.chat.messages[-1]["content"] == "[image left out: the model reads text only]"
    assert asked.warnings == ("input: left out: parts of type input_image",)


def test_reasoning_comes_back_in_what_clients_send_again() -> None:
    (thought, _) = items(
        [chat_message(reasoning="Hm, é."), chat_message("Yes"), ended()], include=["reasoning.encrypted_content"]
    )
    again = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    assert conversation(input=[USER, again]).chat.messages[-1]["reasoning_content"] == "Hm, é."
    foreign = conversation(input=[USER, {**again, "encrypted_content": "gAAAA"}])
    assert foreign.chat.messages == [USER]
    assert foreign.warnings == ("input: left out: encrypted reasoning of other servers",)
    assert unsealed(sealed("x")[:-2]) == ""


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "custom", "name": "search"}, "tool_choice.name"),
        ({"type": "function", "name": "patch"}, "tool_choice.name"),
        ({"type": "shell"}, "tool_choice.type"),
        ({**ALLOWED, "tools": [{"type": "custom", "name": "x"}]}, "tool_choice.tools[0].name"),
    ],
)  # fmt: skip
def test_a_choice_of_a_tool_that_is_not_there_is_refused(choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        conversation(tools=[PATCH, SEARCH], tool_choice=choice)
    assert raised.value.field == field


def test_allowed_tools_may_name_hosted_ones() -> None:
    tools = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    asked = conversation(
        tools=[PATCH, SEARCH], tool_choice={"type": "allowed_tools", "mode": "required", "tools": tools}
    )
    assert [tool["function"]["name"] for tool in asked.chat.tools] == ["patch"]
    assert asked.chat.raw_tool


def test_the_answer_repeats_tools_without_their_secrets() -> None:
    secret = {"type": "mcp", "server_label": "x", "authorization": "Bearer s3cret", "headers": {"x-key": "s3cret"}}
    asked = request(tools=[secret, PATCH], tool_choice={"type": "custom", "name": "patch"})
    written = ResponseObject(asked, Identity("k", "m", 1), to_conversation(asked)).begun()
    assert b"s3cret" not in written
    assert b'"server_label":"x"' in written
    assert b'"tool_choice":{"type":"custom","name":"patch"}' in written
