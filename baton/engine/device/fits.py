"""Refuses a cache and staging buffers that exceed the device's memory, before half a minute of loading weights."""

import torch

from baton.core.errors import ConfigError
from baton.core.memory import memory_limit_bytes
from baton.kvcache.spec import KVCacheSpec
from baton.settings.config import MIB
from baton.settings.node_config import NodeSettings


def memory_of(device: torch.device) -> int:
    """Memory of the device in bytes; for the CPU, the machine's memory that its container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_limit_bytes()


def check_fits(
    settings: NodeSettings,
    spec: KVCacheSpec,
    *,
    num_blocks: int | None,
    device: torch.device,
    state_slots: int = 0,
) -> None:
    """Checks one rank's cache and staging buffers against all memory of its device.

    Args:
        num_blocks: blocks of the cache; None: a profile chooses the number.
        state_slots: slots for recurrent states.

    Raises:
        ConfigError: they exceed it, even if nothing else runs there.
    """
    memory = memory_of(device)
    staging = settings.staging_bytes(on_gpu=device.type == "cuda")
    if staging > memory:
        raise ConfigError(
            f"segment_mib needs {_mib(staging)} of staging buffers where {device} has {_mib(memory)}",
            field="segment_mib",
            value=settings.segment_mib,
            cure="lower --segment-mib",
        )
    states = state_slots * spec.bytes_per_slot
    cache = states + (num_blocks or 0) * settings.block_size * spec.bytes_per_token
    if cache + staging > memory:
        most = max(0, (memory - staging) // MIB)
        raise ConfigError(
            f"kv_cache_mib is {cache // MIB}, a KV cache of {num_blocks} blocks, where {device} has {_mib(memory)}",
            field="kv_cache_mib",
            value=cache // MIB,
            allowed=(f"up to {most}",),
            cure="lower --kv-cache-mib, or use a machine with more memory",
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"
