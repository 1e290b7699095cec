"""Every backend for latent caches, in every layout it reads, against attention written out plainly in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from attention.backend import AttentionNeeds
from attention.cache import TORCH_DTYPES, PagedKVCache
from attention.layout import MLA_LAYOUTS, KVCacheLayout
from attention.mla import MLAAttention
from attention.selection import select_backend
from attention.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.errors import ConfigError
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

MLA_BACKENDS = backends_of(KVKind.MLA)
NOPE, ROPE, VALUE, RANK, MLA_HEADS = 6, 4, 5, 12, 3


@dataclass(frozen=True)
class MLACase:
    layer: MLAAttention
    cache: PagedKVCache
    batch: Batch
    latents: list[Tensor]
    q_THD: Tensor

    def run(self) -> Tensor:
        new = [latents[context:] for latents, context in zip(self.latents, self.batch.context_lens, strict=True)]
        new_TC = torch.cat(new)
        kv_c_TL, k_pe_TR = new_TC[:, :RANK], new_TC[:, RANK:]
        out: Tensor = self.layer(
            self.q_THD, kv_c_TL, k_pe_TR, self.cache, self.layer.backend.builder.build(0, self.batch.common)
        )
        return out

    def expected(self) -> Tensor:
        weight = self.layer.kv_b_proj.weight.double()
        rows = []
        for request, queries, context_len in self.batch.requests():
            latents = self.latents[request].double()
            kv = (latents[:, :RANK] @ weight.T).view(-1, MLA_HEADS, NOPE + VALUE)
            k_pe = latents[:, None, RANK:].expand(-1, MLA_HEADS, -1)
            k, v = torch.cat((kv[..., :NOPE], k_pe), dim=-1), kv[..., NOPE:]
            for position, q_HD in enumerate(self.q_THD[queries], start=context_len):
                rows.append(oracle(q_HD, k[: position + 1], v[: position + 1], 0.4))
        return torch.stack(rows)


def mla_case(
    name: str,
    sizes: list[tuple[int, int]],
    *,
    layout: KVCacheLayout = KVCacheLayout.LBNC,
    block_size: int = 4,
    dtype: str = "float32",
    workspace: int = 8,
) -> MLACase:
    torch.manual_seed(0)
    batch, num_blocks = make_batch(sizes, block_size)
    spec = KVCacheSpec(KVKind.MLA, LAYERS, 1, RANK + ROPE, dtype)
    cache = new_cache(spec, KVCacheShape(layout, block_size, num_blocks))
    needs = AttentionNeeds(KVKind.MLA, "cpu", dtype, RANK + ROPE, block_size, layout)
    kind = TORCH_DTYPES[dtype]
    layer = MLAAttention(
        num_heads=MLA_HEADS,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        kv_lora_rank=RANK,
        scale=0.4,
        layer_index=LAYER,
        kv_b_proj=nn.Linear(RANK, MLA_HEADS * (NOPE + VALUE), bias=False).to(kind).requires_grad_(False),
        backend=select_backend(needs, forced=name, context_workspace_tokens=workspace),
    )
    layer.process_weights_after_loading()
    latents = [torch.randn(sum(size), RANK + ROPE).to(kind) for size in sizes]
    for request, _, context_len in batch.requests():
        slots = batch.slots(request, block_size, start=0, stop=context_len)
        cache.view[LAYER, 0, slots // block_size, slots % block_size, 0] = latents[request][:context_len]
    q_THD = torch.randn(sum(batch.query_lens), MLA_HEADS, NOPE + ROPE).to(kind)
    return MLACase(layer, cache, batch, latents, q_THD)


@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("name", MLA_BACKENDS)
def test_mla_matches_the_oracle_in_every_layout(name: str, layout: KVCacheLayout, sizes: list[tuple[int, int]]) -> None:
    case = mla_case(name, sizes, layout=layout)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_size", [1, 3, 8, 128])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MLA_BACKENDS)
def test_mla_matches_the_oracle_for_block_sizes_and_dtypes(name: str, dtype: str, block_size: int) -> None:
    case = mla_case(name, BATCHES["decodes and prefills"], dtype=dtype, block_size=block_size)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("workspace", [1, 5, 64, 1000])
@pytest.mark.parametrize("name", MLA_BACKENDS)
def test_context_longer_than_several_workspaces_is_merged_exactly(name: str, workspace: int) -> None:
    case = mla_case(name, [(1, 130), (3, 129), (2, 0), (40, 7), (2, 70)], workspace=workspace)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MLA_BACKENDS)
def test_absorbed_decode_and_decompressed_prefill_agree(name: str) -> None:
    prefill = mla_case(name, [(2, 50)])
    decode = mla_case(name, [(1, 51)])
    decode.cache.storage.copy_(prefill.cache.storage)
    by_prefill = prefill.run()[1]
    decode.cache.storage.copy_(prefill.cache.storage)
    case = MLACase(decode.layer, decode.cache, decode.batch, prefill.latents, prefill.q_THD[1:])
    case.batch.block_tables[0][:] = prefill.batch.block_tables[0]
    case.batch.common.block_table_tensor.copy_(prefill.batch.common.block_table_tensor)
    case.batch.common.slot_mapping.copy_(prefill.batch.common.slot_mapping[1:])
    case.layer.kv_b_proj.load_state_dict(prefill.layer.kv_b_proj.state_dict())
    torch.testing.assert_close(case.run()[0], by_prefill, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("name", MLA_BACKENDS)
def test_mla_writes_the_new_tokens_slots_and_no_other(name: str, layout: KVCacheLayout) -> None:
    case = mla_case(name, BATCHES["decodes and prefills"], layout=layout)
    before = case.cache.view.clone()
    case.run()
    for request, _, context_len in case.batch.requests():
        stop = context_len + case.batch.query_lens[request]
        slots = case.batch.slots(request, 4, start=context_len, stop=stop)
        before[LAYER, 0, slots // 4, slots % 4, 0] = case.latents[request][context_len:]
    torch.testing.assert_close(case.cache.view, before, rtol=0, atol=0, equal_nan=True)


def test_an_mla_layer_refuses_a_backend_for_another_kind_of_cache() -> None:
    needs = AttentionNeeds(KVKind.GQA, "cpu", "float32", 8, 4, KVCacheLayout.NHD)
    with pytest.raises(ConfigError, match="TORCH_SDPA reads caches of kind gqa"):
        MLAAttention(
            num_heads=1,
            qk_nope_head_dim=1,
            qk_rope_head_dim=1,
            v_head_dim=1,
            kv_lora_rank=1,
            scale=1.0,
            layer_index=0,
            kv_b_proj=nn.Linear(1, 2),
            backend=select_backend(needs),
        )
