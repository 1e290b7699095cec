"""BLOCKSPARSE_FLASH_ATTN: local blocks and vertical stripes over a paged key/value cache, with dense layers in between.

`attention.blocksparse` defines the pattern. Unlike vLLM's backend of this name, this one prefills any context. Legend:
T tokens, H heads, D head_dim.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds, BackendCapabilities
from attention.blocksparse import BlocksparseParams
from attention.kernels.blocksparse.decode import (
    SparseDecodePartials,
    blocksparse_decode,
    decode_pieces,
    new_decode_partials,
)
from attention.kernels.blocksparse.pattern import SPARSE_BLOCK_SIZES
from attention.kernels.blocksparse.prefill import blocksparse_prefill, can_read_directly
from attention.layer_checks import check_heads
from attention.metadata import (
    AttentionMetadata,
    CommonAttentionMetadata,
    check_causal,
    split_decodes_and_prefills,
)
from attention.metadata_builder import DecodesFirstBuilder
from attention.parameters import AttentionParameters
from attention.platform import Platform
from baton.core.errors import ConfigError
from baton.kvcache.layout import GQA_LAYOUTS
from baton.kvcache.spec import DTYPE_BYTES, KV_DTYPE_BYTES, KVKind
from baton.kvcache.tokens import WriteIndex

_MAX_HEAD_SIZE = 256
_HOPPER = 9  # major compute capability


@dataclass(frozen=True)
class BlocksparseMetadata(AttentionMetadata):
    """The plan of a batch for block-sparse attention.

    Attributes:
        num_decodes: number of requests with one token each, which come first; all others are prefills.
        pieces: number of pieces into which each decode's keys are cut.
        without_context: no prefill has context, so the call's keys are all keys.
    """

    common: CommonAttentionMetadata
    num_decodes: int
    pieces: int
    without_context: bool


class BlocksparseBuilder(DecodesFirstBuilder[BlocksparseMetadata]):
    plans_on_device: ClassVar[bool] = True

    def __init__(self, *, block_size: int, num_kv_heads: int, num_sms: int) -> None:
        self._block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._num_sms = num_sms

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> BlocksparseMetadata:
        del common_prefix_len, fast_build  # cascade attention is unsupported, and there is nothing to leave out
        check_causal(common)
        num_decodes, num_prefills, _, _ = split_decodes_and_prefills(common)
        without_context = num_prefills > 0 and not common.num_computed_tokens_cpu[num_decodes:].any()
        return BlocksparseMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._block_size),
            num_actual_tokens=common.num_actual_tokens,
            common=common,
            num_decodes=num_decodes,
            pieces=decode_pieces(num_reqs=max(1, num_decodes), num_kv_heads=self._num_kv_heads, num_sms=self._num_sms),
            without_context=bool(without_context),
        )

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len == 1


class BlocksparseFlashAttention:
    """Attention of one layer over the blocks that its pattern keeps.

    Raises:
        ConfigError: a layer's pattern has a block size that the kernels do not support, or is for another number of
            heads.
    """

    capabilities: ClassVar = BackendCapabilities(
        name="BLOCKSPARSE_FLASH_ATTN",
        kind=KVKind.GQA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset(DTYPE_BYTES),
        kv_dtypes=frozenset(KV_DTYPE_BYTES),
        head_sizes=frozenset(range(8, _MAX_HEAD_SIZE + 1, 8)),
        block_sizes=None,
        layouts=frozenset(GQA_LAYOUTS),
        features=frozenset({AttentionFeature.BLOCK_SPARSE}),
        cudagraph=True,
        min_compute_capability=(8, 0),
    )

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        del context_workspace_tokens  # only MLA uses it
        for layer in needs.layers.values():
            if layer.blocksparse is not None:
                _check_pattern(layer.blocksparse, needs)
        self._num_heads, self._head_size = needs.num_heads, needs.head_size
        self.builder = BlocksparseBuilder(
            block_size=needs.block_size, num_kv_heads=needs.num_kv_heads, num_sms=platform.num_sms
        )
        is_hopper = platform.compute_capability is not None and platform.compute_capability[0] == _HOPPER
        self._hopper_sms = platform.num_sms if is_hopper else None
        self._partials: SparseDecodePartials = new_decode_partials(
            num_heads=needs.num_heads,
            num_kv_heads=needs.num_kv_heads,
            head_size=needs.head_size,
            num_sms=platform.num_sms,
            device=torch.device(needs.device),
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
        assert isinstance(metadata, BlocksparseMetadata)
        check_heads(q_THD, num_heads=self._num_heads, head_size=self._head_size)
        common, num_decodes = metadata.common, metadata.num_decodes
        k_scale, v_scale = (None, None) if layer.scales is None else (layer.scales.k_scale, layer.scales.v_scale)
        if num_decodes:
            blocksparse_decode(
                q_THD[:num_decodes],
                kv_layer,
                seq_lens=common.seq_lens[:num_decodes],
                block_table=common.block_table_tensor[:num_decodes],
                pieces=metadata.pieces,
                partials=self._partials,
                scale=layer.scale,
                params=layer.blocksparse,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out[:num_decodes],
            )
        if num_decodes == common.num_reqs:
            return
        direct = (
            metadata.without_context
            and k_THD is not None
            and v_THV is not None
            and k_THD.dtype == kv_layer.dtype  # an fp8 cache rounds, so results would depend on where prompts are cut
            and can_read_directly(k_THD, layer.blocksparse)
            and can_read_directly(v_THV, layer.blocksparse)
        )
        blocksparse_prefill(
            q_THD,
            kv_layer,
            k_THD=k_THD if direct else None,
            v_THD=v_THV if direct else None,
            query_start_loc=common.query_start_loc[num_decodes:],
            seq_lens=common.seq_lens[num_decodes:],
            block_table=common.block_table_tensor[num_decodes:],
            max_query_len=common.max_query_len,
            scale=layer.scale,
            params=layer.blocksparse,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            hopper_sms=self._hopper_sms,
        )


def _check_pattern(params: BlocksparseParams, needs: AttentionNeeds) -> None:
    if params.block_size not in SPARSE_BLOCK_SIZES:
        raise ConfigError(
            f"blocksparse block_size is {params.block_size}",
            field="block_size",
            value=params.block_size,
            allowed=tuple(map(str, SPARSE_BLOCK_SIZES)),
        )
    heads, expected = (params.num_heads, params.num_kv_heads), (needs.num_heads, needs.num_kv_heads)
    if heads != expected:
        raise ConfigError(
            f"the pattern is for (heads, kv heads) {heads}, the model has {expected}",
            field="blocksparse",
            value=heads,
            allowed=(str(expected),),
        )
