"""Index, drafts' KV and state travel with KV: between unequal ranks, layouts and block sizes, whole, once, and checked
like KV."""

from dataclasses import replace

import pytest
import torch

from baton.core.errors import DataLoss, InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.mover import Blocks, MoveDone
from kvtransfer.parts import PartPlace
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import Segment
from kvtransfer.staging import Slot
from tests.conformance.kv import (
    DECODE_INCARNATION,
    PREFILL_INCARNATION,
    NodeEvents,
    Pair,
    as_bytes,
    connect,
    eventually,
    job,
    make_cache,
    make_transfer,
    scattered_blocks,
)
from tests.conformance.kv import linked as linked_pair
from tests.conformance.ranked_nodes import RankedNode, fill, held_by, linked

GQA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=4, head_dim=4, dtype="bfloat16")
MLA = KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=6, dtype="bfloat16")
INDEX = KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=3, dtype="float32")
# A layer of all heads is larger than a segment, and the numbers of a head are odd.
STATE = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=8, head_dim=33, dtype="float32")
NARROW = replace(STATE, num_kv_heads=2, num_layers=1)
SPECS = {
    "sparse": replace(MLA, index=INDEX),
    "hybrid": replace(GQA, windows=(0, 9, 0), state=STATE),
    "hybrid-mla": replace(MLA, state=NARROW),
    "draft": replace(GQA, draft=replace(GQA, num_layers=1)),
    "all": replace(
        GQA,
        num_kv_heads=2,
        index=replace(INDEX, num_layers=3),
        draft=replace(GQA, num_layers=2, num_kv_heads=2),
        state=NARROW,
    ),
}
RANKS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)]
CASES = [("loopback", *ranks, name) for ranks in RANKS for name in SPECS]
CASES += [("ucx", 1, 2, "all"), ("ucx", 2, 1, "hybrid"), ("ucx", 2, 4, "sparse")]
LAYOUTS = KVCacheLayout.HND, KVCacheLayout.BLNHC
START, TOKENS = 5, 37
SLOTS = 3, 1


