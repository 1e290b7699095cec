"""TRITON_ATTN: attention over a paged key/value cache by our own kernels, for every feature but block sparsity.

A batch's decodes and prefills run different kernels, which this module chooses. Legend: R requests, T tokens, H heads,
D key channels, V value channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.backends.triton_metadata import (
    DecodePlans,
    Decodes,
    TritonAttentionBuilder,
    TritonAttentionMetadata,
    TritonPrefills,
    split_requests,
)
from attention.cascade import SharedPrefix, attend_with_prefix, can_share_prefix
from attention.kernels.decode.attend import decode_attention
from attention.kernels.in_order.decodes import attend_decodes
from attention.kernels.in_order.prompts import attend_prompts
from attention.kernels.paged.attend import ragged_attention, unified_attention
from attention.kernels.paged.work_list import WorkList
from attention.layer_checks import check_heads
from attention.metadata import AttentionMetadata
from attention.parameters import AttentionParameters, AttentionType
from attention.platform import Platform
from attention.quantized_output import BLOCK, QuantizedOutput
from baton.kvcache.fp8 import is_fp8
from baton.kvcache.layout import GQA_LAYOUTS
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import DTYPE_BYTES, KV_DTYPE_BYTES, KVKind

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class TritonAttention:
    capabilities: ClassVar = BackendCapabilities(
        name="TRITON_ATTN",
        kind=KVKind.GQA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset(DTYPE_BYTES),
        kv_dtypes=frozenset(KV_DTYPE_BYTES),
        head_sizes=None,
        block_sizes=None,
        layouts=frozenset(GQA_LAYOUTS),
        features=frozenset(AttentionFeature) - {AttentionFeature.BLOCK_SPARSE},
        cudagraph=True,
        min_compute_capability=(8, 0),
        batch_invariant=True,
        rows_in_order=True,
    )

    def __init__(
        self,
        needs: AttentionNeeds,
        platform: Platform,
        *,
        context_workspace_tokens: int,
        persistent_prefills: bool | None = None,
    ) -> None:
        del context_workspace_tokens  # only MLA uses it
        self._num_heads, self._head_size = needs.num_heads, needs.head_size
        self.builder = TritonAttentionBuilder(needs, platform, persistent_prefills=persistent_prefills)

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
        assert isinstance(metadata, TritonAttentionMetadata)
        check_heads(q_THD, num_heads=self._num_heads, head_size=self._head_size)
        scales = _Scales.of(layer.scales, q_THD, kv_layer)
        if layer.attn_type in _ENCODERS:
            assert k_THD is not None
            assert v_THV is not None
            _attend_own(
                q_THD,
                k_THD,
                v_THV,
                metadata.query_start_loc,
                max_query_len=metadata.prefill_query_len,
                causal=False,
                layer=layer,
                out=out,
            )
        elif metadata.prefix is not None and can_share_prefix(layer):
            _attend_cascade(q_THD, kv_layer, metadata, metadata.prefix, layer=layer, scales=scales, out=out)
        else:
            own_kv = None
            if metadata.fresh_prefills and k_THD is not None and v_THV is not None and k_THD.dtype == kv_layer.dtype:
                own_kv = k_THD, v_THV
            _attend_cache(
                q_THD,
                kv_layer,
                metadata.decodes,
                metadata.prefills,
                metadata.plans,
                prefill_query_len=metadata.prefill_query_len,
                in_order=metadata.in_order,
                own_kv=own_kv,
                layer=layer,
                sinks_H=layer.sinks_H,
                scales=scales,
                out=out,
            )

    def quantizes(self, metadata: AttentionMetadata, *, num_tokens: int, head_size: int) -> bool:
        assert isinstance(metadata, TritonAttentionMetadata)
        whole_blocks = head_size % BLOCK == 0 and head_size.bit_count() == 1
        # A captured step with prompts has a row of decodes for each of its first tokens, whatever they are.
        only_decodes = len(metadata.decodes.seq_lens) == num_tokens and not len(metadata.prefills.seq_lens)
        return whole_blocks and only_decodes and metadata.prefix is None and not metadata.in_order

    def forward_quantized(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        *,
        layer: AttentionParameters,
        out: QuantizedOutput,
    ) -> None:
        assert isinstance(metadata, TritonAttentionMetadata)
        check_heads(q_THD, num_heads=self._num_heads, head_size=self._head_size)
        _attend_decodes(
            decode_attention,
            q_THD,
            kv_layer,
            metadata.decodes,
            metadata.plans,
            layer=layer,
            sinks_H=layer.sinks_H,
            scales=_Scales.of(layer.scales, q_THD, kv_layer),
            out=out,
        )


@dataclass(frozen=True)
class _Scales:
    """The scales of 8-bit queries, keys and values; None for other dtypes."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None

    @classmethod
    def of(cls, scales: KVScales | None, q_THD: Tensor, kv_layer: Tensor) -> "_Scales":
        if scales is None:
            return cls(None, None, None)
        return cls(
            scales.q_scale if is_fp8(q_THD) else None,
            scales.k_scale if is_fp8(kv_layer) else None,
            scales.v_scale if is_fp8(kv_layer) else None,
        )


