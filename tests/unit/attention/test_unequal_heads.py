"""A layer with fewer and smaller kv heads than the cache has places for: it attends as over a cache of its own shape,
and stores each head in all places that are the head's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionBackend, AttentionNeeds
from attention.backends.torch_sdpa import TorchSDPA
from attention.backends.triton_attn import TritonAttention
from attention.layer import Attention
from attention.metadata import build_common_metadata
from attention.platform import probe_platform
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.device import DEVICE

HEADS, PLACES, LARGEST, BLOCK = 4, 4, 32, 4
TABLE = [5, 2, 7]


def backend_of(name: str, layout: KVCacheLayout, device: str) -> AttentionBackend:
    needs = AttentionNeeds(
        KVKind.GQA, device, "float32", LARGEST, BLOCK, layout, num_heads=HEADS, num_kv_heads=PLACES, max_num_reqs=4
    )
    kind: Any = {"TORCH_SDPA": TorchSDPA, "TRITON_ATTN": TritonAttention}[name]
    backend: AttentionBackend = kind(needs, probe_platform(device), context_workspace_tokens=0)
    return backend


def attended(
    backend: AttentionBackend, layout: KVCacheLayout, device: str, *, kv_heads: int, head_dim: int, own_shape: bool
) -> tuple[Tensor, Tensor]:
    """(outputs of a prompt, of a piece after it and of one more token; the tokens in the cache [2, S, H, C])"""
    heads = (kv_heads, head_dim) if own_shape else (PLACES, LARGEST)
    cache = PagedKVCache(KVCacheSpec(KVKind.GQA, 1, *heads, "float32"), KVCacheShape(layout, BLOCK, 8), device)
    cache.storage.fill_(torch.nan)
    layer = Attention(
        num_heads=HEADS, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.3, layer_index=0, backend=backend
    )
    generator, outputs, start = torch.Generator().manual_seed(0), [], 0
    for length in (5, 3, 1):
        common, _ = build_common_metadata(
            query_lens=[length], context_lens=[start], block_tables=[TABLE], block_size=BLOCK, device=device
        )
        q, k, v = (
            torch.randn(length, count, head_dim, generator=generator).to(device)
            for count in (HEADS, kv_heads, kv_heads)
        )
        outputs.append(layer(q, k, v, cache, backend.builder.build(0, common)))
        start += length
    blocks = torch.tensor(TABLE).repeat_interleave(BLOCK)[:start]
    return torch.cat(outputs), cache.view[0][:, blocks, torch.arange(start) % BLOCK]


@pytest.mark.parametrize(
    ("name", "layout", "device"),
    [("TORCH_SDPA", KVCacheLayout.NHD, "cpu"), ("TRITON_ATTN", KVCacheLayout.HND, DEVICE)],
    ids=["TORCH_SDPA-NHD", "TRITON_ATTN-HND"],
)
def test_smaller_layers_attend_as_in_a_cache_of_their_own(name: str, layout: KVCacheLayout, device: str) -> None:
    backend = backend_of(name, layout, device)
    for kv_heads, head_dim in ((2, 32), (1, 16)):
        expected, own = attended(backend, layout, device, kv_heads=kv_heads, head_dim=head_dim, own_shape=True)
        actual, stored = attended(backend, layout, device, kv_heads=kv_heads, head_dim=head_dim, own_shape=False)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(stored[..., :head_dim], own.repeat_interleave(PLACES // kv_heads, dim=2))
        assert stored[..., head_dim:].isnan().all()
