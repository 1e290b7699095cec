"""Engine steps from rank 0 to the others: encoded once, sent to each before rank 0 launches its own, done in order.

A row that stands where it stood in the step before is not sent again. Knows no transfers.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.batch import Batch, BatchRow
from engine.in_flight import STEPS_MAX
from engine.runner import LaunchedStep, ModelRunner
from node.ranks.channel import Channel, dumps


class StepMessage(NamedTuple):
    """A step as the difference to the one before.

    Attributes:
        step: its number; None: prepare the runner.
        rows: how many it has.
        others: those that did not stand there before, by place.
    """

    step: int | None
    rows: int = 0
    others: dict[int, BatchRow] | None = None


class StepWriter:
    """Rank 0's end. Used by the thread that launches."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._before: tuple[BatchRow, ...] = ()

    def prepare(self) -> None:
        self._send(StepMessage(None))

    def launch(self, batch: Batch) -> None:
        """Raises OSError: a rank is gone."""
        rows, before = batch.shared_rows, self._before
        known = len(before)
        # By identity: the engine makes a row anew when anything of it changes but what a step's number says.
        others = {place: row for place, row in enumerate(rows) if place >= known or row is not before[place]}
        self._before = rows
        self._send(StepMessage(batch.step, len(rows), others))

    def _send(self, message: StepMessage) -> None:
        data = dumps(tuple(message))
        for channel in self._channels:
            channel.send_bytes(data)


class StepReader:
    """Another rank's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._before: Sequence[BatchRow] = ()

    def receive(self) -> Batch | None:
        """The next step; None: the runner is to be prepared.

        Raises:
            EOFError: there is no next step.
        """
        message = StepMessage(*self._channel.receive())
        if message.step is None:
            return None
        others = message.others or {}
        before = self._before
        rows = tuple(others[place] if place in others else before[place] for place in range(message.rows))
        self._before = rows
        return Batch(message.step, rows)


def follow(reader: StepReader, runner: ModelRunner) -> None:
    """Does what rank 0 does, until there is no more of it. All ranks sample the same, so nobody is told.

    Raises whatever a step raises: the ranks are not in step any more then.
    """
    launched: deque[LaunchedStep] = deque()
    while True:
        try:
            batch = reader.receive()
        except EOFError:
            break
        if batch is None:
            runner.prepare()
            continue
        launched.append(runner.launch(batch))
        if len(launched) == STEPS_MAX:
            launched.popleft().wait()
    for step in launched:
        step.wait()
