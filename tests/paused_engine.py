"""An engine that runs no step until its test allows it, so that a request stays where the test wants it.

The node around it continues to answer, send, receive, cancel and drain.
"""

import asyncio
import math
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from baton.cli.processes import Running
from baton.engine.step_loop import StepLoop
from tests.warm import launch_warm


class PausedSteps:
    """Allows the engine steps of one node."""

    def __init__(self) -> None:
        self._node_end, self._test_end = multiprocessing.Pipe(duplex=False)

    def launch(self, program: str, arguments: Sequence[str], *, prepare: Callable[[], None] | None = None) -> Running:
        """Starts the node, after `prepare` in its process; no step is allowed yet."""
        process = launch_warm(program, arguments, prepare=partial(_pause_engine, self._node_end, prepare))
        self._node_end.close()
        return process

    def allow(self, count: float) -> None:
        """Allows so many steps from now on, whatever was allowed before."""
        with suppress(BrokenPipeError):  # the node has ended
            self._test_end.send(count)

    def allow_all(self) -> None:
        self.allow(math.inf)


def _pause_engine(allowances: Connection, prepare: Callable[[], None] | None) -> None:
    """Makes the step loop of this process start only steps that are allowed."""
    if prepare is not None:
        prepare()

    launch_next = StepLoop._launch_next
    allowed: dict[StepLoop, float] = {}

    def launch_allowed(self: StepLoop) -> bool:
        if self not in allowed:
            allowed[self] = 0.0
            asyncio.get_running_loop().add_reader(allowances.fileno(), receive, self)
        if allowed[self] < 1 or not launch_next(self):
            return False
        allowed[self] -= 1
        return True

    def receive(steps: StepLoop) -> None:
        try:
            allowed[steps] = allowances.recv()
        except EOFError:  # the test process has ended
            allowed[steps] = math.inf
            asyncio.get_running_loop().remove_reader(allowances.fileno())
        steps.wake()

    StepLoop._launch_next = launch_allowed  # type: ignore[method-assign]
