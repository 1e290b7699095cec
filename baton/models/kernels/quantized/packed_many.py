"""Products of many rows with weights of 4 bits on Hopper: what launches
`baton.models.kernels.quantized.packed_hopper_many`.

Legend: T token, K input channel, N output channel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.formats.packed import RUN, PackedWeight
from baton.tritonlib.launch import await_predecessors, overlap, start_dependents

# On an H200, us of the four products of a layer of Llama-3.1-8B with groups of 128, and the same of the kernel for few
# rows or of the library: 8 tokens 66 and 66, 16 tokens 67 and 82, 32 tokens 92 and 117, 64 tokens 119 and 232, 128
# tokens 170 and 375, 256 tokens 276 and 556, 1024 tokens 896 and 987, 2048 tokens 1824 and 1613.
MANY_TOKENS, MOST_TOKENS = 9, 1024
_RUN = tl.constexpr(RUN)
_BLOCK = 1024  # inputs that a program puts in order


class PackedTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        programs_per_sm: programs that share tiles until each multiprocessor has as many.
        least_steps: of a program that shares a tile.
    """

    tokens: int
    programs_per_sm: int = 1
    least_steps: int = 4


def choose_tile(num_tokens: int) -> PackedTile:
    """The tile for this number of tokens."""
    if num_tokens <= 32:
        return PackedTile(16 if num_tokens <= 16 else 32, programs_per_sm=2)
    return PackedTile(64 if num_tokens <= 64 else 128)


def multiply_many(
    x_TK: Tensor,
    weight: PackedWeight,
    bias_N: Tensor | None,
    *,
    step: int,
    arrived: Tensor,
    num_sms: int,
    tile: PackedTile | None = None,
    splits: int | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, rounded once.

    Args:
        x_TK: bfloat16, inputs in their own order; a row's are next to each other.
        step: inputs of one step, 64 or 128, which have one scale; a divisor of K.
        arrived: int32 zeros, which the launch leaves, for tiles that programs share.
        tile, splits: programs that share a tile; None: chosen by the shapes. Tests pass others.
    """
    # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from baton.models.kernels.quantized.packed_hopper_many import ROWS, STAGES, WARPS, multiply_many_rows

    num_tokens, rows = x_TK.shape[0], weight.stored_NB.shape[0]
    out_TN = torch.empty(num_tokens, rows, dtype=x_TK.dtype, device=x_TK.device)
    if not num_tokens:
        return out_TN
    tile = choose_tile(num_tokens) if tile is None else tile
    row_tiles, token_tiles = triton.cdiv(rows, ROWS), triton.cdiv(num_tokens, tile.tokens)
    tiles, steps = row_tiles * token_tiles, weight.columns // step
    if splits is None:
        splits = min(tile.programs_per_sm * num_sms // tiles, steps // tile.least_steps)
    splits = 1 if tiles > len(arrived) else max(1, min(splits, steps))
    partial = None
    if splits > 1:
        partial = torch.empty(tiles * splits, ROWS, tile.tokens, dtype=torch.float32, device=x_TK.device)
    boxes = [tile.tokens, step], [ROWS, step // 2]
    multiply_many_rows[(tiles * splits,)](
        TensorDescriptor.from_tensor(
            in_order(x_TK, weight.order_K, step=step),
            boxes[0],
            gl.NVMMASharedLayout.get_default_for(boxes[0], gl.bfloat16),
        ),
        TensorDescriptor.from_tensor(
            weight.stored_NB, boxes[1], gl.NVMMASharedLayout.get_default_for(boxes[1], gl.uint8)
        ),
        weight.scales_GN,
        weight.zeros_GN,
        bias_N,
        out_TN,
        partial,
        arrived,
        num_tokens,
        rows,
        token_tiles,
        splits,
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        TOKENS=tile.tokens,
        STEP=step,
        STAGES=STAGES,
        **overlap(x_TK.device, rows=num_tokens),
        num_warps=WARPS,
    )
    return out_TN


def in_order(x_TK: Tensor, order_K: Tensor | None, *, step: int) -> Tensor:
    """The activations in the order in which `packed_hopper_many` multiplies the weight's numbers: of each step's inputs
    those of the low halves before those of the high ones, and of every 32 bytes' four from each thread's first four,
    four from each thread's last four.

    Args:
        order_K: which input each column of the weight multiplies, int64; None: they are in order.
    """
    num_tokens, columns = x_TK.shape
    out_TK = torch.empty(num_tokens, columns, dtype=x_TK.dtype, device=x_TK.device)
    if num_tokens:
        grid = num_tokens, triton.cdiv(columns, _BLOCK)
        order = overlap(x_TK.device, rows=num_tokens)
        _order_kernel[grid](
            x_TK, order_K, out_TK, columns, x_TK.stride(0), STEP=step, BLOCK=_BLOCK, **order, num_warps=4
        )
    return out_TK


@triton.jit
def _order_kernel(
    x_ptr,
    order_ptr,
    out_ptr,
    num_columns,
    x_stride,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    places_K = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_K = places_K < num_columns
    in_step_K = places_K % STEP
    half_K, byte_K = in_step_K // (STEP // 2), in_step_K % (STEP // 2)
    # A product's 16 inputs are two of each thread's first, then two more of each; thread, product, pair, one of it.
    byte_K = byte_K // 32 * 32 + byte_K // 2 % 4 * 8 + byte_K // 16 % 2 * 4 + byte_K // 8 % 2 * 2 + byte_K % 2
    inputs_K = places_K - in_step_K + byte_K // _RUN * (2 * _RUN) + byte_K % _RUN + half_K * _RUN
    if order_ptr is not None:
        inputs_K = tl.load(order_ptr + inputs_K, mask=in_K, other=0)
    await_predecessors(OVERLAP)
    x_K = tl.load(x_ptr + row * x_stride + inputs_K, mask=in_K, other=0.0)
    tl.store(out_ptr + row * num_columns + places_K, x_K, mask=in_K)
