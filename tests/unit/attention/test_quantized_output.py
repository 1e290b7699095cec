"""A layer whose attention quantizes its output for the fp8 layer that reads it: the bits of two steps, and only for
batches of decodes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionNeeds
from attention.backends.torch_sdpa import TorchSDPA
from attention.backends.triton_attn import TritonAttention
from attention.layer import Attention
from attention.metadata import AttentionMetadata, PaddedBatch, build_common_metadata
from attention.platform import Platform
from attention.quantized_output import QuantizedOutput
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.models.formats.fp8 import quantize_blocks
from tests.device import DEVICE

HEADS, KV_HEADS, BLOCK = 4, 2, 16
DECODES = [(1, 40), (1, 3)]


def needs_of(head_size: int, **options: Any) -> AttentionNeeds:
    return AttentionNeeds(
        KVKind.GQA, DEVICE, "bfloat16", head_size, BLOCK, KVCacheLayout.HND,
        num_heads=HEADS, num_kv_heads=KV_HEADS, max_num_reqs=4, **options,
    )  # fmt: skip


def layer_of(head_size: int = 128, kind: Any = TritonAttention, **options: Any) -> Attention:
    backend = kind(needs_of(head_size, **options), Platform(DEVICE, num_sms=4), context_workspace_tokens=0)
    return Attention(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_size, scale=0.1, layer_index=0, backend=backend
    )


def planned(layer: Attention, sizes: list[tuple[int, int]]) -> AttentionMetadata:
    common, _ = build_common_metadata(
        query_lens=[new for new, _ in sizes],
        context_lens=[computed for _, computed in sizes],
        block_tables=[[0, 1, 2], [3]],
        block_size=BLOCK,
        device=DEVICE,
    )
    return layer.backend.builder.build(0, common)


def filled_cache() -> PagedKVCache:
    spec = KVCacheSpec(KVKind.GQA, 1, KV_HEADS, 128, "bfloat16")
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.HND, BLOCK, 4), DEVICE)
    cache.layer(0).copy_(torch.randn(cache.layer(0).shape, generator=torch.Generator().manual_seed(0)))
    return cache


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_output_has_the_bits_of_one_that_is_quantized_afterwards(*, power_of_two: bool) -> None:
    layer, angles_TP = layer_of(), torch.rand(2, 64, device=DEVICE)
    metadata, rotation = planned(layer, DECODES), Rotation(angles_TP.cos(), angles_TP.sin(), interleaved=False)
    qkv_TX = torch.randn(2, (HEADS + 2 * KV_HEADS) * 128, device=DEVICE, dtype=torch.bfloat16)
    plain_THD = layer.rotate_and_attend(qkv_TX.clone(), rotation, filled_cache(), metadata)
    stored_THD = torch.empty_like(plain_THD, dtype=torch.float8_e4m3fn)
    out = QuantizedOutput(stored_THD, torch.empty(HEADS, 2, device=DEVICE), power_of_two, torch.bfloat16)
    assert layer.quantizes(metadata, 2)
    assert layer.rotate_and_attend(qkv_TX, rotation, filled_cache(), metadata, out=out) is stored_THD
    expected_TK, expected_TC = quantize_blocks(plain_THD.flatten(1), power_of_two=power_of_two)
    assert torch.equal(bits(stored_THD.flatten(1)), bits(expected_TK))
    assert torch.equal(out.scale_CT.T, expected_TC)


def bits(stored: Tensor) -> Tensor:
    return stored.view(torch.uint8)


def test_batches_with_prompts_are_not_quantized() -> None:
    layer = layer_of()
    assert not layer.quantizes(planned(layer, [(1, 40), (2, 3)]), 3)


def test_captured_steps_with_prompts_are_not_quantized() -> None:
    layer, numbers = layer_of(), torch.ones(4, dtype=torch.int32, device=DEVICE)
    table, slots = numbers[:, None].expand(4, 3), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    starts = torch.tensor([0, 4, 4], dtype=torch.int32, device=DEVICE)
    # As many rows of decodes as tokens: none of them need be a decode.
    batch = PaddedBatch(numbers, table, starts, numbers[:2], table[:2], 4, slots)
    assert not layer.quantizes(layer.backend.builder.build_padded(batch), 4)


@pytest.mark.parametrize("options", [{"head_size": 64}, {"batch_invariant": True}, {"kind": TorchSDPA}])
def test_layers_without_such_a_kernel_quantize_nothing(options: dict[str, Any]) -> None:
    layer = layer_of(**options)
    assert not layer.quantizes(planned(layer, DECODES), 2)
