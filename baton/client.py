"""The client of a gateway: outputs as typed events, errors as `baton.errors`.

async with Client("127.0.0.1:7000") as client:
    async for event in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
        print(event.text, end="")
"""

from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc

from baton.convert import (
    finish_reason_from_proto,
    prompt_logprobs_from_proto,
    receipt_from_proto,
    sampling_to_proto,
    token_from_proto,
    usage_from_proto,
)
from baton.errors import DeadlineExceeded, InternalError, InvalidRequest, NoNode
from baton.rpc.server import connect
from baton.rpc.status import from_rpc_error, last_cause
from baton.types import FinishReason, PromptLogprob, Receipt, SamplingParams, TokenOutput, Usage
from protos.baton.v1 import common_pb2, generation_pb2_grpc
from protos.baton.v1 import generation_pb2 as pb

Answer = TypeVar("Answer")

DEFAULT_PORT = 7000  # of the gateway in `baton up` and in the images
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"  # for the command line
_TIMEOUT_S_MAX = 1e9  # gRPC overflows on longer timeouts and ends the call at once


@dataclass(frozen=True)
class Piece:
    """New tokens and the text that they add. `text` may be empty while a character is incomplete.

    `prompt_logprobs` are in the first piece, where the request asks for them.
    """

    text: str
    tokens: tuple[TokenOutput, ...]
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event: the rest of the text, why the output ended, usage and receipt."""

    text: str
    finish_reason: FinishReason
    stop_reason: str  # the stop string or stop token id that ended the output, if any
    usage: Usage
    receipt: Receipt
    tokens: tuple[TokenOutput, ...] = ()


@dataclass(frozen=True)
class ChatPiece:
    """What new tokens add to a chat's answer. `tool_calls` is for display: names and pieces of arguments."""

    content: str = ""
    reasoning: str = ""
    tool_calls: str = ""
    notice: str = ""  # one sentence: why no token has come for a while


