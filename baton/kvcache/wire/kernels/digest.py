"""Computes the digest of `baton.kvcache.wire.digest` on a GPU: a kernel for payloads in memory, and parts for kernels
that digest numbers in their registers.

One launch does everything: a program weighs the sum of each of its rows, adds up its rows' columns in registers, and
writes both to memory of its own. The last program of a group adds up the group's sums; the last group adds up all
groups' sums, weighs them and writes the digest. (Atomic additions to common memory locations cost 17 us, more than
gathering 4 MB.) All sums wrap, so their order is free.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import PreparedKernel

# Rows that a program takes at a time, and its warps.
_ROWS = 16
_NUM_WARPS = 8
# The fewest rows of a program, because each program writes a whole row of column sums.
_ROWS_PER_PROGRAM_MIN = 8
_PROGRAMS_PER_SM = 2
# Programs in a group, and the most groups.
_GROUP = 16
_MOST_GROUPS = 32
# Rows whose sums a program holds until it weighs them.
_HELD_ROWS = 256
# A digesting kernel's constants about its scratch memory.
CONSTANTS = {"HELD_ROWS": _HELD_ROWS, "GROUP": _GROUP, "MOST_GROUPS": _MOST_GROUPS}


def programs_at_once(device: torch.device) -> int:
    """The largest number of programs that digest one payload."""
    if device.type != "cuda":
        return _GROUP + 1
    return min(_GROUP * _MOST_GROUPS, _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count)


def programs_for(num_rows: int, at_once: int) -> int:
    """The number of programs that share a payload of `num_rows` rows."""
    return max(1, min(at_once, num_rows // _ROWS_PER_PROGRAM_MIN))


def new_scratch(columns: int, device: torch.device) -> Tensor:
    """Memory for digests that follow each other on one stream, int32.

    Rows of `columns` numbers: how many programs of each group and how many groups are ready, zero before and after a
    digest; each program's weighed rows, int64; each group's sums; each program's sums.
    """
    assert columns >= 2 * _GROUP * _MOST_GROUPS
    rows = 2 + _MOST_GROUPS + programs_at_once(device)
    return torch.zeros(rows * columns, dtype=torch.int32, device=device)


def digest_payload(payload: Tensor, *, columns: int, constant_term: int, out: Tensor) -> None:
    """Writes the digest of a contiguous uint8 tensor into `out`, 8 bytes that may start anywhere.

    Args:
        columns: words of a row.
        constant_term: the part of the digest that does not depend on the payload's words.
    """
    num_bytes = payload.numel()
    in_words = num_bytes % 4 == 0 and payload.data_ptr() % 4 == 0
    _digest_kernel[(programs_for(triton.cdiv(num_bytes, 4 * columns), programs_at_once(payload.device)),)](
        payload,
        new_scratch(columns, payload.device),
        out,
        num_bytes,
        constant_term,
        **_constants(columns, part_bytes=4 if in_words else 1),
        num_warps=_NUM_WARPS,
    )


def prepare_digest(columns: int, device: torch.device) -> PreparedKernel:
    """Prepares `digest_payload` for payloads whose sizes are also multiples of `PreparedKernel.ALIGN_BYTES`.

    Arguments of a launch: payload, scratch, out, payload's bytes, constant term.
    """
    constants = _constants(columns, part_bytes=PreparedKernel.ALIGN_BYTES)
    examples = (torch.uint8, torch.int32, torch.uint8, 1, 1)
    return PreparedKernel(_digest_kernel, device, examples, constants, num_warps=_NUM_WARPS)


def _constants(columns: int, *, part_bytes: int) -> dict[str, int]:
    return {"ROWS": _ROWS, "COLUMNS": columns, "PART_BYTES": part_bytes, **CONSTANTS}


@triton.jit(do_not_specialize=["num_bytes", "constant_term"], do_not_specialize_on_alignment=["digest_ptr"])
def _digest_kernel(
    payload_ptr,
    scratch_ptr,
    digest_ptr,
    num_bytes: tl.int64,
    constant_term: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART_BYTES: tl.constexpr,
    HELD_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
):
    columns_C = tl.arange(0, COLUMNS)
    of_columns_C = tl.zeros([COLUMNS], tl.int32)
    of_rows_R = tl.zeros([HELD_ROWS], tl.int64)
    own_ptr = own_memory(scratch_ptr, COLUMNS, MOST_GROUPS)
    num_tiles = tl.cdiv(num_bytes, 4 * COLUMNS * ROWS)
    tile = tl.program_id(0)
    while tile < num_tiles:
        first_tile = tile
        held = 0
        while tile < held_until(first_tile, num_tiles, ROWS, HELD_ROWS):
            first_row = tile.to(tl.int64) * ROWS
            words_RC = (first_row + tl.arange(0, ROWS))[:, None] * COLUMNS + columns_C[None, :]
            if PART_BYTES >= 4:
                num_words = num_bytes // PART_BYTES * (PART_BYTES // 4)
                word_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
                tile_RC = tl.load(word_ptr + words_RC, mask=words_RC < num_words, other=0)
            else:
                tile_RC = tl.zeros([ROWS, COLUMNS], tl.int32)
                for byte in tl.static_range(4):
                    places_RC = words_RC * 4 + byte
                    bytes_RC = tl.load(payload_ptr + places_RC, mask=places_RC < num_bytes, other=0)
                    tile_RC += bytes_RC.to(tl.int32) << (8 * byte)
            of_columns_C += tl.sum(tile_RC, axis=0)
            held = hold(tl.sum(tile_RC, axis=1), own_ptr, held, ROWS)
            tile += tl.num_programs(0)
        of_rows_R += weigh(own_ptr, held, first_tile, ROWS, HELD_ROWS)
    finish(of_columns_C, columns_C, of_rows_R, constant_term, scratch_ptr, digest_ptr, COLUMNS, GROUP, MOST_GROUPS)


@triton.jit
def own_memory(scratch_ptr, COLUMNS: tl.constexpr, MOST_GROUPS: tl.constexpr):
    """A program's own memory: first for its rows' sums, at the end for its columns' sums."""
    return scratch_ptr + (2 + MOST_GROUPS + tl.program_id(0)) * COLUMNS


