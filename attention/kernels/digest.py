"""The digest of `attention.digest` on a GPU: of a payload in memory, and the parts with which another kernel digests
what it holds in registers.

A program leaves the sum of each of its rows, and adds up the columns of all of them in registers and leaves those sums
in memory of its own; a second kernel adds up and weighs. (Atomic additions to one memory for all cost 17 us, more than
gathering 4 MB.) All sums wrap, so their order is free.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows that a program takes at a time, its warps, and how many programs a multiprocessor holds at once.
_ROWS = 8
_NUM_WARPS = 4
_PROGRAMS_PER_SM = 6
# Fewer programs where each would have less: every one leaves a whole row of column sums.
_ROWS_PER_PROGRAM_MIN = 8
# Of the second kernel: columns of a program and how many of the first's programs it takes at a time; rows of a program.
_FINISH_COLUMNS = 32
_FINISH_PARTS = 64
_FINISH_ROWS = 2048


@dataclass(frozen=True)
class DigestParts:
    """What the programs of one digest leave.

    Attributes:
        columns: [programs, columns] int32, the sums of each program's rows.
        rows: [rows] int32, the sum of each row.
    """

    columns: Tensor
    rows: Tensor

    @property
    def num_programs(self) -> int:
        return self.columns.shape[0]

    def finish(self, out: Tensor) -> None:
        """Adds up and weighs; `out` holds the length's part, and the digest afterwards."""
        columns, num_rows = self.columns.shape[1], self.rows.shape[0]
        for_columns = columns // _FINISH_COLUMNS
        _finish_kernel[(for_columns + triton.cdiv(num_rows, _FINISH_ROWS),)](
            self.columns,
            self.rows,
            out,
            self.num_programs,
            num_rows,
            COLUMNS=columns,
            WIDTH=_FINISH_COLUMNS,
            PARTS=_FINISH_PARTS,
            ROWS=_FINISH_ROWS,
        )


def new_parts(num_rows: int, columns: int, device: torch.device, *, programs_per_sm: int) -> DigestParts:
    """For as many programs as shall share a payload of so many rows."""
    at_once = programs_per_sm
    if device.type == "cuda":
        at_once *= torch.cuda.get_device_properties(device).multi_processor_count
    programs = max(1, min(at_once, num_rows // _ROWS_PER_PROGRAM_MIN))
    memory = torch.empty(programs * columns + num_rows, dtype=torch.int32, device=device)
    return DigestParts(memory[: programs * columns].view(programs, columns), memory[programs * columns :])


def digest_payload(payload: Tensor, *, columns: int, length_term: int, out: Tensor) -> None:
    """Writes the digest of a contiguous uint8 tensor into `out`, an int64 scalar.

    Args:
        columns: words of a row.
        length_term: the length's part of the digest.
    """
    num_bytes = payload.numel()
    num_rows = triton.cdiv(num_bytes, 4 * columns)
    parts = new_parts(num_rows, columns, payload.device, programs_per_sm=_PROGRAMS_PER_SM)
    _digest_kernel[(parts.num_programs,)](
        payload,
        parts.columns,
        parts.rows,
        out,
        num_bytes,
        num_bytes // 4,
        length_term,
        triton.cdiv(num_rows, _ROWS),
        num_rows,
        ROWS=_ROWS,
        COLUMNS=columns,
        IN_WORDS=num_bytes % 4 == 0 and payload.data_ptr() % 4 == 0,
        num_warps=_NUM_WARPS,
    )
    parts.finish(out)


@triton.jit(do_not_specialize=["num_bytes", "length_term", "num_tiles", "num_rows"])
def _digest_kernel(
    payload_ptr,
    columns_ptr,
    rows_ptr,
    out_ptr,
    num_bytes,
    num_words,
    length_term,
    num_tiles,
    num_rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    columns_C = tl.arange(0, COLUMNS)
    of_columns_C = tl.zeros([COLUMNS], tl.int32)
    tile = tl.program_id(0)
    while tile < num_tiles:
        first_row = tile.to(tl.int64) * ROWS
        words_RC = (first_row + tl.arange(0, ROWS))[:, None] * COLUMNS + columns_C[None, :]
        if IN_WORDS:
            word_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
            tile_RC = tl.load(word_ptr + words_RC, mask=words_RC < num_words, other=0)
        else:
            tile_RC = tl.zeros([ROWS, COLUMNS], tl.int32)
            for byte in tl.static_range(4):
                places_RC = words_RC * 4 + byte
                bytes_RC = tl.load(payload_ptr + places_RC, mask=places_RC < num_bytes, other=0)
                tile_RC += bytes_RC.to(tl.int32) << (8 * byte)
        of_columns_C += tl.sum(tile_RC, axis=0)
        leave_rows(tl.sum(tile_RC, axis=1), first_row, num_rows, rows_ptr, ROWS)
        tile += tl.num_programs(0)
    leave_columns(of_columns_C, columns_C, length_term, columns_ptr, out_ptr, COLUMNS)


@triton.jit
def leave_rows(sums_R, first_row, num_rows, rows_ptr, ROWS: tl.constexpr):
    """Writes sums of consecutive rows for `DigestParts.finish`."""
    rows_R = first_row + tl.arange(0, ROWS)
    tl.store(rows_ptr + rows_R, _wrapped(sums_R), mask=rows_R < num_rows)


@triton.jit
def leave_columns(sums, columns, length_term, columns_ptr, out_ptr, COLUMNS: tl.constexpr):
    """Writes the columns' sums over a program's rows for `DigestParts.finish`."""
    program = tl.program_id(0)
    tl.store(columns_ptr + program * COLUMNS + columns, _wrapped(sums))
    if program == 0:
        tl.store(out_ptr, length_term)


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _finish_kernel(
    columns_ptr,
    rows_ptr,
    out_ptr,
    num_parts,
    num_rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < COLUMNS // WIDTH:
        columns_W = program * WIDTH + tl.arange(0, WIDTH)
        sums_W = tl.zeros([WIDTH], tl.int32)
        part = 0
        while part < num_parts:
            parts_P = part + tl.arange(0, PARTS)
            sums_ptrs_PW = columns_ptr + parts_P[:, None] * COLUMNS + columns_W[None, :]
            sums_W += tl.sum(tl.load(sums_ptrs_PW, mask=(parts_P < num_parts)[:, None], other=0), axis=0)
            part += PARTS
        weights_W = (_mix(columns_W.to(tl.uint64)) | 1) << 1
        total = tl.sum(_low_half(sums_W) * weights_W.to(tl.int64, bitcast=True), axis=0)
    else:
        rows_R = (program - COLUMNS // WIDTH) * ROWS + tl.arange(0, ROWS)
        sums_R = tl.load(rows_ptr + rows_R, mask=rows_R < num_rows, other=0)
        weights_R = _mix(rows_R.to(tl.uint64) + (1 << 63)) | 1
        total = tl.sum(_low_half(sums_R) * weights_R.to(tl.int64, bitcast=True), axis=0)
    tl.atomic_add(out_ptr, total, sem="relaxed")


@triton.jit
def _mix(values):
    """The finalizer of splitmix64; uint64."""
    mixed = (values + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _low_half(sums):
    """int32, or what Triton's interpreter makes of sums of int32, as an unsigned number in int64."""
    return sums.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _wrapped(sums):
    """int32; in Triton's interpreter sums of int32 do not wrap by themselves."""
    return sums.to(tl.int64).to(tl.int32)
