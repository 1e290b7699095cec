"""Tokens keep their bytes from any cache over the wire into any other, and nothing else moves."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.errors import InternalError
from baton.kvcache.access import gather_tokens, store_kv, store_latent
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.tokens import TokenIndex, WriteIndex
from baton.kvcache.wire.digest import digest
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire

GQA = KVCacheSpec(KVKind.GQA, 3, 4, 2, "bfloat16")
MLA = KVCacheSpec(KVKind.MLA, 3, 1, 6, "bfloat16")
TOKENS = 53
SENTINEL = 0xA5

# Whole, inside one block, off every edge, on edges of 8 and 16, the last token alone.
TOKEN_RANGES = [(0, 53), (1, 3), (7, 42), (16, 48), (8, 16), (52, 53)]


def new_cache(spec: KVCacheSpec, layout: KVCacheLayout, block_size: int) -> tuple[PagedKVCache, Tensor]:
    """A cache full of sentinels, with shuffled blocks for one request of TOKENS tokens and some blocks more."""
    count = -(-TOKENS // block_size)
    cache = PagedKVCache(spec, KVCacheShape(layout, block_size, count + 3))
    cache.storage.view(-1).view(torch.uint8).fill_(SENTINEL)
    return cache, torch.randperm(count + 3)[:count]


def tokens_of(cache: PagedKVCache, block_ids: Tensor) -> Tensor:
    """A request's tokens, [layer, k/v, token, head, channel] as 16-bit numbers; a copy."""
    return cache.view[:, :, block_ids].flatten(2, 3)[:, :, :TOKENS].view(torch.int16)


