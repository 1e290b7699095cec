"""SubscribeKvEvents: presents the prefix caches of all nodes as the KV events of one vLLM engine.

A subscriber gets an empty snapshot, then all cached blocks of the nodes, then changes. The gateway keeps no events: a
subscriber that returns gets everything again, with sequence numbers above its last one.

Subscribers count each tier by itself: a block that moves is stored in its new tier, then removed from the old one.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import NamedTuple

import grpc
from smg_grpc_proto.generated import common_pb2 as smg

from baton.core.block_keys import number_of, root_digest
from baton.core.errors import InvalidRequest
from baton.gateway.fleet.cache_union import CacheUnion, Tier, UnionChanges
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.node_report import has_files
from baton.gateway.request.node_clients import NodeClient
from baton.protos.internal.v1 import node_pb2

log = logging.getLogger("baton")

_LOOK_S = 0.5  # interval at which nodes are added and dropped
_QUEUE_MESSAGES = 64  # a full queue makes the nodes' streams wait for a slow subscriber
_AFTER_MAX = 2**63
_TIERS = {
    Tier.DEVICE: smg.KV_CACHE_TIER_DEVICE,
    Tier.HOST: smg.KV_CACHE_TIER_HOST,
    Tier.DISK: smg.KV_CACHE_TIER_DISK,
    Tier.EXTERNAL: smg.KV_CACHE_TIER_EXTERNAL,
}


class _Kind(NamedTuple):
    """Identifies how a node names blocks. Nodes of equal kind give equal blocks equal names."""

    identity: str
    block_size: int


class KvEvents:
    """Streams the nodes' cache changes to subscribers.

    Args:
        clients: returns the connections to all nodes, by address.
    """

    def __init__(self, fleet: Fleet, clients: Callable[[], Mapping[str, NodeClient]]) -> None:
        self._fleet = fleet
        self._clients = clients

    async def subscribe(self, after: int) -> AsyncGenerator[smg.KvEventBatch, None]:
        """Yields batches, numbered from `after` + 1, until the generator is closed.

        Raises:
            InvalidRequest: the numbers would not fit into 64 bits.
        """
        if after > _AFTER_MAX:
            field, allowed = "start_sequence_number", (f"0 to {_AFTER_MAX}",)
            raise InvalidRequest(f"{field} is {after}", field=field, value=after, allowed=allowed)
        sequence = after + 1
        cleared = smg.KvCacheEvent(cleared=smg.KvCacheCleared())
        yield smg.KvEventBatch(
            sequence_number=sequence,
            timestamp=time.time(),
            events=[cleared],
            snapshot=smg.KvSnapshotChunk(index=0, count=1, blocks=0),
        )
        subscription = _Subscription(self._fleet, self._clients)
        try:
            async for events in subscription.events():
                sequence += 1
                yield smg.KvEventBatch(sequence_number=sequence, timestamp=time.time(), events=events)
        finally:
            subscription.close()


class _Subscription:
    def __init__(self, fleet: Fleet, clients: Callable[[], Mapping[str, NodeClient]]) -> None:
        self._fleet = fleet
        self._clients = clients
        self._queue: asyncio.Queue[tuple[str, node_pb2.WatchCacheResponse]] = asyncio.Queue(_QUEUE_MESSAGES)
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._below: dict[str, Tier] = {}  # of each node's blocks that are not in host memory either

    async def events(self) -> AsyncIterator[list[smg.KvCacheEvent]]:
        kind = await self._kind()
        union = CacheUnion(number_of(root_digest(kind.identity, "")), kind.block_size)
        look_at_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + _LOOK_S
                for address in self._follow_fleet(kind):
                    if removed := union.forget(address):
                        yield _to_events(UnionChanges([], removed), kind.block_size)
            try:
                address, message = await asyncio.wait_for(self._queue.get(), look_at_s - now_s)
            except TimeoutError:
                continue
            if address not in self._streams:
                continue
            changes = union.take(address, message, below=self._below[address])
            if events := _to_events(changes, kind.block_size):
                yield events

    def close(self) -> None:
        for stream in self._streams.values():
            stream.cancel()

    async def _kind(self) -> _Kind:
        """Waits for a reachable decode node, and returns its kind; `GetServerInfo` reports its block size too."""
        while True:
            for node in self._fleet.decodes.values():
                if node.reachable and node.cache_kind[0]:
                    return _Kind(*node.cache_kind)
            await asyncio.sleep(_LOOK_S)

    def _follow_fleet(self, kind: _Kind) -> list[str]:
        """Opens streams to new nodes. Returns the addresses of nodes whose streams have ended."""
        nodes = {node.address: node for node in self._fleet.nodes()}
        ended = [
            address
            for address, stream in self._streams.items()
            if stream.done() or not _usable(nodes.get(address), kind)
        ]
        for address in ended:
            self._streams.pop(address).cancel()
        clients = self._clients()
        for address, node in nodes.items():
            client = clients.get(address)
            if address not in self._streams and client is not None and address not in ended and _usable(node, kind):
                # Where a node has files and a shared store, entries are looked for in files first.
                self._below[address] = Tier.DISK if has_files(node.status) else Tier.EXTERNAL
                self._streams[address] = asyncio.create_task(self._receive(address, client), name="kv-events")
        return ended

    async def _receive(self, address: str, client: NodeClient) -> None:
        call = client.watch.cache_changes(node_pb2.WatchCacheRequest(with_tokens=True))
        try:
            async for message in call:
                await self._queue.put((address, message))
        except grpc.aio.AioRpcError:
            return  # `_follow_fleet` tries again if the node is reachable
        except Exception:
            log.exception("%s: cannot stream prefix-cache changes to a KV event subscriber; retrying", address)
        finally:
            call.cancel()


def _usable(node: FleetNode | None, kind: _Kind) -> bool:
    return node is not None and node.reachable and node.cache_kind == kind


def _to_events(changes: UnionChanges, block_size: int) -> list[smg.KvCacheEvent]:
    events = []
    # Subscribers that look at no tier must hear last that a block that has moved is there.
    for tier in Tier:
        if hashes := [_signed(block) for its_tier, block in changes.removed if its_tier is tier]:
            removed = smg.KvBlocksRemoved(block_hashes=hashes, tier=_TIERS[tier], cache_level=_cache_level(tier))
            events.append(smg.KvCacheEvent(removed=removed))
    for run in changes.stored:
        blocks = [
            smg.KvBlock(
                block_hash=_signed(block),
                token_ids=array("i", tokens),
                block_size=block_size,
                cache_level=_cache_level(run.tier),
            )
            for block, tokens in run.blocks
        ]
        parent = None if run.parent is None else _signed(run.parent)
        stored = smg.KvBlocksStored(blocks=blocks, parent_block_hash=parent, tier=_TIERS[run.tier])
        events.append(smg.KvCacheEvent(stored=stored))
    for event_id, event in enumerate(events, 1):
        event.event_id = event_id
    return events


def _cache_level(tier: Tier) -> int | None:
    """The tier as subscribers of before the field `tier` read it, where none means the device."""
    return tier.value or None


def _signed(block: int) -> int:
    """Returns the int64 with the same bits."""
    return block - (1 << 64) if block >= 1 << 63 else block
