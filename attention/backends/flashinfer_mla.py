"""FLASHINFER_MLA: decodes of DeepSeek V2, V2-Lite and V3 by flashinfer's kernel over the latent cache.

Prefills run our own kernels over decompressed keys and values. Legend: R requests, T queries, S keys, H heads, D key
channels, V value channels, C latent plus rotary channels.
"""

import importlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backend import AttentionNeeds, BackendCapabilities, MLAMetadata, RaggedLens
from attention.backends.flashinfer_plan import PlannedWrapper
from attention.backends.flashinfer_workspace import WORKSPACE_BYTES, mla_workspace_bytes, reasons_against_mla_plans
from attention.backends.mla_prefills import attend_decompressed, new_workspace
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.mla_context import plan_context_chunks, plan_prefill
from attention.parameters import AttentionParameters
from attention.platform import Platform
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.layout import MLA_LAYOUTS
from baton.kvcache.spec import KVKind
from baton.kvcache.tokens import WriteIndex

LATENT_RANK = 512
ROTARY_DIM = 64


@dataclass(frozen=True)
class FlashInferMLAMetadata(MLAMetadata):
    """FlashInfer's plan of a batch of latent attention.

    Attributes:
        decode: the planned wrapper; None without decodes.
    """

    decode: Any


class FlashInferMLABuilder(DecodesFirstBuilder[FlashInferMLAMetadata]):
    def __init__(self, needs: AttentionNeeds, platform: Platform, *, workspace_tokens: int) -> None:
        flashinfer_mla = importlib.import_module("flashinfer.mla")
        num_bytes = max(WORKSPACE_BYTES, mla_workspace_bytes(platform.num_sms))
        partial_results = torch.zeros(num_bytes, dtype=torch.uint8, device=needs.device)
        self._block_size = needs.block_size
        self._num_heads = needs.num_heads
        self._dtype = TORCH_DTYPES[needs.dtype]
        self._workspace_tokens = workspace_tokens
        # One wrapper for all batches, captured or not: plans of every size use the same memory.
        self._decode = PlannedWrapper(flashinfer_mla.BatchMLAPagedAttentionWrapper(partial_results))

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> FlashInferMLAMetadata:
        del common_prefix_len, fast_build  # layers cannot do without the plan
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(common)
        return FlashInferMLAMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            prefill=plan_prefill(common, num_decodes),
            context_chunks=plan_context_chunks(common, num_decodes, workspace_tokens=self._workspace_tokens),
            decode=self._plan_decode(common, num_decodes) if num_decodes else None,
        )

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len == 1

    def _plan_decode(self, common: CommonAttentionMetadata, num_decodes: int) -> Any:
        # The block table itself serves as the list of blocks, with each request's blocks one row after the previous
        # one's. Nothing is copied, and a captured graph reads the table in place.
        table_RB, starts = common.block_table_tensor, torch.arange(num_decodes + 1, dtype=torch.int32)
        self._decode.plan(
            starts,
            starts * table_RB.shape[1],
            table_RB.view(-1),
            common.seq_lens_cpu[:num_decodes],
            self._num_heads,
            LATENT_RANK,
            ROTARY_DIM,
            self._block_size,
            causal=False,
            # NOTE: each layer sets its own scale before it runs; the plan does not depend on it.
            sm_scale=math.nan,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._decode.wrapper


class FlashInferMLA:
    """Latent attention of one layer by flashinfer. It declares what DeepSeek's models use; flashinfer itself also
    supports float16.

    Raises:
        ConfigError: the workspace is smaller than one token.
    """

    capabilities: ClassVar = BackendCapabilities(
        name="FLASHINFER_MLA",
        kind=KVKind.MLA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"bfloat16"}),
        head_sizes=frozenset({LATENT_RANK + ROTARY_DIM}),
        block_sizes=None,
        layouts=frozenset(MLA_LAYOUTS),
        features=frozenset(),
        cudagraph=True,
        min_compute_capability=(8, 0),
        package="flashinfer",
        install="pip install 'baton-serving[attention]'",
        reasons_against_plans=reasons_against_mla_plans,
    )
    pads_v: ClassVar[bool] = False

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        self.workspace = new_workspace(needs, context_workspace_tokens)
        self.builder = FlashInferMLABuilder(needs, platform, workspace_tokens=context_workspace_tokens)

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
        assert isinstance(metadata, FlashInferMLAMetadata)
        del k_THD, v_THV
        latents_BNC = kv_layer[0, :, :, 0]
        metadata.decode._sm_scale = layer.scale
        metadata.decode.run(
            q_THD[..., :LATENT_RANK],
            q_THD[..., LATENT_RANK:],
            latents_BNC[..., :LATENT_RANK],
            latents_BNC[..., LATENT_RANK:],
            out=out,
        )

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
        return attend_decompressed(q_THD, k_SHD, v_SHV, lens=lens, causal=causal, scale=scale, out=out)