def fill_randomly(cache: PagedKVCache, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in cache.parts:
        part.view.copy_(torch.randn(part.view.shape, generator=generator))


def plant(spec: KVCacheSpec, node: RankedNode) -> PagedKVCache:
    """Fills every rank's cache, equally where ranks hold the same heads; returns one with all heads."""
    whole = make_cache(spec, KVCacheLayout.NHD, node.caches[0].shape.block_size)
    fill_randomly(whole, seed=4)
    for rank, cache in enumerate(node.caches):
        for part, from_part, heads in zip(cache.parts, whole.parts, held_by(spec, rank, len(node.caches)), strict=True):
            part.view.copy_(from_part.view[..., heads.start : heads.stop, :])
    return whole


@pytest.mark.parametrize(("transport", "senders", "receivers", "name"), CASES)
async def test_every_rank_gets_its_heads_of_every_part_and_nothing_else(
    transport: str, senders: int, receivers: int, name: str
) -> None:
    spec = SPECS[name]
    slots = SLOTS if spec.state else (-1, -1)
    async with linked(spec, senders, receivers, transport=transport, layouts=LAYOUTS) as nodes:
        caches_d = nodes.decode.caches
        blocks_p = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        blocks_d = scattered_blocks(caches_d[0], TOKENS, 2)
        whole = plant(spec, nodes.prefill)
        for cache in caches_d:
            for part in cache.parts:
                part.view.fill_(-7.0)
        before = [[part.view.clone() for part in cache.parts] for cache in caches_d]
        filled = await fill(nodes, blocks_p, blocks_d, START, 22, 23, TOKENS, slots=slots)
        assert nodes.decode.events.refused == []
        await nodes.decode.transfer.leases.close_lease(filled.number)
    for rank, cache in enumerate(caches_d):
        held = held_by(spec, rank, receivers)
        for part, from_part, wanted, heads in zip(cache.parts, whole.parts, before[rank], held, strict=True):
            source = from_part.view[..., heads.start : heads.stop, :]
            if part.spec.kind is KVKind.STATE:
                wanted[:, :, slots[1]] = source[:, :, slots[0]]
            for token in range(START, TOKENS if part.spec.kind is not KVKind.STATE else START):
                size_p, size_d = whole.shape.block_size, cache.shape.block_size
                to, place = (blocks_d[token // size_d], token % size_d), (blocks_p[token // size_p], token % size_p)
                numbers = range(part.spec.num_layers)
                layers = [layer for layer in numbers if part.spec.first_read(layer, TOKENS) <= token]
                wanted[layers, :, to[0], to[1]] = source[layers, :, place[0], place[1]]
            assert torch.equal(as_bytes(part.view), as_bytes(wanted)), f"{part.spec.kind} of rank {rank}"


HYBRID = replace(SPECS["all"], num_kv_heads=4, draft=None)


class Damaging(CpuMover):
    """Changes a byte of every state that it gathers."""

    def gather(self, slot: Slot, blocks: Blocks, segment: Segment, place: PartPlace, **options: object) -> MoveDone:
        done = super().gather(slot, blocks, segment, place, **options)  # type: ignore[arg-type]
        if place.part == 2:
            slot.memory[0] ^= 1
        return done


async def refused_with(pair: Pair, decode: PagedKVCache, *, token_stop: int, lease_stop: int) -> SegmentRefusal:
    """Why the state of a job is refused; it has not reached the slot, and the lease is not filled."""
    before = [part.view.clone() for part in decode.parts]
    blocks = tuple(range(8))
    await pair.decode.open_lease(LeaseGrant(1, blocks, 0, lease_stop, state_slot=SLOTS[1]))
    await pair.prefill.send(job(1, blocks, 0, token_stop, state_slot=SLOTS[0]))
    await eventually(lambda: bool(pair.events.refused))
    assert pair.events.filled == []
    assert decode.state is not None
    assert torch.equal(decode.state.view, before[2])
    (refused,) = pair.events.refused
    assert refused.lease == 1
    assert isinstance(refused.error, DataLoss) == (refused.refusal is SegmentRefusal.DIGEST)
    return refused.refusal


@pytest.mark.parametrize("transport", ["loopback", "ucx"])
async def test_a_damaged_state_is_refused_by_its_digest(transport: str) -> None:
    prefill, decode = (make_cache(HYBRID, KVCacheLayout.NHD, 8) for _ in range(2))
    fill_randomly(prefill, seed=1)
    events = NodeEvents()
    async with (
        make_transfer(
            prefill, NodeEvents(), transport=transport, incarnation=PREFILL_INCARNATION, make_mover=Damaging
        ) as sender,
        make_transfer(decode, events, transport=transport, incarnation=DECODE_INCARNATION) as receiver,
    ):
        await connect(sender, receiver)
        pair = Pair(sender, receiver, events)
        assert await refused_with(pair, decode, token_stop=9, lease_stop=9) is SegmentRefusal.DIGEST


async def test_a_state_of_another_number_of_tokens_is_refused() -> None:
    prefill, decode = (make_cache(HYBRID, KVCacheLayout.NHD, 8) for _ in range(2))
    fill_randomly(prefill, seed=1)
    async with linked_pair(prefill, decode, transport="loopback") as pair:
        assert await refused_with(pair, decode, token_stop=8, lease_stop=9) is SegmentRefusal.OUT_OF_RANGE


async def test_slots_that_do_not_exist_are_errors() -> None:
    prefill, decode = (make_cache(HYBRID, KVCacheLayout.NHD, 8) for _ in range(2))
    plain = make_cache(GQA, KVCacheLayout.NHD, 8)
    async with linked_pair(prefill, decode, transport="loopback") as pair:
        for slot in (-1, decode.shape.state_slots):
            with pytest.raises(InternalError, match="slot"):
                await pair.decode.open_lease(LeaseGrant(1, (0,), 0, 8, state_slot=slot))
        with pytest.raises(InternalError, match="slot"):
            await pair.prefill.send(job(1, (0,), 0, 8, state_slot=prefill.shape.state_slots))
        with pytest.raises(InternalError, match="tokens"):
            await pair.prefill.send(replace(job(1, (0,), 0, 8), layers=range(7)))
    async with linked_pair(plain, make_cache(GQA, KVCacheLayout.NHD, 8), transport="loopback") as pair:
        with pytest.raises(InternalError, match="slot"):
            await pair.decode.open_lease(LeaseGrant(1, (0,), 0, 8, state_slot=0))


async def test_only_kv_is_converted() -> None:
    prefill = make_cache(HYBRID, KVCacheLayout.NHD, 8)
    decode = make_cache(replace(HYBRID, dtype="float8_e4m3fn"), KVCacheLayout.HND, 4)
    fill_randomly(prefill, seed=1)
    blocks_p, blocks_d = scattered_blocks(prefill, 12, 1), scattered_blocks(decode, 12, 2)
    conversion = KVConversion("bfloat16", "float8_e4m3fn", (1.0,) * 6)
    async with linked_pair(prefill, decode, transport="loopback", conversion=conversion) as pair:
        await pair.decode.open_lease(LeaseGrant(1, blocks_d, 0, 12, state_slot=SLOTS[1]))
        await pair.prefill.send(job(1, blocks_p, 0, 12, state_slot=SLOTS[0]))
        await eventually(lambda: bool(pair.events.filled))
    (kv_p, index_p, state_p), (kv_d, index_d, state_d) = prefill.parts, decode.parts
    for token in range(12):
        place, to = (blocks_p[token // 8], token % 8), (blocks_d[token // 4], token % 4)
        kept = kv_p.view[:, :, place[0], place[1]].to(torch.float8_e4m3fn)
        assert torch.equal(as_bytes(kv_d.view[:, :, to[0], to[1]]), as_bytes(kept))
        assert torch.equal(index_d.view[:, :, to[0], to[1]], index_p.view[:, :, place[0], place[1]])
    assert torch.equal(state_d.view[:, :, SLOTS[1]], state_p.view[:, :, SLOTS[0]])
