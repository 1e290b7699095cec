"""The asynchronous client of one or several gateways: typed events, and the errors of `baton.core.errors`."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from baton.client.answer_stream import stream
from baton.client.gateways import Gateway, Gateways, LostGateway, typed_errors
from baton.client.messages import (
    ChatOptions,
    ChatStreamOptions,
    Options,
    Sampling,
    StreamOptions,
    chat_message,
    generate_message,
    set_text,
    token_ids_message,
)
from baton.client.outputs import Completion, Event, collect, collect_all
from baton.client.served import ModelCard, ModelInfo
from baton.core.errors import BatonError, ConfigError, DataLoss
from baton.protos.v1 import generation_pb2 as pb
from baton.settings.environment import client_access

Answer = TypeVar("Answer")

DEFAULT_PORT = 7000  # where `baton up` and the images serve gRPC
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
UNARY_TIMEOUT_S = 60.0
_HTTP = ("http://", "https://")


class AsyncClient:
    """Sends requests to a gateway, any number at once, and returns their outputs as typed events or whole.

    async with AsyncClient() as client:
        async for event in client.generate("Once upon a time", {"max_tokens": 64}):
            print(event.text, end="")

    With several `addresses`, a request whose gateway is lost continues at the next one; no token arrives twice.

    Args:
        target: host:port of the gateway, or of several with commas. Default: BATON_TARGET, else port 7000 of this
            machine.
        addresses: host:port of several gateways in front of the same nodes, used in place of `target`. The client uses
            the first one that answers, and switches to the next when that one is lost or drains. If none can be
            reached, a request whose output has begun keeps trying for 10 s.
        api_key: Default: BATON_API_KEY, else none.
        tls_ca: PEM file with the CA of the gateways' certificates, or "system" for the machine's own CAs. Default:
            BATON_CLIENT_CA, else no TLS.
        unary_timeout_s: seconds for each call that generates nothing, such as `tokenize`. Requests that generate take
            the option `timeout_s` instead.
        retry_s: seconds during which a refused request is retried, each time when the refusal says so, and never past
            the request's `timeout_s`. None: until `timeout_s`, or for 60 s if it has none. 0: never.

    Raises:
        ConfigError: an address is wrong, the CA cannot be read, or the API key would cross a network unencrypted.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        addresses: Sequence[str] = (),
        api_key: str | None = None,
        tls_ca: str | Path | None = None,
        unary_timeout_s: float = UNARY_TIMEOUT_S,
        retry_s: float | None = None,
    ) -> None:
        if target is None and not addresses:
            target = client_access().target or DEFAULT_TARGET
        targets = _addresses(target, addresses)
        self._gateways = Gateways(targets, api_key=api_key, tls_ca=tls_ca, retry_s=retry_s)
        self._unary_timeout_s = unary_timeout_s

    @property
    def target(self) -> str:
        """Address of the gateway for the next request."""
        return self._gateways.current.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections, which ends running requests."""
        await self._gateways.close()

    # ---- requests

    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling = None, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[Event, None]:
        """Streams the outputs for a prompt as they arrive; each output ends with a `Finished` event.

        Closing the generator, or cancelling the task that iterates it, ends the request.

        Args:
            prompt: text, or token ids.
            sampling: `SamplingParams`, or a mapping with their names. Unset parameters take the model's defaults.
            options: see `StreamOptions`.

        Raises:
            InvalidRequest: the gateway or this client refused a value; the error names the field.
            DeadlineExceeded: the request took longer than `timeout_s`.
            BatonError: the request failed for another reason; see `baton.core.errors`.
            TypeError: an option or a sampling parameter does not exist; the message lists the allowed ones.
        """
        return stream(self._gateways, generate_message(prompt, sampling, options), options.get("timeout_s"))

    @overload
    async def complete(
        self, prompt: str | Sequence[int], sampling: Sampling = None, *, n: None = None, **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    async def complete(
        self, prompt: str | Sequence[int], sampling: Sampling = None, *, n: int, **options: Unpack[Options]
    ) -> list[Completion]: ...
    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """Returns the whole output for a prompt; with `n`, a list of `n` outputs.

        Takes and raises what `generate` does.
        """
        message = generate_message(prompt, sampling, {**options, "n": n})
        return await self._whole(message, n, options.get("timeout_s"))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        **options: Unpack[ChatStreamOptions],
    ) -> AsyncGenerator[Event, None]:
        """Streams the answer to a conversation. Each event's `chat` holds its answer text, reasoning and tool calls.

        Args:
            messages: the conversation, in the shape of OpenAI's chat completions: {"role": "user", "content": "Hi"}.
            sampling: as in `generate`.
            options: see `ChatStreamOptions`.

        Raises:
            BatonError, TypeError: as in `generate`.
        """
        return stream(self._gateways, chat_message(messages, sampling, options), options.get("timeout_s"))

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        n: None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        n: int,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion | list[Completion]:
        """Returns the whole answer to a conversation: text, reasoning, tool calls and usage.

        With `n`, returns a list of `n` answers. Takes and raises what `stream_chat` does.
        """
        message = chat_message(messages, sampling, {**options, "n": n})
        return await self._whole(message, n, options.get("timeout_s"))

    async def abort(self, *request_ids: str) -> list[str]:
        """Ends running requests, whose callers get `Cancelled`. Returns the ids that were running.

        Raises:
            BatonError: no gateway can be reached, or one refused the call.
        """
        aborted: set[str] = set()
        lost: list[BatonError] = []
        request = pb.AbortRequest(request_ids=request_ids)
        for gateway in self._gateways.all:  # requests may run at any of them
            try:
                with typed_errors(gateway):
                    aborted.update((await gateway.stub.Abort(request, timeout=self._unary_timeout_s)).aborted)
            except LostGateway as error:
                lost.append(error.error)
        if len(lost) == len(self._gateways.all):
            raise lost[0]
        return [request_id for request_id in dict.fromkeys(request_ids) if request_id in aborted]

    # ---- what a gateway knows

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. `model` empty: the served model."""
        request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
        set_text(request, model=model, text=text)
        answer = await self._ask(lambda gateway, left_s: gateway.stub.Tokenize(request, timeout=left_s))
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        request = pb.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
        request.token_ids.extend(token_ids_message(token_ids).ids)
        return (await self._ask(lambda gateway, left_s: gateway.stub.Detokenize(request, timeout=left_s))).text

    async def list_models(self) -> list[ModelCard]:
        """Returns the served model, followed by its LoRA adapters."""
        request = pb.ListModelsRequest()
        answer = await self._ask(lambda gateway, left_s: gateway.stub.ListModels(request, timeout=left_s))
        return [ModelCard.from_message(card) for card in answer.models]

    async def model_info(self, model: str = "") -> ModelInfo:
        """Returns limits, special tokens, default sampling and more of the served model."""
        request = pb.GetModelInfoRequest(model=model)
        answer = await self._ask(lambda gateway, left_s: gateway.stub.GetModelInfo(request, timeout=left_s))
        return ModelInfo.from_message(answer)

    async def tokenizer(self, model: str = "") -> bytes:
        """Returns the model's tokenizer files as a zip archive.

        Raises:
            DataLoss: the archive arrived damaged.
        """
        request = pb.GetTokenizerRequest(model=model)
        return await self._ask(lambda gateway, left_s: _download(gateway.stub.GetTokenizer(request, timeout=left_s)))

    async def _whole(
        self, message: pb.GenerateRequest, n: int | None, timeout_s: float | None
    ) -> Completion | list[Completion]:
        events = stream(self._gateways, message, timeout_s)
        return await collect(events) if n is None else await collect_all(events)

    async def _ask(self, ask: Callable[[Gateway, float | None], Awaitable[Answer]]) -> Answer:
        return await self._gateways.ask(ask, timeout_s=self._unary_timeout_s)


