"""The product of few rows with a weight that is read once, as a Triton kernel; `decode_matmul` says what it is for.

Weight rows stand in the rows of a product and tokens in its columns: the tensor cores' rows come in 64s, their columns
in 8s. A step is one block of a tile's channels. Legend: N rows of the weight, M tokens, K channels, P steps prefetched.
"""

import triton
import triton.language as tl

from tritonlib.launch import await_predecessors, bound, start_dependents
from tritonlib.rounding import round_to

# Partial sums that are on their way at once while they are added up.
_AT_ONCE = tl.constexpr(4)


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
    """One program's share of a tile's steps.

    Without `partial_ptr` it has all of them. With it, each of the tile's `splits` programs leaves a partial sum, and
    the last one adds them up in the order of the programs.
    PREFETCHED: so many steps' weights go to the L2 cache before this program waits for the kernel before it.
    """
    tile, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    first, stop = _share(part, tl.cdiv(num_channels, DEPTH), splits)
    if OVERLAP and PREFETCHED:
        _prefetch(weight_ptr, num_rows, num_channels, tile * ROWS, first, stop, ROWS, DEPTH, PREFETCHED)
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    sum_NM = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
        # What lies past the last row, token or channel is read as 0.
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
        tl.store(ptrs_NM + part * (ROWS * TOKENS), sum_NM, mask=exists_NM)
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            sum_NM = _add_up(ptrs_NM, exists_NM, splits, INTERPRETED)
            tl.store(arrived_ptr + tile, 0)
            _store(sum_NM, bias_ptr, out_ptr, tile, num_tokens, num_rows, INTERPRETED)


@triton.jit
def _share(part, steps, splits):
    """The first step of a part, and the one behind its last; parts differ by one step at most."""
    least = steps // splits
    larger = steps % splits
    first = part * least + tl.minimum(part, larger)
    return first, first + least + (part < larger).to(tl.int32)


@triton.jit
def _prefetch(
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
    """The first steps of a program. Weights depend on no kernel."""
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
    """A tile's partial sums, in the order of the programs."""
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
