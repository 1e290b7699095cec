"""Attention of decodes whose units are in order: every unit leaves a partial result, and a second kernel folds them.

The work of a batch is shared as `attention.kernels.decode.plan` says. Legend: R requests, H query heads, G query rows
(heads of a kv head), D channels.
"""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.loads import prefetch_keys
from attention.kernels.decode.plan import NO_LIMIT, DecodePlan, keys_of_units, unit_keys_of, units_per_worker
from attention.kernels.in_order.fold import fold, fold_partials, no_partials, result
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
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents

# Most query rows of one program. More would not fit into its registers, so larger groups read keys again.
_MAX_ROWS = 32


def attend_decodes(
    q_RHD: Tensor,
    kv_layer: Tensor,
    *,
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
    keys_axis: Literal[0, 1] | None = None,
    out: Tensor,
) -> None:
    """Attends as `attention.kernels.decode.attend.decode_attention` does, for one token of each request.

    Args:
        plan: its units are in order.
        keys_axis: as in `attention.kernels.in_order.tile`. None: keys are rows of the products, but in the interpreter,
            where the bits of a product depend on its shape, they are columns as in prompts.
    """
    assert plan.units.in_order
    num_reqs, num_heads, _ = q_RHD.shape
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    if keys_axis is None:
        keys_axis = 1 if interpreted() else 0
    if keys_axis == 1:
        block_g = PROMPT_ROWS if interpreted() else 64
    else:
        block_g = min(_MAX_ROWS, max(16, triton.next_power_of_2(group)))
    group_blocks = triton.cdiv(group, block_g)
    keys, values = kv_layer.unbind(0)
    tile = tile_of(
        q_RHD,
        kv_layer,
        plan.tiling.tile_keys,
        block_g=block_g,
        keys_axis=keys_axis,
        soft_cap=bool(logits_soft_cap),
        limited=False,
    )
    _decode_kernel[(num_kv_heads * group_blocks, plan.num_workers)](
        q_RHD,
        keys,
        values,
        out,
        plan.partials.out,
        plan.partials.lse2,
        plan.unit_starts,
        plan.first_requests,
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
        plan.num_workers,
        num_heads,
        group_blocks,
        plan.sliding_window or NO_LIMIT,
        plan.attention_chunk_size or NO_LIMIT,
        q_RHD.stride(0),
        q_RHD.stride(1),
        kv_layer.stride(1),
        kv_layer.stride(2),
        kv_layer.stride(3),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        GROUP=group,
        UNITS=plan.units,
        TILE=tile,
        **overlap(out.device, rows=num_reqs),
        num_warps=plan.tiling.num_warps,
        # Results of more rows take the shared memory of a stage.
        num_stages=plan.tiling.num_stages - (block_g > 16),
        maxnreg=plan.tiling.max_registers if keys_axis == 0 else None,
    )
    fold_partials(plan, sinks_H=sinks_H, out=out)


