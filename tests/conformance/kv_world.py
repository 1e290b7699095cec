"""A receiver that can be put into any state, with a real lease table, coverage, ledger and staging pool.

A state is plain numbers: loading it takes microseconds, where copying the objects took milliseconds.
"""

from collections import deque
from functools import cache
from typing import Any, NamedTuple

import torch

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape
from kvtransfer.coverage import Coverage, _Claim
from kvtransfer.leases import LeaseGrant, LeaseTable, LeaseTotals, _Lease
from kvtransfer.ledger import Ledger, Peer
from kvtransfer.receiver import Receiver, _Reception
from kvtransfer.records import RefusedSegment
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.settings import TransferSettings
from kvtransfer.staging import Pools, Slot, StagingPool
from tests.conformance.kv_sides import JUNK, READING, SCATTERING, Entry, Side
from tests.conformance.kv_simulated import (
    INCARNATION,
    MESSAGE_BYTES,
    SPEC,
    Copy,
    Owner,
    Passing,
    Receive,
    Surroundings,
    make_message,
)

PEERS = (7, 8)
_TOTALS = LeaseTotals(0, 0, 0, 0.0)

# The attributes of the objects under test that a state has, and those that it omits because they never change here or
# because nothing depends on them: times, totals, counters.
KEPT: dict[type, set[str]] = {
    Receiver: {"_leases", "_blocks", "_closing", "_receptions", "_slots_held", "_parked"},
    _Reception: {"tag", "slot", "request", "reading", "segment", "scatter"},
    LeaseTable: {"_leases"},
    _Lease: {"grant", "coverage", "cells_missing", "group", "closing", "scattering", "seen"},
    Coverage: {"_claims"},
    StagingPool: {"_free", "_taken"},
    Ledger: {"peers"},
}
LEFT_OUT: dict[type, set[str]] = {
    Receiver: {
        "_mover", "_transport", "_ledger", "_pools", "_slot_bytes", "_digests", "_parts", "_on_filled",
        "_on_refused", "_on_entry", "_catch_up", "_clock", "_incarnation", "_limit", "warm_ups", "round_trips",
    },
    _Reception: {"peer", "pool", "num_bytes"},
    LeaseTable: {"_parts", "_incarnation", "_used"},
    _Lease: {"bytes", "segments", "first_s", "last_s"},
    Coverage: set(),
    StagingPool: {"slot_bytes", "slots", "members"},
    Ledger: {"refusals", "traffic", "converted", "segments_total", "bytes_total"},
}  # fmt: skip


class State(NamedTuple):
    """A state of the world as plain numbers.

    Attributes:
        parked: messages that wait for a slot, in their order: side and number.
        repeats: how many messages may still be sent twice.
    """

    sides: tuple[Side, ...]
    parked: tuple[tuple[int, int], ...]
    repeats: int


