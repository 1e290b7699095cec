"""Segments that are sealed with their lease's key: without the key, a sender can neither fill a lease nor fail it.

A bare transport plays a forger who knows everything but the key: the link, the sender's number, the lease's number, and
the KV.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from baton.core.errors import UnknownLease
from baton.kvcache.layout import KVCacheLayout
from kvtransfer.leases import LeaseGrant
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import DIGEST_BYTES, DIGEST_OFFSET, TRAILER_BYTES, Segment, Tag
from kvtransfer.transports.table import open_transport
from tests.conformance.kv import (
    GQA,
    LATE,
    SENDER,
    NodeEvents,
    eventually,
    job,
    linked,
    make_cache,
    make_transfer,
    plant,
    scattered_blocks,
    sealed,
    tokens_of,
)
from tests.conformance.test_kv_refusals import LEASE, TOKENS, Forger, introduce

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
DAMAGED = 40


@pytest.fixture(params=["loopback", "ucx", "loopback-late"])
async def forger(request: pytest.FixtureRequest) -> AsyncIterator[Forger]:
    cache, source = make_cache(GQA, KVCacheLayout.HND, 4), make_cache(GQA, KVCacheLayout.NHD, 8)
    blocks, source_blocks = scattered_blocks(cache, TOKENS, 1), scattered_blocks(source, TOKENS, 2)
    plant(source, source_blocks, TOKENS)
    events = NodeEvents()
    transport = open_transport(request.param.removesuffix(LATE))
    async with make_transfer(cache, events, transport=request.param, segment_bytes=4096) as decode:
        await introduce(transport, decode, is_sealed=True)
        decode.open_lease(LeaseGrant(LEASE, blocks, 0, TOKENS, key=KEY))
        yield Forger(transport, decode, cache, blocks, source, source_blocks, events)
        transport.close()


def whole(forger: Forger, key: bytes) -> tuple[Segment, Tensor]:
    segment, payload = forger.right(0, 0, TOKENS)
    return sealed(replace(segment, key=key), payload), payload


async def assert_refused_and_harmless(forger: Forger, refusal: SegmentRefusal, count: int = 1) -> None:
    """It is counted and costs no lease; the lease's own sender still fills it, under the same number."""
    await eventually(lambda: len(forger.events.refused) == count)
    assert {refused.refusal for refused in forger.events.refused} == {refusal}
    assert {refused.lease for refused in forger.events.refused} == {None}
    forger.assert_untouched()
    await forger.send(*whole(forger, KEY))
    await assert_filled(forger)
    assert forger.decode.counters().refusals == {refusal: count}


async def assert_filled(forger: Forger) -> None:
    await eventually(lambda: len(forger.events.filled) == 1)
    source = tokens_of(forger.source, forger.source_blocks, TOKENS)
    assert torch.equal(tokens_of(forger.cache, forger.blocks, TOKENS), source)


async def test_a_segment_sealed_with_the_leases_key_is_taken(forger: Forger) -> None:
    await forger.send(*whole(forger, KEY))
    await assert_filled(forger)


@pytest.mark.parametrize("key", [OTHER_KEY, KEY[:-1], b""], ids=["another's", "shorter", "none"])
async def test_a_segment_without_the_leases_key_is_refused_and_costs_no_lease(forger: Forger, key: bytes) -> None:
    await forger.send(*whole(forger, key))
    await assert_refused_and_harmless(forger, SegmentRefusal.SEAL)


async def test_another_leases_key_never_opens_a_lease(forger: Forger) -> None:
    forger.decode.open_lease(LeaseGrant(LEASE + 1, forger.blocks, 0, TOKENS, key=OTHER_KEY))
    await forger.send(*whole(forger, OTHER_KEY))
    await assert_refused_and_harmless(forger, SegmentRefusal.SEAL)


async def test_noise_under_a_leases_tag_is_refused_and_costs_no_lease(forger: Forger) -> None:
    await forger.send_raw(Tag(SENDER, LEASE, 0), Random(1).randbytes(500))
    await assert_refused_and_harmless(forger, SegmentRefusal.SEAL)


