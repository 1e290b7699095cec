"""TRITON_ATTN's metadata of a batch: its decodes, the split of their keys, and the shared prefix.

Legend: R requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds
from attention.backends.invariance import ANY_QUERY_LEN, MAX_SPLITS, SPLIT_KEYS
from attention.cascade import SharedPrefix, can_share_prefix, share_prefix, worth_sharing
from attention.kernels.decode.plan import (
    DecodePlan,
    decode_tiling,
    in_order_tiling,
    new_decode_plan,
    new_partials,
    num_decode_workers,
)
from attention.kernels.in_order.prompts import tile_tokens_of
from attention.kernels.paged.split import SplitLayer, choose_splits
from attention.kernels.paged.work_list import WorkList, list_work
from attention.metadata import (
    AttentionMetadata,
    CommonAttentionMetadata,
    PaddedBatch,
    split_decodes_and_prefills,
)
from attention.metadata_builder import DecodesFirstBuilder
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.prefix_group import GroupCosts, PrefixGroup
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.tokens import WriteIndex

# Rows of a tile of the Hopper kernels.
_TILE_ROWS = 128


class DecodePlans:
    """The split of decodes over the GPU: one plan for each window and chunk size, in memory that is allocated once and
    refilled for each batch.

    Args:
        layers: the layers whose plans are made with each batch; another layer's plan is added at its first call.
    """

    def __init__(
        self, new_plan: Callable[[int | None, int | None], DecodePlan], layers: Iterable[AttentionParameters]
    ) -> None:
        self._new_plan = new_plan
        self._plans = {key: new_plan(*key) for key in {_visibility(layer) for layer in layers}}
        self._seq_lens_R = torch.empty(0, dtype=torch.int32)

    def fill(self, seq_lens_R: Tensor) -> None:
        """Plans the next batch for all known layers."""
        self._seq_lens_R = seq_lens_R
        if seq_lens_R.shape[0]:
            for plan in self._plans.values():
                plan.fill(seq_lens_R)

    def of(self, layer: AttentionParameters) -> DecodePlan:
        key = _visibility(layer)
        if key not in self._plans:
            self._plans[key] = self._new_plan(*key)
            self._plans[key].fill(self._seq_lens_R)
        return self._plans[key]


def _visibility(layer: AttentionParameters) -> tuple[int | None, int | None]:
    return layer.sliding_window, layer.attention_chunk_size


class Decodes(NamedTuple):
    """The decodes, which come first in a batch with one token each: [N] and [N, blocks]."""

    seq_lens: Tensor
    block_table: Tensor


class TritonPrefills(NamedTuple):
    """The prefills of a batch: [P + 1], [P] and [P, blocks]. `causal` is as in `CommonAttentionMetadata`. `work` holds
    their tiles; None where no persistent kernel runs. `splits` is the number of programs that share a tile's keys.
    `padded`: of a captured step."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool
    work: WorkList | None = None
    splits: int = 1
    padded: bool = False


def split_requests(common: CommonAttentionMetadata, num_decodes: int) -> tuple[Decodes, TritonPrefills]:
    seq_lens, table = common.seq_lens, common.block_table_tensor
    prefills = TritonPrefills(
        common.query_start_loc[num_decodes:], seq_lens[num_decodes:], table[num_decodes:], common.causal
    )
    return Decodes(seq_lens[:num_decodes], table[:num_decodes]), prefills


@dataclass(frozen=True)
class TritonAttentionMetadata(AttentionMetadata):
    """The plan of a batch for our Triton kernels.

    Attributes:
        query_start_loc: of all requests.
        fresh_prefills: no prefill has context, so the call brings all their keys. Always False where results must not
            depend on the batch, because this flag does.
        prefill_query_len: query length for which the prefills' tiles are chosen: the longest, or more.
        in_order: prompts have the bits of decodes.
        plans: the split of the decodes.
        prefix: the keys that cascade attention reads once; None without a shared prefix.
        rest_plans: the split of the decodes' keys after that prefix.
    """

    query_start_loc: Tensor
    decodes: Decodes
    prefills: TritonPrefills
    fresh_prefills: bool
    prefill_query_len: int
    in_order: bool
    plans: DecodePlans
    prefix: SharedPrefix | None
    rest_plans: DecodePlans


class TritonAttentionBuilder(DecodesFirstBuilder[TritonAttentionMetadata]):
    """Plans batches for our Triton kernels.

    Args:
        persistent_prefills: whether prefills run the persistent kernel; None: where it is faster.
    """

    plans_on_device: ClassVar[bool] = True
    captures_prompts = True

    def __init__(self, needs: AttentionNeeds, platform: Platform, *, persistent_prefills: bool | None) -> None:
        cache_dtype = TORCH_DTYPES[needs.cache_dtype]
        if needs.batch_invariant:
            tiling = in_order_tiling(needs.head_size, cache_dtype, hopper=platform.hopper_kernels)
        else:
            tiling = decode_tiling(needs.head_size, cache_dtype)
        num_workers = num_decode_workers(needs.num_kv_heads, platform.num_sms, tiling)
        partials = new_partials(
            max_num_reqs=needs.max_num_reqs,
            num_workers=num_workers,
            num_heads=needs.num_heads,
            head_size=needs.head_size,
            max_units=needs.max_num_reqs * (MAX_SPLITS + 1) if needs.batch_invariant else 0,
            device=torch.device(needs.device),
        )

        def new_plan(sliding_window: int | None, attention_chunk_size: int | None) -> DecodePlan:
            return new_decode_plan(
                tiling=tiling,
                max_num_reqs=needs.max_num_reqs,
                num_workers=num_workers,
                partials=partials,
                sliding_window=sliding_window,
                attention_chunk_size=attention_chunk_size,
                split_keys=SPLIT_KEYS if needs.batch_invariant else None,
                max_splits=MAX_SPLITS,
                tile_tokens=tile_tokens_of(needs.num_heads // needs.num_kv_heads),
            )

        self._needs, self._num_sms = needs, platform.num_sms
        self._split_layer = SplitLayer(needs.num_heads, needs.num_kv_heads, needs.head_size, platform.num_sms)
        group = needs.num_heads // needs.num_kv_heads
        lists_work = persistent_prefills is not False and platform.hopper_kernels and not needs.batch_invariant
        self._tile_tokens = max(1, _TILE_ROWS // group) if lists_work else None
        self._always_persistent = bool(persistent_prefills)
        self._plans = DecodePlans(new_plan, needs.layers.values())
        self._rest_plans = DecodePlans(new_plan, filter(can_share_prefix, needs.layers.values()))

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False
    ) -> TritonAttentionMetadata:
        num_decodes, num_prefills, _, prefill_tokens = split_decodes_and_prefills(common)
        invariant = self._needs.batch_invariant
        prefix = None
        if common_prefix_len and not invariant and not fast_build:
            prefix = share_prefix(common, common_prefix_len, self._needs, num_sms=self._num_sms)
        decodes, prefills = split_requests(common, num_decodes)
        fresh = not invariant and not common.num_computed_tokens_cpu[num_decodes:].any()
        has_next_tiles = self._num_tiles(prefill_tokens, num_prefills) > self._num_sms
        if self._always_persistent or (fresh and has_next_tiles and not fast_build):
            prefills = self._with_work(prefills, common.num_actual_tokens)
        elif num_prefills and not fresh:
            prefills = prefills._replace(
                splits=self._splits(
                    num_tokens=prefill_tokens,
                    num_reqs=num_prefills,
                    batch_tokens=common.num_actual_tokens,
                    num_keys=int(common.seq_lens_cpu[num_decodes:].max()),
                )
            )
        self._plans.fill(decodes.seq_lens)
        if prefix is not None:
            self._rest_plans.fill(prefix.rest.seq_lens[:num_decodes])
        return TritonAttentionMetadata(
            new_tokens=WriteIndex(common.slot_mapping, self._needs.block_size),
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            decodes=decodes,
            prefills=prefills,
            fresh_prefills=fresh,
            prefill_query_len=ANY_QUERY_LEN if invariant else common.max_query_len,
            in_order=invariant,
            plans=self._plans,
            prefix=prefix,
            rest_plans=self._rest_plans,
        )

    def build_padded(self, batch: PaddedBatch) -> TritonAttentionMetadata:
        # The decode kernel also writes the rows of prompts' first tokens; the prefill kernel runs after it and
        # overwrites them.
        decodes = Decodes(batch.decode_seq_lens, batch.decode_table)
        self._plans.fill(decodes.seq_lens)
        prefills = TritonPrefills(batch.query_start_loc, batch.seq_lens, batch.block_table, causal=True, padded=True)
        num_tokens = batch.slot_mapping.shape[0]
        if self._always_persistent:
            prefills = self._with_work(prefills, num_tokens)
        else:  # the lengths are not known; short requests leave all but one split without keys
            num_keys = batch.block_table.shape[1] * self._needs.block_size
            splits = self._splits(
                num_tokens=num_tokens, num_reqs=len(batch.seq_lens), batch_tokens=num_tokens, num_keys=num_keys
            )
            prefills = prefills._replace(splits=splits)
        return TritonAttentionMetadata(
            new_tokens=WriteIndex(batch.slot_mapping, self._needs.block_size),
            num_actual_tokens=num_tokens,
            query_start_loc=batch.query_start_loc,
            decodes=decodes,
            prefills=prefills,
            fresh_prefills=False,
            prefill_query_len=ANY_QUERY_LEN if self._needs.batch_invariant else batch.max_query_len,
            in_order=self._needs.batch_invariant,
            plans=self._plans,
            prefix=None,
            rest_plans=self._rest_plans,
        )

    def group_costs(self) -> GroupCosts | None:
        needs = self._needs
        # A batch-invariant row's split must not depend on other rows, and ALiBi counts keys from the sequence's start.
        if needs.batch_invariant or AttentionFeature.ALIBI in needs.features:
            return None
        if not any(map(can_share_prefix, needs.layers.values())):
            return None
        return GroupCosts.of(self._split_layer, TORCH_DTYPES[needs.cache_dtype].itemsize)

    def build_with_prefix(self, common: CommonAttentionMetadata, group: PrefixGroup) -> TritonAttentionMetadata:
        num_rows, block_size = common.num_reqs, self._needs.block_size
        group.split(common, block_size)
        num_keys = common.block_table_tensor.shape[1] * block_size
        splits = self._splits(num_tokens=num_rows, num_reqs=1, batch_tokens=num_rows, num_keys=num_keys)
        own_lens_R = group.own_lens_N[:num_rows]
        self._rest_plans.fill(own_lens_R)
        prefix = SharedPrefix(
            query_start_loc=group.rows,
            seq_lens=group.num_keys,
            block_table=group.tables[:1],
            num_tokens=num_rows,
            plan=None,
            rest=replace(common, seq_lens=own_lens_R, block_table_tensor=group.tables[1 : num_rows + 1]),
            splits=splits,
            lens_T=group.lens_N[:num_rows],
        )
        return replace(self.build(0, common), prefix=prefix)

    def _splits(self, *, num_tokens: int, num_reqs: int, batch_tokens: int, num_keys: int) -> int:
        # The number depends on the batch, so keys are not split where results must not depend on it.
        if self._needs.batch_invariant:
            return 1
        return choose_splits(
            self._split_layer,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            batch_tokens=batch_tokens,
            num_keys=num_keys,
        )

    def _num_tiles(self, num_tokens: int, num_reqs: int) -> int:
        """Number of tiles of prompts over all heads, at most. A persistent program has a next tile to begin early if
        they are more than the multiprocessors."""
        needs = self._needs
        rows = num_tokens // (self._tile_tokens or 1) + num_reqs
        return rows * needs.num_kv_heads * -(-needs.num_heads // needs.num_kv_heads // _TILE_ROWS)

    def _with_work(self, prefills: TritonPrefills, num_tokens: int) -> TritonPrefills:
        if self._tile_tokens is None or not prefills.causal or not len(prefills.seq_lens):
            return prefills
        work = list_work(
            prefills.query_start_loc,
            prefills.seq_lens,
            num_tokens=num_tokens,
            tokens=self._tile_tokens,
            num_programs=self._num_sms,
        )
        return prefills._replace(work=work)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        return common.max_query_len == 1

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
        if use_alibi or use_sliding_window or self._needs.batch_invariant:
            return False
        return worth_sharing(
            common_prefix_len,
            query_lens,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            num_sms=num_sms,
        )
