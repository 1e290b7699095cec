"""The run loop of one engine: takes turns, and in each one ends a step, launches the next, and passes events on.

It knows the scheduler's batches and the device's outcomes, but not what requests ask for. All methods belong to the
event loop's thread. The device thread exchanges only batches and outcomes with it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from baton.core.errors import BatonError, Cancelled, InternalError
from baton.engine.device.device_thread import DeviceThread, LayersDone, Outcome, StepComputed, StepRunner
from baton.engine.events import StepEvents
from baton.engine.launch_pace import LaunchPace
from baton.engine.punctual_timer import PunctualTimer
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.tiered_prefixes import TieredPrefixes

_log = logging.getLogger(__name__)


class StepLoop:
    """Runs an engine's steps between `start` and `close`.

    Args:
        prefixes: the traffic with the stores outside of the cache; None: there are no stores.
        on_step: called after each step, during a step at each of its marks, and when waiting requests are refused. If
            it raises, the loop ends.

    Attributes:
        device: the thread that launches the steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        prefixes: TieredPrefixes | None,
        *,
        clock: Callable[[], float],
        on_step: Callable[[StepEvents], None],
    ) -> None:
        self.device = DeviceThread(runner, clock=clock, on_outcome=self._receive)
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._clock = clock
        self._on_step = on_step
        self._pace = LaunchPace()
        self._timer: PunctualTimer | None = None  # fires when the next launch is due
        self._outcomes: deque[Outcome] = deque()  # not processed yet
        self._ended_s: float | None = None  # when the last step's end was seen
        self._wake = asyncio.Event()
        self._step_over = asyncio.Event()  # a new one for each step
        self._over: BatonError | None = None  # why the engine takes no more requests
        self._error: Exception | None = None  # of a turn outside of the task, which ends with it
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Prepares the device, which may take minutes, and raises its errors."""
        await self.device.start()
        self._timer = PunctualTimer(self._advance)
        self._task = asyncio.create_task(self._run(), name="engine")

    async def close(self) -> None:
        """Lets the steps in flight end; every remaining request fails with Cancelled."""
        assert self._task is not None, "close comes after start"
        self._over = self._over or Cancelled("the engine is closing", cure="try another node")
        self._wake.set()
        await self._task

    @property
    def is_over(self) -> bool:
        """Whether the engine takes no more requests."""
        return self._over is not None

    def check_alive(self) -> None:
        """Raises what ended the loop, if anything has."""
        if self._over is not None:
            raise self._over

    def wake(self) -> None:
        """Lets the loop take a turn soon, because requests have come, gone, or got what they waited for."""
        self._wake.set()

    async def step_ended(self) -> None:
        """Returns when the oldest step in flight has ended, or the loop has."""
        await self._step_over.wait()

    async def _run(self) -> None:
        try:
            await self._take_turns()
        except Exception as error:  # noqa: BLE001  every request fails with it below
            _log.exception("the engine's loop failed")
            self._over = _internal("the engine failed", error)
        assert self._timer is not None, "start makes it"
        self._timer.close()
        await self.device.close()
        assert self._over is not None, "the loop ends only when this is set"
        last = self._scheduler.fail_all(self._over)
        if self._prefixes is not None:
            await self._prefixes.close()
        self._step_over.set()
        if last.failed:
            self._on_step(last)

    async def _take_turns(self) -> None:
        """Takes turns whenever requests come or go, until the engine is over and no step is in flight."""
        while self._over is None or self._scheduler.steps_in_flight:
            self._wake.clear()
            if self._error is not None:
                raise self._error
            if not self._take_turn():
                await self._wake.wait()

    def _receive(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._advance()

    def _advance(self) -> None:
        """Takes turns at once, because a step has ended or the next launch is due. To wake the task instead would let
        everything else that is ready on the event loop go first."""
        if self._over is None and self._error is None:
            try:
                while self._take_turn():
                    pass
                return
            except Exception as error:  # noqa: BLE001  the task ends with it
                self._error = error
        self._wake.set()

    def _take_turn(self) -> bool:
        """Ends a step, launches one, and only then passes events on: the next step is launched before the running one
        ends, so the device never waits. Returns whether anything has happened."""
        in_flight = self._scheduler.steps_in_flight
        events = self._next_events()
        ended = self._scheduler.steps_in_flight < in_flight
        launched = self._over is None and self._is_due() and self._launch_next()
        refused = self._scheduler.take_refused()
        if events is not None:
            self._on_step(events)
        if refused is not None:
            self._on_step(refused)
        if self._prefixes is not None:
            self._prefixes.save_finished(is_quiet=ended and not launched)
        return launched or events is not None

    def _is_due(self) -> bool:
        """Whether the next step should be launched now. If not, the timer fires when it should."""
        assert self._timer is not None, "start makes it"
        due_s = self._pace.due_s
        if due_s is None or self._scheduler.steps_in_flight != 1 or (delay_s := due_s - self._clock()) <= 0:
            self._timer.stop()
            return True
        self._timer.start(delay_s)
        return False

    def _launch_next(self) -> bool:
        now = self._clock()
        begun_s = self._pace.begin(now=now) if self._scheduler.steps_in_flight else now
        batch = self._scheduler.schedule(now)
        if batch is None:
            return False
        self.device.launch(batch)
        self._pace.launched(begun_s)
        if self._scheduler.steps_in_flight == 1:
            self._started(now, now=now)
        return True

    def _started(self, started_s: float, *, now: float) -> None:
        """Notes when the oldest step in flight started."""
        scheduler = self._scheduler
        self._pace.started(started_s, scheduler.predicted_s, has_prompts=scheduler.computes_prompts, now=now)

    def _next_events(self) -> StepEvents | None:
        """The next events of the oldest step in flight. Returns None if the device has reported nothing new."""
        if not self._outcomes:
            return None
        outcome = self._outcomes.popleft()
        if isinstance(outcome, LayersDone):
            return self._scheduler.layers_computed(outcome.layer_stop, outcome.index_stop)
        self._pace.ended(launched_s=outcome.launched_s, ended_s=outcome.ended_s)
        if isinstance(outcome, StepComputed):
            waited_s = None if self._ended_s is None else outcome.ended_s - self._ended_s - outcome.seconds
            read = outcome.scores, outcome.pools, outcome.layer_drafts
            events = self._scheduler.complete(
                outcome.tokens, outcome.seconds, *read, waited_s=waited_s, shares_keys=outcome.shares_keys
            )
        else:
            _log.error("an engine step failed", exc_info=outcome.error)
            events = self._scheduler.fail(_internal("an engine step failed", outcome.error), outcome.seconds)
        self._ended_s = outcome.ended_s
        if self._scheduler.steps_in_flight:
            self._started(outcome.ended_s, now=self._clock())
        self._step_over.set()
        self._step_over = asyncio.Event()
        return events


def _internal(message: str, cause: Exception) -> InternalError:
    error = InternalError(f"{message}: {type(cause).__name__}: {cause}", cure="see the node's log")
    error.__cause__ = cause
    return error
