"""Multiplies each head's few rows by a weight that is read once: `x @ weight` in 16 bits, summed in float32 and rounded
once.

The absorbed products of latent decodes are so short that starting one after the other wastes time. So a program loads
its tile of the weight into shared memory while the previous kernel runs, and only then waits for its input. The twin is
`torch.bmm`. Legend: H heads, T tokens, I inputs, O outputs.

On an H200, W_UK and W_UV of a layer, one product after the other: 16 heads and 1 token 1.4 and 1.7 us, torch's 3.4 and
3.9; 32 tokens 2.0 and 2.4, torch's 3.5 and 3.9; 128 heads and 1 token 5.0 and 5.5, torch's 7.2 and 7.2; 32 tokens 6.6
and 6.6, torch's 7.9 and 7.4.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

# torch multiplies if there are more tokens than this, or more inputs, for which tiles would be too narrow.
MAX_TOKENS = 32
_MAX_INPUTS = 512
# Largest tile in bytes; several programs of this size share a multiprocessor.
_MAX_BYTES = 64 << 10
# A layer's attention of 1 token takes 16.1 us with these, 16.4 with tiles of 16 and twice as many programs.
_MIN_OUTPUTS = 32
_DTYPES = (torch.bfloat16, torch.float16)


class HeadTile(NamedTuple):
    """The part of the result that a program computes: some outputs of one head, over all inputs."""

    outputs: int
    num_warps: int


def choose(num_heads: int, num_inputs: int, num_outputs: int, num_sms: int) -> HeadTile:
    """Chooses about one tile per multiprocessor: more where tiles would be too large, fewer where too small."""
    outputs = triton.next_power_of_2(triton.cdiv(num_heads * num_outputs, num_sms))
    largest = _MAX_BYTES // (2 * triton.next_power_of_2(num_inputs))
    return HeadTile(max(_MIN_OUTPUTS, min(outputs, largest, triton.next_power_of_2(num_outputs))), num_warps=4)


@dataclass(frozen=True, eq=False)
class HeadProducts:
    """The kernel as an implementation of `attention.mla.MultiplyHeads`."""

    num_sms: int

    @classmethod
    def for_weight(cls, weight: Tensor) -> "HeadProducts | None":
        """Returns None where `torch.bmm` is as fast, which includes GPUs other than Hopper and other dtypes.

        Args:
            weight: the memory that holds all heads' weights.
        """
        if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) != (9, 0):
            return None
        if weight.dtype not in _DTYPES:
            return None
        return cls(torch.cuda.get_device_properties(weight.device).multi_processor_count)

    def __call__(self, x_HTI: Tensor, weight_HIO: Tensor, out_HTO: Tensor) -> None:
        num_heads, num_tokens, num_inputs = x_HTI.shape
        if num_tokens > MAX_TOKENS or x_HTI.dtype != weight_HIO.dtype or not copyable(weight_HIO):
            torch.bmm(x_HTI, weight_HIO, out=out_HTO)
        elif num_tokens:
            tile = choose(num_heads, num_inputs, weight_HIO.shape[2], self.num_sms)
            multiply_heads(x_HTI, weight_HIO, out_HTO, tile)


def multiply_heads(x_HTI: Tensor, weight_HIO: Tensor, out_HTO: Tensor, tile: HeadTile) -> None:
    """Launches the kernel for 1 to MAX_TOKENS tokens. A row's result is the same alone and among the rows of a block.

    Args:
        weight_HIO: adjacent along inputs or outputs, and readable by the copy engine.
    """
    num_heads, num_tokens, num_inputs = x_HTI.shape
    num_outputs = weight_HIO.shape[2]
    assert 0 < num_tokens <= MAX_TOKENS
    inputs_adjacent = weight_HIO.stride(1) == 1
    block_i = max(16, triton.next_power_of_2(num_inputs))
    # A warpgroup multiplies 64 outputs by at least 16 tokens; fewer outputs take one warp, with 8 tokens.
    least_tokens = 16 if tile.outputs >= 64 else 8
    multiply_few_rows_of_heads[(num_heads * triton.cdiv(num_outputs, tile.outputs),)](
        x_HTI,
        TensorDescriptor.from_tensor(weight_HIO.transpose(1, 2), [1, tile.outputs, block_i])
        if inputs_adjacent
        else TensorDescriptor.from_tensor(weight_HIO, [1, block_i, tile.outputs]),
        out_HTO,
        num_tokens,
        *x_HTI.stride(),
        *out_HTO.stride(),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        INPUTS_ADJACENT=inputs_adjacent,
        BLOCK_T=max(least_tokens, triton.next_power_of_2(num_tokens)),
        BLOCK_I=block_i,
        BLOCK_O=tile.outputs,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        **overlap(x_HTI.device, rows=num_tokens),
    )


def copyable(weight_HIO: Tensor) -> bool:
    """Whether the copy engine can read the weight in tiles of all inputs."""
    stride_H, stride_I, stride_O = weight_HIO.stride()
    return (
        weight_HIO.dtype in _DTYPES
        and weight_HIO.shape[1] <= _MAX_INPUTS
        and stride_H % 8 == 0
        and 1 in (stride_I, stride_O)
        and max(stride_I, stride_O) % 8 == 0
        and weight_HIO.data_ptr() % 16 == 0
    )


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_few_rows_of_heads(
    x_ptr,
    weight_map,
    out_ptr,
    num_tokens,
    x_stride_H,
    x_stride_T,
    x_stride_I,
    out_stride_H,
    out_stride_T,
    out_stride_O,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS_ADJACENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes BLOCK_O outputs of one head. Outputs are the product's rows, because the tensor cores' rows come in 64s
    or 16s and their columns in 8s."""
    start_dependents(OVERLAP)
    tiles: tl.constexpr = (OUTPUTS + BLOCK_O - 1) // BLOCK_O
    head = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_O
    # Numbers past the last input or output are read as 0.
    if INPUTS_ADJACENT:
        weight_OI = weight_map.load([head, first, 0]).reshape(BLOCK_O, BLOCK_I)
    else:
        weight_OI = weight_map.load([head, 0, first]).reshape(BLOCK_I, BLOCK_O).T
    await_predecessors(OVERLAP)
    tokens_T = tl.arange(0, BLOCK_T)
    inputs_I = tl.arange(0, BLOCK_I)
    exists_T = tokens_T < num_tokens
    x_T = x_ptr + head.to(tl.int64) * x_stride_H + tokens_T.to(tl.int64) * x_stride_T
    x_TI = tl.load(
        x_T[:, None] + (inputs_I * x_stride_I)[None, :],
        mask=exists_T[:, None] & (inputs_I < INPUTS)[None, :],
        other=0.0,
    )
    if INTERPRETED:
        weight_OI = weight_OI.to(tl.float32)
        x_TI = x_TI.to(tl.float32)
    sum_OT = tl.dot(weight_OI, x_TI.T)
    outputs_O = first + tl.arange(0, BLOCK_O)
    out_T = out_ptr + head.to(tl.int64) * out_stride_H + tokens_T.to(tl.int64) * out_stride_T
    tl.store(
        out_T[None, :] + (outputs_O * out_stride_O)[:, None],
        round_to(sum_OT, out_ptr.dtype.element_ty, INTERPRETED),
        mask=(outputs_O < OUTPUTS)[:, None] & exists_T[None, :],
    )
