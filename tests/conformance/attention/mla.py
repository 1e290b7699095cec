"""One layer of a latent backend over a poisoned cache, and the expected output. Legend as in `attention.mla`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, AttentionNeeds, MLADims
from attention.mla import MLAAttention
from attention.selection import BackendClass
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.conformance.attention.batches import Batch, make_batch, poisoned_cache
from tests.conformance.attention.oracle import attend
from tests.conformance.attention.platform_backends import PLATFORM
from tests.conformance.attention.settings import SETTINGS
from tests.device import DEVICE

LAYERS, LAYER = 2, 1
SCALE = 0.1
TINY = MLADims(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, kv_lora_rank=32)
DEEPSEEK = MLADims(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)


@dataclass(frozen=True)
class MLAShape:
    layout: KVCacheLayout = KVCacheLayout.LBNC
    block_size: int = 64
    dtype: str = "float32"
    num_heads: int = 16 if DEVICE == "cuda" else 3
    dims: MLADims = TINY
    workspace_tokens: int = 64

    @property
    def latent_dim(self) -> int:
        return self.dims.kv_lora_rank + self.dims.qk_rope_head_dim


def needs_of(shape: MLAShape) -> AttentionNeeds:
    return AttentionNeeds(
        kind=KVKind.MLA,
        device=DEVICE,
        dtype=shape.dtype,
        head_size=shape.latent_dim,
        block_size=shape.block_size,
        layout=shape.layout,
        num_heads=shape.num_heads,
        max_num_reqs=16,
        max_model_len=4096,
        mla=shape.dims,
    )


@dataclass(frozen=True)
class MLACase:
    """`latents`: each request's whole latents and rotary keys [S, L + R]; its context's are in the cache already."""

    layer: MLAAttention
    cache: PagedKVCache
    batch: Batch
    shape: MLAShape
    latents: list[Tensor]
    q_THD: Tensor

    def run(self) -> Tensor:
        new_TC = torch.cat(
            [latents[context:] for latents, context in zip(self.latents, self.batch.context_lens, strict=True)]
        )
        rank = self.shape.dims.kv_lora_rank
        metadata = self.layer.backend.builder.build(0, self.batch.common)
        out: Tensor = self.layer(self.q_THD, new_TC[:, :rank], new_TC[:, rank:], self.cache, metadata)
        return out

    def expected(self) -> Tensor:
        dims, rank = self.shape.dims, self.shape.dims.kv_lora_rank
        weight = self.layer.kv_b_proj.weight.double()
        rows = []
        for request, queries, _ in self.batch.requests():
            latents = self.latents[request].double()
            kv = (latents[:, :rank] @ weight.T).view(-1, self.shape.num_heads, dims.qk_nope_head_dim + dims.v_head_dim)
            k_pe = latents[:, None, rank:].expand(-1, self.shape.num_heads, -1)
            k = torch.cat((kv[..., : dims.qk_nope_head_dim], k_pe), dim=-1)
            v = kv[..., dims.qk_nope_head_dim :]
            rows.append(attend(self.q_THD[queries], k, v, scale=SCALE, setting=SETTINGS[0]))
        return torch.cat(rows)


def mla_backend_of(backend: BackendClass, shape: MLAShape) -> AttentionBackend:
    return backend(needs_of(shape), PLATFORM, context_workspace_tokens=shape.workspace_tokens)


def mla_case(backend: AttentionBackend, sizes: list[tuple[int, int]], shape: MLAShape) -> MLACase:
    """The layer's weights are the same for every batch of one shape."""
    torch.manual_seed(0)
    dims, dtype = shape.dims, TORCH_DTYPES[shape.dtype]
    projection = nn.Linear(dims.kv_lora_rank, shape.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), bias=False)
    batch = make_batch(sizes, shape.block_size, DEVICE)
    cache = poisoned_cache(
        KVCacheSpec(KVKind.MLA, LAYERS, 1, shape.latent_dim, shape.dtype),
        KVCacheShape(shape.layout, shape.block_size, batch.num_blocks),
        DEVICE,
    )
    layer = MLAAttention(
        num_heads=shape.num_heads,
        qk_nope_head_dim=dims.qk_nope_head_dim,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        v_head_dim=dims.v_head_dim,
        kv_lora_rank=dims.kv_lora_rank,
        scale=SCALE,
        layer_index=LAYER,
        kv_b_proj=projection.to(DEVICE, dtype).requires_grad_(False),
        backend=backend,
    )
    layer.process_weights_after_loading()
    latents = [torch.randn(length, shape.latent_dim).to(DEVICE, dtype) for length in batch.seq_lens]
    for request, _, context_len in batch.requests():
        blocks, offsets = (tensor.to(DEVICE) for tensor in batch.slots(request, context_len))
        cache.view[LAYER, 0, blocks, offsets, 0] = latents[request][:context_len]
    query_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    q_THD = torch.randn(sum(batch.query_lens), shape.num_heads, query_dim).to(DEVICE, dtype)
    return MLACase(layer, cache, batch, shape, latents, q_THD)
