"""Sizes the cache and the steps of a GPU by running the model once before any traffic.

Owns the arithmetic, which is pure, and the few forwards whose time and memory it needs.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from baton.errors import ConfigError
from engine.batch import Batch, BatchRow
from engine.device.runner import ModelRunner
from engine.request import IntArray, ModelFacts, int_array
from engine.sampling.row import GREEDY_ROW
from kvcache.cache import PagedKVCache
from kvcache.spec import KVCacheShape, KVCacheSpec

_log = logging.getLogger(__name__)

# Step sizes to try, smallest first. Smaller steps keep decodes and other prompts waiting for less time.
STEP_TOKENS = (1024, 2048, 4096, 8192)
# Share of the best rate among the step sizes that the chosen one must reach.
_GOOD_RATE = 0.9
# For captured graphs in addition to their activations: the driver keeps some MiB for each.
_GRAPH_BYTES = 768 << 20


@dataclass(frozen=True)
class Profile:
    """Measurements of a runner.

    Attributes:
        step_s: seconds of a prefill step by its number of tokens, with prompts as long as the model supports.
        step_bytes: peak memory of the prefill steps in addition to weights and cache.
        decode_bytes: peak memory of the largest decode step in addition to weights and cache.
    """

    step_s: Mapping[int, float]
    step_bytes: int
    decode_bytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """In bytes: `total` and `free` of the device, `used` by this process when it holds only the weights."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class MemoryPlan:
    """How this process divides its share of a device, in bytes."""

    weights: int
    kv_cache: int
    steps: int
    graphs: int
    reserved: int

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "steps": self.steps, "graphs": self.graphs}
        parts["staging"] = self.reserved
        return ", ".join(f"{name} {size / (1 << 30):.1f} GiB" for name, size in parts.items())


def choose_step_tokens(step_s: Mapping[int, float]) -> int:
    """The smallest step whose tokens per second come close to those of the fastest."""
    best = max(tokens / seconds for tokens, seconds in step_s.items())
    return min(tokens for tokens, seconds in step_s.items() if tokens / seconds >= _GOOD_RATE * best)


@dataclass(frozen=True)
class MemoryShare:
    """What this process may take of a device.

    Attributes:
        fraction: share of the device's whole memory.
        reserved_bytes: what the process allocates later for other purposes.
        graphs: whether decode steps will be captured.
    """

    fraction: float
    reserved_bytes: int
    graphs: bool


def plan_memory(memory: DeviceMemory, profile: Profile, share: MemoryShare, *, least_bytes: int) -> MemoryPlan:
    """Gives the KV cache what weights, steps, graphs and reserved memory leave.

    Args:
        least_bytes: a smaller cache is of no use.

    Raises:
        ConfigError: less than `least_bytes` is left.
    """
    graph_bytes = profile.decode_bytes + _GRAPH_BYTES if share.graphs else 0
    others = profile.step_bytes + graph_bytes + share.reserved_bytes
    left = min(int(memory.total * share.fraction) - memory.used, memory.free) - others
    if left < least_bytes:
        raise ConfigError(
            f"{left >> 20} MiB are left for the KV cache: of {memory.total >> 20} MiB on the GPU, {memory.free >> 20} "
            f"are free, the weights take {memory.used >> 20}, steps, graphs and staging {others >> 20}",
            field="gpu_memory_fraction",
            value=share.fraction,
            allowed=(f"a fraction that leaves at least {least_bytes >> 20} MiB",),
            cure="raise it, lower --max-batch-tokens, use fp8 weights, or end other processes on this GPU",
        )
    return MemoryPlan(memory.used, left, profile.step_bytes, graph_bytes, share.reserved_bytes)


@dataclass(frozen=True)
class Sizing:
    """`memory` is None where the size of the cache is given."""

    step_tokens: int
    memory: MemoryPlan | None


