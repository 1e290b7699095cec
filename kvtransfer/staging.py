"""Staging memory: equal slots in one allocation, each offered to one message at a time.

Knows nothing of what a message holds. Used by the transfer thread alone.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

# Slots start on page borders: a transport maps whole pages.
_SLOT_ALIGN_BYTES = 4096


@dataclass(frozen=True, eq=False)
class Slot:
    """One message's memory; `memory` is contiguous uint8 of the pool's slot size."""

    index: int
    memory: Tensor


class StagingPool:
    """Slots handed out in turn, so that a pair's warm-up passes through every one of them.

    A slot goes back when the request that used it is done, and for no other reason: until then the transport may
    still write to it or read from it.
    """

    def __init__(self, *, slot_bytes: int, slots: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        stride = -(-slot_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
        memory = torch.zeros(slots * stride + _SLOT_ALIGN_BYTES, dtype=torch.uint8, device=device)
        first = -memory.data_ptr() % _SLOT_ALIGN_BYTES
        self._free = deque(Slot(index, memory[first + index * stride :][:slot_bytes]) for index in range(slots))
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