def plant(cache: PagedKVCache, block_ids: Tensor) -> Tensor:
    """Gives every element of the request's tokens a distinct number and returns them in logical order."""
    spec = cache.spec
    shape = (spec.num_layers, spec.kv_factor, TOKENS, spec.num_kv_heads, spec.head_dim)
    planted = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    positions = torch.arange(TOKENS)
    blocks, offsets = block_ids[positions // cache.shape.block_size], positions % cache.shape.block_size
    cache.view.view(torch.int16)[:, :, blocks, offsets] = planted
    return planted


def wire_buffer(elements: Tensor, *, offset: int = 0) -> Tensor:
    """Room for exactly these elements, starting `offset` bytes into its memory."""
    return torch.zeros(offset + 2 * elements.numel(), dtype=torch.uint8)[offset:]


def each_pair(layouts: tuple[KVCacheLayout, ...]) -> list[tuple[KVCacheLayout, int, KVCacheLayout, int]]:
    return list(product(layouts, (1, 8, 16), layouts, (5, 8, 16)))


@pytest.mark.parametrize(
    ("spec", "layout", "block_size", "other_layout", "other_block_size"),
    [(GQA, *pair) for pair in each_pair(GQA_LAYOUTS)] + [(MLA, *pair) for pair in each_pair(MLA_LAYOUTS)],
)
def test_tokens_keep_their_bytes_between_any_two_caches(
    spec: KVCacheSpec,
    layout: KVCacheLayout,
    block_size: int,
    other_layout: KVCacheLayout,
    other_block_size: int,
) -> None:
    torch.manual_seed(0)
    source, source_blocks = new_cache(spec, layout, block_size)
    planted = plant(source, source_blocks)
    for start, stop in TOKEN_RANGES:
        target, target_blocks = new_cache(spec, other_layout, other_block_size)
        before = target.view.clone().view(torch.int16)
        wire = wire_buffer(planted[:, :, start:stop])
        whole: dict[str, Any] = {
            "token_start": start,
            "token_stop": stop,
            "layers": range(3),
            "heads": range(spec.num_kv_heads),
        }
        gather_to_wire(source, block_ids=source_blocks, out=wire, **whole)
        assert torch.equal(wire.view(torch.int16), planted[:, :, start:stop].flatten())
        scatter_from_wire(target, block_ids=target_blocks, payload=wire, **whole)
        assert torch.equal(tokens_of(target, target_blocks)[:, :, start:stop], planted[:, :, start:stop])
        positions = torch.arange(start, stop)
        blocks, offsets = target_blocks[positions // other_block_size], positions % other_block_size
        before[:, :, blocks, offsets] = planted[:, :, start:stop]
        assert torch.equal(target.view.view(torch.int16), before)


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("heads", [range(1), range(1, 3), range(1, 4), range(3, 4)], ids=str)
@pytest.mark.parametrize("layers", [range(1), range(1, 3)], ids=str)
def test_layers_and_heads_are_ranges_too(layout: KVCacheLayout, heads: range, layers: range) -> None:
    torch.manual_seed(0)
    source, source_blocks = new_cache(GQA, layout, 8)
    planted = plant(source, source_blocks)[layers.start : layers.stop, :, 8:24, heads.start : heads.stop]
    wire = wire_buffer(planted)
    part: dict[str, Any] = {"token_start": 8, "token_stop": 24, "layers": layers, "heads": heads}
    gather_to_wire(source, block_ids=source_blocks, out=wire, **part)
    assert torch.equal(wire.view(torch.int16), planted.flatten())
    target, target_blocks = new_cache(GQA, layout, 16)
    expected = tokens_of(target, target_blocks)
    expected[layers.start : layers.stop, :, 8:24, heads.start : heads.stop] = planted
    scatter_from_wire(target, block_ids=target_blocks, payload=wire, **part)
    assert torch.equal(tokens_of(target, target_blocks), expected)


def test_a_buffer_may_start_at_any_byte() -> None:
    source, source_blocks = new_cache(GQA, KVCacheLayout.NHD, 8)
    planted = plant(source, source_blocks)
    wire, aligned = wire_buffer(planted, offset=3), wire_buffer(planted)
    whole: dict[str, Any] = {"token_start": 0, "token_stop": TOKENS, "layers": range(3), "heads": range(4)}
    gather_to_wire(source, block_ids=source_blocks, out=wire, **whole)
    gather_to_wire(source, block_ids=source_blocks, out=aligned, **whole)
    assert torch.equal(wire, aligned)
    target, target_blocks = new_cache(GQA, KVCacheLayout.HND, 5)
    scatter_from_wire(target, block_ids=target_blocks, payload=wire, **whole)
    assert torch.equal(tokens_of(target, target_blocks), planted)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("token_stop", {"token_start": -1}),
        ("token_stop", {"token_start": 9}),
        ("token_stop", {"token_stop": 57}),
        ("layers", {"layers": range(2, 4)}),
        ("layers", {"layers": range(0)}),
        ("heads", {"heads": range(3, 5)}),
        ("heads", {"heads": range(0, 4, 2)}),
        ("block_ids", {"block_ids": torch.tensor([0, 1, 2, 3, 4, 5, 10])}),
        ("block_ids", {"block_ids": torch.tensor([0, 1, 2, 3, 4, 5, -1])}),
        ("block_ids", {"block_ids_cpu": torch.tensor([0, 1, 2, 3, 4, 5, 10])}),
        ("block_ids_cpu", {"block_ids_cpu": torch.tensor([0, 1])}),
        ("payload", {"token_stop": 8}),
    ],
)
def test_a_wrong_reference_moves_nothing(field: str, wrong: dict[str, Any]) -> None:
    cache, block_ids = new_cache(GQA, KVCacheLayout.NHD, 8)
    before = cache.storage.clone()
    wire = torch.zeros(9 * GQA.bytes_per_token, dtype=torch.uint8)
    right: dict[str, Any] = {
        "block_ids": block_ids,
        "token_start": 0,
        "token_stop": 9,
        "layers": range(3),
        "heads": range(4),
    }
    with pytest.raises(InternalError) as error:
        gather_to_wire(cache, out=wire, **{**right, **wrong})
    assert error.value.field == field
    with pytest.raises(InternalError):
        scatter_from_wire(cache, payload=wire, **{**right, **wrong})
    assert torch.equal(cache.storage.view(torch.int16), before.view(torch.int16))
    assert not wire.any()


def test_a_gathered_payload_can_have_its_digest_taken() -> None:
    cache, block_ids = new_cache(GQA, KVCacheLayout.HND, 8)
    wire, taken = wire_buffer(plant(cache, block_ids)), torch.zeros((), dtype=torch.int64)
    gather_to_wire(
        cache,
        block_ids=block_ids,
        token_start=0,
        token_stop=TOKENS,
        layers=range(3),
        heads=range(4),
        out=wire,
        digest_out=taken,
    )
    assert int(taken) % 2**64 == digest(wire)


