"""Slots for steps in flight: each has host memory for a step's inputs and results, and the timer around it.

A slot is made once, lent to a step at its launch, and given back when the results are read. So no step allocates, and
no step writes to memory that is still being copied.
"""

import time
from collections import deque

import torch
from torch import Tensor


class StepSlot:
    """The memory and timer of one step.

    Attributes:
        inputs: uint8, pinned on a GPU machine; the device reads it.
        inputs_host: the same memory as a numpy array.
        prompt_inputs, prompt_inputs_host: the same for steps with prompts.
        tokens_host: int32; the device writes it.
        timer: times the step.
        draft_timer: times the layer that drafts tokens after it.
    """

    def __init__(self, device: torch.device, *, input_bytes: int, max_rows: int, prompt_input_bytes: int = 0) -> None:
        is_gpu = device.type == "cuda"
        self.inputs = torch.empty(input_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.inputs_host = self.inputs.numpy()
        self.prompt_inputs = torch.empty(prompt_input_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.prompt_inputs_host = self.prompt_inputs.numpy()
        self._tokens = torch.empty(max_rows, dtype=torch.int32, pin_memory=is_gpu)
        self.tokens_host = self._tokens.numpy()
        self.timer: DeviceTimer | HostTimer = DeviceTimer(device) if is_gpu else HostTimer()
        self.draft_timer: DeviceTimer | HostTimer = DeviceTimer(device) if is_gpu else HostTimer()

    def step_computed(self) -> None:
        """Ends the time of the step, and begins that of the layer that drafts."""
        self.timer.stop()
        self.draft_timer.start()

    def fetch(self, tokens: Tensor) -> None:
        """Queues the copy of all rows' tokens to the host. The host does not wait."""
        self._tokens.copy_(tokens, non_blocking=True)


class StepSlots:
    """One slot per step in flight. Any thread may give one back."""

    def __init__(self, device: torch.device, *, input_bytes: int, max_rows: int, prompt_input_bytes: int = 0) -> None:
        self._device = device
        self._input_bytes = input_bytes
        self._prompt_input_bytes = prompt_input_bytes
        self._max_rows = max_rows
        self._free: deque[StepSlot] = deque()

    def take(self) -> StepSlot:
        if self._free:
            return self._free.popleft()
        return StepSlot(
            self._device,
            input_bytes=self._input_bytes,
            max_rows=self._max_rows,
            prompt_input_bytes=self._prompt_input_bytes,
        )

    def give_back(self, slot: StepSlot) -> None:
        """Call it when the step's results are read. The slot of a failed launch is not given back."""
        self._free.append(slot)


class DeviceTimer:
    """Times the device from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = torch.cuda.Event(enable_timing=True)
        # A blocking event: the waiting thread does not occupy a core.
        self._end = torch.cuda.Event(enable_timing=True, blocking=True)
        self._stream: torch.cuda.Stream | None = None

    def start(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)  # looked up once for both events
        self._begin.record(self._stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def wait(self) -> float:
        """Waits for the device; returns the seconds between `start` and `stop`."""
        # NOTE: a thread without a current GPU uses the first one, and a context there takes half a gigabyte.
        torch.cuda.set_device(self._device)
        self._end.synchronize()
        milliseconds: float = self._begin.elapsed_time(self._end)
        return milliseconds / 1e3


class HostTimer:
    """Times a step on a CPU, where it has ended when `launch` returns."""

    def __init__(self) -> None:
        self._start_s = self._stop_s = 0.0

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def stop(self) -> None:
        self._stop_s = time.perf_counter()

    def wait(self) -> float:
        return self._stop_s - self._start_s
