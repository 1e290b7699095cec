"""Copies whole states from slot to slot, for requests that begin with a known prefix's state and for snapshots."""

from collections.abc import Sequence

import torch

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.kernels.blocks import copy


def copy_states(state_cache: PagedKVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies the state of each pair's first slot to its second one, in all layers; on a GPU queued in the current
    stream, without a wait of the host.

    Args:
        state_cache: a cache of kind STATE (`PagedKVCache.state`).

    Raises:
        InternalError: a slot outside of the cache, written twice, or both read and written.
    """
    if not pairs:
        return
    sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
    slots = state_cache.shape.num_blocks
    if wrong := sorted(slot for slot in sources | targets if not 0 <= slot < slots):
        raise InternalError(f"slots {wrong} of {slots}", field="pairs", value=wrong)
    if len(targets) < len(pairs) or sources & targets:
        raise InternalError("a slot is written twice, or both read and written", field="pairs", value=pairs)
    states_OSX = state_cache.by_block
    if states_OSX.is_cuda:
        # Pageable memory would make the host wait for the stream.
        pairs_P2 = torch.tensor(pairs, dtype=torch.int64, pin_memory=True)
        copy(states_OSX, states_OSX, pairs_P2.to(states_OSX.device, non_blocking=True))
        return
    from_P, to_P = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    states_OSX[:, to_P] = states_OSX[:, from_P]
