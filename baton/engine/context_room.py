"""How long a request the KV cache can hold: the default size in main memory, and a line where a cache is too small."""

from baton.kvcache.spec import KVCacheSpec
from baton.settings.config import MIB
from baton.settings.node_config import CPU_CACHE_MIB, CPU_CACHE_SHARE, NodeSettings


def cpu_cache_bytes(settings: NodeSettings, spec: KVCacheSpec, *, context_tokens: int, memory_bytes: int) -> int:
    """The size of a cache in main memory where the settings give none: room for one request of the whole context, if
    the ranks' caches then take no more than `CPU_CACHE_SHARE` of the memory; at least `CPU_CACHE_MIB`.

    Args:
        spec: one rank's part of the KV.
        context_tokens: longest prompt plus output of the model.
        memory_bytes: that this machine has, and this container may use.
    """
    wanted = min(context_tokens, settings.max_context_tokens or context_tokens)
    blocks = -(-wanted // settings.block_size)
    share = int(memory_bytes * CPU_CACHE_SHARE) // settings.tensor_parallel_size
    return max(CPU_CACHE_MIB * MIB, min(blocks * settings.block_size * spec.bytes_per_token, share))


def shortage(settings: NodeSettings, spec: KVCacheSpec, *, num_blocks: int, context_tokens: int, on_gpu: bool) -> str:
    """One line about a cache that is too small for the longest request, with the setting to change; "" if it is not.

    Args:
        num_blocks: of the cache.
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
