"""Parts of `baton chat`: commands, Markdown as it arrives, the line below an answer."""

import io

import pytest
from rich.console import Console

from baton.cli.chat import HELP, Conversation, _said, speed_line
from baton.cli.chat_terminal import PlainAnswer, RenderedText, split_blocks, written
from baton.client.outputs import Finished
from baton.core.types import FinishReason
from tests.unit.baton.test_cli import RECEIPT, USAGE


def said(line: str, conversation: Conversation | None = None, *, interactive: bool = True) -> str | None:
    return _said(line, conversation or Conversation(), interactive=interactive)


def test_clear_forgets_all_but_the_system_message() -> None:
    conversation = Conversation("Be brief.")
    conversation.ask("x")
    assert said("/clear", conversation) == "conversation cleared"
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_a_system_message_can_be_shown_and_set() -> None:
    conversation = Conversation()
    assert said("/system", conversation) == "no system message; /system TEXT sets one"
    conversation.ask("x")
    said("/system Be brief.\nAnd kind.", conversation)
    assert said("/system", conversation) == "Be brief.\nAnd kind."
    assert conversation.messages == [{"role": "system", "content": "Be brief.\nAnd kind."}]


def test_a_mistyped_command_gets_the_list_of_commands() -> None:
    assert said("/hlep") == f"/hlep is not a command\n{HELP}"
    assert said("/help") == HELP


@pytest.mark.parametrize("line", ["/etc/hosts", "/usr is a folder", "/clear the table, please", "what does /help do?"])
def test_a_question_may_begin_with_a_slash(line: str) -> None:
    assert said(line) is None


def test_a_piped_line_that_is_no_command_is_a_question() -> None:
    assert said("/hlep", interactive=False) is None


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one\ntwo", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthr", "one\n\ntwo\n\n"),
        ("one\n", ""),
        ("\n\none", ""),
        ("```\na\n\nb", ""),
        ("x\n\n```py\na\n\nb\n", "x\n\n"),
        ("```py\na\n\nb\n```\n\nc", "```py\na\n\nb\n```\n\n"),
        ("````\n```\n\nb\n````\n\nc", "````\n```\n\nb\n````\n\n"),
    ],
)
def test_markdown_is_cut_after_a_blank_line_outside_of_code(text: str, done: str) -> None:
    assert split_blocks(text) == (done, text.removeprefix(done))


def test_each_block_of_an_answer_is_rendered_once() -> None:
    screen = io.StringIO()
    answer = RenderedText(Console(file=screen, force_terminal=True, width=40, height=10, color_system=None))
    for piece in ("# He", "ad\n\n- on", "e\n- two\n\n", "**bo", "ld** last"):
        answer.add(piece)
    answer.end()
    lines = [line.rstrip() for line in shown_on(screen.getvalue())]
    assert [line.strip() for line in lines if line.strip() and line.strip("━┏┓┗┛")] == [
        *[line.strip() for line in lines if "Head" in line], "• one", "• two", "bold last",
    ]  # fmt: skip
    assert sum("Head" in line for line in lines) == 1


def test_an_unfinished_block_taller_than_the_terminal_leaves_nothing_behind() -> None:
    screen = io.StringIO()
    answer = RenderedText(Console(file=screen, force_terminal=True, width=40, height=6, color_system=None))
    for number in range(30):
        answer.add(f"- item {number}\n")
    answer.end()
    lines = [line.strip() for line in shown_on(screen.getvalue()) if line.strip()]
    assert lines == [f"• item {number}" for number in range(30)]


def test_an_answer_cannot_move_the_cursor() -> None:
    screen = io.StringIO()
    answer = RenderedText(Console(file=screen, force_terminal=True, width=40, height=10, color_system=None))
    answer.add("a\x1b[2J\x07b\x9b1A")
    answer.end()
    assert "".join(shown_on(screen.getvalue())).strip() == "a[2Jb1A"


def shown_on(written_bytes: str) -> list[str]:
    """The lines of a terminal after these bytes: rich moves up, erases lines, and writes them again."""
    lines, row = [""], 0
    parts = written_bytes.replace("\r", "").split("\x1b[")
    for place, part in enumerate(parts):
        text = part
        if place:
            code = next(index for index, each in enumerate(part) if each.isalpha())
            order, text = part[: code + 1], part[code + 1 :]
            if order == "1A":
                row -= 1
            elif order == "2K":
                lines[row] = ""
        for index, each in enumerate(text.split("\n")):
            if index:
                row += 1
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row] + each if index == 0 or not each else each
    return lines


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    answer = written(Console(file=io.StringIO()))
    assert isinstance(answer, PlainAnswer)
    answer.add("**bo")
    answer.add("ld**")
    answer.end()
    assert capsys.readouterr().out == "**bold**\n"


def test_the_line_below_an_answer_has_its_speed_and_the_bytes_that_moved() -> None:
    finished = Finished("", FinishReason.STOP, "", USAGE, RECEIPT)
    assert speed_line(finished) == (
        "84 tokens in, 11 out; first after 200 ms; then 10 tokens/s; prefill-0 handed 0.00391 MiB over cma to decode-0"
    )
