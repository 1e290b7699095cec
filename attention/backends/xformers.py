"""XFORMERS: prefills by the unified kernel over the paged cache, decodes by xformers' paged attention.

xformers' own decode kernel splits a request's keys over the GPU and takes head sizes that are powers of two and blocks
of multiples of 64 tokens; with blocks of multiples of 256 it uses flash-attn, a fifth faster. The unified kernel runs
all other decodes, and the decodes of layers with a window or a soft cap, which xformers' paged attention lacks. Legend:
R requests, T tokens, G query heads per kv head, H kv heads, D channels.
"""

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.kernels.paged.attend import unified_attention
from attention.metadata import (
    AttentionMetadata,
    CommonAttentionMetadata,
    check_causal,
    split_decodes_and_prefills,
)
from attention.metadata_builder import DecodesFirstBuilder
from attention.parameters import AttentionParameters
from attention.platform import Platform
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from baton.kvcache.tokens import WriteIndex

_SPLIT_K_HEAD_SIZES = frozenset({32, 64, 128, 256})
_SPLIT_K_BLOCK_MULTIPLE = 64
_FLASH_BLOCK_MULTIPLE = 256
# Head sizes for which FLASH_ATTN is verified.
_FLASH_HEAD_SIZES = frozenset({64, 128, 192})
_FLASH_DTYPE = "bfloat16"


@dataclass(frozen=True)
class UnifiedRequests:
    """The requests that the unified kernel computes.

    Attributes:
        first_token: index of the first request's first token in the batch.
        query_start_loc: [R + 1] int32, from 0.
        seq_lens, block_table: of these requests.
    """

    first_token: int

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int


@dataclass(frozen=True)
class XFormersMetadata(AttentionMetadata):
    """The plan of a batch for xformers.

    Attributes:
        attn_bias: the cache slots that each decode reads, under xformers' name; None if xformers runs no decode.
        prefills: all other requests; None without any.
        everything: all requests, for layers whose decodes xformers cannot run.
    """

    num_decodes: int
    attn_bias: Any
    prefills: UnifiedRequests | None
    everything: UnifiedRequests


class XFormersBuilder(DecodesFirstBuilder[XFormersMetadata]):
    def __init__(self, block_size: int, *, decodes_with_xformers: bool) -> None:
        self._block_size = block_size
        self._decodes_with_xformers = decodes_with_xformers
        self._attn_bias = importlib.import_module("xformers.ops.fmha.attn_bias")

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> XFormersMetadata:
        del common_prefix_len, fast_build  # there is nothing to leave out
        check_causal(common)
        num_decodes = split_decodes_and_prefills(common)[0] if self._decodes_with_xformers else 0
        return XFormersMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            attn_bias=self._bias(common, num_decodes) if num_decodes else None,
            prefills=_requests_from(common, num_decodes) if num_decodes < common.num_reqs else None,
            everything=_requests_from(common, 0),
        )

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len == 1

    def _bias(self, common: CommonAttentionMetadata, num_decodes: int) -> Any:
        block_table = common.block_table_tensor[:num_decodes]
        longest = block_table.shape[1] * self._block_size
        bias = self._attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * num_decodes,
            kv_seqlen=[longest] * num_decodes,
            block_tables=block_table,
            page_size=self._block_size,
            device=block_table.device,
        )
        # This is the batch's own tensor, not a copy, so that a captured graph reads the new numbers.
        bias.k_seqinfo.seqlen = common.seq_lens[:num_decodes]
        return bias


class XFormers:
    capabilities: ClassVar = BackendCapabilities(
        name="XFORMERS",
        kind=KVKind.GQA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"bfloat16", "float16"}),
        head_sizes=frozenset(range(32, 257, 8)),
        block_sizes=frozenset(range(16, 513, 16)),
        # xformers takes the cache as one row of slots.
        layouts=frozenset({KVCacheLayout.NHD}),
        features=frozenset({AttentionFeature.SLIDING_WINDOW, AttentionFeature.SOFT_CAP}),
        cudagraph=True,
        min_compute_capability=(8, 0),
        package="xformers",
        install="pip install 'baton-serving[attention]'",
    )

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del platform, context_workspace_tokens
        fmha = importlib.import_module("xformers.ops.fmha")
        self._attend = fmha.memory_efficient_attention_forward
        self._op = _decode_op(fmha, needs)
        plain = not needs.layers or any(_is_plain(layer) for layer in needs.layers.values())
        self.builder = XFormersBuilder(needs.block_size, decodes_with_xformers=self._op is not None and plain)

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
        assert isinstance(metadata, XFormersMetadata)
        del k_THD, v_THV  # the cache holds them already
        unified: UnifiedRequests | None = metadata.everything
        if metadata.attn_bias is not None and _is_plain(layer):
            decodes = slice(0, metadata.num_decodes)
            self._decode(q_THD[decodes], kv_layer, metadata.attn_bias, scale=layer.scale, out=out[decodes])
            unified = metadata.prefills
        if unified is not None:
            rows = slice(unified.first_token, metadata.num_actual_tokens)
            unified_attention(
                q_THD[rows],
                kv_layer,
                query_start_loc=unified.query_start_loc,
                seq_lens=unified.seq_lens,
                block_table=unified.block_table,
                max_query_len=unified.max_query_len,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                logits_soft_cap=layer.logits_soft_cap,
                out=out[rows],
            )

    def _decode(self, q_RHD: Tensor, kv_layer: Tensor, attn_bias: Any, *, scale: float, out: Tensor) -> None:
        num_kv_heads, head_dim = kv_layer.shape[3:]
        group = q_RHD.shape[1] // num_kv_heads
        k_1SHGD, v_1SHGD = (
            cache.view(1, -1, num_kv_heads, 1, head_dim).expand(-1, -1, -1, group, -1) for cache in kv_layer.unbind(0)
        )
        q_1RHGD = q_RHD.reshape(1, -1, num_kv_heads, group, head_dim)
        attended = self._attend(q_1RHGD, k_1SHGD, v_1SHGD, attn_bias=attn_bias, scale=scale, op=self._op)
        out.copy_(attended.view(out.shape))


def _requests_from(common: CommonAttentionMetadata, first: int) -> UnifiedRequests:
    """Returns the requests from `first` on; every request before it has one token."""
    return UnifiedRequests(
        first_token=first,
        query_start_loc=common.query_start_loc[first:] - first if first else common.query_start_loc,
        seq_lens=common.seq_lens[first:],
        block_table=common.block_table_tensor[first:],
        max_query_len=common.max_query_len,
    )


def _is_plain(layer: AttentionParameters) -> bool:
    return layer.sliding_window is None and layer.logits_soft_cap is None


def _decode_op(fmha: Any, needs: AttentionNeeds) -> Any:
    """Returns xformers' operator for these decodes; None if it has none."""
    paged = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    flash_attn_serves = (
        needs.block_size % _FLASH_BLOCK_MULTIPLE == 0
        and needs.head_size in _FLASH_HEAD_SIZES
        and needs.dtype == _FLASH_DTYPE
        and paged in fmha.flash.FwOp.SUPPORTED_ATTN_BIAS_TYPES
    )
    if flash_attn_serves:
        return fmha.flash.FwOp
    splits = needs.head_size in _SPLIT_K_HEAD_SIZES and needs.block_size % _SPLIT_K_BLOCK_MULTIPLE == 0
    return fmha.triton_splitk.FwOp if splits else None
