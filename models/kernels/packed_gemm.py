"""Products with weights of packed integers (`models.quantization.packed`), whose scales are shared by groups of inputs.

Few rows: a kernel reads the packed weight once and multiplies whole numbers less their zeros, exact in 16 bits; each
group's sum is scaled in float32. Programs that share a tile add up in a fixed order. Many rows: pieces of the weight
are written in the activations' dtype, as `PackedWeight.dequantized` has them, and the library multiplies these.

Legend: T token, N output channel, K input channel, B byte of packed numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from models.kernels.matmul import multiply_invariant
from models.quantization.packed import RUN, PackedWeight
from tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of
from tritonlib.launch import (
    await_predecessors,
    bound,
    interpreted,
    overlap,
    start_dependents,
)
from tritonlib.rounding import round_to

# The library multiplies more tokens than this, unless a token's bits must not depend on the batch.
MAX_TOKENS = 64
_ROWS = 64  # of a tile
_DEPTH = 128  # inputs of one step, or a group's where it is smaller
_PROGRAMS_PER_SM = 4
_MIN_STEPS = 4  # of a program that shares a tile
_PIECE_BYTES = 32 << 20  # of a weight in the activations' dtype; such a piece stays in the L2 cache
_LEAST_DEPTH = 2 * RUN
_RUN = tl.constexpr(RUN)


# Of the kernel for Hopper, inputs of one step; it has one scale for all of them.
HOPPER_STEP_MIN = 64


class HopperTile(NamedTuple):
    """The part of the result that one program of the kernel for Hopper computes.

    Attributes:
        at_once: steps of a stage.
        stages: those whose weights are in shared memory or on their way there; a power of two.
        programs_per_sm: programs that share tiles until each multiprocessor has as many.
        least_steps: of a program that shares a tile.
        staged_x: activations go through shared memory as weights do.
    """

    tokens: int
    rows: int
    programs_per_sm: int = 1
    at_once: int = 1
    stages: int = 4
    least_steps: int = 4
    staged_x: bool = False


# On an H200, the four products of a layer of Llama-3.1-8B with groups of 128: 1 token 61 us, 16 tokens 79, 32 tokens
# 116, 64 tokens 230, 128 tokens 376, 160 tokens 431. By the library, which writes the weight in 16 bits first: 128
# tokens 510 us, 160 tokens 572, 256 tokens 550. Staged activations take 213 us for 1 token, and save 4 to 14 % from 32
# tokens on.
_TILES = {
    8: HopperTile(8, rows=64, programs_per_sm=8),
    16: HopperTile(16, rows=128, programs_per_sm=4),
    32: HopperTile(32, rows=128, programs_per_sm=2, staged_x=True),
    64: HopperTile(64, rows=64, programs_per_sm=2, staged_x=True),
}
_TILE_OF_MANY = HopperTile(32, rows=128, programs_per_sm=2, staged_x=True)
# The library multiplies more tokens than this on Hopper.
_MAX_TOKENS_ON_HOPPER = 160


def choose_tile(num_tokens: int) -> HopperTile:
    """The tile for this number of tokens."""
    return next((tile for tokens, tile in _TILES.items() if num_tokens <= tokens), _TILE_OF_MANY)


def can_be_staged(x_TK: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, in which the kernel for Hopper copies them."""
    return x_TK.stride(0) % 16 == 0 and x_TK.data_ptr() % 16 == 0


