"""An output that is a tool's input without any markup becomes a call of that tool."""

from pathlib import Path

import pytest

from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.types import ChatRequest, NamedTool
from tests.unit.gateway.chat.checkpoints import chat_model, tool
from tests.unit.gateway.chat.outputs import Answer, answer_of

USER = [{"role": "user", "content": "Hi"}]
REQUEST = ChatRequest(
    USER,
    tools=[tool("patch")],
    tool_choice=NamedTool("patch"),
    grammar=Grammar(GrammarKind.LARK, "start: /a*/"),
    raw_tool="patch",
)


def answer(directory: Path, family: str, *pieces: str, cut: bool = False, stopped: bool = False) -> Answer:
    model = chat_model(directory, family)
    return answer_of(model.parser(REQUEST, model.prepare(REQUEST), "seed"), pieces, cut=cut, stopped=stopped)


@pytest.mark.parametrize(
    ("family", "pieces", "reasoning"),
    [
        ("hermes", ("a", "aa"), ""),
        ("unknown", ("a", "aa"), ""),
        ("r1", ("Hm.</thi", "nk>\n\na", "aa"), "Hm."),
        ("harmony", ("<|channel|>analysis<|message|>Hm.<|end|><|channel|>fi", "nal<|message|>a", "aa"), "Hm."),
    ],
)
def test_the_answer_is_the_input(family: str, pieces: tuple[str, ...], reasoning: str, tmp_path: Path) -> None:
    found = answer(tmp_path, family, *pieces)
    assert (found.calls, found.content, found.reasoning) == ([("patch", "aaa")], "", reasoning)


def test_an_input_that_looks_like_a_call_is_an_input(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "patch", "arguments": {}}</tool_call>'
    assert answer(tmp_path, "hermes", text).calls == [("patch", text)]


@pytest.mark.parametrize(
    ("family", "pieces"),
    [
        ("hermes", ()),
        ("r1", ("Hm.</think>",)),
        ("harmony", ("<|channel|>final<|message|>",)),
    ],
)
def test_an_empty_input_is_a_call_unless_the_output_was_cut_before_it(
    family: str, pieces: tuple[str, ...], tmp_path: Path
) -> None:
    assert answer(tmp_path, family, *pieces).calls == [("patch", "")]
    assert answer(tmp_path, family, *pieces, cut=True).calls == []


@pytest.mark.parametrize(
    ("family", "text"), [("r1", "Hm."), ("harmony", "<|channel|>analysis<|message|>Hm."), ("harmony", "")]
)
def test_an_output_that_ends_in_its_reasoning_is_no_call(family: str, text: str, tmp_path: Path) -> None:
    assert answer(tmp_path, family, text).calls == []


@pytest.mark.parametrize(("family", "text"), [("hermes", ""), ("r1", "Hm.</think>"), ("unknown", "")])
def test_a_stop_string_before_the_input_leaves_no_call(family: str, text: str, tmp_path: Path) -> None:
    assert answer(tmp_path, family, text, stopped=True).calls == []
    assert answer(tmp_path, family, text + "aa", stopped=True).calls == [("patch", "aa")]


def test_ids_have_the_form_that_the_template_takes(tmp_path: Path) -> None:
    ids = {family: answer(tmp_path, family, "a").ids for family in ("hermes", "mistral", "kimi-k2")}
    (hermes,), (mistral,), (kimi,) = ids.values()
    assert hermes.startswith("call_")
    assert (len(mistral), mistral.isalnum()) == (9, True)
    assert kimi == "functions.patch:0"