@dataclass(frozen=True)
class Completion:
    """A whole output."""

    text: str
    tokens: tuple[TokenOutput, ...]
    finish_reason: FinishReason
    stop_reason: str
    usage: Usage
    receipt: Receipt
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class Client:
    """A connection to one gateway. It carries any number of requests at once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel = connect(target)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Piece | Finished, None]:
        """The output as it arrives; the last event is `Finished`. Closing the generator or cancelling ends the request.

        Raises:
            BatonError: the request failed, or took longer than `timeout_s`.
        """
        request = pb.GenerateRequest(sampling=sampling_to_proto(sampling or SamplingParams()))
        _set_text(request, model=model, request_id=request_id, cache_salt=cache_salt)
        _set_priority(request, priority)
        if isinstance(prompt, str):
            _set_text(request, text=prompt)
        else:
            request.token_ids.CopyFrom(_token_ids(prompt))
        async with aclosing(self._responses(request, timeout_s)) as responses:
            async for response in responses:
                yield _event(response)

    async def chat(
        self,
        messages_json: str,
        sampling: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        template_kwargs_json: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[ChatPiece, None]:
        """The answer to a conversation as it arrives. Closing the generator or cancelling ends the request.

        Args:
            messages_json: array of messages in the shape of OpenAI's chat completions.
            sampling: absent numbers are the model's own defaults.

        Raises:
            BatonError: as in `generate`.
        """
        request = pb.GenerateRequest(sampling=sampling)
        _set_text(request, model=model)
        request.chat.messages_json, request.chat.template_kwargs_json = messages_json, template_kwargs_json
        async with aclosing(self._responses(request, timeout_s)) as responses:
            async for response in responses:
                yield _chat_piece(response)

    async def _responses(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = self._stub.Generate(request, timeout=None if timeout_s is None else min(timeout_s, _TIMEOUT_S_MAX))
        try:
            with _typed_errors(self.target):
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> Completion:
        """The whole output at once.

        Raises:
            BatonError: as in `generate`.
        """
        events = self.generate(
            prompt,
            sampling,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            priority=priority,
        )
        return await collect(events)

    async def tokenize(self, text: str, *, model: str = "") -> list[int]:
        request = pb.TokenizeRequest()
        _set_text(request, model=model, text=text)
        answer = await self._ask(self._stub.Tokenize(request))
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        answer = await self._ask(self._stub.Detokenize(pb.DetokenizeRequest(model=model, token_ids=token_ids)))
        return answer.text

    async def list_models(self) -> list[pb.ModelCard]:
        answer = await self._ask(self._stub.ListModels(pb.ListModelsRequest()))
        return list(answer.models)

    async def cluster_status(self) -> pb.ClusterStatusResponse:
        """The cluster as the gateway sees it."""
        return await self._ask(self._stub.ClusterStatus(pb.ClusterStatusRequest()))

    async def _ask(self, answer: Awaitable[Answer]) -> Answer:
        with _typed_errors(self.target):
            return await answer


async def collect(events: AsyncGenerator[Piece | Finished, None]) -> Completion:
    """Joins all events of one `generate`."""
    texts: list[str] = []
    tokens: list[TokenOutput] = []
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    finished: Finished | None = None
    async for event in events:
        texts.append(event.text)
        tokens.extend(event.tokens)
        if isinstance(event, Finished):
            finished = event
        else:
            prompt_logprobs += event.prompt_logprobs
    if finished is None:
        raise InternalError("the stream ended without its last message", cure="see the gateway's log")
    return Completion(
        text="".join(texts),
        tokens=tuple(tokens),
        finish_reason=finished.finish_reason,
        stop_reason=finished.stop_reason,
        usage=finished.usage,
        receipt=finished.receipt,
        prompt_logprobs=prompt_logprobs,
    )


def _set_text(message: pb.GenerateRequest | pb.TokenizeRequest, **texts: str) -> None:
    """Fills fields of the message.

    Raises:
        InvalidRequest: a text is not valid Unicode, such as a wrongly decoded argument or file.
    """
    for name, text in texts.items():
        try:
            setattr(message, name, text)
        except UnicodeEncodeError as error:
            field = "prompt" if name == "text" else name
            cure = "give text that is valid UTF-8"
            raise InvalidRequest(f"the {field} cannot be sent: {error}", field=field, cure=cure) from None


def _set_priority(request: pb.GenerateRequest, priority: int) -> None:
    try:
        request.priority = priority
    except ValueError:
        allowed = ("-2**31 to 2**31 - 1",)
        raise InvalidRequest(f"priority is {priority}", field="priority", value=priority, allowed=allowed) from None


def _token_ids(prompt: Sequence[int]) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=prompt)
    except ValueError as error:
        raise InvalidRequest(f"the prompt's token ids cannot be sent: {error}", field="prompt") from None


def _event(response: pb.GenerateResponse) -> Piece | Finished:
    tokens = tuple(token_from_proto(token) for token in response.tokens)
    finish_reason = finish_reason_from_proto(response.finish_reason)
    if finish_reason is None:
        return Piece(response.text, tokens, prompt_logprobs_from_proto(response.prompt_logprobs))
    return Finished(
        text=response.text,
        finish_reason=finish_reason,
        stop_reason=response.stop_reason,
        usage=usage_from_proto(response.usage),
        receipt=receipt_from_proto(response.receipt),
        tokens=tokens,
    )


def _chat_piece(response: pb.GenerateResponse) -> ChatPiece:
    delta = response.chat
    calls = [f"\n{call.name} " * bool(call.name) + call.arguments for call in delta.tool_calls]
    return ChatPiece(delta.content, delta.reasoning, "".join(calls), response.notice)


@contextmanager
def _typed_errors(target: str) -> Iterator[None]:
    """Raises:
    BatonError: instead of a gRPC status.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        from_gateway = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
        if error.code() is grpc.StatusCode.UNAVAILABLE and not from_gateway:
            cure = "start a gateway there, or give the address of one that runs"
            raise NoNode(
                f"cannot reach {target}: {last_cause(error)}", field="target", value=target, cure=cure
            ) from None
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            cure = "give the address of a gateway, not of a node"
            raise NoNode(f"{target} is not a gateway", field="target", value=target, cure=cure) from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not from_gateway:
            raise DeadlineExceeded("the request did not finish in time", cure="allow more time") from None
        raise typed from None
