"""Sizes the cache of a GPU by running the model's largest steps once before any traffic.

Owns the arithmetic, which is pure, and the few forwards whose memory it needs. What steps cost is measured later, when
graphs are captured: `baton.engine.device.step_costs`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.core.errors import ConfigError
from baton.engine.batch import Batch, BatchRow
from baton.engine.device.prompt_graphs import MOST_TOKENS, MOST_TOKENS_OF_RANK
from baton.engine.device.runner import ModelRunner
from baton.engine.request import IntArray, ModelFacts, int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheShape, KVCacheSpec

_log = logging.getLogger(__name__)

# For captured graphs in addition to the activations of decodes: the driver keeps some MiB for each, and graphs of
# prompts keep their activations.
_GRAPH_BYTES = 1 << 30


@dataclass(frozen=True)
class Profile:
    """Measurements of a runner.

    Attributes:
        step_bytes: peak memory of the largest prefill step in addition to weights and cache.
        decode_bytes: peak memory of the largest decode step in addition to weights and cache.
        prompt_graph_bytes: memory of the largest captured step with prompts beyond what graphs get in any case.
    """

    step_bytes: int
    decode_bytes: int
    prompt_graph_bytes: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Memory in bytes: `total` and `free` of the device, `used` by this process when it holds only the weights."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class MemoryPlan:
    """The division of this process's share of a device, in bytes."""

    weights: int
    kv_cache: int
    steps: int
    graphs: int
    reserved: int

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "steps": self.steps, "graphs": self.graphs}
        parts["staging"] = self.reserved
        return ", ".join(f"{name} {size / (1 << 30):.1f} GiB" for name, size in parts.items())


@dataclass(frozen=True)
class MemoryShare:
    """The share of a device that this process may take.

    Attributes:
        fraction: share of the device's whole memory.
        reserved_bytes: memory that the process allocates later for other purposes.
        graphs: whether decode steps will be captured.
    """

    fraction: float
    reserved_bytes: int
    graphs: bool


def plan_memory(memory: DeviceMemory, profile: Profile, share: MemoryShare, *, least_bytes: int) -> MemoryPlan:
    """Gives the KV cache what weights, steps, graphs and reserved memory leave.

    Args:
        least_bytes: size of the smallest useful cache.

    Raises:
        ConfigError: less than `least_bytes` is left.
    """
    graph_bytes = profile.decode_bytes + profile.prompt_graph_bytes + _GRAPH_BYTES if share.graphs else 0
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


def size_on_gpu(
    make_runner: Callable[[PagedKVCache], ModelRunner],
    spec: KVCacheSpec,
    shape: KVCacheShape,
    *,
    device: torch.device,
    step_tokens: int,
    max_batch_requests: int,
    share: MemoryShare,
) -> MemoryPlan:
    """Profiles the model over a small temporary cache, and logs the chosen sizes.

    Args:
        make_runner: makes a runner of the loaded model over a cache.
        shape: its number of blocks is ignored.
        step_tokens: tokens of the largest step.

    Raises:
        ConfigError: no useful cache fits.
    """
    num_blocks = 2 * -(-step_tokens // shape.block_size) + max_batch_requests
    # Rows without a slot take as much memory as others.
    slots = 1 if spec.state is not None else 0
    runner = make_runner(PagedKVCache(spec, replace(shape, num_blocks=num_blocks, state_slots=slots), device))
    profile = profile_runner(runner, step_tokens, max_batch_requests=max_batch_requests, device=device)
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    memory = plan_memory(
        DeviceMemory(total, torch.cuda.memory_reserved(device), free),
        profile,
        share,
        least_bytes=num_blocks * shape.block_size * spec.bytes_per_token,
    )
    _log.info("%s: %s", device, memory)
    return memory


def profile_runner(runner: ModelRunner, step_tokens: int, *, max_batch_requests: int, device: torch.device) -> Profile:
    """Runs a prefill step of this size, or as large as `max_batch_requests` prompts fill it, and one decode step.

    Args:
        runner: its cache holds the prefill step, and one block for each request.
    """
    largest = prefill_step(step_tokens, runner.facts, max_batch_requests=max_batch_requests)
    step_bytes, owners = _peak_bytes(runner, largest, device), runner.facts.num_owners
    if owners > 2:
        step_bytes = max(step_bytes, _peak_bytes(runner, most_padded(largest, owners), device))
    captured = owners * MOST_TOKENS_OF_RANK if owners > 1 else MOST_TOKENS
    graph_bytes = step_bytes * min(step_tokens, captured) // step_tokens
    if owners == 1:  # usual models need no more than this
        graph_bytes = max(0, graph_bytes - _GRAPH_BYTES)
    if not runner.backend.builder.captures_prompts:
        graph_bytes = 0
    decodes = decode_step(max_batch_requests, num_owners=owners)
    return Profile(step_bytes, _peak_bytes(runner, decodes, device), graph_bytes)


def prefill_step(num_tokens: int, facts: ModelFacts, *, max_batch_requests: int) -> Batch:
    """A step of `num_tokens` tokens, in prompts as long as the model supports."""
    longest = facts.max_context_tokens
    return _prompts(min(num_tokens, max_batch_requests * longest), longest, facts.block_size)


def decode_step(num_requests: int, *, num_owners: int = 1) -> Batch:
    """A decode step with one token and one block for each request; owners take turns."""
    rows = (_row(index, 1, int_array([index])) for index in range(num_requests))
    return Batch(0, tuple(row._replace(owner=index % num_owners) for index, row in enumerate(rows)))


def most_padded(step: Batch, num_owners: int) -> Batch:
    """Redistributes a step's tokens so that the first owner has twice its share; with more, `TokenShares` pads nothing.

    This step has the most tokens in the experts; a step of one owner's prompts has the most in attention.
    """
    total = sum(len(row.token_ids) for row in step.shared_rows)
    twice, others = 2 * total // num_owners, num_owners - 1
    counts = [twice, *[-((twice - total) // others)] * others]
    rows = []
    for owner, count in enumerate(counts):
        for row in step.shared_rows:
            if count > 0:
                part = row.token_ids[:count]
                rows.append(row._replace(token_ids=part, owner=owner))
                count -= len(part)
    return Batch(step.step, tuple(rows))


def _peak_bytes(runner: ModelRunner, batch: Batch, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    # The logits of drafts take memory next to those of the step.
    runner.run(replace(batch, num_layer_drafts=int(runner.facts.drafts)))
    return torch.cuda.max_memory_allocated(device) - before


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
