"""Staging memory: equal slots in one allocation, each offered to one message at a time.

Knows nothing of what a message holds. Used by the transfer thread alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

# Slots start on page borders: a transport maps whole pages.
_SLOT_ALIGN_BYTES = 4096
# Of how many messages' sizes a slot keeps the tensors.
_SIZES_KEPT = 4


@dataclass(frozen=True, eq=False)
class Slot:
    """One message's memory; `memory` is contiguous uint8 of the pool's slot size."""

    index: int
    memory: Tensor

    @cached_property
    def bytes(self) -> memoryview:
        """The same memory, of the CPU, for what is too short to be worth a tensor operation."""
        return self.memory.numpy().data

    @cached_property
    def message(self) -> Callable[[int], Tensor]:
        """The first so many bytes, as one tensor each time they are asked for: a request's segments have few sizes, and
        what a transport knows of a tensor it need not find out again."""
        memory = self.memory
        return lru_cache(_SIZES_KEPT)(lambda num_bytes: memory[:num_bytes])


class StagingPool:
    """Slots handed out in turn, so that a pair's warm-up passes through every one of them.

    A slot goes back when the transport's request that used it and every operation begun on it are done, and for no
    other reason: until then it may still be written to or read from.

    Args:
        pinned: in page-locked memory of the CPU; needs a GPU.
    """

    def __init__(self, *, slot_bytes: int, slots: int, device: torch.device, pinned: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        stride = -(-slot_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
        memory = torch.empty(slots * stride + _SLOT_ALIGN_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
        if memory.device.type == "cpu":
            memory.zero_()  # now, and not under the first messages, the pages become real
        first = -memory.data_ptr() % _SLOT_ALIGN_BYTES
        self.members = tuple(Slot(index, memory[first + index * stride :][:slot_bytes]) for index in range(slots))
        self._free = deque(self.members)
        self._taken: set[int] = set()

    def take(self) -> Slot | None:
        """A free slot, the one that has been free longest; None when every slot is in use."""
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
    """The pools of one direction: for peers that reach the cache's memory directly, and for those that need the
    host's. Each is made when it is first needed: a node that only sends has none to receive into.

    Args:
        direct, in_host: make them.
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
        """Whether a slot is free, or a pool could still be made."""
        return not self._made or any(pool.available for pool in self._made.values())
