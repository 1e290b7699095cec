"""Adds (x A^T) B^T * scale of each token's own adapter to a layer's result, in two launches: shrink and expand.

Tokens are sorted by adapter once a step (`AdapterRows`). A program computes tokens of one adapter, which share the
matrices it reads. The order stays on the device: a captured step serves any mix of adapters. Tokens without an adapter
are neither read nor written. The twin is `baton.models.adapters.layer.add_in_torch`.

With few tokens, as in decodes, reading A and B takes most of the time. So several programs share a token's sum, each
reads its whole part of A at once before it waits for the layer's input, and expand reads B while shrink runs. The
layer's shape alone says which parts a sum has, so a token's bits do not depend on the other tokens. Expand adds to the
layer's result, or writes products that `add_rows` adds later.

Legend: T token, K input, N output, S slot, P part of a fused layer, R rank of a slot, Q = P * R, C split of K, W warp.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.adapter_rows import AdapterRows
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

# Numbers of B that a program reads at once: 16 KiB, and several programs share a multiprocessor.
FEW_TOKENS_NUMBERS = 8192
_MANY_TOKENS_NUMBERS = 2048
_MOST_RANKS_AT_ONCE = 64
# Numbers of one token's result that a program adds.
_ADDED_OUTPUTS = 2048
# Columns of A of a program.
_SHRINK_COLUMNS = 16
# Inputs of a program, 16 KiB of A; more if there would be more splits than this. A warp has 128 of them.
FEWEST_INPUTS = 512
MOST_SPLITS = 16
_WARP_INPUTS = 128
_MANY_TOKENS_INPUTS = 64


class SlotWeights(NamedTuple):
    """One layer's part of all slots.

    Args:
        a_SQK: contiguous; the parts' ranks one after the other, each padded with zeros to a multiple of 16.
        b_SNR: contiguous; an output has the rank of its part.
        scale_SP: float32.
        sizes: outputs of each part.
    """

    a_SQK: Tensor
    b_SNR: Tensor
    scale_SP: Tensor
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b_SNR.shape[2]


def add_products(x_TK: Tensor, out_TN: Tensor, rows: AdapterRows, weights: SlotWeights) -> None:
    """Adds the products to `out_TN` in place, rounding each sum once.

    Args:
        x_TK, out_TN: channels adjacent; rows at any stride.
    """
    sums_TQC = new_sums(x_TK, rows, weights)
    shrink(x_TK, rows, weights, sums_TQC)
    expand(sums_TQC, out_TN, rows, weights)


def new_sums(x_TK: Tensor, rows: AdapterRows, weights: SlotWeights) -> Tensor:
    """Returns memory [T, Q, C] for the result of `shrink`, float32."""
    num_tokens, inputs = x_TK.shape
    splits = triton.cdiv(inputs, _inputs_of_program(inputs, x_TK.dtype)) if rows.are_few else 1
    shape = (num_tokens, weights.a_SQK.shape[1], triton.next_power_of_2(splits))
    return torch.empty(shape, dtype=torch.float32, device=x_TK.device)


def shrink(
    x_TK: Tensor, rows: AdapterRows, weights: SlotWeights, sums_TQC: Tensor, *, overlapping: bool = True
) -> None:
    """Writes x A^T as sums over the splits of K. Sums of tokens without an adapter are not written.

    Args:
        overlapping: with few tokens, the kernel starts while the previous one runs.
    """
    assert rows.order_T is not None
    assert rows.groups_3G is not None
    inputs, columns, num_groups = x_TK.shape[1], weights.a_SQK.shape[1], rows.groups_3G.shape[1]
    splits = sums_TQC.shape[2]
    span = _inputs_of_program(inputs, x_TK.dtype)
    warps = max(1, span // _WARP_INPUTS) if rows.are_few else 0
    _shrink[(num_groups, splits, columns // _SHRINK_COLUMNS)](
        x_TK,
        weights.a_SQK,
        rows.order_T,
        rows.groups_3G,
        sums_TQC,
        x_TK.stride(0),
        num_groups,
        INPUTS=inputs,
        COLUMNS=columns,
        SPLITS=splits,
        TILE_R=_SHRINK_COLUMNS,
        TILE_K=span if rows.are_few else _MANY_TOKENS_INPUTS,
        WARPS=warps,
        num_warps=warps or 4,
        **_common(rows, x_TK.device, overlapping=overlapping),
    )


def expand(sums_TQC: Tensor, out_TN: Tensor, rows: AdapterRows, weights: SlotWeights, *, adds: bool = True) -> None:
    """Adds (x A^T) B^T * scale to `out_TN`, given the result of `shrink`.

    Args:
        adds: else it overwrites the rows of tokens with an adapter.
    """
    assert rows.order_T is not None
    assert rows.groups_3G is not None
    few, num_groups = rows.are_few, rows.groups_3G.shape[1]
    tile_r = math.gcd(weights.rank, _MOST_RANKS_AT_ONCE)
    tile_n = (FEW_TOKENS_NUMBERS if few else _MANY_TOKENS_NUMBERS) // tile_r
    _expand[(num_groups, sum(triton.cdiv(size, tile_n) for size in weights.sizes))](
        sums_TQC,
        weights.b_SNR,
        weights.scale_SP,
        rows.order_T,
        rows.groups_3G,
        out_TN,
        out_TN.stride(0),
        num_groups,
        SIZES=weights.sizes,
        OUTPUTS=weights.b_SNR.shape[1],
        COLUMNS=sums_TQC.shape[1],
        RANK=weights.rank,
        SPLITS=sums_TQC.shape[2],
        ADDS=adds,
        TILE_N=tile_n,
        TILE_R=tile_r,
        ALIGNED=math.gcd(16, *weights.sizes),
        num_warps=4 if few else 8,
        **_common(rows, out_TN.device, overlapping=True),
    )


def add_rows(products_TN: Tensor, out_TN: Tensor, rows: AdapterRows) -> None:
    """Adds the rows of tokens with an adapter.

    Args:
        products_TN: contiguous, as `expand` overwrites it.
    """
    num_tokens, outputs = out_TN.shape
    _add_rows[(num_tokens, triton.cdiv(outputs, _ADDED_OUTPUTS))](
        products_TN,
        out_TN,
        rows.slots_T,
        out_TN.stride(0),
        OUTPUTS=outputs,
        TILE_N=_ADDED_OUTPUTS,
        INTERPRETED=interpreted(),
    )


def _common(rows: AdapterRows, device: torch.device, *, overlapping: bool) -> dict[str, Any]:
    # Expand follows shrink, so overlapping helps at any number of tokens.
    options = overlap(device, rows=1) if rows.are_few and overlapping else {"OVERLAP": False}
    return {"TILE_T": rows.group_tokens, "INTERPRETED": interpreted(), **options}


def _inputs_of_program(inputs: int, dtype: torch.dtype) -> int:
    """Returns the number of inputs of a program, a power of two; smaller in float32, to fit the registers."""
    least = FEWEST_INPUTS if dtype.itemsize == 2 else 64
    enough: int = triton.next_power_of_2(max(16, min(least, inputs), triton.cdiv(inputs, MOST_SPLITS)))
    return enough


@triton.jit
def _shrink(
    x_ptr,
    a_ptr,
    order_ptr,
    groups_ptr,
    sums_ptr,
    x_stride_T,
    num_groups,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes TILE_R columns for a group's tokens.

    WARPS is how many of a program's warps share a sum that programs share too; 0: a program computes a whole sum.
    """
    start_dependents(OVERLAP)
    group, split = tl.program_id(0), tl.program_id(1)
    slot, first, stop = _group(group, groups_ptr, num_groups)
    if slot >= 0:
        tokens_T, exists_T = _tokens(first, stop, order_ptr, TILE_T)
        columns_R = tl.program_id(2) * TILE_R + tl.arange(0, TILE_R)
        inputs_K = split * TILE_K + tl.arange(0, TILE_K)
        a_ptrs = a_ptr + (slot * COLUMNS + columns_R[:, None]) * INPUTS + inputs_K[None, :]
        x_ptrs = x_ptr + tokens_T[None, :] * x_stride_T + inputs_K[:, None]
        if WARPS:
            a_RK = tl.load(a_ptrs, mask=(inputs_K < INPUTS)[None, :], other=0.0)
            await_predecessors(OVERLAP)
            x_KT = tl.load(x_ptrs, mask=exists_T[None, :] & (inputs_K < INPUTS)[:, None], other=0.0)
            a_WRK = a_RK.reshape(TILE_R, WARPS, TILE_K // WARPS).permute(1, 0, 2)
            x_WKT = x_KT.reshape(WARPS, TILE_K // WARPS, TILE_T)
            sums_RT = tl.sum(_product(a_WRK, x_WKT, INTERPRETED), axis=0)
        else:
            sums_RT = tl.zeros((TILE_R, TILE_T), tl.float32)
            for start in range(0, INPUTS, TILE_K):
                mask_K = start + inputs_K < INPUTS
                a_RK = tl.load(a_ptrs + start, mask=mask_K[None, :], other=0.0)
                x_KT = tl.load(x_ptrs + start, mask=exists_T[None, :] & mask_K[:, None], other=0.0)
                sums_RT += _product(a_RK, x_KT, INTERPRETED)
        sums_ptrs = sums_ptr + (tokens_T[None, :] * COLUMNS + columns_R[:, None]) * SPLITS + split
        tl.store(sums_ptrs, sums_RT, mask=exists_T[None, :])
    else:
        await_predecessors(OVERLAP)


@triton.jit
def _expand(
    sums_ptr,
    b_ptr,
    scale_ptr,
    order_ptr,
    groups_ptr,
    out_ptr,
    out_stride_T,
    num_groups,
    SIZES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADDS: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes TILE_N outputs of one part for a group's tokens. ALIGNED divides the SIZES of the parts."""
    start_dependents(OVERLAP)
    slot, place, end = _group(tl.program_id(0), groups_ptr, num_groups)
    if slot >= 0:
        tokens_T, exists_T = _tokens(place, end, order_ptr, TILE_T)
        first, stop, part = _outputs(tl.program_id(1), SIZES, TILE_N)
        outputs_N = tl.multiple_of(first, ALIGNED) + tl.arange(0, TILE_N)
        exists_N = outputs_N < tl.multiple_of(stop, ALIGNED)
        scale = tl.load(scale_ptr + slot * len(SIZES) + part)
        ranks_R = tl.arange(0, TILE_R)
        b_ptrs = b_ptr + (slot * OUTPUTS + outputs_N[:, None]) * RANK + ranks_R[None, :]
        b_NR = tl.load(b_ptrs, mask=exists_N[:, None], other=0.0)
        await_predecessors(OVERLAP)
        out_ptrs = out_ptr + tokens_T[None, :] * out_stride_T + outputs_N[:, None]
        mask_NT = exists_N[:, None] & exists_T[None, :]
        sums_NT = tl.zeros((TILE_N, TILE_T), tl.float32)
        out_NT = tl.zeros((TILE_N, TILE_T), tl.float32)
        for start in tl.static_range(0, RANK, TILE_R):
            columns_R = part * RANK + start + ranks_R
            sums_ptrs = sums_ptr + (tokens_T[:, None] * COLUMNS + columns_R[None, :])[:, :, None] * SPLITS
            sums_TRC = tl.load(sums_ptrs + tl.arange(0, SPLITS), mask=exists_T[:, None, None], other=0.0)
            if ADDS and start == 0:  # both loads are in flight at once
                out_NT = tl.load(out_ptrs, mask=mask_NT, other=0.0).to(tl.float32)
            h_TR = tl.sum(sums_TRC, axis=2)
            h_TR = round_to(h_TR, out_ptr.dtype.element_ty, INTERPRETED)
            sums_NT += _product(b_NR, tl.trans(h_TR), INTERPRETED)
            if start + TILE_R < RANK:
                b_NR = tl.load(b_ptrs + start + TILE_R, mask=exists_N[:, None], other=0.0)
        tl.store(out_ptrs, round_to(out_NT + sums_NT * scale, out_ptr.dtype.element_ty, INTERPRETED), mask=mask_NT)
    else:
        await_predecessors(OVERLAP)


@triton.jit
def _add_rows(
    products_ptr,
    out_ptr,
    slots_ptr,
    out_stride_T,
    OUTPUTS: tl.constexpr,
    TILE_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Adds TILE_N numbers of a token's products."""
    token = tl.program_id(0).to(tl.int64)
    if tl.load(slots_ptr + token) >= 0:
        outputs_N = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        exists_N = outputs_N < OUTPUTS
        products_N = tl.load(products_ptr + token * OUTPUTS + outputs_N, mask=exists_N, other=0.0)
        out_ptrs = out_ptr + token * out_stride_T + outputs_N
        sums_N = tl.load(out_ptrs, mask=exists_N, other=0.0).to(tl.float32) + products_N.to(tl.float32)
        tl.store(out_ptrs, round_to(sums_N, out_ptr.dtype.element_ty, INTERPRETED), mask=exists_N)


@triton.jit
def _group(group, groups_ptr, num_groups):
    """Returns the group's slot, its first place, and the end of its slot's places."""
    slot = tl.load(groups_ptr + group).to(tl.int64)
    return slot, tl.load(groups_ptr + num_groups + group), tl.load(groups_ptr + 2 * num_groups + group)


@triton.jit
def _tokens(first, stop, order_ptr, TILE_T: tl.constexpr):
    """Returns a group's tokens, and which of them exist."""
    places_T = first + tl.arange(0, TILE_T)
    exists_T = places_T < stop
    return tl.load(order_ptr + places_T, mask=exists_T, other=0).to(tl.int64), exists_T


@triton.jit
def _outputs(tile, SIZES: tl.constexpr, TILE_N: tl.constexpr):
    """Returns the tile's first output, the end of its part's outputs, and the part."""
    first, stop, part = tile * 0, tile * 0, tile * 0
    before = tile * 0
    start: tl.constexpr = 0
    for index in tl.static_range(len(SIZES)):
        own = tile >= before
        first = tl.where(own, start + (tile - before) * TILE_N, first)
        stop = tl.where(own, start + SIZES[index], stop)
        part = tl.where(own, index, part)
        before += tl.cdiv(SIZES[index], TILE_N)
        start += SIZES[index]
    return first, stop, part


@triton.jit
def _product(x, y, INTERPRETED: tl.constexpr):
    """Multiplies x and y in float32."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    return tl.dot(x, y, input_precision="ieee")
