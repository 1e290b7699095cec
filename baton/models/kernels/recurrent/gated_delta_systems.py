"""What sub-chunks of prompts need of the gated delta rule before any state is known, for all sub-chunks side by side:
the inverses of their triangular systems, and queries and keys faded since the start of the sub-chunk and until its end.

`gated_delta_chunks` goes through the sub-chunks with these. Legend: as in `baton.models.layers.recurrent.gated_delta`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.state_rows import StateRows

CHUNK = 64
_LEVELS = CHUNK.bit_length() - 1
# A warp adds up the decays of 32 channels, 128 bytes of a token, without other warps.
_TILE_K = 32
_NUM_WARPS = 8
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-150.0)  # 2 ** -150 is 0 in float32


@dataclass(frozen=True)
class Systems:
    """The values of each token and value head, in float32. Rows of tokens without a prompt are undefined.

    Attributes:
        inverses_THRJ: its row of the inverse of its sub-chunk's system.
        products_THRJ: products of its query with the keys up to its own, faded; 0 after that.
        totals: as the decays, to base 2: its decays since the start of its sub-chunk, added up.
        queries_THRK, keys_THRK: of unit length, queries also scaled, faded since the start of the sub-chunk.
        left_THRK: its key, of unit length, faded until the end of the sub-chunk.
    """

    inverses_THRJ: Tensor
    products_THRJ: Tensor
    totals: Tensor
    queries_THRK: Tensor
    keys_THRK: Tensor
    left_THRK: Tensor


def systems(
    q_THK: Tensor, k_THK: Tensor, log_decay: Tensor, beta_THR: Tensor, rows: StateRows, *, precision: str
) -> Systems:
    """Computes `Systems` for all sub-chunks of the step's prompts.

    Args:
        log_decay, beta_THR: contiguous.
        precision: of the products of queries and keys, in `tl.dot`'s spelling.
    """
    num_tokens, heads, per_head = beta_THR.shape
    keys = q_THK.shape[2]
    by_channel = log_decay.dim() == 4

    def empty(*shape: int) -> Tensor:
        return torch.empty((num_tokens, heads, per_head, *shape), dtype=torch.float32, device=q_THK.device)

    out = Systems(empty(CHUNK), empty(CHUNK), torch.empty_like(log_decay), empty(keys), empty(keys), empty(keys))
    most_chunks = triton.cdiv(rows.max_prompt_tokens + CHUNK - 1, CHUNK)
    grid = (len(rows.prompt_slots_P) * most_chunks, heads * per_head)
    where = rows.prompt_slots_P, rows.prompt_starts_P1, rows.prompt_context_P, most_chunks
    if by_channel:
        _add_up[(*grid, triton.cdiv(keys, _TILE_K))](
            log_decay, out.totals, *where, VALUE_HEADS=grid[1], KEYS=keys, TILE_K=_TILE_K, CHUNK=CHUNK, num_warps=1
        )
    _multiply[grid](
        q_THK,
        k_THK,
        log_decay,
        beta_THR,
        out.inverses_THRJ,
        out.products_THRJ,
        out.totals,
        out.queries_THRK,
        out.keys_THRK,
        out.left_THRK,
        *where,
        keys**-0.5,
        *q_THK.stride()[:2],
        *k_THK.stride()[:2],
        VALUE_HEADS=grid[1],
        PER_HEAD=per_head,
        KEYS=keys,
        BLOCK_K=max(16, triton.next_power_of_2(keys)),
        CHUNK=CHUNK,
        LEVELS=_LEVELS,
        BY_CHANNEL=by_channel,
        PRECISION=precision,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    _invert[grid](out.inverses_THRJ, *where, VALUE_HEADS=grid[1], CHUNK=CHUNK, num_warps=1)
    return out


@triton.jit
def _sub_chunk(slots_ptr, starts_ptr, context_ptr, most_chunks, CHUNK: tl.constexpr):
    """Returns first token and number of tokens of this program's sub-chunk; 0 or less tokens if there is none."""
    prompt = tl.program_id(0) // most_chunks
    start = tl.load(starts_ptr + prompt)
    stop = tl.load(starts_ptr + prompt + 1)
    aligned = start - tl.load(context_ptr + prompt) % CHUNK + tl.program_id(0) % most_chunks * CHUNK
    first = tl.maximum(aligned, start)
    count = tl.minimum(aligned + CHUNK, stop) - first
    return first, tl.where(tl.load(slots_ptr + prompt) >= 0, count, 0)


