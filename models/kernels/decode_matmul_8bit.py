"""Products of few rows with weights of 8 bits, fp8 or int8, which take as long as reading the weight.

As in `models.kernels.decode_matmul`, each kernel starts while the previous one runs, and weights stand in the rows of a
product. Where scales need nothing but a block of 128 channels, or come with the checkpoint, activations are quantized
between their load and the product, with the bits of `models.kernels.fp8_quantize`; others are quantized before. Sums
are those of `fp8_gemm` and `int8_gemm`. The twin is `models.quantization.fp8.multiply`.

Legend: T tokens, N output channels, K input channels, R C rows and columns of scales.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.kernels.fp8_gemm import Weight
from models.kernels.fp8_quantize import scales_of
from models.kernels.split_tiles import add_up, prefetch_rows, share
from models.quantization import fp8
from models.quantization.config import FP8_BLOCK
from tritonlib.fp8 import from_fp8, to_fp8
from tritonlib.launch import MOST_OVERLAPPING_ROWS, await_predecessors, bound, interpreted, overlap, start_dependents
from tritonlib.rounding import round_to

MAX_TOKENS = MOST_OVERLAPPING_ROWS
# The copy engine's rows begin at multiples of 16 bytes.
_ALIGNMENT = 16
_MIN_TILE_ROWS = 64
# A program with fewer steps than this spends its time on beginning and ending.
_MIN_STEPS = 8
_MAX_PROGRAMS_PER_SM = 8
# Enough of the multiprocessors are busy; each reads 30 of the memory's 4200 bytes per nanosecond at most.
_BUSY = 0.95
# Shared memory of a multiprocessor for stages, and the most programs that it holds.
_STAGES_BYTES = 216 << 10
_MOST_AT_ONCE = 3
_MAX_STAGES = 10


class Tile(NamedTuple):
    """The part of the result that one program computes, in steps of 128 channels.

    Attributes:
        tokens: of the result; at least all of the batch's.
        splits: number of programs that share each tile, at most one for each step.
        prefetched: channels of each row whose weights go to the L2 cache early, or 0.
    """

    tokens: int
    rows: int
    num_warps: int
    num_stages: int
    splits: int = 1
    prefetched: int = 0


def choose(num_tokens: int, rows: int, channels: int, num_sms: int) -> Tile:
    """The tile for a product: the fewest programs that keep two on each multiprocessor and few idle at the end."""
    assert 0 < num_tokens <= MAX_TOKENS
    tokens = 16 if num_tokens <= 16 else 32
    # With many tokens a tall tile halves what is read of them and the work of quantizing them.
    tile_rows = 64 if tokens <= 16 else 128
    tiles, steps = triton.cdiv(rows, tile_rows), triton.cdiv(channels, FP8_BLOCK)
    most = min(max(1, steps // _MIN_STEPS), max(1, _MAX_PROGRAMS_PER_SM * num_sms // tiles))
    busy = {splits: _busy(tiles * splits, num_sms) for splits in range(1, most + 1)}
    enough = [splits for splits in busy if busy[splits] >= _BUSY and tiles * splits > num_sms]
    splits = enough[0] if enough else max(busy, key=lambda splits: (busy[splits], -splits))
    programs = tiles * splits
    most_at_once = _MOST_AT_ONCE if tile_rows == 64 else 2
    at_once = min(most_at_once, triton.cdiv(programs, num_sms))
    stage_bytes = (tile_rows + 2 * tokens) * FP8_BLOCK
    return Tile(
        tokens,
        tile_rows,
        num_warps=tile_rows // 16,
        num_stages=min(_MAX_STAGES, _STAGES_BYTES // at_once // stage_bytes),
        splits=splits,
        # Programs that start late would prefetch too early.
        prefetched=0 if programs > most_at_once * num_sms else 1024 if num_tokens <= 8 else 512,
    )


def _busy(programs: int, num_sms: int) -> float:
    """Share of the multiprocessors' time in which they have work."""
    busy: float = programs / (triton.cdiv(programs, num_sms) * num_sms)
    return busy