class World:
    """One lease for each peer, of segments of one token each; leases are numbered like sides."""

    def __init__(self, peers: int, *, segments: int, slots: int) -> None:
        self.segments = segments
        self.numbers = PEERS[:peers]
        self.peers = {number: Peer(number, SPEC.bytes_per_token, "simulated") for number in self.numbers}
        self.messages = [
            [make_message(side, peer, number, segments) for number in range(1, segments + 1)]
            for side, peer in enumerate(self.numbers)
        ]
        self.pool = StagingPool(slot_bytes=MESSAGE_BYTES, slots=slots, device=torch.device("cpu"))
        self.owners: dict[int, Owner] = {}
        self.surroundings = Surroundings(
            {slot.memory.data_ptr(): slot.index for slot in self.pool.members},
            {number: deque() for number in self.numbers},
            [None] * slots,
            self.owners,
        )
        self.ledger = Ledger()
        self.reported: list[RefusedSegment] = []
        self.filled: set[int] = set()
        self.blocks: list[tuple[int, ...]] = [(JUNK,) * segments for _ in self.numbers]
        self.sent = [0] * peers
        self.receiver = self._make_receiver()
        self.grants = [
            LeaseGrant(side, tuple(range(side * segments, (side + 1) * segments)), 0, segments) for side in range(peers)
        ]
        for grant in self.grants:
            self.receiver.open(grant)
        self.placed = dict(self.receiver._blocks)
        self.ledger.peers.update(self.peers)

    def _make_receiver(self) -> Receiver:
        # The operations of mover and transport that a receiver starts.
        surroundings: Any = self.surroundings
        pools = Pools(direct=lambda: self.pool, in_host=lambda: self.pool)
        pools.of(through_host=False)
        return Receiver(
            PagedKVCache(SPEC, KVCacheShape(KVCacheLayout.NHD, 1, len(self.numbers) * self.segments)),
            surroundings,
            surroundings,
            self.ledger,
            pools,
            TransferSettings(
                incarnation=INCARNATION,
                transport="simulated",
                segment_bytes=MESSAGE_BYTES - TRAILER_BYTES,
                staging_slots=self.pool.slots,
                digests=False,
            ),
            on_filled=self._on_filled,
            on_refused=self.reported.append,
            on_entry=surroundings.discard,
            catch_up=lambda: None,
            clock=lambda: 0.0,
        )

    def _on_filled(self, totals: LeaseTotals) -> None:
        side = totals.number
        assert side not in self.filled, "reported once"
        assert side not in self.owners, "its owner no longer waits"
        assert JUNK not in self.blocks[side], "I2: filled before all KV was written"
        self.filled.add(side)

    # ---- states

    def load(self, state: State, turns: tuple[int, ...] = (), first: int = 0) -> None:
        """Puts the world into a state.

        Args:
            turns: the order in which the receiver processes messages with a finished operation, numbered as sides and
            messages are. Messages in between are unchanged.
            first: the side whose messages are probed first.
        """
        receiver, surroundings = self.receiver, self.surroundings
        receiver._leases._leases.clear()
        receiver._blocks.clear()
        receiver._closing.clear()
        self.ledger.peers.clear()
        self.owners.clear()
        self.filled.clear()
        surroundings.queues.clear()
        done: list[_Reception] = []
        waiting: list[_Reception] = []
        free = deque(self.pool.members)
        for index, side in enumerate(state.sides):
            self._load_side(index, side)
            for number, stage in side.under_way:
                passing = Passing(self.messages[index][number - 1], free[0].index, stage)
                (done if stage % 2 else waiting).append(self._load_reception(passing, free))
        for index in (first, 1 - first)[: len(self.numbers)]:
            queued = deque([self.messages[index][number - 1] for number in state.sides[index].queue])
            surroundings.queues[self.numbers[index]] = queued
        receiver._receptions = [*([done[turn] for turn in turns] or done), *waiting]
        parked = [self.messages[side][number - 1] for side, number in state.parked]
        receiver._parked = deque([(message.tag, message.arrival) for message in parked])
        self.pool._free = free
        self.pool._taken = {item.slot.index for item in receiver._receptions}
        for slot in free:
            surroundings.by_slot[slot.index] = None

    def _load_side(self, index: int, side: Side) -> None:
        receiver, number = self.receiver, self.numbers[index]
        if side.is_there:
            self.ledger.peers[number] = self.peers[number]
        receiver._slots_held[number] = side.held
        self.sent[index] = side.sent
        self.blocks[index] = side.blocks
        if side.is_filled:
            self.filled.add(index)
        if side.is_called:
            owner: Any = Owner(_TOTALS if side.is_over else None)
            self.owners[index] = owner
            if side.has_owner:
                receiver._closing[index] = owner
        if side.has_blocks:
            receiver._blocks[index] = self.placed[index]
        if side.entry is not None:
            receiver._leases._leases[index] = self._load_entry(index, side.entry)

    def _load_entry(self, index: int, entry: Entry) -> _Lease:
        coverage = Coverage(1)
        coverage._claims[0] = [_claim(claim) for claim in entry.claims]
        peer = self.numbers[index]
        return _Lease(
            self.grants[index],
            coverage,
            entry.cells_missing,
            group=peer if entry.is_bound else None,
            closing=entry.closing,
            scattering=entry.scattering,
            seen={(peer, number) for number in entry.seen},
        )

    def _load_reception(self, passing: Passing, free: deque[Slot]) -> _Reception:
        slot = free.popleft()
        self.surroundings.by_slot[slot.index] = passing
        message = passing.message
        item = _Reception(message.tag, self.peers[message.tag.sender], self.pool, slot, MESSAGE_BYTES, Receive(passing))
        if passing.stage >= READING:
            item.reading = Copy(passing, READING)
        if passing.stage >= SCATTERING:
            item.segment = message.segment
            item.scatter = Copy(passing, SCATTERING)
        return item

    def save(self, repeats: int) -> State:
        under_way: list[list[tuple[int, int]]] = [[] for _ in self.numbers]
        for item in self.receiver._receptions:
            passing = passing_of(item)
            under_way[passing.message.side].append((passing.message.number, passing.stage))
        sides = tuple([self._save_side(index, under_way[index]) for index in range(len(self.numbers))])
        parked = tuple([(tag.lease, tag.number + 1) for tag, _ in self.receiver._parked])
        return State(sides, parked, repeats)

    def _save_side(self, index: int, under_way: list[tuple[int, int]]) -> Side:
        receiver, peer = self.receiver, self.numbers[index]
        owner = self.owners.get(index)
        entry = receiver._leases._leases.get(index)
        is_there = peer in self.ledger.peers
        under_way.sort()
        return Side(
            is_there,
            self.sent[index] if is_there else self.segments,
            tuple([message.number for message in self.surroundings.queues[peer]]),
            receiver._slots_held[peer],
            owner is not None,
            owner is not None and owner.totals is not None,
            index in self.filled,
            index in receiver._blocks,
            index in receiver._closing,
            self.blocks[index],
            None if entry is None else _save_entry(entry, peer),
            tuple(under_way),
        )


def passing_of(item: _Reception) -> Passing:
    request: Any = item.request
    passing: Passing = request.passing
    return passing


def _save_entry(entry: _Lease, peer: int) -> Entry:
    assert entry.group in (None, peer), "a lease belongs to the peer that fills it"
    assert all(sender == peer for sender, _ in entry.seen)
    claims = [(c.token_start, c.token_stop, c.head_start, c.head_stop) for c in entry.coverage._claims[0]]
    return Entry(
        entry.group is not None,
        entry.closing,
        entry.scattering,
        entry.cells_missing,
        tuple(sorted([number for _, number in entry.seen])),
        tuple(sorted(claims)),
    )


@cache
def _claim(claim: tuple[int, int, int, int]) -> _Claim:
    return _Claim(*claim)
