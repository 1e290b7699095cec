"""Malformed calls of Qwen3-Coder are those that the models' own parser finds with its regular expressions."""

import json
import re
from itertools import combinations

from baton.gateway.text.chat.parsing.xml_call import xml_calls
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


def test_calls_with_missing_and_doubled_tags_are_those_of_the_reference_parser() -> None:
    tags = [place for place, piece in enumerate(WHOLE) if piece.startswith("<")]
    for missing in [(), *((tag,) for tag in tags), *combinations(tags, 2)]:
        for doubled in (None, *tags):
            pieces = [piece * (1 + (place == doubled)) for place, piece in enumerate(WHOLE) if place not in missing]
            for after in ("", "\nDone."):
                text = "".join(pieces) + after
                answer = parse(xml_calls({"f": {}}), [text])
                read = [(name, json.loads(arguments)) for name, arguments in answer.calls]
                assert read == reference(text), text
                assert not read or "<" not in answer.content, text
