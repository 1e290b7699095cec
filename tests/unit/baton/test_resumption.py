"""An answer that begins at one gateway and goes on at others is the answer of one gateway, however messages are cut."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client.resumption import AnswerProgress, prepare
from baton.core.errors import NoNode
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

TOKENS = 12


def deltas_of(token_id: int) -> list[pb.ChatDelta]:
    """What a token adds to a chat's answer; of some tokens, several parts that no single message holds."""
    kind = token_id % 5
    if kind == 0:
        return []
    if kind == 1:
        return [pb.ChatDelta(content=f"c{token_id} ")]
    if kind == 2:
        return [pb.ChatDelta(content=f"c{token_id} "), pb.ChatDelta(reasoning=f"r{token_id} ")]
    call = pb.ToolCallDelta(index=token_id, id=f"call-{token_id}", name="f")
    return [
        pb.ChatDelta(tool_calls=[call]),
        pb.ChatDelta(tool_calls=[pb.ToolCallDelta(index=token_id, arguments="{}")]),
    ]


def gateway(request: pb.GenerateRequest, random: Random, *, chat: bool) -> Iterator[pb.GenerateResponse]:
    """The messages of a gateway that cuts as it likes. Token i of output j is 100 j + i."""
    for index in range(request.n or 1):
        place = len(request.output_token_ids)
        assert list(request.output_token_ids) == [100 * index + i for i in range(place)]
        while place < TOKENS:
            if random.random() < 0.2:
                yield pb.GenerateResponse(notice="waiting")
            count = random.randint(1, min(3, TOKENS - place))
            ids = [100 * index + place + i for i in range(count)]
            message = pb.GenerateResponse(
                index=index, text="".join(f"t{token_id} " for token_id in ids if token_id % 3)
            )
            message.tokens.extend(common_pb2.Token(token_id=token_id, index=token_id % 100) for token_id in ids)
            if place == 0 and index == 0:
                message.prompt_logprobs.add(token_id=1)
            parts = [part for token_id in ids for part in deltas_of(token_id)] if chat else []
            if parts:
                message.chat.CopyFrom(parts[0])
            yield message
            for part in parts[1:]:
                yield pb.GenerateResponse(index=index, chat=part)
            place += count
        last = pb.GenerateResponse(index=index, text="end", finish_reason=common_pb2.FINISH_REASON_LENGTH)
        last.usage.completion_tokens = TOKENS
        yield last


@dataclass
class Had:
    """What a client has of one output."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: int = 0
    ends: int = 0

    def add(self, message: pb.GenerateResponse) -> None:
        self.tokens += [token.token_id for token in message.tokens]
        self.text += message.text
        self.content += message.chat.content
        self.reasoning += message.chat.reasoning
        for call in message.chat.tool_calls:
            if call.id:
                self.calls.append((call.index, call.id, call.name))
            self.arguments[call.index] = self.arguments.get(call.index, "") + call.arguments
        self.prompt_logprobs += len(message.prompt_logprobs)
        self.ends += bool(message.finish_reason)


def answer(request: pb.GenerateRequest, random: Random, *, lives: list[int], chat: bool) -> dict[int, Had]:
    """Loses each gateway after its number of messages in `lives`; the last gateway stays."""
    had: dict[int, Had] = {}
    progress = AnswerProgress(request)
    for life in [*lives, 1000]:
        for count, message in enumerate(gateway(progress.request(), random, chat=chat)):
            if count == life:
                break
            passed = progress.take(message)
            if passed is not None and not passed.notice:
                had.setdefault(passed.index, Had()).add(passed)
    return had


@given(
    seed=st.integers(0, 2**32), lives=st.lists(st.integers(0, 12), max_size=5), n=st.integers(1, 2), chat=st.booleans()
)
def test_an_answer_from_several_gateways_is_that_of_one(seed: int, lives: list[int], n: int, chat: bool) -> None:
    request = pb.GenerateRequest(n=n)
    assert answer(request, Random(seed), lives=lives, chat=chat) == answer(request, Random(0), lives=[], chat=chat)


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_what_a_gateway_would_draw_is_drawn_once(seed: int | None) -> None:
    request = pb.GenerateRequest(request_id="" if seed is None else "mine")
    if seed is not None:
        request.sampling.seed = seed
    prepare(request, resumes=True)
    assert request.sampling.HasField("seed")
    assert seed is None or (request.sampling.seed, request.request_id) == (seed, "mine")
    assert request.request_id


def message(text: str, *, revision: str = "", index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(text=text, index=index, revision=revision, tokens=[common_pb2.Token(token_id=1)])


def test_the_next_gateway_is_asked_for_the_weights_of_what_the_client_has() -> None:
    progress = AnswerProgress(pb.GenerateRequest())
    assert progress.request().revision == ""
    progress.take(message("a", revision="aa"))
    progress.take(message("b"))
    assert progress.request().revision == "aa"


def test_text_of_other_weights_is_not_passed_on() -> None:
    """An old gateway does not read the request's revision."""
    progress = AnswerProgress(pb.GenerateRequest())
    progress.take(message("a", revision="aa"))
    progress.request()
    with pytest.raises(NoNode, match="began with revision aa"):
        progress.take(message("a", revision="bb"))


def test_outputs_of_several_revisions_may_only_go_on_as_they_were() -> None:
    progress = AnswerProgress(pb.GenerateRequest(n=2))
    progress.take(message("a", revision="aa"))
    progress.take(message("b", revision="bb", index=1))
    assert progress.request().revision == ""
    progress.take(message("a", revision="aa"))
    with pytest.raises(NoNode):
        progress.take(message("b", revision="aa", index=1))
