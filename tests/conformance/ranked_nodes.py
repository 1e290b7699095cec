"""Nodes of several ranks in one process, paired; their transfers, and the channels between ranks, are real."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec
from baton.node.ranks.remote import RemoteTransfer
from baton.node.ranks.serving import TransferServer
from kvtransfer.flows import Flow, RankPair, heads_of, part_flows
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.rank_transfer import OnFilled, OnRefused
from kvtransfer.ranked import MakeTransfer, RankedTransfer
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import DECODE_INCARNATION, PREFILL_INCARNATION, NodeEvents, eventually, job, make_cache

SEGMENT_BYTES = 900
# As the receiver draws them for the sender's ranks, and as the sender numbers the receiver's.
SENDER, PEER = 7, 64


def held_by(spec: KVCacheSpec, rank: int, ranks: int) -> tuple[range, ...]:
    """The heads of each part that a rank holds."""
    return tuple(heads_of(rank, ranks=ranks, num_kv_heads=part.num_kv_heads) for part in spec.parts)


def of_rank(spec: KVCacheSpec, held: Sequence[range]) -> KVCacheSpec:
    """The spec of a rank's cache."""
    own, *others = (
        replace(part, num_kv_heads=len(heads), index=None, draft=None, state=None)
        for part, heads in zip(spec.parts, held, strict=True)
    )
    index = None if spec.index is None else others.pop(0)
    state = None if spec.state is None else others.pop(0)
    return replace(own, index=index, state=state, draft=None if spec.draft is None else others.pop())


@dataclass(frozen=True)
class RankedNode:
    """A node of several ranks, in one process.

    Attributes:
        followers: the ranks above 0.
    """

    transfer: RankedTransfer
    caches: list[PagedKVCache]
    events: NodeEvents
    followers: list[asyncio.Task[None]]


@asynccontextmanager
async def ranked_node(
    spec: KVCacheSpec,
    ranks: int,
    layout: KVCacheLayout,
    block_size: int,
    *,
    transport: str,
    incarnation: int,
    host_cache_bytes: int = 0,
    num_tokens: int = 64,
) -> AsyncIterator[RankedNode]:
    heads = [held_by(spec, rank, ranks) for rank in range(ranks)]
    caches = [make_cache(of_rank(spec, held), layout, block_size, num_tokens) for held in heads]

    def make(rank: int, of_incarnation: int, on_filled: OnFilled, on_refused: OnRefused) -> KVTransfer:
        settings = TransferSettings(
            incarnation=of_incarnation,
            transport=transport,
            peers_are_known=True,
            segment_bytes=SEGMENT_BYTES,
            staging_slots=3,
            digests=True,
            heads=heads[rank],
            host_cache_bytes=host_cache_bytes,
        )
        return KVTransfer(caches[rank], settings, on_filled=on_filled, on_refused=on_refused)

    async def follow(rank: int, calls: socket.socket) -> None:
        with suppress(EOFError):
            await TransferServer(rank, partial(make, rank)).serve(calls)

    events = NodeEvents()
    makers: list[MakeTransfer] = [partial(make, 0, incarnation)]
    followers = []
    for rank in range(1, ranks):
        ours, theirs = socket.socketpair()
        makers.append(partial(RemoteTransfer, rank, ours, incarnation))
        followers.append(asyncio.create_task(follow(rank, theirs)))
    transfer = RankedTransfer(makers, message_bytes=SEGMENT_BYTES + TRAILER_BYTES)
    transfer.leases.deliver_to(events.filled.append, events.refused.append)
    async with transfer:
        yield RankedNode(transfer, caches, events, followers)
    await asyncio.gather(*followers)


@dataclass(frozen=True)
class Nodes:
    prefill: RankedNode
    decode: RankedNode
    links: dict[RankPair, tuple[Flow, ...]]


@asynccontextmanager
async def linked(
    spec: KVCacheSpec,
    senders: int,
    receivers: int,
    *,
    transport: str,
    layouts: tuple[KVCacheLayout, KVCacheLayout] = (KVCacheLayout.NHD, KVCacheLayout.NHD),
    block_sizes: tuple[int, int] = (8, 4),
    whole_requests: bool = False,
) -> AsyncIterator[Nodes]:
    """Two nodes, paired as a prefill and a decode node are.

    Args:
        whole_requests: each of the sender's ranks has requests of its own.
    """
    links = dict(part_flows(spec, senders=senders, receivers=receivers, whole_requests=whole_requests))
    begin = partial(ranked_node, spec, transport=transport)
    async with (
        begin(senders, layouts[0], block_sizes[0], incarnation=PREFILL_INCARNATION) as prefill,
        begin(receivers, layouts[1], block_sizes[1], incarnation=DECODE_INCARNATION) as decode,
    ):
        theirs = await decode.transfer.listen(SENDER, links, sends=False)
        ours = await prefill.transfer.listen(PEER, links, sends=True)
        await decode.transfer.connect(SENDER, ours)
        await prefill.transfer.connect(PEER, theirs, message_bytes=decode.transfer.message_bytes)
        yield Nodes(prefill, decode, links)


async def fill(
    nodes: Nodes,
    blocks_p: tuple[int, ...],
    blocks_d: tuple[int, ...],
    *cuts: int,
    slots: tuple[int, int] = (-1, -1),
    owners: tuple[int | None, int | None] = (None, None),
) -> LeaseTotals:
    """One lease over [cuts[0], cuts[-1]), sent in the chunks between the cuts, the last with the state in these slots
    of both, between the ranks that own the request on both; its totals."""
    number = len(nodes.decode.events.filled)
    grant = LeaseGrant(number, blocks_d, cuts[0], cuts[-1], state_slot=slots[1], owner=owners[1])
    await nodes.decode.transfer.leases.open_lease(grant)
    first, sent_bytes = 0, 0
    for start, stop in pairwise(cuts):
        sent = await nodes.prefill.transfer.send(
            job(
                number,
                blocks_p,
                start,
                stop,
                resume_at=cuts[-1],
                first_segment=first,
                peer=PEER,
                sender_number=SENDER,
                state_slot=slots[0] if stop == cuts[-1] else -1,
                owner=owners[0],
                owner_there=owners[1],
            )
        )
        first = 1 + max(segment.number for segment in sent)
        sent_bytes += sum(segment.payload_bytes for segment in sent)
    await eventually(lambda: len(nodes.decode.events.filled) > number)
    filled = nodes.decode.events.filled[number]
    assert filled.bytes == sent_bytes
    return filled
