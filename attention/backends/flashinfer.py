"""FLASHINFER: flashinfer's kernels over a paged key/value cache, planned on the host for every batch.

Decodes run its tensor-core decode kernel, captured with one wrapper per number of requests. Prefills without context
read the call's own keys and values, all others the cache. Legend: T tokens, H heads, D channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.backends.flashinfer_workspace import reasons_against_plans
from attention.backends.flashinfer_wrappers import FlashInferPrefills, Wrappers
from attention.cascade import worth_sharing
from attention.layer_checks import check_planned, check_shared
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.parameters import AttentionParameters, AttentionType
from attention.platform import Platform
from baton.kvcache.layout import GQA_LAYOUTS
from baton.kvcache.spec import FP8_DTYPES, KVKind
from baton.kvcache.tokens import WriteIndex

# Attention of these types reads the call's own keys, so no scale of a cache applies.
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass(frozen=True)
class FlashInferMetadata(AttentionMetadata):
    """FlashInfer's plan of a batch.

    Attributes:
        cascade: a planned wrapper for the whole batch if its shared prefix is computed once; None otherwise.
        decode: a planned wrapper for the first `num_decodes` requests; None without decodes.
        prefills: all other requests.
    """

    causal: bool
    num_decodes: int
    cascade: Any = None
    decode: Any = None
    prefills: FlashInferPrefills | None = None


class FlashInferBuilder(DecodesFirstBuilder[FlashInferMetadata]):
    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> FlashInferMetadata:
        wrappers, num_reqs = self._wrappers, common.num_reqs
        new_tokens = WriteIndex(common.slot_mapping, wrappers.block_size)
        if common_prefix_len and not fast_build:
            cascade = wrappers.plan_cascade(common, common_prefix_len)
            if cascade is not None:
                return FlashInferMetadata(
                    new_tokens, common.num_actual_tokens, causal=True, num_decodes=0, cascade=cascade
                )
        num_decodes = split_decodes_and_prefills(common)[0] if common.causal else 0
        lists = wrappers.lister.list(common)
        decode, prefills = None, None
        if num_decodes:
            captured = num_decodes == num_reqs and wrappers.captured(num_reqs)
            decode = wrappers.plan_decode(lists.of(0, num_decodes), captured=captured)
        if num_decodes < num_reqs:
            prefills = FlashInferPrefills(
                wrappers,
                query_start_loc=common.query_start_loc_cpu[num_decodes:] - common.query_start_loc_cpu[num_decodes],
                lists=lists.of(num_decodes, num_reqs),
                causal=common.causal,
                without_context=not common.num_computed_tokens_cpu[num_decodes:].any(),
            )
        return FlashInferMetadata(
            new_tokens,
            common.num_actual_tokens,
            causal=common.causal,
            num_decodes=num_decodes,
            decode=decode,
            prefills=prefills,
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        self._wrappers.capture(common.num_reqs)
        return self.build(0, common)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.causal and common.max_query_len == 1 and self._wrappers.captured(common.num_reqs)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Sequence[int],
        *,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        num_sms: int,
    ) -> bool:
        if use_alibi or use_sliding_window or not self._wrappers.shares_prefixes:
            return False
        return worth_sharing(
            common_prefix_len,
            query_lens,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            num_sms=num_sms,
        )


class FlashInfer:
    """Attention of one layer by FlashInfer.

    Raises:
        ConfigError: the layers disagree about window, soft cap or scale.
    """

    capabilities: ClassVar = BackendCapabilities(
        name="FLASHINFER",
        kind=KVKind.GQA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"bfloat16", "float16", *FP8_DTYPES}),
        head_sizes=frozenset({64, 128, 256}),
        block_sizes=None,
        layouts=frozenset(GQA_LAYOUTS),
        features=frozenset(
            {
                AttentionFeature.SLIDING_WINDOW,
                AttentionFeature.SOFT_CAP,
                AttentionFeature.ENCODER,
                AttentionFeature.CASCADE,
            }
        ),
        cudagraph=True,
        min_compute_capability=(8, 0),
        package="flashinfer",
        install="pip install 'baton-serving[attention]'",
        uniform_layers=True,
        reasons_against_plans=reasons_against_plans,
    )

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del context_workspace_tokens  # only MLA uses it
        self._wrappers = Wrappers(needs, platform)
        self._fp8 = needs.cache_dtype in FP8_DTYPES
        self.builder = FlashInferBuilder(self._wrappers)

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
        assert isinstance(metadata, FlashInferMetadata)
        check_planned(layer.attn_type, causal=metadata.causal)
        check_shared(self._wrappers.planned, layer)
        scales = layer.scales if self._fp8 and layer.attn_type not in _ENCODERS else None
        if scales is not None:
            # The wrappers take scales as host numbers, and reading those would make the host wait for the device.
            q_THD = (q_THD * scales.k_scale).to(q_THD.dtype)
        decodes = slice(0, metadata.num_decodes)
        prefills = slice(metadata.num_decodes, metadata.num_actual_tokens)
        if metadata.cascade is not None:
            out[prefills].copy_(metadata.cascade.run(q_THD[prefills], self._paged(kv_layer)))
        if metadata.decode is not None:
            metadata.decode.run(q_THD[decodes], self._paged(kv_layer), out=out[decodes])
        if metadata.prefills is not None:
            if k_THD is not None and v_THV is not None and self._reads_own_keys(metadata.prefills, layer):
                metadata.prefills.ragged().run(q_THD[prefills], k_THD[prefills], v_THV[prefills], out=out[prefills])
            else:
                metadata.prefills.paged().run(q_THD[prefills], self._paged(kv_layer), out=out[prefills])
        if scales is not None:
            out[: metadata.num_actual_tokens].mul_(scales.v_scale)

    def _reads_own_keys(self, prefills: FlashInferPrefills, layer: AttentionParameters) -> bool:
        """Whether prefills read the call's keys instead of the cache. An encoder must; a decoder may if the cache holds
        no other keys and stores them without loss."""
        if layer.attn_type in _ENCODERS:
            return True
        return layer.attn_type is AttentionType.DECODER and prefills.without_context and not self._fp8

    def _paged(self, kv_layer: Tensor) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = kv_layer.unbind(0)
        if self._wrappers.layout == "HND":
            return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        return k_cache, v_cache
