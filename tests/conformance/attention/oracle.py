"""Attention by its definition, in float64, request by request: the reference for every backend.

It shares no code with `attention`, only its terms. Legend: Q queries, S keys, H query heads, D channels, V value
channels.
"""

import torch
from torch import Tensor

from tests.conformance.attention.settings import Setting


def attend(
    q_QHD: Tensor, k_SHD: Tensor, v_SHV: Tensor, *, scale: float, setting: Setting, pattern_HQS: Tensor | None = None
) -> Tensor:
    """[Q, H, V] float64 of one request, whose queries are its last tokens; keys already one per query head."""
    num_queries, num_keys = q_QHD.shape[0], k_SHD.shape[0]
    device = str(q_QHD.device)
    query_Q1 = (num_keys - num_queries + torch.arange(num_queries, device=device))[:, None]
    key_1S = torch.arange(num_keys, device=device)[None]
    scores_HQS = torch.einsum("qhd,shd->hqs", q_QHD.double(), k_SHD.double()) * scale
    if setting.logits_soft_cap is not None:
        scores_HQS = setting.logits_soft_cap * torch.tanh(scores_HQS / setting.logits_soft_cap)
    slopes_H = setting.slopes(q_QHD.shape[1], device)
    if slopes_H is not None:
        scores_HQS = scores_HQS + slopes_H.double()[:, None, None] * (key_1S - query_Q1)
    seen_QS = key_1S <= query_Q1 if setting.causal else torch.ones_like(key_1S <= query_Q1)
    if setting.sliding_window is not None:
        seen_QS = seen_QS & ((key_1S - query_Q1).abs() < setting.sliding_window)
    if setting.attention_chunk_size is not None:
        seen_QS = seen_QS & (key_1S // setting.attention_chunk_size == query_Q1 // setting.attention_chunk_size)
    seen_HQS = seen_QS[None] if pattern_HQS is None else seen_QS[None] & pattern_HQS
    weights_HQS = scores_HQS.masked_fill(~seen_HQS, -torch.inf).exp()
    total_HQ = weights_HQS.sum(-1)
    sinks_H = setting.sink_logits(q_QHD.shape[1], device)
    if sinks_H is not None:
        total_HQ = total_HQ + sinks_H.double().exp()[:, None]
    return torch.einsum("hqs,shv->qhv", weights_HQS / total_HQ[..., None], v_SHV.double())


def pattern_by_definition(setting: Setting, num_heads: int, num_queries: int, num_keys: int) -> Tensor | None:
    """Which keys [H, Q, S] a block-sparse layer's queries see, as the pattern is published; causality is apart."""
    params = setting.pattern(num_heads, 1, num_keys)
    if params is None:
        return None
    step = max(1, params.vert_stride // num_heads)
    pattern_HQS = torch.zeros(num_heads, num_queries, num_keys, dtype=torch.bool)
    for head in range(num_heads):
        for query in range(num_queries):
            query_block = (num_keys - num_queries + query) // params.block_size
            for key_block in range(query_block + 1):
                local = query_block - key_block < params.local_blocks
                striped = (key_block + head * step + 1) % params.vert_stride == 0
                if local or striped:
                    start = key_block * params.block_size
                    pattern_HQS[head, query, start : start + params.block_size] = True
    return pattern_HQS


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Relative error of norms; infinite if any value is NaN or infinite."""
    error = torch.linalg.vector_norm(out.double() - expected) / torch.linalg.vector_norm(expected)
    return float(error.nan_to_num(nan=torch.inf))
