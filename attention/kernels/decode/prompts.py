"""Attention of prompts with the bits of decodes: units of the same keys, in the same loop, folded in the same order.

A decode's units run in several programs, and a second kernel folds their results. A prompt has rows enough to fill the
GPU, so one program goes through all units of its tile and folds them at once. Tiles begin at multiples of their size,
counted from the sequence's start, so that all of its rows have units of one length. Legend: R requests, H query heads,
G rows (query heads of the tile's tokens), D channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.keys import LOG2_E, HeadKeys, Limits, Queries, attend_keys, load_queries, loop_of
from attention.kernels.decode.merge import fold, no_partials
from attention.kernels.decode.plan import MAX_ROWS, NO_LIMIT, DecodePlan, first_visible_key, unit_keys_of
from baton.tritonlib.launch import bound


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
    out: Tensor,
) -> None:
    """Writes causal attention for the tokens that `query_start_loc` counts; other rows are unchanged.

    Each row has the bits that `decode_attention` gives it with this plan.

    Args:
        q_THD, out: [T, H, D]; a request's queries are its last tokens.
        kv_layer, q_scale, k_scale, v_scale: as for `decode_attention`.
        query_start_loc, seq_lens: [R + 1] and [R] int32, starting at any token. A request without queries is padding.
        block_table: [R, blocks] int32.
        plan: its units are in order, and its `tile_tokens` are `tile_tokens_of` these heads. Its lengths do not count.
    """
    num_tokens, num_heads, _ = q_THD.shape
    num_reqs = query_start_loc.shape[0] - 1
    if not num_tokens or not num_reqs:
        return
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    tile_tokens = tile_tokens_of(group)
    assert plan.units.in_order
    assert plan.units.tile_tokens == tile_tokens
    group_blocks = triton.cdiv(group * tile_tokens, MAX_ROWS)
    keys, values = kv_layer.unbind(0)
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
        LOOP=loop_of(q_THD, kv_layer, plan.tiling, block_g=MAX_ROWS, soft_cap=bool(logits_soft_cap)),
        BLOCK_R=min(256, max(16, triton.next_power_of_2(num_reqs))),
        num_warps=plan.tiling.num_warps * 2,
        num_stages=plan.tiling.num_stages,
        maxnreg=plan.tiling.max_registers,
    )


def tile_tokens_of(group: int) -> int:
    """Number of tokens of a prompt whose rows one program computes.

    Args:
        group: query heads per kv head.
    """
    return max(1, MAX_ROWS // group)


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
    LOOP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attends for one tile and one kv head, or for a part of the rows that read it."""
    TOKENS: tl.constexpr = UNITS.tile_tokens
    BLOCK_G: tl.constexpr = LOOP.block_g
    BLOCK_D: tl.constexpr = LOOP.block_d
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
    q_GD, scale_G = load_queries(q_ptr, rows_G * stride_q_t + heads_G * stride_q_h, valid_G, scale, LOOP)
    queries = Queries(q_GD, scale_G, slopes_G, positions_G)
    first_key = first_visible_key(tl.maximum(tile_start, context) + 1, window, chunk)
    key_stop = tl.minimum(tile_start + TOKENS, seq_len)
    head = kv_head.to(tl.int64) * stride_kv_h
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_r
    keys = HeadKeys(k_ptr + head, v_ptr + head, stride_kv_b, stride_kv_n, table_ptr, first_key, key_stop)

    acc_GD, max_lse2_G, total_G = no_partials(sinks_ptr, heads_G, valid_G, BLOCK_G, BLOCK_D)
    unit_keys = unit_keys_of(key_stop, window, chunk, UNITS)
    first_unit, last_unit = first_key // unit_keys, (key_stop - 1) // unit_keys + 1
    for unit in tl.range(bound(first_unit, LOOP.interpreted), bound(last_unit, LOOP.interpreted)):
        start = tl.maximum(unit * unit_keys, first_key // LOOP.tile_keys * LOOP.tile_keys)
        stop = tl.minimum((unit + 1) * unit_keys, key_stop)
        unit_GD, max_G, sum_G = attend_keys(queries, keys, Limits(window, chunk), start, stop, soft_cap, LOOP)
        sum_G = tl.where(sum_G == 0.0, 1.0, sum_G)  # of a row that sees none of these keys; its largest score is -inf
        out_GD = unit_GD * (v_scale / sum_G)[:, None]
        lse2_G = max_G + tl.log2(sum_G)
        acc_GD, max_lse2_G, total_G = fold(acc_GD, max_lse2_G, total_G, out_GD, lse2_G)
    out_GD = acc_GD / tl.where(valid_G, total_G, 1.0)[:, None]
    channels_D = tl.arange(0, BLOCK_D)
    places_GD = (rows_G * stride_out_t + heads_G * stride_out_h)[:, None] + channels_D[None, :]
    mask_GD = valid_G[:, None] & (channels_D < LOOP.head_size)[None, :]
    tl.store(out_ptr + places_GD, out_GD.to(out_ptr.dtype.element_ty), mask=mask_GD)


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
