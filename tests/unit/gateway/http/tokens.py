"""Tokens and messages of a model whose token N is the text " N"."""

from baton.gateway.text.reply import Detokenizing
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.served import Words

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class Numbers:
    """Token N is the text " N"."""

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return f" {token_id}"

    def text_after(self, *, is_prompt: bool, skip_special_tokens: bool) -> Detokenizing:
        return Words()


def token(token_id: int, logprob: float | None = None, **others: float) -> common_pb2.Token:
    """`others`: logprobs of alternatives, named t1, t2, ..."""
    top = [common_pb2.TokenLogprob(token_id=int(name[1:]), logprob=value) for name, value in others.items()]
    return common_pb2.Token(token_id=token_id, logprob=logprob, top_logprobs=top)


def text(words: str, *tokens: common_pb2.Token, index: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(text=words, tokens=tokens, index=index)


def chat(content: str = "", *tokens: common_pb2.Token, index: int = 0, **more: object) -> pb.GenerateResponse:
    """`more`: fields of ChatDelta."""
    delta = pb.ChatDelta(content=content, **more)  # type: ignore[arg-type]
    return pb.GenerateResponse(text=content, tokens=tokens, chat=delta, index=index)


def last(
    reason: common_pb2.FinishReason.ValueType = STOP, *, index: int = 0, stop_reason: str = "", usage: bool = True
) -> pb.GenerateResponse:
    message = pb.GenerateResponse(finish_reason=reason, stop_reason=stop_reason, index=index)
    message.receipt.path = common_pb2.PATH_LOCAL
    if usage:
        message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens = 7, 3, 4
    return message
