"""TORCH_MLA: latent attention in plain torch on the CPU, the reference for the other MLA backends.

Decodes attend to one kv head whose keys are latent plus rotary part and whose values are the latent.
Legend: T queries, S keys, H heads, D key channels, V value channels, C latent plus rotary channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities, MLAMetadata, RaggedLens
from attention.backends.mla_prefills import new_workspace
from attention.backends.torch_decodes import DecodeGroup, attend_decodes, plan_decodes
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.mla_context import plan_context_chunks, plan_prefill
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.sparse import SparseQueries, best_keys, index_scores, slots_of, sparse_decodes, sparse_prefills
from attention.unfolding import each_token_apart
from baton.kvcache.access import gather_tokens
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.layout import MLA_LAYOUTS
from baton.kvcache.spec import DTYPE_BYTES, KV_DTYPE_BYTES, KVKind
from baton.kvcache.tokens import TokenIndex, WriteIndex

# Number of queries whose scores are in memory at once. With the workspace it bounds memory for any prompt and context.
_PIECE_TOKENS = 256


@dataclass(frozen=True)
class TorchMLAMetadata(MLAMetadata):
    decodes: tuple[DecodeGroup, ...]


class TorchMLABuilder(DecodesFirstBuilder[TorchMLAMetadata]):
    def __init__(
        self, *, block_size: int, workspace_tokens: int, mask_dtype: torch.dtype, batch_invariant: bool, top_k: int
    ) -> None:
        self._block_size = block_size
        self._workspace_tokens = workspace_tokens
        self._mask_dtype = mask_dtype
        self._apart = batch_invariant
        self._top_k = top_k

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> TorchMLAMetadata:
        del common_prefix_len, fast_build  # there is nothing to leave out
        if self._apart:
            common = each_token_apart(common)
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(common)
        return TorchMLAMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            prefill=plan_prefill(common, num_decodes),
            context_chunks=plan_context_chunks(common, num_decodes, workspace_tokens=self._workspace_tokens),
            decodes=plan_decodes(
                common.seq_lens_cpu[:num_decodes].numpy(),
                common.block_table_tensor[:num_decodes].numpy(),
                block_size=self._block_size,
                mask_dtype=self._mask_dtype,
                apart=self._apart,
            ),
            sparse_decodes=sparse_decodes(
                common, num_decodes, block_size=self._block_size, top_k=self._top_k, always=self._apart, on_host=True
            ),
            sparse_prefills=sparse_prefills(common, num_decodes, top_k=self._top_k, always=self._apart),
        )


class TorchMLA:
    """Latent attention of one layer in plain torch.

    Raises:
        ConfigError: the workspace is smaller than one token.
    """

    capabilities: ClassVar = BackendCapabilities(
        name="TORCH_MLA",
        kind=KVKind.MLA,
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPE_BYTES),
        kv_dtypes=frozenset(KV_DTYPE_BYTES),
        head_sizes=None,
        block_sizes=None,
        layouts=frozenset(MLA_LAYOUTS),
        features=frozenset({AttentionFeature.SPARSE}),
        cudagraph=False,
        batch_invariant=True,
        rows_in_order=True,
    )
    pads_v: ClassVar = False

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del platform
        self.workspace = new_workspace(needs, context_workspace_tokens)
        self.builder = TorchMLABuilder(
            block_size=needs.block_size,
            workspace_tokens=context_workspace_tokens,
            mask_dtype=TORCH_DTYPES[needs.dtype],
            batch_invariant=needs.batch_invariant,
            top_k=0 if needs.mla is None else needs.mla.top_k,
        )

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
        assert isinstance(metadata, TorchMLAMetadata)
        del k_THD, v_THV
        k_scale = None if layer.scales is None else layer.scales.k_scale
        attend_decodes(q_THD, kv_layer, metadata.decodes, scale=layer.scale, k_scale=k_scale, out=out)

    def select(self, q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries) -> Tensor:
        return select(q_THD, weights_TH, index_layer, queries)

    def attend_selected(
        self,
        q_THC: Tensor,
        kv_layer: Tensor,
        slots_TK: Tensor,
        queries: SparseQueries,
        *,
        layer: AttentionParameters,
        out: Tensor,
    ) -> None:
        k_scale = None if layer.scales is None else layer.scales.k_scale
        attend_selected(q_THC, kv_layer, slots_TK, queries, scale=layer.scale, k_scale=k_scale, out=out)

    def attend(
        self,
        q_THD: Tensor,
        k_SHD: Tensor,
        v_SHV: Tensor,
        *,
        lens: RaggedLens,
        causal: bool,
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_queries, num_heads, _ = q_THD.shape
        out_THV = torch.zeros(num_queries, num_heads, v_SHV.shape[-1]) if out is None else out.zero_()
        lse_HT = torch.full((num_heads, num_queries), -torch.inf)
        for request in range(len(lens.query_start_loc_cpu) - 1):
            query_start, query_stop = lens.query_start_loc_cpu[request : request + 2]
            key_start, key_stop = lens.key_start_loc_cpu[request : request + 2]
            if key_start == key_stop:
                continue
            # NOTE: copied, because a CPU's library may choose its method by address, so bits would depend on the rows
            # before.
            k_HDS = k_SHD[key_start:key_stop].permute(1, 2, 0).to(torch.float32, copy=True)
            v_HSV = v_SHV[key_start:key_stop].transpose(0, 1).to(torch.float32, copy=True)
            for start in range(query_start, query_stop, _PIECE_TOKENS):
                stop = min(start + _PIECE_TOKENS, query_stop)
                unseen = (query_stop - stop) if causal else 0
                num_keys = key_stop - key_start - unseen
                out_THV[start:stop], lse_HT[:, start:stop] = _attend_piece(
                    q_THD[start:stop], k_HDS[..., :num_keys], v_HSV[:, :num_keys], causal=causal, scale=scale
                )
        return out_THV, lse_HT


def _attend_piece(q_THD: Tensor, k_HDS: Tensor, v_HSV: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attends with consecutive queries; if causal, the last query is at the last key. It is not fused, because fused
    SDPA returns no log-sum-exp and needs keys and values of equal size."""
    scores_HTS = torch.bmm(q_THD.transpose(0, 1).float() * scale, k_HDS)
    if causal:
        num_queries, num_keys = scores_HTS.shape[1:]
        unseen_TS = torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(num_keys - num_queries + 1)
        scores_HTS.masked_fill_(unseen_TS, -torch.inf)
    lse_HT = scores_HTS.logsumexp(dim=-1)
    weights_HTS = scores_HTS.sub_(lse_HT.unsqueeze(-1)).exp_()
    return torch.bmm(weights_HTS, v_HSV).transpose(0, 1), lse_HT


# Number of queries whose scores, or selected latents, are in memory at once.
_SCORED_QUERIES, _ATTENDING_QUERIES = 64, 16


def select(q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries) -> Tensor:
    """Implements `SparseMLABackend.select`; slots past a query's count are -1."""
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
    """Implements `SparseMLABackend.attend_selected`; the result is 0 for a query that sees no token."""
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
