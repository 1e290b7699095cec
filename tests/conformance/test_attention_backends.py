"""Every backend for key/value caches, in every layout it reads, against attention written out plainly in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, AttentionFeature, AttentionNeeds
from attention.cache import TORCH_DTYPES, PagedKVCache
from attention.layer import Attention
from attention.layout import GQA_LAYOUTS, KVCacheLayout
from attention.parameters import AttentionParameters
from attention.selection import select_backend
from attention.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.conformance.attention_batches import (
    BATCHES,
    LAYER,
    LAYERS,
    TOLERANCE,
    Batch,
    backends_of,
    make_batch,
    new_cache,
    oracle,
)

GQA_BACKENDS = backends_of(KVKind.GQA)


@dataclass(frozen=True)
class GQACase:
    backend: AttentionBackend
    cache: PagedKVCache
    batch: Batch
    num_heads: int
    k: list[Tensor]
    v: list[Tensor]
    q_THD: Tensor

    def run(self, *, sliding_window: int | None = None, padding: int = 0) -> Tensor:
        """Runs the layer on the new tokens, behind which `padding` rows of NaN follow."""
        layer = Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.cache.spec.num_kv_heads,
            head_dim=self.cache.spec.head_dim,
            scale=0.3,
            layer_index=LAYER,
            backend=self.backend,
            sliding_window=sliding_window,
        )
        new = [slice(context_len, None) for context_len in self.batch.context_lens]
        k_THD = torch.cat([k[rows] for k, rows in zip(self.k, new, strict=True)])
        v_THD = torch.cat([v[rows] for v, rows in zip(self.v, new, strict=True)])
        pad = (0, 0, 0, 0, 0, padding)
        tensors = (nn.functional.pad(tensor, pad, value=torch.nan) for tensor in (self.q_THD, k_THD, v_THD))
        out: Tensor = layer(*tensors, self.cache, self.backend.builder.build(0, self.batch.common))
        return out[: self.q_THD.shape[0]]

    def expected(self, sliding_window: int | None = None) -> Tensor:
        groups = self.num_heads // self.cache.spec.num_kv_heads
        rows = []
        for request, queries, context_len in self.batch.requests():
            k, v = (kv[request].repeat_interleave(groups, dim=1) for kv in (self.k, self.v))
            for position, q_HD in enumerate(self.q_THD[queries], start=context_len):
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                rows.append(oracle(q_HD, k[first : position + 1], v[first : position + 1], 0.3))
        return torch.stack(rows)


def gqa_case(
    name: str,
    sizes: list[tuple[int, int]],
    *,
    layout: KVCacheLayout = KVCacheLayout.NHD,
    block_size: int = 4,
    dtype: str = "float32",
    heads: tuple[int, int] = (4, 2),
    features: frozenset[AttentionFeature] = frozenset(),
) -> GQACase:
    torch.manual_seed(0)
    batch, num_blocks = make_batch(sizes, block_size)
    spec = KVCacheSpec(KVKind.GQA, LAYERS, heads[1], 8, dtype)
    cache = new_cache(spec, KVCacheShape(layout, block_size, num_blocks))
    needs = AttentionNeeds(KVKind.GQA, "cpu", dtype, 8, block_size, layout, features)
    backend = select_backend(needs, forced=name)
    kind = TORCH_DTYPES[dtype]
    lens = [sum(size) for size in sizes]
    k, v = ([torch.randn(length, heads[1], 8).to(kind) for length in lens] for _ in range(2))
    for request, _, context_len in batch.requests():
        slots = batch.slots(request, block_size, start=0, stop=context_len)
        for which, kv in enumerate((k, v)):
            cache.view[LAYER, which, slots // block_size, slots % block_size] = kv[request][:context_len]
    q_THD = torch.randn(sum(batch.query_lens), heads[0], 8).to(kind)
    return GQACase(backend, cache, batch, heads[0], k, v, q_THD)


@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_gqa_matches_the_oracle_in_every_layout(name: str, layout: KVCacheLayout, sizes: list[tuple[int, int]]) -> None:
    case = gqa_case(name, sizes, layout=layout)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 128])
@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_gqa_matches_the_oracle_at_every_block_size(name: str, block_size: int) -> None:
    case = gqa_case(name, BATCHES["decodes and prefills"], block_size=block_size, layout=KVCacheLayout.HND)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 1), (6, 2)], ids=["one", "MHA", "MQA", "GQA"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_gqa_matches_the_oracle_for_heads_and_dtypes(name: str, dtype: str, heads: tuple[int, int]) -> None:
    case = gqa_case(name, BATCHES["decodes and prefills"], dtype=dtype, heads=heads, layout=KVCacheLayout.BLHNC)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("window", [1, 2, 4, 7, 300])
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_a_token_sees_itself_and_the_window_minus_one_before_it(
    name: str, sizes: list[tuple[int, int]], window: int
) -> None:
    case = gqa_case(name, sizes, features=frozenset({AttentionFeature.SLIDING_WINDOW}))
    for request, _, context_len in case.batch.requests():
        out_of_sight = case.batch.slots(request, 4, start=0, stop=max(0, context_len - window + 1))
        case.cache.view[LAYER, :, out_of_sight // 4, out_of_sight % 4] = torch.nan
    torch.testing.assert_close(case.run(sliding_window=window).double(), case.expected(window), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_layers_with_and_without_a_window_share_a_plan(name: str) -> None:
    case = gqa_case(name, BATCHES["decodes and prefills"])
    metadata = case.backend.builder.build(0, case.batch.common)
    case.run()
    for window in (None, 3, None):
        out = torch.empty_like(case.q_THD)
        layer = AttentionParameters(scale=0.3, sliding_window=window)
        case.backend.forward(case.q_THD, None, None, case.cache.layer(LAYER), metadata, layer=layer, out=out)
        torch.testing.assert_close(out.double(), case.expected(window), atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_gqa_writes_the_new_tokens_slots_and_no_other(name: str, layout: KVCacheLayout) -> None:
    case = gqa_case(name, BATCHES["decodes and prefills"], layout=layout)
    before = case.cache.view.clone()
    case.run()
    for request, _, context_len in case.batch.requests():
        stop = context_len + case.batch.query_lens[request]
        slots = case.batch.slots(request, 4, start=context_len, stop=stop)
        for which, kv in enumerate((case.k, case.v)):
            before[LAYER, which, slots // 4, slots % 4] = kv[request][context_len:]
    torch.testing.assert_close(case.cache.view, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_padding_is_neither_written_nor_attended(name: str) -> None:
    case = gqa_case(name, BATCHES["decodes and prefills"])
    common = case.batch.common
    common.slot_mapping = torch.cat((common.slot_mapping, torch.zeros(3, dtype=torch.int64)))
    common.__post_init__()
    blocks_used = {block for blocks in case.batch.block_tables for block in blocks}
    torch.testing.assert_close(case.run(padding=3).double(), case.expected(), atol=2e-5, rtol=0)
    unused = [block for block in range(case.cache.shape.num_blocks) if block not in blocks_used]
    assert case.cache.view[:, :, unused].isnan().all()


@pytest.mark.parametrize("name", GQA_BACKENDS)
def test_queries_may_be_a_slice_of_a_wider_tensor(name: str) -> None:
    case = gqa_case(name, BATCHES["decodes and prefills"])
    contiguous = case.run()
    wide = torch.cat((case.q_THD, case.q_THD), dim=1)[:, : case.num_heads]
    sliced = GQACase(case.backend, case.cache, case.batch, case.num_heads, case.k, case.v, wide).run()
    assert torch.equal(contiguous, sliced)
