"""Attention of few queries per request over the paged cache. A plan splits keys among workers.

Its time is the time to read the cache. The query heads of a kv head share its keys, padded to the 16 rows of a tensor
core's product, while the loads of the next tiles are in flight. Legend: R requests, H query heads, G query heads per kv
head, M those that a worker merges, N keys of a tile, D channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.loads import in_half, prefetch_keys
from attention.kernels.decode.merge import (
    Output,
    launch_merge,
    merge_partials,
    merged_at_once,
    merges_within,
    store_partial,
    store_result,
)
from attention.kernels.decode.plan import NO_LIMIT, DecodePlan, keys_of_units, units_per_worker
from attention.quantized_output import QuantizedOutput
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents
from baton.tritonlib.math import tanh

_LOG2_E = tl.constexpr(1.4426950408889634)
# Rows of one program, one per query head. More would not fit into its registers, so larger groups read keys again.
MAX_ROWS = 64


def decode_attention(
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
    queries_per_request: int = 1,
    out: Tensor | QuantizedOutput,
    lse_HR: Tensor | None = None,
) -> None:
    """Attends with the last token of each request to the keys in the plan's window and chunk.

    A request of length 0 is padding: its output is 0, its log-sum-exp -inf without sinks, and nothing is read for it.

    Args:
        q_RHD: several queries of a request follow each other; no feature may then depend on their positions.
        kv_layer: [2, B, N, H, D], any strides but a last one of 1.
        q_scale, k_scale, v_scale: float32 scalars on the device, for 8-bit queries, keys and values; None: 1.
        seq_lens: [R] int32, the lengths that the plan was filled with.
        block_table: [R, blocks] int32. Plan, lengths and table are read before the previous kernel has ended, so they
            must be complete before that kernel starts.
        out: quantized only if heads have 128 channels, or a power of two times as many.
        lse_HR: float32, natural log-sum-exp, sinks included.
    """
    assert not plan.units.in_order
    num_rows, num_heads, head_size = q_RHD.shape
    assert queries_per_request == 1 or alibi_slopes_H is None
    num_reqs = num_rows // queries_per_request
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    block_group = min(MAX_ROWS, max(16, triton.next_power_of_2(group * queries_per_request)))
    group_blocks = triton.cdiv(group * queries_per_request, block_group)
    keys, values = kv_layer.unbind(0)
    block_channels = max(16, triton.next_power_of_2(head_size))
    merges = merges_within(num_reqs, plan.num_workers)
    merged_heads = min(block_group, triton.next_power_of_2(group * queries_per_request))
    tiling, partials = plan.tiling, plan.partials
    num_warps = tiling.num_warps * (2 if block_group == MAX_ROWS else 1)
    output = Output.of(out)
    _decode_kernel[(num_kv_heads * group_blocks, plan.num_workers)](
        q_RHD,
        keys,
        values,
        output.rows,
        output.scales,
        lse_HR,
        partials.out,
        partials.lse2,
        partials.arrived,
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
        queries_per_request,
        group_blocks,
        plan.sliding_window or NO_LIMIT,
        plan.attention_chunk_size or NO_LIMIT,
        q_RHD.stride(0),
        q_RHD.stride(1),
        kv_layer.stride(1),
        kv_layer.stride(2),
        kv_layer.stride(3),
        *output.strides,
        0 if lse_HR is None else lse_HR.stride(0),
        block_table.stride(0),
        HEAD_SIZE=head_size,
        BLOCK_D=block_channels,
        GROUP=group,
        BLOCK_G=block_group,
        BLOCK_SIZE=kv_layer.shape[2],
        TILE_KEYS=tiling.tile_keys,
        UNITS=plan.units,
        SOFT_CAP=bool(logits_soft_cap),
        MERGES=merges,
        MERGED_HEADS=merged_heads,
        MERGED_PARTIALS=merged_at_once(merged_heads, block_channels, num_warps=num_warps),
        ROUNDED=output.rounded,
        POWER_OF_TWO=output.power_of_two,
        INTERPRETED=interpreted(),
        **overlap(q_RHD.device, rows=num_rows),
        num_warps=num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )
    if not merges:
        launch_merge(plan, queries_per_request=queries_per_request, sinks_H=sinks_H, out=output, lse_HR=lse_HR)


@triton.jit(
    do_not_specialize=["num_reqs", "num_workers", "window", "chunk", "stride_scale", "stride_lse_h", "stride_table_r"],
    do_not_specialize_on_alignment=["block_table_ptr"],  # a cascade's rest begins anywhere
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse2_ptr,
    arrived_ptr,
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
    num_queries,
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
    stride_scale,
    stride_lse_h,
    stride_table_r,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    UNITS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MERGES: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    MERGED_PARTIALS: tl.constexpr,
    ROUNDED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one worker's run of units for one kv head, or for a part of the rows that read it."""
    start_dependents(OVERLAP)
    kv_head = tl.program_id(0) // group_blocks
    worker = tl.program_id(1)
    members_G = tl.program_id(0) % group_blocks * BLOCK_G + tl.arange(0, BLOCK_G)
    in_group_G = members_G < GROUP * num_queries
    queries_G = members_G // GROUP
    heads_G = kv_head * GROUP + members_G % GROUP
    channels_D = tl.arange(0, BLOCK_D)
    in_head_D = channels_D < HEAD_SIZE

    q_type: tl.constexpr = q_ptr.dtype.element_ty
    kept_type: tl.constexpr = k_ptr.dtype.element_ty
    # 8-bit numbers are multiplied in float16, which represents all of them; one instruction converts them.
    IN_HALF: tl.constexpr = kept_type.primitive_bitwidth == 8 and q_type != tl.float32
    product_type: tl.constexpr = tl.float32 if INTERPRETED else tl.float16 if IN_HALF else q_type

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
            unit, tl.minimum(stop, last_unit), first_unit, seq_len, window, chunk, TILE_KEYS, UNITS
        )
        prefetch_keys(
            k_ptr + kv_head.to(tl.int64) * stride_kv_h,
            v_ptr + kv_head.to(tl.int64) * stride_kv_h,
            block_table_ptr + request.to(tl.int64) * stride_table_r,
            start, key_stop, (unit < stop) & (seq_len > 0), stride_kv_b, stride_kv_n, HEAD_SIZE, BLOCK_SIZE, TILE_KEYS,
        )  # fmt: skip
    await_predecessors(OVERLAP)

    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr)
    if alibi_slopes_ptr is not None:
        slopes_G = tl.load(alibi_slopes_ptr + heads_G, mask=in_group_G, other=0.0) * _LOG2_E

    while unit < stop:
        run_stop = tl.minimum(stop, last_unit)
        # Loaded early for the next request: most programs reach it with no other load in flight.
        next_last_unit = tl.load(unit_starts_ptr + request + 2, mask=request + 1 < num_reqs, other=0)
        next_seq_len = tl.load(seq_lens_ptr + request + 1, mask=request + 1 < num_reqs, other=0)
        first_key, start, key_stop = keys_of_units(unit, run_stop, first_unit, seq_len, window, chunk, TILE_KEYS, UNITS)
        rows_G = request.to(tl.int64) * num_queries + queries_G
        q_GD = tl.load(
            q_ptr + (rows_G * stride_q_r + heads_G * stride_q_h)[:, None] + channels_D[None, :],
            mask=in_group_G[:, None] & in_head_D[None, :],
            other=0.0,
        )
        scale_G = tl.full([BLOCK_G], 1.0, tl.float32) * scale
        if IN_HALF and q_type == tl.bfloat16:
            # Powers of two scale a query to about 1, so that it stays in float16's range.
            q_GD = q_GD.to(tl.float32)
            size_G = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(q_GD), 1), 2.0**-100))))
            q_GD = q_GD / size_G[:, None]
            scale_G *= size_G
        q_GD = q_GD.to(product_type)
        table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_r
        offset_D = kv_head.to(tl.int64) * stride_kv_h + channels_D
        acc_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        max_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
        sum_G = tl.zeros([BLOCK_G], tl.float32)
        keys_N = start + tl.arange(0, TILE_KEYS)
        seen_N = (keys_N >= first_key) & (keys_N < key_stop)
        blocks_N = tl.load(table_ptr + keys_N // BLOCK_SIZE, mask=seen_N, other=0)
        for tile in tl.range(bound(start, INTERPRETED), bound(key_stop, INTERPRETED), TILE_KEYS):
            keys_N = tile + tl.arange(0, TILE_KEYS)
            seen_N = (keys_N >= first_key) & (keys_N < seq_len)
            rows_N = blocks_N.to(tl.int64) * stride_kv_b + keys_N % BLOCK_SIZE * stride_kv_n
            # Loaded one tile ahead: loading the address in the same iteration would halve the loads in flight.
            next_N = keys_N + TILE_KEYS
            blocks_N = tl.load(table_ptr + next_N // BLOCK_SIZE, mask=next_N < key_stop, other=0)
            places_ND = rows_N[:, None] + offset_D[None, :]
            mask_ND = seen_N[:, None] & in_head_D[None, :]
            # NOTE: unwritten memory may hold NaN, and 0 * NaN is NaN, so both loads are masked to 0.
            k_ND = tl.load(k_ptr + places_ND, mask=mask_ND, other=0.0).to(product_type)
            scores_GN = tl.dot(q_GD, tl.trans(k_ND), input_precision="ieee") * scale_G[:, None]
            if SOFT_CAP:
                scores_GN = soft_cap * tanh(scores_GN / soft_cap)
            scores_GN *= _LOG2_E
            if alibi_slopes_ptr is not None:
                scores_GN += slopes_G[:, None] * (keys_N - (seq_len - 1))[None, :].to(tl.float32)
            scores_GN = tl.where(seen_N[None, :], scores_GN, float("-inf"))
            new_max_G = tl.maximum(max_G, tl.max(scores_GN, 1))
            weights_GN = tl.exp2(scores_GN - new_max_G[:, None])
            rescale_G = tl.exp2(max_G - new_max_G)
            sum_G = sum_G * rescale_G + tl.sum(weights_GN, 1)
            v_ND = tl.load(v_ptr + places_ND, mask=mask_ND, other=0.0)
            if IN_HALF and tl.target_info.cuda_capability_geq(8, 9) and not INTERPRETED:
                v_ND = in_half(v_ND)
            else:
                v_ND = v_ND.to(product_type)
            acc_GD = acc_GD * rescale_G[:, None]
            acc_GD = tl.dot(weights_GN.to(product_type), v_ND, acc_GD, input_precision="ieee")
            max_G = new_max_G

        if (unit == first_unit) & (run_stop == last_unit):
            if sinks_ptr is not None:
                sinks_G = tl.load(sinks_ptr + heads_G, mask=in_group_G, other=0.0).to(tl.float32) * _LOG2_E
                new_max_G = tl.maximum(max_G, sinks_G)
                rescale_G = tl.exp2(max_G - new_max_G)
                sum_G = sum_G * rescale_G + tl.exp2(sinks_G - new_max_G)
                acc_GD *= rescale_G[:, None]
                max_G = new_max_G
            sum_G = tl.where(seq_len > 0, sum_G, 1.0) if sinks_ptr is None else sum_G
            store_result(
                acc_GD * (v_scale / sum_G)[:, None], max_G + tl.log2(sum_G), rows_G, heads_G, in_group_G,
                out_ptr, out_scale_ptr, lse_ptr, stride_out_r, stride_out_h, stride_scale, stride_lse_h,
                HEAD_SIZE, ROUNDED, POWER_OF_TWO, INTERPRETED,
            )  # fmt: skip
        else:
            store_partial(
                acc_GD * (v_scale / sum_G)[:, None], max_G + tl.log2(sum_G), request + worker, queries_G, heads_G,
                in_group_G, partial_out_ptr, partial_lse2_ptr, num_queries, num_heads, HEAD_SIZE,
            )  # fmt: skip
            if MERGES:
                first_worker = first_unit // share
                num_partials = (last_unit - 1) // share - first_worker + 1
                counter_ptr = arrived_ptr + request * tl.num_programs(0) + tl.program_id(0)
                # NOTE: all threads' stores come before the one thread's count; else partial results get lost.
                tl.debug_barrier()
                if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_partials - 1:
                    members_M = tl.program_id(0) % group_blocks * BLOCK_G + tl.arange(0, MERGED_HEADS)
                    in_group_M = members_M < GROUP * num_queries
                    queries_M = members_M // GROUP
                    heads_M = kv_head * GROUP + members_M % GROUP
                    out_MD, lse2_M = merge_partials(
                        request + first_worker, num_partials, queries_M, heads_M, in_group_M,
                        partial_out_ptr, partial_lse2_ptr, sinks_ptr, num_queries, num_heads,
                        HEAD_SIZE, BLOCK_D, MERGED_PARTIALS, INTERPRETED,
                    )  # fmt: skip
                    store_result(
                        out_MD, lse2_M, request.to(tl.int64) * num_queries + queries_M, heads_M, in_group_M,
                        out_ptr, out_scale_ptr, lse_ptr, stride_out_r, stride_out_h, stride_scale, stride_lse_h,
                        HEAD_SIZE, ROUNDED, POWER_OF_TWO, INTERPRETED,
                    )  # fmt: skip
                    tl.store(counter_ptr, 0)
        unit = run_stop
        if unit == last_unit:
            request += 1
            first_unit, last_unit, seq_len = last_unit, next_last_unit, next_seq_len
