"""Random batches over a poisoned cache: whatever no request of the batch wrote is NaN, so that a backend that reads one
slot too many returns NaN.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from attention.metadata import CommonAttentionMetadata, build_common_metadata
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheShape, KVCacheSpec
from tests.device import DEVICE


def batches(block_size: int) -> Mapping[str, list[tuple[int, int]]]:
    """By name, (new tokens, context) of each request; decodes in front. The edges are those of the blocks."""
    n = block_size
    return MappingProxyType(
        {
            "one decode without context": [(1, 0)],
            "ragged decodes": [(1, 0), (1, n - 1), (1, n), (1, 2 * n - 1), (1, 2 * n), (1, 5 * n + 3)],
            "equal decodes": [(1, n + 5)] * 3,
            "prefills on block edges": [(n, 0), (n, n), (n + 1, n - 1), (n - 1, 2 * n)],
            "prefills off block edges": [(2, 0), (3, 6), (n + 3, 1), (13, 10)],
            "decodes and prefills": [(1, 0), (1, 12), (1, 2 * n - 1), (9, 0), (2, 15), (n + 2, n)],
        }
    )


LONG = MappingProxyType(
    {
        "decodes of very different lengths": [(1, 5), (1, 1700), (1, 0), (1, 690), (1, 20)],
        "a long prefill": [(300 if DEVICE == "cuda" else 140, 17)],
        "a long context": [(1, 900), (40, 1000)] if DEVICE == "cuda" else [(1, 300), (9, 400)],
    }
)


@dataclass(frozen=True)
class Batch:
    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    block_size: int
    num_blocks: int
    common: CommonAttentionMetadata

    @property
    def seq_lens(self) -> list[int]:
        return [query + context for query, context in zip(self.query_lens, self.context_lens, strict=True)]

    def requests(self) -> Iterator[tuple[int, slice, int]]:
        """(request, its rows among the queries, its context)."""
        start = 0
        for request, query_len in enumerate(self.query_lens):
            yield request, slice(start, start + query_len), self.context_lens[request]
            start += query_len

    def slots(self, request: int, stop: int) -> tuple[Tensor, Tensor]:
        """Block and offset of each of a request's first tokens."""
        positions = torch.arange(stop)
        return torch.tensor(self.block_tables[request])[positions // self.block_size], positions % self.block_size


def make_batch(sizes: list[tuple[int, int]], block_size: int, device: str) -> Batch:
    """Blocks are dealt out of order and some stay free."""
    counts = [-(-(query_len + context_len) // block_size) for query_len, context_len in sizes]
    num_blocks = sum(counts) + 3
    dealt = iter(torch.randperm(num_blocks).tolist())
    block_tables = [[next(dealt) for _ in range(count)] for count in counts]
    query_lens, context_lens = [size[0] for size in sizes], [size[1] for size in sizes]
    common, _ = build_common_metadata(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=block_tables,
        block_size=block_size,
        device=device,
    )
    return Batch(query_lens, context_lens, block_tables, block_size, num_blocks, common)


def poisoned_cache(spec: KVCacheSpec, shape: KVCacheShape, device: str) -> PagedKVCache:
    cache = PagedKVCache(spec, shape, device)
    # Of every dtype there is, all ones are NaN, in e5m2 and e4m3 too.
    cache.storage.view(torch.uint8).fill_(0xFF)
    return cache
