"""Which keys a worker reads of a request, and asking for the first of them ahead of time. Knows the plan, no queries.

Legend: L lines of L2, of all keys.
"""

import triton
import triton.language as tl

from attention.kernels.decode.plan import first_visible_key, unit_keys_of
from tritonlib.launch import prefetch

# Asked for while the kernel in front still runs: as many as the loop over them has in flight.
_TILES_AHEAD = tl.constexpr(2)


@triton.jit
def keys_of(
    unit,
    run_stop,
    first_unit,
    seq_len,
    window,
    chunk,
    TILE_KEYS: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
    MAX_UNITS: tl.constexpr,
):
    """Of the units from `unit` up to `run_stop`: the first key that the query sees at all, the first one to load, and
    the one behind the last."""
    first_key = first_visible_key(seq_len, window, chunk)
    unit_keys = unit_keys_of(seq_len, first_key, UNIT_KEYS, MAX_UNITS) if MAX_UNITS else UNIT_KEYS
    unit_zero = first_key // unit_keys - first_unit
    start = tl.maximum((unit_zero + unit) * unit_keys, first_key // TILE_KEYS * TILE_KEYS)
    return first_key, start, tl.minimum((unit_zero + run_stop) * unit_keys, seq_len)


@triton.jit
def prefetch_keys(
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    key_stop,
    any_keys,
    stride_kv_b,
    stride_kv_n,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """The first tiles' keys and values into L2, the newest token's as well, though it may not have been written yet."""
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_SIZE, LINE))
    lines_L = tl.arange(0, _TILES_AHEAD * TILE_KEYS * LINES)
    keys_L = tl.where(any_keys, tl.minimum(start + lines_L // LINES, key_stop - 1), 0)
    blocks_L = tl.load(table_ptr + keys_L // BLOCK_SIZE, mask=any_keys, other=0)
    places_L = blocks_L.to(tl.int64) * stride_kv_b + keys_L % BLOCK_SIZE * stride_kv_n
    places_L += tl.minimum(lines_L % LINES * LINE, HEAD_SIZE - 1)
    prefetch(k_ptr + places_L)
    prefetch(v_ptr + places_L)
