"""Turns a batch into one of decodes, where every new token is a request of its own.

The plain-torch backends compute prompts this way in batch-invariant mode: a token then has the bits of a decode by
construction. Its KV and that of the tokens before it are in the cache when attention begins, so nothing else changes.
Legend: R requests, T tokens.
"""

import numpy as np
import torch

from attention.metadata import CommonAttentionMetadata


def each_token_apart(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Returns the causal batch with a request for each of its actual tokens, in their order.

    Args:
        common: in CPU memory.
    """
    if common.max_query_len == 1:
        return common
    starts = common.query_start_loc_cpu.numpy()
    new_tokens_R = np.diff(starts)
    requests_T = np.repeat(np.arange(common.num_reqs), new_tokens_R)
    context_T = np.arange(starts[-1]) - starts[:-1][requests_T] + common.num_computed_tokens_cpu.numpy()[requests_T]
    context = torch.from_numpy(context_T.astype(np.int32))
    each = torch.arange(len(requests_T) + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=each,
        query_start_loc_cpu=each,
        seq_lens=context + 1,
        seq_lens_cpu=context + 1,
        num_computed_tokens_cpu=context,
        num_reqs=len(requests_T),
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=1,
        block_table_tensor=common.block_table_tensor[torch.from_numpy(requests_T)],
        slot_mapping=common.slot_mapping,
    )
