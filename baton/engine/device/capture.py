"""Records steps as CUDA graphs in one memory pool, and estimates how many graphs memory allows."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Bound of the driver's memory for one graph; a graph of some hundred kernels takes some MiB.
_DRIVER_BYTES = 32 << 20

_T = TypeVar("_T")

# Queues a step over the rows in the buffers; returns its logits, which the next step overwrites.
Step = Callable[[], Tensor]
# Called with the number of captured graphs and of all graphs.
Progress = Callable[[int, int], None]
# Called where a step may be cut, with the number of layers that are computed.
OnLayer = Callable[[int], None]


def thin(sizes: Sequence[_T], count: int) -> list[_T]:
    """At most `count` of the sizes, evenly spread, with the smallest. Other batches are padded to the next size."""
    if count >= len(sizes):
        return list(sizes)
    return [sizes[place * len(sizes) // count] for place in range(count)]


def affordable(taken: Sequence[int], bound: int | None, *, first: int = 0) -> int:
    """How many more graphs the bound allows, estimated from the bytes that each graph so far has taken.

    Args:
        first: the first graph of this kind; those before it say nothing about the size of the next ones.
    """
    if bound is None:
        return sys.maxsize
    left = bound - sum(taken)
    if left <= 0:
        return 0
    # The first graph takes the memory that all others share, so it says nothing about theirs.
    return left // max(1, *taken[first + 1 :]) if len(taken) > first + 1 else sys.maxsize


def fitting(sizes: Sequence[int], needs: Callable[[int], int], room: int | None, *, least: int) -> list[int]:
    """The sizes up to the largest one whose step leaves room for the others' graphs: it takes at most half.

    A graph pool gives memory back only when all of its graphs are gone, so a step that takes too much must not be
    captured at all. Below `least`, no step is tried.

    Args:
        sizes: smallest first.
        needs: the memory in bytes that a step of this size takes while it runs.
        room: for all graphs; None: unbounded.
    """
    kept = list(sizes)
    while room is not None and len(kept) > 1 and kept[-1] > least and 2 * needs(kept[-1]) > room:
        # What steps need grows with their size.
        kept = [size for size in kept if 2 * size <= kept[-1]] or kept[:1]
    return kept


class FreeMemory(NamedTuple):
    """Memory in bytes: `free` on the whole device, `reserved` by torch in this process."""

    free: int
    reserved: int


def taken_bytes(before: FreeMemory, after: FreeMemory) -> int:
    """The memory of a capture: what torch and the driver reserved for it. The driver's part is read from the device's
    free memory and bounded, because another process on the device may take gigabytes meanwhile."""
    reserved = after.reserved - before.reserved
    driver = before.free - after.free - reserved
    return max(0, reserved) + min(max(0, driver), _DRIVER_BYTES)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disables garbage collection: a capture fails if a collection frees another graph meanwhile, such as a closed
    model's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Recorder:
    """Captures steps one after the other, on one side stream and in one memory pool.

    Attributes:
        taken: bytes of the device that each graph took, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.taken: list[int] = []
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # graphs of a model that is gone

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The captured step, whose result the next step overwrites."""
        results: list[Tensor] = []
        parts = self._record(lambda: results.append(step()), step)
        return GraphReplay(parts, unowned(results.pop()), step)

    def record_work(self, step: Callable[[], None]) -> Callable[[], None]:
        """The captured step, which leaves its results in memory that exists already."""
        (part,) = self._record(step, step)
        return WorkReplay(part.graph, step)

    def record_parts(
        self, step: Callable[[], None], cutting: Callable[[OnLayer], AbstractContextManager[None]]
    ) -> "list[CapturedPart]":
        """The captured step as several graphs.

        Args:
            cutting: in its context, a forward calls the function after the layers where it is to be cut.
        """
        return self._record(step, step, cutting)

    def needs(self, step: Callable[[], object]) -> int:
        """Runs the step outside of a graph, and returns the bytes that it takes meanwhile."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        step()
        return torch.cuda.max_memory_allocated(self._device) - before

    def _record(
        self,
        step: Callable[[], object],
        warm_up: Callable[[], object],
        cutting: Callable[[OnLayer], AbstractContextManager[None]] | None = None,
    ) -> "list[CapturedPart]":
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            warm_up()  # compiles kernels and makes one-time allocations
        current.wait_stream(self._stream)
        before = self._memory()
        parts: list[CapturedPart] = []
        with torch.cuda.stream(self._stream), _without_collections():
            graph = self._begin()

            def cut(layer_stop: int) -> None:
                nonlocal graph
                graph.capture_end()
                parts.append(CapturedPart(graph, layer_stop))
                graph = self._begin()

            try:
                if cutting is None:
                    step()
                else:
                    with cutting(cut):
                        step()
            finally:
                graph.capture_end()
        parts.append(CapturedPart(graph, None))
        self.taken.append(taken_bytes(before, self._memory()))
        return parts

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads of a node may allocate meanwhile; only this thread's calls are checked.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def _memory(self) -> FreeMemory:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return FreeMemory(torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device))


class CapturedPart(NamedTuple):
    """A graph, and the number of layers computed at its end; None for the last part of a step."""

    graph: torch.cuda.CUDAGraph
    layer_stop: int | None


class GraphReplay:
    """A captured step. Keeps the step itself alive, because the graph reads its memory."""

    def __init__(self, parts: Sequence[CapturedPart], result: Tensor, step: Callable[[], Tensor]) -> None:
        self._graphs = [part.graph for part in parts]
        self._result = result
        self._step = step

    def __call__(self) -> Tensor:
        for graph in self._graphs:
            graph.replay()
        return self._result


class WorkReplay:
    """A captured step without a result. Keeps the step itself alive, because the graph reads its memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, step: Callable[[], None]) -> None:
        self._graph = graph
        self._step = step

    def __call__(self) -> None:
        self._graph.replay()


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


def unowned(tensor: Tensor) -> Tensor:
    """A view that does not own the memory, so graphs captured later can reuse it. If each graph owned its logits, those
    of all sizes would take gigabytes. The pool itself lives as long as any of its graphs."""
    return torch.as_tensor(_Unowned(tensor), device=tensor.device)
