"""Products of few rows, bound by reading the weight: `x @ weight.T + bias` in 16 bits, summed in float32 and rounded
once.

A library starts its kernels one after the other, so memory idles between them and while each begins. Here each kernel
starts while the previous one runs, loads its first weights into the L2 cache and only then waits for its input. The
twin is `torch.nn.functional.linear`.

Weight rows are a product's rows and tokens its columns, because the tensor cores' rows come in 64s and their columns in
8s. A step is one block of a tile's channels. Legend: M tokens, N rows of the weight, K channels, P steps prefetched.

On an H200, the products of a layer of Llama-3.1-8B with its norms: 1 token 118.7 us, the library's 122.7; 16 tokens
120.4 and 126.0; 32 tokens 123.3 and 129.5; 64 tokens 146.3 and 133.1. Its head: 1 token 237 us, the library's 249; 32
tokens 249 and 267; 64 tokens 259 and 283.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.models.kernels.matmul.split_sums import leave_part
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

# The library multiplies more tokens than this.
MAX_TOKENS = 64
# Up to this many tokens the kernel takes weights of all sizes; beyond, only the largest, such as a head's.
_MAX_TOKENS_OF_MOST = 32
_LARGEST_BYTES = 256 << 20
# Products that read less take under 10 us. The library is faster there unless several programs share a tile: in a step
# of DeepSeek-V2-Lite of one token, 3648 x 2048 takes 2 us less that way.
_SHORT_BYTES = 32 << 20
_MIN_BYTES = 2 << 20
# Fewest rows of a tile; a weight needs one counter for this many rows.
_MIN_TILE_ROWS = 64
# A program with fewer steps than this spends its time on startup and end.
_MIN_STEPS = 4
_DTYPES = (torch.bfloat16, torch.float16)
# Partial sums that are in flight at once while they are added up.
_AT_ONCE = tl.constexpr(4)


class DecodeTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        tokens: of the result; at least the batch's number.
        rows: of the weight, read `depth` channels at a time; `num_stages` such reads are in flight.
        splits: number of programs that share each tile, at most one per step.
        prefetched: steps whose weights go to the L2 cache early, a power of two or 0.
    """

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1
    prefetched: int = 0


def choose(num_tokens: int, rows: int, channels: int, num_sms: int) -> DecodeTile | None:
    """Returns the tile for a product; None where the library is as fast. Each multiprocessor has 48 to 160 KiB of
    weights in flight."""
    num_bytes = rows * channels * 2
    if num_tokens > MAX_TOKENS or num_bytes < _MIN_BYTES:
        return None
    if num_tokens > _MAX_TOKENS_OF_MOST:
        return DecodeTile(64, 128, 64, num_warps=4, num_stages=4) if num_bytes >= _LARGEST_BYTES else None
    tiles = triton.cdiv(rows, 64)
    if tiles > num_sms:
        return _of_many_rows(num_tokens, tiles, num_sms)
    return _of_few_rows(num_tokens, tiles, channels, num_sms)


def _of_many_rows(num_tokens: int, tiles: int, num_sms: int) -> DecodeTile:
    """Returns tiles that fill the GPU, two or three per multiprocessor. Prefetching is off, because it would be too
    early."""
    if num_tokens > 16:
        return DecodeTile(32, 64, 128, num_warps=4, num_stages=4)
    # Where a multiprocessor has room for all its tiles, three stages are faster than five: 384 tiles take 50.8 us
    # instead of 52.8, 192 tiles of 2048 channels 14.9 instead of 17.1, 144 of them 12.7 instead of 15.3.
    all_at_once = tiles <= 3 * num_sms
    return DecodeTile(16, 64, 128, num_warps=4, num_stages=3 if all_at_once else 5)


