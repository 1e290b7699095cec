"""The two threads between event loop and device: one launches steps, the other waits for their marks and results.

They exchange only messages with the event loop, in the order of the steps. An exception of a step becomes a message,
and the threads continue.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol, TypeAlias

from baton.core.types import PromptLogprob
from baton.engine.batch import Batch, LayerDrafts, RowResult
from baton.engine.device.layer_marks import LayerMark, OnMark
from baton.engine.pooling import PooledRows
from baton.engine.request import ModelFacts
from baton.models.adapters.adapter import Adapter
from baton.models.layers.expert_counts import FetchedCounts

# Tokens of each place, by layer; empty: the model has no experts, or they are not counted.
ExpertCounts: TypeAlias = Mapping[int, Sequence[int]]


class LaunchedWork(Protocol):
    """A launched step: `baton.engine.device.runner.LaunchedStep`, or one on each of several ranks."""

    def wait(self) -> list[RowResult]: ...

    @property
    def seconds(self) -> float: ...

    @property
    def scores(self) -> Mapping[int, Sequence[PromptLogprob]]: ...

    @property
    def pools(self) -> PooledRows: ...

    @property
    def layer_drafts(self) -> LayerDrafts | None: ...

    @property
    def shares_keys(self) -> bool: ...


class StepRunner(Protocol):
    """Computes steps: an `baton.engine.device.runner.ModelRunner`, or one on each of several ranks."""

    @property
    def facts(self) -> ModelFacts: ...

    def prepare(self) -> None: ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None: ...

    def launch(self, batch: Batch, on_mark: OnMark) -> LaunchedWork: ...

    def fetch_expert_counts(self) -> FetchedCounts | None: ...


@dataclass(frozen=True)
class LayersDone:
    """The running step has computed all layers before `layer_stop`, and those of an index before `index_stop`."""

    layer_stop: int
    index_stop: int


@dataclass(frozen=True)
class StepComputed:
    """A step has ended. `tokens` has one entry per row of the batch, None where nothing was sampled; `scores` and
    `pools` are by row. The step was queued on the device at `launched_s`, and its end was seen at `ended_s`.
    `layer_drafts` is what the model's own layer drafts next; None: nothing was asked for. `shares_keys`: whether it
    read keys that many rows share only once."""

    tokens: list[RowResult]
    seconds: float
    scores: Mapping[int, Sequence[PromptLogprob]]
    pools: PooledRows
    launched_s: float
    ended_s: float
    layer_drafts: LayerDrafts | None = None
    shares_keys: bool = False


@dataclass(frozen=True)
class StepRaised:
    """A step raised an error, `seconds` after its launch began; times as in `StepComputed`."""

    error: Exception
    seconds: float
    launched_s: float
    ended_s: float


Outcome = LayersDone | StepComputed | StepRaised


class _Launched(NamedTuple):
    """A message from the launching thread to the waiting one."""

    step: LaunchedWork | Exception
    since_s: float
    launched_s: float


class _Fetched(NamedTuple):
    """Expert counts that the waiting thread passes to `deliver` when they arrive, or the error instead."""

    counts: FetchedCounts | Exception | None
    deliver: Callable[[ExpertCounts | Exception], None]


class DeviceThread:
    """Launches batches and reports their outcomes, from `start` to `close`.

    Args:
        on_outcome: called on the event loop for each launched batch, in launch order: for each of its marks, then once
            for its result.
    """

    def __init__(
        self, runner: StepRunner, *, clock: Callable[[], float], on_outcome: Callable[[Outcome], None]
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._on_outcome = on_outcome
        self._batches: SimpleQueue[Batch | Callable[[], None] | None] = SimpleQueue()
        self._launched: SimpleQueue[LayerMark | _Launched | _Fetched | None] = SimpleQueue()
        self._threads: list[Thread] = []

    async def start(self) -> None:
        """Starts both threads and waits until the runner is prepared. An error of `prepare` ends both threads and is
        raised."""
        loop = asyncio.get_running_loop()
        prepared: asyncio.Future[None] = loop.create_future()
        self._threads = [
            Thread(target=self._launch_steps, args=(loop, prepared), name="device", daemon=True),
            Thread(target=self._await_steps, args=(loop,), name="device-results", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            await prepared
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends both threads, once every launched step has ended and its outcome is reported."""
        self._batches.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def launch(self, batch: Batch) -> None:
        """Runs the batch after all batches launched before."""
        self._batches.put(batch)

    async def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Loads an adapter between the batches launched before and the next one. Raises what the runner raises."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()

        def load() -> None:
            error = _raised(partial(self._runner.load_adapter, slot, adapter))
            loop.call_soon_threadsafe(_settle, loaded, error)

        self._batches.put(load)
        await loaded

    async def expert_counts(self) -> ExpertCounts:
        """Counts each expert's tokens over the steps launched before. Steps go on meanwhile. Raises what the device
        raises."""
        loop = asyncio.get_running_loop()
        counted: asyncio.Future[ExpertCounts] = loop.create_future()

        def deliver(counts: ExpertCounts | Exception) -> None:
            loop.call_soon_threadsafe(_settle_with, counted, counts)

        def fetch() -> None:
            found: FetchedCounts | Exception | None
            try:
                found = self._runner.fetch_expert_counts()
            except Exception as error:  # noqa: BLE001  the caller gets it
                found = error
            self._launched.put(_Fetched(found, deliver))

        self._batches.put(fetch)
        return await counted

    def _launch_steps(self, loop: asyncio.AbstractEventLoop, prepared: "asyncio.Future[None]") -> None:
        error = _raised(self._runner.prepare)
        loop.call_soon_threadsafe(_settle, prepared, error)
        while (batch := self._batches.get()) is not None:
            if not isinstance(batch, Batch):
                batch()
                continue
            since_s = self._clock()
            step: LaunchedWork | Exception
            try:
                step = self._runner.launch(batch, self._launched.put)
            except Exception as error:  # noqa: BLE001  the step's requests fail with it; the thread serves the others
                step = error
            self._launched.put(_Launched(step, since_s, self._clock()))
        self._launched.put(None)

    def _await_steps(self, loop: asyncio.AbstractEventLoop) -> None:
        while (launched := self._launched.get()) is not None:
            if isinstance(launched, _Fetched):
                launched.deliver(_counts(launched.counts))
            elif isinstance(launched, _Launched):
                loop.call_soon_threadsafe(self._on_outcome, self._outcome(launched))
            elif _raised(launched.wait) is None:  # an error of the device comes with its step
                loop.call_soon_threadsafe(self._on_outcome, LayersDone(launched.layer_stop, launched.index_stop))

    def _outcome(self, launched: _Launched) -> Outcome:
        step, since_s, launched_s = launched
        try:
            if isinstance(step, Exception):
                raise step
            tokens = step.wait()
        except Exception as error:  # noqa: BLE001  as above
            ended_s = self._clock()
            return StepRaised(error, ended_s - since_s, launched_s, ended_s)
        ended_s = self._clock()
        read = step.scores, step.pools
        return StepComputed(tokens, step.seconds, *read, launched_s, ended_s, step.layer_drafts, step.shares_keys)


def _raised(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  the caller passes it on
        return error
    return None


def _counts(fetched: FetchedCounts | Exception | None) -> ExpertCounts | Exception:
    if isinstance(fetched, Exception):
        return fetched
    try:
        return {} if fetched is None else fetched.wait()
    except Exception as error:  # noqa: BLE001  the caller gets it
        return error


def _settle_with(waiter: "asyncio.Future[ExpertCounts]", counts: ExpertCounts | Exception) -> None:
    if waiter.done():
        return
    if isinstance(counts, Exception):
        waiter.set_exception(counts)
    else:
        waiter.set_result(counts)


def _settle(waiter: "asyncio.Future[None]", error: Exception | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
