"""What a step in flight has for itself: memory on the host that it is copied from and to, and the events around it.

Made once, lent to a step at its launch, given back when its results are read: so no step makes any, and none writes
where another is still being copied. Knows no rows.
"""

import time
from collections import deque

import torch
from torch import Tensor


class StepSlot:
    """Attributes:
    inputs: uint8 in pinned memory; what the device reads.
    inputs_host: the same as numpy sees it.
    tokens_host: int32, what the device has written.
    timer: of the step.
    """

    def __init__(self, device: torch.device, *, input_bytes: int, max_rows: int) -> None:
        is_gpu = device.type == "cuda"
        self.inputs = torch.empty(input_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.inputs_host = self.inputs.numpy()
        self._tokens = torch.empty(max_rows, dtype=torch.int32, pin_memory=is_gpu)
        self.tokens_host = self._tokens.numpy()
        self.timer: DeviceTimer | HostTimer = DeviceTimer(device) if is_gpu else HostTimer()

    def fetch(self, tokens: Tensor) -> None:
        """Queues the copy of all rows' tokens to the host, which does not wait."""
        self._tokens.copy_(tokens, non_blocking=True)


class StepSlots:
    """As many as there are steps in flight. Any thread may give one back."""

    def __init__(self, device: torch.device, *, input_bytes: int, max_rows: int) -> None:
        self._device = device
        self._input_bytes = input_bytes
        self._max_rows = max_rows
        self._free: deque[StepSlot] = deque()

    def take(self) -> StepSlot:
        if self._free:
            return self._free.popleft()
        return StepSlot(self._device, input_bytes=self._input_bytes, max_rows=self._max_rows)

    def give_back(self, slot: StepSlot) -> None:
        """The step is over, and its results are read. One whose launch has failed is not given back."""
        self._free.append(slot)


class DeviceTimer:
    """From `start` to `stop`, as the device runs it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = torch.cuda.Event(enable_timing=True)
        # A blocking event: the thread that waits leaves the processor to others.
        self._end = torch.cuda.Event(enable_timing=True, blocking=True)
        self._stream: torch.cuda.Stream | None = None

    def start(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)  # looked up once, not by each event
        self._begin.record(self._stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def wait(self) -> float:
        """Returns when the device is done, and how many seconds it took."""
        # NOTE: a thread that has no GPU yet gets the first one, and a context there takes half a gigabyte.
        torch.cuda.set_device(self._device)
        self._end.synchronize()
        milliseconds: float = self._begin.elapsed_time(self._end)
        return milliseconds / 1e3


class HostTimer:
    """The same on a CPU, where a step is over when it is launched."""

    def __init__(self) -> None:
        self._start_s = self._stop_s = 0.0

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def stop(self) -> None:
        self._stop_s = time.perf_counter()

    def wait(self) -> float:
        return self._stop_s - self._start_s
