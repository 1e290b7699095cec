"""Walks over the tokens of a step one by one: a decode and those that continue its state, or a prompt in order.

Decodes and prompts run one compiled kernel, which gets their differences as numbers and never as constants, because
kernels that were compiled apart may differ in last bits. So arguments in `SAME_FOR_ALL` are not specialised.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.state_rows import StateRows
from baton.tritonlib.launch import prefetch

SAME_FOR_ALL = ("in_prompts", "has_next", "num_snapshots")
ANY_ALIGNMENT = ("slots_ptr", "lens_ptr", "starts_ptr", "next_ptr", "snapshot_slots_ptr", "snapshot_lens_ptr")


class TokenWalk(NamedTuple):
    """A launch's arguments, in the order of `ANY_ALIGNMENT` and `SAME_FOR_ALL`. Pointers that the numbers rule out are
    not read."""

    slots_R: Tensor
    lens_R: Tensor
    starts: Tensor
    next_R: Tensor
    snapshot_slots: Tensor
    snapshot_lens: Tensor
    in_prompts: int
    has_next: int
    num_snapshots: int


def decodes_of(rows: StateRows) -> TokenWalk:
    slots_N, lens_N, next_N = rows.decode_slots_N, rows.decode_lens_N, rows.decode_next_N
    following = slots_N if next_N is None else next_N
    return TokenWalk(slots_N, lens_N, slots_N, following, slots_N, slots_N, 0, int(next_N is not None), 0)


def prompts_in_order(rows: StateRows) -> TokenWalk:
    slots_P, starts_P1, context_P = rows.prompt_slots_P, rows.prompt_starts_P1, rows.prompt_context_P
    kept_PM = rows.snapshot_slots_PM, rows.snapshot_lens_PM
    return TokenWalk(slots_P, context_P, starts_P1, slots_P, *kept_PM, 1, 0, rows.snapshot_slots_PM.shape[1])


@triton.jit
def first_token(row, slots_ptr, lens_ptr, starts_ptr, in_prompts):
    """Returns a row's first token, the one after its last, how many tokens are in the state already, and the state's
    slot. There is nothing to compute if the slot is below 0 or the first two are equal."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(lens_ptr + row)
    is_prompt = in_prompts != 0
    first = tl.load(starts_ptr + row, mask=is_prompt, other=0).to(tl.int64)
    stop = tl.load(starts_ptr + row + 1, mask=is_prompt, other=0).to(tl.int64)
    first = tl.where(is_prompt, first, row)
    stop = tl.where(is_prompt, stop, tl.where(length > 0, row + 1, row))
    return first, stop, tl.where(is_prompt, length, length - 1), slot


@triton.jit
def next_kept(row, snapshot_slots_ptr, snapshot_lens_ptr, first, token, stop, slot, num_snapshots):
    """Returns before which token the state is stored next, and where: at a snapshot, or at the row's end."""
    kept_stop, kept_slot = stop + 0, slot + 0
    index = token * 0
    while index < num_snapshots:
        place = row * num_snapshots + index
        here = first + tl.load(snapshot_lens_ptr + place)
        snapshot = tl.load(snapshot_slots_ptr + place).to(tl.int64)
        is_next = (snapshot >= 0) & (here > token) & (here < kept_stop)
        kept_stop, kept_slot = tl.where(is_next, here, kept_stop), tl.where(is_next, snapshot, kept_slot)
        index += 1
    return kept_stop, kept_slot


@triton.jit
def next_decode(next_ptr, slots_ptr, token, has_next):
    """Returns the decode that continues the state of this one, -1 if there is none, and the slot that it writes to.

    Args:
        next_ptr, slots_ptr: `StateRows.decode_next_N` and `decode_slots_N`.
        has_next: 0: no decode continues another one.
    """
    following = tl.load(next_ptr + token, mask=has_next != 0, other=-1).to(tl.int64)
    slot = -2 - tl.load(slots_ptr + following, mask=following >= 0, other=-2).to(tl.int64)
    return following, slot


@triton.jit
def load_token(ptrs, token, stride, mask):
    """A token's numbers, 0 where masked."""
    return tl.load(ptrs + token * stride, mask=mask, other=0.0)


@triton.jit
def prefetch_token(ptr, token, stop, stride, NUMBERS: tl.constexpr, AHEAD: tl.constexpr):
    """Brings a token's adjacent numbers, a power of two, into L2, AHEAD tokens before they are loaded."""
    if AHEAD:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (NUMBERS + LINE - 1) // LINE
        later = tl.minimum(token + AHEAD, stop - 1)
        prefetch(ptr + later * stride + tl.arange(0, LINES) * LINE)
