"""(x A^T) B^T * scale of each token's own adapter, added to a layer's result: two launches, shrink and expand.

Few tokens, which are decodes of different adapters: a program computes one token, so it never waits for another one's
matrices. More tokens, most of them of one prompt: a program has a tile of tokens and passes over the adapters that it
finds there, mostly one. Slots are read on the device, so a captured step serves any mix of adapters. Tokens without an
adapter are neither read nor written. The twin is `models.adapters.bank.add_in_torch`.

Legend: T token, K input, N output, S slot, P part of a fused layer, R rank of a slot, Q = P * R.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonlib.launch import interpreted
from tritonlib.rounding import round_to

# Up to this many tokens, each one has programs of its own.
_MOST_SINGLE_TOKENS = 256
_TILE_TOKENS = 64
_TILE_RANK = 16
# Outputs of one program. A tile has outputs of one part only.
TILE_OUTPUTS = 128


class SlotWeights(NamedTuple):
    """One layer's part of all slots.

    Args:
        a_SQK: contiguous; the parts' ranks one after the other, each padded with zeros to a multiple of 16.
        b_SNR: contiguous; an output has the rank of its part.
        scale_SP: float32.
        tiles: int32 [tiles, 3]: first output, end of the outputs, part.
    """

    a_SQK: Tensor
    b_SNR: Tensor
    scale_SP: Tensor
    tiles: Tensor

    @property
    def rank(self) -> int:
        return self.b_SNR.shape[2]


def output_tiles(sizes: list[int]) -> Tensor:
    """`SlotWeights.tiles` of parts with these outputs."""
    tiles, start = [], 0
    for part, size in enumerate(sizes):
        stop = start + size
        tiles += [(first, min(first + TILE_OUTPUTS, stop), part) for first in range(start, stop, TILE_OUTPUTS)]
        start = stop
    return torch.tensor(tiles, dtype=torch.int32)


def add_products(
    x_TK: Tensor, out_TN: Tensor, slots_T: Tensor, weights: SlotWeights, *, batch_invariant: bool = False
) -> None:
    """Adds to `out_TN` in place, rounding each sum once.

    Args:
        x_TK, out_TN: channels adjacent; rows at any stride.
        slots_T: int32; negative: the token has no adapter.
        batch_invariant: a token's bits must not depend on the number of tokens.
    """
    num_tokens, inputs = x_TK.shape
    columns = weights.a_SQK.shape[1]
    shrunk_TQ = x_TK.new_empty(num_tokens, columns)
    single = num_tokens <= _MOST_SINGLE_TOKENS and not batch_invariant
    # Few programs read a matrix too slowly.
    rank_tile = 4 if single and num_tokens <= _TILE_RANK else _TILE_RANK
    rows = num_tokens if single else triton.cdiv(num_tokens, _TILE_TOKENS)
    shrink, expand = (_shrink_token, _expand_token) if single else (_shrink_tile, _expand_tile)
    tokens = () if single else (num_tokens,)
    options = {"INTERPRETED": interpreted(), "num_warps": 4} | ({} if single else {"TILE_T": _TILE_TOKENS})
    shrink[(rows, columns // rank_tile)](
        x_TK,
        weights.a_SQK,
        slots_T,
        shrunk_TQ,
        x_TK.stride(0),
        *tokens,
        INPUTS=inputs,
        COLUMNS=columns,
        TILE_R=rank_tile,
        TILE_K=256 if single else 64,
        **options,
    )
    expand[(rows, len(weights.tiles))](
        shrunk_TQ,
        weights.b_SNR,
        weights.scale_SP,
        slots_T,
        weights.tiles,
        out_TN,
        out_TN.stride(0),
        *tokens,
        OUTPUTS=weights.b_SNR.shape[1],
        COLUMNS=columns,
        PARTS=weights.scale_SP.shape[1],
        RANK=weights.rank,
        TILE_N=TILE_OUTPUTS,
        TILE_R=min(weights.rank, 32) if single else _TILE_RANK,
        **options,
    )


@triton.jit
def _shrink_token(
    x_ptr,
    a_ptr,
    slots_ptr,
    shrunk_ptr,
    x_stride_T,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """TILE_R ranks of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        columns_R = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
        sums_RK = tl.zeros((TILE_R, TILE_K), tl.float32)
        for start in range(0, INPUTS, TILE_K):
            inputs_K = start + tl.arange(0, TILE_K)
            mask_K = inputs_K < INPUTS
            x_K = tl.load(x_ptr + token * x_stride_T + inputs_K, mask=mask_K, other=0.0).to(tl.float32)
            a_RK = tl.load(
                a_ptr + (slot * COLUMNS + columns_R[:, None]) * INPUTS + inputs_K[None, :],
                mask=mask_K[None, :],
                other=0.0,
            )
            sums_RK += a_RK.to(tl.float32) * x_K[None, :]
        sums_R = round_to(tl.sum(sums_RK, axis=1), shrunk_ptr.dtype.element_ty, INTERPRETED)
        tl.store(shrunk_ptr + token * COLUMNS + columns_R, sums_R)


