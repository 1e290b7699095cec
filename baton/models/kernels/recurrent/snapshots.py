"""Finds the slots for snapshots of recurrent states within a prompt's new tokens, for all kernels of prompts."""

import triton
import triton.language as tl


@triton.jit
def snapshot_slot(slots_ptr, lens_ptr, prompt, length, SNAPSHOTS: tl.constexpr):
    """Returns the slot that also gets the state after `length` new tokens of the prompt; -1: none.

    Args:
        slots_ptr, lens_ptr: `StateRows.snapshot_slots_PM` and `snapshot_lens_PM`, contiguous; M is SNAPSHOTS.
    """
    slot = -1
    for index in tl.static_range(SNAPSHOTS):
        place = prompt * SNAPSHOTS + index
        slot = tl.where(tl.load(lens_ptr + place) == length, tl.load(slots_ptr + place), slot)
    return slot
