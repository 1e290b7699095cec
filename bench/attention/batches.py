"""Batches to measure with: lengths, a cache with dealt-out blocks, queries, and the reference of some rows in float32.

Legend: R requests, T tokens, S keys, H heads, D key channels, V value channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.metadata import CommonAttentionMetadata, build_common_metadata
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec

# Number of last queries of each of the first requests that are compared with the reference.
CHECKED_REQUESTS = 2
CHECKED_QUERIES = 32


@dataclass(frozen=True)
class Lengths:
    """`num_reqs` requests of `query_len` new tokens after `context_len` older ones."""

    num_reqs: int
    query_len: int
    context_len: int

    @property
    def seq_len(self) -> int:
        return self.query_len + self.context_len

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.query_len

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        return self.num_reqs * (self.query_len * self.context_len + self.query_len * (self.query_len + 1) // 2)


def make_common(lengths: Lengths, block_size: int) -> CommonAttentionMetadata:
    """Requests get random blocks, as after hours of serving."""
    blocks_each = -(-lengths.seq_len // block_size)
    generator = torch.Generator().manual_seed(0)
    dealt = torch.randperm(lengths.num_reqs * blocks_each, generator=generator).view(lengths.num_reqs, -1)
    common, _ = build_common_metadata(
        query_lens=[lengths.query_len] * lengths.num_reqs,
        context_lens=[lengths.context_len] * lengths.num_reqs,
        block_tables=dealt.tolist(),
        block_size=block_size,
        device="cuda",
    )
    return common


def make_cache(spec: KVCacheSpec, lengths: Lengths, block_size: int, layout: KVCacheLayout) -> PagedKVCache:
    """Random numbers in every layer."""
    num_blocks = lengths.num_reqs * -(-lengths.seq_len // block_size)
    cache = PagedKVCache(spec, KVCacheShape(layout, block_size, num_blocks), "cuda")
    cache.storage.normal_()
    return cache


def keys_of(kv_layer: Tensor, common: CommonAttentionMetadata, request: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """One request's keys and values [S, H, C]; the same for a latent cache."""
    blocks = common.block_table_tensor[request].long()
    kv_KSHC = kv_layer[:, blocks].flatten(1, 2)[:, :seq_len]
    return kv_KSHC[0], kv_KSHC[-1]


def attend(q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, *, scale: float) -> Tensor:
    """[T, H, V], causal, the last query at the last key, in float32."""
    num_queries, num_keys, group = q_THD.shape[0], k_SHD.shape[0], q_THD.shape[1] // k_SHD.shape[1]
    k_SHD, v_SHV = (kv.float().repeat_interleave(group, 1) for kv in (k_SHD, v_SHV))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD) * scale
    ahead = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_THD.device).triu(num_keys - num_queries + 1)
    return torch.einsum("hts,shv->thv", scores_HTS.masked_fill_(ahead, -math.inf).softmax(-1), v_SHV)


def checked_rows(lengths: Lengths) -> list[tuple[int, slice]]:
    """(request, rows of the batch) that are compared."""
    count = min(CHECKED_QUERIES, lengths.query_len)
    return [
        (request, slice((request + 1) * lengths.query_len - count, (request + 1) * lengths.query_len))
        for request in range(min(CHECKED_REQUESTS, lengths.num_reqs))
    ]
