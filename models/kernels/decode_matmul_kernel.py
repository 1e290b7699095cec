"""The product of few rows with a weight that is read once, as a Triton kernel; `decode_matmul` says what it is for.

Weight rows stand in the rows of a product and tokens in its columns: the tensor cores' rows come in 64s, their columns
in 8s. A step is one block of a tile's channels. Legend: N rows of the weight, M tokens, K channels, P steps prefetched.
"""

import triton
import triton.language as tl

from attention.kernels.launch import await_predecessors, bound, start_dependents
from attention.kernels.rounding import round_to


@triton.jit(do_not_specialize=["num_tokens"])
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
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STREAMED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program's share of all steps.

    STREAMED: shares are equal, and begin and end anywhere in a tile; else a number of programs shares each tile.
    A program writes the tiles that it computed alone, and leaves partial sums of others, which a tile's last program
    adds up in the order of the programs.
    AT_ONCE: partial sums that are on their way at once while they are added up.
    PREFETCHED: so many steps' weights go to the L2 cache before this program waits for the kernel before it.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(num_channels, DEPTH)
    tiles = tl.cdiv(num_rows, ROWS)
    if STREAMED:
        first, stop = _share(program, tiles * steps, num_programs)
    else:
        splits = num_programs // tiles
        tile_of_program = program // splits
        first, stop = _share(program % splits, steps, splits)
        first += tile_of_program * steps
        stop += tile_of_program * steps
    if OVERLAP and PREFETCHED:
        _prefetch(weight_ptr, num_rows, num_channels, first, stop, steps, ROWS, DEPTH, PREFETCHED)
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    sum_NM = tl.zeros([ROWS, TOKENS], tl.float32)
    if STREAMED:
        first_tile, last_tile = first // steps, (stop - 1) // steps
        # NOTE: the compiler loads ahead only in a loop without barriers and other loops inside.
        for step in tl.range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
            tile = step // steps
            column = step % steps
            sum_NM = _add_step(sum_NM, x_map, weight_map, tile * ROWS, column * DEPTH, INTERPRETED)
            if column == steps - 1:
                if step - column >= first:
                    _store(sum_NM, bias_ptr, out_ptr, tile, num_tokens, num_rows, INTERPRETED)
                else:
                    _leave(sum_NM, partial_ptr, 2 * program, num_tokens)
                sum_NM = tl.zeros([ROWS, TOKENS], tl.float32)
        if stop % steps != 0:
            _leave(sum_NM, partial_ptr, 2 * program + (last_tile != first_tile).to(tl.int32), num_tokens)
        left_first = (first % steps != 0) & (stop >= first_tile * steps + steps)
        found_first = _arrive(arrived_ptr, first_tile, left_first)
        found_last = _arrive(arrived_ptr, last_tile, stop % steps != 0)
        for end in tl.static_range(2):
            found = found_last if end else found_first
            tile = last_tile if end else first_tile
            first_program = _owner(tile * steps, tiles * steps, num_programs)
            last_program = _owner(tile * steps + steps - 1, tiles * steps, num_programs)
            if found == last_program - first_program:
                # A program has two places: for the tile that it begins in, and for the one that it ends in.
                begins, _ = _share(first_program, tiles * steps, num_programs)
                place = 2 * first_program + (begins < tile * steps).to(tl.int32)
                sum_NM = _add_up(
                    partial_ptr, place, first_program, last_program, num_tokens, ROWS, TOKENS, 2, AT_ONCE, INTERPRETED
                )
                tl.store(arrived_ptr + tile, 0)
                _store(sum_NM, bias_ptr, out_ptr, tile, num_tokens, num_rows, INTERPRETED)
    else:
        first_column = first - tile_of_program * steps
        for column in tl.range(bound(first_column, INTERPRETED), bound(first_column + stop - first, INTERPRETED)):
            sum_NM = _add_step(sum_NM, x_map, weight_map, tile_of_program * ROWS, column * DEPTH, INTERPRETED)
        if partial_ptr is None:
            _store(sum_NM, bias_ptr, out_ptr, tile_of_program, num_tokens, num_rows, INTERPRETED)
        else:
            _leave(sum_NM, partial_ptr, program, num_tokens)
            if _arrive(arrived_ptr, tile_of_program, True) == splits - 1:
                place = tile_of_program * splits
                sum_NM = _add_up(
                    partial_ptr, place, place, place + splits - 1, num_tokens, ROWS, TOKENS, 1, AT_ONCE, INTERPRETED
                )
                tl.store(arrived_ptr + tile_of_program, 0)
                _store(sum_NM, bias_ptr, out_ptr, tile_of_program, num_tokens, num_rows, INTERPRETED)


