"""Sparse attention of latent models in plain torch, on the CPU, request by request: the oracle of the kernels.

A request's result depends on no other request. Legend: T queries, S keys, K selected keys, H heads, D channels, C
latent plus rotary channels.
"""

import numpy as np
import torch
from torch import Tensor

from attention.sparse import SparseQueries, best_keys, index_scores, slots_of
from baton.kvcache.access import gather_tokens
from baton.kvcache.tokens import TokenIndex

# Queries whose scores, or selected latents, are in memory at once.
_SCORED_QUERIES, _ATTENDING_QUERIES = 64, 16


def select(q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries) -> Tensor:
    """As `SparseMLABackend.select`; -1 past a query's slots."""
    block_size = index_layer.shape[2]
    slots_TK = torch.full((len(q_THD), queries.width), -1, dtype=torch.int32)
    for request, (start, stop, seq_len) in enumerate(queries.ranges):
        blocks_B = queries.block_table[request]
        positions_S = np.arange(seq_len)
        tokens = TokenIndex(blocks_B.numpy()[positions_S // block_size].astype(np.int64), positions_S % block_size)
        if not seq_len:
            continue
        k_SD = gather_tokens(index_layer, tokens, dtype=q_THD.dtype).view(seq_len, -1)
        for first in range(start, stop, _SCORED_QUERIES):
            rows = slice(first, min(first + _SCORED_QUERIES, stop))
            scores_TS = index_scores(q_THD[rows], weights_TH[rows], k_SD)
            positions_TK = best_keys(scores_TS, queries.seq_lens_T[rows], queries.width)
            table_TB = blocks_B.expand(len(positions_TK), -1)
            slots_TK[rows, : positions_TK.shape[1]] = slots_of(positions_TK, table_TB, block_size)
    return slots_TK


def attend_selected(
    q_THC: Tensor,
    kv_layer: Tensor,
    slots_TK: Tensor,
    queries: SparseQueries,
    *,
    scale: float,
    k_scale: Tensor | None,
    out: Tensor,
) -> None:
    """As `SparseMLABackend.attend_selected`; 0 for a query that sees nothing."""
    for start, stop, seq_len in queries.ranges:
        width = min(seq_len, queries.width)
        for first in range(start, stop, _ATTENDING_QUERIES):
            rows = slice(first, min(first + _ATTENDING_QUERIES, stop))
            out[rows] = _attend(q_THC[rows], kv_layer, slots_TK[rows, :width], scale, k_scale, out.shape[-1])


def _attend(
    q_THC: Tensor, kv_layer: Tensor, slots_TK: Tensor, scale: float, k_scale: Tensor | None, value_dim: int
) -> Tensor:
    if not slots_TK.shape[1]:
        return q_THC.new_zeros(*q_THC.shape[:2], value_dim)
    unseen_TK = slots_TK < 0
    blocks, offsets = np.divmod(slots_TK.clamp(min=0).flatten().numpy().astype(np.int64), kv_layer.shape[2])
    gathered = gather_tokens(kv_layer, TokenIndex(blocks, offsets), dtype=q_THC.dtype, scale=k_scale)
    kv_TKC = gathered.view(*slots_TK.shape, -1).float().masked_fill(unseen_TK.unsqueeze(-1), 0)
    scores_THK = torch.bmm(q_THC.float() * scale, kv_TKC.transpose(1, 2))
    weights_THK = scores_THK.masked_fill_(unseen_TK.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.bmm(weights_THK, kv_TKC[..., :value_dim]).to(q_THC.dtype)
