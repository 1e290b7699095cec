"""Cascade attention: reads the keys that all requests of a batch share once for all queries, reads each request's other
keys as usual, and merges the two results by log-sum-exp. Library API.

Legend: R requests, T tokens, H query heads, D channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.backend import AttentionNeeds
from attention.kernels.decode.attend import MAX_ROWS, decode_attention
from attention.kernels.decode.plan import DecodePlan, decode_tiling, new_decode_plan, new_partials
from attention.kernels.merge import merge_attn_states
from attention.kernels.paged.attend import unified_attention
from attention.metadata import CommonAttentionMetadata
from attention.parameters import AttentionParameters, AttentionType
from baton.kvcache.cache import TORCH_DTYPES

# Query rows of one program of the prefill kernel; the program runs over all keys.
_PREFILL_ROWS = 128
# Time per key of such a program, time per key of a program of the split kernel with all its rows, and time of three
# more launches, in units of the 14 ns in which a multiprocessor reads a key of one kv head. On 132 multiprocessors with
# 32/8 heads of 128: 23 ns, 33 ns and 10 us.
_PREFILL_COST, _SPLIT_COST, _OVERHEAD_COST = 1.6, 2.2, 700.0


@dataclass(frozen=True)
class SharedPrefix:
    """The leading keys that all requests of a batch share, as one request that owns all the batch's queries.

    Attributes:
        query_start_loc: [2] int32.
        seq_lens: [1] int32.
        block_table: [1, blocks] int32.
        num_tokens: number of the batch's queries.
        plan: split of the keys among programs if the queries are too few to fill the GPU; otherwise None.
        rest: the batch without the prefix: its lengths and block tables begin after it.
        splits: number of programs that share the keys, without a plan.
        lens_T: [T] int32, the prefix that each query has; 0: it does not have the prefix. None: all have it.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_tokens: int
    plan: DecodePlan | None
    rest: CommonAttentionMetadata
    splits: int = 1
    lens_T: Tensor | None = None


def share_prefix(
    common: CommonAttentionMetadata, common_prefix_len: int, needs: AttentionNeeds, *, num_sms: int
) -> SharedPrefix | None:
    """Returns the whole blocks of the prefix that lie before every query; None if there are none."""
    shortest = int(common.num_computed_tokens_cpu.min())
    num_blocks = min(common_prefix_len, shortest) // needs.block_size
    if not num_blocks or not common.causal:
        return None
    prefix_len, num_tokens = num_blocks * needs.block_size, common.num_actual_tokens
    seq_lens = torch.tensor([prefix_len], dtype=torch.int32, device=common.seq_lens.device)
    rest = replace(
        common,
        seq_lens=common.seq_lens - prefix_len,
        seq_lens_cpu=common.seq_lens_cpu - prefix_len,
        num_computed_tokens_cpu=common.num_computed_tokens_cpu - prefix_len,
        block_table_tensor=common.block_table_tensor[:, num_blocks:],
    )
    num_rows = num_tokens * needs.num_heads // needs.num_kv_heads
    return SharedPrefix(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=seq_lens.device),
        seq_lens=seq_lens,
        block_table=common.block_table_tensor[:1],
        num_tokens=num_tokens,
        plan=None if _fills(num_rows, needs.num_kv_heads, num_sms) else _split(seq_lens, num_tokens, needs, num_sms),
        rest=rest,
    )


def can_share_prefix(layer: AttentionParameters) -> bool:
    """Whether a layer's scores do not change when keys are counted from the prefix's end, and all its queries see the
    whole prefix."""
    return (
        layer.attn_type is AttentionType.DECODER
        and layer.sliding_window is None
        and layer.attention_chunk_size is None
        and layer.alibi_slopes_H is None
    )


def worth_sharing(
    common_prefix_len: int, query_lens: Sequence[int], *, num_query_heads: int, num_kv_heads: int, num_sms: int
) -> bool:
    """Whether the batch is faster with its prefix attended separately.

    Without sharing, every request reads the prefix for its own query rows; with sharing, rows of different requests
    share tiles.
    """
    group = num_query_heads // num_kv_heads
    alone = num_kv_heads * sum(-(-query_len * group // _PREFILL_ROWS) for query_len in query_lens) / num_sms
    num_rows = sum(query_lens) * group
    if _fills(num_rows, num_kv_heads, num_sms):
        together = _PREFILL_COST * -(-num_kv_heads * -(-num_rows // _PREFILL_ROWS) // num_sms)  # in whole waves
    else:
        together = _SPLIT_COST * num_kv_heads * -(-num_rows // MAX_ROWS) / num_sms
    return (alone - together) * common_prefix_len > _OVERHEAD_COST


def _fills(num_rows: int, num_kv_heads: int, num_sms: int) -> bool:
    """Whether the prefill kernel is faster although it splits no keys and may leave part of the GPU idle."""
    return 3 * num_kv_heads * -(-num_rows // _PREFILL_ROWS) >= num_sms


def _split(seq_lens: Tensor, num_tokens: int, needs: AttentionNeeds, num_sms: int) -> DecodePlan:
    tiling = decode_tiling(needs.head_size, TORCH_DTYPES[needs.cache_dtype])
    row_tiles = -(-num_tokens * needs.num_heads // needs.num_kv_heads // MAX_ROWS)
    # A program with that many rows occupies a multiprocessor alone.
    num_workers = max(1, num_sms // (needs.num_kv_heads * row_tiles))
    partials = new_partials(
        max_num_reqs=1,
        num_workers=num_workers,
        num_heads=num_tokens * needs.num_heads,
        head_size=needs.head_size,
        device=seq_lens.device,
    )
    plan = new_decode_plan(tiling=tiling, max_num_reqs=1, num_workers=num_workers, partials=partials)
    plan.fill(seq_lens)
    return plan


def attend_with_prefix(
    q_THD: Tensor,
    kv_layer: Tensor,
    prefix: SharedPrefix,
    *,
    layer: AttentionParameters,
    attend_rest: Callable[[Tensor, Tensor], None],
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Attends to the prefix and to the rest, and merges the results.

    Args:
        attend_rest: attends to `prefix.rest`, without sinks; writes output [T, H, D] and log-sum-exp [H, T], float32.
    """
    num_tokens, num_heads = prefix.num_tokens, q_THD.shape[1]
    parts = torch.empty(2, num_tokens, *out.shape[1:], dtype=torch.float32, device=out.device)
    lses = torch.empty(2, num_heads, num_tokens, dtype=torch.float32, device=out.device)
    if prefix.plan is not None:
        decode_attention(
            q_THD[:num_tokens],
            kv_layer,
            seq_lens=prefix.seq_lens,
            block_table=prefix.block_table,
            plan=prefix.plan,
            scale=layer.scale,
            logits_soft_cap=layer.logits_soft_cap,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            queries_per_request=num_tokens,
            out=parts[0],
            lse_HR=lses[0],
        )
    else:
        unified_attention(
            q_THD,
            kv_layer,
            query_start_loc=prefix.query_start_loc,
            seq_lens=prefix.seq_lens,
            block_table=prefix.block_table,
            max_query_len=num_tokens,
            scale=layer.scale,
            causal=False,
            logits_soft_cap=layer.logits_soft_cap,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=parts[0],
            lse_HT=lses[0],
            splits=prefix.splits,
        )
    attend_rest(parts[1], lses[1])
    merge_attn_states(
        parts[0],
        lses[0],
        parts[1],
        lses[1],
        out=out[:num_tokens],
        sinks_H=layer.sinks_H,
        prefix_lens_T=prefix.lens_T,
    )