@dataclass(frozen=True, eq=False)
class Product:
    """`x @ weight.T + bias` for one weight. Launches must not overlap in time.

    Attributes:
        arrived: int32 zeros, one for every tile's rows. Every launch leaves zeros.
    """

    weight: PackedWeight
    arrived: Tensor
    num_sms: int

    @classmethod
    def of(cls, weight: PackedWeight) -> "Product":
        device, rows = weight.stored_NB.device, weight.stored_NB.shape[0]
        arrived = torch.zeros(triton.cdiv(rows, _ROWS), dtype=torch.int32, device=device)
        is_gpu = device.type == "cuda"
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 4
        return cls(weight, arrived, num_sms)

    @property
    def rows(self) -> int:
        return self.weight.stored_NB.shape[0]

    @property
    def depth(self) -> int | None:
        """Inputs of one step, which have one scale; None: the kernel cannot read the groups."""
        weight = self.weight
        if weight.groups_K is not None:
            return None
        if weight.group_size >= weight.columns:
            return _DEPTH
        depth = min(_DEPTH, weight.group_size & -weight.group_size)
        return depth if depth >= _LEAST_DEPTH else None

    def hopper_step(self, dtype: torch.dtype) -> int | None:
        """Inputs of one step of the kernel for Hopper; None: it cannot read the weight, or is not for this GPU."""
        weight = self.weight
        if weight.bits != 4 or self.depth is None or dtype != torch.bfloat16:
            return None
        if not has_hopper_kernels(weight.stored_NB.device, _HOPPER):
            return None
        step = min(_DEPTH, self.depth, weight.columns & -weight.columns)
        return step if step >= HOPPER_STEP_MIN else None

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
        if self.weight.order_K is not None and self.depth is not None:
            x_TK = x_TK.index_select(1, self.weight.order_K)
        num_tokens = x_TK.shape[0]
        most = MAX_TOKENS if self.hopper_step(x_TK.dtype) is None else _MAX_TOKENS_ON_HOPPER
        if self.depth is None or (num_tokens > most and not batch_invariant):
            return self._by_library(x_TK, bias_N, batch_invariant=batch_invariant)
        x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
        return self.by_kernel(x_TK, bias_N, splits=1 if batch_invariant else None)

    def by_kernel(self, x_TK: Tensor, bias_N: Tensor | None, *, splits: int | None = None) -> Tensor:
        """Any number of tokens, whose inputs are in the weight's order.

        Args:
            splits: programs that share a tile; None: chosen by the shapes. Tests pass others.
        """
        weight, depth, rows = self.weight, self.depth, self.rows
        assert depth is not None
        num_tokens, columns = x_TK.shape
        out_TN = torch.empty(num_tokens, rows, dtype=x_TK.dtype, device=x_TK.device)
        if not num_tokens:
            return out_TN
        if (step := self.hopper_step(x_TK.dtype)) is not None:
            self.launch_on_hopper(x_TK, bias_N, out_TN, step, splits=splits)
            return out_TN
        tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        tiles_N, tiles_T = triton.cdiv(rows, _ROWS), triton.cdiv(num_tokens, tokens)
        steps = triton.cdiv(columns, depth)
        if splits is None:
            splits = max(1, min(_PROGRAMS_PER_SM * self.num_sms // tiles_N, steps // _MIN_STEPS))
        splits = 1 if tiles_T > 1 else min(splits, steps)
        partial = None
        if splits > 1:
            partial = torch.empty(tiles_N * splits, _ROWS, tokens, dtype=torch.float32, device=x_TK.device)
        _multiply_kernel[(tiles_N * splits, tiles_T)](
            x_TK,
            weight.stored_NB,
            weight.scales_GN,
            weight.zeros_GN,
            bias_N,
            out_TN,
            partial,
            self.arrived,
            num_tokens,
            rows,
            columns,
            x_TK.stride(0),
            splits,
            GROUP=weight.group_size,
            BITS=weight.bits,
            TOKENS=tokens,
            ROWS=_ROWS,
            DEPTH=depth,
            INTERPRETED=interpreted(),
            **overlap(x_TK.device, rows=num_tokens),
            num_warps=4,
            num_stages=4,
        )
        return out_TN

    def launch_on_hopper(
        self, x_TK: Tensor, bias_N: Tensor | None, out_TN: Tensor, step: int, *, splits: int | None
    ) -> None:
        """Writes `out_TN`, whether or not `hopper_step` says so; arguments as those of `by_kernel`."""
        # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
        from models.kernels.packed_hopper import WARPS, multiply_packed

        weight, (num_tokens, columns), rows = self.weight, x_TK.shape, self.rows
        tile = choose_tile(num_tokens)
        tiles_N, tiles_T = triton.cdiv(rows, tile.rows), triton.cdiv(num_tokens, tile.tokens)
        steps = columns // step
        if splits is None:
            wanted = tile.programs_per_sm * self.num_sms // tiles_N
            splits = max(1, min(wanted, steps // tile.least_steps))
        splits = 1 if tiles_T > 1 else min(splits, steps)
        partial = None
        if splits > 1:
            shape = tiles_N * splits, tile.rows, tile.tokens
            partial = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
        multiply_packed[(tiles_N * splits, tiles_T)](
            x_TK,
            weight.stored_NB,
            weight.scales_GN,
            weight.zeros_GN,
            bias_N,
            out_TN,
            partial,
            self.arrived,
            num_tokens,
            rows,
            x_TK.stride(0),
            splits,
            COLUMNS=columns,
            GROUP=weight.group_size,
            ROWS=tile.rows,
            TOKENS=tile.tokens,
            STEP=step,
            AT_ONCE=tile.at_once,
            STAGES=tile.stages,
            STAGED_X=tile.staged_x and can_be_staged(x_TK),
            **overlap(x_TK.device, rows=num_tokens),
            num_warps=WARPS,
        )

    def _by_library(self, x_TK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
        if self.depth is None:
            return _multiply_plain(x_TK, self.weight.dequantized(x_TK.dtype), bias_N, batch_invariant=batch_invariant)
        out_TN = torch.empty(x_TK.shape[0], self.rows, dtype=x_TK.dtype, device=x_TK.device)
        at_once = max(_ROWS, _PIECE_BYTES // (x_TK.shape[1] * x_TK.element_size()) // _ROWS * _ROWS)
        for first in range(0, self.rows, at_once):
            part = slice(first, min(first + at_once, self.rows))
            piece_NK = self.dequantized_piece(part, x_TK.dtype)
            out_TN[:, part] = linear(x_TK, piece_NK, None if bias_N is None else bias_N[part])
        return out_TN

    def dequantized_piece(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Some outputs of the weight, inputs in the order of `PackedWeight.stored_NB`."""
        weight = self.weight
        rows = part.stop - part.start
        out_NK = torch.empty(rows, weight.columns, dtype=dtype, device=weight.stored_NB.device)
        _dequantize_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(weight.columns, _LEAST_DEPTH * 4))](
            weight.stored_NB,
            weight.scales_GN,
            weight.zeros_GN,
            out_NK,
            part.start,
            rows,
            self.rows,
            weight.columns,
            weight.group_size,
            BITS=weight.bits,
            ROWS=_ROWS,
            RUNS=4,
            INTERPRETED=interpreted(),
            num_warps=4,
        )
        return out_NK


_HOPPER = HopperKernels(
    "products with weights of 4 bits", probe_of("models.kernels.packed_probe", "compare_products_on_hopper")
)


def _multiply_plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
    if not batch_invariant:
        return linear(x_TK, weight_NK, bias_N)
    return multiply_invariant(x_TK, weight_NK, bias_N)


@triton.jit
def as_half(numbers, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Integers from 0 to 127 plus an offset (see `half_offset`), exact in 16 bits, without slow conversions: they are
    the last bits of a power of two. The interpreter's 16-bit products are wrong, so it gets float32."""
    if INTERPRETED:
        return numbers.to(tl.float32)
    elif dtype == tl.bfloat16:  # noqa: RET505 (the compiler reads only one of the branches this way)
        return (numbers.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (numbers.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return numbers.to(tl.float32)


@triton.jit
def half_offset(dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """What `as_half` adds."""
    if INTERPRETED:
        return 0.0
    elif dtype == tl.bfloat16:  # noqa: RET505
        return 128.0
    elif dtype == tl.float16:
        return 1024.0
    else:
        return 0.0


@triton.jit
def less_zero(numbers_NB, zero_N, BITS: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Numbers less their rows' zeros, exact in `dtype`. `zero_N` is float32 [N, 1]."""
    kind: tl.constexpr = tl.float32 if INTERPRETED else dtype
    if BITS == 8:
        return (numbers_NB.to(tl.float32) - zero_N).to(kind)
    else:  # noqa: RET505
        return as_half(numbers_NB, dtype, INTERPRETED) - (zero_N + half_offset(dtype, INTERPRETED)).to(kind)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _multiply_kernel(
    x_ptr,
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_columns,
    x_stride,
    splits,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """ROWS outputs of TOKENS tokens, or a program's share of their steps, each of DEPTH inputs with one scale."""
    start_dependents(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    kind: tl.constexpr = tl.float32 if INTERPRETED else dtype
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    steps = tl.cdiv(num_columns, DEPTH)
    first, stop = split * steps // splits, (split + 1) * steps // splits
    rows_N = tile * ROWS + tl.arange(0, ROWS)
    tokens_T = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Rows past the end are read as the last one and never written.
    read_N = tl.minimum(rows_N, num_rows - 1)
    exists_T = tokens_T < num_tokens
    BYTES: tl.constexpr = DEPTH * BITS // 8
    row_bytes = tl.cdiv(num_columns, 2 * _RUN) * (2 * _RUN * BITS // 8)
    bytes_B = tl.arange(0, BYTES)
    stored_NB = stored_ptr + read_N.to(tl.int64)[:, None] * row_bytes + bytes_B[None, :]
    if BITS == 4:
        inputs_B = bytes_B // _RUN * (2 * _RUN) + bytes_B % _RUN
    else:
        inputs_B = bytes_B
    x_TB = x_ptr + tokens_T.to(tl.int64)[:, None] * x_stride + inputs_B[None, :]
    sum_NT = tl.zeros([ROWS, TOKENS], tl.float32)
    await_predecessors(OVERLAP)
    for step in range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
        start = step * DEPTH
        group = start // GROUP
        numbers_NB = tl.load(stored_NB + step * BYTES, mask=(step * BYTES + bytes_B < row_bytes)[None, :], other=0)
        scale_N = tl.load(scales_ptr + group * num_rows + read_N).to(tl.float32)
        if zeros_ptr is not None:
            zero_N = tl.load(zeros_ptr + group * num_rows + read_N).to(tl.float32)[:, None]
        else:
            zero_N = tl.full([ROWS, 1], 1 << (BITS - 1), tl.float32)
        low_TB = tl.load(x_TB + start, mask=exists_T[:, None] & (start + inputs_B < num_columns)[None, :], other=0.0)
        low_NB = less_zero(numbers_NB & 15 if BITS == 4 else numbers_NB, zero_N, BITS, dtype, INTERPRETED)
        product_NT = tl.dot(low_NB, low_TB.to(kind).T, input_precision="ieee")
        if BITS == 4:
            exists_B = start + _RUN + inputs_B < num_columns
            high_TB = tl.load(x_TB + start + _RUN, mask=exists_T[:, None] & exists_B[None, :], other=0.0)
            high_NB = less_zero(numbers_NB >> 4, zero_N, BITS, dtype, INTERPRETED)
            product_NT = tl.dot(high_NB, high_TB.to(kind).T, product_NT, input_precision="ieee")
        sum_NT += product_NT * scale_N[:, None]
    if partial_ptr is not None:
        places_NT = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        places_NT += tile * splits * (ROWS * TOKENS)
        tl.store(partial_ptr + places_NT + split * (ROWS * TOKENS), sum_NT)
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") != splits - 1:
            return
        sum_NT = tl.zeros([ROWS, TOKENS], tl.float32)
        for other in range(bound(splits, INTERPRETED)):
            sum_NT += tl.load(partial_ptr + places_NT + other * (ROWS * TOKENS), cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    if bias_ptr is not None:
        sum_NT += tl.load(bias_ptr + read_N).to(tl.float32)[:, None]
    out_NT = out_ptr + tokens_T.to(tl.int64)[None, :] * num_rows + rows_N[:, None]
    tl.store(out_NT, round_to(sum_NT, dtype, INTERPRETED), mask=exists_T[None, :] & (rows_N < num_rows)[:, None])


@triton.jit
def _dequantize_kernel(
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first_row,
    num_rows,
    all_rows,
    num_columns,
    group_size,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of ROWS outputs and RUNS times 32 inputs of the weight in `out`'s dtype, rounded once."""
    rows_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_N = rows_N < num_rows
    read_N = first_row + tl.minimum(rows_N, num_rows - 1)
    BYTES: tl.constexpr = RUNS * 2 * _RUN * BITS // 8
    bytes_B = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    row_bytes = tl.cdiv(num_columns, 2 * _RUN) * (2 * _RUN * BITS // 8)
    stored_NB = stored_ptr + read_N.to(tl.int64)[:, None] * row_bytes + bytes_B[None, :]
    numbers_NB = tl.load(stored_NB, mask=(bytes_B < row_bytes)[None, :], other=0)
    inputs_B = bytes_B // _RUN * (2 * _RUN) + bytes_B % _RUN if BITS == 4 else bytes_B
    for half in tl.static_range(2 if BITS == 4 else 1):
        columns_B = inputs_B + half * _RUN
        in_B = columns_B < num_columns
        groups_NB = (columns_B // group_size * all_rows)[None, :] + read_N[:, None]
        scale_NB = tl.load(scales_ptr + groups_NB, mask=in_B[None, :], other=0.0).to(tl.float32)
        if zeros_ptr is not None:
            zero_NB = tl.load(zeros_ptr + groups_NB, mask=in_B[None, :], other=0).to(tl.float32)
        else:
            zero_NB = tl.full([ROWS, BYTES], 1 << (BITS - 1), tl.float32)
        part_NB = (numbers_NB >> (4 * half)) & 15 if BITS == 4 else numbers_NB
        weight_NB = (part_NB.to(tl.float32) - zero_NB) * scale_NB
        out_NB = out_ptr + rows_N.to(tl.int64)[:, None] * num_columns + columns_B[None, :]
        tl.store(out_NB, round_to(weight_NB, out_ptr.dtype.element_ty, INTERPRETED), mask=in_N[:, None] & in_B[None, :])
