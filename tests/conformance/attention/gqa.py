"""One layer of a key/value backend over a poisoned cache, and the expected output. Legend as in `oracle`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, AttentionFeature, AttentionNeeds
from attention.layer import Attention
from attention.parameters import AttentionParameters
from attention.selection import BackendClass
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.conformance.attention.batches import Batch, make_batch, poisoned_cache
from tests.conformance.attention.oracle import attend, pattern_by_definition
from tests.conformance.attention.platform_backends import PLATFORM
from tests.conformance.attention.settings import Setting
from tests.device import DEVICE

LAYERS, LAYER = 2, 1
# Interpreted, a program takes milliseconds; compiled, launching dominates and real sizes cost nothing.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = (8, 2, 128) if DEVICE == "cuda" else (4, 2, 16)
Q_SCALE, K_SCALE, V_SCALE = 0.02, 0.03, 0.04


@dataclass(frozen=True)
class Shape:
    """The sizes that all batches share."""

    layout: KVCacheLayout = KVCacheLayout.NHD
    block_size: int = 16
    dtype: str = "float32"
    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    head_dim: int = HEAD_DIM

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


def needs_of(setting: Setting, shape: Shape) -> AttentionNeeds:
    asked = AttentionParameters(
        scale=shape.scale,
        sliding_window=setting.sliding_window,
        attention_chunk_size=setting.attention_chunk_size,
        logits_soft_cap=setting.logits_soft_cap,
        attn_type=setting.attn_type,
    )
    return AttentionNeeds(
        kind=KVKind.GQA,
        device=DEVICE,
        dtype=shape.dtype,
        head_size=shape.head_dim,
        block_size=shape.block_size,
        layout=shape.layout,
        features=setting.features,
        kv_dtype=setting.kv_dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        max_num_reqs=16,
        max_model_len=4096,
        layers={"layer": asked},
    )


def make_layer(backend: AttentionBackend, setting: Setting, shape: Shape) -> Attention:
    sinks_H = setting.sink_logits(shape.num_heads, DEVICE)
    slopes_H = setting.slopes(shape.num_heads, DEVICE)
    fp8 = bool(setting.kv_dtype)
    return Attention(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        layer_index=LAYER,
        backend=backend,
        sliding_window=setting.sliding_window,
        attention_chunk_size=setting.attention_chunk_size,
        logits_soft_cap=setting.logits_soft_cap,
        alibi_slopes=slopes_H,
        sinks=None if sinks_H is None else nn.Parameter(sinks_H, requires_grad=False),
        attn_type=setting.attn_type,
        blocksparse=setting.pattern(shape.num_heads, shape.num_kv_heads, 4096),
        scales=KVScales(q_scale=Q_SCALE, k_scale=K_SCALE, v_scale=V_SCALE).to(DEVICE) if fp8 else None,
    )


@dataclass(frozen=True)
class GQACase:
    """`k`, `v`: each request's whole keys and values [S, H, C]; those of its context are in the cache already."""

    backend: AttentionBackend
    layer: Attention
    cache: PagedKVCache
    batch: Batch
    setting: Setting
    shape: Shape
    q_THD: Tensor
    k: list[Tensor]
    v: list[Tensor]

    def run(self, *, fast_build: bool = False) -> Tensor:
        metadata = self.backend.builder.build(0, self.batch.common, fast_build=fast_build)
        k_THD, v_THD = self.new_kv()
        out: Tensor = self.layer(self.q_THD, k_THD, v_THD, self.cache, metadata)
        return out

    def new_kv(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values of the call's tokens; none where an encoder's keys are in the cache already."""
        if self.setting.reads_cache and not self.setting.causal:
            return None, None
        contexts = self.batch.context_lens if self.setting.reads_cache else [0] * len(self.k)
        parts = [
            torch.cat([tensor[context:] for tensor, context in zip(tensors, contexts, strict=True)])
            for tensors in (self.k, self.v)
        ]
        return parts[0], parts[1]

    def expected(self) -> Tensor:
        groups = self.shape.num_heads // self.shape.num_kv_heads
        rows = []
        for request, queries, _ in self.batch.requests():
            k_SHD, v_SHD = self._kept(self.k[request], K_SCALE), self._kept(self.v[request], V_SCALE)
            q_QHD = self._multiplied(self.q_THD[queries])
            pattern = pattern_by_definition(self.setting, self.shape.num_heads, q_QHD.shape[0], k_SHD.shape[0])
            rows.append(
                attend(
                    q_QHD,
                    k_SHD.repeat_interleave(groups, dim=1),
                    v_SHD.repeat_interleave(groups, dim=1),
                    scale=self.shape.scale,
                    setting=self.setting,
                    pattern_HQS=None if pattern is None else pattern.to(DEVICE),
                )
            )
        return torch.cat(rows)

    def _multiplied(self, q_QHD: Tensor) -> Tensor:
        """The queries as a backend that multiplies in fp8 gets them."""
        quantized = AttentionFeature.QUANTIZED_QUERY in self.backend.capabilities.features
        if not quantized or not self.setting.reads_cache or self.setting.kv_dtype != "float8_e4m3fn":
            return q_QHD
        return (q_QHD.float() / Q_SCALE).to(torch.float8_e4m3fn).float() * Q_SCALE

    def _kept(self, values: Tensor, scale: float) -> Tensor:
        """Keys or values as an fp8 cache keeps them; an encoder reads its own."""
        if not self.setting.kv_dtype or not self.setting.reads_cache:
            return values
        kind = TORCH_DTYPES[self.setting.kv_dtype]
        return (values.float() / scale).to(kind).float() * scale


def gqa_case(backend: AttentionBackend, sizes: list[tuple[int, int]], setting: Setting, shape: Shape) -> GQACase:
    torch.manual_seed(0)
    if not setting.reads_cache:  # an encoder's requests come whole
        sizes = [(query_len + context_len, 0) for query_len, context_len in sizes]
    batch = make_batch(sizes, shape.block_size, DEVICE)
    batch.common.causal = setting.causal
    spec = KVCacheSpec(KVKind.GQA, LAYERS, shape.num_kv_heads, shape.head_dim, setting.kv_dtype or shape.dtype)
    cache = poisoned_cache(spec, KVCacheShape(shape.layout, shape.block_size, batch.num_blocks), DEVICE)
    dtype = TORCH_DTYPES[shape.dtype]
    k, v = (
        [torch.randn(length, shape.num_kv_heads, shape.head_dim).to(DEVICE, dtype) for length in batch.seq_lens]
        for _ in range(2)
    )
    q_THD = torch.randn(sum(batch.query_lens), shape.num_heads, shape.head_dim).to(DEVICE, dtype)
    case = GQACase(backend, make_layer(backend, setting, shape), cache, batch, setting, shape, q_THD, k, v)
    if setting.reads_cache:
        _write_context(case)
    return case


def _write_context(case: GQACase) -> None:
    """Fills the cache by plain indexing, without code under test."""
    fp8 = bool(case.setting.kv_dtype)
    raw = case.cache.view.view(torch.uint8) if fp8 else case.cache.view
    for request, _, context_len in case.batch.requests():
        stop = context_len if case.setting.causal else case.batch.seq_lens[request]
        blocks, offsets = case.batch.slots(request, stop)
        for which, (values, scale) in enumerate(((case.k[request], K_SCALE), (case.v[request], V_SCALE))):
            kept = values[:stop]
            if fp8:
                kept = (kept.float() / scale).to(TORCH_DTYPES[case.setting.kv_dtype]).view(torch.uint8)
            raw[LAYER, which, blocks.to(DEVICE), offsets.to(DEVICE)] = kept


def backend_of(backend: BackendClass, setting: Setting, shape: Shape) -> AttentionBackend:
    return backend(needs_of(setting, shape), PLATFORM, context_workspace_tokens=256)
