"""Caches with planted values, and linked pairs of KVTransfer, for the conformance tests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.wire.digest import digest
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseTotals
from kvtransfer.movers.mover import MakeMover
from kvtransfer.movers.table import open_mover
from kvtransfer.records import RefusedSegment, SendJob
from kvtransfer.segments import Segment
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer
from kvtransfer.transports.table import TRANSPORTS
from tests.conformance.late import Script, late

GQA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
MLA = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=6, dtype="bfloat16")

PREFILL_INCARNATION = 0x1111
DECODE_INCARNATION = 0x2222
STATE_SLOTS = 5
# On D the peer is the sender number that it drew for P; on P it is P's own number for D.
SENDER = 7
PEER = 3
# Long enough for any machine: only a hanging test takes that long.
DEADLINE_S = 60.0
# Suffix of a transport's name: every operation on cache and staging happens some polls later, as on a GPU.
LATE = "-late"
TRANSPORT_NAMES = (*TRANSPORTS, "loopback" + LATE)


def make_cache(spec: KVCacheSpec, layout: KVCacheLayout, block_size: int, num_tokens: int = 64) -> PagedKVCache:
    slots = 0 if spec.state is None else STATE_SLOTS
    return PagedKVCache(spec, KVCacheShape(layout, block_size, 2 * num_tokens // block_size, slots))


def scattered_blocks(cache: PagedKVCache, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Blocks for that many tokens, in no order."""
    order = torch.randperm(cache.shape.num_blocks, generator=torch.Generator().manual_seed(seed))
    return tuple(order[: cache.shape.blocks_for(num_tokens)].tolist())


def tokens_of(cache: PagedKVCache, block_ids: tuple[int, ...], num_tokens: int) -> Tensor:
    """A request's KV as [L, K, T, H, C], read slot by slot: independent of gather and scatter."""
    size = cache.shape.block_size
    return torch.stack([cache.view[:, :, block_ids[token // size], token % size] for token in range(num_tokens)], dim=2)


def plant(cache: PagedKVCache, block_ids: tuple[int, ...], num_tokens: int) -> None:
    """Fills every (layer, k/v, token, head, channel) of a request with distinct bytes."""
    size = cache.shape.block_size
    layers, kv, _, _, heads, channels = cache.view.shape
    generator = torch.Generator().manual_seed(99)
    for token in range(num_tokens):
        values = torch.randn(layers, kv, heads, channels, generator=generator).to(cache.view.dtype)
        cache.view[:, :, block_ids[token // size], token % size] = values


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@dataclass
class NodeEvents:
    """What a node's callbacks received."""

    filled: list[LeaseTotals] = field(default_factory=list)
    refused: list[RefusedSegment] = field(default_factory=list)


async def eventually(holds: Callable[[], bool]) -> None:
    """Polls until something holds that another thread or process brings about."""
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.001)


def make_transfer(
    cache: PagedKVCache,
    events: NodeEvents,
    *,
    transport: str,
    incarnation: int = DECODE_INCARNATION,
    segment_bytes: int = 1000,
    staging_slots: int = 3,
    digests: bool = True,
    receive_bytes_per_s: float | None = None,
    make_mover: MakeMover = open_mover,
    clock: Callable[[], float] = time.monotonic,
    peers_are_known: bool = True,
) -> KVTransfer:
    if transport.endswith(LATE):
        make_mover = late(Script(seed=incarnation))
    settings = TransferSettings(
        incarnation=incarnation,
        transport=transport.removesuffix(LATE),
        segment_bytes=segment_bytes,
        staging_slots=staging_slots,
        digests=digests,
        receive_bytes_per_s=receive_bytes_per_s,
        peers_are_known=peers_are_known,
    )
    return KVTransfer(
        cache,
        settings,
        make_mover=make_mover,
        on_filled=events.filled.append,
        on_refused=events.refused.append,
        clock=clock,
    )


@dataclass(frozen=True)
class Pair:
    """A prefill node's and a decode node's transfer, connected."""

    prefill: KVTransfer
    decode: KVTransfer
    events: NodeEvents


@asynccontextmanager
async def linked(
    prefill: PagedKVCache,
    decode: PagedKVCache,
    *,
    transport: str,
    segment_bytes: int = 1000,
    conversion: KVConversion | None = None,
    is_sealed: bool = False,
) -> AsyncIterator[Pair]:
    events = NodeEvents()
    async with (
        make_transfer(
            prefill, NodeEvents(), transport=transport, incarnation=PREFILL_INCARNATION, segment_bytes=segment_bytes
        ) as sender,
        make_transfer(decode, events, transport=transport, segment_bytes=segment_bytes) as receiver,
    ):
        await connect(sender, receiver, conversion=conversion, is_sealed=is_sealed)
        yield Pair(sender, receiver, events)


async def connect(
    sender: KVTransfer,
    receiver: KVTransfer,
    *,
    number: int = SENDER,
    conversion: KVConversion | None = None,
    is_sealed: bool = False,
) -> None:
    """Introduces two nodes to each other, `number` being the receiver's for the sender."""
    sender_address, receiver_address = await sender.listen(PEER), await receiver.listen(number)
    await receiver.connect(number, sender_address, sealed=is_sealed)
    await sender.connect(
        PEER, receiver_address, message_bytes=receiver.message_bytes, conversion=conversion, sealed=is_sealed
    )


def sealed(segment: Segment, payload: Tensor) -> Segment:
    """The segment with its digest over that payload."""
    return replace(segment, digest=segment.digest_over(digest(payload)))


def job(
    lease: int,
    block_ids: tuple[int, ...],
    token_start: int,
    token_stop: int,
    *,
    resume_at: int | None = None,
    first_segment: int = 0,
    peer: int = PEER,
    sender_number: int = SENDER,
    state_slot: int = -1,
    owner: int | None = None,
    owner_there: int | None = None,
) -> SendJob:
    return SendJob(
        peer=peer,
        sender_number=sender_number,
        lease=lease,
        incarnation=DECODE_INCARNATION,
        first_segment=first_segment,
        token_start=token_start,
        token_stop=token_stop,
        resume_at=token_stop if resume_at is None else resume_at,
        block_ids=block_ids,
        state_slot=state_slot,
        owner=owner,
        owner_there=owner_there,
    )
