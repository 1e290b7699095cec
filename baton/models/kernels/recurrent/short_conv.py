"""Causal depthwise convolution over a few tokens, with the state of each request.

The twin is in `baton.models.layers.recurrent.short_conv`. The program of a request's first tokens reads the state
before and writes the one after, so no other program may touch it. Legend: T tokens, H heads, C channels of a head, X
channels of all heads, W taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.prompt_tiles import find_tile, most_tiles
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.kernels.recurrent.token_walk import next_decode
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap_alike, start_dependents
from baton.tritonlib.rounding import round_to

# Tokens and channels of one program of a prompt, and how many tokens it computes at once; a decode's program has one.
_TOKENS = 64
_STEP = 16
_CHANNELS = 128
_DECODE_CHANNELS = 256
_NUM_WARPS = 4


def short_conv(
    x_THC: Tensor, weight_XW: Tensor, bias_X: Tensor | None, state_SHCW: Tensor, rows: StateRows, *, silu: bool
) -> Tensor:
    """Implements `baton.models.layers.recurrent.short_conv.short_conv`; tokens of no request get zeros."""
    num_decodes, num_prompts = len(rows.decode_slots_N), len(rows.prompt_slots_P)
    x_THC = x_THC if x_THC.stride(2) == 1 else x_THC.contiguous()
    out_TX = torch.empty((len(x_THC), len(weight_XW)), dtype=x_THC.dtype, device=x_THC.device)
    has_prompts = num_prompts > 0 and rows.max_prompt_tokens > 0
    # NOTE: padding of decodes may stand where tokens of prompts are, so its programs write zeros only in steps without
    # prompts. Programs of prompts write zeros after the last prompt.
    only_decodes = num_decodes >= len(x_THC) and not has_prompts
    if not only_decodes:
        (out_TX[:num_decodes] if has_prompts else out_TX).zero_()
    if num_decodes:
        decodes = rows.decode_slots_N, rows.decode_lens_N, rows.decode_lens_N
        operands = x_THC, weight_XW, bias_X, state_SHCW, out_TX, rows, *decodes
        _launch(*operands, tiles=num_decodes, decodes=True, clears=only_decodes, silu=silu)
    if has_prompts:
        prompts = rows.prompt_slots_P, rows.prompt_starts_P1, rows.prompt_context_P
        tiles = most_tiles(rows, len(x_THC), _TOKENS)
        operands = x_THC, weight_XW, bias_X, state_SHCW, out_TX, rows, *prompts
        _launch(*operands, tiles=tiles, decodes=False, clears=False, silu=silu)
    return out_TX


def _launch(
    x_THC: Tensor,
    weight_XW: Tensor,
    bias_X: Tensor | None,
    state_SHCW: Tensor,
    out_TX: Tensor,
    rows: StateRows,
    slots_R: Tensor,
    starts: Tensor,
    context_R: Tensor,
    *,
    tiles: int,
    decodes: bool,
    clears: bool,
    silu: bool,
) -> None:
    num_tokens, num_channels = out_TX.shape
    channels = _DECODE_CHANNELS if decodes else _CHANNELS
    has_next = decodes and rows.decode_next_N is not None
    _short_conv[(tiles, triton.cdiv(num_channels, channels))](
        x_THC,
        weight_XW,
        bias_X,
        state_SHCW,
        out_TX,
        slots_R,
        starts,
        context_R,
        slots_R if not has_next else rows.decode_next_N,
        rows.snapshot_slots_PM,
        rows.snapshot_lens_PM,
        num_tokens,
        len(slots_R),
        int(has_next),
        int(clears),
        *weight_XW.stride(),
        *x_THC.stride()[:2],
        *state_SHCW.stride(),
        CHANNELS=num_channels,
        HEAD_CHANNELS=state_SHCW.shape[2],
        WIDTH=weight_XW.shape[1],
        DECODES=decodes,
        SILU=silu,
        SNAPSHOTS=0 if decodes else rows.snapshot_slots_PM.shape[1],
        TILE_T=1 if decodes else _TOKENS,
        STEP_T=1 if decodes else _STEP,
        BEGUN=triton.next_power_of_2(max(1, weight_XW.shape[1] - 1)),
        TILE_X=channels,
        INTERPRETED=interpreted(),
        **(overlap_alike(out_TX.device, rows=num_tokens) if decodes else {"OVERLAP": False}),
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "has_next", "clears"])  # no step may wait for another program
def _short_conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    next_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
    num_tokens,
    num_rows,
    has_next,
    clears,
    weight_stride_X,
    weight_stride_W,
    x_stride_T,
    x_stride_H,
    state_stride_S,
    state_stride_H,
    state_stride_C,
    state_stride_W,
    CHANNELS: tl.constexpr,
    HEAD_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DECODES: tl.constexpr,
    SILU: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    TILE_T: tl.constexpr,
    STEP_T: tl.constexpr,
    BEGUN: tl.constexpr,
    TILE_X: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of one request's tokens and channels. For decodes, `context_ptr` has lengths with this token, and the
    program goes on with those that continue the state."""
    start_dependents(OVERLAP)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    PAST: tl.constexpr = WIDTH - 1
    row = tl.program_id(0)
    tile = row * 0
    if not DECODES:
        row, tile = find_tile(row, starts_ptr, context_ptr, num_rows, TILE=TILE_T, ALIGN=1)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=-1).to(tl.int64)
    context = tl.load(context_ptr + row, mask=is_row, other=0)
    if DECODES:
        start = row.to(tl.int64)
        length = tl.where((context > 0) & (row < num_tokens), 1, 0)
        context -= 1
    else:
        start = tl.load(starts_ptr + row).to(tl.int64)
        stop = tl.load(starts_ptr + row + 1, mask=is_row, other=num_tokens)
        length = stop - start.to(tl.int32)
    first = tile * TILE_T
    num_steps = tl.cdiv(tl.minimum(TILE_T, length - first), STEP_T)
    place_T = tl.arange(0, STEP_T)
    x_X = tl.program_id(1) * TILE_X + tl.arange(0, TILE_X)
    in_X = x_X < CHANNELS
    await_predecessors(OVERLAP)
    if (slot >= 0) & (first < length):
        state_ptrs_X = state_ptr + (x_X // HEAD_CHANNELS).to(tl.int64) * state_stride_H
        state_ptrs_X += (x_X % HEAD_CHANNELS) * state_stride_C
        # NOTE: `+ 0` makes a new value. A compiled loop does not carry a name that begins as another name's value and
        # takes that one over in each round, so all rounds would read the first slot. The interpreter carries it.
        before = slot + 0  # of the inputs before these tokens
        while start >= 0:
            before_ptrs_X = state_ptrs_X + before * state_stride_S
            x_ptrs_X = x_ptr + start * x_stride_T + (x_X // HEAD_CHANNELS) * x_stride_H + x_X % HEAD_CHANNELS
            given = x_ptrs_X, x_stride_T, before_ptrs_X, state_stride_W, context
            learnt = weight_ptr, weight_stride_X, weight_stride_W, bias_ptr
            places = out_ptr + start * CHANNELS + x_X, x_X, length
            if DECODES:
                _convolve(given, learnt, places, place_T, CHANNELS, WIDTH, SILU, INTERPRETED, HAS_BEFORE=True)
            else:
                for index in range(bound(num_steps, INTERPRETED)):
                    token_T = first + index * STEP_T + place_T
                    _convolve(given, learnt, places, token_T, CHANNELS, WIDTH, SILU, INTERPRETED, HAS_BEFORE=False)
                if first == 0:
                    begun_T = tl.arange(0, BEGUN)
                    begun_T = tl.where(begun_T < PAST, begun_T, length)
                    _convolve(given, learnt, places, begun_T, CHANNELS, WIDTH, SILU, INTERPRETED, HAS_BEFORE=True)
            if first == 0:
                for kept in tl.static_range(SNAPSHOTS):  # runs before the state, which may hold their inputs, changes
                    snapshot = tl.load(snapshot_slots_ptr + row * SNAPSHOTS + kept).to(tl.int64)
                    stop = tl.load(snapshot_lens_ptr + row * SNAPSHOTS + kept)
                    in_snapshot_X = in_X & (snapshot >= 0)
                    for place in tl.static_range(PAST):
                        token = stop - PAST + place
                        last_X = _input(
                            x_ptrs_X, x_stride_T, before_ptrs_X, state_stride_W, token, context, in_snapshot_X, PAST
                        )
                        place_ptrs_X = state_ptrs_X + snapshot * state_stride_S + place * state_stride_W
                        tl.store(place_ptrs_X, last_X, mask=in_snapshot_X)
                # Oldest first: what a place of the state gets is at a later place or in x.
                for place in tl.static_range(PAST):
                    token = length - PAST + place
                    last_X = _input(x_ptrs_X, x_stride_T, before_ptrs_X, state_stride_W, token, context, in_X, PAST)
                    tl.debug_barrier()  # other threads have read this place
                    tl.store(state_ptrs_X + slot * state_stride_S + place * state_stride_W, last_X, mask=in_X)
            if DECODES:
                tl.debug_barrier()  # other threads read these places
                before, context = slot, length
                start, slot = next_decode(next_ptr, slots_ptr, start, has_next)
            else:
                start = start * 0 - 1
    elif DECODES:
        # Rows that continue others, whose slots are below -1, are not padding.
        is_padding = (clears != 0) & (slot >= -1) & (row < num_tokens)
        tl.store(out_ptr + start * CHANNELS + x_X, tl.zeros([TILE_X], dtype), mask=in_X & is_padding)
    else:
        for index in range(bound(num_steps, INTERPRETED)):
            step = first + index * STEP_T
            none_TX = tl.zeros([STEP_T, TILE_X], dtype)
            none_ptrs_TX = out_ptr + (start + step + place_T)[:, None] * CHANNELS + x_X[None, :]
            tl.store(none_ptrs_TX, none_TX, mask=(step + place_T < length)[:, None] & in_X[None, :])


@triton.jit
def _convolve(
    given,
    learnt,
    places,
    token_T,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """Writes the outputs of some tokens. HAS_BEFORE: also of those with inputs from before the step. Their loads are in
    another order, which would cost all tokens a conversion.

    Args:
        places: pointers of the first token's outputs, their channels, and the number of tokens.
    """
    x_ptrs_X, x_stride_T, before_ptrs_X, state_stride_W, context = given
    weight_ptr, weight_stride_X, weight_stride_W, bias_ptr = learnt
    out_ptrs_X, x_X, length = places
    PAST: tl.constexpr = WIDTH - 1
    in_X = x_X < CHANNELS
    in_T = (token_T < length) & (HAS_BEFORE | (token_T >= PAST))
    in_TX = in_T[:, None] & in_X[None, :]
    sum_TX = tl.zeros([token_T.shape[0], x_X.shape[0]], tl.float32)
    if bias_ptr is not None:
        sum_TX += tl.load(bias_ptr + x_X, mask=in_X, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source_T = token_T - PAST + tap
        ptrs_TX = x_ptrs_X[None, :] + (source_T.to(tl.int64) * x_stride_T)[:, None]
        if HAS_BEFORE and tap < PAST:
            inputs_TX = tl.load(ptrs_TX, mask=in_TX & (source_T >= 0)[:, None], other=0.0).to(tl.float32)
            old_TX = in_TX & ((source_T < 0) & (context > 0))[:, None]
            old_ptrs_TX = before_ptrs_X[None, :] + ((source_T + PAST) * state_stride_W)[:, None]
            inputs_TX += tl.load(old_ptrs_TX, mask=old_TX, other=0.0)
        else:
            inputs_TX = tl.load(ptrs_TX, mask=in_TX, other=0.0).to(tl.float32)
        weight_ptrs_X = weight_ptr + x_X * weight_stride_X + tap * weight_stride_W
        sum_TX += inputs_TX * tl.load(weight_ptrs_X, mask=in_X, other=0.0).to(tl.float32)[None, :]
    if SILU:
        sum_TX = sum_TX / (1 + tl.exp(-sum_TX))
    out_ptrs_TX = out_ptrs_X[None, :] + (token_T.to(tl.int64) * CHANNELS)[:, None]
    tl.store(out_ptrs_TX, round_to(sum_TX, out_ptrs_X.dtype.element_ty, INTERPRETED), mask=in_TX)


@triton.jit
def _input(x_ptrs_X, x_stride_T, state_ptrs_X, state_stride_W, token, context, in_X, PAST: tl.constexpr):
    """A token's input, of the step's tokens or of those before, which are in the state; `token` counts from the first
    of the step."""
    new_X = in_X & (token >= 0)
    input_X = tl.load(x_ptrs_X + token.to(tl.int64) * x_stride_T, mask=new_X, other=0.0).to(tl.float32)
    old_X = in_X & (token < 0) & (context > 0)
    return input_X + tl.load(state_ptrs_X + (token + PAST) * state_stride_W, mask=old_X, other=0.0)
