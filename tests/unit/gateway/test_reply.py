"""A client receives every token, their text, and one last message."""

import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.sampling import ResolvedSampling
from baton.core.types import Path, Receipt, Usage
from baton.gateway.core.request import OutputEnd
from baton.gateway.text.detokenizer import Detokenizer, byte_tokens
from baton.gateway.text.reply import Reply
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.tokenizers import byte_fallback, byte_level
from tests.unit.gateway.tokenizers import token_id as id_of

TOKENIZER = byte_level()
BYTE_FALLBACK = byte_fallback()
USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
RECEIPT = Receipt(Path.LOCAL, "because", "", "decode-0", 0, 0, 0, "", 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0, 0, "", 0)


class Client:
    """A reply, and its messages so far."""

    def __init__(self, tokenizer: Tokenizer = TOKENIZER, **sampling: object) -> None:
        self.messages: list[pb.GenerateResponse] = []
        params = ResolvedSampling(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
        fallback = byte_tokens(tokenizer, skip_special_tokens=True)
        self.reply = Reply("r1", params, Detokenizer(tokenizer, [], byte_tokens=fallback))

    def send_bytes(self, *data: bytes) -> OutputEnd | None:
        """Sends a byte token for each byte, and a token of its own for q; those of one argument in one message."""
        for piece in data:
            names = ["q" if byte == ord("q") else f"<0x{byte:02X}>" for byte in piece]
            tokens = [common_pb2.Token(token_id=id_of(BYTE_FALLBACK, name)) for name in names]
            end = self.reply.add([decode_pb2.StepToken(token=token) for token in tokens])
            if (message := self.reply.take()) is not None:
                self.messages.append(message)
            if end is not None:
                return end
        return None

    def send(
        self, text: str, finish: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    ) -> OutputEnd | None:
        """Sends the text's tokens, one a message; the last one with the finish reason."""
        token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        for number, token_id in enumerate(token_ids, start=1):
            last = number == len(token_ids)
            token = common_pb2.Token(token_id=token_id, index=self.reply.completion_tokens)
            step_token = decode_pb2.StepToken(
                token=token,
                finish_reason=finish if last else common_pb2.FINISH_REASON_UNSPECIFIED,
                stop_reason="7" if last else "",
            )
            end = self.reply.add([step_token])
            message = self.reply.take()
            assert message is not None
            self.messages.append(message)
            if end is not None:
                return end
        return None

    def finish(self, end: OutputEnd | None) -> None:
        assert end is not None
        self.messages.append(self.reply.last(end, USAGE, RECEIPT))

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)


def test_every_token_is_a_message_and_the_last_message_has_the_rest() -> None:
    client = Client()
    end = client.send("the quick fox", common_pb2.FINISH_REASON_LENGTH)
    client.finish(end)
    assert client.text == "the quick fox"
    assert [message.request_id for message in client.messages][:2] == ["r1", ""]
    assert [len(message.tokens) for message in client.messages] == [1] * client.reply.completion_tokens + [0]
    last = client.messages[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.prompt_tokens == 3
    assert last.receipt.path == common_pb2.PATH_LOCAL
    assert all(message.finish_reason == 0 for message in client.messages[:-1])


@pytest.mark.parametrize(("include_stop", "text"), [(False, "the quick"), (True, "the quick fox")])
def test_a_stop_string_ends_the_stream(include_stop: bool, text: str) -> None:
    client = Client(stop=(" fox",), include_stop=include_stop)
    end = client.send("the quick fox jumps")
    client.finish(end)
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, " fox")
    assert client.text == text


def test_held_back_text_is_sent_when_it_is_no_stop_string() -> None:
    client = Client(stop=(" fox!",))
    end = client.send("the quick fox", common_pb2.FINISH_REASON_LENGTH)
    assert client.text == "the quick"
    client.finish(end)
    assert client.text == "the quick fox"


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    num_tokens = len(TOKENIZER.encode("the quick fox", add_special_tokens=False).ids)
    client = Client(stop=(" fox",), min_tokens=num_tokens)
    assert client.send("the quick fox") is None
    end = client.send(" jumps fox over")
    assert end is not None
    client.finish(end)
    assert client.text == "the quick fox jumps"


def test_a_stop_string_counts_when_only_its_beginning_came_before_min_tokens() -> None:
    num_tokens = len(TOKENIZER.encode("the quick fox", add_special_tokens=False).ids)
    client = Client(stop=("fox jump",), min_tokens=num_tokens)
    assert client.send("the quick fox") is None
    end = client.send(" jumps over")
    client.finish(end)
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, "fox jump")
    assert client.text == "the quick "


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_is_no_text_unless_asked_for(include_stop: bool) -> None:
    client = Client(include_stop=include_stop)
    client.send("the")
    end = client.send(" q", common_pb2.FINISH_REASON_STOP)
    client.finish(end)
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, "7")
    assert client.text.startswith("the")
    assert client.text.endswith("q") is include_stop


def test_tokens_added_together_leave_in_one_message() -> None:
    client = Client()
    for index, token_id in enumerate(TOKENIZER.encode("the fox", add_special_tokens=False).ids):
        client.reply.add([decode_pb2.StepToken(token=common_pb2.Token(token_id=token_id, index=index))])
    message = client.reply.take()
    assert message is not None
    assert message.text == "the fox"
    assert len(message.tokens) == client.reply.completion_tokens > 1
    assert client.reply.take() is None


