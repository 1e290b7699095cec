"""Timing on a GPU: calls are captured in a CUDA graph on inputs that take turns, so that none is in the cache; the
median of several replays counts. The machine's limits are measured the same way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

# Bytes that other calls touch before an input is used again: several times any second-level cache.
TURN_BYTES = 240 << 20
_MIN_REPLAYS, _MAX_REPLAYS = 5, 40
_MEASURED_MS = 25.0
_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """The limits of the machine.

    Attributes:
        copy_gigabytes_per_s: of a large copy, bytes read plus bytes written.
        matmul_teraflops: of a large bfloat16 product.
    """

    copy_gigabytes_per_s: float
    matmul_teraflops: float


def turns(num_bytes: int, *, most: int = 64) -> int:
    """Number of copies of inputs of that size that take turns."""
    return max(1, min(most, -(-TURN_BYTES // num_bytes)))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one call: a replay of all calls divided by their number; the median of several replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    estimate_ms = _milliseconds(graph.replay)
    replays = int(max(_MIN_REPLAYS, min(_MAX_REPLAYS, _MEASURED_MS / estimate_ms)))
    return median(_milliseconds(graph.replay) for _ in range(replays)) * 1e3 / len(calls)


def ceilings() -> Ceilings:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    # NOTE: not in a graph: there the copy engine does the copy, at two thirds of the speed.
    copy_us = _eager_microseconds(lambda: target.copy_(source))
    shape = _MATMUL_SIZE, _MATMUL_SIZE
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    matmul_us = microseconds([lambda: torch.mm(a, b, out=product)])
    return Ceilings(2 * _COPY_BYTES / copy_us / 1e3, 2 * _MATMUL_SIZE**3 / matmul_us / 1e6)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """Relative error of norms; NaN if any value is NaN."""
    difference = (measured.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


def _eager_microseconds(call: Callable[[], object]) -> float:
    call()
    return median(_milliseconds(call) for _ in range(_MAX_REPLAYS)) * 1e3


def _milliseconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
