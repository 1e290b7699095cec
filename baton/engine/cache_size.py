"""Chooses the sizes of a node's KV cache, state slots and engine steps from its settings or its memory, and describes a
cache that is too small for the longest request."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.core.errors import ConfigError
from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.memory import memory_limit_bytes
from baton.engine.cpu_cache import cpu_cache_bytes
from baton.engine.device.fits import memory_of
from baton.engine.device.out_of_memory import allocating
from baton.engine.device.profile import MemoryPlan, MemoryShare, size_on_gpu
from baton.engine.device.runner import ModelRunner
from baton.engine.device.step_costs import (
    STEP_TOKENS,
)
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheShape, KVCacheSpec
from baton.settings.config import MIB
from baton.settings.node_config import (
    CPU_BATCH_REQUESTS,
    CPU_BATCH_TOKENS,
    CPU_CACHE_SHARE,
    GPU_BATCH_REQUESTS,
    GPU_PREFILL_REQUESTS,
    SMALL_GPU_BATCH_REQUESTS,
    STAGING_SLOTS,
    NodeSettings,
)


def shortage(settings: NodeSettings, spec: KVCacheSpec, *, num_blocks: int, context_tokens: int, on_gpu: bool) -> str:
    """Describes a cache that is too small for the longest request in one line, with the setting to change. Returns ""
    if the cache is large enough.

    Args:
        num_blocks: blocks of the cache.
        context_tokens: longest prompt plus output of the model.
    """
    wanted = min(context_tokens, settings.max_context_tokens or context_tokens)
    held = num_blocks * settings.block_size
    if held >= wanted:
        return ""
    blocks = -(-wanted // settings.block_size)
    mib = -(-blocks * settings.block_size * spec.bytes_per_token // MIB)
    if on_gpu and settings.kv_cache_mib is None:
        cure = f"it needs {mib} MiB: raise --gpu-memory-fraction, or try --kv-cache-dtype fp8 or --tensor-parallel-size"
    else:
        cure = f"--kv-cache-mib {mib} holds it"
    return (
        f"the KV cache holds {held} of the {wanted} tokens of the longest request, and longer ones are refused; {cure}"
    )


_log = logging.getLogger(__name__)

# Bound of a profiled cache: with a tiny model it would have so many blocks that their tables take gigabytes.
_MOST_BLOCKS = 1 << 20
# A seat is useful only if the cache holds this many tokens for it.
_SEAT_TOKENS = 512
# The cache's part of the memory that a node may use, as far as is known before the weights are loaded.
_CACHE_SHARE = 0.5
# The part of a cache's memory that recurrent states may take.
_STATE_SHARE = 0.5

# For each seat: a request that runs, one whose KV is on the way in or out, and a snapshot of a prefix.
_SLOTS_PER_SEAT = 3
# A request needs one, and the next one may arrive while the first one's state is being sent.
_LEAST_SLOTS = 2


def choose_state_slots(given: int, spec: KVCacheSpec, *, seats: int, most_bytes: int) -> int:
    """The number of slots of one rank's cache; 0 for models without states.

    Args:
        given: a number that a test sets; 0: this function chooses.
        spec: the rank's.
        seats: most requests of a step.
        most_bytes: most bytes of all slots together.

    Raises:
        ConfigError: the given number takes more, or `most_bytes` holds too few.
    """
    if spec.state is None:
        return 0
    slot_bytes = spec.bytes_per_slot
    fitting = most_bytes // slot_bytes
    if given > fitting:
        raise ConfigError(
            f"state_slots is {given}, which take {given * slot_bytes >> 20} MiB of {most_bytes >> 20} for states",
            field="state_slots",
            value=given,
            allowed=(f"up to {fitting}", "0 to let the node choose"),
            cure="give the cache more memory",
        )
    if given:
        return given
    if fitting < _LEAST_SLOTS:
        raise ConfigError(
            f"{most_bytes >> 20} MiB hold {fitting} recurrent states of {slot_bytes >> 20} MiB",
            field="kv_cache_mib",
            value=most_bytes >> 20,
            allowed=(f"at least {2 * _LEAST_SLOTS * slot_bytes >> 20} MiB for the whole cache",),
            cure="raise --kv-cache-mib or --gpu-memory-fraction, or take more --tensor-parallel-size",
        )
    if fitting < seats:
        _log.warning(
            "only %d recurrent states of %d MiB fit, so as many requests run at a time instead of %d",
            fitting,
            slot_bytes >> 20,
            seats,
        )
    return min(fitting, _SLOTS_PER_SEAT * seats)


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of steps and cache. `num_blocks` is None where a profile on the GPU chooses it and `state_slots`."""

    max_batch_tokens: int
    max_batch_requests: int
    num_blocks: int | None
    state_slots: int


