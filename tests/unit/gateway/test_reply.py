"""What a client is sent: every token, the text of them, one last message."""

import pytest

from baton.types import Path, Receipt, SamplingParams, Usage
from gateway.old_reply import Finish, Reply
from gateway.text import Detokenizer
from protos.baton.v1 import common_pb2, decode_pb2
from protos.baton.v1 import generation_pb2 as pb
from tests.unit.gateway.tokenizers import byte_level

TOKENIZER = byte_level()
USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
RECEIPT = Receipt(Path.LOCAL, "because", "", "decode-0", 0, 0, 0, "", 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0, 0, "", 0)


class Sent:
    """A reply and the messages that it has written."""

    def __init__(self, **sampling: object) -> None:
        self.messages: list[pb.GenerateResponse] = []
        params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
        self.reply = Reply("r1", params, Detokenizer(TOKENIZER, []), self._write, lambda: 1.5)

    async def _write(self, message: pb.GenerateResponse) -> None:
        self.messages.append(message)

    async def give(
        self, text: str, finish: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    ) -> Finish | None:
        """Gives the text's tokens one by one; the last one with the finish reason."""
        token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        ended = None
        for number, token_id in enumerate(token_ids, start=1):
            last = number == len(token_ids)
            token = common_pb2.Token(token_id=token_id, index=self.reply.completion_tokens)
            said = decode_pb2.StepToken(token=token, finish_reason=finish if last else 0, stop_reason="7" * last)  # type: ignore[arg-type]
            ended = await self.reply.give([said])
            if ended is not None:
                break
        return ended

    async def end(self, finish: Finish | None) -> None:
        assert finish is not None
        await self.reply.end(finish, USAGE, RECEIPT)

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)


async def test_every_token_is_a_message_and_the_last_message_has_the_rest() -> None:
    sent = Sent()
    finish = await sent.give("the quick fox", common_pb2.FINISH_REASON_LENGTH)
    await sent.end(finish)
    assert sent.text == "the quick fox"
    assert [message.request_id for message in sent.messages][:2] == ["r1", ""]
    assert [len(message.tokens) for message in sent.messages] == [1] * sent.reply.completion_tokens + [0]
    last = sent.messages[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.prompt_tokens == 3
    assert last.receipt.path == common_pb2.PATH_LOCAL
    assert all(message.finish_reason == 0 for message in sent.messages[:-1])


@pytest.mark.parametrize(("include_stop", "text"), [(False, "the quick"), (True, "the quick fox")])
async def test_a_stop_string_ends_the_stream(include_stop: bool, text: str) -> None:
    sent = Sent(stop=(" fox",), include_stop=include_stop)
    finish = await sent.give("the quick fox jumps")
    await sent.end(finish)
    assert finish == Finish(common_pb2.FINISH_REASON_STOP, " fox")
    assert sent.text == text


async def test_held_back_text_comes_when_no_stop_string_came_of_it() -> None:
    sent = Sent(stop=(" fox!",))
    finish = await sent.give("the quick fox", common_pb2.FINISH_REASON_LENGTH)
    assert sent.text == "the quick"
    await sent.end(finish)
    assert sent.text == "the quick fox"


async def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    num_tokens = len(TOKENIZER.encode("the quick fox", add_special_tokens=False).ids)
    sent = Sent(stop=(" fox",), min_tokens=num_tokens)
    assert await sent.give("the quick fox") is None
    finish = await sent.give(" jumps fox over")
    assert finish is not None
    await sent.end(finish)
    assert sent.text == "the quick fox jumps"


async def test_a_stop_string_counts_when_only_its_beginning_came_before_min_tokens() -> None:
    num_tokens = len(TOKENIZER.encode("the quick fox", add_special_tokens=False).ids)
    sent = Sent(stop=("fox jump",), min_tokens=num_tokens)
    assert await sent.give("the quick fox") is None
    finish = await sent.give(" jumps over")
    await sent.end(finish)
    assert finish == Finish(common_pb2.FINISH_REASON_STOP, "fox jump")
    assert sent.text == "the quick "


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_token_is_no_text_unless_asked_for(include_stop: bool) -> None:
    sent = Sent(include_stop=include_stop)
    await sent.give("the")
    finish = await sent.give(" q", common_pb2.FINISH_REASON_STOP)
    await sent.end(finish)
    assert finish == Finish(common_pb2.FINISH_REASON_STOP, "7")
    assert sent.text.startswith("the")
    assert sent.text.endswith("q") is include_stop


async def test_tokens_behind_the_end_are_dropped() -> None:
    sent = Sent(stop=("f",))
    token_ids = TOKENIZER.encode("a f q", add_special_tokens=False).ids
    tokens = [
        decode_pb2.StepToken(token=common_pb2.Token(token_id=token_id, index=index))
        for index, token_id in enumerate(token_ids)
    ]
    finish = await sent.reply.give(tokens)
    assert finish is not None
    assert sent.text == "a "
    assert sent.reply.completion_tokens < len(tokens)
    assert len(sent.messages[0].tokens) == sent.reply.completion_tokens
