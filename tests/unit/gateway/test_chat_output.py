"""The messages of one output with their parts of a chat's answer."""

from collections.abc import Sequence

import pytest

from baton.gateway.serving.output_run import ChatOutput
from baton.gateway.text.chat.types import ParsedDelta, ToolCallDelta
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

STOP = common_pb2.FINISH_REASON_STOP


class Scripted:
    """A parser that answers each text with the next of the given deltas."""

    def __init__(self, *pushed: Sequence[ParsedDelta], held: Sequence[ParsedDelta] = ()) -> None:
        self._pushed = list(pushed)
        self._held = list(held)
        self.texts: list[str] = []

    def push(self, text: str) -> list[ParsedDelta]:
        self.texts.append(text)
        return list(self._pushed.pop(0))

    def finish(self, *, cut: bool, stopped: bool = False) -> list[ParsedDelta]:
        self.cut, self.stopped = cut, stopped
        return self._held


def message(text: str = "", **fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(text=text, **fields)  # type: ignore[arg-type]


def test_deltas_that_follow_each_other_are_one() -> None:
    parser = Scripted([ParsedDelta(reasoning="so"), ParsedDelta(content="yes"), ParsedDelta(content="!")])
    (given,) = ChatOutput(parser).messages(message("so</think>yes!"))
    assert given == message("so</think>yes!", chat=pb.ChatDelta(reasoning="so", content="yes!"))


def test_tokens_flow_while_the_parser_holds_text_back() -> None:
    held = message("<tool", tokens=[common_pb2.Token(token_id=5)])
    (given,) = ChatOutput(Scripted([])).messages(held)
    assert given.tokens
    assert not given.HasField("chat")


def test_the_last_message_has_what_was_held_back() -> None:
    parser = Scripted([], held=[ParsedDelta(content="<tool")])
    output = ChatOutput(parser)
    output.messages(message("<tool"))
    (last,) = output.messages(message(finish_reason=STOP))
    assert last == message(finish_reason=STOP, chat=pb.ChatDelta(content="<tool"))
    assert parser.texts == ["<tool"]


@pytest.mark.parametrize(("ended_by", "stopped"), [("END", True), ("7", False), ("", False)])
def test_the_parser_gets_to_know_that_a_stop_string_ended_the_output(ended_by: str, stopped: bool) -> None:
    parser = Scripted()
    ChatOutput(parser, stops=["END"]).messages(message(finish_reason=STOP, stop_reason=ended_by))
    assert (parser.cut, parser.stopped) == (False, stopped)


def test_pieces_of_one_tool_call_are_joined() -> None:
    first, more = ToolCallDelta(0, "call-1", "add", "{"), ToolCallDelta(0, arguments='"a": 1}')
    second = ToolCallDelta(1, "call-2", "add", "{}")
    (given,) = ChatOutput(
        Scripted([ParsedDelta(tool_calls=(first,)), ParsedDelta(tool_calls=(more, second))])
    ).messages(message("calls"))
    calls = [(call.index, call.id, call.name, call.arguments) for call in given.chat.tool_calls]
    assert calls == [(0, "call-1", "add", '{"a": 1}'), (1, "call-2", "add", "{}")]


def test_an_answer_before_reasoning_keeps_its_place() -> None:
    deltas = [ParsedDelta(content="a"), ParsedDelta(reasoning="b"), ParsedDelta(content="c")]
    given = ChatOutput(Scripted(deltas)).messages(
        message("abc", request_id="r", finish_reason=STOP, usage=common_pb2.Usage(prompt_tokens=3), index=2)
    )
    assert [each.chat for each in given] == [pb.ChatDelta(content="a"), pb.ChatDelta(reasoning="b", content="c")]
    assert [each.text for each in given] == ["abc", ""]
    assert [each.request_id for each in given] == ["r", ""]
    assert [each.finish_reason for each in given] == [0, STOP]
    assert [each.HasField("usage") for each in given] == [False, True]
    assert [each.index for each in given] == [2, 2]


def test_a_notice_is_passed_on() -> None:
    notice = message(notice="waiting")
    assert ChatOutput(Scripted()).messages(notice) == [notice]


def test_reasoning_tokens_are_those_whose_text_is_reasoning() -> None:
    def tokens(*ids: int) -> list[common_pb2.Token]:
        return [common_pb2.Token(token_id=token_id) for token_id in ids]

    parser = Scripted(
        [],
        [ParsedDelta(reasoning="so")],
        [ParsedDelta(reasoning="."), ParsedDelta(content="yes")],
        [ParsedDelta(content="!")],
        held=[ParsedDelta(reasoning="?")],
    )
    output = ChatOutput(parser)
    for number, text in enumerate(("<think>", "so", ".</think>yes", "!")):
        output.messages(message(text, tokens=tokens(number, number)))
    assert output.reasoning_tokens == 4  # the marker's and the first word's; the border's token belongs to the answer
    usage = common_pb2.Usage(completion_tokens=9)
    last = output.messages(message(tokens=tokens(8), finish_reason=STOP, usage=usage))[-1]
    assert last.usage == common_pb2.Usage(completion_tokens=9, reasoning_tokens=5)
