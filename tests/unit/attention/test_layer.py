"""One attention layer against attention by its definition in float64: the keys that it reads, the cache that it
writes, their dtypes, and refusals.

Legend: T queries, S keys, H query heads, K kv heads, D head size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention.backend import AttentionFeature, AttentionNeeds
from attention.backends.torch_mla import TorchMLA
from attention.backends.torch_sdpa import TorchSDPA
from attention.blocksparse import BlocksparseParams
from attention.layer import Attention
from attention.layer_checks import check_planned, check_shared
from attention.metadata import AttentionMetadata, CommonAttentionMetadata, build_common_metadata
from attention.parameters import AttentionParameters, AttentionType, per_layer_parameters
from attention.platform import Platform
from baton.core.errors import ConfigError, InternalError
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.tokens import WriteIndex

HEADS, KV_HEADS, DIM, BLOCK, SCALE = 4, 2, 8, 4, 0.3
NEEDS = AttentionNeeds(KVKind.GQA, "cpu", "float32", DIM, BLOCK, KVCacheLayout.NHD)
BACKEND = TorchSDPA(NEEDS, Platform("cpu"), context_workspace_tokens=0)


class Recorder(TorchSDPA):
    """Keeps the query that the layer passes on."""

    q_THD: Tensor

    def forward(self, q_THD: Tensor, *args: Any, **kwargs: Any) -> None:
        self.q_THD = q_THD
        super().forward(q_THD, *args, **kwargs)


class WithoutExtras(TorchSDPA):
    """Declares nothing beyond plain attention."""

    capabilities = replace(TorchSDPA.capabilities, name="PLAIN", features=frozenset())


def make_layer(**changes: Any) -> Attention:
    arguments: dict[str, Any] = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "scale": SCALE,
        "layer_index": 0,
        "backend": BACKEND,
    }
    return Attention(**arguments | changes)


def make_cache(dtype: str = "float32", num_layers: int = 3) -> PagedKVCache:
    spec = KVCacheSpec(KVKind.GQA, num_layers, KV_HEADS, DIM, dtype)
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.NHD, BLOCK, 8))
    cache.storage.view(torch.uint8).fill_(0xFF)
    return cache


def one_request(num_tokens: int) -> CommonAttentionMetadata:
    return build_common_metadata(query_lens=[num_tokens], context_lens=[0], block_tables=[[5, 2, 7]], block_size=BLOCK)[
        0
    ]


def plan(common: CommonAttentionMetadata) -> AttentionMetadata:
    return BACKEND.builder.build(0, common)


def random_qkv(num_tokens: int, *, seed: int = 0, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(num_tokens, heads, DIM, generator=generator) * size for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


def oracle(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, causal: bool = True, sinks: Tensor | None = None) -> Tensor:
    k_SHD, v_SHD = (kv.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for kv in (k_SKD, v_SKD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.double(), k_SHD) * SCALE
    if causal:
        scores_HTS = scores_HTS.masked_fill(torch.ones(scores_HTS.shape[1:]).triu(1).bool(), -torch.inf)
    weights_HTS = scores_HTS.exp()
    total_HT = weights_HTS.sum(-1) + (0.0 if sinks is None else sinks.double().exp()[:, None])
    return torch.einsum("hts,shd->thd", weights_HTS / total_HT[..., None], v_SHD)


def close(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


def in_cache(cache: PagedKVCache, layer_index: int, num_tokens: int) -> Tensor:
    """[2, S, K, D] of `one_request`."""
    slots = torch.tensor([5, 2, 7]).repeat_interleave(BLOCK)[:num_tokens], torch.arange(num_tokens) % BLOCK
    return cache.view[layer_index].float()[:, slots[0], slots[1]]


def test_the_new_tokens_are_attended_to_and_kept() -> None:
    cache, (q, k, v) = make_cache(), random_qkv(6)
    close(make_layer()(q, k, v, cache, plan(one_request(6))), oracle(q, k, v))
    assert torch.equal(in_cache(cache, 0, 6), torch.stack((k, v)))


def test_a_callers_output_is_written_and_returned() -> None:
    q, k, v = random_qkv(6)
    out = torch.full((6, HEADS, DIM), torch.nan)
    returned = make_layer()(q, k, v, make_cache(), plan(one_request(6)), out=out)
    assert returned is out
    close(out, oracle(q, k, v))


@pytest.mark.parametrize(
    ("out", "named"),
    [
        (torch.empty(5, HEADS, DIM), "shape"),
        (torch.empty(6, HEADS, DIM, dtype=torch.bfloat16), "dtype"),
        (torch.empty(HEADS, 6, DIM).transpose(0, 1), "contiguous"),
        (torch.empty(6, HEADS, DIM, device="meta"), "device"),
    ],
)
def test_an_output_that_cannot_take_the_result_is_refused_before_anything_is_written(out: Tensor, named: str) -> None:
    q, k, v = random_qkv(6)
    cache = make_cache()
    with pytest.raises(InternalError, match=f"out's .*{named}"):
        make_layer()(q, k, v, cache, plan(one_request(6)), out=out)
    assert cache.view.isnan().all()


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "the caller's memory"])
def test_an_output_scale_gives_the_output_in_e4m3_for_the_layer_that_follows(given: bool) -> None:
    q, k, v = random_qkv(6)
    scale = torch.tensor(0.01)
    out = torch.empty(6, HEADS, DIM, dtype=torch.float8_e4m3fn) if given else None
    returned = make_layer()(q, k, v, make_cache(), plan(one_request(6)), out=out, output_scale=scale)
    assert returned.dtype == torch.float8_e4m3fn
    assert not given or returned is out
    torch.testing.assert_close(returned.double() * 0.01, oracle(q, k, v), rtol=2.0**-4, atol=1e-4)


def test_memory_in_another_dtype_than_e4m3_cannot_take_a_scaled_output() -> None:
    q, k, v = random_qkv(6)
    with pytest.raises(InternalError, match="out's dtype is"):
        make_layer()(q, k, v, make_cache(), plan(one_request(6)), out=torch.empty_like(q), output_scale=torch.ones(()))


def test_a_layer_that_shares_reads_the_other_layers_keys_and_writes_nothing() -> None:
    cache, metadata, (q, k, v) = make_cache(), plan(one_request(6)), random_qkv(6)
    first = make_layer(layer_index=1)
    first(q, k, v, cache, metadata)
    before = cache.view.clone()
    sharing = make_layer(layer_index=2, kv_sharing_target=first)
    other_q, other_k, other_v = random_qkv(6, seed=1)
    close(sharing(other_q, None, None, cache, metadata), oracle(other_q, k, v))
    close(sharing(other_q, other_k, other_v, cache, metadata), oracle(other_q, k, v))
    torch.testing.assert_close(cache.view, before, rtol=0, atol=0, equal_nan=True)


def test_sharing_goes_to_the_layer_that_has_keys_and_to_its_scales() -> None:
    scales = KVScales(k_scale=0.5)
    first = make_layer(scales=scales)
    second = make_layer(layer_index=1, kv_sharing_target=first)
    third = make_layer(layer_index=2, kv_sharing_target=second)
    assert third.kv_layer_index == 0
    assert third.parameters_now.scales is scales
    assert [module for module in third.modules() if isinstance(module, Attention)] == [third]


@pytest.mark.parametrize(
    ("target", "changes", "named"),
    [
        ({"layer_index": 1}, {"layer_index": 1}, "a layer before layer 1"),
        ({"layer_index": 2}, {"layer_index": 1}, "a layer before layer 1"),
        ({"num_kv_heads": 1}, {"layer_index": 1}, "num_kv_heads 2"),
        ({"head_dim": 16}, {"layer_index": 1}, "head_dim 8"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, {"layer_index": 1}, "attn_type decoder"),
        ({}, {"layer_index": 1, "attn_type": AttentionType.ENCODER_ONLY}, "none, for type encoder_only"),
        ({}, {"layer_index": 1, "scales": KVScales()}, "scales of the layer that wrote it"),
    ],
)
def test_a_target_whose_keys_cannot_be_read_is_refused(
    target: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_layer(**changes, kv_sharing_target=make_layer(**target))


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_an_encoder_sees_all_tokens_of_the_call_and_touches_no_cache(attn_type: AttentionType) -> None:
    cache, (q, k, v) = make_cache(), random_qkv(6)
    close(make_layer(attn_type=attn_type)(q, k, v, cache, plan(one_request(6))), oracle(q, k, v, causal=False))
    assert cache.view.isnan().all()


def test_an_encoder_keeps_requests_apart() -> None:
    common, _ = build_common_metadata(query_lens=[1, 4], context_lens=[0, 0], block_tables=[[0], [1]], block_size=BLOCK)
    q, k, v = random_qkv(5)
    out = make_layer(attn_type=AttentionType.ENCODER_ONLY)(q, k, v, make_cache(), plan(common))
    close(out, torch.cat([oracle(q[rows], k[rows], v[rows], causal=False) for rows in (slice(0, 1), slice(1, 5))]))


@pytest.mark.parametrize("num_queries", [1, 2, 9])
def test_cross_attention_writes_the_encoders_keys_once_and_reads_them_in_every_step(num_queries: int) -> None:
    """More queries than keys, too."""
    layer, cache = make_layer(attn_type=AttentionType.ENCODER_DECODER), make_cache()
    _, k, v = random_qkv(7)
    encoder = one_request(7)
    common = replace(
        one_request(num_queries), seq_lens=encoder.seq_lens, seq_lens_cpu=encoder.seq_lens_cpu, causal=False
    )
    metadata = plan(common)
    q = random_qkv(num_queries, seed=1)[0]
    out = layer(q, k, v, cache, replace(metadata, new_tokens=WriteIndex(encoder.slot_mapping, BLOCK)))
    close(out, oracle(q, k, v, causal=False))
    assert torch.equal(in_cache(cache, 0, 7), torch.stack((k, v)))
    next_q = random_qkv(num_queries, seed=2)[0]
    close(layer(next_q, None, None, cache, metadata), oracle(next_q, k, v, causal=False))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_given_scales_make_large_numbers_fit_an_fp8_cache(dtype: str) -> None:
    cache, (q, k, v) = make_cache(dtype), random_qkv(6)
    scales = KVScales(q_scale=0.01, k_scale=2.0, v_scale=3.0)
    big_k, big_v = k * 600, v * 900
    layer = make_layer(scales=scales, backend=WithoutExtras(NEEDS, Platform("cpu"), context_workspace_tokens=0))
    kind, largest = TORCH_DTYPES[dtype], torch.finfo(TORCH_DTYPES[dtype]).max
    # Clamped here, since not every version of torch saturates: 2.11 makes NaN of what e4m3 does not hold.
    scaled = [(values / scale).clamp(-largest, largest) for values, scale in ((big_k, 2.0), (big_v, 3.0))]
    kept = [numbers.to(kind).float() * scale for numbers, scale in zip(scaled, (2.0, 3.0), strict=True)]
    q = q / 600
    out = layer(q, big_k, big_v, cache, plan(one_request(6)))
    close(out, oracle(q, *kept), 1e-3 * float(big_v.abs().max()))
    assert torch.equal(in_cache(cache, 0, 6)[0] * 2.0, kept[0])


def test_scales_are_calculated_from_the_first_batch_and_kept() -> None:
    scales = KVScales(calculate=True)
    layer, cache = make_layer(scales=scales), make_cache("float8_e4m3fn")
    q, k, v = random_qkv(6, size=40.0)
    q = q / 1600
    out = layer(q, k, v, cache, plan(one_request(6)))
    expected = [float(tensor.abs().max()) / wanted for tensor, wanted in ((q, 200.0), (k, 200.0), (v, 100.0))]
    assert [float(scale) for scale in scales.tensors] == pytest.approx(expected)
    close(out, oracle(q, k, v), 0.05 * float(v.abs().max()))
    layer(*random_qkv(6, seed=1), cache, plan(one_request(6)))
    assert [float(scale) for scale in scales.tensors] == pytest.approx(expected)


def test_an_encoder_calculates_no_scales_for_a_cache_that_it_does_not_write() -> None:
    scales = KVScales(calculate=True)
    layer = make_layer(scales=scales, attn_type=AttentionType.ENCODER)
    layer(*random_qkv(6), make_cache("float8_e4m3fn"), plan(one_request(6)))
    assert scales.calculate


def test_padding_counts_for_no_scale() -> None:
    scales = KVScales(calculate=True)
    padded = [nn.functional.pad(tensor, (0, 0, 0, 0, 0, 3), value=torch.nan) for tensor in random_qkv(6)]
    make_layer(scales=scales)(*padded, make_cache("float8_e4m3fn"), plan(one_request(6)))
    assert all(bool(scale.isfinite()) for scale in scales.tensors)


@pytest.mark.parametrize(
    ("cache_dtype", "attn_type", "expected"),
    [
        ("float8_e4m3fn", AttentionType.DECODER, torch.float8_e4m3fn),
        ("float8_e5m2", AttentionType.DECODER, torch.float32),
        ("float32", AttentionType.DECODER, torch.float32),
        ("float8_e4m3fn", AttentionType.ENCODER, torch.float32),
    ],
)
def test_queries_are_quantized_for_a_backend_that_multiplies_in_fp8(
    cache_dtype: str, attn_type: AttentionType, expected: torch.dtype
) -> None:
    backend = Recorder(NEEDS, Platform("cpu"), context_workspace_tokens=0)
    layer = make_layer(backend=backend, scales=KVScales(q_scale=0.02), attn_type=attn_type)
    q, k, v = random_qkv(6)
    out = layer(q, k, v, make_cache(cache_dtype), plan(one_request(6)))
    assert backend.q_THD.dtype == expected
    assert out.dtype == q.dtype
    if expected == torch.float8_e4m3fn:
        torch.testing.assert_close(backend.q_THD.float() * 0.02, q, rtol=0.07, atol=1e-4)


def test_sinks_are_the_models_and_are_read_at_each_call() -> None:
    sinks = nn.Parameter(torch.full((HEADS,), -torch.inf, dtype=torch.bfloat16), requires_grad=False)
    layer, metadata, (q, k, v) = make_layer(sinks=sinks), plan(one_request(6)), random_qkv(6)
    close(layer(q, k, v, make_cache(), metadata), oracle(q, k, v))
    loaded = torch.tensor([-1.0, 0.5, 2.0, 3.0])
    sinks.data.copy_(loaded)
    close(layer(q, k, v, make_cache(), metadata), oracle(q, k, v, sinks=loaded))
    assert not list(layer.parameters())


@pytest.mark.parametrize("slopes", [[0.5, 0.25, 0.125, 0.0], torch.tensor([0.5, 0.25, 0.125, 0.0])], ids=type)
def test_alibi_slopes_are_numbers_or_a_tensor_and_no_weights(slopes: list[float] | Tensor) -> None:
    layer = make_layer(alibi_slopes=slopes)
    torch.testing.assert_close(layer.parameters_now.alibi_slopes_H, torch.tensor([0.5, 0.25, 0.125, 0.0]))
    assert not layer.state_dict()


PATTERN = BlocksparseParams(max_seqlen=64, num_heads=2, num_kv_heads=2, block_size=4, local_blocks=1, vert_stride=2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3; allowed: a divisor of num_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0; allowed: a number above 0"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes is .1,.; allowed: one number for each of the 4 query heads"),
        ({"sinks": torch.zeros(5)}, "sinks is .5,."),
        ({"blocksparse": PATTERN}, "blocksparse is for 2 heads and 2 kv heads"),
        ({"sliding_window": 4, "attn_type": AttentionType.ENCODER_DECODER}, "none, for attention of type encoder_dec"),
        ({"attention_chunk_size": 4, "attn_type": AttentionType.ENCODER}, "none, for attention of type encoder"),
        ({"attention_chunk_size": 4, "attn_type": AttentionType.ENCODER_DECODER}, "attention_chunk_size is 4"),
        ({"backend": TorchMLA(replace(NEEDS, kind=KVKind.MLA), Platform("cpu"), context_workspace_tokens=1)},
         "TORCH_MLA reads caches of kind mla"),
    ],
)  # fmt: skip
def test_an_impossible_layer_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_layer(**changes)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"sliding_window": 4}, AttentionFeature.SLIDING_WINDOW),
        ({"attention_chunk_size": 4}, AttentionFeature.CHUNKED_LOCAL),
        ({"logits_soft_cap": 4.0}, AttentionFeature.SOFT_CAP),
        ({"alibi_slopes": [1.0] * HEADS}, AttentionFeature.ALIBI),
        ({"sinks": torch.zeros(HEADS)}, AttentionFeature.SINKS),
        ({"blocksparse": replace(PATTERN, num_heads=HEADS)}, AttentionFeature.BLOCK_SPARSE),
        ({"attn_type": AttentionType.ENCODER_ONLY}, AttentionFeature.ENCODER),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_feature_that_the_backend_does_not_declare_is_refused(
    changes: dict[str, Any], feature: AttentionFeature
) -> None:
    backend = WithoutExtras(NEEDS, Platform("cpu"), context_workspace_tokens=0)
    with pytest.raises(ConfigError, match=f"PLAIN has no {feature}, which attention layer 0 asks for"):
        make_layer(backend=backend, **changes)


@pytest.mark.parametrize("attn_type", list(AttentionType))
def test_keys_must_come_with_values_and_only_an_encoders_in_the_cache_need_not_come(attn_type: AttentionType) -> None:
    layer, cache, metadata, (q, k, _) = (
        make_layer(attn_type=attn_type),
        make_cache(),
        plan(one_request(6)),
        random_qkv(6),
    )
    for key in (k, None) if attn_type is not AttentionType.ENCODER_DECODER else (k,):
        with pytest.raises(InternalError, match="layer 0 got no keys or no values"):
            layer(q, key, None, cache, metadata)


def test_a_layers_repr_has_its_differences_from_plain_attention() -> None:
    shown = repr(make_layer(sliding_window=4))
    assert "sliding_window=4, backend=TORCH_SDPA" in shown


@pytest.mark.parametrize("attn_type", AttentionType)
def test_a_plan_for_causal_attention_is_for_decoders_alone(attn_type: AttentionType) -> None:
    check_planned(attn_type, causal=False)
    if attn_type is AttentionType.DECODER:
        check_planned(attn_type, causal=True)
        return
    with pytest.raises(InternalError, match=f"a layer of type {attn_type} in a batch that is causal"):
        check_planned(attn_type, causal=True)


@pytest.mark.parametrize("change", [{"scale": 0.2}, {"sliding_window": 8}, {"logits_soft_cap": 30.0}])
def test_a_layer_that_a_common_plan_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    planned = AttentionParameters(scale=0.1, sliding_window=9)
    check_shared(per_layer_parameters(planned), planned)
    with pytest.raises(InternalError, match="the batch is planned for"):
        check_shared(per_layer_parameters(planned), replace(planned, **change))