@triton.jit
def _share(program, total, num_programs):
    """The first step of a program, and the one behind its last; shares differ by one step at most."""
    least = total // num_programs
    larger = total % num_programs
    first = program * least + tl.minimum(program, larger)
    return first, first + least + (program < larger).to(tl.int32)


@triton.jit
def _owner(step, total, num_programs):
    """The program whose share has this step."""
    least = total // num_programs
    larger = total % num_programs
    behind = step - larger * (least + 1)
    return tl.where(behind < 0, step // (least + 1), larger + behind // least)


@triton.jit
def _prefetch(
    weight_ptr,
    num_rows,
    num_channels,
    first,
    stop,
    steps,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """The first steps of a program, as far as they lie in one tile. Weights depend on no kernel."""
    tile = first // steps
    rows_N = tl.minimum(tile * ROWS + tl.arange(0, ROWS), num_rows - 1)
    last = tl.minimum(stop - 1, tile * steps + steps - 1)
    columns_P = (tl.minimum(first + tl.arange(0, PREFETCHED), last) - tile * steps) * DEPTH
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
def _add_step(sum_NM, x_map, weight_map, row, column, INTERPRETED: tl.constexpr):
    """What lies past the last row, token or channel is read as 0."""
    weight_NK = weight_map.load([row, column])
    x_MK = x_map.load([0, column])
    if INTERPRETED:
        weight_NK = weight_NK.to(tl.float32)
        x_MK = x_MK.to(tl.float32)
    return tl.dot(weight_NK, x_MK.T, sum_NM)


@triton.jit
def _leave(sum_NM, partial_ptr, place, num_tokens):
    """Leaves a partial sum to whichever program comes last."""
    ROWS: tl.constexpr = sum_NM.shape[0]
    TOKENS: tl.constexpr = sum_NM.shape[1]
    ptrs_NM, exists_NM = _place(partial_ptr, num_tokens, ROWS, TOKENS)
    tl.store(ptrs_NM + place * (ROWS * TOKENS), sum_NM, mask=exists_NM)


@triton.jit
def _arrive(arrived_ptr, tile, has_left):
    """How many programs came before this one, which has left its part of the tile; -1: it has none."""
    found = -1
    if has_left:
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        tl.debug_barrier()
        found = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
    return found


@triton.jit
def _add_up(
    partial_ptr,
    first_place,
    first_program,
    last_program,
    num_tokens,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile's partial sums, in the order of the programs: those behind the first are in their first place."""
    ptrs_NM, exists_NM = _place(partial_ptr, num_tokens, ROWS, TOKENS)
    sum_NM = tl.load(ptrs_NM + first_place * (ROWS * TOKENS), mask=exists_NM, other=0.0, cache_modifier=".cg")
    for some in range(bound(first_program + 1, INTERPRETED), bound(last_program + 1, INTERPRETED), AT_ONCE):
        for one in tl.static_range(AT_ONCE):
            sum_NM += tl.load(
                ptrs_NM + (some + one) * (PLACES * ROWS * TOKENS),
                mask=exists_NM & (some + one <= last_program),
                other=0.0,
                cache_modifier=".cg",
            )
    return sum_NM


@triton.jit
def _place(partial_ptr, num_tokens, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    tokens_M = tl.arange(0, TOKENS)[None, :]
    rows_N = tl.arange(0, ROWS)[:, None]
    return partial_ptr + rows_N * TOKENS + tokens_M, (tokens_M < num_tokens) & (rows_N >= 0)


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
