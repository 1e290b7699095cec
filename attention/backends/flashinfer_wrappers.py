"""The wrappers of flashinfer that one FLASHINFER backend plans and runs, on one workspace.

Constructing them imports flashinfer.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from attention.backend import AttentionNeeds
from attention.backends.flashinfer_plan import BlockLister, BlockLists, PlannedWrapper
from attention.backends.flashinfer_workspace import (
    INT_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    float_workspace_bytes,
    int_workspace_bytes,
)
from attention.metadata import CommonAttentionMetadata
from attention.parameters import get_per_layer_parameters, infer_global_hyperparameters
from attention.platform import Platform
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.spec import FP8_DTYPES


class Wrappers:
    """All wrappers of one backend, on one workspace, and the arguments common to all plans."""

    def __init__(self, needs: AttentionNeeds, platform: Platform) -> None:
        flashinfer = importlib.import_module("flashinfer")
        self.planned = infer_global_hyperparameters(get_per_layer_parameters(needs.layers))
        self.head_size = needs.head_size
        self.block_size = needs.block_size
        self.kv_dtype = TORCH_DTYPES[needs.cache_dtype]
        self.heads = {"num_qo_heads": needs.num_heads, "num_kv_heads": needs.num_kv_heads}
        self.parameters = {
            "window_left": self.planned.window_left,
            "logits_soft_cap": self.planned.logits_soft_cap,
            "sm_scale": self.planned.sm_scale,
            "q_data_type": TORCH_DTYPES[needs.dtype],
        }
        self._flashinfer = flashinfer
        self._device = torch.device(needs.device)
        self.layout = "HND" if needs.layout.axes.index("H") < needs.layout.axes.index("N") else "NHD"
        self.lister = BlockLister(needs)
        self._workspace = self._new_bytes(max(WORKSPACE_BYTES, float_workspace_bytes(needs, platform.num_sms)))
        self._int_bytes = int_workspace_bytes(needs, platform.num_sms)
        self._decode = PlannedWrapper(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, self.layout, use_tensor_cores=True)
        )
        self._captured: dict[int, PlannedWrapper] = {}
        # flashinfer's Hopper kernels multiply the cache's numbers as stored, so an fp8 cache needs fp8 queries too.
        version = "fa2" if needs.cache_dtype in FP8_DTYPES else "auto"
        self.paged = self._planned_prefills(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, self.layout, backend=version)
        )
        self.ragged = self._planned_prefills(flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD"))
        # A window counts from a request's own end, and the wrapper has no kernels for an fp8 cache.
        self.shares_prefixes = self.planned.window_left < 0 and version == "auto"
        self._cascade: PlannedWrapper | None = None

    def _new_bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._device)

    def _planned_prefills(self, wrapper: Any) -> PlannedWrapper:
        """Returns a wrapper with lists large enough for any batch of prefills; its own memory is large enough for
        decodes only."""
        if self._int_bytes > INT_WORKSPACE_BYTES:
            wrapper.reset_workspace_buffer(self._workspace, self._new_bytes(self._int_bytes))
        return PlannedWrapper(wrapper)

    def captured(self, num_reqs: int) -> bool:
        return num_reqs in self._captured

    def capture(self, num_reqs: int) -> None:
        """Keeps plans for batches of that many decodes in persistent memory from now on."""
        if num_reqs in self._captured:
            return
        self._captured[num_reqs] = PlannedWrapper(
            self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                self.layout,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=torch.zeros(num_reqs + 1, dtype=torch.int32, device=self._device),
                paged_kv_indices_buffer=self.lister.buffer,
                paged_kv_last_page_len_buffer=torch.zeros(num_reqs, dtype=torch.int32, device=self._device),
            )
        )

    def plan_cascade(self, common: CommonAttentionMetadata, common_prefix_len: int) -> Any:
        """Plans two levels: one for the prefix, to which all queries attend as if they were one request's, and one for
        the keys after it. Returns None if no whole block lies before every query."""
        num_blocks = min(common_prefix_len, int(common.num_computed_tokens_cpu.min())) // self.block_size
        if not num_blocks or not common.causal or not self.shares_prefixes:
            return None
        if self._cascade is None:
            wrapper = self._flashinfer.MultiLevelCascadeAttentionWrapper(2, self._workspace, self.layout)
            if self._int_bytes > INT_WORKSPACE_BYTES:
                wrapper.reset_workspace_buffer(self._workspace, [self._new_bytes(self._int_bytes) for _ in range(2)])
            self._cascade = PlannedWrapper(wrapper)
        rest = self.lister.list(common, skipped_blocks=num_blocks)
        self._cascade.plan(
            [_int32(0, common.num_actual_tokens), common.query_start_loc_cpu],
            [_int32(0, num_blocks), rest.start_loc],
            [common.block_table_tensor[0, :num_blocks], rest.block_ids],
            [_int32(self.block_size), rest.last_block_lens],
            **self.heads,
            head_dim=self.head_size,
            page_size=self.block_size,
            causal=True,
            **self.parameters,
        )
        return self._cascade.wrapper

    def plan_decode(self, lists: BlockLists, *, captured: bool) -> Any:
        planned = self._captured[len(lists.seq_lens)] if captured else self._decode
        planned.plan(
            lists.start_loc,
            lists.block_ids,
            lists.last_block_lens,
            **self.heads,
            head_dim=self.head_size,
            page_size=self.block_size,
            kv_data_type=self.kv_dtype,
            seq_lens=lists.seq_lens,
            **self.parameters,
        )
        return planned.wrapper


class FlashInferPrefills:
    """The prefills of one batch. The first layer to run plans them, because only layers know whose keys they read."""

    def __init__(
        self,
        wrappers: Wrappers,
        *,
        query_start_loc: Tensor,
        lists: BlockLists,
        causal: bool,
        without_context: bool,
    ) -> None:
        self._wrappers = wrappers
        self._query_start_loc = query_start_loc
        self._lists = lists
        self._causal = causal
        self.without_context = without_context
        self._ragged: Any = None
        self._paged: Any = None

    def ragged(self) -> Any:
        """Returns a wrapper planned for the call's own keys and values, one for each query."""
        if self._ragged is None:
            self._wrappers.ragged.plan(
                self._query_start_loc,
                self._query_start_loc,
                **self._wrappers.heads,
                head_dim_qk=self._wrappers.head_size,
                causal=self._causal,
                **self._wrappers.parameters,
            )
            self._ragged = self._wrappers.ragged.wrapper
        return self._ragged

    def paged(self) -> Any:
        """Returns a wrapper planned for keys and values in the cache."""
        if self._paged is None:
            lists = self._lists
            self._wrappers.paged.plan(
                self._query_start_loc,
                lists.start_loc,
                lists.block_ids,
                lists.last_block_lens,
                **self._wrappers.heads,
                head_dim_qk=self._wrappers.head_size,
                page_size=self._wrappers.block_size,
                causal=self._causal,
                kv_data_type=self._wrappers.kv_dtype,
                seq_lens=lists.seq_lens,
                **self._wrappers.parameters,
            )
            self._paged = self._wrappers.paged.wrapper
        return self._paged


def _int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
