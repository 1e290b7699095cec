"""Batches of decodes and prefills over a poisoned cache, whose requests may share their first blocks, as a backend gets
them below the layer: everything new is in the cache already. Legend: T tokens, S keys, H heads, D channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.backend import AttentionBackend, AttentionNeeds
from attention.backends.triton_attn import TritonAttention
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, build_common_metadata
from attention.parameters import AttentionParameters
from attention.platform import Platform
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.conformance.attention.batches import poisoned_cache
from tests.conformance.attention.oracle import attend
from tests.conformance.attention.settings import Setting
from tests.device import DEVICE

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 4, 2, 16
SCALE, K_SCALE, V_SCALE = 0.3, 0.5, 0.25


@dataclass(frozen=True)
class PagedBatch:
    """`k` and `v`: each request's keys and values [S, H, D] as the cache holds them, times its scales."""

    setting: Setting
    common: CommonAttentionMetadata
    kv_layer: Tensor
    q_THD: Tensor
    k: list[Tensor]
    v: list[Tensor]

    @property
    def layer(self) -> AttentionParameters:
        setting = self.setting
        return AttentionParameters(
            scale=SCALE,
            sliding_window=setting.sliding_window,
            attention_chunk_size=setting.attention_chunk_size,
            logits_soft_cap=setting.logits_soft_cap,
            attn_type=setting.attn_type,
            alibi_slopes_H=setting.slopes(NUM_HEADS, DEVICE),
            sinks_H=setting.sink_logits(NUM_HEADS, DEVICE),
            scales=KVScales(k_scale=K_SCALE, v_scale=V_SCALE).to(DEVICE) if setting.kv_dtype else None,
        )

    def new_kv(self) -> tuple[Tensor, Tensor]:
        """The batch's own keys and values."""
        lens = self.common.query_start_loc_cpu.diff().tolist()
        k, v = (torch.cat([kv[-n:] for kv, n in zip(kvs, lens, strict=True)]) for kvs in (self.k, self.v))
        return k.to(self.q_THD.dtype), v.to(self.q_THD.dtype)

    def run(self, backend: AttentionBackend, metadata: AttentionMetadata, *, own_kv: bool = True) -> Tensor:
        out = torch.full_like(self.q_THD, torch.nan)
        k_THD, v_THD = self.new_kv() if own_kv else (None, None)
        backend.forward(self.q_THD, k_THD, v_THD, self.kv_layer, metadata, layer=self.layer, out=out)
        return out

    def expected(self) -> Tensor:
        """float64."""
        starts = self.common.query_start_loc_cpu.tolist()
        group = NUM_HEADS // NUM_KV_HEADS
        return torch.cat(
            [
                attend(
                    self.q_THD[start:stop],
                    k.repeat_interleave(group, dim=1),
                    v.repeat_interleave(group, dim=1),
                    scale=SCALE,
                    setting=self.setting,
                )
                for start, stop, k, v in zip(starts, starts[1:], self.k, self.v, strict=False)
            ]
        )


def paged_batch(
    sizes: list[tuple[int, int]], setting: Setting, *, dtype: str = "float32", prefix_blocks: int = 0
) -> PagedBatch:
    """A batch of (new tokens, context); the first `prefix_blocks` blocks of each context are the same ones."""
    torch.manual_seed(0)
    counts = [-(-sum(size) // BLOCK_SIZE) for size in sizes]
    dealt = iter(torch.randperm(sum(counts) + 3).tolist())
    prefix = [next(dealt) for _ in range(prefix_blocks)]
    tables = [prefix + [next(dealt) for _ in range(count - prefix_blocks)] for count in counts]
    spec = KVCacheSpec(KVKind.GQA, 1, NUM_KV_HEADS, HEAD_SIZE, setting.kv_dtype or dtype)
    shape = KVCacheShape(KVCacheLayout.HND, BLOCK_SIZE, sum(counts) + 3)
    kv_layer = poisoned_cache(spec, shape, DEVICE).layer(0)
    scales = (K_SCALE, V_SCALE) if setting.kv_dtype else (1.0, 1.0)
    kept_type = TORCH_DTYPES[spec.dtype]
    written = torch.randn(2, shape.num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE).to(DEVICE, kept_type)
    kvs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for table, size in zip(tables, sizes, strict=True):
        positions = torch.arange(sum(size))
        blocks, offsets = torch.tensor(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        raw = written.view(torch.uint8).reshape(*written.shape[:-1], -1)[:, blocks, offsets]
        kv_layer.view(torch.uint8)[:, blocks, offsets] = raw
        rows = written.float()[:, blocks, offsets]
        for which, scale in enumerate(scales):
            kvs[which].append(rows[which] * scale)
    common, _ = build_common_metadata(
        query_lens=[size[0] for size in sizes],
        context_lens=[size[1] for size in sizes],
        block_tables=tables,
        block_size=BLOCK_SIZE,
        device=DEVICE,
    )
    common.causal = setting.causal
    q_THD = torch.randn(sum(size[0] for size in sizes), NUM_HEADS, HEAD_SIZE).to(DEVICE, TORCH_DTYPES[dtype])
    return PagedBatch(setting, common, kv_layer, q_THD, *kvs)


def needs_of(setting: Setting, *, dtype: str = "float32") -> AttentionNeeds:
    return AttentionNeeds(
        kind=KVKind.GQA,
        device=DEVICE,
        dtype=dtype,
        head_size=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        layout=KVCacheLayout.HND,
        features=setting.features,
        kv_dtype=setting.kv_dtype,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        max_num_reqs=32,
    )


def triton_backend(setting: Setting, *, dtype: str = "float32", num_sms: int = 4) -> TritonAttention:
    return TritonAttention(
        needs_of(setting, dtype=dtype), Platform(DEVICE, num_sms=num_sms), context_workspace_tokens=0
    )


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Relative error of norms; NaN counts as infinite."""
    error = torch.linalg.vector_norm(out.double() - expected) / torch.linalg.vector_norm(expected)
    return float(error.nan_to_num(nan=torch.inf))
