"""Malformed calls are those that Qwen3-Coder's own parser finds with its regular expressions, also in other tags."""

import json
import re
from itertools import combinations

import pytest

from baton.gateway.text.chat.parsing.xml_call import MINIMAX, QWEN, SEED, XmlMarkup, xml_calls
from tests.unit.gateway.chat.outputs import parse

CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*?)$", re.DOTALL)
FUNCTION = re.compile(r"<function=(.*?)</function>|<function=(.*)$", re.DOTALL)
PARAMETER = re.compile(r"<parameter=(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|$)", re.DOTALL)
WHOLE = (
    "<tool_call>", "\n", "<function=f>", "\n", "<parameter=s>", "\n", "a b", "\n", "</parameter>", "\n",
    "<parameter=t>", "\n", "x\ny", "\n", "</parameter>", "\n", "</function>", "\n", "</tool_call>",
)  # fmt: skip


def reference(text: str) -> list[tuple[str, dict[str, str]]]:
    """Names and arguments of calls whose arguments are all strings."""
    found = []
    for call in [inner or rest for inner, rest in CALL.findall(text)] or [text]:
        for closed, open_ in FUNCTION.findall(call):
            name, _, arguments = (closed or open_).partition(">")
            members = (match.partition(">") for match in PARAMETER.findall(arguments))
            found.append((name, {key: value.removeprefix("\n").removesuffix("\n") for key, _, value in members}))
    return found


def in_tags_of(markup: XmlMarkup, text: str) -> str:
    """Returns a text in Qwen's markup in another one."""
    for tag, other in zip(QWEN.tags, markup.tags, strict=True):
        text = text.replace(tag, other)
    return text


@pytest.mark.parametrize(("markup", "most_missing"), [(QWEN, 2), (SEED, 1), (MINIMAX, 1)])
def test_calls_with_missing_and_doubled_tags_are_those_of_the_reference_parser(
    markup: XmlMarkup, most_missing: int
) -> None:
    tags = [place for place, piece in enumerate(WHOLE) if piece.startswith("<")]
    for missing in [(), *((tag,) for tag in tags), *(combinations(tags, 2) if most_missing == 2 else ())]:
        for doubled in (None, *tags):
            pieces = [piece * (1 + (place == doubled)) for place, piece in enumerate(WHOLE) if place not in missing]
            for after in ("", "\nDone."):
                text = "".join(pieces) + after
                answer = parse(xml_calls({"f": {}}, markup), [in_tags_of(markup, text)])
                read = [(name, json.loads(arguments)) for name, arguments in answer.calls]
                assert read == reference(text), text
                assert not read or "<" not in answer.content, text
