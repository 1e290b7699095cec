"""What sub-chunks of prompts need of the gated delta rule before any state is known, for all sub-chunks side by side:
the inverses of their triangular systems, and queries and keys faded since the start of the sub-chunk and until its end.

`gated_delta_chunks` goes through the sub-chunks with these. Legend: as in `baton.models.layers.recurrent.gated_delta`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.gated_delta_inverses import invert
from baton.models.kernels.recurrent.prompt_tiles import find_sub_chunk, most_tiles
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
    """The values of each token. Rows of tokens without a prompt are undefined.

    Attributes:
        inverses_THRJ: of each value head: its row of the inverse of its sub-chunk's system.
        products_THRJ: of each value head: products of its query with the keys up to its own, faded; 0 after that.
        totals: as the decays, float32: its decays since the start of its sub-chunk, added up, if channels have decays
            of their own; to base 2. Otherwise what they leave of 1.
        rest_THR: what the decays after it, until the end of the sub-chunk, leave of 1; only if heads have one decay.
        queries_THRK, keys_THRK: of unit length. If channels have decays of their own, these are of each value head and
            faded since the start of the sub-chunk; otherwise R is 1, and nothing is faded.
        left_THRK: its key, of unit length, faded until the end of the sub-chunk; only if channels have own decays.
    """

    inverses_THRJ: Tensor
    products_THRJ: Tensor
    totals: Tensor
    rest_THR: Tensor | None
    queries_THRK: Tensor
    keys_THRK: Tensor
    left_THRK: Tensor | None


def systems(
    q_THK: Tensor, k_THK: Tensor, log_decay: Tensor, beta_THR: Tensor, rows: StateRows, *, dtype: torch.dtype
) -> Systems:
    """Computes `Systems` for all sub-chunks of the step's prompts.

    Args:
        log_decay, beta_THR: contiguous.
        dtype: float32, or float16, which has as many binary digits as tf32; no value exceeds 1 by much.
    """
    num_tokens, heads, per_head = beta_THR.shape
    keys = q_THK.shape[2]
    by_channel = log_decay.dim() == 4

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty((num_tokens, heads, *shape), dtype=dtype, device=q_THK.device)

    copies = per_head if by_channel else 1
    out = Systems(
        empty(per_head, CHUNK),
        empty(per_head, CHUNK),
        torch.empty_like(log_decay),
        None if by_channel else torch.empty_like(log_decay),
        empty(copies, keys),
        empty(copies, keys),
        empty(copies, keys) if by_channel else None,
    )
    systems_THRJ = empty(per_head, CHUNK, dtype=torch.float32)
    num_prompts = len(rows.prompt_slots_P)
    tiles, value_heads = most_tiles(rows, num_tokens, CHUNK), heads * per_head
    where = rows.prompt_slots_P, rows.prompt_starts_P1, rows.prompt_context_P, num_prompts
    common = {"VALUE_HEADS": value_heads, "CHUNK": CHUNK}
    if by_channel:
        grid = (tiles, value_heads, triton.cdiv(keys, _TILE_K))
        _add_up[grid](log_decay, out.totals, *where, **common, KEYS=keys, TILE_K=_TILE_K, num_warps=1)
    _multiply[(tiles, heads * copies)](
        q_THK,
        k_THK,
        log_decay,
        beta_THR,
        systems_THRJ,
        out.products_THRJ,
        out.totals,
        out.rest_THR,
        out.queries_THRK,
        out.keys_THRK,
        out.left_THRK,
        *where,
        *q_THK.stride()[:2],
        *k_THK.stride()[:2],
        **common,
        PER_HEAD=per_head,
        KEYS=keys,
        BLOCK_K=max(16, triton.next_power_of_2(keys)),
        LEVELS=_LEVELS,
        BY_CHANNEL=by_channel,
        PRECISION="tf32x3",  # of float32; other numbers are multiplied as they are
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    invert(systems_THRJ, out.inverses_THRJ, rows, tiles=tiles)
    return out


@triton.jit(do_not_specialize=["num_prompts"])
def _add_up(
    decay_ptr,
    totals_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    num_prompts,
    VALUE_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Adds up the decays of TILE_K channels of one sub-chunk of one value head."""
    first, count = find_sub_chunk(slots_ptr, starts_ptr, context_ptr, num_prompts, CHUNK)
    if count > 0:
        i_I = tl.arange(0, CHUNK)
        k_K = tl.program_id(2) * TILE_K + tl.arange(0, TILE_K)
        place = (first.to(tl.int64) * VALUE_HEADS + tl.program_id(1)) * KEYS
        places_IK = (i_I * (VALUE_HEADS * KEYS))[:, None] + k_K[None, :]
        has_IK = (i_I < count)[:, None] & (k_K < KEYS)[None, :]
        decay_IK = tl.load(decay_ptr + place + places_IK, mask=has_IK, other=0.0)
        tl.store(totals_ptr + place + places_IK, tl.cumsum(_exponents(decay_IK), axis=0), mask=has_IK)


