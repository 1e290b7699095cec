"""KV gathered in another dtype equals the bytes of a cache of that dtype that stores the same numbers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InternalError
from baton.kvcache.access import store_kv, store_latent
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.layout import MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import DTYPE_BYTES, FP8_DTYPES, KV_DTYPE_BYTES, KVKind
from baton.kvcache.tokens import WriteIndex
from baton.kvcache.wire.conversion import Converter, gather_converted, open_converter
from baton.kvcache.wire.digest import digest
from baton.kvcache.wire.gather_scatter import gather_to_wire
from baton.kvcache.wire.kernels import conversion as kernels
from baton.kvcache.wire.places import places_of
from tests.device import DEVICE
from tests.unit.kvcache.caches import NUM_LAYERS, block_sizes, copy_of, layouts, new_cache, spec_of

NUM_BLOCKS = 9
SENTINEL = 0xA5

Taken = tuple[torch.Tensor, tuple[int, int], range, range]


@st.composite
def _taken(draw: st.DrawFn, cache: PagedKVCache) -> Taken:
    """A request's blocks, and the ranges to gather."""
    block_ids = torch.tensor(draw(st.permutations(range(NUM_BLOCKS))))[: draw(st.integers(1, 6))]
    held = len(block_ids) * cache.shape.block_size
    start = draw(st.integers(0, held - 1))
    stop = draw(st.integers(start + 1, held))
    first_layer, first_head = (draw(st.integers(0, size - 1)) for size in (NUM_LAYERS, cache.spec.num_kv_heads))
    layers = range(first_layer, draw(st.integers(first_layer + 1, NUM_LAYERS)))
    heads = range(first_head, draw(st.integers(first_head + 1, cache.spec.num_kv_heads)))
    return block_ids, (start, stop), layers, heads


def _scales(cache: PagedKVCache, dtype: str) -> tuple[float, ...]:
    """Scales that are not powers of two and differ by layer and kind, so that no mistake rounds to the same bytes."""
    if dtype not in FP8_DTYPES:
        return ()
    return tuple(0.03 + 0.011 * number for number in range(NUM_LAYERS * cache.spec.kv_factor))


def _stored(cache: PagedKVCache, dtype: str, scales: Sequence[float]) -> PagedKVCache:
    """A cache of the other dtype with the same numbers, stored as a model stores them."""
    other = PagedKVCache(replace(cache.spec, dtype=dtype), cache.shape)
    index = WriteIndex(torch.arange(cache.shape.num_slots), cache.shape.block_size)
    of_layers = torch.tensor(scales).view(NUM_LAYERS, -1) if scales else None
    for layer in range(NUM_LAYERS):
        k_THC, *v_THC = cache.layer(layer).flatten(1, 2)
        own = (None, None) if of_layers is None else (of_layers[layer, 0], of_layers[layer, -1])
        if cache.spec.kind is KVKind.MLA:
            latents, rotary = k_THC[:, 0].split([k_THC.shape[-1] - 4, 4], dim=-1)
            store_latent(other.layer(layer), latents, rotary, index, scale=own[0])
        else:
            store_kv(other.layer(layer), k_THC, v_THC[0], index, k_scale=own[0], v_scale=own[1])
    return other


def _gathered(cache: PagedKVCache, taken: Taken, *, converter: Converter | None = None) -> torch.Tensor:
    block_ids, (start, stop), layers, heads = taken
    spec = converter.spec if converter else cache.spec
    size = (stop - start) * len(layers) * spec.kv_factor * len(heads) * spec.head_dim * spec.itemsize
    out = torch.full((size,), SENTINEL, dtype=torch.uint8, device=cache.storage.device)
    where = {"block_ids": block_ids, "token_start": start, "token_stop": stop, "layers": layers, "heads": heads}
    if converter is None:
        gather_to_wire(cache, **where, out=out)  # type: ignore[arg-type]
    else:
        gather_converted(cache, converter, **where, out=out)  # type: ignore[arg-type]
    return out.cpu()


@settings(max_examples=25, deadline=None)
@given(layouts, block_sizes, st.sampled_from(tuple(DTYPE_BYTES)), st.sampled_from(tuple(KV_DTYPE_BYTES)), st.data())
def test_gathered_bytes_equal_the_other_caches(
    layout: KVCacheLayout, block_size: int, dtype: str, wanted: str, data: st.DataObject
) -> None:
    cache = new_cache(spec_of(layout, dtype), layout, block_size, NUM_BLOCKS)
    scales = _scales(cache, wanted)
    taken = data.draw(_taken(cache))
    converter = open_converter(cache, wanted, scales)
    assert torch.equal(_gathered(cache, taken, converter=converter), _gathered(_stored(cache, wanted, scales), taken))


