"""Decode steps as CUDA graphs: captured once for some numbers of rows, and replayed for any smaller number, padded.

Legend: R rows of a step including padding, V vocabulary.
"""

import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from engine.batch import BatchRow
from engine.device.decode_buffers import DecodeBuffers, new_decode_buffers
from engine.device.step_slot import StepSlot, StepSlots
from engine.request import int_array
from engine.sampling.choice import choose_tokens
from kvcache.cache import PagedKVCache
from models.causal_lm import CausalLM

_log = logging.getLogger(__name__)

# Bound of the driver's memory for one graph; a graph of some hundred kernels takes some MiB.
_DRIVER_BYTES = 32 << 20

# Queues a step over the rows in the buffers; returns its logits, which the next step overwrites.
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class GraphSettings:
    """What to capture, and how large the buffers are.

    Args:
        max_requests: most rows of a step; buffers are allocated for this many.
        max_context_tokens: longest sequence of a step.
        memory_bytes: what graphs may take in addition to their buffers; None: no bound.
        largest: rows of the largest captured step; None: `max_requests`.
    """

    max_requests: int
    max_context_tokens: int
    memory_bytes: int | None = None
    largest: int | None = None


def capture_sizes(largest: int) -> list[int]:
    """Numbers of rows to capture, smallest first. From 17 rows on at most a third of a step is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]


def thin(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of the sizes, evenly spread, with the smallest. Other batches are padded to the next size."""
    if count >= len(sizes):
        return list(sizes)
    return [sizes[place * len(sizes) // count] for place in range(count)]


def decode_step(
    model: CausalLM, cache: PagedKVCache, buffers: DecodeBuffers, metadata: AttentionMetadata, size: int
) -> Tensor:
    """One step over the first `size` rows of the buffers: looks their tokens up, writes their KV, samples their next
    tokens. Returns logits [R, V]. Reads no memory of the host."""
    # NOTE: this must be a kernel of torch, which waits for all queued work. The layers' kernels read their attention
    # plan before they wait, and that plan may have been queued just now.
    token_ids = buffers.look_tokens_up(size)
    hidden_RD = model(token_ids, buffers.positions[:size], cache, metadata)
    logits_RV = model.compute_logits(hidden_RD)
    choose_tokens(logits_RV, buffers.sampling, out_R=buffers.sampled[:size])
    return logits_RV


def affordable(taken: Sequence[int], bound: int | None) -> int:
    """How many more graphs the bound allows, estimated from the bytes that each graph so far has taken."""
    if bound is None:
        return sys.maxsize
    left = bound - sum(taken)
    if left <= 0:
        return 0
    # The first graph takes the memory that all others share, so it says nothing about theirs.
    return left // max(1, *taken[1:]) if len(taken) > 1 else sys.maxsize


class FreeMemory(NamedTuple):
    """In bytes: `free` of the whole device, `reserved` by torch in this process."""

    free: int
    reserved: int


def taken_bytes(before: FreeMemory, after: FreeMemory) -> int:
    """The memory of a capture: what torch and the driver reserved for it. The driver's part is read from the device's
    free memory and bounded, because another process on the device may take gigabytes meanwhile."""
    reserved = after.reserved - before.reserved
    driver = before.free - after.free - reserved
    return max(0, reserved) + min(max(0, driver), _DRIVER_BYTES)


class DecodeGraphs:
    """Captured decode steps, for one thread and one stream. On a CPU nothing is captured; the same padded step runs.

    Attributes:
        buffers: shared by all sizes.
        sizes: captured numbers of rows, smallest first.
    """

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, cache: PagedKVCache, settings: GraphSettings
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._settings = settings
        self._device = cache.view.device
        self.buffers = new_decode_buffers(
            max_rows=settings.max_requests,
            max_context_tokens=settings.max_context_tokens,
            block_size=cache.shape.block_size,
            device=self._device,
        )
        self.sizes: list[int] = []
        self._steps: dict[int, Step] = {}

    def size_for(self, rows: Sequence[BatchRow]) -> int | None:
        """The captured size that these rows run in; None: they must run outside of a graph."""
        place = bisect_left(self.sizes, len(rows))
        # Rows of a single token come first.
        if place == len(self.sizes) or len(rows[-1].token_ids) > 1:
            return None
        return self.sizes[place]

    def launch(self, rows: Sequence[BatchRow], size: int, *, step: int, slot: StepSlot) -> Tensor:
        """Queues a step that writes its tokens to `buffers.sampled`. Returns its logits, valid until the next step."""
        self.buffers.fill(rows, step=step, slot=slot)
        logits_RV = self._steps[size]()
        self.buffers.host.copied()
        return logits_RV

    def new_slots(self) -> StepSlots:
        """Slots for steps in flight, captured or not."""
        input_bytes, max_rows = len(self.buffers.host.memory), self.buffers.max_rows
        return StepSlots(self._device, input_bytes=input_bytes, max_rows=max_rows)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures the sizes that memory allows, largest first, so that smaller ones reuse the memory of the largest.
        Writes no KV.

        Args:
            progress: called with the number of captured sizes and of all sizes.
        """
        if self._device.type != "cuda":
            self._add(self._wanted, self._uncaptured, progress)
        elif self._backend.capabilities.cudagraph:
            self._capture_on_gpu(progress)
        else:
            _log.warning("%s has no CUDA graphs: decode steps run without them", self._backend.capabilities.name)

    @property
    def _wanted(self) -> list[int]:
        settings = self._settings
        return capture_sizes(min(settings.max_requests, settings.largest or settings.max_requests))

    def _capture_on_gpu(self, progress: Callable[[int, int], None] | None) -> None:
        start_s = time.perf_counter()
        sizes = self._wanted
        recorder = _Recorder(self._device)
        self._add(sizes, lambda size: self._captured(size, recorder), progress, recorder.taken)
        _log.info(
            "captured decode steps of %s rows in %.1f s, %.0f MiB",
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - start_s,
            sum(recorder.taken) / (1 << 20),
        )
        if len(self.sizes) < len(sizes):
            _log.warning(
                "%d of %d sizes are not captured, because graphs may take %.0f MiB: their batches get more padding",
                len(sizes) - len(self.sizes),
                len(sizes),
                (self._settings.memory_bytes or 0) / (1 << 20),
            )

    def _add(
        self,
        sizes: Sequence[int],
        make: Callable[[int], Step],
        progress: Callable[[int, int], None] | None,
        taken: Sequence[int] = (),
    ) -> None:
        while sizes:
            *sizes, size = sizes
            self._steps[size] = make(size)
            self.sizes = sorted(self._steps)
            # Ranks sum over the rows of a graph, so all of them must capture the same sizes.
            count = self._model.parallel.smallest(affordable(taken, self._settings.memory_bytes), self._device)
            sizes = thin(sizes, count)
            if progress is not None:
                progress(len(self.sizes), len(self.sizes) + len(sizes))

    def _uncaptured(self, size: int) -> Step:
        builder, common = self._backend.builder, self.buffers.common(size)
        return lambda: self._run(size, lambda: builder.build(0, common))

    def _captured(self, size: int, recorder: "_Recorder") -> Step:
        builder, common = self._backend.builder, self.buffers.common(size)
        self._fill_for_capture(size)
        if builder.plans_on_device:
            return recorder.record(lambda: self._run(size, lambda: builder.build_for_cudagraph_capture(common)))
        metadata = builder.build_for_cudagraph_capture(common)
        assert builder.can_run_in_cudagraph(common), "the metadata was built for a graph"
        replay = recorder.record(lambda: self._run(size, lambda: metadata))

        def planned() -> Tensor:
            self.buffers.place_new_blocks(size)  # the graph repeats this, but the plan may read the table before
            builder.build(0, common)  # writes to the memory that the graph reads
            return replay()

        return planned

    def _run(self, size: int, build: Callable[[], AttentionMetadata]) -> Tensor:
        self.buffers.place_new_blocks(size)
        return decode_step(self._model, self._cache, self.buffers, build(), size)

    def _fill_for_capture(self, size: int) -> None:
        """Fills in one row of the longest sequence, by which some backends plan, and short rows, which run fast. None
        of them writes KV."""
        longest = self._settings.max_context_tokens
        block_ids = int_array([0] * -(-longest // self._cache.shape.block_size))
        row = BatchRow("", int_array([0]), 0, block_ids, None)
        rows = [row._replace(token_start=longest - 1), *[row] * (size - 1)]
        self.buffers.fill(rows, step=0, slot=self.new_slots().take())
        self.buffers.slot_mapping.fill_(-1)


class _Recorder:
    """Captures steps one after the other, on one side stream and in one memory pool.

    Attributes:
        taken: bytes of the device that each graph took, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.taken: list[int] = []
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # compiles kernels and makes one-time allocations
        current.wait_stream(self._stream)
        before = self._memory()
        graph = torch.cuda.CUDAGraph()
        # Other threads of a node may allocate meanwhile; only this thread's calls are checked.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits_RV = step()
        replay = _Replay(graph, step, _unowned(logits_RV))
        del logits_RV
        self.taken.append(taken_bytes(before, self._memory()))
        return replay

    def _memory(self) -> FreeMemory:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return FreeMemory(torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device))


class _Replay:
    """A captured step. Keeps the step itself alive, because the graph reads its memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, step: Step, logits_RV: Tensor) -> None:
        self._graph = graph
        self._step = step
        self._logits_RV = logits_RV

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._logits_RV


class _Unowned:
    """The address of a tensor in a graph's memory pool."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """A view that does not own the memory, so graphs captured later can reuse it. If each graph owned its logits, those
    of all sizes would take gigabytes. The pool itself lives as long as any of its graphs."""
    return torch.as_tensor(_Unowned(tensor), device=tensor.device)
