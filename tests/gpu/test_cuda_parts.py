"""Index and state of a cache on a GPU move as on a CPU, byte for byte, and states are copied without a wait."""

from dataclasses import replace

import pytest
import torch

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.states import copy_states
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.cuda import CudaMover
from kvtransfer.parts import Part, parts_of
from kvtransfer.segments import TRAILER_BYTES, Segment, payload_bytes
from tests.gpu.test_cuda_mover import BLOCKS, OTHERS, slot_of, wait_for
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu

INDEX = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=128, dtype="bfloat16")
STATE = KVCacheSpec(KVKind.STATE, num_layers=5, num_kv_heads=16, head_dim=3 * 256 + 128 * 128, dtype="float32")
SPEC = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=8, head_dim=128, dtype="bfloat16", index=INDEX, state=STATE)
# The numbers of a head are odd, and so are those of all heads of a layer.
ODD = replace(SPEC, index=replace(INDEX, head_dim=33), state=replace(STATE, num_kv_heads=3, head_dim=4099))
LAYOUTS = KVCacheLayout.NHD, KVCacheLayout.BLHNC
SLOTS = 4, 1


def caches(spec: KVCacheSpec, layout: KVCacheLayout) -> tuple[PagedKVCache, PagedKVCache]:
    """Two with equal contents, on the CPU and on the GPU."""
    shape = KVCacheShape(layout, 16, 64, state_slots=6)
    cpu, gpu = PagedKVCache(spec, shape), PagedKVCache(spec, shape, "cuda")
    for seed, (one, other) in enumerate(zip(cpu.parts, gpu.parts, strict=True)):
        one.memory.random_(generator=torch.Generator().manual_seed(seed))
        other.memory.copy_(one.memory)
    return cpu, gpu


def segment_of(part: Part, *, tokens: range, heads: range) -> Segment:
    start = part.spec.first_kept(tokens.start, tokens.stop)
    size = payload_bytes(part.spec, layers=2, tokens=tokens.stop - start, heads=len(heads))
    first = part.layers.start
    return Segment(11, 12, 13, first, first + 3, start, tokens.stop, heads.start, heads.stop, size, layer_step=2)


@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", [SPEC, ODD])
def test_every_part_is_sent_and_taken_as_on_the_cpu(
    spec: KVCacheSpec, layout: KVCacheLayout, through_host: bool
) -> None:
    on_cpu, on_gpu = caches(spec, layout)
    cpu, gpu = CpuMover(on_cpu, lambda: None), CudaMover(on_gpu)
    for part in parts_of(spec):
        for heads in (part.heads, part.heads[-1:]):
            segment = segment_of(part, tokens=range(5, 83), heads=heads)
            place, num_bytes = part.place(segment), segment.payload_bytes + TRAILER_BYTES
            expected, slot = slot_of(cpu, num_bytes), slot_of(gpu, num_bytes, through_host=through_host)
            for mover, into in ((cpu, expected), (gpu, slot)):
                blocks = mover.place(BLOCKS, incoming=False, state_slot=SLOTS[0])
                wait_for(mover.gather(into, blocks, segment, place, with_digest=True))
                blocks.free()
            assert torch.equal(slot.memory.cpu(), expected.memory)
            for mover, into in ((cpu, expected), (gpu, slot)):
                wait_for(mover.read(into, num_bytes, with_digest=True, with_extremes=False))
                blocks = mover.place(OTHERS, incoming=True, state_slot=SLOTS[1])
                wait_for(mover.scatter(into, blocks, segment, place))
                blocks.free()
            for one, other in zip(on_cpu.parts, on_gpu.parts, strict=True):
                assert torch.equal(other.memory.cpu(), one.memory)
    gpu.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", [SPEC, ODD])
def test_states_are_copied_as_on_the_cpu_and_nobody_waits(spec: KVCacheSpec, layout: KVCacheLayout) -> None:
    on_cpu, on_gpu = caches(spec, layout)
    assert on_cpu.state is not None
    assert on_gpu.state is not None
    copy_states(on_gpu.state, [(0, 3)])
    torch.cuda.synchronize()
    with no_waiting():
        copy_states(on_gpu.state, [(1, 2), (5, 4)])
    for pairs in ([(0, 3)], [(1, 2), (5, 4)]):
        copy_states(on_cpu.state, pairs)
    assert torch.equal(on_gpu.state.memory.cpu(), on_cpu.state.memory)
