"""Batched decodes in plain torch: one padded gather and one call for requests of similar length.

Both torch backends use it. Legend: R requests, S keys (padded), K kv heads, G query
heads per kv head, H query heads, D channels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.backends.torch_softmax import needs_softmax, softmax_attention
from attention.blocksparse import BlocksparseParams
from attention.blocksparse_mask import block_mask
from attention.parameters import AttentionParameters
from baton.kvcache.access import gather_tokens
from baton.kvcache.tokens import TokenIndex

# A second call costs as much as about this many padded tokens: 60 us against 0.2-0.5 us for each of 2 KiB.
_WASTE_TOKENS = 256


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes that share one gather and one call.

    Attributes:
        rows: the requests' rows of the query; None: all decodes, in order.
        num_rows: number of rows.
        tokens: the keys that each request sees, [R * S]; a short row is padded with the request's own last token.
        mask: [R, 1, 1, S], -inf over the padding; None: there is no padding.
        positions_RS: positions of the keys; the padding is at the query's own position.
        query_positions_R: positions of the queries.
    """

    rows: Tensor | None
    num_rows: int
    tokens: TokenIndex
    mask: Tensor | None
    positions_RS: NDArray[np.int64]
    query_positions_R: NDArray[np.int64]


def plan_decodes(
    seq_lens_R: NDArray[np.int32],
    block_table: NDArray[np.int32],
    *,
    block_size: int,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    mask_dtype: torch.dtype,
    apart: bool = False,
) -> tuple[DecodeGroup, ...]:
    """Groups the decodes, longest first, such that padding costs less than another call.

    Args:
        apart: give every request its own group, so that its result depends on no other request.
    """
    if not len(seq_lens_R):
        return ()
    stops_R = seq_lens_R.astype(np.int64)
    starts_R = np.zeros_like(stops_R)
    if sliding_window is not None:
        starts_R = np.maximum(starts_R, stops_R - sliding_window)
    if attention_chunk_size is not None:
        starts_R = np.maximum(starts_R, (stops_R - 1) // attention_chunk_size * attention_chunk_size)
    groups = np.split(np.arange(len(stops_R)), len(stops_R)) if apart else _group_by_length(stops_R - starts_R)
    return tuple(
        _plan_group(
            None if len(groups) == 1 else rows,
            starts_R[rows],
            stops_R[rows],
            block_table[rows],
            block_size=block_size,
            mask_dtype=mask_dtype,
        )
        for rows in groups
    )


def attend_decodes(
    q_RHD: Tensor,
    kv_layer: Tensor,
    groups: tuple[DecodeGroup, ...],
    *,
    scale: float,
    layer: AttentionParameters | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
) -> None:
    """Attends with one query per request. In a latent cache (K = 1) a row is key and value at once, so only the first
    `out.shape[-1]` channels of the output are kept.

    Args:
        layer: parameters besides `scale`; None: there are none.
        k_scale, v_scale: of an fp8 cache; a latent cache has only `k_scale`.
    """
    num_kv_heads, head_dim = kv_layer.shape[3:]
    value_dim = out.shape[-1]
    written_out = layer is not None and needs_softmax(layer)
    for group in groups:
        q = q_RHD if group.rows is None else q_RHD.index_select(0, group.rows)
        # The query heads of a kv head share its keys, so they are passed as several queries and SDPA need not repeat
        # the keys. 2 times faster than enable_gqa in float32, 5-20 times in bfloat16.
        q = q.view(group.num_rows, num_kv_heads, -1, head_dim)
        kv = gather_tokens(kv_layer, group.tokens, dtype=q.dtype, scale=k_scale, v_scale=v_scale)
        kv = kv.view(kv.shape[0], group.num_rows, -1, num_kv_heads, head_dim).transpose(2, 3)
        if not len(group.tokens):
            attended = torch.zeros_like(q)
        elif written_out:
            assert layer is not None
            attended = _attend_written_out(q, kv[0], kv[-1], group, layer)
        else:
            attended = scaled_dot_product_attention(q, kv[0], kv[-1], attn_mask=group.mask, scale=scale)
        attended = attended[..., :value_dim].to(out.dtype)
        if group.rows is None:
            out.view(attended.shape).copy_(attended)
        else:
            out.index_copy_(0, group.rows, attended.flatten(1, 2))


def _attend_written_out(
    q_RKGD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, group: DecodeGroup, layer: AttentionParameters
) -> Tensor:
    unseen = None if group.mask is None else group.mask.bool().unsqueeze(1)
    if layer.blocksparse is not None:
        pattern_RHS = torch.from_numpy(_unseen_by_pattern(group, layer.blocksparse))
        pattern = pattern_RHS.unflatten(1, (k_RKSD.shape[1], -1)).unsqueeze(3)
        unseen = pattern if unseen is None else unseen | pattern
    attended_RKGTD = softmax_attention(
        q_RKGD.unsqueeze(3),
        k_RKSD,
        v_RKSD,
        layer=layer,
        distance_xTS=torch.from_numpy(group.positions_RS - group.query_positions_R[:, None]).unsqueeze(1),
        unseen=unseen,
    )
    return attended_RKGTD.squeeze(3)


def _unseen_by_pattern(group: DecodeGroup, params: BlocksparseParams) -> NDArray[np.bool_]:
    """[R, H, S], True where a block-sparse pattern hides the key from the query."""
    key_blocks_RS = group.positions_RS // params.block_size
    query_blocks_R = group.query_positions_R // params.block_size
    rows = zip(key_blocks_RS, query_blocks_R.tolist(), strict=True)
    return np.stack([~block_mask(params, 1, last + 1)[:, 0, key_blocks_S] for key_blocks_S, last in rows])


def _group_by_length(lengths_R: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    shortest = int(lengths_R.min())
    if shortest and int(lengths_R.max()) * len(lengths_R) - int(lengths_R.sum()) <= _WASTE_TOKENS:
        return [np.arange(len(lengths_R))]
    order = np.argsort(-lengths_R, kind="stable")
    boundaries, longest, waste = [], int(lengths_R[order[0]]), 0
    for place, length in enumerate(lengths_R[order].tolist()):
        waste += longest - length
        # A request without keys has no last token that could pad its row.
        if waste > _WASTE_TOKENS or (longest and not length):
            boundaries.append(place)
            longest, waste = length, 0
    return np.split(order, boundaries)


def _plan_group(
    rows: NDArray[np.int64] | None,
    starts_R: NDArray[np.int64],
    stops_R: NDArray[np.int64],
    block_table: NDArray[np.int32],
    *,
    block_size: int,
    mask_dtype: torch.dtype,
) -> DecodeGroup:
    longest = int((stops_R - starts_R).max())
    positions_RS = starts_R[:, None] + np.arange(longest)
    mask = None
    if len(starts_R) > 1 and (filled_up := positions_RS >= stops_R[:, None]).any():
        positions_RS = np.minimum(positions_RS, stops_R[:, None] - 1)
        mask = torch.zeros(filled_up.shape, dtype=mask_dtype)
        mask = mask.masked_fill_(torch.from_numpy(filled_up), -torch.inf)[:, None, None, :]
    blocks_RS, offsets_RS = np.divmod(positions_RS, block_size)
    block_ids_RS = block_table[np.arange(len(stops_R))[:, None], blocks_RS].astype(np.int64)
    tokens = TokenIndex(block_ids_RS.reshape(-1), offsets_RS.reshape(-1))
    return DecodeGroup(
        rows=None if rows is None else torch.from_numpy(rows),
        num_rows=len(starts_R),
        tokens=tokens,
        mask=mask,
        positions_RS=positions_RS,
        query_positions_R=stops_R - 1,
    )
