"""The kernels of `baton.models.kernels.moe.expert_dispatch`, whose page says what they wait for and why that ends.

Legend: R rank, A row of any rank, D channel of a program, K choice of a token.
"""

import triton
import triton.language as tl

from baton.models.kernels.peer_sums import EMPTY
from baton.tritonlib.launch import await_predecessors, start_dependents
from baton.tritonlib.rounding import round_to

_EMPTY = tl.constexpr(EMPTY)
# Stands for the experts of a row that no expert computes.
_NOBODY = tl.constexpr(-2)


@triton.jit(do_not_specialize=["own_rank", "num_tokens", "width"])
def send(
    x_ptr,
    weights_ptr,
    experts_ptr,
    slots_ptr,
    asked_ptr,
    ranks_ptr,
    copies_ptr,
    addresses_ptr,
    turns_ptr,
    own_rank,
    num_tokens,
    width,
    x_stride,
    COPIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sends some channels of one row, to each rank first by another rank; the row's first program sends its experts.
    Rows beyond this rank's have experts too: nobody."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    exists = row < num_tokens
    if slots_ptr is not None:
        exists = exists & (tl.load(slots_ptr + row, mask=exists, other=-1) >= 0)
    choices_K = tl.arange(0, BLOCK_K)
    is_choice_K = (choices_K < CHOICES) & exists
    experts_K = tl.load(experts_ptr + row * CHOICES + choices_K, mask=is_choice_K, other=0).to(tl.int32)
    ranks_K = _ranks(experts_K, is_choice_K, own_rank * width + row, ranks_ptr, copies_ptr, COPIES)
    place = _place(turns_ptr, row, own_rank, RANKS, CAPACITY)
    if part == 0:
        weights_K = tl.load(weights_ptr + row * CHOICES + choices_K, mask=is_choice_K, other=0.0)
        codes_K = tl.where(exists, experts_K, _NOBODY)
        asked = 0
        for step in tl.static_range(RANKS):
            rank = (own_rank + step) % RANKS
            codes_ptr = _codes(addresses_ptr + rank, place, CHOICES)
            tl.store(codes_ptr + choices_K, codes_K, mask=choices_K < CHOICES)
            tl.store(codes_ptr + CHOICES + choices_K, _sendable(weights_K, tl.int32), mask=choices_K < CHOICES)
            asked |= tl.max((ranks_K == rank).to(tl.int32), 0) << rank
        tl.store(asked_ptr + row, asked, mask=row < num_tokens)
    channels_D = part * BLOCK + tl.arange(0, BLOCK)
    exists_D = (channels_D < SIZE) & exists
    x_D = tl.load(x_ptr + row * x_stride + channels_D, mask=exists_D, other=0.0)
    for step in tl.static_range(RANKS):
        rank = (own_rank + step) % RANKS
        is_owner = tl.max((ranks_K == rank).to(tl.int32), 0) > 0
        rows_ptr = _rows(addresses_ptr + rank, x_D.dtype, RANKS, CAPACITY, CHOICES, TURNS)
        bits_D = _sendable(x_D, rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + place * SIZE + channels_D, bits_D, mask=exists_D & is_owner)


@triton.jit(do_not_specialize=["own_rank", "width"])
def receive(
    x_ptr,
    weights_ptr,
    experts_ptr,
    is_own_ptr,
    ranks_ptr,
    copies_ptr,
    addresses_ptr,
    turns_ptr,
    own_rank,
    width,
    COPIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Receives some channels of one row. All programs of the row read its experts, which `send_back` empties."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    index, part = tl.program_id(0), tl.program_id(1)
    source, row = index // width, index % width
    place = _place(turns_ptr, row, source, RANKS, CAPACITY)
    choices_K = tl.arange(0, BLOCK_K)
    is_choice_K = choices_K < CHOICES
    codes_ptrs_K = _codes(addresses_ptr + own_rank, place, CHOICES) + choices_K
    codes_K = _await(codes_ptrs_K, is_choice_K)
    experts_K = tl.maximum(codes_K, 0)
    ranks_K = _ranks(experts_K, is_choice_K & (codes_K >= 0), index, ranks_ptr, copies_ptr, COPIES)
    is_own = tl.max((ranks_K == own_rank).to(tl.int32), 0)
    if part == 0:
        weights_K = _await(codes_ptrs_K + CHOICES, is_choice_K).to(tl.float32, bitcast=True)
        tl.store(weights_ptr + index * CHOICES + choices_K, weights_K, mask=is_choice_K)
        chosen_K = experts_K.to(experts_ptr.dtype.element_ty)
        tl.store(experts_ptr + index * CHOICES + choices_K, chosen_K, mask=is_choice_K)
        tl.store(is_own_ptr + index, is_own)
    channels_D = part * BLOCK + tl.arange(0, BLOCK)
    exists_D = (channels_D < SIZE) & (is_own > 0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    ptrs_D = _rows(addresses_ptr + own_rank, dtype, RANKS, CAPACITY, CHOICES, TURNS) + place * SIZE + channels_D
    bits_D = _await(ptrs_D, exists_D)
    tl.store(ptrs_D, _EMPTY, mask=exists_D)
    tl.store(x_ptr + index.to(tl.int64) * SIZE + channels_D, bits_D.to(dtype, bitcast=True), mask=exists_D)


@triton.jit(do_not_specialize=["own_rank", "width"])
def send_back(
    part_ptr,
    is_own_ptr,
    addresses_ptr,
    turns_ptr,
    own_rank,
    width,
    part_stride,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Returns some channels of one row, if its rank waits for them. The row's first program empties its experts."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    index, part = tl.program_id(0), tl.program_id(1)
    source, row = index // width, index % width
    if part == 0:
        place = _place(turns_ptr, row, source, RANKS, CAPACITY)
        codes_ptr = _codes(addresses_ptr + own_rank, place, CHOICES)
        choices_K = tl.arange(0, BLOCK_K)
        for each in tl.static_range(2):
            tl.store(codes_ptr + each * CHOICES + choices_K, _EMPTY, mask=choices_K < CHOICES)
    channels_D = part * BLOCK + tl.arange(0, BLOCK)
    exists_D = (channels_D < SIZE) & (tl.load(is_own_ptr + index) > 0)
    x_D = tl.load(part_ptr + index.to(tl.int64) * part_stride + channels_D, mask=exists_D, other=0.0)
    back_ptr = _returned(addresses_ptr + source, x_D.dtype, row, RANKS, CAPACITY, SIZE, CHOICES, TURNS)
    tl.store(back_ptr + own_rank * SIZE + channels_D, _sendable(x_D, back_ptr.dtype.element_ty), mask=exists_D)


@triton.jit(do_not_specialize=["own_rank", "num_tokens"])
def add_up(
    out_ptr,
    plus_ptr,
    asked_ptr,
    addresses_ptr,
    turns_ptr,
    own_rank,
    num_tokens,
    INTERPRETED: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds up some channels of one row. The row's first program ends its turn, which no other program reads."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    exists = row < num_tokens
    asked = tl.load(asked_ptr + row, mask=exists, other=0)
    channels_D = part * BLOCK + tl.arange(0, BLOCK)
    exists_D = (channels_D < SIZE) & exists
    back_ptr = _returned(addresses_ptr + own_rank, dtype, row, RANKS, CAPACITY, SIZE, CHOICES, TURNS)
    total_D = tl.zeros([BLOCK], tl.float32)
    missing = 1
    while missing > 0:
        empty_D = tl.zeros([BLOCK], tl.int32)
        for rank in tl.static_range(RANKS):
            mask_D = exists_D & (((asked >> rank) & 1) > 0)
            bits_D = tl.load(back_ptr + rank * SIZE + channels_D, mask=mask_D, other=0, volatile=True)
            empty_D |= (bits_D == _EMPTY).to(tl.int32)
            sent_D = bits_D.to(dtype, bitcast=True).to(tl.float32)
            if rank == 0:
                total_D = sent_D
            else:
                total_D += sent_D
        missing = tl.max(empty_D, 0)
    for rank in tl.static_range(RANKS):
        mask_D = exists_D & (((asked >> rank) & 1) > 0)
        tl.store(back_ptr + rank * SIZE + channels_D, _EMPTY, mask=mask_D)
    sum_D = round_to(total_D, dtype, INTERPRETED)
    if plus_ptr is not None:
        plus_D = tl.load(plus_ptr + row * SIZE + channels_D, mask=exists_D, other=0.0)
        sum_D = round_to(sum_D.to(tl.float32) + plus_D.to(tl.float32), dtype, INTERPRETED)
    tl.store(out_ptr + row * SIZE + channels_D, sum_D, mask=exists_D)
    if part == 0:
        tl.store(turns_ptr + row, 1 - tl.load(turns_ptr + row))


@triton.jit
def _ranks(experts_K, mask_K, index, ranks_ptr, copies_ptr, COPIES: tl.constexpr):
    """The rank that computes each of a row's experts; -1 where there is none."""
    turn_K = index % tl.load(copies_ptr + experts_K, mask=mask_K, other=1)
    return tl.load(ranks_ptr + experts_K * COPIES + turn_K, mask=mask_K, other=-1)


@triton.jit
def _await(ptrs, mask):
    """Numbers that another rank sends, as soon as all of them have arrived."""
    bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    while tl.max((bits == _EMPTY).to(tl.int32), 0) > 0:
        bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    return bits


@triton.jit
def _sendable(x, bits: tl.constexpr):
    """The number's bits, which are not those of an empty place."""
    bits_of_x = x.to(bits, bitcast=True)
    return tl.where(bits_of_x == _EMPTY, 0x7FFF if bits == tl.int16 else 0x7FFFFFFF, bits_of_x).to(bits)


@triton.jit
def _place(turns_ptr, row, source, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Number of the place of a rank's row in the row's turn."""
    return (tl.load(turns_ptr + row).to(tl.int64) * CAPACITY + row) * RANKS + source


@triton.jit
def _codes(address_ptr, place, CHOICES: tl.constexpr):
    return tl.load(address_ptr).to(tl.pointer_type(tl.int32)) + place * 2 * CHOICES


@triton.jit
def _rows(
    address_ptr,
    dtype: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHOICES: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Pointer to the places of rows, as whole numbers of the same size as a channel."""
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    address = tl.load(address_ptr) + TURNS * CAPACITY * RANKS * 2 * CHOICES * 4
    return tl.multiple_of(address.to(tl.pointer_type(bits)), 16)


@triton.jit
def _returned(
    address_ptr,
    dtype: tl.constexpr,
    row,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Pointer to the returned rows of one row."""
    before = TURNS * CAPACITY * RANKS
    place = before + row.to(tl.int64) * RANKS
    return _rows(address_ptr, dtype, RANKS, CAPACITY, CHOICES, TURNS) + place * SIZE
