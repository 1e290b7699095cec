"""The client for programs without an event loop. It runs an `AsyncClient` in a thread of its own."""

import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from baton.client.client import UNARY_TIMEOUT_S, AsyncClient
from baton.client.loop_thread import LoopThread, Stream
from baton.client.messages import ChatOptions, ChatStreamOptions, Options, Sampling, StreamOptions
from baton.client.outputs import Completion, Event
from baton.client.served import ModelCard, ModelInfo


class Client:
    """Sends requests to a gateway, and returns their outputs as typed events or whole. Threads may share a client.

    with Client() as client:
        for event in client.generate("Once upon a time", {"max_tokens": 64}):
            print(event.text, end="")

    Every call blocks, and takes, returns and raises what the same call of `AsyncClient` does. Ctrl-C ends the request
    that the main thread waits for. Leaving a stream early, or closing it, ends its request. A client that
    nothing refers to any more closes itself. Close clients before a fork, which gRPC does not survive.

    Args:
        target, addresses, api_key, tls_ca, unary_timeout_s, retry_s: as for `AsyncClient`.

    Raises:
        ConfigError: the CA cannot be read, or the API key would cross a network unencrypted.
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
        self._loop = LoopThread()

        async def connect() -> AsyncClient:  # gRPC binds a channel to the event loop that creates it
            return AsyncClient(
                target,
                addresses=addresses,
                api_key=api_key,
                tls_ca=tls_ca,
                unary_timeout_s=unary_timeout_s,
                retry_s=retry_s,
            )

        try:
            self._client = self._loop.run(connect)
        except BaseException:
            self._loop.close(_nothing)
            raise
        weakref.finalize(self, self._loop.abandon, self._client.close).atexit = False

    @property
    def target(self) -> str:
        """Address of the gateway for the next request."""
        return self._client.target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; running requests end with `Cancelled`. A second call does nothing."""
        self._loop.close(self._client.close)

    # ---- requests

    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling = None, **options: Unpack[StreamOptions]
    ) -> Generator[Event, None, None]:
        """Streams the outputs for a prompt as they arrive; see `AsyncClient.generate`."""
        return self._iterate(self._client.generate(prompt, sampling, **options))

    @overload
    def complete(
        self, prompt: str | Sequence[int], sampling: Sampling = None, *, n: None = None, **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def complete(
        self, prompt: str | Sequence[int], sampling: Sampling = None, *, n: int, **options: Unpack[Options]
    ) -> list[Completion]: ...
    def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """Returns the whole output for a prompt; with `n`, a list of `n` outputs. See `AsyncClient.complete`."""
        if n is None:
            return self._loop.run(lambda: self._client.complete(prompt, sampling, **options))
        return self._loop.run(lambda: self._client.complete(prompt, sampling, n=n, **options))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        **options: Unpack[ChatStreamOptions],
    ) -> Generator[Event, None, None]:
        """Streams the answer to a conversation; see `AsyncClient.stream_chat`."""
        return self._iterate(self._client.stream_chat(messages, sampling, **options))

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        n: None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        n: int,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion | list[Completion]:
        """Returns the whole answer to a conversation; with `n`, a list of `n` answers. See `AsyncClient.chat`."""
        if n is None:
            return self._loop.run(lambda: self._client.chat(messages, sampling, **options))
        return self._loop.run(lambda: self._client.chat(messages, sampling, n=n, **options))

    def abort(self, *request_ids: str) -> list[str]:
        """Ends running requests, whose callers get `Cancelled`. Returns the ids that were running."""
        return self._loop.run(lambda: self._client.abort(*request_ids))

    # ---- what a gateway knows

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. `model` empty: the served model."""
        return self._loop.run(lambda: self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return self._loop.run(
            lambda: self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        )

    def list_models(self) -> list[ModelCard]:
        """Returns the served model, followed by its LoRA adapters."""
        return self._loop.run(lambda: self._client.list_models())

    def model_info(self, model: str = "") -> ModelInfo:
        """Returns limits, special tokens, default sampling and more of the served model."""
        return self._loop.run(lambda: self._client.model_info(model))

    def tokenizer(self, model: str = "") -> bytes:
        """Returns the model's tokenizer files as a zip archive; see `AsyncClient.tokenizer`."""
        return self._loop.run(lambda: self._client.tokenizer(model))

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        stream = Stream(events)
        try:
            while (event := self._loop.run(stream.next)) is not None:
                yield event
        finally:
            self._loop.begin(stream.end)


async def _nothing() -> None:
    pass
