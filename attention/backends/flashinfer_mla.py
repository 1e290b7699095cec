"""FLASHINFER_MLA: decodes of DeepSeek V2, V2-Lite and V3 by flashinfer's kernel over the latent cache.

Our own kernels run what they are quicker at or as quick, and need no plan for: decodes of few queries, and prefills,
over decompressed keys and values. Legend: R requests, T queries, S keys, H heads, D key channels, V value channels, C
latent plus rotary channels.
"""

import importlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backend import AttentionNeeds, BackendCapabilities, MLAMetadata, RaggedLens
from attention.backends.flashinfer_plan import WORKSPACE_BYTES, BlockLister, Planned
from attention.backends.mla_prefills import attend_decompressed, new_workspace
from attention.cache import TORCH_DTYPES
from attention.cache_ops import WriteIndex
from attention.kernels.mla_decode import MLADecodePlan, make_mla_decode_plan, mla_decode_attention
from attention.layout import MLA_LAYOUTS
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.mla_context import plan_context_chunks, plan_prefill
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.spec import KVKind

LATENT_RANK = 512
ROTARY_DIM = 64
# Heads, and queries times heads, up to which our kernel decodes. On an H200, 16 heads over 1024 keys: 9 us against 17
# for one query, 26 against 19 for 32.
_FEW_HEADS = 32
_FEW_ROWS = 128


@dataclass(frozen=True)
class FlashInferMLAMetadata(MLAMetadata):
    """Attributes:
    seq_lens, block_table: [R] and [R, blocks] int32 of the decodes, on the device.
    decode: the planned wrapper; None where no decode is flashinfer's.
    """

    seq_lens: Tensor
    block_table: Tensor
    decode: Any


class FlashInferMLABuilder(DecodesFirstBuilder[FlashInferMLAMetadata]):
    full_cudagraph_supported: ClassVar[bool] = True

    def __init__(self, needs: AttentionNeeds, *, workspace_tokens: int, own_rows: int) -> None:
        flashinfer_mla = importlib.import_module("flashinfer.mla")
        partial_results = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=needs.device)
        self._block_size = needs.block_size
        self._num_heads = needs.num_heads
        self._dtype = TORCH_DTYPES[needs.dtype]
        self._workspace_tokens = workspace_tokens
        self._own_rows = own_rows
        self._lister = BlockLister(needs)
        # One for all batches, captured or not: its plans lie in the same memory whatever their size, and the blocks in
        # the lister's.
        self._decode = Planned(flashinfer_mla.BatchMLAPagedAttentionWrapper(partial_results))

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> FlashInferMLAMetadata:
        del common_prefix_len, fast_build
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(common)
        # By the number of requests alone: it is the same at a graph's capture and at its replays.
        planned = num_decodes * self._num_heads > self._own_rows
        return FlashInferMLAMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            prefill=plan_prefill(common, num_decodes),
            context_chunks=plan_context_chunks(common, num_decodes, workspace_tokens=self._workspace_tokens),
            seq_lens=common.seq_lens[:num_decodes],
            block_table=common.block_table_tensor[:num_decodes],
            decode=self._plan_decode(common, num_decodes) if planned else None,
        )

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len == 1

    def _plan_decode(self, common: CommonAttentionMetadata, num_decodes: int) -> Any:
        lists = self._lister.list(common).of(0, num_decodes)
        self._decode.plan(
            torch.arange(num_decodes + 1, dtype=torch.int32),
            lists.start_loc,
            lists.block_ids,
            lists.seq_lens,
            self._num_heads,
            LATENT_RANK,
            ROTARY_DIM,
            self._block_size,
            causal=False,
            # NOTE: each layer sets its own before it runs; what is planned does not depend on it.
            sm_scale=math.nan,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._decode.wrapper


class FlashInferMLA:
    """Declares what DeepSeek's models run in; flashinfer itself also knows float16.

    Raises:
        ConfigError: a workspace below one token.
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
        install="pip install flashinfer-python",
    )
    pads_v: ClassVar[bool] = False

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        self.workspace = new_workspace(needs, context_workspace_tokens)
        self._own = _own_plan(needs, platform)
        self.builder = FlashInferMLABuilder(
            needs, workspace_tokens=context_workspace_tokens, own_rows=_FEW_ROWS if self._own is not None else 0
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
        assert isinstance(metadata, FlashInferMLAMetadata)
        del k_THD, v_THV
        if metadata.decode is None:
            assert self._own is not None
            mla_decode_attention(
                q_THD,
                kv_layer,
                seq_lens=metadata.seq_lens,
                block_table=metadata.block_table,
                plan=self._own,
                scale=layer.scale,
                out=out,
            )
            return
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


def _own_plan(needs: AttentionNeeds, platform: Platform) -> MLADecodePlan | None:
    """For our kernel, where there are few heads and it is the one for Hopper; else None."""
    if needs.num_heads > _FEW_HEADS:
        return None
    plan = make_mla_decode_plan(
        num_heads=needs.num_heads,
        latent_channels=LATENT_RANK,
        max_num_reqs=needs.max_num_reqs,
        max_model_len=needs.max_model_len,
        num_sms=platform.num_sms,
        device=needs.device,
    )
    return plan if plan.hopper is not None else None
