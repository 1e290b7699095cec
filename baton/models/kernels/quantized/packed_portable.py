"""The portable kernels of products with weights of packed integers (`baton.models.kernels.quantized.packed_gemm`).

Legend: T token, N output channel, B byte of packed numbers.
"""

import triton
import triton.language as tl

from baton.models.formats.packed import RUN, STRIP, STRIP_INPUTS
from baton.models.kernels.matmul.split_sums import add_parts, leave_part
from baton.tritonlib.launch import await_predecessors, bound, start_dependents
from baton.tritonlib.rounding import round_to

_RUN = tl.constexpr(RUN)
_STRIP, _STRIP_INPUTS = tl.constexpr(STRIP), tl.constexpr(STRIP_INPUTS)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def multiply_kernel(
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
    """Computes ROWS outputs of TOKENS tokens, or a program's share of their steps of DEPTH inputs with one scale."""
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
        low_NB = _less_zero(numbers_NB & 15 if BITS == 4 else numbers_NB, zero_N, BITS, dtype, INTERPRETED)
        product_NT = tl.dot(low_NB, low_TB.to(kind).T, input_precision="ieee")
        if BITS == 4:
            exists_B = start + _RUN + inputs_B < num_columns
            high_TB = tl.load(x_TB + start + _RUN, mask=exists_T[:, None] & exists_B[None, :], other=0.0)
            high_NB = _less_zero(numbers_NB >> 4, zero_N, BITS, dtype, INTERPRETED)
            product_NT = tl.dot(high_NB, high_TB.to(kind).T, product_NT, input_precision="ieee")
        sum_NT += product_NT * scale_N[:, None]
    if partial_ptr is not None:
        places_NT = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        first_NT = partial_ptr + (places_NT + tile * splits * (ROWS * TOKENS))
        if leave_part(first_NT + split * (ROWS * TOKENS), sum_NT, None, arrived_ptr, tile) != splits - 1:
            return
        sum_NT = add_parts(first_NT, arrived_ptr, tile, splits, tl.float32, INTERPRETED)
    if bias_ptr is not None:
        sum_NT += tl.load(bias_ptr + read_N).to(tl.float32)[:, None]
    out_NT = out_ptr + tokens_T.to(tl.int64)[None, :] * num_rows + rows_N[:, None]
    tl.store(out_NT, round_to(sum_NT, dtype, INTERPRETED), mask=exists_T[None, :] & (rows_N < num_rows)[:, None])


@triton.jit
def dequantize_kernel(
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
    STRIPS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Dequantizes a tile of ROWS outputs and RUNS times 32 inputs to `out`'s dtype, rounded once."""
    rows_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_N = rows_N < num_rows
    read_N = first_row + tl.minimum(rows_N, num_rows - 1)
    BYTES: tl.constexpr = RUNS * 2 * _RUN * BITS // 8
    bytes_B = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    row_bytes = tl.cdiv(num_columns, 2 * _RUN) * (2 * _RUN * BITS // 8)
    if not STRIPS:
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
        if STRIPS:
            part_NB = _of_strips(stored_ptr, read_N, columns_B, num_columns)
        else:
            part_NB = (numbers_NB >> (4 * half)) & 15 if BITS == 4 else numbers_NB
        weight_NB = (part_NB.to(tl.float32) - zero_NB) * scale_NB
        out_NB = out_ptr + rows_N.to(tl.int64)[:, None] * num_columns + columns_B[None, :]
        tl.store(out_NB, round_to(weight_NB, out_ptr.dtype.element_ty, INTERPRETED), mask=in_N[:, None] & in_B[None, :])


@triton.jit
def _of_strips(stored_ptr, rows_N, columns_B, num_columns):
    """Loads the numbers of these outputs and inputs from a weight in strips; past the last input, those of another."""
    columns_B = tl.minimum(columns_B, num_columns - 1)
    within_B = columns_B % _STRIP_INPUTS
    word_B = within_B // 2 % 4 * 16 + within_B // 16 * 4
    bytes_B = columns_B // _STRIP_INPUTS * (_STRIP * _STRIP_INPUTS // 2) + word_B + within_B % 2 * 2 + within_B // 8 % 2
    strips_N = (rows_N // _STRIP).to(tl.int64) * (_STRIP * num_columns // 2)
    places_NB = (strips_N + rows_N % _STRIP // 2 * 64)[:, None] + bytes_B[None, :]
    return (tl.load(stored_ptr + places_NB) >> (rows_N % 2 * 4)[:, None].to(tl.uint8)) & 15


@triton.jit
def _as_half(numbers, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Integers from 0 to 127 plus an offset (see `_half_offset`), exact in 16 bits, without slow conversions: they are
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
def _half_offset(dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Returns the offset that `_as_half` adds."""
    if INTERPRETED:
        return 0.0
    elif dtype == tl.bfloat16:  # noqa: RET505
        return 128.0
    elif dtype == tl.float16:
        return 1024.0
    else:
        return 0.0


@triton.jit
def _less_zero(numbers_NB, zero_N, BITS: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Returns numbers less their rows' zeros, exact in `dtype`. `zero_N` is float32 [N, 1]."""
    kind: tl.constexpr = tl.float32 if INTERPRETED else dtype
    if BITS == 8:
        return (numbers_NB.to(tl.float32) - zero_N).to(kind)
    else:  # noqa: RET505
        return _as_half(numbers_NB, dtype, INTERPRETED) - (zero_N + _half_offset(dtype, INTERPRETED)).to(kind)
