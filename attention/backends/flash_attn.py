"""FLASH_ATTN: flash-attn 2 over a paged key/value cache whose blocks are multiples of 256 tokens.

Decodes split their keys over the GPU (`flash_attn_with_kvcache`); prefills without context read the call's own keys and
values, all others the cache (`flash_attn_varlen_func`). Legend: R requests, T tokens, H heads, D channels.
"""

import importlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.layer_checks import check_planned
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.parameters import AttentionParameters, AttentionType
from attention.platform import Platform
from baton.kvcache.layout import GQA_LAYOUTS
from baton.kvcache.spec import KVKind
from baton.kvcache.tokens import WriteIndex


@dataclass(frozen=True)
class FlashAttnPrefills:
    """The prefills of a batch, as arguments of flash-attn.

    Attributes:
        query_start_loc, key_start_loc: [R + 1] int32 on the device, where each request's queries begin, and where its
            keys would begin if all requests' keys were adjacent.
        block_table: [R, blocks] int32.
        max_query_len, max_seq_len: of any request.
        without_context: all keys are those of the batch's own tokens.
    """

    query_start_loc: Tensor
    key_start_loc: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    without_context: bool


@dataclass(frozen=True)
class FlashAttnMetadata(AttentionMetadata):
    """The plan of a batch. `seq_lens` [R] and `block_table` [R, blocks] belong to the decodes."""

    causal: bool
    num_decodes: int
    seq_lens: Tensor
    block_table: Tensor
    prefills: FlashAttnPrefills | None


class FlashAttnBuilder(DecodesFirstBuilder[FlashAttnMetadata]):
    plans_on_device: ClassVar[bool] = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> FlashAttnMetadata:
        del common_prefix_len, fast_build  # there is nothing to leave out
        num_decodes = split_decodes_and_prefills(common)[0] if common.causal else 0
        return FlashAttnMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            num_decodes=num_decodes,
            seq_lens=common.seq_lens[:num_decodes],
            block_table=common.block_table_tensor[:num_decodes],
            prefills=_plan_prefills(common, num_decodes) if num_decodes < common.num_reqs else None,
        )

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.causal and common.max_query_len == 1


class FlashAttention:
    """Attention of one layer by flash-attn. It declares only what the conformance suite has passed with; flash-attn
    itself also supports float16 and all head sizes up to 256."""

    capabilities: ClassVar = BackendCapabilities(
        name="FLASH_ATTN",
        kind=KVKind.GQA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"bfloat16"}),
        head_sizes=frozenset({64, 128, 192}),
        block_sizes=frozenset({256, 512, 768, 1024}),
        layouts=frozenset(GQA_LAYOUTS),
        features=frozenset(
            {
                AttentionFeature.SLIDING_WINDOW,
                AttentionFeature.SOFT_CAP,
                AttentionFeature.ALIBI,
                AttentionFeature.ENCODER,
                AttentionFeature.ENCODER_WINDOW,
            }
        ),
        cudagraph=True,
        min_compute_capability=(8, 0),
        package="flash_attn",
        install="pip install --no-build-isolation 'baton-serving[flash-attn]'",
    )

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del platform, context_workspace_tokens
        package = importlib.import_module("flash_attn")
        self._decode = package.flash_attn_with_kvcache
        self._prefill = package.flash_attn_varlen_func
        self.builder = FlashAttnBuilder(needs.block_size)

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
        assert isinstance(metadata, FlashAttnMetadata)
        check_planned(layer.attn_type, causal=metadata.causal)
        decodes = slice(0, metadata.num_decodes)
        if metadata.num_decodes:
            attended_R1HD = self._decode(
                q_THD[decodes].unsqueeze(1),
                kv_layer[0],
                kv_layer[1],
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_table,
                causal=True,
                **_asked(layer),
            )
            out[decodes].copy_(attended_R1HD.squeeze(1))
        if metadata.prefills is not None:
            self._attend_prefills(q_THD, k_THD, v_THV, kv_layer, metadata, metadata.prefills, layer=layer, out=out)

    def _attend_prefills(
        self,
        q_THD: Tensor,
        k_THD: Tensor | None,
        v_THV: Tensor | None,
        kv_layer: Tensor,
        metadata: FlashAttnMetadata,
        prefills: FlashAttnPrefills,
        *,
        layer: AttentionParameters,
        out: Tensor,
    ) -> None:
        rows = slice(metadata.num_decodes, metadata.num_actual_tokens)
        own_keys = prefills.without_context and layer.attn_type is not AttentionType.ENCODER_DECODER
        if own_keys and k_THD is not None and v_THV is not None:
            keys, values, block_table = k_THD[rows], v_THV[rows], None
        else:
            keys, values, block_table = kv_layer[0], kv_layer[1], prefills.block_table
        attended_THD = self._prefill(
            q_THD[rows],
            keys,
            values,
            cu_seqlens_q=prefills.query_start_loc,
            cu_seqlens_k=prefills.key_start_loc,
            max_seqlen_q=prefills.max_query_len,
            max_seqlen_k=prefills.max_seq_len,
            block_table=block_table,
            causal=metadata.causal,
            **_asked(layer),
        )
        out[rows].copy_(attended_THD)


def _asked(layer: AttentionParameters) -> dict[str, object]:
    """Converts a layer's parameters to arguments of flash-attn. Its windows do not count the token itself; 0 is no soft
    cap."""
    window, causal = layer.sliding_window, layer.attn_type is AttentionType.DECODER
    return {
        "softmax_scale": layer.scale,
        "window_size": (-1, -1) if window is None else (window - 1, 0 if causal else window - 1),
        "softcap": layer.logits_soft_cap or 0.0,
        "alibi_slopes": layer.alibi_slopes_H,
    }


def _plan_prefills(common: CommonAttentionMetadata, num_decodes: int) -> FlashAttnPrefills:
    seq_lens = common.seq_lens_cpu[num_decodes:]
    key_start_loc = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
    torch.cumsum(seq_lens, 0, out=key_start_loc[1:])
    return FlashAttnPrefills(
        query_start_loc=common.query_start_loc[num_decodes:] - num_decodes,
        key_start_loc=key_start_loc.to(common.query_start_loc.device, non_blocking=True),
        block_table=common.block_table_tensor[num_decodes:],
        max_query_len=common.max_query_len,
        max_seq_len=int(seq_lens.max()),
        without_context=not common.num_computed_tokens_cpu[num_decodes:].any(),
    )
