"""Writes a batch's new tokens into one layer of the cache. The twin is the CPU half of `store_kv`.

Legend: T tokens, H heads, C channels, B N a block and a token in it.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.fp8 import to_fp8
from baton.tritonlib.launch import interpreted

# Elements that one program writes: twice 16 bytes of bf16 in each of 128 threads.
_TILE = 2048
_NUM_WARPS = 4
# Below this many elements programs are smaller, so that more multiprocessors get one.
_SMALL = 1 << 21


def store(
    first_THC: Tensor,
    second_THC: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    *,
    second_offset: int,
    first_scale: Tensor | None = None,
    second_scale: Tensor | None = None,
) -> None:
    """Writes row t of both sources to slot_mapping[t] of a layer; to an fp8 layer, `number / scale`.

    Skips rows without a slot, slots without a row, and rows with a negative slot. The sources are keys and values, or
    latents and rotary parts: any two with equally many heads, channels adjacent.

    Args:
        kv_layer: [K, B, N, H, C].
        slot_mapping: int64.
        second_offset: elements in the layer between the first source's place and the second's.
        first_scale, second_scale: float32 scalars; None is 1.
    """
    num_tokens = min(first_THC.shape[0], slot_mapping.shape[0])
    num_heads, channels = first_THC.shape[1:]
    widest = num_heads * max(channels, second_THC.shape[2])
    if num_tokens == 0:
        return
    elements = min(triton.next_power_of_2(widest), _TILE)
    tokens = _TILE // elements if num_tokens * widest > _SMALL else max(1, _TILE // 4 // elements)
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(widest, elements), 2)
    _store_kernel[grid](
        first_THC,
        second_THC,
        kv_layer,
        slot_mapping,
        first_scale,
        second_scale,
        num_tokens,
        second_offset,
        *first_THC.stride()[:2],
        *second_THC.stride()[:2],
        *kv_layer.stride()[1:4],
        NUM_HEADS=num_heads,
        FIRST_CHANNELS=channels,
        SECOND_CHANNELS=second_THC.shape[2],
        BLOCK_SIZE=kv_layer.shape[2],
        TOKENS=tokens,
        ELEMENTS=elements,
        INTERPRETED=interpreted(),
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    first_ptr,
    second_ptr,
    layer_ptr,
    slots_ptr,
    first_scale_ptr,
    second_scale_ptr,
    num_tokens,
    second_offset,
    first_stride_T,
    first_stride_H,
    second_stride_T,
    second_stride_H,
    stride_B,
    stride_N,
    stride_H,
    NUM_HEADS: tl.constexpr,
    FIRST_CHANNELS: tl.constexpr,
    SECOND_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots_T = tl.load(slots_ptr + rows_T, mask=rows_T < num_tokens, other=-1)
    # A division of 32 bits is cheaper, and slots do not reach 2**31.
    blocks_T = slots_T.to(tl.int32) // BLOCK_SIZE
    offsets_T = slots_T.to(tl.int32) % BLOCK_SIZE
    into_T = blocks_T.to(tl.int64) * stride_B + offsets_T * stride_N
    written_T = slots_T >= 0
    if tl.program_id(2) == 0:
        _store_tile(
            first_ptr + rows_T.to(tl.int64) * first_stride_T,
            first_stride_H,
            layer_ptr + into_T,
            stride_H,
            written_T,
            first_scale_ptr,
            NUM_HEADS,
            FIRST_CHANNELS,
            ELEMENTS,
            INTERPRETED,
        )
    else:
        _store_tile(
            second_ptr + rows_T.to(tl.int64) * second_stride_T,
            second_stride_H,
            layer_ptr + second_offset + into_T,
            stride_H,
            written_T,
            second_scale_ptr,
            NUM_HEADS,
            SECOND_CHANNELS,
            ELEMENTS,
            INTERPRETED,
        )


@triton.jit
def _store_tile(
    from_ptrs_T,
    from_stride_H,
    into_ptrs_T,
    into_stride_H,
    written_T,
    scale_ptr,
    NUM_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    elements_E = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    heads_E = elements_E // CHANNELS
    channels_E = elements_E % CHANNELS
    written_TE = written_T[:, None] & (elements_E < NUM_HEADS * CHANNELS)[None, :]
    from_ptrs_TE = from_ptrs_T[:, None] + (heads_E * from_stride_H + channels_E)[None, :]
    into_ptrs_TE = into_ptrs_T[:, None] + (heads_E * into_stride_H + channels_E)[None, :]
    values_TE = tl.load(from_ptrs_TE, mask=written_TE)
    dtype: tl.constexpr = into_ptrs_T.dtype.element_ty
    if dtype == tl.float8e4nv or dtype == tl.float8e5:
        values_TE = values_TE.to(tl.float32)
        if scale_ptr is not None:
            values_TE = tl.div_rn(values_TE, tl.load(scale_ptr))
        tl.store(into_ptrs_TE, to_fp8(values_TE, dtype, INTERPRETED), mask=written_TE)
    else:
        tl.store(into_ptrs_TE, values_TE.to(dtype), mask=written_TE)
