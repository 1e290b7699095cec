"""Writes streams of OpenAI's chunks. The shared beginning of a stream's chunks is encoded once. Pure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from baton.core.errors import BatonError
from baton.gateway.http.custom_tools import CustomTools
from baton.gateway.http.errors import openai_error
from baton.gateway.http.logprobs import CompletionLogprobs, LogprobWriter
from baton.gateway.http.tool_calls import ToolCallStream
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import finish_reason_from_proto, receipt_from_proto

DONE = b"data: [DONE]\n\n"
_dumps = orjson.dumps


@dataclass(frozen=True)
class StreamShape:
    """The settings that all chunks of one stream share.

    Attributes:
        object_name: "chat.completion.chunk" or "text_completion".
        created_s: Unix time.
        logprobs: writes logprobs; None: the client wants none.
        include_usage: add a last chunk with the usage.
        continuous_usage: add the usage so far to every chunk.
        outputs: number of choices for each prompt.
        prompt_tokens: number of prompt tokens, for `continuous_usage`; the last chunk counts them itself.
        tokens_before: number of output tokens that the client already has.
        custom_tools: those of a chat.
    """

    object_name: str
    id: str
    created_s: int
    model: str
    request_id: str
    logprobs: LogprobWriter | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    receipt: bool = False
    token_ids: bool = False
    reasoning: bool = True
    outputs: int = 1
    prompt_tokens: int = 0
    tokens_before: int = 0
    custom_tools: CustomTools = field(default_factory=CustomTools)

    def beginning(self, revision: str = "") -> bytes:
        """Returns the beginning of every chunk, up to its choices. `revision` is the weights', once it is known."""
        fixed = {"id": self.id, "object": self.object_name, "created": self.created_s, "model": self.model}
        if revision:
            fixed["system_fingerprint"] = revision
        return b"data: " + _dumps(fixed)[:-1] + b',"choices":['


class _Stream:
    """The common part of both endpoints' streams."""

    def __init__(self, shape: StreamShape) -> None:
        self.shape = shape
        self.usage = common_pb2.Usage()
        self._completion_tokens = shape.tokens_before
        self._beginning = shape.beginning()
        self._heads: dict[int, bytes] = {}  # beginning of a plain chunk, for each choice that has begun
        self._plain_end = b'}],"usage":null}\n\n' if shape.include_usage else b"}]}\n\n"

    def end(self, message: pb.GenerateResponse) -> bytes:
        """Returns the end of a chunk, from its choice's last brace on."""
        shape = self.shape
        extra: dict[str, Any] = {}
        if shape.continuous_usage:
            extra["usage"] = self._usage_so_far()
        elif shape.include_usage:
            extra["usage"] = None
        if shape.receipt and message.finish_reason:
            extra["baton"] = {"receipt": receipt_json(message.receipt)}
        return b"}]," + _dumps(extra)[1:] + b"\n\n" if extra else b"}]}\n\n"

    def count(self, message: pb.GenerateResponse) -> None:
        if self.shape.continuous_usage:
            self._completion_tokens += len(message.tokens)
        if message.HasField("usage"):
            add_usage(self.usage, message.usage)

    def ending(self, message: pb.GenerateResponse, finish: str) -> bytes:
        """Returns the fields of a choice that say how it ended."""
        ended: dict[str, Any] = {"finish_reason": finish, "stop_reason": stop_reason_json(message.stop_reason)}
        return b"," + _dumps(ended)[1:-1]

    def finish(self) -> bytes:
        if not self.shape.include_usage:
            return DONE
        return self._beginning + b'],"usage":' + _dumps(usage_json(self.usage)) + b"}\n\n" + DONE

    def error(self, error: BatonError) -> bytes:
        return b"data: " + _dumps(openai_error(error, self.shape.request_id)) + b"\n\n"

    def _usage_so_far(self) -> dict[str, Any]:
        if self.usage.completion_tokens >= self._completion_tokens:
            return usage_json(self.usage)
        prompt_tokens = self.shape.prompt_tokens
        return usage_json(common_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=self._completion_tokens))


