"""A node's paged KV cache: one allocation, seen through one strided view for every layout."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from baton.kvcache.layout import LOGICAL_AXES
from baton.kvcache.spec import KVCacheShape, KVCacheSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class PagedKVCache:
    """The cache of one node, zeroed.

    Args:
        pinned: page-locked memory of the CPU, so that a GPU's copies do not block the host; needs a GPU.

    Attributes:
        storage: the allocation, contiguous, its axes in the layout's order.
        view: the same memory as [L, K, B, N, H, C]; K and H are 1 for MLA.
        index, draft, state: the further parts of the cache (`KVCacheSpec`); None: the model has no such part. Blocks of
            `index` and `draft` are those of this cache. Each block of `state` has one place, a slot: one state, in
            float32.
    """

    def __init__(
        self, spec: KVCacheSpec, shape: KVCacheShape, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> None:
        self.spec = spec
        self.shape = shape
        sizes = {
            "L": spec.num_layers,
            "K": spec.kv_factor,
            "B": shape.num_blocks,
            "N": shape.block_size,
            "H": spec.num_kv_heads,
            "C": spec.head_dim,
        }
        order = shape.layout.axes
        self.storage: Tensor = torch.zeros(
            [sizes[axis] for axis in order], dtype=TORCH_DTYPES[spec.dtype], device=device, pin_memory=pinned
        )
        self.view: Tensor = self.storage.permute([order.index(axis) for axis in LOGICAL_AXES])
        self._layers = self.view.unbind(0)
        self.index = None if spec.index is None else PagedKVCache(spec.index, shape, device, pinned=pinned)
        self.draft = None if spec.draft is None else PagedKVCache(spec.draft, shape, device, pinned=pinned)
        self.state: PagedKVCache | None = None
        if spec.state is not None:
            slots = replace(shape, block_size=1, num_blocks=shape.state_slots)
            self.state = PagedKVCache(spec.state, slots, device, pinned=pinned)

    @property
    def parts(self) -> "tuple[PagedKVCache, ...]":
        """This cache and its further parts, in the order of `KVCacheSpec.parts`."""
        further = (part for part in (self.index, self.state, self.draft) if part is not None)
        return self, *(each for part in further for each in part.parts)

    @property
    def blockwise(self) -> "tuple[PagedKVCache, ...]":
        """The parts that share this cache's blocks: itself first."""
        further = (part for part in (self.index, self.draft) if part is not None)
        return self, *(each for part in further for each in part.blockwise)

    def layer(self, index: int) -> Tensor:
        """[K, B, N, H, C] of one layer: a view, so writing to it writes to the cache."""
        return self._layers[index]

    @property
    def memory(self) -> Tensor:
        """The whole allocation as bytes."""
        return self.storage.view(-1).view(torch.uint8)

    @property
    def by_block(self) -> Tensor:
        """The same bytes as [axes outside of the block axis, block, contiguous bytes of a block]."""
        outside = math.prod(self.storage.shape[: self.shape.layout.axes.index("B")])
        return self.memory.view(outside, self.shape.num_blocks, -1)

    @property
    def size_bytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()
