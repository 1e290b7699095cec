"""Products of few rows, which take as long as reading the weight does: `x @ weight.T + bias` in 16 bits, summed in
float32 and rounded once.

A library starts its kernels one behind the other, so that memory idles between them and while each begins. Here each
is started while the one before it runs, brings its first weights to the L2 cache and only then waits for its input.
The twin is `torch.nn.functional.linear`. Legend: M tokens, N rows of the weight, K channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import interpreted, overlap
from models.kernels.decode_matmul_kernel import multiply_few_rows

# More tokens than this are the library's.
MAX_TOKENS = 128
# The fewest rows of a tile: as many counters a weight needs at most.
_MIN_TILE_ROWS = 64
# A program that has fewer steps than this spends its time on beginning and ending.
_MIN_STEPS = 4
# Of partial sums while they are added up: more would not fit the registers.
_SUMS_PER_THREAD = 128
_DTYPES = (torch.bfloat16, torch.float16)


class Tile(NamedTuple):
    """What programs compute, and how many of them.

    Attributes:
        tokens: of the result; holds all there are.
        rows: of the weight, `depth` channels at a time, `num_stages` of which are on their way.
        per_sm: programs per multiprocessor, which share all tiles evenly.
        splits: not None: so many programs share each tile instead.
        prefetched: steps whose weights go to the L2 cache early, a power of two or 0.
    """

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int
    per_sm: int = 1
    splits: int | None = None
    prefetched: int = 4


# By tokens.
_TILES = (
    Tile(16, 64, 128, num_warps=4, num_stages=5, per_sm=2),
    Tile(32, 128, 64, num_warps=4, num_stages=4, per_sm=2),
    Tile(64, 128, 64, num_warps=4, num_stages=4, per_sm=2),
    Tile(128, 128, 64, num_warps=8, num_stages=4, per_sm=1),
)


def choose(num_tokens: int, rows: int, channels: int) -> Tile | None:
    """None: the library is as fast."""
    if num_tokens > MAX_TOKENS or rows * channels < 1 << 20:
        return None
    return next(tile for tile in _TILES if num_tokens <= tile.tokens)


def num_programs(tile: Tile, rows: int, channels: int, num_sms: int) -> int:
    """Of a launch; each has a step at least."""
    tiles, steps = -(-rows // tile.rows), -(-channels // tile.depth)
    if tile.splits is not None:
        return tiles * min(tile.splits, steps)
    return max(1, min(tile.per_sm * num_sms, tiles * steps // _MIN_STEPS))


@dataclass(frozen=True, eq=False)
class DecodeMultiply:
    """A `models.linear.Multiply` of one weight. Launches must not overlap.

    Attributes:
        arrived: int32 zeros, one for every 64 rows of the weight; every launch leaves zeros.
    """

    arrived: Tensor
    num_sms: int

    @classmethod
    def for_weight(cls, weight_NK: Tensor) -> "DecodeMultiply | None":
        """None where nothing is gained over `linear`: not a Hopper GPU, another dtype, or rows that it cannot copy."""
        if weight_NK.device.type != "cuda" or torch.cuda.get_device_capability(weight_NK.device) != (9, 0):
            return None
        if not _copyable(weight_NK) or not weight_NK.is_contiguous():
            return None
        num_sms = torch.cuda.get_device_properties(weight_NK.device).multi_processor_count
        return cls(new_counters(weight_NK), num_sms)

    def __call__(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        x_MK = x if x.dim() == 2 else x.flatten(0, -2)
        num_tokens = x_MK.shape[0]
        tile = choose(num_tokens, *weight_NK.shape) if num_tokens else None
        if tile is None or x.dtype != weight_NK.dtype or not _copyable(x_MK):
            return linear(x, weight_NK, bias_N)
        out_MN = multiply(x_MK, weight_NK, bias_N, self.arrived, tile, num_sms=self.num_sms)
        return out_MN if x.dim() == 2 else out_MN.view(*x.shape[:-1], weight_NK.shape[0])


def new_counters(weight_NK: Tensor) -> Tensor:
    return torch.zeros(triton.cdiv(weight_NK.shape[0], _MIN_TILE_ROWS), dtype=torch.int32, device=weight_NK.device)


def multiply(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    arrived: Tensor,
    tile: Tile,
    *,
    num_sms: int,
) -> Tensor:
    """The kernel. Sums of a tile that several programs share are added up in the order of the programs, so that the
    same call has the same bits every time; another number of tokens may have others.

    Args:
        x_MK: at most `tile.tokens` rows, which are adjacent in memory or 16 bytes' multiples apart.
    """
    num_tokens, channels = x_MK.shape
    rows = weight_NK.shape[0]
    assert 0 < num_tokens <= tile.tokens
    assert tile.rows >= _MIN_TILE_ROWS
    out_MN = torch.empty(num_tokens, rows, dtype=x_MK.dtype, device=x_MK.device)
    programs = num_programs(tile, rows, channels, num_sms)
    tiles = triton.cdiv(rows, tile.rows)
    streamed = tile.splits is None and programs % tiles != 0
    partial = None
    if programs != tiles:
        places = (1 + streamed) * programs
        partial = torch.empty(places, tile.rows, tile.tokens, dtype=torch.float32, device=x_MK.device)
    multiply_few_rows[(programs,)](
        TensorDescriptor.from_tensor(x_MK, [tile.tokens, tile.depth]),
        TensorDescriptor.from_tensor(weight_NK, [tile.rows, tile.depth]),
        weight_NK,
        bias_N,
        out_MN,
        partial,
        arrived,
        num_tokens,
        rows,
        channels,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        STREAMED=streamed,
        AT_ONCE=max(1, min(4, _SUMS_PER_THREAD * 32 * tile.num_warps // (tile.rows * tile.tokens))),
        PREFETCHED=tile.prefetched,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap(x_MK.device),
    )
    return out_MN


def _copyable(matrix: Tensor) -> bool:
    """Whether the copy engine reads it."""
    return (
        matrix.dtype in _DTYPES
        and matrix.dim() == 2
        and matrix.stride(1) == 1
        and matrix.stride(0) % 8 == 0
        and matrix.shape[1] % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )
