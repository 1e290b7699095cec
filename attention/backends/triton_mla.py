"""TRITON_MLA: latent attention on a GPU by our own kernels.

Decodes read the latent cache, split over the GPU; prefills attend over decompressed keys and values. In batch-invariant
mode prefills run the kernel of decodes, several tokens in a program (`attention.kernels.mla.plan`). Legend: R requests,
T queries, S keys, H heads, D key channels, V value channels, C latent plus rotary channels.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from attention.backend import (
    AbsorbedPrefills,
    AttentionFeature,
    AttentionNeeds,
    BackendCapabilities,
    ContextChunk,
    MLAMetadata,
    RaggedLens,
)
from attention.backends.invariance import split_tokens_of
from attention.backends.mla_prefills import attend_decompressed, new_workspace
from attention.kernels.mla.decode import mla_decode_attention
from attention.kernels.mla.plan import TILE, MLADecodePlan, make_mla_decode_plan
from attention.kernels.sparse.select import select_slots
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, PaddedBatch, split_decodes_and_prefills
from attention.metadata_builder import DecodesFirstBuilder
from attention.mla_cascade import LatentGroupCosts, SharedLatents, attend_to_shared_latents, share_latents
from attention.mla_context import plan_context_chunks, plan_prefill
from attention.mla_query_tiles import QueryTiles, cut_padded, plan_query_tiles
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.prefix_group import PrefixGroup
from attention.sparse import SparseQueries, sparse_decodes, sparse_prefills
from baton.core.errors import InternalError
from baton.kvcache.layout import MLA_LAYOUTS
from baton.kvcache.spec import DTYPE_BYTES, KV_DTYPE_BYTES, KVKind
from baton.kvcache.tokens import WriteIndex

# Queries of one launch over selected tokens: enough to fill any GPU, and few enough for a kernel that reads all
# lengths.
_SELECTING_QUERIES = 512


class LatentDecodes(NamedTuple):
    """Rows of one token each: [N] and [N, blocks] int32; a row of length 0 has no keys."""

    seq_lens: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class TritonMLAMetadata(MLAMetadata):
    """The plan of a batch for our Triton kernels of latent attention.

    Attributes:
        seq_lens: [R] int32 of the decodes, on the device; of query tiles in `absorbed_prefills`.
        block_table: [R, blocks] int32 of the decodes; of all requests in `absorbed_prefills`.
        tiles: the query tiles of `absorbed_prefills`; None for decodes.
        first_decodes: the first rows of `absorbed_prefills` in a padded batch, where the host does not know which are
            decodes: all are computed as such, and then the tiles of prompts overwrite theirs.
        shared: the keys that some of the decodes share; None: each row reads its own.
    """

    seq_lens: Tensor
    block_table: Tensor
    tiles: Tensor | None = field(default=None, kw_only=True)
    first_decodes: LatentDecodes | None = field(default=None, kw_only=True)
    shared: SharedLatents | None = field(default=None, kw_only=True)


class TritonMLABuilder(DecodesFirstBuilder[TritonMLAMetadata]):
    """Plans batches for latent attention. A decode step's metadata are views of the common metadata, and the kernel
    splits its work on the device, so a captured graph needs no refill. Steps with prompts are captured only where no
    prompt has tokens from before: the host plans how these are read.
    """

    plans_on_device: ClassVar[bool] = True

    def __init__(
        self,
        *,
        block_size: int,
        workspace_tokens: int,
        costs: LatentGroupCosts,
        in_order: MLADecodePlan | None = None,
        top_k: int = 0,
    ) -> None:
        """Makes the builder of one backend.

        Args:
            in_order: the plan of decodes, where prefills have their order.
        """
        self._costs = costs
        self._block_size = block_size
        self._workspace_tokens = workspace_tokens
        self._in_order = in_order
        self._top_k = top_k
        self.captures_prompts = not top_k
        self.captures_context = False

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> TritonMLAMetadata:
        del common_prefix_len, fast_build  # layers cannot do without the plans
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(common)
        in_order = self._in_order is not None
        new_tokens = WriteIndex(common.slot_mapping, self._block_size)
        context_chunks: tuple[ContextChunk, ...] = ()
        if not in_order:
            context_chunks = plan_context_chunks(common, num_decodes, workspace_tokens=self._workspace_tokens)
        return TritonMLAMetadata(
            new_tokens=new_tokens,
            num_actual_tokens=common.num_actual_tokens,
            num_decode_tokens=num_decode_tokens,
            prefill=plan_prefill(common, num_decodes),
            context_chunks=context_chunks,
            absorbed_prefills=self._absorbed_prefills(common, num_decodes, new_tokens),
            seq_lens=common.seq_lens[:num_decodes],
            block_table=common.block_table_tensor[:num_decodes],
            sparse_decodes=sparse_decodes(
                common,
                num_decodes,
                block_size=self._block_size,
                top_k=self._top_k,
                always=in_order,
                on_host=False,
            ),
            sparse_prefills=sparse_prefills(common, num_decodes, top_k=self._top_k, always=in_order),
        )

    def _absorbed_prefills(
        self, common: CommonAttentionMetadata, num_decodes: int, new_tokens: WriteIndex
    ) -> tuple[AbsorbedPrefills, ...]:
        if self._in_order is None or self._top_k:  # with sparse attention, prefills attend to selected tokens
            return ()
        runs = plan_query_tiles(common, num_decodes, self._in_order)
        return tuple(_absorbed(run, new_tokens, common.block_table_tensor) for run in runs)

    def build_padded(self, batch: PaddedBatch) -> TritonMLAMetadata:
        # As many tokens as could be decodes are computed as decodes; prefills, which run after them, overwrite their
        # own. The padding at the end has queries but no keys.
        if self._in_order is not None:
            return self._padded_in_order(batch, self._in_order)
        starts, size = batch.query_start_loc, batch.slot_mapping.shape[0]
        key_starts = starts.clone()
        key_starts[-1:].copy_(starts[-2:-1])
        return TritonMLAMetadata(
            new_tokens=WriteIndex(batch.slot_mapping, self._block_size),
            num_actual_tokens=size,
            num_decode_tokens=len(batch.decode_seq_lens),
            prefill=RaggedLens(starts, key_starts, (0, size), (0, size)),
            context_chunks=(),
            prefill_base=0,
            seq_lens=batch.decode_seq_lens,
            block_table=batch.decode_table,
        )

    def _padded_in_order(self, batch: PaddedBatch, plan: MLADecodePlan) -> TritonMLAMetadata:
        new_tokens = WriteIndex(batch.slot_mapping, self._block_size)

        def absorbed(run: QueryTiles) -> AbsorbedPrefills:
            rows = slice(run.start, run.stop)
            decodes = LatentDecodes(batch.decode_seq_lens[rows], batch.decode_table[rows])
            return _absorbed(run, new_tokens, batch.block_table, decodes)

        return TritonMLAMetadata(
            new_tokens=new_tokens,
            num_actual_tokens=len(batch.slot_mapping),
            num_decode_tokens=0,
            prefill=None,
            context_chunks=(),
            absorbed_prefills=tuple(map(absorbed, cut_padded(batch, plan))),
            seq_lens=batch.decode_seq_lens,
            block_table=batch.decode_table,
        )

    def group_costs(self) -> LatentGroupCosts | None:
        # A row's split must not depend on other rows where prefills have the order of decodes, and rows that select
        # their tokens read no prefix.
        if self._in_order is not None or self._top_k or self._costs.tile_rows == 1:
            return None
        return self._costs

    def build_with_prefix(self, common: CommonAttentionMetadata, group: PrefixGroup) -> TritonMLAMetadata:
        shared = share_latents(common, group, block_size=self._block_size, tile_rows=self._costs.tile_rows)
        return replace(self.build(0, common), shared=shared)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len == 1


def _absorbed(
    run: QueryTiles, new_tokens: WriteIndex, block_table: Tensor, decodes: LatentDecodes | None = None
) -> AbsorbedPrefills:
    metadata = TritonMLAMetadata(
        new_tokens=new_tokens,
        num_actual_tokens=run.stop - run.start,
        num_decode_tokens=run.stop - run.start,
        prefill=None,
        context_chunks=(),
        seq_lens=run.seq_lens,
        block_table=block_table,
        tiles=run.tiles,
        first_decodes=decodes,
    )
    return AbsorbedPrefills(run.start, run.stop, metadata)


class TritonMLA:
    """Latent attention of one layer by our Triton kernels.

    Raises:
        ConfigError: the workspace is smaller than one token.
    """

    capabilities: ClassVar = BackendCapabilities(
        name="TRITON_MLA",
        kind=KVKind.MLA,
        devices=frozenset({"cuda"}),
        dtypes=frozenset(DTYPE_BYTES),
        kv_dtypes=frozenset(KV_DTYPE_BYTES),
        head_sizes=None,
        block_sizes=None,
        layouts=frozenset(MLA_LAYOUTS),
        features=frozenset({AttentionFeature.SPARSE}),
        cudagraph=True,
        min_compute_capability=(8, 0),
        batch_invariant=True,
        rows_in_order=True,
    )
    pads_v: ClassVar = False

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int) -> None:
        self._num_heads = needs.num_heads
        self.workspace = new_workspace(needs, context_workspace_tokens)
        new_plan = partial(
            make_mla_decode_plan,
            latent_channels=needs.head_size if needs.mla is None else needs.mla.kv_lora_rank,
            max_num_reqs=needs.max_num_reqs,
            max_model_len=needs.max_model_len,
            num_sms=platform.num_sms,
            device=needs.device,
        )
        split_tokens = split_tokens_of(needs.num_heads) if needs.batch_invariant else None
        self._plan = new_plan(num_heads=needs.num_heads, split_tokens=split_tokens)
        costs = LatentGroupCosts.of(needs, num_sms=platform.num_sms)
        self._new_tile_plan = partial(new_plan, num_heads=costs.tile_rows * needs.num_heads)
        self.builder = TritonMLABuilder(
            block_size=needs.block_size,
            workspace_tokens=context_workspace_tokens,
            costs=costs,
            in_order=self._plan if needs.batch_invariant else None,
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
        assert isinstance(metadata, TritonMLAMetadata)
        del k_THD, v_THV
        if q_THD.shape[1] != self._num_heads:
            raise InternalError(
                f"a layer has {q_THD.shape[1]} heads, the backend was made for {self._num_heads}",
                field="num_heads",
                value=q_THD.shape[1],
                allowed=(str(self._num_heads),),
            )
        kv_scale = None if layer.scales is None else layer.scales.k_scale
        if metadata.shared is not None:
            attend_to_shared_latents(
                q_THD,
                kv_layer,
                metadata.shared,
                tile_plan=self._tile_plan,
                plan=self._plan,
                scale=layer.scale,
                kv_scale=kv_scale,
                out=out,
            )
            return
        attend = partial(mla_decode_attention, kv_layer=kv_layer, plan=self._plan, scale=layer.scale, kv_scale=kv_scale)
        if metadata.first_decodes is not None:
            seq_lens, block_table = metadata.first_decodes
            rows = slice(0, len(seq_lens))
            attend(q_THD[rows], seq_lens=seq_lens, block_table=block_table, out=out[rows])
        attend(q_THD, seq_lens=metadata.seq_lens, block_table=metadata.block_table, tiles=metadata.tiles, out=out)

    @cached_property
    def _tile_plan(self) -> MLADecodePlan:
        """Takes 35 MB with 132 multiprocessors and 512 channels, so only a backend whose rows share keys has it."""
        return self._new_tile_plan()

    def select(self, q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries) -> Tensor:
        return select_slots(q_THD, weights_TH, index_layer, queries)

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
        step = _SELECTING_QUERIES
        if self._plan.split_tiles:  # every split of every query has its own place
            splits = -(-queries.width // (self._plan.split_tiles * TILE))
            step = max(1, min(step, len(self._plan.partial_lse) // splits))
        for start in range(0, len(q_THC), step):
            rows = slice(start, min(start + step, len(q_THC)))
            mla_decode_attention(
                q_THC[rows],
                kv_layer,
                seq_lens=queries.counts_T[rows],
                block_table=slots_TK[rows],
                plan=self._plan,
                scale=layer.scale,
                kv_scale=None if layer.scales is None else layer.scales.k_scale,
                selected=True,
                out=out[rows],
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
