"""Chooses the size of a KV cache in main memory. Pure and without torch, because `baton doctor` asks too and should not
wait for the imports of an engine.
"""

from baton.kvcache.spec import KVCacheSpec
from baton.settings.config import MIB
from baton.settings.node_config import CPU_CACHE_MIB, CPU_CACHE_SHARE, NodeSettings


def cpu_cache_bytes(settings: NodeSettings, spec: KVCacheSpec, *, context_tokens: int, memory_bytes: int) -> int:
    """The size of a cache in main memory where the settings give none: room for one request of the whole context, if
    the ranks' caches then take no more than `CPU_CACHE_SHARE` of the memory; at least `CPU_CACHE_MIB`.

    Args:
        spec: one rank's part of the KV.
        context_tokens: longest prompt plus output of the model.
        memory_bytes: memory of this machine that its container may use.
    """
    wanted = min(context_tokens, settings.max_context_tokens or context_tokens)
    blocks = -(-wanted // settings.block_size)
    share = int(memory_bytes * CPU_CACHE_SHARE) // settings.tensor_parallel_size
    return max(CPU_CACHE_MIB * MIB, min(blocks * settings.block_size * spec.bytes_per_token, share))
