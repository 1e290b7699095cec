"""Engine steps from rank 0 to the other ranks: encoded once, sent before rank 0 launches, performed in order."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from baton.engine.batch import Batch
from baton.engine.batch_stream import BatchReader, BatchWriter
from baton.engine.device.launched_step import LaunchedStep
from baton.engine.device.runner import ModelRunner
from baton.engine.scheduling.steps import STEPS_MAX
from baton.models.adapters.adapter import Adapter
from baton.node.ranks.messages import Up

# The message that means "prepare the runner".
_PREPARE = b""
# The first byte of a message with a slot and an adapter; a batch begins with another byte.
_ADAPTER = b"A"
_SLOT_BYTES = 4
_NAMED_MAX = 64


class StepWriter:
    """Rank 0's end. Used by the thread that launches steps."""

    def __init__(self, ranks: Sequence[Connection]) -> None:
        self._ranks = ranks
        self._writer = BatchWriter()

    def prepare(self) -> None:
        self._send(_PREPARE)

    def launch(self, batch: Batch) -> None:
        """Sends a step. Raises OSError if a rank is gone."""
        self._send(self._writer.write(batch))

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Sends an adapter for a slot. Raises OSError if a rank is gone."""
        self._send(_ADAPTER + slot.to_bytes(_SLOT_BYTES) + adapter.to_bytes())

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            rank.send_bytes(message)


def follow(steps: Connection, runner: ModelRunner) -> None:
    """Performs rank 0's steps until rank 0 closes the connection or is gone. All ranks sample the same tokens, so
    nothing is sent back, except an `Up` once the runner is prepared.

    Raises a step's error, after which the ranks are out of step.
    """
    reader = BatchReader()
    launched: deque[tuple[Batch, LaunchedStep]] = deque()
    while True:
        try:
            message = steps.recv_bytes()
        except (EOFError, OSError):
            break
        if message == _PREPARE:
            runner.prepare()
            with suppress(OSError):  # rank 0 is gone, which the next message shows
                steps.send(Up())
            continue
        if message.startswith(_ADAPTER):
            content = message[len(_ADAPTER) :]
            slot = int.from_bytes(content[:_SLOT_BYTES])
            runner.load_adapter(slot, Adapter.from_bytes(content[_SLOT_BYTES:]))
            continue
        batch = reader.read(message)
        with _naming(batch):
            launched.append((batch, runner.launch(batch)))
        if len(launched) == STEPS_MAX:
            _wait(*launched.popleft())
    for step in launched:
        _wait(*step)


def _wait(batch: Batch, step: LaunchedStep) -> None:
    with _naming(batch):
        step.wait()


@contextmanager
def _naming(batch: Batch) -> Iterator[None]:
    """Adds the engine ids of the step's requests to an error of the block."""
    try:
        yield
    except Exception as error:
        names = [row.request_id for row in batch.shared_rows]
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        error.add_note(f"in step {batch.step} of the requests {', '.join(names[:_NAMED_MAX])}{more}")
        raise
