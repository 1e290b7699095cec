"""How many slots for recurrent states a cache has next to its blocks. Pure."""

import logging

from baton.core.errors import ConfigError
from baton.kvcache.spec import KVCacheSpec

_log = logging.getLogger(__name__)

# For each seat: a request that runs, one whose KV is on the way in or out, and a snapshot of a prefix.
_SLOTS_PER_SEAT = 3
# A request needs one, and the next one may arrive while the first one's state is being sent.
_LEAST_SLOTS = 2


def choose_state_slots(given: int, spec: KVCacheSpec, *, seats: int, most_bytes: int) -> int:
    """The number of slots of one rank's cache; 0 for models without states.

    Args:
        given: from a test; 0: this function chooses.
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
            "%d recurrent states of %d MiB fit, so no more requests run at a time, where %d could",
            fitting,
            slot_bytes >> 20,
            seats,
        )
    return min(fitting, _SLOTS_PER_SEAT * seats)
