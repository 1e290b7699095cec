"""TORCH_SDPA: attention over a paged key/value cache in plain torch, on the CPU; the oracle of the other backends.

Scores and sums are in float32 whatever the dtype. Legend: T tokens, S keys, H heads, D head_dim.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.backends.torch_decodes import DecodeGroup, attend_decodes, plan_decodes
from attention.cache import TORCH_DTYPES
from attention.cache_ops import TokenIndex, WriteIndex, gather_tokens
from attention.layout import GQA_LAYOUTS
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import AttentionMetadataBuilder
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.spec import DTYPE_BYTES, KVKind

# Queries per SDPA call of a prefill: bounds the mask, and the scores above the diagonal that are computed in vain.
_PIECE_TOKENS = 256


@dataclass(frozen=True)
class _Piece:
    """Queries [query_start, query_stop) of the batch over gathered keys [key_start, key_stop) of their request."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int


@dataclass(frozen=True)
class _Prefill:
    tokens: TokenIndex
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class _WindowPlan:
    """What layers of one window share.

    `mask` is [rows, keys]; a piece takes its lower right corner, because whether a query sees a key depends only on
    how far they are from the piece's last.
    """

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]
    mask: Tensor


@dataclass(frozen=True)
class TorchSDPAMetadata(AttentionMetadata):
    """`plans` holds one plan per window that a layer has asked for; the first such layer makes it."""

    common: CommonAttentionMetadata
    num_decodes: int
    plans: dict[int | None, _WindowPlan] = field(default_factory=dict)


class TorchSDPABuilder(AttentionMetadataBuilder[TorchSDPAMetadata]):
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> TorchSDPAMetadata:
        del common_prefix_len, fast_build  # no cascade attention; the plans are made by the layers
        num_decodes, _, _, _ = split_decodes_and_prefills(common)
        return TorchSDPAMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            common=common,
            num_decodes=num_decodes,
        )


class TorchSDPA:
    capabilities: ClassVar = BackendCapabilities(
        name="TORCH_SDPA",
        kind=KVKind.GQA,
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPE_BYTES),
        kv_dtypes=frozenset(DTYPE_BYTES),
        head_sizes=None,
        block_sizes=None,
        layouts=frozenset(GQA_LAYOUTS),
        features=frozenset({AttentionFeature.SLIDING_WINDOW}),
        cudagraph=False,
    )

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del platform, context_workspace_tokens  # the latter is MLA's; keys and values are gathered as they are
        self._block_size = needs.block_size
        self._dtype = TORCH_DTYPES[needs.dtype]
        self.builder = TorchSDPABuilder(needs.block_size)

    def forward(
        self,
        q_THD: Tensor,
        k_THD: Tensor | None,
        v_THV: Tensor | None,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        *,
        layer: AttentionParameters,
        out: Tensor,
    ) -> None:
        assert isinstance(metadata, TorchSDPAMetadata)
        del k_THD, v_THV  # the cache holds them already
        sliding_window, scale = layer.sliding_window, layer.scale
        plan = metadata.plans.get(sliding_window)
        if plan is None:
            plan = metadata.plans[sliding_window] = self._plan_window(metadata, sliding_window)
        num_decodes = metadata.num_decodes
        attend_decodes(q_THD[:num_decodes], kv_layer, plan.decodes, scale=scale, out=out[:num_decodes])
        for prefill in plan.prefills:
            _attend_prefill(q_THD, kv_layer, prefill, plan.mask, scale=scale, out=out)

    def _plan_window(self, metadata: TorchSDPAMetadata, sliding_window: int | None) -> _WindowPlan:
        common = metadata.common
        block_table = common.block_table_tensor.numpy()
        seq_lens = common.seq_lens_cpu.numpy()
        num_decodes = metadata.num_decodes
        decodes = plan_decodes(
            seq_lens[:num_decodes],
            block_table[:num_decodes],
            block_size=self._block_size,
            sliding_window=sliding_window,
            mask_dtype=self._dtype,
        )
        query_starts = common.query_start_loc_cpu.tolist()
        prefills = tuple(
            _plan_prefill(
                query_starts[request],
                query_starts[request + 1],
                int(seq_lens[request]),
                block_table[request],
                block_size=self._block_size,
                sliding_window=sliding_window,
            )
            for request in range(num_decodes, common.num_reqs)
        )
        return _WindowPlan(decodes, prefills, _mask(prefills, sliding_window, self._dtype))


def _plan_prefill(
    query_start: int,
    query_stop: int,
    seq_len: int,
    block_row: np.ndarray[tuple[int], np.dtype[np.int32]],
    *,
    block_size: int,
    sliding_window: int | None,
) -> _Prefill:
    context_len = seq_len - (query_stop - query_start)
    reach = seq_len if sliding_window is None else sliding_window - 1
    first_key = max(0, context_len - reach)
    pieces = []
    for start in range(query_start, query_stop, _PIECE_TOKENS):
        stop = min(start + _PIECE_TOKENS, query_stop)
        position = context_len + start - query_start
        pieces.append(_Piece(start, stop, max(0, position - reach) - first_key, position + stop - start - first_key))
    blocks_S, offsets_S = np.divmod(np.arange(first_key, seq_len), block_size)
    tokens = TokenIndex(block_row[blocks_S].astype(np.int64), offsets_S)
    return _Prefill(tokens, tuple(pieces))


def _mask(prefills: tuple[_Prefill, ...], sliding_window: int | None, dtype: torch.dtype) -> Tensor:
    if not prefills:
        return torch.empty(0, 0, dtype=dtype)
    pieces = [piece for prefill in prefills for piece in prefill.pieces]
    num_rows = max(piece.query_stop - piece.query_start for piece in pieces)
    num_keys = max(piece.key_stop - piece.key_start for piece in pieces)
    ahead = torch.arange(num_rows)[:, None] - torch.arange(num_keys) + (num_keys - num_rows)
    unseen = ahead < 0
    if sliding_window is not None:
        unseen |= ahead >= sliding_window
    return torch.zeros(num_rows, num_keys, dtype=dtype).masked_fill_(unseen, -torch.inf)


def _attend_prefill(
    q_THD: Tensor, kv_layer: Tensor, prefill: _Prefill, mask: Tensor, *, scale: float, out: Tensor
) -> None:
    k_1HSD, v_1HSD = gather_tokens(kv_layer, prefill.tokens).transpose(1, 2).unsqueeze(1).unbind(0)
    q_1HTD = q_THD.transpose(0, 1).unsqueeze(0)
    for piece in prefill.pieces:
        queries = slice(piece.query_start, piece.query_stop)
        keys = slice(piece.key_start, piece.key_stop)
        num_queries, num_keys = piece.query_stop - piece.query_start, piece.key_stop - piece.key_start
        attended = scaled_dot_product_attention(
            q_1HTD[:, :, queries],
            k_1HSD[:, :, keys],
            v_1HSD[:, :, keys],
            attn_mask=mask[mask.shape[0] - num_queries :, mask.shape[1] - num_keys :],
            scale=scale,
            enable_gqa=True,
        )
        out[queries].copy_(attended[0].transpose(0, 1))
