"""Walks over the decodes of a step that continue one another's states."""

import triton
import triton.language as tl


@triton.jit
def next_decode(next_ptr, slots_ptr, token):
    """Returns the decode that continues the state of this one, -1 if there is none, and the slot that it writes to.

    Args:
        next_ptr, slots_ptr: `StateRows.decode_next_N`, which may be None, and `decode_slots_N`.
    """
    following = token * 0 - 1
    if next_ptr is not None:
        following = tl.load(next_ptr + token).to(tl.int64)
    slot = -2 - tl.load(slots_ptr + following, mask=following >= 0, other=-2).to(tl.int64)
    return following, slot