@triton.jit
def held_until(first_tile, num_tiles, ROWS: tl.constexpr, HELD_ROWS: tl.constexpr):
    """The tile at which a program must weigh the row sums that it holds since `first_tile`."""
    return tl.minimum(num_tiles, first_tile + HELD_ROWS // ROWS * tl.num_programs(0))


@triton.jit
def hold(sums_R, own_ptr, held, ROWS: tl.constexpr):
    """Appends a tile's row sums to the `held` ones in memory; returns how many are held now. They are not weighed tile
    by tile because every thread would then weigh all of them."""
    tl.store(own_ptr + held + tl.arange(0, ROWS), _wrapped(sums_R))
    return held + ROWS


@triton.jit
def weigh(own_ptr, held, first_tile, ROWS: tl.constexpr, HELD_ROWS: tl.constexpr):
    """The held row sums, of `first_tile` and the program's later tiles, weighed; int64."""
    held_R = tl.arange(0, HELD_ROWS)
    rows_R = (first_tile + held_R // ROWS * tl.num_programs(0)).to(tl.int64) * ROWS + held_R % ROWS
    weights_R = _mix(rows_R.to(tl.uint64) + (1 << 63)) | 1
    tl.debug_barrier()
    sums_R = tl.load(own_ptr + held_R, mask=held_R < held, other=0)
    # The next tile's sums must not overwrite these before they are read.
    tl.debug_barrier()
    return _low_half(sums_R) * weights_R.to(tl.int64, bitcast=True)


@triton.jit
def finish(
    of_columns,
    columns,
    of_rows_R,
    constant_term,
    scratch_ptr,
    digest_ptr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
):
    """Writes a program's sums; the last program of all writes the digest.

    Args:
        of_columns, columns: the sums of a program's columns, and the columns' numbers.
        of_rows_R: the sum of the results of `weigh`.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    group, num_groups = program // GROUP, tl.cdiv(num_programs, GROUP)
    ready_ptr, all_ready_ptr = scratch_ptr + group, scratch_ptr + MOST_GROUPS
    rows_ptr = (scratch_ptr + COLUMNS).to(tl.pointer_type(tl.int64))
    groups_ptr = scratch_ptr + 2 * COLUMNS
    columns_C = tl.arange(0, COLUMNS)

    own_ptr = own_memory(scratch_ptr, COLUMNS, MOST_GROUPS)
    tl.store(own_ptr + columns, _wrapped(of_columns))
    tl.store(rows_ptr + program, tl.sum(of_rows_R, axis=0))
    # NOTE: all threads' stores come before the one thread's count; without the barrier, sums get lost.
    tl.debug_barrier()
    members = min(GROUP, num_programs - group * GROUP)
    if tl.atomic_add(ready_ptr, 1, sem="acq_rel", scope="gpu") == members - 1:
        tl.store(ready_ptr, 0)
        sums_C = _add_up(own_ptr - program % GROUP * COLUMNS, members, COLUMNS, GROUP)
        tl.store(groups_ptr + group * COLUMNS + columns_C, _wrapped(sums_C))
        tl.debug_barrier()
        if tl.atomic_add(all_ready_ptr, 1, sem="acq_rel", scope="gpu") == num_groups - 1:
            tl.store(all_ready_ptr, 0)
            sums_C = _add_up(groups_ptr, num_groups, COLUMNS, MOST_GROUPS)
            weights_C = (_mix(columns_C.to(tl.uint64)) | 1) << 1
            digest = constant_term + tl.sum(_low_half(sums_C) * weights_C.to(tl.int64, bitcast=True), axis=0)
            programs_P = tl.arange(0, GROUP * MOST_GROUPS)
            of_rows_P = tl.load(rows_ptr + programs_P, mask=programs_P < num_programs, other=0, cache_modifier=".cg")
            digest += tl.sum(of_rows_P, axis=0)
            bytes_8 = tl.arange(0, 8)
            tl.store(
                digest_ptr.to(tl.pointer_type(tl.uint8)) + bytes_8, (digest >> (8 * bytes_8).to(tl.int64)).to(tl.uint8)
            )


@triton.jit
def _add_up(rows_ptr, num_rows, COLUMNS: tl.constexpr, MOST_ROWS: tl.constexpr):
    """Adds up the columns of rows that other programs have written."""
    columns_C = tl.arange(0, COLUMNS)
    sums_C = tl.zeros([COLUMNS], tl.int32)
    for row in tl.static_range(MOST_ROWS):
        # NOTE: from the second-level cache, because the first level may still have the lines of an earlier digest.
        sums_C += tl.load(rows_ptr + row * COLUMNS + columns_C, mask=row < num_rows, other=0, cache_modifier=".cg")
    return sums_C


@triton.jit
def _mix(values):
    """The finalizer of splitmix64; uint64."""
    mixed = (values + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _low_half(sums):
    """int32, or the wider type that Triton's interpreter sums int32 in, as an unsigned number in int64."""
    return sums.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _wrapped(sums):
    """int32; in Triton's interpreter sums of int32 do not wrap by themselves."""
    return sums.to(tl.int64).to(tl.int32)