@triton.jit
def _expand_token(
    shrunk_ptr,
    b_ptr,
    scale_ptr,
    slots_ptr,
    tiles_ptr,
    out_ptr,
    out_stride_T,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
    RANK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """TILE_N outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        tile_ptr = tiles_ptr + 3 * tl.program_id(1)
        outputs_N = tl.load(tile_ptr) + tl.arange(0, TILE_N)
        mask_N = outputs_N < tl.load(tile_ptr + 1)
        part = tl.load(tile_ptr + 2)
        sums_N = tl.zeros((TILE_N,), tl.float32)
        for start in range(0, RANK, TILE_R):
            ranks_R = start + tl.arange(0, TILE_R)
            mask_R = ranks_R < RANK
            h_R = tl.load(shrunk_ptr + token * COLUMNS + part * RANK + ranks_R, mask=mask_R, other=0.0).to(tl.float32)
            b_NR = tl.load(
                b_ptr + (slot * OUTPUTS + outputs_N[:, None]) * RANK + ranks_R[None, :],
                mask=mask_N[:, None] & mask_R[None, :],
                other=0.0,
            )
            sums_N += tl.sum(b_NR.to(tl.float32) * h_R[None, :], axis=1)
        out_ptrs = out_ptr + token * out_stride_T + outputs_N
        out_N = tl.load(out_ptrs, mask=mask_N, other=0.0).to(tl.float32)
        out_N += sums_N * tl.load(scale_ptr + slot * PARTS + part)
        tl.store(out_ptrs, round_to(out_N, out_ptr.dtype.element_ty, INTERPRETED), mask=mask_N)


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_tile(
    x_ptr,
    a_ptr,
    slots_ptr,
    shrunk_ptr,
    x_stride_T,
    num_tokens,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_T: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """TILE_R ranks of a tile of tokens, one adapter after the other."""
    tokens_T = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    slots_T = tl.load(slots_ptr + tokens_T, mask=tokens_T < num_tokens, other=-1)
    columns_R = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    slot = tl.max(slots_T, axis=0)
    while slot >= 0:
        own_T = slots_T == slot
        sums_TR = tl.zeros((TILE_T, TILE_R), tl.float32)
        for start in range(0, INPUTS, TILE_K):
            inputs_K = start + tl.arange(0, TILE_K)
            mask_K = inputs_K < INPUTS
            x_TK = tl.load(
                x_ptr + tokens_T[:, None] * x_stride_T + inputs_K[None, :],
                mask=own_T[:, None] & mask_K[None, :],
                other=0.0,
            )
            a_RK = tl.load(
                a_ptr + (slot.to(tl.int64) * COLUMNS + columns_R[:, None]) * INPUTS + inputs_K[None, :],
                mask=mask_K[None, :],
                other=0.0,
            )
            sums_TR += _product(x_TK, a_RK, INTERPRETED)
        sums_TR = round_to(sums_TR, shrunk_ptr.dtype.element_ty, INTERPRETED)
        tl.store(shrunk_ptr + tokens_T[:, None] * COLUMNS + columns_R[None, :], sums_TR, mask=own_T[:, None])
        slots_T = tl.where(own_T, -1, slots_T)
        slot = tl.max(slots_T, axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_tile(
    shrunk_ptr,
    b_ptr,
    scale_ptr,
    slots_ptr,
    tiles_ptr,
    out_ptr,
    out_stride_T,
    num_tokens,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_T: tl.constexpr,
    RANK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """TILE_N outputs of a tile of tokens, one adapter after the other."""
    tokens_T = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    slots_T = tl.load(slots_ptr + tokens_T, mask=tokens_T < num_tokens, other=-1)
    tile_ptr = tiles_ptr + 3 * tl.program_id(1)
    outputs_N = tl.load(tile_ptr) + tl.arange(0, TILE_N)
    mask_N = outputs_N < tl.load(tile_ptr + 1)
    part = tl.load(tile_ptr + 2)
    slot = tl.max(slots_T, axis=0)
    while slot >= 0:
        own_T = slots_T == slot
        sums_TN = tl.zeros((TILE_T, TILE_N), tl.float32)
        for start in range(0, RANK, TILE_R):
            ranks_R = start + tl.arange(0, TILE_R)
            h_TR = tl.load(
                shrunk_ptr + tokens_T[:, None] * COLUMNS + part * RANK + ranks_R[None, :],
                mask=own_T[:, None],
                other=0.0,
            )
            b_NR = tl.load(
                b_ptr + (slot.to(tl.int64) * OUTPUTS + outputs_N[:, None]) * RANK + ranks_R[None, :],
                mask=mask_N[:, None],
                other=0.0,
            )
            sums_TN += _product(h_TR, b_NR, INTERPRETED)
        out_ptrs = out_ptr + tokens_T[:, None] * out_stride_T + outputs_N[None, :]
        mask_TN = own_T[:, None] & mask_N[None, :]
        out_TN = tl.load(out_ptrs, mask=mask_TN, other=0.0).to(tl.float32)
        out_TN += sums_TN * tl.load(scale_ptr + slot * PARTS + part)
        tl.store(out_ptrs, round_to(out_TN, out_ptr.dtype.element_ty, INTERPRETED), mask=mask_TN)
        slots_T = tl.where(own_T, -1, slots_T)
        slot = tl.max(slots_T, axis=0)


@triton.jit
def _product(x_MK, y_NK, INTERPRETED: tl.constexpr):
    """x y^T in float32."""
    if INTERPRETED:
        return tl.dot(x_MK.to(tl.float32), tl.trans(y_NK.to(tl.float32)), input_precision="ieee")
    return tl.dot(x_MK, tl.trans(y_NK), input_precision="ieee")
