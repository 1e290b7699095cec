"""Builds one backend's metadata from a batch's common metadata. A backend has one builder for all layers.

A captured CUDA graph reads only the common metadata, whose tensors the caller keeps in place, and buffers that the
builder allocates once and fills in place at every `build`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from attention.metadata import (
    AttentionMetadata,
    CommonAttentionMetadata,
    PaddedBatch,
    reorder_batch_to_split_decodes_and_prefills,
)
from attention.prefix_group import GroupSavings, PrefixGroup

M_co = TypeVar("M_co", bound=AttentionMetadata, covariant=True)


class AttentionMetadataBuilder(ABC, Generic[M_co]):
    """The interface of builders. The defaults suit a backend without CUDA graphs, cascade attention, or a preferred
    order of the batch.

    Attributes:
        plans_on_device: for decodes, `build` computes on the device from the common metadata's tensors, and the host
            need not know their values. So `build` may be part of the captured step, and a replay needs no further
            `build`.
        captures_prompts: steps with prompts can be captured too, with `build_padded` as part of the captured step.
        captures_context: prompts of such a step may have tokens in the cache from before.
    """

    plans_on_device: ClassVar[bool] = False
    captures_prompts: bool = False
    captures_context: bool = True

    @abstractmethod
    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, *, fast_build: bool = False) -> M_co:
        """Plans a batch.

        Args:
            common_prefix_len: leading tokens, a multiple of the block size, whose blocks all requests share; 0 turns
                cascade attention off. The caller asks `use_cascade_attention` first.
            fast_build: only few layers will use the metadata, such as a draft's. The builder leaves out planning that
                merely makes layers faster: cascade attention and lists of work. Results differ by rounding only.
        """

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> M_co:
        """Returns the metadata for the capture of a graph. A later `build` of as many requests and tokens refills the
        same memory, so that the graph replays with the new lengths. Call it within the capture if the builder
        `plans_on_device`, and before it otherwise."""
        return self.build(0, common)

    def build_padded(self, batch: PaddedBatch) -> M_co:
        """Returns the metadata of a batch whose values the host does not know, for a builder that `captures_prompts`.
        Layers then write a result for every token, 0 for padding."""
        del batch
        raise NotImplementedError(type(self).__name__)

    def group_costs(self) -> GroupSavings | None:
        """Returns what a group of decodes that share keys saves; None: steps share no keys."""
        return None

    def build_with_prefix(self, common: CommonAttentionMetadata, group: PrefixGroup) -> M_co:
        """Returns the metadata of decodes, some of which share keys that layers then read once. Runs as a part of the
        captured step. For a builder that `plans_on_device` and has `group_costs`."""
        del common, group
        raise NotImplementedError(type(self).__name__)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Whether this batch may run as a replay of the graph that was captured for as many requests."""
        del common
        return False

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
        """Whether attending to the shared prefix once, for all queries together, is faster for this batch. Library
        API."""
        del common_prefix_len, query_lens, num_query_heads, num_kv_heads, use_alibi, use_sliding_window, num_sms
        return False

    def reorder_batch(self, query_lens: Sequence[int], swap: Callable[[int, int], None]) -> bool:
        """Brings the batch into the backend's preferred order; returns True if anything moved. `swap` exchanges two
        rows of the caller's batch; `query_lens` is the order before any swap. Library API."""
        del query_lens, swap
        return False


class DecodesFirstBuilder(AttentionMetadataBuilder[M_co]):
    """A builder that prefers decodes first, for a backend whose decodes and prefills run different kernels."""

    def reorder_batch(self, query_lens: Sequence[int], swap: Callable[[int, int], None]) -> bool:
        return reorder_batch_to_split_decodes_and_prefills(query_lens, swap)
