"""Reads tokens of one layer of the paged cache into adjacent memory. The twin is the CPU half of `gather_tokens`.

A program takes consecutive rows; a row is a piece of one token's adjacent channels, and all rows have one size.

Legend: S tokens to read, R requests, K key and value, H heads, C channels, B N a block and a token in it, P rows, E
elements of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.fp8 import from_fp8, scale_of
from baton.tritonlib.launch import interpreted

# Elements that one program moves, and the most in a row.
_TILE = 2048
_ROW = 1024
_NUM_WARPS = 1


def gather_slots(
    kv_layer: Tensor, slots_S: Tensor, *, out_KSHC: Tensor, scale: Tensor | None = None, v_scale: Tensor | None = None
) -> None:
    """Copies the tokens of these slots, int64, in their order; from an fp8 cache, `number * scale`.

    Args:
        out_KSHC: any strides, channels adjacent; numbers are converted to its dtype.
        scale, v_scale: float32 scalars for k = 0 and k = 1; None is 1.
    """
    _launch(kv_layer, slots_S, None, None, None, slots_S.shape[0], out_KSHC, scale, v_scale)


def gather_ranges(
    kv_layer: Tensor,
    block_table_RB: Tensor,
    start_loc_R: Tensor,
    first_position_R: Tensor,
    num_tokens: int,
    *,
    out_KSHC: Tensor,
    scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copies like `gather_slots`, for consecutive tokens of several requests, request after request.

    Args:
        block_table_RB: int32.
        start_loc_R: [R + 1] int32, where each request's tokens begin in `out_KSHC`; ends with `num_tokens`.
        first_position_R: [R] int32, the position of each request's first token.
    """
    _launch(kv_layer, None, block_table_RB, start_loc_R, first_position_R, num_tokens, out_KSHC, scale, v_scale)


def _launch(
    kv_layer: Tensor,
    slots_S: Tensor | None,
    block_table_RB: Tensor | None,
    start_loc_R: Tensor | None,
    first_position_R: Tensor | None,
    num_tokens: int,
    out_KSHC: Tensor,
    scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    num_k, _, block_size, num_heads, channels = kv_layer.shape
    if num_tokens == 0:
        return
    run = channels
    if kv_layer.stride(3) == out_KSHC.stride(2) == channels:
        run, num_heads = num_heads * channels, 1
    elements = min(run & -run, _ROW)
    rows_of_token = num_heads * (run // elements)
    grid = (triton.cdiv(num_tokens * rows_of_token, _TILE // elements), num_k)
    _gather_kernel[grid](
        kv_layer,
        out_KSHC,
        slots_S,
        block_table_RB,
        start_loc_R,
        first_position_R,
        scale,
        v_scale,
        num_tokens,
        0 if first_position_R is None else first_position_R.shape[0],
        0 if block_table_RB is None else block_table_RB.stride(0),
        *kv_layer.stride()[:4],
        *out_KSHC.stride()[:3],
        NUM_HEADS=num_heads,
        PIECES=run // elements,
        BLOCK_SIZE=block_size,
        ROWS=_TILE // elements,
        ELEMENTS=elements,
        INTERPRETED=interpreted(),
        num_warps=_NUM_WARPS,
    )


# NOTE: not specialised, because with one request Triton 3.6 does not compile the bisection.
@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _gather_kernel(
    layer_ptr,
    out_ptr,
    slots_ptr,
    table_ptr,
    start_loc_ptr,
    first_position_ptr,
    scale_ptr,
    v_scale_ptr,
    num_tokens,
    num_reqs,
    table_stride,
    stride_K,
    stride_B,
    stride_N,
    stride_H,
    out_stride_K,
    out_stride_S,
    out_stride_H,
    NUM_HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    k = tl.program_id(1).to(tl.int64)
    rows_P = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens_P = rows_P // (NUM_HEADS * PIECES)
    heads_P = rows_P // PIECES % NUM_HEADS
    read_P = tokens_P < num_tokens
    if slots_ptr is not None:
        slots_P = tl.load(slots_ptr + tokens_P, mask=read_P, other=0).to(tl.int32)
        blocks_P = slots_P // BLOCK_SIZE
        offsets_P = slots_P % BLOCK_SIZE
    else:
        requests_P = _request_of(start_loc_ptr, num_reqs, tokens_P)
        starts_P = tl.load(start_loc_ptr + requests_P)
        positions_P = tl.load(first_position_ptr + requests_P) + tokens_P - starts_P
        entries_P = requests_P.to(tl.int64) * table_stride + positions_P // BLOCK_SIZE
        blocks_P = tl.load(table_ptr + entries_P, mask=read_P, other=0)
        offsets_P = positions_P % BLOCK_SIZE
    in_token_P = rows_P % PIECES * ELEMENTS
    from_P = blocks_P.to(tl.int64) * stride_B + offsets_P * stride_N + heads_P * stride_H + in_token_P
    into_P = tokens_P.to(tl.int64) * out_stride_S + heads_P * out_stride_H + in_token_P
    elements_E = tl.arange(0, ELEMENTS)
    from_PE = layer_ptr + k * stride_K + from_P[:, None] + elements_E[None, :]
    into_PE = out_ptr + k * out_stride_K + into_P[:, None] + elements_E[None, :]
    values_PE = tl.load(from_PE, mask=read_P[:, None])
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    stored: tl.constexpr = layer_ptr.dtype.element_ty
    if dtype != stored and (stored == tl.float8e4nv or stored == tl.float8e5):
        values_PE = from_fp8(values_PE, INTERPRETED) * scale_of(k, scale_ptr, v_scale_ptr)
    tl.store(into_PE, values_PE.to(dtype), mask=read_P[:, None])


@triton.jit
def _request_of(start_loc_ptr, num_reqs, tokens_P):
    """Each token's request, by bisection."""
    low_P = tl.zeros_like(tokens_P)
    high_P = low_P + num_reqs
    span = num_reqs
    while span > 1:
        middle_P = (low_P + high_P) // 2
        is_before_P = tl.load(start_loc_ptr + middle_P) <= tokens_P
        low_P = tl.where(is_before_P, middle_P, low_P)
        high_P = tl.where(is_before_P, high_P, middle_P)
        span = (span + 1) // 2
    return low_P
