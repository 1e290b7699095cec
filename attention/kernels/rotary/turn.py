"""Turns the heads of one tensor in place, in one launch, for the queries and the key of an indexer. The twin is
`attention.rotation.Rotation.apply`.

Legend: T tokens, H heads, D channels of a head, P pairs of rotary channels, R rows (a head of a token each).
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.rotary.channel_pairs import NUM_WARPS, TILE_PAIRS
from attention.kernels.rotary.heads import norm_and_turn
from attention.rotation import Rotation
from baton.tritonlib.launch import interpreted


def turn_heads(x_THD: Tensor, rotation: Rotation) -> None:
    """Turns the first 2 P channels of each head; heads of a token are contiguous."""
    num_tokens, num_heads, head_dim = x_THD.shape
    if num_tokens == 0:
        return
    rows = max(1, 2 * TILE_PAIRS // triton.next_power_of_2(head_dim))
    _turn_heads[(triton.cdiv(num_tokens * num_heads, rows),)](
        x_THD,
        rotation.cos_TP,
        rotation.sin_TP,
        num_tokens,
        x_THD.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAIRS=rotation.cos_TP.shape[1],
        INTERLEAVED=rotation.interleaved,
        ROWS=rows,
        BLOCK_P=triton.next_power_of_2(rotation.cos_TP.shape[1]),
        INTERPRETED=interpreted(),
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _turn_heads(
    x_ptr,
    cos_ptr,
    sin_ptr,
    num_tokens,
    stride_T,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens_R = rows_R // NUM_HEADS
    mask_R = tokens_R < num_tokens
    ptrs_R = x_ptr + tokens_R.to(tl.int64) * stride_T + (rows_R % NUM_HEADS) * HEAD_DIM
    norm_and_turn(
        ptrs_R, None, cos_ptr, sin_ptr, None, None, None, tokens_R, mask_R, 0.0,
        0, HEAD_DIM, PAIRS, BLOCK_P, INTERLEAVED, INTERPRETED, False,
    )  # fmt: skip
