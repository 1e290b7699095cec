"""The work of parsing outputs that are made to be slow to parse, counted in function calls and copied characters."""

import gc
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, SupportsIndex

import pytest

from baton.gateway.text.chat import families
from baton.gateway.text.chat.families import ChatFamily
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import READ_AGAIN_CHARS_MAX
from baton.gateway.text.chat.parsing.harmony import harmony
from baton.gateway.text.chat.parsing.json_rewriter import JsonRewriter
from baton.gateway.text.chat.parsing.parser import FormatParser, Read, ReasoningMarkers, with_reasoning
from baton.gateway.text.chat.parsing.tagged_json import hermes
from tests.unit.gateway.chat.outputs import parse

FAMILIES = [each for each in vars(families).values() if isinstance(each, ChatFamily)]
READS: dict[str, Read] = {
    **{each.name: each.read({"f": {}}) for each in FAMILIES},
    "harmony": harmony(None, tools=True),
    "reasoning": with_reasoning(ReasoningMarkers("<think>", "</think>"), hermes, opened=True),
}
# Of each family: its markers, and beginnings of calls that break off only where the text ends.
MARKS: dict[str, tuple[str, ...]] = {
    **{each.name: each.marks for each in FAMILIES},
    "harmony": (
        *families.HARMONY.marks, *families.HARMONY.end_tokens, "<|channel|>commentary to=functions.f<|message|>{",
    ),
    "reasoning": ("<think>", "</think>"),
    "hermes": ("<tool_call>", "</tool_call>", '<tool_call>{"a":[}', "<tool_call>\n", '<tool_call>{"name": "f"}'),
    "qwen-xml": (
        "<tool_call>", "</tool_call>", "<tool_call>\n", "<function=", "<function=f>", "</function>", "<parameter=",
        "<parameter=s>", "</parameter>", "<function=f><parameter=s>", "<tool_call><function=f></function>",
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]f", '[TOOL_CALLS][{"a":[}'),
    "llama": (
        "<|python_tag|>", "<|python_end|>", '<|python_tag|>{"a":[}',
        '<|python_tag|>{"name":"f","parameters":{}};{"a":[}',
    ),
    "glm": (
        "<tool_call>", "</tool_call>", "<tool_call>f", "<tool_call>f<arg_key>", "<arg_key>a</arg_key><arg_value>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>b", "<tool_call>f</tool_call>", '<tool_call>{"a":[}',
    ),
    "hunyuan": (
        "<tool_calls>", "<tool_calls><tool_call>f<tool_sep>", "<tool_call>f<tool_sep><arg_key>", "</tool_calls>",
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0", "<|tool_call_end|>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>", "<|tool_call_begin|>f<|tool_call_argument_begin|>{",
    ),
    "minimax-m2": (
        "<minimax:tool_call>", '<invoke name="f">', '<invoke name="x">', '<invoke name="f"><parameter name="a">',
        '<parameter name="a">', "</parameter>", "</invoke>",
    ),
    "deepseek-v3.2": (
        "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜invoke name="f">{', "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="false">',
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">',
    ),
    "hunyuan-a13b": (
        "<tool_calls>", "<tool_calls>[", '<tool_calls>[{"a":[}', '<tool_calls>{"name":"f"}', "</tool_calls>",
    ),
    "xlam": (
        "```json", "```json[", '[{"name":"f","arguments":{', '```json[{"name":"f","arguments":{}}]', "<tool_call>[",
    ),
    "tool-code": ("```tool_code", "```tool_code\nf(", "f()\n", "```tool_code\nf()\n", "print(f(a=", "```tool_code[["),
    "functiongemma": (
        "<start_function_call>", "<start_function_call>call:f{", "a:<escape>", "a:{", "a:[<escape>", "<escape>", "a:1,",
        "<start_function_call>call:f{a:", '<start_function_call>call:f{a:"', "<end_function_call>",
        "<start_function_call>call:f{a:<escape>",
    ),
    "gemma-4": ("<|tool_call>", "<|tool_call>call:f{", 'a:<|"|>', '<|tool_call>call:f{a:<|"', '<|"', '"', "<|"),
    "llama-pythonic": ("<|python_start|>", "<|python_start|>[f(", "f(", "[f(a=", "[f(a='"),
}  # fmt: skip
ANY_FAMILYS = ("{", "}", "[", "]", '"', "'", "\\", "<", "\n", " ", ",\n", '{"', '{"a": ', "{}, ")
OUTPUTS = [(name, mark) for name in READS for mark in (*MARKS[name], *ANY_FAMILYS)]


class Calls:
    """Counts calls of functions, and of generators that go on, while it is entered.

    The collector is off meanwhile: what it frees of other tests may call functions of its own.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Calls":
        gc.disable()
        self._before = sys.getprofile()
        sys.setprofile(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        gc.enable()

    def _add(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


class Counted(str):
    """Text that counts the characters which are copied out of it and looked through from its ends."""

    chars = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = str.__getitem__(self, key)
        Counted.chars += len(found)
        return Counted(found)

    def __radd__(self, other: str) -> str:
        Counted.chars += len(other)
        return Counted(other + str(self))

    def rstrip(self, chars: str | None = None) -> str:
        Counted.chars += len(self)
        return Counted(str.rstrip(self, chars))


def calls_for(name: str, pieces: Sequence[str]) -> int:
    with Calls() as calls:
        parse(READS[name], pieces)
    return calls.count


def copied(read: Read, text: str) -> int:
    parser = FormatParser(read, Collector(str, one_call=False))
    Counted.chars = 0
    parser.push(Counted(text))
    parser.finish(cut=False)
    return Counted.chars


@pytest.mark.parametrize(("name", "mark"), OUTPUTS)
def test_marks_that_come_again_and_again_take_work_in_proportion_to_their_number(name: str, mark: str) -> None:
    few, many = 60, 240
    assert calls_for(name, [mark] * many) < 6 * calls_for(name, [mark] * few)
    assert calls_for(name, [mark * many]) < 6 * calls_for(name, [mark * few])


@pytest.mark.parametrize(("name", "mark"), OUTPUTS)
def test_of_an_output_that_comes_whole_the_rest_is_not_copied_at_every_mark(name: str, mark: str) -> None:
    few, many = 60, 240
    assert copied(READS[name], mark * many) < 6 * copied(READS[name], mark * few) + 1000


@pytest.mark.parametrize(("name", "mark"), OUTPUTS)
def test_marks_that_come_again_and_again_are_read_alike_however_they_come(name: str, mark: str) -> None:
    text = "A " + mark * 100 + "\n\n"
    whole = parse(READS[name], [text])
    assert parse(READS[name], list(text)) == whole
    assert parse(READS[name], ["A ", *[mark] * 100, "\n", "\n"]) == whole


@pytest.mark.parametrize("mark", ["<tool_call>", "<tool_call>\n", '<tool_call>{"a":[}'])
def test_tags_that_no_call_follows_are_all_content(mark: str) -> None:
    assert parse(hermes, [mark] * 50).content == mark * 50


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("hermes", '<tool_call>{"a":[}'),
        ("mistral", '[TOOL_CALLS][{"a":[}'),
        ("llama", '<|python_tag|>{"a":[}'),
        ("llama", '<|python_tag|>{"name":"f","parameters":{}};{"a":[}'),
    ],
)
def test_broken_calls_within_broken_calls_are_read_again_up_to_a_total_length(name: str, mark: str) -> None:
    text = mark * (2 * READ_AGAIN_CHARS_MAX // len(mark))
    assert calls_for(name, [text]) < 50 * len(text)
    answer = parse(READS[name], [text])
    assert parse(READS[name], [text[start : start + 7] for start in range(0, len(text), 7)]) == answer
    assert answer.calls or answer.content == text


def test_a_call_after_many_broken_ones_is_a_call() -> None:
    broken = '<tool_call>{"a": 1, oh}</tool_call>\n' * (4 * READ_AGAIN_CHARS_MAX // 36)
    answer = parse(hermes, [broken, '<tool_call>{"name": "f"}</tool_call>'])
    assert (answer.content, answer.calls) == (broken.rstrip(), [("f", "{}")])


@pytest.mark.parametrize("name", ["hermes", "reasoning"])
def test_white_space_that_is_held_back_is_looked_at_once(name: str) -> None:
    out = Collector(str, one_call=False)
    out.trim_content()
    write = out.reasoning if name == "reasoning" else out.content
    Counted.chars = 0
    write("A")
    for _ in range(2000):
        write(Counted("\n"))
    write("B")
    assert Counted.chars < 6 * 2000
    assert "".join(delta.content + delta.reasoning for delta in out.take()) == "A" + "\n" * 2000 + "B"


def test_space_after_a_comma_of_json_stays_as_it_is() -> None:
    rewriter = JsonRewriter()
    for character in '{"a": 1,' + " \n" * 50 + '"b": 2, }':
        rewriter.read(character, 0)
    assert rewriter.take() == '{"a": 1,' + " \n" * 50 + '"b": 2 }'


def test_text_that_is_held_comes_out_when_the_output_ends() -> None:
    parser = FormatParser(hermes, Collector(str, one_call=False))
    assert not [delta for _ in range(100) for delta in parser.push("<tool_call>")]
    assert "".join(delta.content for delta in parser.finish(cut=False)) == "<tool_call>" * 100