@triton.jit(do_not_specialize=["num_reqs", "num_workers", "window", "chunk", "stride_table_r"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse2_ptr,
    unit_starts_ptr,
    first_requests_ptr,
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
    num_workers,
    num_heads,
    group_blocks,
    window,
    chunk,
    stride_q_r,
    stride_q_h,
    stride_kv_b,
    stride_kv_n,
    stride_kv_h,
    stride_out_r,
    stride_out_h,
    stride_table_r,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one worker's run of units for one kv head, or for a part of the rows that read it."""
    AXIS: tl.constexpr = TILE.keys_axis
    start_dependents(OVERLAP)
    kv_head = tl.program_id(0) // group_blocks
    worker = tl.program_id(1)
    members_G = tl.program_id(0) % group_blocks * TILE.block_g + tl.arange(0, TILE.block_g)
    in_group_G = members_G < GROUP
    heads_G = kv_head * GROUP + members_G
    channels = along_keys(tl.arange(0, TILE.block_d), TILE)
    mask = along_rows(in_group_G, TILE) & (channels < TILE.head_size)
    k_ptr += kv_head.to(tl.int64) * stride_kv_h
    v_ptr += kv_head.to(tl.int64) * stride_kv_h

    num_units = tl.load(unit_starts_ptr + num_reqs)
    share = units_per_worker(num_units, num_workers)
    unit = worker * share
    stop = tl.minimum(unit + share, num_units)
    request = tl.load(first_requests_ptr + worker)
    first_unit = tl.load(unit_starts_ptr + request)
    last_unit = tl.load(unit_starts_ptr + request + 1, mask=request < num_reqs, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    if OVERLAP:
        _, start, key_stop = keys_of_units(
            unit, tl.minimum(unit + 1, last_unit), first_unit, seq_len, window, chunk, TILE.tile_keys, UNITS
        )
        prefetch_keys(
            k_ptr, v_ptr, block_table_ptr + request.to(tl.int64) * stride_table_r, start, key_stop, unit < stop,
            stride_kv_b, stride_kv_n, TILE.head_size, TILE.block_size, TILE.tile_keys,
        )  # fmt: skip
    await_predecessors(OVERLAP)

    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr)
    slopes_G = None
    if alibi_slopes_ptr is not None:
        slopes_G = tl.load(alibi_slopes_ptr + heads_G, mask=in_group_G, other=0.0) * LOG2_E

    while unit < stop:
        # Loaded early for the next request: most programs reach it with no other load in flight.
        next_last_unit = tl.load(unit_starts_ptr + request + 2, mask=request + 1 < num_reqs, other=0)
        next_seq_len = tl.load(seq_lens_ptr + request + 1, mask=request + 1 < num_reqs, other=0)
        if unit < last_unit:
            first_key, start, key_stop = keys_of_units(
                unit, tl.minimum(stop, last_unit), first_unit, seq_len, window, chunk, TILE.tile_keys, UNITS
            )
            unit_keys = unit_keys_of(seq_len, window, chunk, UNITS)
            unit_stop = (start // unit_keys + 1) * unit_keys
            row = request.to(tl.int64)
            q_GD, scale_G = load_queries(q_ptr, row * stride_q_r + heads_G * stride_q_h, in_group_G, scale, TILE)
            table_ptr = block_table_ptr + row * stride_table_r
            keys = HeadKeys(k_ptr, v_ptr, stride_kv_b, stride_kv_n, table_ptr, first_key, seq_len, 0)
            queries = Queries(q_GD, scale_G, slopes_G, None)
            sums = no_keys(TILE)
            blocks_N = load_block_ids(keys, start, key_stop, TILE)
            # Units are not loops of their own, so that the next unit's keys are loaded while this one's are multiplied.
            for key in tl.range(bound(start, TILE.interpreted), bound(key_stop, TILE.interpreted), TILE.tile_keys):
                next_blocks_N = load_block_ids(keys, key + TILE.tile_keys, key_stop, TILE)
                sums = attend_tile(sums, queries, keys, blocks_N, key, Limits(window, chunk), soft_cap, TILE)
                blocks_N = next_blocks_N
                if (key + TILE.tile_keys >= unit_stop) | (key + TILE.tile_keys >= key_stop):
                    out, lse2_G = partial_result(sums, v_scale, TILE)
                    if last_unit - first_unit == 1:
                        folded = no_partials(tl.zeros_like(out), sinks_ptr, heads_G, in_group_G)
                        out = result(fold(folded, out, lse2_G, AXIS), AXIS)
                        places = along_rows(row * stride_out_r + heads_G * stride_out_h, TILE) + channels
                        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)
                    else:
                        places_G = unit.to(tl.int64) * num_heads + heads_G
                        places = along_rows(places_G * TILE.head_size, TILE) + channels
                        tl.store(partial_out_ptr + places, out, mask=mask)
                        tl.store(partial_lse2_ptr + places_G, lse2_G, mask=in_group_G)
                    sums = no_keys(TILE)
                    unit += 1
                    unit_stop += unit_keys
        if unit == last_unit:
            request += 1
            first_unit, last_unit, seq_len = last_unit, next_last_unit, next_seq_len
