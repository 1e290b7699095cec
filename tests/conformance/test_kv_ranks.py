"""KV between nodes of several ranks: every rank of the receiver gets its heads, whole, once, and nothing else changes.

The ranks share this process; their transfers, and the channels between rank 0 and the others, are real.
"""

import asyncio
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from baton.core.errors import DataLoss, Draining, InternalError, PeerRefused, UnknownLease
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.flows import RankPair, heads_of, part_flows
from kvtransfer.leases import LeaseGrant
from kvtransfer.refusals import SegmentRefusal
from tests.conformance.kv import (
    DEADLINE_S,
    as_bytes,
    eventually,
    job,
    make_cache,
    plant,
    scattered_blocks,
    tokens_of,
)
from tests.conformance.ranked_nodes import PEER, SENDER, RankedNode, fill, linked

GQA = KVCacheSpec(KVKind.GQA, num_layers=5, num_kv_heads=4, head_dim=4, dtype="float32")
MQA = replace(GQA, num_kv_heads=1)
MLA = KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=6, dtype="bfloat16")
RANKS = (1, 2, 4)
TOKENS = 37


def plant_whole(spec: KVCacheSpec, node: RankedNode, blocks: tuple[int, ...]) -> Tensor:
    """Gives a request's KV values of its own in every rank's cache, equal where ranks hold the same heads; returns all
    of it, [L, K, T, H, C]."""
    whole = make_cache(spec, KVCacheLayout.NHD, node.caches[0].shape.block_size)
    plant(whole, blocks, TOKENS)
    for rank, cache in enumerate(node.caches):
        held = heads_of(rank, ranks=len(node.caches), num_kv_heads=spec.num_kv_heads)
        cache.view.copy_(whole.view[..., held.start : held.stop, :])
    return tokens_of(whole, blocks, TOKENS)