# Numbers that are too large for the other dtype are compared, too.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=8, deadline=None)
@given(layouts, block_sizes, st.sampled_from(tuple(DTYPE_BYTES)), st.sampled_from(tuple(KV_DTYPE_BYTES)), st.data())
def test_the_kernel_equals_its_twin(
    layout: KVCacheLayout, block_size: int, dtype: str, wanted: str, data: st.DataObject
) -> None:
    head_dim = data.draw(st.sampled_from((2, 5, 16, 64)))
    cache = new_cache(spec_of(layout, dtype, head_dim=head_dim), layout, block_size, NUM_BLOCKS)
    # The interpreter rounds smaller numbers differently from a GPU and the twin.
    cache.storage.masked_fill_(cache.storage.float().abs() < torch.finfo(torch.float32).tiny, 0.0)
    taken = data.draw(_taken(cache))
    block_ids, (start, stop), layers, heads = taken
    converter = open_converter(cache, wanted, _scales(cache, wanted))
    expected = _gathered(cache, taken, converter=converter)
    on_device = copy_of(cache, DEVICE)
    memory = torch.full((expected.numel() + 32,), SENTINEL, dtype=torch.uint8, device=DEVICE)
    payload = memory[16 : 16 + expected.numel()]
    kernels.gather_converted(
        on_device.storage.view(-1),
        payload.view(converter.dtype),
        block_ids.to(DEVICE),
        places_of(on_device, start, stop, layers, heads),
        scales_LK=None if converter.scales_LK is None else converter.scales_LK[layers.start :].to(DEVICE),
    )
    ours, theirs = (each.cpu().view(converter.dtype).float() for each in (payload.clone(), expected.clone()))
    # The bits of a NaN are not specified.
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert (memory[:16] == SENTINEL).all()
    assert (memory[16 + expected.numel() :] == SENTINEL).all()


def test_every_second_layer_has_its_own_scale() -> None:
    """As in models whose layers with and without a window take turns."""
    layout = KVCacheLayout.NHD
    spec = replace(spec_of(layout, "bfloat16"), num_layers=5)
    cache = PagedKVCache(spec, new_cache(spec_of(layout, "bfloat16"), layout, 4, NUM_BLOCKS).shape)
    cache.view.normal_()
    converter = open_converter(cache, "float8_e4m3fn", [0.1 * (1 + number) for number in range(10)])
    assert converter.scales_LK is not None
    every_second, block_ids = range(1, 5, 2), torch.arange(NUM_BLOCKS)
    expected = _gathered(cache, (block_ids, (3, 21), every_second, range(3)), converter=converter)
    alone = [
        _gathered(cache, (block_ids, (3, 21), range(layer, layer + 1), range(3)), converter=converter)
        for layer in every_second
    ]
    assert torch.equal(expected, torch.cat(alone))
    on_device = copy_of(cache, DEVICE)
    payload = torch.zeros_like(expected, device=DEVICE)
    kernels.gather_converted(
        on_device.storage.view(-1),
        payload.view(converter.dtype),
        block_ids.to(DEVICE),
        places_of(on_device, 3, 21, every_second, range(3)),
        scales_LK=converter.scales_LK[1:5:2].to(DEVICE),
    )
    assert torch.equal(payload.cpu(), expected)


def test_long_ranges_are_gathered_in_pieces_and_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVCacheLayout.HND
    cache = new_cache(spec_of(layout, "float32"), layout, 16, NUM_BLOCKS)
    cache.view.normal_()
    converter = open_converter(cache, "float8_e4m3fn", _scales(cache, "float8_e4m3fn"))
    block_ids = torch.randperm(NUM_BLOCKS)
    out, digested = (
        torch.zeros(130 * converter.spec.bytes_per_token, dtype=torch.uint8),
        torch.zeros((), dtype=torch.int64),
    )
    turns: list[int] = []
    expected = _gathered(cache, (block_ids, (5, 135), range(NUM_LAYERS), range(3)), converter=converter)
    monkeypatch.setattr("baton.kvcache.wire.conversion._TILE_BYTES", 70 * cache.spec.bytes_per_token_layer)
    gather_converted(
        cache,
        converter,
        block_ids=block_ids,
        token_start=5,
        token_stop=135,
        layers=range(NUM_LAYERS),
        heads=range(3),
        out=out,
        digest_out=digested,
        between=lambda: turns.append(1),
    )
    assert torch.equal(out, expected)
    assert int(digested) % 2**64 == digest(out)
    assert len(turns) == 3 * NUM_LAYERS


@pytest.mark.parametrize("layout", [KVCacheLayout.NHD, *MLA_LAYOUTS[:1]])
def test_a_wrong_reference_is_an_error(layout: KVCacheLayout) -> None:
    cache = new_cache(spec_of(layout, "bfloat16"), layout, 4, NUM_BLOCKS)
    converter = open_converter(cache, "float8_e5m2")
    where = {"token_start": 0, "token_stop": 8, "layers": range(NUM_LAYERS), "heads": range(cache.spec.num_kv_heads)}
    out = torch.zeros(8 * converter.spec.bytes_per_token, dtype=torch.uint8)
    for wrong, memory in (([0, NUM_BLOCKS], out), ([0], out), ([0, 1], out[1:]), ([0, 1], torch.cat((out, out)))):
        with pytest.raises(InternalError):
            gather_converted(cache, converter, block_ids=torch.tensor(wrong), out=memory, **where)  # type: ignore[arg-type]
    assert not out.any()
    assert TORCH_DTYPES["float8_e5m2"] is converter.dtype
