"""The client for programs without an event loop. It runs an `AsyncClient` in a thread of its own."""

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, cast, overload

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
            self._client = self._loop.run(connect)
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
        stream = _Stream(events)
        try:
            while (event := self._loop.run(stream.next)) is not None:
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


@dataclass(eq=False)
class _Call(Generic[Answer]):
    """A call of a thread that waits for it.

    Attributes:
        work: makes the coroutine, on the loop: one that was made and never begun would leave a warning.
        done: gets the answer or the error, or None if a stopped call has not begun. A queue, because it needs no lock
            of Python: Ctrl-C can strike between any two steps of the thread, and a lock that it left held would stop
            the loop.
    """

    work: Callable[[], Coroutine[Any, Any, Answer]]
    done: "queue.SimpleQueue[tuple[Answer | None, BaseException | None] | None]" = field(
        default_factory=queue.SimpleQueue
    )
    task: "asyncio.Task[Answer] | None" = None

    def begin(self) -> None:
        try:
            self.task = asyncio.get_running_loop().create_task(self.work())
        except Exception as error:  # noqa: BLE001  the waiting thread raises it
            self.done.put((None, error))
        else:
            self.task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Answer]") -> None:
        if task.cancelled():
            self.done.put((None, Cancelled("the client was closed while the request ran")))
        elif (error := task.exception()) is not None:
            self.done.put((None, error))
        else:
            self.done.put((task.result(), None))

    def stop(self) -> None:
        """Comes after `begin`, if that comes at all."""
        if self.task is None:
            self.done.put(None)
        else:
            self.task.cancel()


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run_loop, name="baton-client", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Runs the coroutine and returns its result. An interrupt such as Ctrl-C cancels the coroutine first.

        Raises:
            RuntimeError: the client is closed, or belongs to the process that forked this one.
            Cancelled: it was closed meanwhile.
        """
        if os.getpid() != self._process:  # its thread is not in this process, and its lock may be held for ever
            cure = "close clients before a fork, or start processes with multiprocessing's spawn"
            raise RuntimeError(f"this client belongs to the process that forked this one; {cure}")
        call = _Call(work)
        try:
            with self._closing:  # what is submitted before `close` is cancelled by it; nothing is submitted after it
                if self._closed:
                    raise _ClosedClient("the client is closed")
                self._loop.call_soon_threadsafe(call.begin)
            ended = call.done.get()
        except _ClosedClient:
            raise
        except BaseException:
            with suppress(RuntimeError, queue.Empty):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(call.stop)
                call.done.get(timeout=_CANCEL_S)
            raise
        assert ended is not None, "only a stopped call has not begun"
        answer, error = ended
        if error is not None:
            raise error
        return cast(Answer, answer)

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
        ended = self.abandon(last)
        if ended is not None:
            with suppress(queue.Empty):
                ended.get(timeout=_CANCEL_S)
            self._thread.join(_CANCEL_S)

    def abandon(self, last: Callable[[], Coroutine[Any, Any, None]]) -> "queue.SimpleQueue[None] | None":
        """As `close`, but does not wait: returns a queue that gets None at the end. Returns None if that happened
        before."""
        if os.getpid() != self._process:
            return None
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        async def end() -> None:
            try:
                await _end_with(last)
            finally:
                ended.put(None)
                self._loop.stop()

        with self._closing:
            if self._closed:
                return None
            self._closed = True
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(end()))
        return ended

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


class _ClosedClient(RuntimeError):
    """A call of a client that was closed before."""


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
