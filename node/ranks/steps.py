"""Engine steps from rank 0 to the other ranks: encoded once, sent before rank 0 launches, performed in order."""

from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

from engine.batch import Batch
from engine.batch_stream import BatchReader, BatchWriter
from engine.device.runner import LaunchedStep, ModelRunner
from engine.scheduling.steps import STEPS_MAX

# In place of a batch: prepare the runner.
_PREPARE = b""


class StepWriter:
    """Rank 0's end. Used by the thread that launches."""

    def __init__(self, ranks: Sequence[Connection]) -> None:
        self._ranks = ranks
        self._writer = BatchWriter()

    def prepare(self) -> None:
        self._send(_PREPARE)

    def launch(self, batch: Batch) -> None:
        """Raises OSError: a rank is gone."""
        self._send(self._writer.write(batch))

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            rank.send_bytes(message)


def follow(steps: Connection, runner: ModelRunner) -> None:
    """Performs rank 0's steps until rank 0 closes the connection or is gone. All ranks sample the same tokens, so
    nothing is sent back.

    Raises whatever a step raises: the ranks are not in step any more then.
    """
    reader = BatchReader()
    launched: deque[LaunchedStep] = deque()
    while True:
        try:
            message = steps.recv_bytes()
        except (EOFError, OSError):
            break
        if message == _PREPARE:
            runner.prepare()
            continue
        launched.append(runner.launch(reader.read(message)))
        if len(launched) == STEPS_MAX:
            launched.popleft().wait()
    for step in launched:
        step.wait()