@pytest.fixture(params=["loopback", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


CASES = [("loopback", *case) for case in product(RANKS, RANKS)] + [("ucx", 1, 2), ("ucx", 2, 1), ("ucx", 4, 2)]


SPECS = {"GQA": GQA, "MQA": MQA, "MLA": MLA}
LAYOUTS = {
    "GQA": (KVCacheLayout.HND, KVCacheLayout.BLNHC),
    "MQA": (KVCacheLayout.NHD, KVCacheLayout.HND),
    "MLA": (KVCacheLayout.LBNC, KVCacheLayout.BLNC),
}


@pytest.mark.parametrize(("transport", "senders", "receivers"), CASES)
@pytest.mark.parametrize("kind", SPECS)
async def test_every_rank_gets_its_heads_and_nothing_else(
    transport: str, kind: str, senders: int, receivers: int
) -> None:
    spec = SPECS[kind]
    async with linked(spec, senders, receivers, transport=transport, layouts=LAYOUTS[kind]) as nodes:
        prefill, decode = nodes.prefill, nodes.decode
        blocks_p = scattered_blocks(prefill.caches[0], TOKENS, 1)
        blocks_d = scattered_blocks(decode.caches[0], TOKENS, 2)
        expected = plant_whole(spec, prefill, blocks_p)
        for cache in decode.caches:
            cache.view.fill_(-7.0)
        before = [cache.view.clone() for cache in decode.caches]
        # D had the first tokens: the lease starts in the middle of a block of both.
        filled = await fill(nodes, blocks_p, blocks_d, 5, 22, 23, TOKENS)
        assert len(decode.events.filled) == 1
        assert decode.events.refused == []
        totals = await decode.transfer.leases.close_lease(filled.number)
    # Every rank gets the heads that several ranks hold.
    held = sum(cache.spec.num_kv_heads for cache in decode.caches)
    assert totals.bytes == (TOKENS - 5) * spec.bytes_per_token // spec.num_kv_heads * held
    for rank, (cache, wanted) in enumerate(zip(decode.caches, before, strict=True)):
        heads = heads_of(rank, ranks=receivers, num_kv_heads=spec.num_kv_heads)
        for token in range(5, TOKENS):
            place = blocks_d[token // cache.shape.block_size], token % cache.shape.block_size
            wanted[:, :, place[0], place[1]] = expected[:, :, token, heads.start : heads.stop]
        assert torch.equal(as_bytes(cache.view), as_bytes(wanted)), f"rank {rank}"


async def test_links_are_warmed_up_and_the_pair_is_measured_as_one(transport: str) -> None:
    async with linked(MLA, 2, 4, transport=transport) as nodes:
        sent = await nodes.prefill.transfer.warm_up(PEER, SENDER)
        assert sent.keys() == nodes.links.keys()
        measure = await nodes.decode.transfer.warmed_up(SENDER, sent, timeout_s=DEADLINE_S)
        assert measure.gigabytes_per_s > 0
        assert measure.latency_s > 0
        await nodes.prefill.transfer.use_link(PEER, measure.speed)
        blocks_p = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        plant_whole(MLA, nodes.prefill, blocks_p)
        await fill(nodes, blocks_p, scattered_blocks(nodes.decode.caches[0], TOKENS, 2), 0, TOKENS)
        with pytest.raises(PeerRefused):
            await nodes.decode.transfer.warmed_up(SENDER, {}, timeout_s=1)


async def test_a_lease_is_filled_only_when_every_rank_has_its_share() -> None:
    async with linked(GQA, 2, 2, transport="loopback") as nodes:
        decode, prefill = nodes.decode, nodes.prefill
        blocks = scattered_blocks(prefill.caches[0], TOKENS, 1)
        plant_whole(GQA, prefill, blocks)
        await decode.transfer.leases.open_lease(LeaseGrant(0, scattered_blocks(decode.caches[0], TOKENS, 2), 0, TOKENS))
        await prefill.transfer.send(job(0, blocks, 0, TOKENS - 1, peer=PEER, sender_number=SENDER))
        counted = decode.transfer.counters
        await eventually(lambda: counted().peers[SENDER].bytes_total == (TOKENS - 1) * GQA.bytes_per_token)
        assert decode.events.filled == []
        await prefill.transfer.send(
            job(0, blocks, TOKENS - 1, TOKENS, first_segment=100, peer=PEER, sender_number=SENDER)
        )
        await eventually(lambda: len(decode.events.filled) == 1)
        await eventually(lambda: prefill.transfer.counters().peers[PEER] == counted().peers[SENDER])


async def test_a_lease_is_closed_at_once_only_when_it_is_filled_and_then_takes_nothing() -> None:
    async with linked(GQA, 2, 2, transport="loopback") as nodes:
        decode, prefill = nodes.decode.transfer, nodes.prefill.transfer
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        plant_whole(GQA, nodes.prefill, blocks)
        await decode.leases.open_lease(LeaseGrant(0, scattered_blocks(nodes.decode.caches[0], TOKENS, 2), 0, TOKENS))
        await prefill.send(job(0, blocks, 0, 8, peer=PEER, sender_number=SENDER))
        await eventually(lambda: decode.counters().peers[SENDER].bytes_total == 8 * GQA.bytes_per_token)
        assert decode.leases.close_filled(0) is None
        await prefill.send(job(0, blocks, 8, TOKENS, first_segment=100, peer=PEER, sender_number=SENDER))
        await eventually(lambda: len(nodes.decode.events.filled) == 1)
        totals = decode.leases.close_filled(0)
        assert totals == nodes.decode.events.filled[0]
        assert decode.leases.close_filled(0) is None
        with pytest.raises(UnknownLease):
            await decode.leases.close_lease(0)
        before = [cache.view.clone() for cache in nodes.decode.caches]
        await prefill.send(job(0, blocks, 0, 8, first_segment=200, peer=PEER, sender_number=SENDER))
        await eventually(lambda: sum(decode.counters().refusals.values()) >= 2)
        for cache, wanted in zip(nodes.decode.caches, before, strict=True):
            assert torch.equal(as_bytes(cache.view), as_bytes(wanted))


async def test_two_nodes_cannot_fill_one_lease() -> None:
    """The ranks of one node may fill a lease together; those of two nodes may not."""
    spec, links = MLA, part_flows(MLA, senders=2, receivers=1)
    other_number, other_peer = SENDER + 2, PEER + 64
    async with linked(spec, 2, 1, transport="loopback") as nodes:
        prefill, decode = nodes.prefill.transfer, nodes.decode.transfer
        # The same process once more, as a node of its own would be.
        theirs = await decode.listen(other_number, links, sends=False)
        ours = await prefill.listen(other_peer, links, sends=True)
        await decode.connect(other_number, ours)
        await prefill.connect(other_peer, theirs)
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        await decode.leases.open_lease(LeaseGrant(0, scattered_blocks(nodes.decode.caches[0], TOKENS, 2), 0, TOKENS))
        await prefill.send(job(0, blocks, 0, 8, peer=PEER, sender_number=SENDER))
        await eventually(lambda: decode.counters().peers[SENDER].bytes_total > 0)
        await prefill.send(job(0, blocks, 8, 9, peer=other_peer, sender_number=other_number))
        await eventually(lambda: len(nodes.decode.events.refused) == 2)
        assert {refused.refusal for refused in nodes.decode.events.refused} == {SegmentRefusal.FOREIGN_SENDER}
        assert await decode.disconnect(other_number) == ()
        assert await decode.disconnect(SENDER) == (0,)
        await decode.leases.close_lease(0)


async def test_a_lost_peer_leaves_no_rank_in_use_and_its_leases_are_reported_once(transport: str) -> None:
    async with linked(MLA, 4, 2, transport=transport) as nodes:
        decode, prefill = nodes.decode.transfer, nodes.prefill.transfer
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        await decode.leases.open_lease(LeaseGrant(0, scattered_blocks(nodes.decode.caches[0], TOKENS, 2), 0, TOKENS))
        await prefill.send(job(0, blocks, 0, 8, peer=PEER, sender_number=SENDER))
        await eventually(lambda: decode.counters().peers[SENDER].bytes_total == 2 * 8 * MLA.bytes_per_token)
        assert await decode.disconnect(SENDER) == (0,)
        await prefill.disconnect(PEER)
        with pytest.raises(DataLoss):
            await prefill.send(job(0, blocks, 8, 9, peer=PEER, sender_number=SENDER))
        await prefill.quiet(PEER, 0)
        assert (await decode.leases.close_lease(0)).bytes == 2 * 8 * MLA.bytes_per_token
        assert decode.counters().peers == {}
        assert nodes.decode.events.filled == []


async def test_a_lease_whose_opening_is_not_awaited_is_closed_like_any_other() -> None:
    async with linked(GQA, 1, 2, transport="loopback") as nodes:
        decode = nodes.decode.transfer
        blocks = scattered_blocks(nodes.decode.caches[0], TOKENS, 2)
        waiting = asyncio.ensure_future(decode.leases.open_lease(LeaseGrant(0, blocks, 0, TOKENS)))
        waiting.cancel()
        assert (await decode.leases.close_lease(0)).segments == 0
        with pytest.raises(UnknownLease):
            await decode.leases.close_lease(0)
        with pytest.raises(InternalError):
            decode.leases.open_lease(LeaseGrant(0, blocks, 0, TOKENS))
        await decode.leases.open_lease(LeaseGrant(1, blocks, 0, TOKENS))
        await decode.leases.close_lease(1)


async def test_a_peer_with_other_links_is_refused() -> None:
    async with linked(MLA, 2, 2, transport="loopback") as nodes:
        with pytest.raises(PeerRefused):
            await nodes.decode.transfer.connect(SENDER, {RankPair(0, 0): b""})


async def test_a_send_to_several_ranks_can_be_taken_back() -> None:
    async with linked(GQA, 2, 2, transport="loopback") as nodes:
        prefill, decode = nodes.prefill.transfer, nodes.decode.transfer
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        blocks_d = scattered_blocks(nodes.decode.caches[0], TOKENS, 2)
        await decode.leases.open_lease(LeaseGrant(0, blocks_d, 0, TOKENS))
        sending = asyncio.create_task(prefill.send(job(0, blocks, 0, TOKENS, peer=PEER, sender_number=SENDER)))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        await prefill.quiet(PEER, 0)
        await decode.leases.close_lease(0)
        # What follows is not disturbed.
        expected = plant_whole(GQA, nodes.prefill, blocks)
        nodes.decode.events.filled.clear()
        await decode.leases.open_lease(LeaseGrant(1, blocks_d, 0, TOKENS))
        await prefill.send(job(1, blocks, 0, TOKENS, peer=PEER, sender_number=SENDER))
        await eventually(lambda: len(nodes.decode.events.filled) == 1)
        held = [tokens_of(cache, blocks_d, TOKENS) for cache in nodes.decode.caches]
        assert torch.equal(torch.cat(held, dim=3), expected)


async def test_a_rank_that_is_gone_holds_nothing_and_takes_nothing() -> None:
    async with linked(GQA, 1, 2, transport="loopback") as nodes:
        decode = nodes.decode.transfer
        blocks = scattered_blocks(nodes.decode.caches[0], TOKENS, 2)
        await decode.leases.open_lease(LeaseGrant(0, blocks, 0, TOKENS))
        (follower,) = nodes.decode.followers
        follower.cancel()
        await asyncio.wait([follower])
        await eventually(lambda: decode.stuck(after_s=60) != "")
        with pytest.raises(Draining):
            await decode.leases.open_lease(LeaseGrant(1, blocks, 0, TOKENS))
        for lease in (0, 1):
            assert (await decode.leases.close_lease(lease)).bytes == 0
        assert await decode.disconnect(SENDER) == ()
        nodes.decode.followers.clear()