@pytest.mark.parametrize(("size", "refusal"), [(7, SegmentRefusal.MALFORMED), (5000, SegmentRefusal.TOO_LARGE)])
async def test_messages_of_impossible_sizes_cost_no_lease(forger: Forger, size: int, refusal: SegmentRefusal) -> None:
    await forger.send_raw(Tag(SENDER, LEASE, 0), bytes(size))
    await assert_refused_and_harmless(forger, refusal)


async def test_no_changed_byte_of_a_trailer_is_accepted_and_none_of_its_head_costs_the_lease(forger: Forger) -> None:
    segment, payload = whole(forger, KEY)
    of_digest = range(DIGEST_OFFSET, DIGEST_OFFSET + DIGEST_BYTES)
    positions = [position for position in range(TRAILER_BYTES) if position not in of_digest]
    for position in positions:
        trailer = bytearray(segment.encode(segment.digest))
        trailer[position] ^= 1 << position % 8
        await forger.send_raw(Tag(SENDER, LEASE, 0), payload.numpy().tobytes() + bytes(trailer))
    await assert_refused_and_harmless(forger, SegmentRefusal.SEAL, count=len(positions))


async def test_no_changed_byte_of_a_payload_or_its_digest_is_accepted(forger: Forger) -> None:
    """The seal is right, so the damage is its sender's, and the lease is given up."""
    segment, payload = whole(forger, KEY)
    message = payload.numpy().tobytes() + segment.encode(segment.digest)
    of_digest = range(payload.numel() + DIGEST_OFFSET, payload.numel() + DIGEST_OFFSET + DIGEST_BYTES)
    positions = [*of_digest, *Random(2).sample(range(payload.numel()), DAMAGED)]
    for position in positions:
        damaged = bytearray(message)
        damaged[position] ^= 1 << position % 8
        await forger.send_raw(Tag(SENDER, LEASE, 0), bytes(damaged))
    await eventually(lambda: len(forger.events.refused) == len(positions))
    assert {refused.refusal for refused in forger.events.refused} == {SegmentRefusal.DIGEST}
    assert {refused.lease for refused in forger.events.refused} == {LEASE}
    forger.assert_untouched()


async def test_a_repeated_segment_costs_no_lease(forger: Forger) -> None:
    segment, payload = whole(forger, KEY)
    await forger.send(segment, payload)
    await assert_filled(forger)
    await forger.send(segment, payload)
    await eventually(lambda: len(forger.events.refused) == 1)
    assert [(refused.refusal, refused.lease) for refused in forger.events.refused] == [(SegmentRefusal.DUPLICATE, None)]


@pytest.mark.parametrize("transport", ["loopback", "ucx"])
@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "older peer"])
async def test_two_nodes_fill_a_lease_that_has_a_key(transport: str, is_sealed: bool) -> None:
    """Also if one of them is too old for seals: then no segment has one."""
    source, target = make_cache(GQA, KVCacheLayout.HND, 4), make_cache(GQA, KVCacheLayout.NHD, 8)
    ours, theirs = scattered_blocks(source, TOKENS, 1), scattered_blocks(target, TOKENS, 2)
    plant(source, ours, TOKENS)
    async with linked(source, target, transport=transport, is_sealed=is_sealed) as pair:
        await pair.decode.open_lease(LeaseGrant(LEASE, theirs, 0, TOKENS, key=KEY))
        sent = await pair.prefill.send(replace(job(LEASE, ours, 0, TOKENS), key=KEY))
        await eventually(lambda: len(pair.events.filled) == 1)
    assert len(sent) > 1
    assert torch.equal(tokens_of(source, ours, TOKENS), tokens_of(target, theirs, TOKENS))
    assert not pair.events.refused


async def test_a_sender_without_the_key_that_its_peer_wants_fails_at_once() -> None:
    source, target = make_cache(GQA, KVCacheLayout.HND, 4), make_cache(GQA, KVCacheLayout.HND, 4)
    blocks = scattered_blocks(source, TOKENS, 1)
    async with linked(source, target, transport="loopback", is_sealed=True) as pair:
        with pytest.raises(UnknownLease, match="the ticket's key has 0 bytes"):
            await pair.prefill.send(job(LEASE, blocks, 0, TOKENS))