def _of_few_rows(num_tokens: int, tiles: int, channels: int, num_sms: int) -> DecodeTile | None:
    """Returns tiles for one program per multiprocessor; programs share tiles where there are fewer tiles."""
    num_bytes = tiles * 64 * channels * 2
    depth = 256 if num_tokens <= 16 and 2 * tiles <= num_sms else 128
    steps = triton.cdiv(channels, depth)
    splits = max(1, min(num_sms // tiles, steps // _MIN_STEPS))
    is_short = num_bytes < _SHORT_BYTES
    if is_short and 4 * tiles > num_sms and (depth == 128 or splits == 1):
        return None
    # One multiprocessor reads 30 bytes per nanosecond, so the memory's 4.2 TB/s need all of them.
    if num_bytes > 2 * _SHORT_BYTES and splits * tiles < 0.9 * num_sms:
        return None
    if num_tokens > 16:
        return DecodeTile(32, 64, 128, num_warps=4, num_stages=8, splits=splits, prefetched=4)
    if depth == 128:
        return DecodeTile(16, 64, 128, num_warps=4, num_stages=10, prefetched=2)
    # Memory idles during attention of few tokens, so the next projection may be prefetched as a whole: its 32 MiB fit
    # into L2's 50 MB. The keys and values of more tokens, 4 MB for 1024 of them, would evict it.
    whole = num_tokens <= 8 and num_bytes <= _SHORT_BYTES and steps // splits >= 8
    # This few steps are all in flight at once even without prefetching.
    prefetched = 1 if steps // splits <= 5 else 8 if whole else 4
    return DecodeTile(16, 64, 256, num_warps=4, num_stages=5, splits=splits, prefetched=prefetched)


@dataclass(frozen=True, eq=False)
class DecodeMultiply:
    """A `baton.models.layers.linear.Multiply` of one weight. Launches must not overlap.

    Attributes:
        arrived: int32 zeros, one for every 64 rows of the weight. Every launch leaves zeros.
    """

    arrived: Tensor
    num_sms: int

    @classmethod
    def for_weight(cls, weight_NK: Tensor) -> "DecodeMultiply | None":
        """Returns None where the library is as fast for any number of tokens, on GPUs other than Hopper, and for dtypes
        and strides that the kernel cannot read."""
        if weight_NK.device.type != "cuda" or torch.cuda.get_device_capability(weight_NK.device) != (9, 0):
            return None
        if not _copyable(weight_NK) or not weight_NK.is_contiguous():
            return None
        num_sms = torch.cuda.get_device_properties(weight_NK.device).multi_processor_count
        rows, channels = weight_NK.shape
        if choose(1, rows, channels, num_sms) is None:
            return None
        return cls(new_counters(weight_NK), num_sms)

    def __call__(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        x_MK = x if x.dim() == 2 else x.flatten(0, -2)
        num_tokens, (rows, channels) = x_MK.shape[0], weight_NK.shape
        tile = choose(num_tokens, rows, channels, self.num_sms) if num_tokens else None
        if tile is None or x.dtype != weight_NK.dtype or not _copyable(x_MK):
            return linear(x, weight_NK, bias_N)
        out_MN = multiply(x_MK, weight_NK, bias_N, self.arrived, tile)
        return out_MN if x.dim() == 2 else out_MN.view(*x.shape[:-1], rows)


def new_counters(weight_NK: Tensor) -> Tensor:
    return torch.zeros(triton.cdiv(weight_NK.shape[0], _MIN_TILE_ROWS), dtype=torch.int32, device=weight_NK.device)


def multiply(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    arrived: Tensor | None,
    tile: DecodeTile,
    *,
    out_MN: Tensor | None = None,
) -> Tensor:
    """Launches the kernel. Programs that share a tile add up their sums in a fixed order, so the same call gives the
    same bits every time; another number of tokens may give others.

    Args:
        x_MK: at most `tile.tokens` rows, adjacent in memory or a multiple of 16 bytes apart.
        arrived: not needed where no programs share a tile.
        out_MN: memory for the result, contiguous; None: new memory.
    """
    num_tokens, channels = x_MK.shape
    rows = weight_NK.shape[0]
    assert 0 < num_tokens <= tile.tokens
    assert tile.rows >= _MIN_TILE_ROWS
    tiles = triton.cdiv(rows, tile.rows)
    splits = min(tile.splits, triton.cdiv(channels, tile.depth))
    if out_MN is None:
        out_MN = torch.empty(num_tokens, rows, dtype=x_MK.dtype, device=x_MK.device)
    partial = None
    if splits > 1:
        partial = torch.empty(tiles * splits, tile.rows, tile.tokens, dtype=torch.float32, device=x_MK.device)
    multiply_few_rows[(tiles * splits,)](
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
        splits,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        PREFETCHED=tile.prefetched,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap(x_MK.device, rows=num_tokens),
    )
    return out_MN


def _copyable(matrix: Tensor) -> bool:
    """Whether the copy engine (TMA) can read the matrix."""
    return (
        matrix.dtype in _DTYPES
        and matrix.dim() == 2
        and matrix.stride(1) == 1
        and matrix.stride(0) % 8 == 0
        and matrix.shape[1] % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def multiply_few_rows(
    x_map,
    weight_map,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_channels,
    splits,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes one program's share of a tile's steps.

    Without `partial_ptr` the program has all steps. With it, each of the tile's `splits` programs writes a partial sum,
    and the last to arrive adds them up in the order of the programs. PREFETCHED: number of steps whose weights go to
    the L2 cache before this program waits for the previous kernel.
    """
    tile, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    first, stop = _share(part, tl.cdiv(num_channels, DEPTH), splits)
    if OVERLAP and PREFETCHED:
        prefetch_weights(weight_ptr, num_rows, num_channels, tile * ROWS, first, stop, ROWS, DEPTH, PREFETCHED)
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    sum_NM = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
        # Numbers past the last row, token or channel are read as 0.
        weight_NK = weight_map.load([tile * ROWS, step * DEPTH])
        x_MK = x_map.load([0, step * DEPTH])
        if INTERPRETED:
            weight_NK = weight_NK.to(tl.float32)
            x_MK = x_MK.to(tl.float32)
        sum_NM = tl.dot(weight_NK, x_MK.T, sum_NM)
    if partial_ptr is None:
        _store(sum_NM, bias_ptr, out_ptr, tile, num_tokens, num_rows, INTERPRETED)
    else:
        exists_NM = (tl.arange(0, TOKENS) < num_tokens)[None, :] & (tl.arange(0, ROWS) >= 0)[:, None]
        ptrs_NM = partial_ptr + tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        ptrs_NM += tile * splits * (ROWS * TOKENS)
        if leave_part(ptrs_NM + part * (ROWS * TOKENS), sum_NM, exists_NM, arrived_ptr, tile) == splits - 1:
            sum_NM = _add_up(ptrs_NM, exists_NM, splits, INTERPRETED)
            tl.store(arrived_ptr + tile, 0)
            _store(sum_NM, bias_ptr, out_ptr, tile, num_tokens, num_rows, INTERPRETED)


@triton.jit
def _share(part, steps, splits):
    """Returns a part's first step and the step after its last; parts differ by at most one step."""
    least = steps // splits
    larger = steps % splits
    first = part * least + tl.minimum(part, larger)
    return first, first + least + (part < larger).to(tl.int32)


@triton.jit
def prefetch_weights(
    weight_ptr,
    num_rows,
    num_channels,
    first_row,
    first,
    stop,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """Loads the weights of a program's first steps into L2. Weights depend on no earlier kernel."""
    rows_N = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    columns_P = tl.minimum(first + tl.arange(0, PREFETCHED), stop - 1) * DEPTH
    bytes_P = tl.minimum(num_channels - columns_P, DEPTH) * 2
    places_NP = rows_N.to(tl.int64)[:, None] * num_channels + columns_P[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [(weight_ptr + places_NP).to(tl.int64), tl.broadcast_to(bytes_P[None, :], [ROWS, PREFETCHED])],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_up(ptrs_NM, exists_NM, splits, INTERPRETED: tl.constexpr):
    """Adds up a tile's partial sums, in the order of the programs."""
    SIZE: tl.constexpr = ptrs_NM.shape[0] * ptrs_NM.shape[1]
    sum_NM = tl.load(ptrs_NM, mask=exists_NM, other=0.0, cache_modifier=".cg")
    for some in range(1, bound(splits, INTERPRETED), _AT_ONCE):
        for one in tl.static_range(_AT_ONCE):
            part = some + one
            sum_NM += tl.load(ptrs_NM + part * SIZE, mask=exists_NM & (part < splits), other=0.0, cache_modifier=".cg")
    return sum_NM


@triton.jit
def _store(sum_NM, bias_ptr, out_ptr, tile, num_tokens, num_rows, INTERPRETED: tl.constexpr):
    rows_N = tile * sum_NM.shape[0] + tl.arange(0, sum_NM.shape[0])
    tokens_M = tl.arange(0, sum_NM.shape[1])
    exists_N = rows_N < num_rows
    if bias_ptr is not None:
        sum_NM += tl.load(bias_ptr + rows_N, mask=exists_N, other=0.0).to(tl.float32)[:, None]
    out_NM = out_ptr + tokens_M.to(tl.int64)[None, :] * num_rows + rows_N[:, None]
    rounded_NM = round_to(sum_NM, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_NM, rounded_NM, mask=exists_N[:, None] & (tokens_M < num_tokens)[None, :])
