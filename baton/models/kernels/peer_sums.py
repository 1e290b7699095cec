"""Adds up the ranks' parts through each other's memory in one launch, and can add the sum to the residual stream and
normalize it in the same launch.

The data are their own signal. A rank writes its part of a row into its peers' memory, and each waits until none of the
numbers that it expects is `EMPTY`, a NaN that no rank sends. So a number needs no order of writes, no fence and no
flag. The reader makes the place `EMPTY` again.

Each row has two sets of places, used in turns, and counts its turns on the device, so launches can be part of CUDA
graphs. Two are enough: a rank sends for turn n + 2 after it has received for turn n + 1, for which every rank has
started launch n + 1 and so ended launch n, where it emptied the places of turn n.

In one shot each rank sends its part of a row to all others. In two shots one rank, the row's owner, receives all parts
and sends the sum, so that ranks send less and wait twice. Either way numbers are added in the order of the ranks.

A rank's launches are on one stream, and all ranks make the same ones in the same order. A wait has no end of its own:
when a rank ends, `baton.node.ranks` ends the others. Legend: R rank, T token, D channel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.rotation import RowNorm
from baton.models.kernels.norms import finish_row, norm_warps
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, allocate
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

TURNS = 2
# All bits of a number of any size. Arithmetic gives other NaNs.
EMPTY = -1
# Sums of more than two ranks from this size on take two shots. Not measured.
_TWO_SHOT_BYTES = 256 << 10
_EMPTY = tl.constexpr(EMPTY)


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """Memory of all ranks through which they exchange rows.

    Attributes:
        addresses_R: int64, where each rank's places begin, as this rank addresses them. Places are
            [turn, row, sending rank, channel] and `EMPTY` at first.
        turns_T: int32, this rank's turn of each row; 0 at first.
        dtype, width: of a row.
        num_programs: as many as can certainly run at the same time.
        owner: what keeps the memory mapped.
    """

    rank: int
    size: int
    addresses_R: Tensor
    turns_T: Tensor
    dtype: torch.dtype
    width: int
    num_programs: int
    owner: object = None


def num_places(size: int, rows: int, width: int) -> int:
    """Returns how many numbers a rank's places hold."""
    return TURNS * rows * size * width


def takes(memory: PeerMemory, part: Tensor) -> bool:
    """Whether `part` is rows that fit in the memory. It is the same on every rank."""
    return (
        part.dtype is memory.dtype
        and part.ndim == 2
        and part.shape[1] == memory.width
        and len(part) <= len(memory.turns_T)
    )


def sum_parts(memory: PeerMemory, part_TD: Tensor) -> Tensor:
    """Returns the sum over ranks, with the same bits on each: added in float32 in their order, rounded once.

    Args:
        part_TD: this rank's; `takes` it. Rows may have any stride.
    """
    out_TD = torch.empty_like(part_TD, memory_format=torch.contiguous_format)
    _launch(memory, part_TD, None, None, None, out_TD)
    return out_TD


