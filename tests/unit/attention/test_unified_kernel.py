"""Attention over the paged cache equals attention by its definition for any mix, layout and features; memory that was
never written is not read."""

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from attention.kernels.paged.attend import unified_attention
from attention.kernels.paged.call import KernelFeatures
from baton.kvcache.fp8 import dequantize, quantize
from tests.device import DEVICE
from tests.unit.attention.paged import ORDERS
from tests.unit.attention.ragged_batch import FEATURES, SCALE, RaggedBatch, ragged_batch

# A decode, chunks of a prompt, whole prompts, ends of blocks and tiles, padding.
QUERIES, SEQ_LENS = [1, 5, 16, 0, 40], [33, 9, 16, 0, 105]


def paged(batch: RaggedBatch, *, block_size: int, order: str, features: KernelFeatures) -> tuple[Tensor, Tensor]:
    """The cache and its block table. Slots that no query sees are NaN, and a look-up past a request's blocks fails."""
    counts = [-(-len(keys) // block_size) for keys in batch.k]
    axes = ORDERS[order]
    sizes = (2, sum(counts) + 2, block_size, *batch.k[0].shape[1:])
    kept = torch.full([sizes[axis] for axis in axes], math.nan, dtype=torch.float32).to(batch.k[0].dtype)
    kv_layer = kept.permute([axes.index(axis) for axis in range(5)])
    table = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)
    dealt = iter(torch.randperm(sum(counts) + 2).tolist())
    for request, (query_len, k_SKD, v_SKV) in enumerate(zip(batch.query_lens, batch.k, batch.v, strict=True)):
        table[request, : counts[request]] = torch.tensor([next(dealt) for _ in range(counts[request])])
        hidden = 0
        if features.sliding_window is not None:
            hidden = max(0, len(k_SKD) - query_len - features.sliding_window + 1)
        positions = torch.arange(hidden, len(k_SKD))
        blocks, offsets = table[request][positions // block_size].long(), positions % block_size
        kv_layer[0, blocks, offsets] = k_SKD[hidden:]
        kv_layer[1, blocks, offsets] = v_SKV[hidden:]
    return kept.to(DEVICE).permute([axes.index(axis) for axis in range(5)]), table.to(DEVICE)


def attend(
    batch: RaggedBatch,
    features: KernelFeatures,
    *,
    block_size: int = 16,
    order: str = "NHD",
    max_query_len: int | None = None,
    splits: int = 1,
) -> None:
    kv_layer, block_table = paged(batch, block_size=block_size, order=order, features=features)
    attend_cache(batch, kv_layer, block_table, features, max_query_len=max_query_len, splits=splits)


def attend_cache(
    batch: RaggedBatch,
    kv_layer: Tensor,
    block_table: Tensor,
    features: KernelFeatures,
    *,
    q_THD: Tensor | None = None,
    max_query_len: int | None = None,
    splits: int = 1,
) -> None:
    unified_attention(
        batch.queries if q_THD is None else q_THD,
        kv_layer,
        query_start_loc=batch.query_start_loc,
        seq_lens=torch.tensor([len(keys) for keys in batch.k], dtype=torch.int32, device=DEVICE),
        block_table=block_table,
        max_query_len=max_query_len or max(batch.query_lens),
        scale=SCALE,
        causal=features.causal,
        sliding_window=features.sliding_window,
        attention_chunk_size=features.attention_chunk_size,
        logits_soft_cap=features.logits_soft_cap,
        alibi_slopes_H=features.alibi_slopes_H,
        sinks_H=features.sinks_H,
        q_scale=features.q_scale,
        k_scale=features.k_scale,
        v_scale=features.v_scale,
        out=batch.out_THV,
        lse_HT=batch.lse_HT,
        splits=splits,
    )


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_equals_its_definition(name: str) -> None:
    batch = ragged_batch(QUERIES, SEQ_LENS)
    attend(batch, FEATURES[name])
    batch.check(FEATURES[name])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("none", torch.float16),
        ("none", torch.bfloat16),
        ("not causal", torch.bfloat16),
        ("window of 7", torch.bfloat16),
        ("all", torch.bfloat16),
    ],
)
def test_sixteen_bits_are_as_exact_as_they_can_be(name: str, dtype: torch.dtype) -> None:
    batch = ragged_batch(QUERIES, SEQ_LENS, head_size=64, dtype=dtype)
    attend(batch, FEATURES[name])
    batch.check(FEATURES[name])


