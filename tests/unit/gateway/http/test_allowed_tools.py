"""A chat may allow some of its tools: the model sees these only, and may have to call one of them."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.translate import chat_request
from tests.unit.gateway.http.test_custom_tools import NOTE, PATCH, SEEK, USER, body, found

TELL = {"type": "function", "function": {"name": "tell"}}
PATCH_NAMED = {"type": "custom", "custom": {"name": "patch"}}
SEEK_NAMED = {"type": "function", "function": {"name": "seek"}}
TOOLS = [PATCH, NOTE, SEEK, TELL]


def allowed(mode: object, *tools: object) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {"tools": TOOLS, "tool_choice": choice}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_sees_the_allowed_tools_only(mode: str) -> None:
    asked = chat_request(body(**allowed(mode, SEEK_NAMED, PATCH_NAMED)))
    assert [tool["function"]["name"] for tool in asked.tools] == ["patch", "seek"]
    assert (asked.tool_choice, asked.raw_tool) == (mode, "")


def test_calls_of_hidden_tools_stay_in_the_conversation() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "note", "input": "x"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": ""}]
    asked = chat_request(body(messages=messages, **allowed("auto", SEEK_NAMED)))
    assert asked.messages[1]["tool_calls"][0]["function"]["name"] == "note"


def test_the_grammar_of_the_only_allowed_tool_is_enforced() -> None:
    asked = body(**allowed("required", PATCH_NAMED))
    assert chat_request(asked).raw_tool == "patch"
    assert chat_request(asked).grammar == Grammar(GrammarKind.LARK, "start: /a+/")
    custom = found(**allowed("required", PATCH_NAMED))
    assert custom.grammar_field == "tools[0].custom.format.grammar.definition"


def test_only_grammars_of_allowed_tools_are_said_to_be_free() -> None:
    assert not found(**allowed("auto", SEEK_NAMED)).warnings
    assert "patch" in found(**allowed("auto", PATCH_NAMED)).warnings[0]


def named(kind: str, name: object) -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


LIST = "tool_choice.allowed_tools.tools"


@pytest.mark.parametrize(
    ("tools", "field", "message"),
    [
        ([SEEK_NAMED, named("function", "x"), named("custom", "y")], f"{LIST}[1].function.name",
         "function 'x', custom 'y'"),
        ([named("custom", "seek")], f"{LIST}[0].custom.name", "custom 'seek'"),
        ([named("function", 3)], f"{LIST}[0].function.name", ""),
        ([{"type": "function", "name": "seek"}], f"{LIST}[0].name", ""),
        ([{"type": "mcp"}], f"{LIST}[0].type", ""),
        ([], LIST, ""),
        ([SEEK_NAMED] * 1025, LIST, "up to 1024"),
    ],
)  # fmt: skip
def test_a_tool_that_is_not_there_is_refused_by_its_name(tools: list[Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(body(**allowed("auto", *tools)))
    assert caught.value.field == field
    assert message in str(caught.value)


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(body(**allowed("any", SEEK_NAMED)))
    assert caught.value.field == "tool_choice.allowed_tools.mode"
    assert caught.value.allowed == ("'auto'", "'required'")
