"""Block-sparse attention over a paged cache in plain torch, float64: the reference for its kernels.

Legend: T tokens, H query heads, S keys, D channels, R requests.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.blocksparse import BlocksparseParams
from attention.blocksparse_mask import token_mask
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KV_DTYPE_BYTES, KVCacheShape, KVCacheSpec, KVKind
from tests.device import DEVICE


@dataclass(frozen=True)
class SparseCase:
    """A batch over a cache whose unwritten slots hold NaN. `k`, `v`: each request's [S, H, D], as it is kept."""

    common: CommonAttentionMetadata
    kv_layer: Tensor
    q_THD: Tensor
    k: list[Tensor]
    v: list[Tensor]
    query_lens: list[int]

    def new_kv(self) -> tuple[Tensor, Tensor]:
        """The keys and values of the batch's own tokens."""
        parts = [torch.cat([kv[-n:] for kv, n in zip(kvs, self.query_lens, strict=True)]) for kvs in (self.k, self.v)]
        return parts[0].to(self.q_THD.dtype), parts[1].to(self.q_THD.dtype)


def make_case(
    *,
    query_lens: list[int],
    context_lens: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: str = "float32",
    kv_dtype: str = "",
    block_size: int = 16,
    layout: KVCacheLayout = KVCacheLayout.NHD,
    seed: int = 0,
) -> SparseCase:
    generator = torch.Generator().manual_seed(seed)
    lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    blocks_of = [-(-length // block_size) for length in lens]
    spec = KVCacheSpec(KVKind.GQA, 2, num_kv_heads, head_dim, kv_dtype or dtype)
    assert spec.dtype in KV_DTYPE_BYTES
    cache = PagedKVCache(spec, KVCacheShape(layout, block_size, sum(blocks_of) + 3))
    order = torch.randperm(sum(blocks_of) + 3, generator=generator)[: sum(blocks_of)]
    tables = [ids.tolist() for ids in torch.split(order, blocks_of)]
    cache.storage.view(torch.uint8).fill_(0x7F)  # NaN in e4m3 and e5m2
    if cache.storage.dtype.itemsize > 1:
        cache.storage.fill_(torch.nan)
    keys, values = [], []
    for length, table in zip(lens, tables, strict=True):
        kv = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(TORCH_DTYPES[spec.dtype])
        slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(length)])
        for part in range(2):
            layer = cache.layer(1)[part]
            layer.view(torch.uint8)[slots // block_size, slots % block_size] = kv[part].view(torch.uint8)
        keys.append(kv[0].to(DEVICE))
        values.append(kv[1].to(DEVICE))
    common, _ = build_common_metadata(
        query_lens=query_lens, context_lens=context_lens, block_tables=tables, block_size=block_size, device=DEVICE
    )
    q_THD = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(TORCH_DTYPES[dtype])
    storage = cache.storage.to(DEVICE)
    kv_layer = storage.permute([layout.axes.index(axis) for axis in "LKBNHC"])[1]
    return SparseCase(common, kv_layer, q_THD.to(DEVICE), keys, values, query_lens)


def expected(
    case: SparseCase, *, scale: float, params: BlocksparseParams | None, k_scale: float = 1.0, v_scale: float = 1.0
) -> Tensor:
    """[T, H, D] float64 on the CPU."""
    outs = []
    for request, q_THD in enumerate(torch.split(case.q_THD.cpu().double(), case.query_lens)):
        k_SHD, v_SHD = case.k[request].cpu().double() * k_scale, case.v[request].cpu().double() * v_scale
        groups, num_keys = q_THD.shape[1] // k_SHD.shape[1], k_SHD.shape[0]
        positions_T = np.arange(num_keys - q_THD.shape[0], num_keys)
        if params is None:
            seen_HTS = torch.from_numpy(np.arange(num_keys) <= positions_T[:, None])[None]
        else:
            seen_HTS = torch.from_numpy(token_mask(params, positions_T, num_keys))
        scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD.repeat_interleave(groups, 1)) * scale
        weights_HTS = scores_HTS.masked_fill(~seen_HTS, -torch.inf).softmax(-1).nan_to_num()
        outs.append(torch.einsum("hts,shd->thd", weights_HTS, v_SHD.repeat_interleave(groups, 1)))
    return torch.cat(outs)


def relative_error(out: Tensor, reference: Tensor) -> float:
    difference = out.cpu().double() - reference
    return float(difference.norm() / reference.norm())
