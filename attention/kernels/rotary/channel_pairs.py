"""Parts of the kernels that turn queries and keys: loading and turning pairs of channels, and each token's place in the
cache.

Legend: R rows (a head of a token each), P pairs of channels, C channels.
"""

import triton
import triton.language as tl

from baton.tritonlib.fp8 import to_fp8
from baton.tritonlib.launch import prefetch
from baton.tritonlib.rounding import round_to

# Pairs in a program's tile. With 4 warps that is 8 per thread, so each thread moves 16 bytes of bf16 at a time.
# NOTE: the number of tokens must not change it, because the order in which a head's norm is summed follows from it.
TILE_PAIRS = 1024
NUM_WARPS = 4


@triton.jit
def load_pairs(ptrs_R, mask_R, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads the first and the second channels of the pairs, float32 [R, P] each; masked entries are 0."""
    if INTERLEAVED:
        channels_C = tl.arange(0, 2 * BLOCK_P)
        mask_RC = mask_R[:, None] & (channels_C < 2 * PAIRS)[None, :]
        x_RC = tl.load(ptrs_R[:, None] + channels_C[None, :], mask=mask_RC, other=0.0).to(tl.float32)
        first_RP, second_RP = tl.split(tl.reshape(x_RC, [x_RC.shape[0], BLOCK_P, 2]))
    else:
        pairs_P = tl.arange(0, BLOCK_P)
        mask_RP = mask_R[:, None] & (pairs_P < PAIRS)[None, :]
        ptrs_RP = ptrs_R[:, None] + pairs_P[None, :]
        first_RP = tl.load(ptrs_RP, mask=mask_RP, other=0.0).to(tl.float32)
        second_RP = tl.load(ptrs_RP + PAIRS, mask=mask_RP, other=0.0).to(tl.float32)
    return first_RP, second_RP


@triton.jit
def store_pairs(
    ptrs_R, first_RP, second_RP, mask_R, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Stores pairs, the inverse of `load_pairs`; the numbers have the stored dtype."""
    if INTERLEAVED:
        channels_C = tl.arange(0, 2 * BLOCK_P)
        mask_RC = mask_R[:, None] & (channels_C < 2 * PAIRS)[None, :]
        x_RC = tl.reshape(tl.join(first_RP, second_RP), [first_RP.shape[0], 2 * BLOCK_P])
        tl.store(ptrs_R[:, None] + channels_C[None, :], x_RC, mask=mask_RC)
    else:
        pairs_P = tl.arange(0, BLOCK_P)
        mask_RP = mask_R[:, None] & (pairs_P < PAIRS)[None, :]
        ptrs_RP = ptrs_R[:, None] + pairs_P[None, :]
        tl.store(ptrs_RP, first_RP, mask=mask_RP)
        tl.store(ptrs_RP + PAIRS, second_RP, mask=mask_RP)


@triton.jit
def load_angles(cos_ptr, sin_ptr, tokens_R, mask_R, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Loads cosine and sine of each row's token, float32 [R, P] each."""
    pairs_P = tl.arange(0, BLOCK_P)
    mask_RP = mask_R[:, None] & (pairs_P < PAIRS)[None, :]
    at_RP = tokens_R.to(tl.int64)[:, None] * PAIRS + pairs_P[None, :]
    return tl.load(cos_ptr + at_RP, mask=mask_RP, other=0.0), tl.load(sin_ptr + at_RP, mask=mask_RP, other=0.0)


@triton.jit
def prefetch_angles(cos_ptr, sin_ptr, tokens_R, mask_R, PAIRS: tl.constexpr):
    """Loads the angles into L2, because weights and keys have evicted them since the previous layer."""
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(PAIRS, 32))
    at_RL = tl.where(mask_R, tokens_R, 0).to(tl.int64)[:, None] * PAIRS
    at_RL += tl.minimum(tl.arange(0, LINES) * 32, PAIRS - 1)[None, :]
    prefetch(cos_ptr + at_RL)
    prefetch(sin_ptr + at_RL)


@triton.jit
def turn(first_RP, second_RP, cos_RP, sin_RP, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Turns each pair; returns both channels in `dtype`."""
    turned_first_RP = first_RP * cos_RP - second_RP * sin_RP
    turned_second_RP = second_RP * cos_RP + first_RP * sin_RP
    return round_to(turned_first_RP, dtype, INTERPRETED), round_to(turned_second_RP, dtype, INTERPRETED)


@triton.jit
def cache_places(slots_ptr, tokens_R, mask_R, num_slots, stride_B, stride_N, BLOCK_SIZE: tl.constexpr):
    """Returns each row's offset in the cache (in elements, int64), and whether its token has a place there."""
    slots_R = tl.load(slots_ptr + tokens_R, mask=mask_R & (tokens_R < num_slots), other=-1)
    # Dividing 32-bit numbers is cheaper, and slots do not reach 2**31.
    blocks_R = slots_R.to(tl.int32) // BLOCK_SIZE
    offsets_R = slots_R.to(tl.int32) % BLOCK_SIZE
    return blocks_R.to(tl.int64) * stride_B + offsets_R.to(tl.int64) * stride_N, slots_R >= 0


@triton.jit
def for_cache(values, dtype: tl.constexpr, scale_ptr, INTERPRETED: tl.constexpr):
    """Converts numbers of a model's dtype to the cache's dtype; without a pointer the scale is 1."""
    values = values.to(tl.float32)
    if dtype == tl.float8e4nv or dtype == tl.float8e5:
        if scale_ptr is not None:
            values = tl.div_rn(values, tl.load(scale_ptr))
        return to_fp8(values, dtype, INTERPRETED)
    return round_to(values, dtype, INTERPRETED)
