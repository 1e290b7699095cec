"""System messages in the middle of a conversation, with templates that take them and templates that do not."""

from typing import Any

import pytest

from baton.gateway.text.chat.checkpoint import DEFAULT, Checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.types import ChatRequest
from tests.unit.gateway.chat.checkpoints import ASKS, LOOP

ONLY_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + LOOP + ASKS
)
LEFT_OUT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}" + ASKS
)
PARTS = ONLY_FIRST.replace(
    "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{{ '|' if not loop.last }}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}" + LOOP + ASKS
REMINDER = "<system-reminder>\n{}\n</system-reminder>"

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}
ANSWER = {"role": "assistant", "content": "A"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "R"}
NOTE = {"role": "system", "content": "N"}
FOLDED = REMINDER.format("N")


def model_of(template: str) -> ChatModel:
    return ChatModel(Checkpoint({DEFAULT: template}, {}, {}, frozenset(), ""))


def prompt(model: ChatModel, *messages: Any) -> str:
    return model.prepare(ChatRequest(messages)).prompt


def test_a_template_that_takes_them_gets_them() -> None:
    model = model_of(LOOP + ASKS)
    assert prompt(model, SYSTEM, USER, NOTE, ANSWER, USER) == "<system>S<user>U<system>N<assistant>A<user>U<assistant>"


@pytest.mark.parametrize("template", [ONLY_FIRST, LEFT_OUT])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((SYSTEM, USER, NOTE), f"<system>S<user>U\n\n{FOLDED}"),
        ((USER, NOTE, NOTE), f"<user>U\n\n{FOLDED}\n\n{FOLDED}"),
        ((USER, CALL, RESULT, NOTE), f"<user>U<assistant><tool>R\n\n{FOLDED}"),
        ((USER, CALL, NOTE, RESULT), f"<user>U<assistant><tool>R\n\n{FOLDED}"),
        ((USER, ANSWER, NOTE, USER), f"<user>U<assistant>A<user>{FOLDED}\n\nU"),
        ((USER, ANSWER, NOTE), f"<user>U<assistant>A<user>{FOLDED}"),
        ((USER, ANSWER, NOTE, ANSWER, USER), f"<user>U<assistant>A<user>{FOLDED}<assistant>A<user>U"),
        ((SYSTEM, NOTE, USER), "<system>S\n\nN<user>U"),
    ],
)
def test_a_template_that_does_not_gets_them_in_other_messages(template: str, messages: Any, expected: str) -> None:
    assert prompt(model_of(template), *messages) == f"{expected}<assistant>"


def test_parts_stay_parts() -> None:
    two = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert prompt(model_of(PARTS), two, NOTE) == f"<user>a|b|{FOLDED}<assistant>"


def test_a_later_turn_begins_with_the_same_prompt() -> None:
    model = model_of(ONLY_FIRST)
    turns = [SYSTEM, USER, NOTE, CALL, RESULT, NOTE]
    first = prompt(model, *turns).removesuffix("<assistant>")
    assert prompt(model, *turns, ANSWER, USER).startswith(first)


def test_many_instructions_are_folded_at_once() -> None:
    assert prompt(model_of(ONLY_FIRST), USER, *[NOTE] * 100_000).count("N") == 100_000


def test_a_template_without_system_messages_says_so() -> None:
    model = model_of(NO_SYSTEM)
    with pytest.raises(Exception, match=r"No system\."):
        prompt(model, SYSTEM, USER)
    assert prompt(model, USER) == "<user>U<assistant>"