def _addresses(target: str | None, further: Sequence[str]) -> tuple[str, ...]:
    """All addresses that a client is given.

    Raises:
        ConfigError: one is not text, empty, or an address of HTTP, or `further` is one text.
    """
    if isinstance(further, str):
        raise ConfigError(f"addresses is {further!r}", field="addresses", allowed=("a list",), cure="or use target")
    given = (*further,) if target is None else (*_separated(target), *further)
    for each in given:
        if not isinstance(each, str) or not each.strip():
            raise ConfigError(f"the gateway's address is {each!r}", field="target", value=each, allowed=("host:port",))
        if each.strip().lower().startswith(_HTTP):
            cure = f"use host:port, without http://; gRPC has a port of its own, by default {DEFAULT_PORT}"
            raise ConfigError(
                f"the gateway's address is {each!r}, but this client speaks gRPC", field="target", value=each,
                allowed=("host:port",), cure=cure,
            )  # fmt: skip
    return given


def _separated(target: str) -> tuple[str, ...]:
    """The addresses between commas; those of gRPC's ipv4: and ipv6: have commas of their own."""
    if not isinstance(target, str) or target.startswith(("ipv4:", "ipv6:")):
        return (target,)
    return tuple(part.strip() for part in target.split(","))


async def _download(pieces: AsyncIterable[pb.GetTokenizerResponse]) -> bytes:
    """Joins the archive's pieces.

    Raises:
        DataLoss: the checksum does not match.
    """
    data, sha256 = bytearray(), ""
    async for piece in pieces:
        data += piece.chunk
        sha256 = piece.sha256 or sha256
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataLoss("the tokenizer archive arrived damaged", cure="download it again")
    return bytes(data)
