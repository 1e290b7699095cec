"""The client for programs without an event loop. It runs an `AsyncClient` in a thread of its own."""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from baton.client.client import UNARY_TIMEOUT_S, AsyncClient
from baton.client.messages import ChatOptions, ChatStreamOptions, Options, Sampling, StreamOptions
from baton.client.outputs import Completion, Event
from baton.client.served import ModelCard, ModelInfo
from baton.core.errors import Cancelled

Answer = TypeVar("Answer")

_CANCEL_S = 5.0  # how long an interrupted call may take to end its request


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
        self._loop = _LoopThread()

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
            self._client = self._loop.run(connect())
        except BaseException:
            self._loop.close(_nothing)
            raise
        weakref.finalize(self, self._loop.abandon, self._client.close).atexit = False

    @property
    def target(self) -> str:
        """Address of the gateway that gets the next request."""
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
            return self._loop.run(self._client.complete(prompt, sampling, **options))
        return self._loop.run(self._client.complete(prompt, sampling, n=n, **options))

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
            return self._loop.run(self._client.chat(messages, sampling, **options))
        return self._loop.run(self._client.chat(messages, sampling, n=n, **options))

    def abort(self, *request_ids: str) -> list[str]:
        """Ends running requests, whose callers get `Cancelled`. Returns the ids that were running."""
        return self._loop.run(self._client.abort(*request_ids))

    # ---- what a gateway knows

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. `model` empty: the served model."""
        return self._loop.run(self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return self._loop.run(self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens))

    def list_models(self) -> list[ModelCard]:
        """Returns the served model, followed by its LoRA adapters."""
        return self._loop.run(self._client.list_models())

    def model_info(self, model: str = "") -> ModelInfo:
        """Returns limits, special tokens, default sampling and more of the served model."""
        return self._loop.run(self._client.model_info(model))

    def tokenizer(self, model: str = "") -> bytes:
        """Returns the model's tokenizer files as a zip archive; see `AsyncClient.tokenizer`."""
        return self._loop.run(self._client.tokenizer(model))

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        stream = _Stream(events)
        try:
            while (event := self._loop.run(stream.next())) is not None:
                yield event
        finally:
            self._loop.begin(stream.end)


class _Stream:
    """A stream of events on the loop that may be ended while its next event is awaited."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._reader: asyncio.Task[Any] | None = None  # waits for the next event

    async def next(self) -> Event | None:
        """Returns None after the last event."""
        self._reader = asyncio.current_task()
        try:
            return await anext(self._events, None)
        finally:
            self._reader = None

    async def end(self) -> None:
        """Ends the request. A Ctrl-C may leave `next` running, because it can strike before anyone waits for it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        await self._events.aclose()


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run_loop, name="baton-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs the coroutine and returns its result. An interrupt such as Ctrl-C cancels the coroutine first.

        Raises:
            RuntimeError: the client is closed, or belongs to the process that forked this one.
            Cancelled: it was closed meanwhile.
        """
        if os.getpid() != self._process:  # its thread is not in this process, and its lock may be held for ever
            work.close()
            cure = "close clients before a fork, or start processes with multiprocessing's spawn"
            raise RuntimeError(f"this client belongs to the process that forked this one; {cure}")
        over = threading.Event()
        with self._closing:  # what is submitted before `close` is cancelled by it; nothing is submitted after it
            if self._closed:
                work.close()
                raise RuntimeError("the client is closed")
            running = asyncio.run_coroutine_threadsafe(_announced(work, over.set), self._loop)
        try:
            return running.result()
        except CancelledError:
            raise Cancelled("the client was closed while the request ran") from None
        except BaseException:
            if not running.done():
                running.cancel()
                over.wait(_CANCEL_S)
            raise

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts the work unless the client is closed, and does not wait for it.

        The garbage collector calls this in any thread, also in the loop's own, and when the program ends, where the
        loop stands still. So it takes no lock.
        """
        if not self._closed and os.getpid() == self._process:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(work()))

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ends what still runs, runs `last`, and ends the thread."""
        ending = self.abandon(last)
        if ending is not None:
            ending.result(_CANCEL_S)
            self._thread.join(_CANCEL_S)

    def abandon(self, last: Callable[[], Coroutine[Any, Any, None]]) -> Future[None] | None:
        """As `close`, but does not wait. Returns None if that happened before."""
        if os.getpid() != self._process:
            return None
        with self._closing:
            if self._closed:
                return None
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(_end_with(last), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        return ending

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _announced(work: Coroutine[Any, Any, Answer], announce: Callable[[], None]) -> Answer:
    try:
        return await work
    finally:
        announce()


async def _nothing() -> None:
    pass


async def _end_with(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancels every other task of this loop, such as the calls of other threads, and awaits their ends, then `last`."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await last()
