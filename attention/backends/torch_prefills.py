"""Prefills in plain torch, request by request and piece by piece, so that masks and scores stay small.

Legend: T tokens, S keys of one request, K kv heads, G query heads per kv head, D channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.backends.torch_softmax import needs_softmax, softmax_attention
from attention.backends.torch_visibility import KeyVisibility, unseen_by_pattern
from attention.parameters import AttentionParameters
from baton.kvcache.access import gather_tokens
from baton.kvcache.tokens import TokenIndex

# Queries per call. The limit bounds the mask and the wasted scores above the diagonal.
_PIECE_TOKENS = 256


@dataclass(frozen=True)
class PromptPiece:
    """A run of one request's queries and the keys that they see: queries [query_start, query_stop) of the batch, the
    first at `position` of its sequence, over keys [key_start, key_stop), counted among the keys that the request
    reads."""

    query_start: int
    query_stop: int
    position: int
    key_start: int
    key_stop: int

    @property
    def num_queries(self) -> int:
        return self.query_stop - self.query_start

    @property
    def num_keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True)
class Prefill:
    """One request's prefill: its queries and where their keys are.

    Attributes:
        keys: places of the request's keys in the cache, or their rows among the call's own keys.
        first_key: position of the first key.
    """

    keys: TokenIndex | slice
    first_key: int
    pieces: tuple[PromptPiece, ...]


@dataclass(frozen=True)
class TorchPrefills:
    """The plan of a batch's prefills. `mask` is [rows, keys] for fused attention. A causal piece takes the mask's lower
    right corner: whether a query sees a key depends only on their distances from the piece's last. Pieces never cross a
    chunk's border."""

    sight: KeyVisibility
    requests: tuple[Prefill, ...]
    mask: Tensor | None


def plan_prefills(
    sight: KeyVisibility,
    query_starts: list[int],
    seq_lens: list[int],
    block_table: NDArray[np.int32],
    *,
    block_size: int,
    mask_dtype: torch.dtype,
) -> TorchPrefills:
    """Plans the prefills of a batch, request by request.

    Args:
        query_starts: index of each request's first query, then the total number of queries.
        seq_lens: each request's number of keys in the cache.
    """
    requests = []
    for request, seq_len in enumerate(seq_lens):
        query_start, query_stop = query_starts[request : request + 2]
        keys: TokenIndex | slice
        if sight.own_keys:
            num_keys, first_key, keys = query_stop - query_start, 0, slice(query_start, query_stop)
        else:
            num_keys = seq_len
            position = np.array([seq_len - (query_stop - query_start)])
            first_key = max(0, int(sight.first_keys(position)[0]))
            blocks_S, offsets_S = np.divmod(np.arange(first_key, seq_len), block_size)
            keys = TokenIndex(block_table[request][blocks_S].astype(np.int64), offsets_S)
        pieces = tuple(_pieces(sight, query_start, query_stop, num_keys, first_key))
        requests.append(Prefill(keys, first_key, pieces))
    return TorchPrefills(sight, tuple(requests), _mask(sight, requests, mask_dtype))