@pytest.mark.parametrize("layout", [*GQA_LAYOUTS, *MLA_LAYOUTS], ids=lambda layout: layout.label)
@pytest.mark.parametrize("tile_bytes", [1, 9000])
def test_a_payload_of_many_tiles_has_one_digest(
    layout: KVCacheLayout, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs that do not end with a row of the digest, and other work between the tiles."""
    monkeypatch.setattr("baton.kvcache.wire.gather_scatter._TILE_BYTES", tile_bytes)
    kind, num_heads = (KVKind.MLA, 1) if layout in MLA_LAYOUTS else (KVKind.GQA, 3)
    spec = KVCacheSpec(kind, num_layers=3, num_kv_heads=num_heads, head_dim=96, dtype="bfloat16")
    cache, block_ids = new_cache(spec, layout, 8)
    wire, taken, calls = wire_buffer(plant(cache, block_ids)), torch.zeros((), dtype=torch.int64), []
    where: dict[str, Any] = {"token_start": 0, "token_stop": TOKENS, "layers": range(3), "heads": range(num_heads)}
    gather_to_wire(
        cache, block_ids=block_ids, out=wire, digest_out=taken, digest_add=3, between=lambda: calls.append(1), **where
    )
    assert torch.equal(wire.view(torch.int16), tokens_of(cache, block_ids).flatten())
    assert int(taken) % 2**64 == (digest(wire) + 3) % 2**64
    assert len(calls) > 1


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_caches_of_8_bits_travel_as_they_are(layout: KVCacheLayout, dtype: str) -> None:
    spec = KVCacheSpec(KVKind.GQA, 3, 4, 2, dtype)
    (source, source_blocks), (target, target_blocks) = new_cache(spec, layout, 8), new_cache(spec, KVCacheLayout.HND, 5)
    source.memory.random_(0, 256)
    wire = torch.zeros(TOKENS * spec.bytes_per_token, dtype=torch.uint8)
    whole: dict[str, Any] = {"token_start": 0, "token_stop": TOKENS, "layers": range(3), "heads": range(4)}
    gather_to_wire(source, block_ids=source_blocks, out=wire, **whole)
    scatter_from_wire(target, block_ids=target_blocks, payload=wire, **whole)
    sent, arrived = (
        cache.view.view(torch.uint8)[:, :, blocks].flatten(2, 3)[:, :, :TOKENS]
        for cache, blocks in ((source, source_blocks), (target, target_blocks))
    )
    assert torch.equal(arrived, sent)


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_an_fp8_cache_holds_numbers_divided_by_their_scale(layout: KVCacheLayout, dtype: str) -> None:
    cache = PagedKVCache(KVCacheSpec(KVKind.GQA, 3, 4, 2, dtype), KVCacheShape(layout, 4, 3))
    k_THC, v_THC = (torch.randint(-8, 9, (2, 4, 2)).to(torch.bfloat16) for _ in range(2))
    k_scale, v_scale = torch.tensor(0.5), torch.tensor(4.0)
    store_kv(cache.layer(1), k_THC, v_THC, WriteIndex(torch.tensor([11, 0]), 4), k_scale=k_scale, v_scale=v_scale)
    tokens = TokenIndex(np.array([2, 0]), np.array([3, 0]))
    raw = gather_tokens(cache.layer(1), tokens)
    assert raw.dtype == cache.view.dtype
    assert torch.equal(raw[0].float(), k_THC.float() * 2)
    assert torch.equal(raw[1].float(), v_THC.float() / 4)
    read = gather_tokens(cache.layer(1), tokens, dtype=torch.bfloat16, scale=k_scale, v_scale=v_scale)
    assert torch.equal(read, torch.stack((k_THC, v_THC)))


def test_rows_past_the_slots_are_padding() -> None:
    cache = PagedKVCache(GQA, KVCacheShape(KVCacheLayout.NHD, 4, 3))
    k_THC, v_THC = (torch.randn(4, 4, 2, dtype=torch.bfloat16) for _ in range(2))
    expected = cache.view.clone()
    expected[0, :, 1, 2:4] = torch.stack((k_THC[:2], v_THC[:2]))
    store_kv(cache.layer(0), k_THC, v_THC, WriteIndex(torch.tensor([6, 7]), 4))
    assert torch.equal(cache.view, expected)


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
def test_slot_minus_one_writes_nothing(layout: KVCacheLayout) -> None:
    cache = PagedKVCache(GQA, KVCacheShape(layout, 4, 3))
    k_THC, v_THC = (torch.randn(4, 4, 2, dtype=torch.bfloat16) for _ in range(2))
    expected = cache.view.clone()
    expected[1, :, 2, 3] = torch.stack((k_THC[0], v_THC[0]))
    expected[1, :, 0, 0] = torch.stack((k_THC[2], v_THC[2]))
    store_kv(cache.layer(1), k_THC, v_THC, WriteIndex(torch.tensor([11, -1, 0, -1]), 4))
    assert torch.equal(cache.view, expected)


@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=lambda layout: layout.label)
def test_a_latent_lies_before_its_rotary_part(layout: KVCacheLayout) -> None:
    cache = PagedKVCache(MLA, KVCacheShape(layout, 4, 3))
    kv_c_TL, k_pe_TR = torch.randn(2, 4, dtype=torch.bfloat16), torch.randn(2, 2, dtype=torch.bfloat16)
    expected = cache.view.clone()
    expected[2, 0, 1, 1, 0] = torch.cat((kv_c_TL[1], k_pe_TR[1]))
    store_latent(cache.layer(2), kv_c_TL, k_pe_TR, WriteIndex(torch.tensor([-1, 5]), 4))
    assert torch.equal(cache.view, expected)
