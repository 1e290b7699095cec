"""KV that is converted on its way out of a GPU: the bytes that the store kernel of the other cache would have left,
without a wait of the host and without memory of its own."""

import time
from dataclasses import replace

import pytest
import torch

from baton.kvcache.access import store_kv, store_latent
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import FP8_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.tokens import WriteIndex
from baton.kvcache.wire.conversion import Converter, open_converter
from baton.kvcache.wire.digest import digest
from baton.kvcache.wire.gather_scatter import gather_to_wire
from kvtransfer.movers.cuda import CudaMover
from kvtransfer.movers.mover import Pending
from kvtransfer.parts import parts_of
from kvtransfer.segments import TRAILER_BYTES, Segment
from tests.conformance.kv import DEADLINE_S, scattered_blocks
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu

# Llama-8B's and DeepSeek-V3's tokens.
LLAMA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=576, dtype="bfloat16")
TOKENS, BLOCK_SIZE = 700, 16
LATENT = 512


def wait_for(operation: Pending) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not operation.done:
        assert time.monotonic() < end_s


def random_cache(spec: KVCacheSpec, layout: KVCacheLayout) -> PagedKVCache:
    cache = PagedKVCache(spec, KVCacheShape(layout, BLOCK_SIZE, 64), "cuda")
    # Some numbers are too large for 8 bits, some are subnormal in them.
    cache.view.normal_(std=8.0)
    return cache


def stored(cache: PagedKVCache, converter: Converter) -> PagedKVCache:
    """A cache of the other dtype with the same numbers, stored by a model's kernels."""
    other = PagedKVCache(converter.spec, cache.shape, "cuda")
    index = WriteIndex(torch.arange(cache.shape.num_slots, device="cuda"), BLOCK_SIZE)
    for layer in range(cache.spec.num_layers):
        k_THC, *v_THC = cache.layer(layer).flatten(1, 2)
        scales = (None, None) if converter.scales_LK is None else converter.scales_LK[layer].unbind()
        if cache.spec.kind is KVKind.MLA:
            latents, rotary = k_THC[:, 0].split([LATENT, cache.spec.head_dim - LATENT], dim=-1)
            store_latent(other.layer(layer), latents, rotary, index, scale=scales[0])
        else:
            store_kv(other.layer(layer), k_THC, v_THC[0], index, k_scale=scales[0], v_scale=scales[1])
    return other


@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("wanted", [*FP8_DTYPES, "float16", "float32"])
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (LLAMA, KVCacheLayout.NHD),
        (LLAMA, KVCacheLayout.HND),
        (LLAMA, KVCacheLayout.BLHNC),
        (replace(LLAMA, dtype="float32"), KVCacheLayout.BLNHC),
        (DEEPSEEK, KVCacheLayout.LBNC),
        (DEEPSEEK, KVCacheLayout.BLNC),
    ],
)
def test_a_payload_equals_the_other_caches_bytes(
    spec: KVCacheSpec, layout: KVCacheLayout, wanted: str, through_host: bool
) -> None:
    if spec.dtype == wanted:
        return
    cache = random_cache(spec, layout)
    scales = [0.021 * (2 + number) for number in range(spec.num_layers * spec.kv_factor)]
    converter = open_converter(cache, wanted, scales if wanted in FP8_DTYPES else ())
    blocks = torch.tensor(scattered_blocks(cache, TOKENS, 1))
    layers, heads = range(0, 3, 2), range(spec.num_kv_heads)
    start, stop = 5, TOKENS - 3
    size = len(layers) * (stop - start) * converter.spec.bytes_per_token_layer
    expected = torch.empty(size, dtype=torch.uint8, device="cuda")
    gather_to_wire(
        stored(cache, converter),
        block_ids=blocks,
        token_start=start,
        token_stop=stop,
        layers=layers,
        heads=heads,
        out=expected,
    )
    segment = Segment(1, 1, 0, layers.start, layers[-1] + 1, start, stop, 0, len(heads), size, layer_step=layers.step)
    mover = CudaMover(cache)
    pool = mover.open_pool(slot_bytes=size + TRAILER_BYTES, slots=1, through_host=through_host)
    slot = pool.take()
    assert slot is not None
    placed, place = mover.place(blocks.tolist(), incoming=False), parts_of(spec)[0].place(segment)
    wait_for(mover.gather(slot, placed, segment, place, with_digest=True, converter=converter))
    payload, trailer = slot.memory.cpu().split([size, TRAILER_BYTES])
    assert torch.equal(payload, expected.cpu())
    assert trailer.numpy().tobytes() == segment.encode(segment.digest_over(digest(payload)))
    mover.close()


def test_conversion_neither_waits_nor_allocates() -> None:
    cache = random_cache(LLAMA, KVCacheLayout.NHD)
    converter = open_converter(cache, FP8_DTYPES[0], [0.5] * 6)
    size = 3 * TOKENS * converter.spec.bytes_per_token_layer
    segment = Segment(1, 1, 0, 0, 3, 0, TOKENS, 0, 8, size)
    mover = CudaMover(cache)
    slot = mover.open_pool(slot_bytes=size + TRAILER_BYTES, slots=1, through_host=False).take()
    assert slot is not None
    placed = mover.place(scattered_blocks(cache, TOKENS, 1), incoming=False)
    place = parts_of(LLAMA)[0].place(segment)
    wait_for(mover.gather(slot, placed, segment, place, with_digest=True, converter=converter))
    held = torch.cuda.memory_reserved()
    with no_waiting():
        for _ in range(5):
            wait_for(mover.gather(slot, placed, segment, place, with_digest=True, converter=converter))
    assert torch.cuda.memory_reserved() == held
    mover.close()