@pytest.mark.parametrize("stop", [(), ("jumps",)])
def test_tokens_after_one_that_ends_the_output_are_no_part_of_it(stop: tuple[str, ...]) -> None:
    client = Client(stop=stop)
    token_ids = TOKENIZER.encode("the fox jumps", add_special_tokens=False).ids
    length = common_pb2.FINISH_REASON_UNSPECIFIED if stop else common_pb2.FINISH_REASON_LENGTH
    tokens = [decode_pb2.StepToken(token=common_pb2.Token(token_id=token_id)) for token_id in token_ids]
    tokens[-1].finish_reason = length
    end = client.reply.add([*tokens, *tokens])
    message = client.reply.take()
    assert message is not None
    assert end is not None
    assert [token.token_id for token in message.tokens] == token_ids
    assert client.reply.completion_tokens == len(token_ids)


def test_prompt_logprobs_are_in_the_first_message_alone() -> None:
    client = Client()
    scored = [common_pb2.PromptLogprob(token_id=3), common_pb2.PromptLogprob(token_id=4, logprob=-0.5)]
    for index in range(3):
        token = common_pb2.Token(token_id=5, index=index)
        client.reply.add([decode_pb2.StepToken(token=token, prompt_logprobs=scored)])
        message = client.reply.take()
        assert message is not None
        assert list(message.prompt_logprobs) == (scored if index == 0 else [])


@pytest.mark.parametrize("stop", [(), ("fox jumps",), ("x j", "quick dog")])
def test_a_reply_goes_on_in_the_middle_of_a_text_as_it_would_have(stop: tuple[str, ...]) -> None:
    text = "the quick fox jumps ü 中 over"
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    for place in range(len(token_ids) + 1):
        whole, rest = Client(stop=stop), Client(stop=stop)
        ended = None
        for number, token_id in enumerate(token_ids):
            if number == place:
                texts, end = rest.reply.resume(token_ids[:place], None)
                assert ("".join(texts), end) == (whole.text, None)
                assert rest.reply.completion_tokens == place
            step_token = decode_pb2.StepToken(token=common_pb2.Token(token_id=token_id, index=number))
            ended = whole.reply.add([step_token])
            message = whole.reply.take()
            assert message is not None
            whole.messages.append(message)
            if number >= place:
                assert rest.reply.add([step_token]) == ended
                again = rest.reply.take()
                assert again is not None
                assert again.text == message.text
                rest.messages.append(again)
            if ended is not None:
                break
        if rest.messages:
            assert rest.messages[0].request_id == "r1"
            assert rest.reply.completion_tokens == whole.reply.completion_tokens


def test_a_reply_does_not_go_on_after_a_stop_string() -> None:
    client = Client(stop=("fox",))
    with pytest.raises(InvalidRequest, match="continue after the stop string 'fox'"):
        client.reply.resume(TOKENIZER.encode("the quick fox jumps", add_special_tokens=False).ids, None)


def test_a_reply_that_has_ended_with_a_stop_string_ends_again() -> None:
    token_ids = TOKENIZER.encode("the quick fox", add_special_tokens=False).ids
    whole = Client(stop=("fox",))
    ends = [whole.reply.add([decode_pb2.StepToken(token=common_pb2.Token(token_id=each))]) for each in token_ids]
    taken = whole.reply.take()
    assert taken is not None
    texts, end = Client(stop=("fox",)).reply.resume(token_ids, None)
    assert ("".join(texts), end) == (taken.text, ends[-1])
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, "fox")


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_token_that_is_the_stop_is_shown_on_request_only(include_stop: bool) -> None:
    token_ids = TOKENIZER.encode("the fox", add_special_tokens=False).ids
    end = OutputEnd(common_pb2.FINISH_REASON_STOP, str(token_ids[-1]))
    sampling = ResolvedSampling(stop_token_ids=(token_ids[-1],), include_stop=include_stop)
    reply = Reply("r1", sampling, Detokenizer(TOKENIZER, []))
    shown = token_ids if include_stop else token_ids[:-1]
    texts, ended = reply.resume(token_ids, end)
    assert ("".join(texts), ended) == (TOKENIZER.decode(shown), end)


@pytest.mark.parametrize("cuts", [(b"a\n", b"\n", b"b"), (b"a\n\nb",), (b"a", b"\n", b"\n", b"b")])
def test_a_stop_string_of_byte_tokens_ends_the_output_with_its_last_byte(cuts: tuple[bytes, ...]) -> None:
    client = Client(BYTE_FALLBACK, stop=("\n\n",))
    end = client.send_bytes(*cuts)
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, "\n\n")
    assert client.reply.completion_tokens == 3
    last = client.reply.last(end, USAGE, RECEIPT)
    assert "".join(message.text for message in [*client.messages, last]) == "a"


def test_a_stop_string_of_byte_tokens_counts_after_min_tokens_only() -> None:
    client = Client(BYTE_FALLBACK, stop=("\n",), min_tokens=2)
    assert client.send_bytes(b"\n", b"\xe2\x82\xac") is None
    end = client.send_bytes(b"x", b"\n")
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, "\n")
    assert client.reply.completion_tokens == 6
    assert "".join(message.text for message in client.messages) == "\n€x"


def test_invalid_bytes_complete_no_stop_string_that_their_run_had() -> None:
    client = Client(BYTE_FALLBACK, stop=("\ufffd\ufffdq",))
    end = client.send_bytes(b"\n\xff", b"q")
    assert end == OutputEnd(common_pb2.FINISH_REASON_STOP, "\ufffd\ufffdq")
