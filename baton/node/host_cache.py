"""Chooses how much host memory a node keeps KV in where no setting says it."""

import logging

from baton.core.memory import free_memory_bytes
from baton.settings.config import MIB
from baton.settings.environment import installed_gpus, visible_gpus
from baton.settings.node_config import (
    CPU_HOST_CACHE_GIB_MAX,
    CPU_HOST_CACHE_SHARE,
    GIB,
    GPU_HOST_CACHE_GIB_MAX,
    GPU_HOST_CACHE_SHARE,
    NodeSettings,
)

_log = logging.getLogger(__name__)


def host_cache_of_rank(free_bytes: int, *, gpus: int, ranks: int) -> int:
    """The host memory of each rank, in bytes.

    Args:
        free_bytes: memory that the processes of this machine or container may take now.
        gpus: GPUs of this machine, each for one rank of some node; 0: the node computes on CPUs.
        ranks: of this node on this machine.
    """
    if gpus:
        return int(min(free_bytes * GPU_HOST_CACHE_SHARE / max(gpus, ranks), GPU_HOST_CACHE_GIB_MAX * GIB))
    return int(min(free_bytes * CPU_HOST_CACHE_SHARE, CPU_HOST_CACHE_GIB_MAX * GIB)) // ranks


def with_host_cache(settings: NodeSettings) -> NodeSettings:
    """The settings with a size chosen from the memory that is free now, unless they say one."""
    if settings.host_cache_gib is not None or not settings.prefix_cache:
        return settings
    on_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and visible_gpus() > 0)
    free_bytes = free_memory_bytes()
    gpus = max(1, installed_gpus()) if on_gpu else 0
    chosen = host_cache_of_rank(free_bytes, gpus=gpus, ranks=settings.ranks_per_host)
    _log.debug("each rank keeps KV in %d of %d MiB of free memory", chosen // MIB, free_bytes // MIB)
    return settings.model_copy(update={"free_host_cache_bytes": chosen})