@triton.jit
def _add_up(
    decay_ptr,
    totals_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    most_chunks,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Adds up the decays of TILE_K channels of one sub-chunk of one value head."""
    first, count = _sub_chunk(slots_ptr, starts_ptr, context_ptr, most_chunks, CHUNK)
    if count > 0:
        i_I = tl.arange(0, CHUNK)
        k_K = tl.program_id(2) * TILE_K + tl.arange(0, TILE_K)
        place = (first.to(tl.int64) * VALUE_HEADS + tl.program_id(1)) * KEYS
        places_IK = (i_I * (VALUE_HEADS * KEYS))[:, None] + k_K[None, :]
        has_IK = (i_I < count)[:, None] & (k_K < KEYS)[None, :]
        decay_IK = tl.load(decay_ptr + place + places_IK, mask=has_IK, other=0.0)
        tl.store(totals_ptr + place + places_IK, tl.cumsum(_exponents(decay_IK), axis=0), mask=has_IK)


@triton.jit
def _multiply(
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    systems_ptr,
    products_ptr,
    totals_ptr,
    queries_ptr,
    keys_ptr,
    left_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    most_chunks,
    scale,
    q_stride_T,
    q_stride_H,
    k_stride_T,
    k_stride_H,
    VALUE_HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One sub-chunk of one value head: its system without the diagonal, and the faded products, queries and keys.

    Decays by channel cannot be taken from products afterwards, and exp(total_i) exp(-total_j) would overflow. So a pair
    of tokens i > j fades in two steps whose exponents are at most 0: the key until a token m, and from m on until i. Of
    the blocks of 2, 4, ... CHUNK tokens, m is the last token of the first half of the smallest block with both. That
    block alone has i in its second half and j in its first: one level of products for each size of blocks.
    """
    first, count = _sub_chunk(slots_ptr, starts_ptr, context_ptr, most_chunks, CHUNK)
    value_head = tl.program_id(1)
    if count > 0:
        i_I = tl.arange(0, CHUNK)
        k_K = tl.arange(0, BLOCK_K)
        i_I1, j_1J = i_I[:, None], i_I[None, :]
        has_I = i_I < count
        has_IK = has_I[:, None] & (k_K < KEYS)[None, :]
        # Places in 32 bits from the first token on leave registers for the tiles.
        token = first.to(tl.int64)
        gate = token * VALUE_HEADS + value_head
        gates_I = i_I * VALUE_HEADS
        places_IK = (gates_I * KEYS)[:, None] + k_K[None, :]
        q_ptr += token * q_stride_T + value_head // PER_HEAD * q_stride_H
        k_ptr += token * k_stride_T + value_head // PER_HEAD * k_stride_H
        q_IK = _units(q_ptr + (i_I * q_stride_T)[:, None] + k_K[None, :], has_IK) * scale
        k_IK = _units(k_ptr + (i_I * k_stride_T)[:, None] + k_K[None, :], has_IK)
        if BY_CHANNEL:
            totals_ptr += gate * KEYS
            total_IX = tl.load(totals_ptr + places_IK, mask=has_IK, other=0.0)
            last_X = tl.load(totals_ptr + (count - 1) * (VALUE_HEADS * KEYS) + k_K, mask=k_K < KEYS, other=0.0)
            keys_IJ = tl.zeros([CHUNK, CHUNK], tl.float32)
            products_IJ = tl.where(i_I1 == j_1J, tl.sum(q_IK * k_IK, axis=1)[:, None], 0.0)
            for level in range(LEVELS):
                middle_I = ((i_I >> (level + 1)) << (level + 1)) + (1 << level) - 1
                middles_IK = (tl.minimum(middle_I, count - 1) * (VALUE_HEADS * KEYS))[:, None] + k_K[None, :]
                middle_IK = tl.load(totals_ptr + middles_IK, mask=has_IK, other=0.0)
                fade_IK = tl.exp2(-tl.abs(total_IX - middle_IK))
                faded_IK = k_IK * fade_IK
                faded_KJ = tl.trans(faded_IK)
                is_pair_IJ = (i_I1 >> level != j_1J >> level) & (i_I1 >> (level + 1) == j_1J >> (level + 1))
                keys_IJ = tl.where(is_pair_IJ, tl.dot(faded_IK, faded_KJ, input_precision=PRECISION), keys_IJ)
                level_IJ = tl.dot(q_IK * fade_IK, faded_KJ, input_precision=PRECISION)
                products_IJ = tl.where(is_pair_IJ, level_IJ, products_IJ)
        else:
            decay_I = _exponents(tl.load(decay_ptr + gate + gates_I, mask=has_I, other=0.0))
            total_I = tl.cumsum(decay_I, axis=0)  # Triton 3.6 adds up [I, 1] wrongly
            tl.store(totals_ptr + gate + gates_I, total_I, mask=has_I)
            total_IX = total_I[:, None]
            last_X = tl.zeros([1], tl.float32) + tl.sum(decay_I, axis=0)
            fade_IJ = tl.exp2(tl.minimum(total_IX - total_I[None, :], 0.0))
            keys_IJ = tl.dot(k_IK, tl.trans(k_IK), input_precision=PRECISION) * fade_IJ
            products_IJ = tl.dot(q_IK, tl.trans(k_IK), input_precision=PRECISION) * fade_IJ
        beta_I = tl.load(beta_ptr + gate + gates_I, mask=has_I, other=0.0)
        system_IJ = tl.where(i_I1 > j_1J, keys_IJ * beta_I[:, None], 0.0)
        places_IJ = (gates_I * CHUNK)[:, None] + j_1J
        tl.store(systems_ptr + gate * CHUNK + places_IJ, system_IJ, mask=has_I[:, None])
        products_IJ = tl.where(i_I1 >= j_1J, products_IJ, 0.0)
        tl.store(products_ptr + gate * CHUNK + places_IJ, products_IJ, mask=has_I[:, None])
        fade_IX = tl.exp2(total_IX)
        tl.store(queries_ptr + gate * KEYS + places_IK, q_IK * fade_IX, mask=has_IK)
        tl.store(keys_ptr + gate * KEYS + places_IK, k_IK * fade_IX, mask=has_IK)
        tl.store(left_ptr + gate * KEYS + places_IK, k_IK * tl.exp2(last_X[None, :] - total_IX), mask=has_IK)


@triton.jit
def _exponents(decay):
    """To base 2, which is how the device takes powers. A bound on what is 0 in any case keeps sums small: after a very
    strong decay they would lose the digits of weak ones."""
    return tl.maximum(decay * _LOG2_E, _LEAST)


@triton.jit
def _units(ptrs_IK, has_IK):
    """Vectors in float32, brought to unit length."""
    x_IK = tl.load(ptrs_IK, mask=has_IK, other=0.0).to(tl.float32)
    return x_IK * tl.rsqrt(tl.sum(x_IK * x_IK, axis=1) + 1e-6)[:, None]


@triton.jit
def _invert(
    systems_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    most_chunks,
    VALUE_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Puts the inverse of one sub-chunk's system in its place: first of its four diagonal blocks, then block by block
    away from the diagonal (block forward substitution). One warp: no product waits for other warps."""
    tl.static_assert(CHUNK == 64, "the blocks below are of 16 tokens")
    first, count = _sub_chunk(slots_ptr, starts_ptr, context_ptr, most_chunks, CHUNK)
    if count > 0:
        gate = first.to(tl.int64) * VALUE_HEADS + tl.program_id(1)
        rows_I1 = (tl.arange(0, 16) * (VALUE_HEADS * CHUNK))[:, None]
        ptrs_IJ = systems_ptr + gate * CHUNK + rows_I1 + tl.arange(0, 16)[None, :]
        down: tl.constexpr = 16 * VALUE_HEADS * CHUNK
        has0_I1, has1_I1, has2_I1, has3_I1 = (
            _rows_of(count),
            _rows_of(count - 16),
            _rows_of(count - 32),
            _rows_of(count - 48),
        )
        below10_IJ = tl.load(ptrs_IJ + down, mask=has1_I1, other=0.0)
        below20_IJ = tl.load(ptrs_IJ + 2 * down, mask=has2_I1, other=0.0)
        below21_IJ = tl.load(ptrs_IJ + 2 * down + 16, mask=has2_I1, other=0.0)
        below30_IJ = tl.load(ptrs_IJ + 3 * down, mask=has3_I1, other=0.0)
        below31_IJ = tl.load(ptrs_IJ + 3 * down + 16, mask=has3_I1, other=0.0)
        below32_IJ = tl.load(ptrs_IJ + 3 * down + 32, mask=has3_I1, other=0.0)
        block00_IJ = _inverse(tl.load(ptrs_IJ, mask=has0_I1, other=0.0))
        block11_IJ = _inverse(tl.load(ptrs_IJ + down + 16, mask=has1_I1, other=0.0))
        block22_IJ = _inverse(tl.load(ptrs_IJ + 2 * down + 32, mask=has2_I1, other=0.0))
        block33_IJ = _inverse(tl.load(ptrs_IJ + 3 * down + 48, mask=has3_I1, other=0.0))
        tl.store(ptrs_IJ, block00_IJ, mask=has0_I1)
        tl.store(ptrs_IJ + down + 16, block11_IJ, mask=has1_I1)
        tl.store(ptrs_IJ + 2 * down + 32, block22_IJ, mask=has2_I1)
        tl.store(ptrs_IJ + 3 * down + 48, block33_IJ, mask=has3_I1)
        block10_IJ = -_times(block11_IJ, _times(below10_IJ, block00_IJ))
        block21_IJ = -_times(block22_IJ, _times(below21_IJ, block11_IJ))
        block32_IJ = -_times(block33_IJ, _times(below32_IJ, block22_IJ))
        tl.store(ptrs_IJ + down, block10_IJ, mask=has1_I1)
        tl.store(ptrs_IJ + 2 * down + 16, block21_IJ, mask=has2_I1)
        tl.store(ptrs_IJ + 3 * down + 32, block32_IJ, mask=has3_I1)
        block20_IJ = -_times(block22_IJ, _times(below20_IJ, block00_IJ) + _times(below21_IJ, block10_IJ))
        block31_IJ = -_times(block33_IJ, _times(below31_IJ, block11_IJ) + _times(below32_IJ, block21_IJ))
        tl.store(ptrs_IJ + 2 * down, block20_IJ, mask=has2_I1)
        tl.store(ptrs_IJ + 3 * down + 16, block31_IJ, mask=has3_I1)
        answer30_IJ = _times(below30_IJ, block00_IJ) + _times(below31_IJ, block10_IJ) + _times(below32_IJ, block20_IJ)
        tl.store(ptrs_IJ + 3 * down, -_times(block33_IJ, answer30_IJ), mask=has3_I1)


@triton.jit
def _rows_of(count):
    return (tl.arange(0, 16) < count)[:, None]


@triton.jit
def _times(x_IJ, y_IJ):
    return tl.dot(x_IJ, y_IJ, input_precision="tf32x3")


@triton.jit
def _inverse(below_IJ):
    """The inverse of 1 + `below_IJ` of 16 tokens, which is 0 on and above the diagonal: first that of each block of two
    tokens on the diagonal, then of blocks twice as large, each from the inverses of its halves."""
    i_I1, j_1J = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    inverse_IJ = (i_I1 == j_1J).to(tl.float32) - tl.where(i_I1 // 2 == j_1J // 2, below_IJ, 0.0)
    for level in tl.static_range(1, 4):
        is_between_IJ = (i_I1 >> level != j_1J >> level) & (i_I1 >> (level + 1) == j_1J >> (level + 1))
        inverse_IJ -= _times(inverse_IJ, _times(tl.where(is_between_IJ, below_IJ, 0.0), inverse_IJ))
    return inverse_IJ
