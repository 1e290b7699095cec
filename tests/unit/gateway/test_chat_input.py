"""A conversation on the wire is JSON in fields; what is wrong with it is named."""

import pytest

from baton.errors import InvalidRequest
from baton.types import Grammar, GrammarKind
from gateway.chat.types import ChatRequest, NamedTool
from gateway.chat_input import chat_from_proto
from protos.baton.v1 import generation_pb2 as pb


def test_every_field_is_read() -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    wire = pb.Chat(
        messages_json='[{"role": "user", "content": "hi"}]',
        tools_json='[{"type": "function"}]',
        tool_choice_json='{"type": "function", "function": {"name": "add"}}',
        template_kwargs_json='{"enable_thinking": false}',
        continue_final_message=True,
        add_generation_prompt=False,
        parallel_tool_calls=False,
    )
    assert chat_from_proto(wire, grammar) == ChatRequest(
        messages=({"role": "user", "content": "hi"},),
        tools=({"type": "function"},),
        tool_choice=NamedTool("add"),
        parallel_tool_calls=False,
        grammar=grammar,
        template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
    )


def test_absent_fields_have_the_defaults() -> None:
    assert chat_from_proto(pb.Chat(messages_json="[]"), None) == ChatRequest(messages=())


@pytest.mark.parametrize("choice", ['"required"', "required"])
def test_a_tool_choice_may_be_a_bare_word(choice: str) -> None:
    assert chat_from_proto(pb.Chat(tool_choice_json=choice), None).tool_choice == "required"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("messages_json", "[1]"),
        ("messages_json", "{}"),
        ("messages_json", "["),
        ("messages_json", "[" * 100_000),
        ("tools_json", '"x"'),
        ("tool_choice_json", '"sometimes"'),
        ("tool_choice_json", '{"type": "function"}'),
        ("tool_choice_json", "[]"),
        ("template_kwargs_json", "[]"),
    ],
)
def test_a_wrong_field_is_named(field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat_from_proto(pb.Chat(**{field: text}), None)  # type: ignore[arg-type]
    assert raised.value.field == f"chat.{field}"
    assert len(raised.value.value) < 200