@triton.jit(do_not_specialize=["num_prompts"])
def _multiply(
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    systems_ptr,
    products_ptr,
    totals_ptr,
    rest_ptr,
    queries_ptr,
    keys_ptr,
    left_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    num_prompts,
    q_stride_T,
    q_stride_H,
    k_stride_T,
    k_stride_H,
    VALUE_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One sub-chunk of one key head, or of one value head with BY_CHANNEL: its systems without the diagonal, the
    products, queries and keys.

    Decays by channel cannot be taken from products afterwards, and exp(total_i) exp(-total_j) would overflow. So a pair
    of tokens i > j fades in two steps whose exponents are at most 0: the key until a token m, and from m on until i. Of
    the blocks of 2, 4, ... CHUNK tokens, m is the last token of the first half of the smallest block with both. That
    block alone has i in its second half and j in its first: one level of products for each size of blocks.
    """
    first, count = find_sub_chunk(slots_ptr, starts_ptr, context_ptr, num_prompts, CHUNK)
    row = tl.program_id(1)
    if count > 0:
        dtype: tl.constexpr = keys_ptr.dtype.element_ty
        ROWS: tl.constexpr = VALUE_HEADS if BY_CHANNEL else VALUE_HEADS // PER_HEAD
        head = row // PER_HEAD if BY_CHANNEL else row
        i_I = tl.arange(0, CHUNK)
        k_K = tl.arange(0, BLOCK_K)
        i_I1, j_1J = i_I[:, None], i_I[None, :]
        has_I = i_I < count
        has_IK = has_I[:, None] & (k_K < KEYS)[None, :]
        # Places in 32 bits from the first token on leave registers for the tiles.
        token = first.to(tl.int64)
        gates_I = i_I * VALUE_HEADS
        places_IJ = (gates_I * CHUNK)[:, None] + j_1J
        place = (token * ROWS + row) * KEYS
        places_IK = (i_I * (ROWS * KEYS))[:, None] + k_K[None, :]
        q_ptr += token * q_stride_T + head * q_stride_H
        k_ptr += token * k_stride_T + head * k_stride_H
        q_IK = _units(q_ptr + (i_I * q_stride_T)[:, None] + k_K[None, :], has_IK)
        k_IK = _units(k_ptr + (i_I * k_stride_T)[:, None] + k_K[None, :], has_IK)
        if BY_CHANNEL:
            gate = token * VALUE_HEADS + row
            totals_ptr += place
            total_IK = tl.load(totals_ptr + places_IK, mask=has_IK, other=0.0)
            last_K = tl.load(totals_ptr + (count - 1) * (ROWS * KEYS) + k_K, mask=k_K < KEYS, other=0.0)
            keys_IJ = tl.zeros([CHUNK, CHUNK], tl.float32)
            products_IJ = tl.where(i_I1 == j_1J, tl.sum(q_IK * k_IK, axis=1)[:, None], 0.0)
            for level in range(LEVELS):
                middle_I = ((i_I >> (level + 1)) << (level + 1)) + (1 << level) - 1
                middles_IK = (tl.minimum(middle_I, count - 1) * (ROWS * KEYS))[:, None] + k_K[None, :]
                middle_IK = tl.load(totals_ptr + middles_IK, mask=has_IK, other=0.0)
                fade_IK = tl.exp2(-tl.abs(total_IK - middle_IK))
                faded_IK = (k_IK * fade_IK).to(dtype)
                faded_KJ = tl.trans(faded_IK)
                is_pair_IJ = (i_I1 >> level != j_1J >> level) & (i_I1 >> (level + 1) == j_1J >> (level + 1))
                keys_IJ = tl.where(is_pair_IJ, tl.dot(faded_IK, faded_KJ, input_precision=PRECISION), keys_IJ)
                level_IJ = tl.dot((q_IK * fade_IK).to(dtype), faded_KJ, input_precision=PRECISION)
                products_IJ = tl.where(is_pair_IJ, level_IJ, products_IJ)
            fade_IK = tl.exp2(total_IK)
            tl.store(queries_ptr + place + places_IK, (q_IK * fade_IK).to(dtype), mask=has_IK)
            tl.store(keys_ptr + place + places_IK, (k_IK * fade_IK).to(dtype), mask=has_IK)
            left_IK = k_IK * tl.exp2(last_K[None, :] - total_IK)
            tl.store(left_ptr + place + places_IK, left_IK.to(dtype), mask=has_IK)
            beta_I = tl.load(beta_ptr + gate + gates_I, mask=has_I, other=0.0)
            system_IJ = tl.where(i_I1 > j_1J, keys_IJ * beta_I[:, None], 0.0)
            tl.store(systems_ptr + gate * CHUNK + places_IJ, system_IJ, mask=has_I[:, None])
            products_IJ = tl.where(i_I1 >= j_1J, products_IJ, 0.0)
            tl.store(products_ptr + gate * CHUNK + places_IJ, products_IJ.to(dtype), mask=has_I[:, None])
        else:
            query_IK, key_IK = q_IK.to(dtype), k_IK.to(dtype)
            tl.store(queries_ptr + place + places_IK, query_IK, mask=has_IK)
            tl.store(keys_ptr + place + places_IK, key_IK, mask=has_IK)
            keys_IJ = tl.dot(key_IK, tl.trans(key_IK), input_precision=PRECISION)
            products_IJ = tl.dot(query_IK, tl.trans(key_IK), input_precision=PRECISION)
            for value_head in tl.static_range(PER_HEAD):
                gate = token * VALUE_HEADS + head * PER_HEAD + value_head
                decay_I = _exponents(tl.load(decay_ptr + gate + gates_I, mask=has_I, other=0.0))
                total_I = tl.cumsum(decay_I, axis=0)  # Triton 3.6 adds up [I, 1] wrongly
                tl.store(totals_ptr + gate + gates_I, tl.exp2(total_I), mask=has_I)
                tl.store(rest_ptr + gate + gates_I, tl.exp2(tl.sum(decay_I, axis=0) - total_I), mask=has_I)
                fade_IJ = tl.exp2(tl.minimum(total_I[:, None] - total_I[None, :], 0.0))
                beta_I = tl.load(beta_ptr + gate + gates_I, mask=has_I, other=0.0)
                system_IJ = tl.where(i_I1 > j_1J, keys_IJ * fade_IJ * beta_I[:, None], 0.0)
                tl.store(systems_ptr + gate * CHUNK + places_IJ, system_IJ, mask=has_I[:, None])
                faded_IJ = tl.where(i_I1 >= j_1J, products_IJ * fade_IJ, 0.0)
                tl.store(products_ptr + gate * CHUNK + places_IJ, faded_IJ.to(dtype), mask=has_I[:, None])


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