def given_sizes(settings: NodeSettings, spec: KVCacheSpec, device: torch.device, *, context_tokens: int) -> CacheSizes:
    """The sizes that the settings give, and the defaults of the others."""
    on_gpu = device.type == "cuda"
    num_blocks, cache_bytes = settings.num_blocks, settings.kv_cache_bytes
    # States are next to a cache of given or default blocks, and within one of given memory.
    state_bytes = int(memory_of(device) * CPU_CACHE_SHARE) // settings.tensor_parallel_size
    if cache_bytes is None and not on_gpu:
        memory_bytes = memory_limit_bytes()
        cache_bytes = cpu_cache_bytes(settings, spec, context_tokens=context_tokens, memory_bytes=memory_bytes)
    elif cache_bytes is not None and num_blocks is None:
        state_bytes = int(cache_bytes * _STATE_SHARE)
    seats = settings.max_batch_requests
    slots = choose_state_slots(settings.state_slots, spec, seats=seats or CPU_BATCH_REQUESTS, most_bytes=state_bytes)
    if num_blocks is None and cache_bytes is not None:
        kv_bytes = cache_bytes - slots * spec.bytes_per_slot if settings.kv_cache_bytes is not None else cache_bytes
        num_blocks = _num_blocks(spec, block_size=settings.block_size, kv_cache_bytes=kv_bytes)
    if seats is None and on_gpu:
        known = None if num_blocks is None else num_blocks * settings.block_size
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        share_bytes = int(total_bytes * settings.gpu_memory_fraction * _CACHE_SHARE)
        owners = settings.tensor_parallel_size if settings.attention_data_parallel else 1
        seats = gpu_seats(settings, owners * (share_bytes // spec.bytes_per_token if known is None else known))
    return CacheSizes(
        settings.max_batch_tokens or (max(STEP_TOKENS) if on_gpu else CPU_BATCH_TOKENS),
        seats or CPU_BATCH_REQUESTS,
        num_blocks,
        slots,
    )


def gpu_seats(settings: NodeSettings, cache_tokens: int) -> int:
    """Requests of a step on a GPU, by what the node serves and the size that the cache is expected to have."""
    if not settings.decodes:
        return GPU_PREFILL_REQUESTS
    return GPU_BATCH_REQUESTS if cache_tokens >= GPU_BATCH_REQUESTS * _SEAT_TOKENS else SMALL_GPU_BATCH_REQUESTS


def profiled_sizes(
    settings: NodeSettings,
    sizes: CacheSizes,
    make_runner: Callable[[PagedKVCache], ModelRunner],
    spec: KVCacheSpec,
    shape: KVCacheShape,
    device: torch.device,
) -> tuple[CacheSizes, MemoryPlan]:
    """Runs the model on the GPU to choose the size of the cache."""
    share = MemoryShare(settings.gpu_memory_fraction, _staging_bytes(settings, spec), graphs=settings.cuda_graphs)
    with allocating("steps of the largest size"):
        memory = size_on_gpu(
            make_runner,
            spec,
            shape,
            device=device,
            step_tokens=sizes.max_batch_tokens,
            max_batch_requests=sizes.max_batch_requests,
            share=share,
        )
    slots = choose_state_slots(
        settings.state_slots,
        spec,
        seats=sizes.max_batch_requests,
        most_bytes=int(memory.kv_cache * _STATE_SHARE),
    )
    kv_bytes = memory.kv_cache - slots * spec.bytes_per_slot
    fitting = _num_blocks(spec, block_size=shape.block_size, kv_cache_bytes=kv_bytes)
    return replace(sizes, num_blocks=min(fitting, _MOST_BLOCKS), state_slots=slots), memory


def _staging_bytes(settings: NodeSettings, spec: KVCacheSpec) -> int:
    """Memory on the GPU for transfers, and for copies of entries to host memory and back."""
    entries = STAGING_SLOTS * ENTRY_TOKENS * spec.bytes_per_token if settings.host_cache_bytes else 0
    return settings.staging_bytes(on_gpu=True) + entries


def _num_blocks(spec: KVCacheSpec, *, block_size: int, kv_cache_bytes: int) -> int:
    block_bytes = spec.bytes_per_token * block_size
    if block_bytes > kv_cache_bytes:
        raise ConfigError(
            f"a cache of {kv_cache_bytes} bytes holds no block of {block_bytes} bytes",
            field="kv_cache_mib",
            value=kv_cache_bytes,
            allowed=(f"at least {block_bytes} bytes",),
            cure="give the cache more memory, or use a smaller block_size",
        )
    return kv_cache_bytes // block_bytes