def multiply(
    x_TK: Tensor,
    x_scale: Tensor | None,
    weight: Weight,
    *,
    dtype: torch.dtype,
    tile: Tile | None = None,
    power_of_two: bool = False,
) -> Tensor:
    """[T, N] in `dtype`. Programs that share a tile add up their sums in a fixed order, so the same call gives the same
    bits every time; another number of tokens may give others.

    Args:
        x_TK: as `serves` asks for; or quantized already, in the weight's dtype.
        x_scale: of quantized tokens, float32 [T] or [T, 1]; of others a scalar, or None where weights have blocks.
        weight: of int8, one column of scales.
        tile: None: chosen by the shapes. Tests and measurements pass others.
        power_of_two: scales of blocks are rounded up to powers of two.
    """
    num_tokens, channels = x_TK.shape
    rows = weight.stored_NK.shape[0]
    stored, blocked = x_TK.dtype == weight.stored_NK.dtype, x_scale is None
    tile = tile or choose(num_tokens, rows, channels, _num_sms(x_TK.device))
    assert 0 < num_tokens <= tile.tokens
    assert tile.rows >= _MIN_TILE_ROWS
    assert not (stored and blocked), "blocks are quantized here"
    assert blocked or weight.scale_RC.shape[1] == 1
    tiles = triton.cdiv(rows, tile.rows)
    splits = min(tile.splits, triton.cdiv(channels, FP8_BLOCK))
    out_TN = torch.empty(num_tokens, rows, dtype=dtype, device=x_TK.device)
    partial = None
    if splits > 1:
        kind = torch.int32 if weight.stored_NK.dtype == torch.int8 else torch.float32
        partial = torch.empty(tiles * splits, tile.rows, tile.tokens, dtype=kind, device=x_TK.device)
    multiply_few_rows_8bit[(tiles * splits,)](
        TensorDescriptor.from_tensor(x_TK, [tile.tokens, FP8_BLOCK]),
        x_scale,
        TensorDescriptor.from_tensor(weight.stored_NK, [tile.rows, FP8_BLOCK]),
        weight.stored_NK,
        weight.scale_RC,
        weight.bias,
        out_TN,
        partial,
        weight.arrived,
        num_tokens,
        rows,
        channels,
        splits,
        ROWS_PER_SCALE=weight.rows_per_scale,
        BLOCKED=blocked,
        STORED=stored,
        POWER_OF_TWO=power_of_two,
        SMALLEST=fp8.SMALLEST,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        BLOCK=FP8_BLOCK,
        PREFETCHED=tile.prefetched,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap(x_TK.device, rows=num_tokens),
    )
    return out_TN


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def runs_on(device: torch.device) -> bool:
    """Whether the kernel was made for this GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def serves(x_TK: Tensor) -> bool:
    """Whether the tokens are few enough and the copy engine (TMA) can read them, as they are and with 8 bits."""
    return (
        0 < x_TK.shape[0] <= MAX_TOKENS
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and x_TK.stride(1) == 1
        and x_TK.stride(0) * x_TK.element_size() % _ALIGNMENT == 0
        and x_TK.shape[1] % _ALIGNMENT == 0
        and x_TK.data_ptr() % _ALIGNMENT == 0
    )


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def multiply_few_rows_8bit(
    x_map,
    x_scale_ptr,
    weight_map,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_channels,
    splits,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCKED: tl.constexpr,
    STORED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program's share of a tile's steps, as `models.kernels.decode_matmul.multiply_few_rows`.

    BLOCKED: a scale for every 128 channels of a token and of ROWS_PER_SCALE rows of the weight.
    STORED: activations are quantized already.
    """
    INTEGERS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    SHARED: tl.constexpr = ROWS_PER_SCALE % ROWS == 0
    tile, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    num_columns = tl.cdiv(num_channels, BLOCK)
    first, stop = share(part, num_columns, splits)
    # Rows past the last are read as 0, or as the last one where a pointer reads them, and never written.
    rows_N = tl.minimum(tile * ROWS + tl.arange(0, ROWS), num_rows - 1)
    if OVERLAP and PREFETCHED:
        columns_P = tl.arange(0, 1) + first * BLOCK
        channels_P = tl.minimum(tl.minimum(stop * BLOCK, num_channels) - columns_P, PREFETCHED)
        prefetch_rows(weight_ptr, rows_N, num_channels, columns_P, channels_P)
    start_dependents(OVERLAP)
    scales = scale_ptr
    if BLOCKED:
        # One for the whole tile, or one for each of its rows.
        scales += (tile * ROWS if SHARED else rows_N) // ROWS_PER_SCALE * num_columns
        scale = tl.load(scales + first)
    await_predecessors(OVERLAP)
    inverse = 1.0
    if not BLOCKED and not STORED:
        inverse = tl.div_rn(1.0, tl.load(x_scale_ptr))
    sum_NT = tl.zeros([ROWS, TOKENS], tl.int32 if INTEGERS else tl.float32)
    for step in tl.range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
        # Numbers past the last row, token or channel are read as 0.
        stored_NK = weight_map.load([tile * ROWS, step * BLOCK])
        x_TK = x_map.load([0, step * BLOCK])
        if BLOCKED:
            values_TK = x_TK.to(tl.float32)
            x_scale_T, inverse_T = scales_of(tl.max(tl.abs(values_TK), axis=1), SMALLEST, POWER_OF_TWO)
            x_TK = _saturated(values_TK * inverse_T[:, None], INTERPRETED)
        elif not STORED:
            x_TK = _saturated(x_TK.to(tl.float32) * inverse, INTERPRETED)
        if INTEGERS:
            sum_NT = tl.dot(stored_NK, x_TK.T, sum_NT, out_dtype=tl.int32)
        else:
            if INTERPRETED:
                stored_NK = from_fp8(stored_NK, INTERPRETED)
                x_TK = from_fp8(x_TK, INTERPRETED)
            product_NT = tl.dot(stored_NK, x_TK.T)
            if not BLOCKED:
                sum_NT += product_NT
            else:
                if SHARED:
                    sum_NT += product_NT * (x_scale_T * scale)[None, :]
                else:
                    sum_NT += product_NT * (scale[:, None] * x_scale_T[None, :])
                # The next step's, because a load takes longer than a step.
                scale = tl.load(scales + tl.minimum(step + 1, num_columns - 1))
    is_last = True
    if partial_ptr is not None:
        exists_NT = (tl.arange(0, TOKENS) < num_tokens)[None, :] & (tl.arange(0, ROWS) >= 0)[:, None]
        ptrs_NT = partial_ptr + tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        ptrs_NT += tile * splits * (ROWS * TOKENS)
        tl.store(ptrs_NT + part * (ROWS * TOKENS), sum_NT, mask=exists_NT)
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            sum_NT = add_up(ptrs_NT, exists_NT, splits, INTERPRETED)
            tl.store(arrived_ptr + tile, 0)
    if is_last:
        out_NT = sum_NT.to(tl.float32)
        tokens_T = tl.arange(0, TOKENS)
        if not BLOCKED:
            scale_N = tl.load(scale_ptr + rows_N // ROWS_PER_SCALE)
            if STORED:
                x_scale_T = tl.load(x_scale_ptr + tl.minimum(tokens_T, num_tokens - 1))
                out_NT *= scale_N[:, None] * x_scale_T[None, :]
            else:
                out_NT *= (scale_N * tl.load(x_scale_ptr))[:, None]
        if bias_ptr is not None:
            out_NT += tl.load(bias_ptr + rows_N).to(tl.float32)[:, None]
        places_N = tile * ROWS + tl.arange(0, ROWS)
        exists_NT = (places_N < num_rows)[:, None] & (tokens_T < num_tokens)[None, :]
        target_NT = out_ptr + tokens_T.to(tl.int64)[None, :] * num_rows + places_N[:, None]
        tl.store(target_NT, round_to(out_NT, out_ptr.dtype.element_ty, INTERPRETED), mask=exists_NT)


@triton.jit
def _saturated(values, INTERPRETED: tl.constexpr):
    """As `to_fp8`: a GPU's cast saturates and keeps NaN, without the comparisons that the interpreter needs."""
    if INTERPRETED:
        return to_fp8(values, tl.float8e4nv, INTERPRETED)
    return values.to(tl.float8e4nv)