def size_on_gpu(
    make_runner: Callable[[PagedKVCache], ModelRunner],
    spec: KVCacheSpec,
    shape: KVCacheShape,
    *,
    device: torch.device,
    step_tokens: Sequence[int],
    max_batch_requests: int,
    share: MemoryShare | None,
) -> Sizing:
    """Profiles the model over a small temporary cache, and logs the chosen sizes.

    Args:
        make_runner: makes a runner of the loaded model over a cache.
        shape: its number of blocks is ignored.
        step_tokens: sizes to choose from.
        share: None: the size of the cache is given, and only the step size is chosen.

    Raises:
        ConfigError: no useful cache fits.
    """
    num_blocks = 2 * -(-max(step_tokens) // shape.block_size) + max_batch_requests
    runner = make_runner(PagedKVCache(spec, replace(shape, num_blocks=num_blocks), device))
    profile = profile_runner(runner, step_tokens, max_batch_requests=max_batch_requests, device=device)
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    chosen = choose_step_tokens(profile.step_s)
    rates = ", ".join(f"{tokens}: {tokens / seconds:,.0f}" for tokens, seconds in profile.step_s.items())
    _log.info("%s: prefill steps of up to %d tokens; tokens per second by step size: %s", device, chosen, rates)
    if share is None:
        return Sizing(chosen, None)
    memory = plan_memory(
        DeviceMemory(total, torch.cuda.memory_reserved(device), free),
        profile,
        share,
        least_bytes=num_blocks * shape.block_size * spec.bytes_per_token,
    )
    _log.info("%s: %s", device, memory)
    return Sizing(chosen, memory)


def profile_runner(
    runner: ModelRunner, step_tokens: Sequence[int], *, max_batch_requests: int, device: torch.device
) -> Profile:
    """Runs prefill steps of these sizes, or as large as `max_batch_requests` prompts fill them, and one decode step.

    Args:
        runner: its cache holds the largest step, and one block for each request.
    """
    step_s: dict[int, float] = {}
    step_bytes = 0
    for tokens, batch in prefill_steps(step_tokens, runner.facts, max_batch_requests=max_batch_requests).items():
        step_bytes = max(step_bytes, _peak_bytes(runner, batch, device))
        step_s[tokens] = min(_seconds(runner, batch) for _ in range(2))
    decode_bytes = _peak_bytes(runner, decode_step(max_batch_requests), device)
    return Profile(step_s, step_bytes, decode_bytes)


def prefill_steps(step_tokens: Sequence[int], facts: ModelFacts, *, max_batch_requests: int) -> dict[int, Batch]:
    """The prefill steps to profile by number of tokens, smallest first. Prompts are as long as the model supports."""
    most = max_batch_requests * facts.max_context_tokens
    sizes = sorted({min(tokens, most) for tokens in step_tokens})
    return {tokens: _prompts(tokens, facts.max_context_tokens, facts.block_size) for tokens in sizes}


def decode_step(num_requests: int) -> Batch:
    """A decode step with one token and one block for each request."""
    return Batch(0, tuple(_row(index, 1, int_array([index])) for index in range(num_requests)))


def _peak_bytes(runner: ModelRunner, batch: Batch, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(batch)
    return torch.cuda.max_memory_allocated(device) - before


def _seconds(runner: ModelRunner, batch: Batch) -> float:
    start_s = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - start_s


def _prompts(num_tokens: int, longest: int, block_size: int) -> Batch:
    rows: list[BatchRow] = []
    block = 0
    for start in range(0, num_tokens, longest):
        length = min(longest, num_tokens - start)
        num_blocks = -(-length // block_size)
        rows.append(_row(len(rows), length, int_array(list(range(block, block + num_blocks)))))
        block += num_blocks
    return Batch(0, tuple(rows))


def _row(index: int, length: int, blocks: IntArray) -> BatchRow:
    return BatchRow(f"profile-{index}", int_array([0] * length), 0, blocks, GREEDY_ROW)
