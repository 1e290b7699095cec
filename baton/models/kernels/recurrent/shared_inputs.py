"""Copies what heads of a group share in the states of Mamba-2 layers. The twin is in
`baton.models.layers.recurrent.selective_scan`."""

import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.state_rows import StateRows

_INPUTS = 1024  # numbers of one program


def share_inputs(conv_SHXW: Tensor, rows: StateRows, *, num_groups: int) -> None:
    """Implements `baton.models.layers.recurrent.selective_scan.share_inputs`."""
    _, heads, channels, width = conv_SHXW.shape
    tiles = triton.cdiv(channels * width, _INPUTS)
    for slots_R, others, snapshots in (
        (rows.decode_slots_N, rows.decode_lens_N, 0),
        (rows.prompt_slots_P, rows.snapshot_slots_PM, rows.snapshot_slots_PM.shape[1]),
    ):
        if len(slots_R):
            _share_inputs[(len(slots_R) * (1 + snapshots), heads, tiles)](
                conv_SHXW,
                slots_R,
                others,
                *conv_SHXW.stride(),
                PER_GROUP=heads // num_groups,
                WIDTH=width,
                NUMBERS=channels * width,
                SNAPSHOTS=snapshots,
                TILE=_INPUTS,
            )


@triton.jit
def _share_inputs(
    conv_ptr,
    slots_ptr,
    others_ptr,
    stride_S,
    stride_H,
    stride_X,
    stride_W,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBERS: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head's copy of a part of what its group's first head keeps.

    Args:
        others_ptr: of prompts, the slots of their snapshots; of decodes, which have none, their lengths.
    """
    request = tl.program_id(0) // (1 + SNAPSHOTS)
    snapshot = tl.program_id(0) % (1 + SNAPSHOTS) - 1  # -1: the request's own slot
    head = tl.program_id(1)
    first = head // PER_GROUP * PER_GROUP
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if SNAPSHOTS == 0:
        slot = tl.where(slot < -1, -2 - slot, slot)  # that of a decode that continues another one
        slot = tl.where(tl.load(others_ptr + request) > 0, slot, -1)
    elif snapshot >= 0:
        slot = tl.load(others_ptr + request * SNAPSHOTS + snapshot).to(tl.int64)
    if (slot >= 0) & (head != first):
        number = tl.program_id(2) * TILE + tl.arange(0, TILE)
        ptrs = conv_ptr + slot * stride_S + (number // WIDTH) * stride_X + (number % WIDTH) * stride_W
        values = tl.load(ptrs + first.to(tl.int64) * stride_H, mask=number < NUMBERS, other=0.0)
        tl.store(ptrs + head.to(tl.int64) * stride_H, values, mask=number < NUMBERS)
