"""Messages that must not reach a cache: each is refused, counted and reported, and not one byte is written.

A bare transport plays the sender, so that every message can be made wrong on purpose.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.wire.gather_scatter import gather_to_wire
from kvtransfer.leases import LeaseGrant
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import WARM_UP, Segment, Tag
from kvtransfer.transfer import KVTransfer
from kvtransfer.transports.table import open_transport
from kvtransfer.transports.transport import Transport
from tests.conformance.kv import (
    DECODE_INCARNATION,
    GQA,
    LATE,
    PEER,
    SENDER,
    TRANSPORT_NAMES,
    NodeEvents,
    as_bytes,
    eventually,
    make_cache,
    make_transfer,
    plant,
    scattered_blocks,
    sealed,
    tokens_of,
)

LEASE = 4
TOKENS = 6


@dataclass(frozen=True)
class Forger:
    """A sender that sends arbitrary messages for a test, and its decode node."""

    transport: Transport
    decode: KVTransfer
    cache: PagedKVCache
    blocks: tuple[int, ...]
    source: PagedKVCache
    source_blocks: tuple[int, ...]
    events: NodeEvents
    peer: int = PEER

    def right(self, number: int, start: int, stop: int) -> tuple[Segment, Tensor]:
        """A correct segment with its digest, and its payload."""
        size = (stop - start) * GQA.bytes_per_token
        payload = torch.empty(size, dtype=torch.uint8)
        gather_to_wire(
            self.source,
            block_ids=torch.tensor(self.source_blocks),
            token_start=start,
            token_stop=stop,
            layers=range(GQA.num_layers),
            heads=range(GQA.num_kv_heads),
            out=payload,
        )
        segment = Segment(DECODE_INCARNATION, LEASE, number, 0, GQA.num_layers, start, stop, 0, GQA.num_kv_heads, size)
        return sealed(segment, payload), payload

    async def send(self, segment: Segment, payload: Tensor, tag: Tag | None = None) -> None:
        tag = tag or Tag(SENDER, segment.lease, segment.number)
        await self.send_raw(tag, payload.numpy().tobytes() + segment.encode(segment.digest))

    async def send_raw(self, tag: Tag, message: bytes) -> None:
        request = self.transport.send(self.peer, tag.pack(), torch.frombuffer(bytearray(message), dtype=torch.uint8))

        def sent() -> bool:
            self.transport.progress()
            return request.done

        await eventually(sent)
        assert request.failure() is None

    async def assert_refused(self, refusal: SegmentRefusal) -> None:
        await eventually(lambda: len(self.events.refused) == 1)
        (refused,) = self.events.refused
        assert refused.refusal is refusal
        assert str(refusal) in str(refused.error)
        counters = self.decode.counters()
        assert (counters.refused, counters.late) == (1, 0)
        assert counters.refusals == {refusal: 1}

    def assert_untouched(self) -> None:
        assert not as_bytes(self.cache.view).any()


async def introduce(
    transport: Transport, decode: KVTransfer, *, peer: int = PEER, number: int = SENDER, is_sealed: bool = False
) -> None:
    address = transport.listen(peer)
    transport.connect(peer, await decode.listen(number))
    await decode.connect(number, address, sealed=is_sealed)


@pytest.fixture(params=TRANSPORT_NAMES)
async def forger(request: pytest.FixtureRequest) -> AsyncIterator[Forger]:
    cache, source = make_cache(GQA, KVCacheLayout.HND, 4), make_cache(GQA, KVCacheLayout.NHD, 8)
    blocks, source_blocks = scattered_blocks(cache, TOKENS, 1), scattered_blocks(source, TOKENS, 2)
    plant(source, source_blocks, TOKENS)
    events = NodeEvents()
    transport = open_transport(request.param.removesuffix(LATE))
    async with make_transfer(cache, events, transport=request.param, segment_bytes=4096) as decode:
        await introduce(transport, decode)
        decode.open_lease(LeaseGrant(LEASE, blocks, 0, TOKENS))
        yield Forger(transport, decode, cache, blocks, source, source_blocks, events)
        transport.close()


async def test_a_right_message_is_taken(forger: Forger) -> None:
    await forger.send(*forger.right(0, 0, TOKENS))
    await eventually(lambda: len(forger.events.filled) == 1)
    assert torch.equal(
        tokens_of(forger.cache, forger.blocks, TOKENS), tokens_of(forger.source, forger.source_blocks, TOKENS)
    )


@pytest.mark.parametrize("position", [0, 77, -1])
async def test_a_flipped_bit_is_refused(forger: Forger, position: int) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    payload[position] ^= 0x10
    await forger.send(segment, payload)
    await forger.assert_refused(SegmentRefusal.DIGEST)
    forger.assert_untouched()


async def test_swapped_payloads_are_refused(forger: Forger) -> None:
    (one, first), (other, second) = forger.right(0, 0, 3), forger.right(1, 3, 6)
    await forger.send(one, second)
    await forger.send(other, first)
    await eventually(lambda: len(forger.events.refused) == 2)
    assert forger.decode.counters().refusals == {SegmentRefusal.DIGEST: 2}
    forger.assert_untouched()


async def test_ranges_that_change_on_the_way_are_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, 3)
    await forger.send(replace(segment, token_start=3, token_stop=6), payload)
    await forger.assert_refused(SegmentRefusal.DIGEST)
    forger.assert_untouched()


async def test_a_segment_without_a_digest_is_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    await forger.send(replace(segment, digest=0), payload)
    await forger.assert_refused(SegmentRefusal.DIGEST)
    forger.assert_untouched()


async def test_a_lease_that_was_never_given_is_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    await forger.send(segment, payload, Tag(SENDER, LEASE + 1, 0))
    await forger.assert_refused(SegmentRefusal.UNKNOWN_LEASE)
    forger.assert_untouched()


async def test_a_tag_with_another_lease_than_the_trailer_is_refused(forger: Forger) -> None:
    forger.decode.open_lease(LeaseGrant(LEASE + 1, forger.blocks, 0, TOKENS))
    segment, payload = forger.right(0, 0, TOKENS)
    await forger.send(segment, payload, Tag(SENDER, LEASE + 1, 0))
    await forger.assert_refused(SegmentRefusal.MISLABELLED)
    forger.assert_untouched()


async def test_a_segment_for_another_incarnation_is_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    await forger.send(sealed(replace(segment, incarnation=DECODE_INCARNATION - 1), payload), payload)
    await forger.assert_refused(SegmentRefusal.STALE_INCARNATION)
    forger.assert_untouched()


async def test_more_tokens_than_the_lease_has_are_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    wrong = replace(segment, token_start=1, token_stop=TOKENS + 1)
    await forger.send(sealed(wrong, payload), payload)
    await forger.assert_refused(SegmentRefusal.OUT_OF_RANGE)
    forger.assert_untouched()


async def test_a_payload_of_another_size_than_its_ranges_is_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    await forger.send(sealed(replace(segment, token_stop=TOKENS - 1), payload), payload)
    await forger.assert_refused(SegmentRefusal.WRONG_SIZE)
    forger.assert_untouched()


async def test_an_unknown_sender_number_is_refused(forger: Forger) -> None:
    segment, payload = forger.right(0, 0, TOKENS)
    await forger.send(segment, payload, Tag(SENDER + 1, LEASE, 0))
    await forger.assert_refused(SegmentRefusal.UNKNOWN_SENDER)
    forger.assert_untouched()


@pytest.mark.parametrize("size", [1, 70, 71, 500])
async def test_a_message_without_a_trailer_is_refused(forger: Forger, size: int) -> None:
    await forger.send_raw(Tag(SENDER, LEASE, 0), b"\xff" * size)
    await forger.assert_refused(SegmentRefusal.MALFORMED)
    forger.assert_untouched()


@pytest.mark.parametrize("size", [5_000, 3 << 20])
async def test_a_message_larger_than_a_slot_is_refused(forger: Forger, size: int) -> None:
    await forger.send_raw(Tag(SENDER, LEASE, 0), bytes(size))
    await forger.assert_refused(SegmentRefusal.TOO_LARGE)
    forger.assert_untouched()


async def test_a_duplicate_is_refused(forger: Forger) -> None:
    await forger.send(*forger.right(0, 0, 3))
    segment, payload = forger.right(0, 3, 6)
    await forger.send(segment, payload)
    await forger.assert_refused(SegmentRefusal.DUPLICATE)
    assert not tokens_of(forger.cache, forger.blocks, TOKENS)[:, :, 3:].any()


async def test_tokens_that_have_come_before(forger: Forger) -> None:
    await forger.send(*forger.right(0, 0, 3))
    segment, _ = forger.right(1, 2, 6)
    other = torch.full((segment.payload_bytes,), 5, dtype=torch.uint8)
    await forger.send(sealed(segment, other), other)
    await forger.assert_refused(SegmentRefusal.OVERLAP)
    await eventually(
        lambda: forger.decode.counters().peers[SENDER].segments_total == 1
    )  # the first may be written later
    expected = tokens_of(forger.source, forger.source_blocks, TOKENS)
    assert torch.equal(tokens_of(forger.cache, forger.blocks, TOKENS)[:, :, :3], expected[:, :, :3])
    assert not tokens_of(forger.cache, forger.blocks, TOKENS)[:, :, 3:].any()


async def test_a_segment_after_the_lease_was_closed_is_late_and_no_alarm(forger: Forger) -> None:
    await forger.decode.close_lease(LEASE)
    await forger.send(*forger.right(0, 0, TOKENS))
    await eventually(lambda: forger.decode.counters().late == 1)
    assert forger.decode.counters().refused == 0
    assert forger.events.refused == []
    forger.assert_untouched()


async def test_a_second_sender_for_a_bound_lease_is_refused(forger: Forger) -> None:
    second = replace(forger, peer=PEER + 1)
    await introduce(forger.transport, forger.decode, peer=PEER + 1, number=SENDER + 1)
    await forger.send(*forger.right(0, 0, 3))
    # Nothing orders messages of two links: the sender whose segment arrives first gets the lease.
    await eventually(lambda: forger.decode.counters().peers[SENDER].segments_total == 1)
    segment, payload = forger.right(1, 3, 6)
    await second.send(segment, payload, Tag(SENDER + 1, LEASE, 1))
    await forger.assert_refused(SegmentRefusal.FOREIGN_SENDER)
    assert forger.events.refused[-1].lease is None, "it costs the lease of the first sender nothing"
    assert not tokens_of(forger.cache, forger.blocks, TOKENS)[:, :, 3:].any()


async def test_a_sender_of_another_incarnation_than_the_lease_is_for(forger: Forger) -> None:
    forger.decode.open_lease(LeaseGrant(LEASE + 1, forger.blocks, 0, TOKENS, prefill_incarnation=5))
    segment, payload = forger.right(0, 0, TOKENS)
    named = replace(segment, lease=LEASE + 1)
    await forger.send(sealed(named, payload), payload, Tag(SENDER, LEASE + 1, 0))
    await forger.assert_refused(SegmentRefusal.FOREIGN_SENDER)
    assert forger.events.refused[-1].lease is None
    forger.assert_untouched()


async def test_a_refused_warm_up_message_costs_no_lease_whatever_number_it_has(forger: Forger) -> None:
    await forger.send_raw(Tag(SENDER, LEASE, WARM_UP), bytes(5_000))
    await forger.assert_refused(SegmentRefusal.TOO_LARGE)
    assert forger.events.refused[-1].lease is None


@pytest.mark.parametrize("high_bits", [0, 1 << 36, 5 << 40])
async def test_a_lease_has_more_bits_than_a_tag_and_all_of_them_count(forger: Forger, high_bits: int) -> None:
    number = LEASE + 1 + (1 << 36)
    forger.decode.open_lease(LeaseGrant(number, forger.blocks, 0, TOKENS))
    segment, payload = forger.right(0, 0, TOKENS)
    named = replace(segment, lease=LEASE + 1 + high_bits)
    await forger.send(sealed(named, payload), payload, Tag(SENDER, LEASE + 1, 0))
    if named.lease == number:
        await eventually(lambda: [totals.number for totals in forger.events.filled] == [number])
    else:
        await forger.assert_refused(SegmentRefusal.MISLABELLED)
        forger.assert_untouched()


async def test_with_digests_off_only_the_digest_is_not_checked(forger: Forger) -> None:
    async with make_transfer(
        forger.cache, forger.events, transport="loopback", digests=False, segment_bytes=4096
    ) as trusting:
        transport = open_transport("loopback")
        await introduce(transport, trusting)
        trusting.open_lease(LeaseGrant(LEASE, forger.blocks, 0, TOKENS))
        pair = replace(forger, transport=transport, decode=trusting)
        segment, payload = forger.right(0, 0, TOKENS)
        await pair.send(replace(segment, digest=0, incarnation=1), payload)
        await pair.assert_refused(SegmentRefusal.STALE_INCARNATION)
        await pair.send(replace(segment, digest=0, number=1), payload)
        await eventually(lambda: len(forger.events.filled) == 1)
        transport.close()
