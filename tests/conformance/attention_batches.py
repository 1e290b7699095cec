"""Batches for the conformance of attention backends, and attention written out plainly in float64.

The cache holds NaN wherever the batch's requests did not write: a backend that reads one slot too many returns NaN.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from attention.selection import BACKENDS
from attention.spec import KVCacheShape, KVCacheSpec, KVKind

LAYERS, LAYER = 2, 1
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 3e-3}

# (new tokens, context) per request, in units that put edges on the edges of blocks of 4; decodes in front.
BATCHES = {
    "one decode without context": [(1, 0)],
    "one decode": [(1, 9)],
    "ragged decodes": [(1, 0), (1, 3), (1, 4), (1, 7), (1, 8), (1, 21)],
    "equal decodes": [(1, 7), (1, 7), (1, 7)],
    "decodes of very different lengths": [(1, 5), (1, 700), (1, 0), (1, 690), (1, 20)],
    "prefills on block edges": [(4, 0), (4, 4), (5, 3), (3, 8)],
    "prefills off block edges": [(2, 0), (3, 6), (7, 1), (13, 10)],
    "a prefill longer than a piece": [(300, 17)],
    "decodes and prefills": [(1, 0), (1, 12), (1, 6), (9, 0), (2, 15), (6, 2)],
}


@dataclass(frozen=True)
class Batch:
    """A random batch: `kv[i]` is request i's whole KV [S, ...]; the last `query_lens[i]` tokens are new."""

    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    common: CommonAttentionMetadata

    def requests(self) -> Iterator[tuple[int, slice, int]]:
        start = 0
        for request, query_len in enumerate(self.query_lens):
            yield request, slice(start, start + query_len), self.context_lens[request]
            start += query_len

    def slots(self, request: int, block_size: int, *, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)
        return torch.tensor(self.block_tables[request])[positions // block_size] * block_size + positions % block_size


def make_batch(sizes: list[tuple[int, int]], block_size: int) -> tuple[Batch, int]:
    """The batch and the cache's number of blocks; blocks are dealt out of order and some stay free."""
    counts = [-(-(query_len + context_len) // block_size) for query_len, context_len in sizes]
    num_blocks = sum(counts) + 3
    dealt = iter(torch.randperm(num_blocks).tolist())
    block_tables = [[next(dealt) for _ in range(count)] for count in counts]
    query_lens, context_lens = [size[0] for size in sizes], [size[1] for size in sizes]
    common, _ = build_common_metadata(
        query_lens=query_lens, context_lens=context_lens, block_tables=block_tables, block_size=block_size
    )
    return Batch(query_lens, context_lens, block_tables, common), num_blocks


def new_cache(spec: KVCacheSpec, shape: KVCacheShape) -> PagedKVCache:
    cache = PagedKVCache(spec, shape)
    cache.storage.fill_(torch.nan)
    return cache


def oracle(q_HD: Tensor, k_SHD: Tensor, v_SHV: Tensor, scale: float) -> Tensor:
    """One query over the keys that it sees."""
    scores_HS = torch.einsum("hd,shd->hs", q_HD.double(), k_SHD.double()) * scale
    return torch.einsum("hs,shv->hv", scores_HS.softmax(-1), v_SHV.double())


def backends_of(kind: KVKind) -> list[str]:
    return [backend.capabilities.name for backend in BACKENDS if backend.capabilities.kind is kind]
