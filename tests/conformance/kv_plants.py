"""Faults to plant into a receiver and its tables, one at a time: tests must find each of them."""

from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.coverage import Coverage
from kvtransfer.leases import LeaseTable, LeaseTotals, ScatterDone
from kvtransfer.ledger import Ledger
from kvtransfer.receiver import Receiver
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import Segment, Tag
from kvtransfer.staging import StagingPool

Plant = Callable[[pytest.MonkeyPatch], None]


def slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagingPool, "give_back", lambda pool, slot: None)


def slot_is_not_given_back_when_cancelled(patch: pytest.MonkeyPatch) -> None:
    give_back = StagingPool.give_back

    def end(receiver: Receiver, item: Any) -> bool:
        receiver._receptions.remove(item)
        receiver._slots_held[item.tag.sender] -= 1
        if item.request.failure() is None:
            give_back(item.pool, item.slot)
        return True

    patch.setattr(Receiver, "_end", end)


def slots_of_lost_peers_are_given_back_at_once(patch: pytest.MonkeyPatch) -> None:
    lost = Receiver.lost

    def lost_at_once(receiver: Receiver, peer: int) -> tuple[int, ...]:
        for item in [item for item in receiver._receptions if item.tag.sender == peer]:
            receiver._end(item)
        return lost(receiver, peer)

    patch.setattr(Receiver, "lost", lost_at_once)


def slot_is_given_back_before_the_scatter(patch: pytest.MonkeyPatch) -> None:
    to_scatter = Receiver._to_scatter

    def checked(receiver: Receiver, item: Any, reading: Any) -> Segment | None:
        segment = to_scatter(receiver, item, reading)
        if segment is not None:
            item.pool.give_back(item.slot)
        return segment

    patch.setattr(Receiver, "_to_scatter", checked)


def parked_messages_of_lost_peers_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Receiver, "lost", lambda receiver, peer: receiver._leases.bound_to(peer))


def lost_peers_hold_their_share_for_good(patch: pytest.MonkeyPatch) -> None:
    def end(receiver: Receiver, item: Any) -> bool:
        receiver._receptions.remove(item)
        if item.tag.sender in receiver._ledger.peers:
            receiver._slots_held[item.tag.sender] -= 1
        item.pool.give_back(item.slot)
        return True

    patch.setattr(Receiver, "_end", end)


def close_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    def close(table: LeaseTable, number: int) -> LeaseTotals:
        return table._forget(table._leases[number])

    patch.setattr(LeaseTable, "close", close)


def scatter_begins_after_close(patch: pytest.MonkeyPatch) -> None:
    start = LeaseTable.start_scatter

    def start_scatter(table: LeaseTable, tag: Tag, segment: Segment, **more: Any) -> SegmentRefusal | None:
        lease = table._leases.get(tag.lease)
        if lease is None or not lease.closing or (tag.sender, tag.number) in lease.seen:
            return start(table, tag, segment, **more)
        lease.closing = False
        refusal = start(table, tag, segment, **more)
        lease.closing = True
        return refusal

    patch.setattr(LeaseTable, "start_scatter", start_scatter)


def claim_comes_before_the_check(patch: pytest.MonkeyPatch) -> None:
    start = LeaseTable.start_scatter

    def start_scatter(table: LeaseTable, tag: Tag, segment: Segment, **more: Any) -> SegmentRefusal | None:
        refusal = start(table, tag, segment, **more)
        lease = table._leases.get(tag.lease)
        if refusal is not None and lease is not None:
            lease.scattering += 1
        return refusal

    patch.setattr(LeaseTable, "start_scatter", start_scatter)


def duplicates_are_taken(patch: pytest.MonkeyPatch) -> None:
    arrival = LeaseTable.arrival

    def arrives(table: LeaseTable, tag: Tag, now_s: float, **more: Any) -> SegmentRefusal | None:
        lease = table._leases.get(tag.lease)
        if lease is not None:
            lease.seen.clear()
        return arrival(table, tag, now_s, **more)

    patch.setattr(LeaseTable, "arrival", arrives)


def duplicates_are_scattered(patch: pytest.MonkeyPatch) -> None:
    duplicates_are_taken(patch)
    patch.setattr(Coverage, "claim", lambda coverage, layers, token_start, token_stop, heads: True)


def closed_lease_is_filled(patch: pytest.MonkeyPatch) -> None:
    finish = LeaseTable.finish_scatter

    def finish_scatter(table: LeaseTable, segment: Segment, now_s: float) -> ScatterDone:
        lease = table._leases[segment.lease]
        outcome = finish(table, segment, now_s)
        return ScatterDone(lease.totals() if lease.cells_missing == 0 else None, outcome.closed)

    patch.setattr(LeaseTable, "finish_scatter", finish_scatter)


def lease_is_filled_one_segment_early(patch: pytest.MonkeyPatch) -> None:
    finish = LeaseTable.finish_scatter

    def finish_scatter(table: LeaseTable, segment: Segment, now_s: float) -> ScatterDone:
        lease = table._leases[segment.lease]
        outcome = finish(table, segment, now_s)
        early = not lease.closing and lease.cells_missing == 1
        return ScatterDone(lease.totals() if early else None, outcome.closed)

    patch.setattr(LeaseTable, "finish_scatter", finish_scatter)


def refusals_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Receiver, "_refuse", lambda receiver, tag, refusal, **more: None)


def parked_messages_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Receiver, "_unpark", lambda receiver: False)


def last_peer_may_hold_no_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "fair_share", lambda ledger, slots: 1 if len(ledger.peers) == 2 else 0)
