"""Staging memory: equal slots in one allocation, each for one message at a time. Used by the transfer thread only."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

# Slots start at page boundaries: transports map whole pages.
_SLOT_ALIGN_BYTES = 4096
# Number of message sizes for which a slot keeps the tensor.
_SIZES_KEPT = 4


@dataclass(frozen=True, eq=False)
class Slot:
    """One message's memory; `memory` is contiguous uint8 of the pool's slot size."""

    index: int
    memory: Tensor

    @cached_property
    def bytes(self) -> memoryview:
        """The slot's memory, on the CPU, for accesses too short to be worth a tensor operation."""
        return self.memory.numpy().data

    @cached_property
    def message(self) -> Callable[[int], Tensor]:
        """Maps a size to the tensor of the slot's first bytes. Equal sizes give the same tensor: a request's segments
        have few sizes, and transports cache a handle for each tensor."""
        memory = self.memory
        return lru_cache(_SIZES_KEPT)(lambda num_bytes: memory[:num_bytes])


class StagingPool:
    """Gives out slots in turn, so that a pair's warm-up passes through all of them.

    A slot is given back only when the transport's request and every operation on it are done: until then it may still
    be read or written.

    Args:
        pinned: in page-locked host memory; needs a GPU.
    """

    def __init__(self, *, slot_bytes: int, slots: int, device: torch.device, pinned: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        stride = -(-slot_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
        memory = torch.empty(slots * stride + _SLOT_ALIGN_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
        if memory.device.type == "cpu":
            memory.zero_()  # allocates the pages now, not during the first messages
        first = -memory.data_ptr() % _SLOT_ALIGN_BYTES
        self.members = tuple(Slot(index, memory[first + index * stride :][:slot_bytes]) for index in range(slots))
        self._free = deque(self.members)
        self._taken: set[int] = set()

    def take(self) -> Slot | None:
        """The slot that has been free longest; None if none is free."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot.index)
        return slot

    def give_back(self, slot: Slot) -> None:
        assert slot.index in self._taken
        self._taken.remove(slot.index)
        self._free.append(slot)

    @property
    def available(self) -> int:
        return len(self._free)


class Pools:
    """The pools of one direction: one for peers that reach the cache's memory, one for those that need host memory.

    Each is made when it is first needed, so a node that only sends never allocates slots to receive into.

    Args:
        direct, in_host: make the pool of each kind.
    """

    def __init__(self, *, direct: Callable[[], StagingPool], in_host: Callable[[], StagingPool]) -> None:
        self._make = {False: direct, True: in_host}
        self._made: dict[bool, StagingPool] = {}

    def of(self, *, through_host: bool) -> StagingPool:
        if through_host not in self._made:
            self._made[through_host] = self._make[through_host]()
        return self._made[through_host]

    @property
    def may_have_room(self) -> bool:
        """Whether a slot is free or a pool can still be made."""
        return not self._made or any(pool.available for pool in self._made.values())
