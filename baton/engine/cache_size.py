"""How long a request the KV cache can hold: the default size in main memory, and a line where a cache is too small."""

import logging

from baton.core.errors import ConfigError
from baton.kvcache.spec import KVCacheSpec
from baton.settings.config import CPU_CACHE_MIB, CPU_CACHE_SHARE, MIB, NodeSettings


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
    if settings.num_blocks is not None:
        cure = f"--num-blocks {blocks} holds it"
    elif on_gpu and settings.kv_cache_mib is None:
        cure = f"it needs {mib} MiB: raise --gpu-memory-fraction, or try --kv-cache-dtype fp8 or --tensor-parallel-size"
    else:
        cure = f"--kv-cache-mib {mib} holds it"
    return (
        f"the KV cache holds {held} of the {wanted} tokens of the longest request, and longer ones are refused; {cure}"
    )


_log = logging.getLogger(__name__)

# For each seat: a request that runs, one whose KV is on the way in or out, and a snapshot of a prefix.
_SLOTS_PER_SEAT = 3
# A request needs one, and the next one may arrive while the first one's state is being sent.
_LEAST_SLOTS = 2


def choose_state_slots(given: int, spec: KVCacheSpec, *, seats: int, most_bytes: int) -> int:
    """The number of slots of one rank's cache; 0 for models without states.

    Args:
        given: the setting; 0: this chooses.
        spec: the rank's.
        seats: most requests of a step.
        most_bytes: what all slots may take together.

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
            cure="lower --state-slots, or give the cache more memory",
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
            "%d recurrent states of %d MiB fit, so no more requests run at a time, where %d could",
            fitting,
            slot_bytes >> 20,
            seats,
        )
    return min(fitting, _SLOTS_PER_SEAT * seats)
