"""Runs parsers over texts and gathers what they find."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.parser import FormatParser, Read
from baton.gateway.text.chat.types import OutputParser, ParsedDelta


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, deltas: Iterable[ParsedDelta]) -> None:
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            for call in delta.tool_calls:
                if call.name:
                    assert call.index == len(self.calls)
                    self.calls.append((call.name, ""))
                    self.ids.append(call.id)
                name, arguments = self.calls[call.index]
                self.calls[call.index] = (name, arguments + call.arguments)


def answer_of(parser: OutputParser, pieces: Sequence[str], *, cut: bool = False, stopped: bool = False) -> Answer:
    """`cut`: the output reached its limit. `stopped`: a stop string ended it."""
    answer = Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish(cut=cut, stopped=stopped))
    return answer


def parse(read: Read, pieces: Sequence[str], *, one_call: bool = False, cut: bool = False) -> Answer:
    parser = FormatParser(read, Collector(lambda index: f"call{index}", one_call=one_call))
    return answer_of(parser, pieces, cut=cut)


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]