class ChatChunks(_Stream):
    """The chunks of one chat completion."""

    def __init__(self, shape: StreamShape) -> None:
        super().__init__(shape)
        self._calls = ToolCallStream(shape.custom_tools)
        self._plain = not (shape.continuous_usage or shape.logprobs or shape.token_ids)
        self._plain_end = b'},"finish_reason":null' + self._plain_end

    def push(self, message: pb.GenerateResponse) -> bytes:
        head = self._heads.get(message.index)
        if head is None or not self._plain or message.finish_reason or message.revision:
            return self._any(message)
        chat = message.chat
        content = chat.content
        if chat.reasoning or chat.tool_calls:
            return self._any(message)
        return head + _dumps(content) + self._plain_end if content else b""

    def skip(self, message: pb.GenerateResponse) -> None:
        """Takes a message whose chunks the client already has."""
        self._calls.push(message)

    def _any(self, message: pb.GenerateResponse) -> bytes:
        shape, index, chat = self.shape, message.index, message.chat
        self.count(message)
        delta: dict[str, Any] = {} if index in self._heads else {"role": "assistant", "content": ""}
        if message.revision:
            self._beginning = shape.beginning(message.revision)
        if message.revision or index not in self._heads:
            self._heads[index] = self._beginning + b'{"index":%d,"delta":{"content":' % index
        if chat.content:
            delta["content"] = chat.content
        if chat.reasoning and shape.reasoning:
            delta["reasoning_content"] = chat.reasoning
        if calls := self._calls.push(message):
            delta["tool_calls"] = calls
        fields: dict[str, Any] = {}
        if shape.logprobs is not None and message.tokens:
            fields["logprobs"] = shape.logprobs.chat(message.tokens)
        if shape.token_ids and message.tokens:
            fields["token_ids"] = [token.token_id for token in message.tokens]
        if not (delta or fields or message.finish_reason):
            return b""
        finish = finish_name(message.finish_reason)
        if finish == "stop" and self._calls.has_calls(index):
            finish = "tool_calls"
        ending = self.ending(message, finish) if finish else b',"finish_reason":null'
        further = b"," + _dumps(fields)[1:-1] if fields else b""
        head = self._beginning + b'{"index":%d,"delta":' % index
        return head + _dumps(delta) + further + ending + self.end(message)


class CompletionChunks(_Stream):
    """The chunks of one completion request, for one or several prompts.

    Args:
        echoes: the prompts' texts, with which the choices begin; empty: the client wants no echo.
        hides_tokens: leave out the outputs, because the client asked for 0 tokens.
    """

    def __init__(self, shape: StreamShape, *, echoes: tuple[str, ...] = (), hides_tokens: bool = False) -> None:
        super().__init__(shape)
        self._echoes = echoes
        self._hides_tokens = hides_tokens
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._plain = not (shape.continuous_usage or shape.logprobs or shape.token_ids or hides_tokens)
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._plain_end

    def push(self, message: pb.GenerateResponse) -> bytes:
        """Returns the chunk for a message, if there is a single prompt."""
        return self._push(0, message)

    def for_prompt(self, number: int) -> Callable[[pb.GenerateResponse], bytes]:
        """Returns the function that encodes the messages of this prompt."""
        return lambda message: self._push(number, message)

    def _push(self, number: int, message: pb.GenerateResponse) -> bytes:
        index = number * self.shape.outputs + message.index
        head = self._heads.get(index)
        if head is not None and self._plain and not (message.finish_reason or message.revision):
            if not message.text:
                return b""
            return head + _dumps(message.text) + self._plain_end
        return self._any(number, index, message)

    def _any(self, number: int, index: int, message: pb.GenerateResponse) -> bytes:
        shape = self.shape
        self.count(message)
        tokens: list[common_pb2.Token | common_pb2.PromptLogprob] = [] if self._hides_tokens else list(message.tokens)
        text = "" if self._hides_tokens else message.text
        if index not in self._heads and self._echoes:
            text = self._echoes[number] + text
            tokens = [*message.prompt_logprobs, *tokens]
        if message.revision:
            self._beginning = shape.beginning(message.revision)
        if message.revision or index not in self._heads:
            self._heads[index] = self._beginning + b'{"index":%d,"text":' % index
        if not (text or tokens or message.finish_reason):
            return b""
        fields: dict[str, Any] = {"logprobs": None}
        if shape.logprobs is not None and tokens:
            if index not in self._logprobs:
                self._logprobs[index] = CompletionLogprobs(shape.logprobs, with_prompt=bool(self._echoes))
            writer = self._logprobs[index]
            fields["logprobs"] = writer.write(tokens)
        if shape.token_ids:
            fields["token_ids"] = [token.token_id for token in message.tokens]
        finish = finish_name(message.finish_reason)
        ending = self.ending(message, finish) if finish else b',"finish_reason":null'
        further = b"," + _dumps(fields)[1:-1]
        return self._heads[index] + _dumps(text) + further + ending + self.end(message)


def usage_json(usage: common_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def add_usage(total: common_pb2.Usage, more: common_pb2.Usage) -> None:
    total.prompt_tokens += more.prompt_tokens
    total.completion_tokens += more.completion_tokens
    total.cached_tokens += more.cached_tokens
    total.reasoning_tokens += more.reasoning_tokens


def receipt_json(receipt: common_pb2.Receipt) -> dict[str, Any]:
    return asdict(receipt_from_proto(receipt))


def finish_name(reason: common_pb2.FinishReason.ValueType) -> str:
    """Returns "stop" or "length", OpenAI's names, or "" while the output continues."""
    return finish_reason_from_proto(reason) or ""


def stop_reason_json(stop_reason: str) -> str | int | None:
    """Returns the stop string, or, as in vLLM, the stop token's id as a number."""
    return int(stop_reason) if stop_reason.isascii() and stop_reason.isdecimal() else stop_reason or None