def add_sum_and_norm(
    memory: PeerMemory,
    part_TD: Tensor,
    stream_TD: Tensor,
    norm: RowNorm,
    *,
    update_norm: RowNorm | None = None,
    row_format: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """Does what `add_rms_norm` does with the sum over ranks, or `norm_and_quantize` if there is a `row_format`."""
    if row_format is None:
        out_TD = torch.empty_like(stream_TD, memory_format=torch.contiguous_format)
        _launch(memory, part_TD, stream_TD, update_norm, norm, out_TD)
        return out_TD
    num_tokens, size = stream_TD.shape
    rows = allocate(num_tokens, size, row_format, like=stream_TD)
    _launch(memory, part_TD, stream_TD, update_norm, norm, rows.stored_PK, quantized=(rows, row_format))
    return rows


def _launch(
    memory: PeerMemory,
    part_TD: Tensor,
    stream_TD: Tensor | None,
    update_norm: RowNorm | None,
    norm: RowNorm | None,
    out_PD: Tensor,
    *,
    quantized: tuple[QuantizedRows, RowFormat] | None = None,
) -> None:
    assert takes(memory, part_TD), "the caller has asked"
    assert part_TD.stride(1) == 1, "channels are adjacent"
    num_tokens, size = part_TD.shape
    if not num_tokens:
        return
    block = triton.next_power_of_2(size)
    rows, row_format = quantized or (None, None)
    _sum_rows[(min(out_PD.shape[0], memory.num_programs),)](
        part_TD,
        memory.addresses_R,
        memory.turns_T,
        stream_TD,
        None if update_norm is None else update_norm.weight,
        None if norm is None else norm.weight,
        out_PD,
        None if rows is None else rows.scale_PC,
        None if row_format is None else row_format.scale,
        num_tokens,
        out_PD.shape[0],
        part_TD.stride(0),
        0 if stream_TD is None else stream_TD.stride(0),
        0.0 if update_norm is None else update_norm.eps,
        0.0 if norm is None else norm.eps,
        RANK=memory.rank,
        RANKS=memory.size,
        CAPACITY=len(memory.turns_T),
        TWO_SHOTS=memory.size > 2 and num_tokens * size * part_TD.itemsize >= _TWO_SHOT_BYTES,
        SIZE=size,
        BLOCK=block,
        UPDATE_OFFSET=0 if update_norm is None else update_norm.weight_offset,
        OFFSET=0 if norm is None else norm.weight_offset,
        BLOCKED=row_format is not None and row_format.blocked,
        POWER_OF_TWO=row_format is not None and row_format.power_of_two,
        INTERPRETED=interpreted(),
        **overlap(part_TD.device, rows=num_tokens),
        num_warps=norm_warps(size),
        enable_fp_fusion=False,  # as in `norms`, for the same bits
    )


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _sum_rows(
    part_ptr,
    addresses_ptr,
    turns_ptr,
    stream_ptr,
    update_weight_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    given_scale_ptr,
    num_tokens,
    num_rows,
    part_stride,
    stream_stride,
    update_eps,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UPDATE_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes every n-th row, if there are n programs: first it sends them all, then it waits for each."""
    start_dependents(OVERLAP)
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    channels_D = tl.arange(0, BLOCK)
    exists_D = channels_D < SIZE
    weight_D = None
    if weight_ptr is not None:
        weight_D = tl.load(weight_ptr + channels_D, mask=exists_D, other=0.0)
    update_weight_D = None
    if update_weight_ptr is not None:
        update_weight_D = tl.load(update_weight_ptr + channels_D, mask=exists_D, other=0.0)
    await_predecessors(OVERLAP)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for row in range(bound(first, INTERPRETED), bound(num_tokens, INTERPRETED), bound(programs, INTERPRETED)):
        part_D = tl.load(part_ptr + row * part_stride + channels_D, mask=exists_D, other=0.0)
        place = (tl.load(turns_ptr + row).to(tl.int64) * CAPACITY + row) * RANKS * SIZE
        if TWO_SHOTS:
            if row % RANKS != RANK:
                _send(part_D, addresses_ptr + row % RANKS, place + RANK * SIZE, channels_D, exists_D)
        else:
            _send_all(part_D, addresses_ptr, place, channels_D, exists_D, RANK, RANKS, SIZE)
    for row in range(bound(first, INTERPRETED), bound(num_rows, INTERPRETED), bound(programs, INTERPRETED)):
        waits = row < num_tokens
        mask_D = exists_D & waits
        stream_D, stream_ptrs_D = None, None
        if stream_ptr is not None:
            stream_ptrs_D = stream_ptr + row * stream_stride + channels_D
            stream_D = tl.load(stream_ptrs_D, mask=mask_D, other=0.0).to(tl.float32)
        part_D = tl.load(part_ptr + row * part_stride + channels_D, mask=mask_D, other=0.0)
        turn = tl.load(turns_ptr + row, mask=waits, other=0).to(tl.int64)
        place = (turn * CAPACITY + row) * RANKS * SIZE
        if TWO_SHOTS:
            x_D = _sum_in_two_shots(
                part_D, addresses_ptr, place, row % RANKS, channels_D, mask_D, waits, RANK, RANKS, SIZE, INTERPRETED
            )
        else:
            x_D = _sum_received(part_D, addresses_ptr, place, channels_D, mask_D, waits, RANK, RANKS, SIZE, INTERPRETED)
        tl.store(turns_ptr + row, (1 - turn).to(tl.int32), mask=waits)
        if weight_ptr is None:
            tl.store(out_ptr + row * SIZE + channels_D, x_D, mask=mask_D)
        else:
            finish_row(
                x_D.to(tl.float32),
                stream_D,
                stream_ptrs_D,
                update_weight_D,
                weight_D,
                mask_D,
                row,
                num_rows,
                out_ptr,
                scale_ptr,
                given_scale_ptr,
                update_eps,
                eps,
                dtype,
                SIZE,
                BLOCK,
                UPDATE_OFFSET,
                OFFSET,
                BLOCKED,
                POWER_OF_TWO,
                INTERPRETED,
            )


@triton.jit
def _sum_received(
    part_D,
    addresses_ptr,
    place,
    channels_D,
    mask_D,
    waits,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Waits for all other ranks' parts and returns the sum, rounded to the parts' dtype."""
    numbers_ptr = _numbers(addresses_ptr + RANK, part_D.dtype) + place
    total_D = part_D.to(tl.float32)
    missing = waits.to(tl.int32)
    while missing > 0:
        empty_D = tl.zeros_like(channels_D)
        for rank in tl.static_range(RANKS):
            sent_D = part_D
            if rank != RANK:
                bits_D = tl.load(numbers_ptr + rank * SIZE + channels_D, mask=mask_D, other=0, volatile=True)
                empty_D |= (bits_D == _EMPTY).to(tl.int32)
                sent_D = bits_D.to(part_D.dtype, bitcast=True)
            if rank == 0:
                total_D = sent_D.to(tl.float32)
            else:
                total_D += sent_D.to(tl.float32)
        missing = tl.max(empty_D, 0)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            _empty(numbers_ptr + rank * SIZE + channels_D, mask_D)
    return round_to(total_D, part_D.dtype, INTERPRETED)


@triton.jit
def _sum_in_two_shots(
    part_D,
    addresses_ptr,
    place,
    owner,
    channels_D,
    mask_D,
    waits,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Returns what `_sum_received` returns; the row's owner computes it, and the others receive it."""
    if owner == RANK:
        sum_D = _sum_received(part_D, addresses_ptr, place, channels_D, mask_D, waits, RANK, RANKS, SIZE, INTERPRETED)
        _send_all(sum_D, addresses_ptr, place, channels_D, mask_D, RANK, RANKS, SIZE)
    else:
        ptrs_D = _numbers(addresses_ptr + RANK, part_D.dtype) + place + owner * SIZE + channels_D
        bits_D = tl.load(ptrs_D, mask=mask_D, other=0, volatile=True)
        while tl.max((bits_D == _EMPTY).to(tl.int32), 0) > 0:
            bits_D = tl.load(ptrs_D, mask=mask_D, other=0, volatile=True)
        _empty(ptrs_D, mask_D)
        sum_D = bits_D.to(part_D.dtype, bitcast=True)
    return sum_D


@triton.jit
def _send_all(
    x_D, addresses_ptr, place, channels_D, mask_D, RANK: tl.constexpr, RANKS: tl.constexpr, SIZE: tl.constexpr
):
    """Sends numbers to all other ranks, to each first by another rank."""
    for step in tl.static_range(1, RANKS):
        _send(x_D, addresses_ptr + (RANK + step) % RANKS, place + RANK * SIZE, channels_D, mask_D)


@triton.jit
def _send(x_D, address_ptr, place, channels_D, mask_D):
    numbers_ptr = _numbers(address_ptr, x_D.dtype)
    bits_D = x_D.to(numbers_ptr.dtype.element_ty, bitcast=True)
    bits_D = tl.where(bits_D == _EMPTY, 0x7FFF if bits_D.dtype == tl.int16 else 0x7FFFFFFF, bits_D)
    tl.store(numbers_ptr + place + channels_D, bits_D, mask=mask_D)


@triton.jit
def _empty(ptrs_D, mask_D):
    tl.store(ptrs_D, _EMPTY, mask=mask_D)


@triton.jit
def _numbers(address_ptr, dtype: tl.constexpr):
    """Pointer to numbers as whole numbers of the same size, in the memory that the address names."""
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(bits)), 16)