def _attend_cascade(
    q_THD: Tensor,
    kv_layer: Tensor,
    metadata: TritonAttentionMetadata,
    prefix: SharedPrefix,
    *,
    layer: AttentionParameters,
    scales: _Scales,
    out: Tensor,
) -> None:
    decodes, prefills = split_requests(prefix.rest, len(metadata.decodes.seq_lens))

    def attend_rest(rest_out: Tensor, rest_lse_HT: Tensor) -> None:
        _attend_cache(
            q_THD,
            kv_layer,
            decodes,
            prefills,
            metadata.rest_plans,
            prefill_query_len=metadata.prefill_query_len,
            in_order=False,
            own_kv=None,
            layer=layer,
            sinks_H=None,
            scales=scales,
            out=rest_out,
            lse_HT=rest_lse_HT,
        )

    attend_with_prefix(
        q_THD,
        kv_layer,
        prefix,
        layer=layer,
        attend_rest=attend_rest,
        q_scale=scales.q,
        k_scale=scales.k,
        v_scale=scales.v,
        out=out,
    )


def _attend_cache(
    q_THD: Tensor,
    kv_layer: Tensor,
    decodes: Decodes,
    prefills: TritonPrefills,
    plans: DecodePlans,
    *,
    prefill_query_len: int,
    in_order: bool,
    own_kv: tuple[Tensor, Tensor] | None,
    layer: AttentionParameters,
    sinks_H: Tensor | None,
    scales: _Scales,
    out: Tensor,
    lse_HT: Tensor | None = None,
) -> None:
    """Attends for decodes and prefills. `own_kv` is the call's own keys and values if prefills need no others."""
    num_decodes = len(decodes.seq_lens)
    if num_decodes:
        lse_HR = None if lse_HT is None else lse_HT[:, :num_decodes]
        _attend_decodes(
            attend_decodes if in_order else partial(decode_attention, lse_HR=lse_HR),
            q_THD[:num_decodes],
            kv_layer,
            decodes,
            plans,
            layer=layer,
            sinks_H=sinks_H,
            scales=scales,
            out=out[:num_decodes],
        )
    if not len(prefills.seq_lens):
        return
    causal = prefills.causal and layer.attn_type is AttentionType.DECODER
    if own_kv is not None and causal:
        _attend_own(
            q_THD,
            *own_kv,
            prefills.query_start_loc,
            max_query_len=prefill_query_len,
            causal=True,
            layer=layer,
            work=prefills.work,
            out=out,
        )
        return
    if in_order and causal:
        attend_prompts(
            q_THD,
            kv_layer,
            query_start_loc=prefills.query_start_loc,
            seq_lens=prefills.seq_lens,
            block_table=prefills.block_table,
            plan=plans.of(layer),
            padded=prefills.padded,
            out=out,
            **_options(layer, sinks_H, scales),
        )
        return
    unified_attention(
        q_THD,
        kv_layer,
        query_start_loc=prefills.query_start_loc,
        seq_lens=prefills.seq_lens,
        block_table=prefills.block_table,
        max_query_len=prefill_query_len,
        causal=causal,
        sliding_window=layer.sliding_window,
        attention_chunk_size=layer.attention_chunk_size,
        out=out,
        lse_HT=lse_HT,
        work=prefills.work if causal else None,
        # A window or a chunk leaves few keys to split.
        splits=prefills.splits if layer.sliding_window is None and layer.attention_chunk_size is None else 1,
        **_options(layer, sinks_H, scales),
    )


def _attend_decodes(
    attend: Callable[..., None],
    q_RHD: Tensor,
    kv_layer: Tensor,
    decodes: Decodes,
    plans: DecodePlans,
    *,
    layer: AttentionParameters,
    sinks_H: Tensor | None,
    scales: _Scales,
    out: Tensor | QuantizedOutput,
) -> None:
    attend(
        q_RHD,
        kv_layer,
        seq_lens=decodes.seq_lens,
        block_table=decodes.block_table,
        plan=plans.of(layer),
        out=out,
        **_options(layer, sinks_H, scales),
    )


def _options(layer: AttentionParameters, sinks_H: Tensor | None, scales: _Scales) -> dict[str, Any]:
    """What all kernels over the cache take."""
    return {
        "scale": layer.scale,
        "logits_soft_cap": layer.logits_soft_cap,
        "alibi_slopes_H": layer.alibi_slopes_H,
        "sinks_H": sinks_H,
        "q_scale": scales.q,
        "k_scale": scales.k,
        "v_scale": scales.v,
    }


def _attend_own(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    start_loc: Tensor,
    *,
    max_query_len: int,
    causal: bool,
    layer: AttentionParameters,
    work: WorkList | None = None,
    out: Tensor,
) -> None:
    """Attends for requests whose keys are exactly their new tokens.

    Args:
        start_loc: where each request's tokens start.
        work: the tiles of these requests.
    """
    ragged_attention(
        q_THD,
        k_THD,
        v_THV,
        query_start_loc=start_loc,
        key_start_loc=start_loc,
        max_query_len=max_query_len,
        causal=causal,
        scale=layer.scale,
        sliding_window=layer.sliding_window,
        attention_chunk_size=layer.attention_chunk_size,
        logits_soft_cap=layer.logits_soft_cap,
        alibi_slopes_H=layer.alibi_slopes_H,
        sinks_H=layer.sinks_H,
        out=out,
        work=work,
    )
