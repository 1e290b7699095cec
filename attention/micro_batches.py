"""Makes batches out of parts of a batch: micro-batches, and the queries of layers that share KV. Library API.

Legend: R requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.metadata import CommonAttentionMetadata
from baton.core.errors import InternalError


@dataclass(frozen=True)
class MicroBatch:
    """A run of a batch's tokens and the requests that own them. A run may begin or end within a request.

    Attributes:
        request_slice, token_slice: with start and stop, without step.
    """

    request_slice: slice
    token_slice: slice


def slice_query_start_locs(query_start_loc: Tensor, request_slice: slice) -> Tensor:
    """Returns [requests + 1], where the queries of these requests start among their own tokens."""
    return query_start_loc[request_slice.start : request_slice.stop + 1] - query_start_loc[request_slice.start]


def make_metadata_with_slice(micro_batch: MicroBatch, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Returns the metadata of one micro-batch. If a request begins before the micro-batch, its earlier tokens count as
    context; if it continues afterwards, its later tokens are left out. The slots are copied, because metadata may
    change the slots of its padding.

    Raises:
        InternalError: a slice is empty, or the tokens do not belong to the requests.
    """
    requests, tokens = micro_batch.request_slice, micro_batch.token_slice
    starts = common.query_start_loc_cpu
    if not (0 <= requests.start < requests.stop <= common.num_reqs and tokens.start < tokens.stop):
        raise InternalError(f"{micro_batch} of a batch of {common.num_reqs} requests", field="micro_batch")
    before = tokens.start - int(starts[requests.start])
    after = int(starts[requests.stop]) - tokens.stop
    first_len = int(starts[requests.start + 1] - starts[requests.start])
    last_len = int(starts[requests.stop] - starts[requests.stop - 1])
    if not (0 <= before < first_len and 0 <= after < last_len):
        raise InternalError(
            f"tokens {tokens.start} to {tokens.stop} are not those of requests {requests.start} to {requests.stop}",
            field="micro_batch",
        )

    def cut(query_start_loc: Tensor) -> Tensor:
        own = slice_query_start_locs(query_start_loc, requests)
        own[1:] -= before
        own[-1] -= after
        return own

    def shortened(seq_lens: Tensor) -> Tensor:
        own = seq_lens[requests].clone()
        own[-1] -= after
        return own

    computed = common.num_computed_tokens_cpu[requests].clone()
    computed[0] += before
    query_start_loc_cpu = cut(starts)
    return replace(
        common,
        query_start_loc=cut(common.query_start_loc),
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=shortened(common.seq_lens),
        seq_lens_cpu=shortened(common.seq_lens_cpu),
        num_computed_tokens_cpu=computed,
        num_reqs=requests.stop - requests.start,
        num_actual_tokens=tokens.stop - tokens.start,
        max_query_len=int(query_start_loc_cpu.diff().max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[tokens].clone(),
    )


def split_attn_metadata(
    micro_batches: Sequence[MicroBatch], common: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    """Returns the metadata of each micro-batch; see `make_metadata_with_slice`."""
    return [make_metadata_with_slice(micro_batch, common) for micro_batch in micro_batches]


def make_kv_sharing_fast_prefill_common_attn_metadata(
    common: CommonAttentionMetadata, logits_indices: Tensor
) -> CommonAttentionMetadata:
    """Returns the batch for layers that read another layer's KV. Its queries are only the tokens whose logits are
    wanted, because nothing reads these layers' results for other tokens. Such layers store nothing, so no token has a
    slot.

    Args:
        logits_indices: ascending indices of the batch's tokens, on the CPU; they must be the last tokens of each
            request.

    Raises:
        InternalError: a request has no such token, or its tokens are not its last ones.
    """
    if common.max_query_len == 1:
        return common
    ends = common.query_start_loc_cpu[1:]
    requests = torch.bucketize(logits_indices.to(ends.dtype), ends, right=True)
    query_lens_R = torch.bincount(requests, minlength=common.num_reqs)
    starts = torch.zeros_like(common.query_start_loc_cpu)
    torch.cumsum(query_lens_R, 0, out=starts[1:])
    last = torch.cat([torch.arange(end - n, end) for end, n in zip(ends.tolist(), query_lens_R.tolist(), strict=True)])
    if not query_lens_R.all() or not torch.equal(last, logits_indices.to(last.dtype)):
        raise InternalError(
            "a request without logits, or with logits of tokens that are not its last",
            field="logits_indices",
            cure="compute such a batch in full",
        )
    return replace(
        common,
        query_start_loc=starts.to(common.query_start_loc.device),
        query_start_loc_cpu=starts,
        num_computed_tokens_cpu=(common.seq_lens_cpu - query_lens_R).to(common.num_computed_tokens_cpu.dtype),
        num_actual_tokens=len(logits_indices),
        max_query_len=int(query_lens_R.max()),
        slot_mapping=common.slot_mapping.new_full((len(logits_indices),), -1),
    )
