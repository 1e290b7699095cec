"""TORCH_SDPA: attention over a paged key/value cache in plain torch on the CPU, with every feature that a model can
need.

Scores and sums are in float32 for every dtype. Legend: T tokens, H heads, D key channels, V value channels.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.backends.torch_decodes import DecodeGroup, attend_decodes, plan_decodes
from attention.backends.torch_prefills import TorchPrefills, attend_prefills, plan_prefills
from attention.backends.torch_visibility import KeyVisibility
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.unfolding import each_token_apart
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.fp8 import dequantize
from baton.kvcache.layout import GQA_LAYOUTS
from baton.kvcache.spec import DTYPE_BYTES, KV_DTYPE_BYTES, KVKind
from baton.kvcache.tokens import WriteIndex


@dataclass(frozen=True)
class _Plan:
    num_decodes: int
    decodes: tuple[DecodeGroup, ...]
    prefills: TorchPrefills


@dataclass(frozen=True)
class TorchSDPAMetadata(AttentionMetadata):
    """The metadata of a batch. `plans` holds one plan per `KeyVisibility`, made by the first layer that needs it."""

    common: CommonAttentionMetadata
    num_decodes: int
    plans: dict[KeyVisibility, _Plan] = field(default_factory=dict)


class TorchSDPABuilder(DecodesFirstBuilder[TorchSDPAMetadata]):
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> TorchSDPAMetadata:
        del common_prefix_len, fast_build  # cascade attention is unsupported, and layers make the plans
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
        kv_dtypes=frozenset(KV_DTYPE_BYTES),
        head_sizes=None,
        block_sizes=None,
        layouts=frozenset(GQA_LAYOUTS),
        features=frozenset(AttentionFeature) - {AttentionFeature.CASCADE},
        cudagraph=False,
        batch_invariant=True,
        rows_in_order=True,
    )

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del platform, context_workspace_tokens  # only MLA uses the latter
        self._block_size = needs.block_size
        self._dtype = TORCH_DTYPES[needs.dtype]
        self._apart = needs.batch_invariant
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
        q_scale, k_scale, v_scale = (None, None, None) if layer.scales is None else layer.scales.tensors
        if q_THD.dtype != out.dtype:
            q_THD = dequantize(q_THD, q_scale, out.dtype)
        sight = KeyVisibility.of(layer, causal=metadata.common.causal)
        plan = metadata.plans.get(sight)
        if plan is None:
            plan = metadata.plans[sight] = self._plan(metadata, sight)
        if plan.decodes:
            attend_decodes(
                q_THD[: plan.num_decodes],
                kv_layer,
                plan.decodes,
                scale=layer.scale,
                layer=layer,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out[: plan.num_decodes],
            )
        if plan.prefills.requests:
            attend_prefills(
                q_THD,
                kv_layer,
                (k_THD, v_THV),
                plan.prefills,
                layer=layer,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out,
            )

    def _plan(self, metadata: TorchSDPAMetadata, sight: KeyVisibility) -> _Plan:
        common, num_decodes = metadata.common, metadata.num_decodes
        if sight.own_keys:
            num_decodes = 0
        elif self._apart and sight.causal:
            common = each_token_apart(common)
            num_decodes = common.num_reqs
        block_table, seq_lens = common.block_table_tensor.numpy(), common.seq_lens_cpu.numpy()
        decodes = plan_decodes(
            seq_lens[:num_decodes],
            block_table[:num_decodes],
            block_size=self._block_size,
            sliding_window=sight.sliding_window,
            attention_chunk_size=sight.attention_chunk_size,
            mask_dtype=self._dtype,
            apart=self._apart,
        )
        prefills = plan_prefills(
            sight,
            common.query_start_loc_cpu[num_decodes:].tolist(),
            seq_lens[num_decodes:].tolist(),
            block_table[num_decodes:],
            block_size=self._block_size,
            mask_dtype=self._dtype,
        )
        return _Plan(num_decodes, decodes, prefills)
