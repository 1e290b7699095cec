"""Engine steps from rank 0 to the others: written once, sent to each before rank 0 launches its own, done in order.

Knows no transfers, and not what is in a batch.
"""

from collections import deque
from collections.abc import Sequence

from engine.batch import Batch
from engine.batch_stream import BatchReader, BatchWriter
from engine.device.runner import LaunchedStep, ModelRunner
from engine.scheduling.in_flight import STEPS_MAX
from node.ranks.channel import Channel

# In place of a batch: prepare the runner.
_PREPARE = b""


class StepWriter:
    """Rank 0's end. Used by the thread that launches."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._writer = BatchWriter()

    def prepare(self) -> None:
        self._send(_PREPARE)

    def launch(self, batch: Batch) -> None:
        """Raises OSError: a rank is gone."""
        self._send(self._writer.write(batch))

    def _send(self, message: bytes) -> None:
        for channel in self._channels:
            channel.send_bytes(message)


def follow(channel: Channel, runner: ModelRunner) -> None:
    """Does what rank 0 does, until there is no more of it. All ranks sample the same, so nobody is told.

    Raises whatever a step raises: the ranks are not in step any more then.
    """
    reader = BatchReader()
    launched: deque[LaunchedStep] = deque()
    while True:
        try:
            message = channel.receive_bytes()
        except EOFError:
            break
        if message == _PREPARE:
            runner.prepare()
            continue
        launched.append(runner.launch(reader.read(message)))
        if len(launched) == STEPS_MAX:
            launched.popleft().wait()
    for step in launched:
        step.wait()
