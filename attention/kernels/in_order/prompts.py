"""Attention of prompts with the bits of decodes: units of the same keys, tile after tile, folded in the same order.

A decode's units run in several programs, and a second kernel folds their results. A prompt has rows enough to fill the
GPU, so one program goes through all units of its tile and folds them at once. Tiles begin at multiples of their size,
counted from the sequence's start, so that all of its rows have units of one length. Legend: R requests, H query heads,
G rows (query heads of the tile's tokens), D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.plan import NO_LIMIT, DecodePlan, first_visible_key, unit_keys_of
from attention.kernels.in_order.fold import fold, no_partials, result
from attention.kernels.in_order.tile import (
    LOG2_E,
    PROMPT_ROWS,
    HeadKeys,
    Limits,
    Queries,
    along_keys,
    along_rows,
    attend_tile,
    load_block_ids,
    load_queries,
    no_keys,
    partial_result,
    tile_of,
)
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of
from baton.tritonlib.launch import bound, interpreted

_FLOAT32_ROWS = 32
_HOPPER = HopperKernels("prompts in order", probe_of("attention.kernels.in_order.probe"))


def attend_prompts(
    q_THD: Tensor,
    kv_layer: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scale: float,
    logits_soft_cap: float | None = None,
    alibi_slopes_H: Tensor | None = None,
    sinks_H: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    padded: bool = False,
    out: Tensor,
) -> None:
    """Writes causal attention for the tokens that `query_start_loc` counts; other rows are unchanged.

    Each row has the bits that `attend_decodes` gives it with this plan.

    Args:
        q_THD, out: [T, H, D]; a request's queries are its last tokens.
        kv_layer, q_scale, k_scale, v_scale: as for `attention.kernels.decode.attend.decode_attention`.
        query_start_loc, seq_lens: [R + 1] and [R] int32, starting at any token. A request without queries or of length
            0 is padding, whose rows are undefined.
        block_table: [R, blocks] int32.
        plan: its units are in order, and its `tile_tokens` are `tile_tokens_of` these heads. Its lengths do not count.
        padded: in a captured step. The kernel for Hopper is left out there: no GPU has run it with padding yet.
    """
    if not len(q_THD) or len(query_start_loc) == 1:
        return
    assert plan.units.in_order
    assert plan.units.tile_tokens == tile_tokens_of(q_THD.shape[1] // kv_layer.shape[3])
    takes = not (padded or logits_soft_cap or alibi_slopes_H is not None)
    if takes and has_hopper_kernels(q_THD.device, _HOPPER):
        from attention.kernels.in_order import hopper

        if hopper.launch(
            q_THD,
            kv_layer,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            plan=plan,
            scale=scale,
            sinks_H=sinks_H,
            out=out,
        ):
            return
    launch(
        q_THD,
        kv_layer,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        plan=plan,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes_H=alibi_slopes_H,
        sinks_H=sinks_H,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )


def launch(
    q_THD: Tensor,
    kv_layer: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scale: float,
    logits_soft_cap: float | None = None,
    alibi_slopes_H: Tensor | None = None,
    sinks_H: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
) -> None:
    """Launches the kernel for any sizes, dtypes and GPUs; the arguments are those of `attend_prompts`."""
    num_tokens, num_heads, _ = q_THD.shape
    num_reqs = query_start_loc.shape[0] - 1
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    tile_tokens = plan.units.tile_tokens
    # Products of float32 are unrolled into registers, which spill unless tiles are small.
    block_g = _FLOAT32_ROWS if q_THD.dtype == torch.float32 else plan.tiling.prompt_rows
    if interpreted():  # as in decodes there
        block_g = PROMPT_ROWS
    group_blocks = triton.cdiv(group * tile_tokens, block_g)
    keys, values = kv_layer.unbind(0)
    tile = tile_of(
        q_THD,
        kv_layer,
        plan.tiling.tile_keys,
        block_g=block_g,
        keys_axis=1,
        soft_cap=bool(logits_soft_cap),
        limited=bool(plan.sliding_window or plan.attention_chunk_size),
    )
    # A request's tiles: those that its tokens fill, and two that they begin and end in.
    grid = (num_tokens // tile_tokens + 2 * num_reqs, num_kv_heads * group_blocks)
    _prompt_kernel[grid](
        q_THD,
        keys,
        values,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        alibi_slopes_H,
        sinks_H,
        q_scale,
        k_scale,
        v_scale,
        scale,
        logits_soft_cap or 0.0,
        num_reqs,
        group_blocks,
        plan.sliding_window or NO_LIMIT,
        plan.attention_chunk_size or NO_LIMIT,
        q_THD.stride(0),
        q_THD.stride(1),
        kv_layer.stride(1),
        kv_layer.stride(2),
        kv_layer.stride(3),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        GROUP=group,
        UNITS=plan.units,
        TILE=tile,
        BLOCK_R=min(256, max(16, triton.next_power_of_2(num_reqs))),
        num_warps=max(4, block_g // 16),
        num_stages=plan.tiling.prompt_stages,
    )


def tile_tokens_of(group: int) -> int:
    """Number of tokens of a prompt whose rows one program computes.

    Args:
        group: query heads per kv head.
    """
    return max(1, PROMPT_ROWS // group)


@triton.jit(
    do_not_specialize=["num_reqs", "window", "chunk", "stride_table_r"],
    # In a batch with decodes, which come first, these pointers may have any alignment.
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _prompt_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    soft_cap,
    num_reqs,
    group_blocks,
    window,
    chunk,
    stride_q_t,
    stride_q_h,
    stride_kv_b,
    stride_kv_n,
    stride_kv_h,
    stride_out_t,
    stride_out_h,
    stride_table_r,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attends for one tile and one kv head, or for a part of the rows that read it."""
    TOKENS: tl.constexpr = UNITS.tile_tokens
    BLOCK_G: tl.constexpr = TILE.block_g
    AXIS: tl.constexpr = TILE.keys_axis
    request, query_start, query_len, tile = _find_tile(
        query_start_ptr, num_reqs, tl.num_programs(0) - 1 - tl.program_id(0), TOKENS, BLOCK_R
    )
    seq_len = tl.load(seq_lens_ptr + request)
    context = seq_len - query_len
    tile_start = (context // TOKENS + tile) * TOKENS
    if (query_len <= 0) | (tile_start >= seq_len):
        return
    kv_head = tl.program_id(1) // group_blocks
    members_G = tl.program_id(1) % group_blocks * BLOCK_G + tl.arange(0, BLOCK_G)
    heads_G = kv_head * GROUP + members_G % GROUP
    positions_G = tile_start + members_G // GROUP
    valid_G = (members_G < GROUP * TOKENS) & (positions_G >= context) & (positions_G < seq_len)
    rows_G = (query_start + positions_G - context).to(tl.int64)

    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr)
    slopes_G = None
    if alibi_slopes_ptr is not None:
        slopes_G = tl.load(alibi_slopes_ptr + heads_G, mask=valid_G, other=0.0) * LOG2_E
    q_GD, scale_G = load_queries(q_ptr, rows_G * stride_q_t + heads_G * stride_q_h, valid_G, scale, TILE)
    queries = Queries(q_GD, scale_G, slopes_G, positions_G)
    first_key = first_visible_key(tl.maximum(tile_start, context) + 1, window, chunk)
    key_stop = tl.minimum(tile_start + TOKENS, seq_len)
    head = kv_head.to(tl.int64) * stride_kv_h
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_r
    seen_stop = 0 if TILE.limited else tile_start + 1
    keys = HeadKeys(k_ptr + head, v_ptr + head, stride_kv_b, stride_kv_n, table_ptr, first_key, key_stop, seen_stop)

    unit_keys = unit_keys_of(key_stop, window, chunk, UNITS)
    start = first_key // TILE.tile_keys * TILE.tile_keys
    unit_stop = (start // unit_keys + 1) * unit_keys
    sums = no_keys(TILE)
    folded = no_partials(tl.zeros_like(sums.acc), sinks_ptr, heads_G, valid_G)
    blocks_N = load_block_ids(keys, start, key_stop, TILE)
    # Units are not loops of their own, so that the next unit's keys are loaded while this one's are multiplied.
    for key in tl.range(bound(start, TILE.interpreted), bound(key_stop, TILE.interpreted), TILE.tile_keys):
        next_blocks_N = load_block_ids(keys, key + TILE.tile_keys, key_stop, TILE)
        sums = attend_tile(sums, queries, keys, blocks_N, key, Limits(window, chunk), soft_cap, TILE)
        blocks_N = next_blocks_N
        if key + TILE.tile_keys >= unit_stop:
            out, lse2_G = partial_result(sums, v_scale, TILE)
            folded = fold(folded, out, lse2_G, AXIS)
            sums = no_keys(TILE)
            unit_stop += unit_keys
    out, lse2_G = partial_result(sums, v_scale, TILE)  # of the last unit; one without keys changes no bit
    out = result(fold(folded, out, lse2_G, AXIS), AXIS)
    channels_D = tl.arange(0, TILE.block_d)
    places = along_rows(rows_G * stride_out_t + heads_G * stride_out_h, TILE) + along_keys(channels_D, TILE)
    mask = along_rows(valid_G, TILE) & along_keys(channels_D < TILE.head_size, TILE)
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find_tile(query_start_ptr, num_reqs, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Returns (request, start of its queries, their number, number of the tile among those of the request).

    Every request has two tiles more than its tokens fill, so that a tile's request follows from the query starts alone.
    A tile may therefore begin past its request's last token.
    """
    before = 0
    start = 0
    first_query = tl.load(query_start_ptr)
    while start < num_reqs:
        requests_R = start + tl.arange(0, BLOCK_R)
        exists_R = requests_R < num_reqs
        query_starts_R = tl.load(query_start_ptr + requests_R, mask=exists_R, other=0) - first_query
        first_tiles_R = query_starts_R // TOKENS + 2 * requests_R
        before += tl.sum(((first_tiles_R <= tile) & exists_R).to(tl.int32), 0)
        start += BLOCK_R
    request = tl.maximum(before - 1, 0)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    return request, query_start, query_len, tile - ((query_start - first_query) // TOKENS + 2 * request)