def attend_prefills(
    q_THD: Tensor,
    kv_layer: Tensor,
    own_kv: tuple[Tensor | None, Tensor | None],
    prefills: TorchPrefills,
    *,
    layer: AttentionParameters,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
) -> None:
    """Attends with each request's queries to its keys.

    Args:
        own_kv: the call's own keys and values, [T, K, D], for an encoder.
        k_scale, v_scale: of an fp8 cache.
    """
    sight = prefills.sight
    fused = not needs_softmax(layer) and (sight.causal or sight.is_everything)
    q_1HTD = q_THD.transpose(0, 1).unsqueeze(0)
    for request in prefills.requests:
        if isinstance(request.keys, TokenIndex):
            kv_KSHD = gather_tokens(kv_layer, request.keys, dtype=q_THD.dtype, scale=k_scale, v_scale=v_scale)
            k_1KSD, v_1KSD = kv_KSHD.transpose(1, 2).unsqueeze(1).unbind(0)
        else:
            k_1KSD, v_1KSD = (_heads_first(kv_TKD, request.keys) for kv_TKD in own_kv)
        for piece in request.pieces:
            queries, keys = slice(piece.query_start, piece.query_stop), slice(piece.key_start, piece.key_stop)
            # NOTE: copied, because a CPU's library may choose its method by address, so bits would depend on the rows
            # before.
            q_piece = q_1HTD[:, :, queries].clone(memory_format=torch.contiguous_format)
            tensors = q_piece, k_1KSD[:, :, keys], v_1KSD[:, :, keys]
            if not piece.num_keys:
                out[queries].zero_()
            elif fused:
                attended = _attend_fused(*tensors, prefills.mask, scale=layer.scale)
                out[queries].copy_(attended[0].transpose(0, 1))
            else:
                attended = _attend_written_out(*tensors, piece, request.first_key, sight, layer=layer)
                out[queries].copy_(attended[0].transpose(0, 1))


def _pieces(
    sight: KeyVisibility, query_start: int, query_stop: int, num_keys: int, first_key: int
) -> Iterator[PromptPiece]:
    context_len = num_keys - (query_stop - query_start)
    start = query_start
    while start < query_stop:
        position = context_len + start - query_start
        stop = min(start + _PIECE_TOKENS, query_stop)
        if sight.attention_chunk_size is not None:
            stop = min(stop, start + sight.attention_chunk_size - position % sight.attention_chunk_size)
        key_start = max(0, int(sight.first_keys(np.array([position]))[0]))
        key_stop = sight.stop_key(position + stop - start - 1, num_keys)
        yield PromptPiece(start, stop, position, key_start - first_key, key_stop - first_key)
        start = stop


def _mask(sight: KeyVisibility, requests: list[Prefill], dtype: torch.dtype) -> Tensor | None:
    if not requests or not sight.causal:
        return None
    pieces = [piece for request in requests for piece in request.pieces]
    num_rows, num_keys = max(piece.num_queries for piece in pieces), max(piece.num_keys for piece in pieces)
    ahead = torch.arange(num_rows)[:, None] - torch.arange(num_keys) + (num_keys - num_rows)
    unseen = ahead < 0
    if sight.sliding_window is not None:
        unseen |= ahead >= sight.sliding_window
    return torch.zeros(num_rows, num_keys, dtype=dtype).masked_fill_(unseen, -torch.inf)


def _heads_first(own_TKD: Tensor | None, rows: slice) -> Tensor:
    assert own_TKD is not None
    return own_TKD[rows].transpose(0, 1).unsqueeze(0)


def _attend_fused(q_1HTD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    if mask is not None:
        mask = mask[mask.shape[0] - q_1HTD.shape[2] :, mask.shape[1] - k_1KSD.shape[2] :]
    return scaled_dot_product_attention(q_1HTD, k_1KSD, v_1KSD, attn_mask=mask, scale=scale, enable_gqa=True)


def _attend_written_out(
    q_1HTD: Tensor,
    k_1KSD: Tensor,
    v_1KSD: Tensor,
    piece: PromptPiece,
    first_key: int,
    sight: KeyVisibility,
    *,
    layer: AttentionParameters,
) -> Tensor:
    heads = (k_1KSD.shape[1], -1)
    positions_T = piece.position + np.arange(piece.num_queries)
    key_positions_S = first_key + np.arange(piece.key_start, piece.key_stop)
    unseen = sight.unseen(positions_T, key_positions_S)
    if layer.blocksparse is not None:
        pattern_HTS = unseen_by_pattern(layer.blocksparse, positions_T, key_positions_S)
        unseen = (unseen | pattern_HTS).unflatten(0, heads)
    attended_1KGTD = softmax_attention(
        q_1HTD.unflatten(1, heads),
        k_1KSD,
        v_1KSD,
        layer=layer,
        distance_xTS=torch.from_numpy(key_positions_S - positions_T[:, None]),
        unseen=unseen,
    )
    return attended_1KGTD.flatten(1, 2)