@pytest.mark.parametrize(
    ("block_size", "order"), [*((16, order) for order in ORDERS), (48, "HND"), (64, "NHD"), (128, "HND")]
)
def test_any_block_size_in_any_layout_is_read(block_size: int, order: str) -> None:
    batch = ragged_batch([40, 1, 9], [100, 48, 128], num_heads=2, num_kv_heads=2, head_size=64, dtype=torch.float16)
    attend(batch, KernelFeatures(), block_size=block_size, order=order)
    batch.check(KernelFeatures())


@pytest.mark.parametrize("max_query_len", [1, 5, 16, 40])
def test_few_queries_share_tiles_with_their_group(max_query_len: int) -> None:
    batch = ragged_batch([max_query_len, 1], [50, 20], num_heads=8, num_kv_heads=2)
    attend(batch, KernelFeatures(), max_query_len=max_query_len)
    batch.check(KernelFeatures())


@pytest.mark.parametrize("quantized_query", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_is_read_with_its_scales(dtype: torch.dtype, quantized_query: bool) -> None:
    scales = [torch.tensor(scale, device=DEVICE) for scale in (0.5, 0.25, 2.0)]
    exact = ragged_batch([17, 1], [40, 33], head_size=32, dtype=torch.float32)
    q_scale, k_scale, v_scale = (scale.cpu() for scale in scales)
    as_stored = RaggedBatch(
        [dequantize(quantize(q, q_scale, dtype), q_scale, q.dtype) if quantized_query else q.half() for q in exact.q],
        [dequantize(quantize(k, k_scale, dtype), k_scale, k.dtype) for k in exact.k],
        [dequantize(quantize(v, v_scale, dtype), v_scale, v.dtype) for v in exact.v],
        exact.out_THV.half(),
        exact.lse_HT,
    )
    features = KernelFeatures(q_scale=scales[0] if quantized_query else None, k_scale=scales[1], v_scale=scales[2])
    kv_layer, block_table = paged(as_stored, block_size=16, order="NHD", features=features)
    stored = torch.stack([quantize(kv_layer[0], scales[1], dtype), quantize(kv_layer[1], scales[2], dtype)])
    q_THD = quantize(as_stored.queries, scales[0], dtype) if quantized_query else as_stored.queries
    attend_cache(as_stored, stored, block_table, features, q_THD=q_THD)
    as_stored.check(KernelFeatures())


@pytest.mark.parametrize("name", ["none", "all"])
def test_a_query_may_be_a_view_and_a_request_padding(name: str) -> None:
    batch = ragged_batch([3, 0, 7, 0], [30, 0, 7, 0])
    kv_layer, block_table = paged(batch, block_size=16, order="NHD", features=FEATURES[name])
    wide = torch.cat([batch.queries, torch.full_like(batch.queries, math.nan)], -1)[..., : batch.queries.shape[-1]]
    attend_cache(batch, kv_layer, block_table, FEATURES[name], q_THD=wide)
    batch.check(FEATURES[name])


def test_requests_after_others_leave_those_alone() -> None:
    """As the prefills of a batch whose first requests are decodes, more of these than a tile has tokens."""
    batch = ragged_batch([1] * 300 + [4, 3], [3] * 300 + [20, 3], head_size=64, dtype=torch.float16)
    kv_layer, block_table = paged(batch, block_size=16, order="NHD", features=KernelFeatures())
    unified_attention(
        batch.queries,
        kv_layer,
        query_start_loc=batch.query_start_loc[300:],
        seq_lens=torch.tensor([20, 3], dtype=torch.int32, device=DEVICE),
        block_table=block_table[300:],
        max_query_len=4,
        scale=SCALE,
        out=batch.out_THV,
        lse_HT=batch.lse_HT,
    )
    assert batch.out_THV[:300].isnan().all()
    later = RaggedBatch(batch.q[300:], batch.k[300:], batch.v[300:], batch.out_THV[300:], batch.lse_HT[:, 300:])
    later.check(KernelFeatures())


@pytest.mark.parametrize("name", ["none", "all"])
def test_queries_of_a_request_of_length_0_get_zeros(name: str) -> None:
    """As the padding of a step that runs as a CUDA graph."""
    batch = ragged_batch([3, 90], [30, 90], head_size=64, dtype=torch.float16)
    kv_layer, block_table = paged(batch, block_size=16, order="NHD", features=FEATURES[name])
    features = {each.name: getattr(FEATURES[name], each.name) for each in fields(FEATURES[name])}
    unified_attention(
        batch.queries,
        kv_layer,
        query_start_loc=batch.query_start_loc,
        seq_lens=torch.tensor([30, 0], dtype=torch.int32, device=DEVICE),
        block_table=block_table,
        max_query_len=90,
        scale=SCALE,
        **features,
        out=batch.out_THV,
    )
    assert not batch.out_THV[3:93].any()
    assert not batch.out_THV[:3].isnan().any()
