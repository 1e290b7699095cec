"""The calls on a simulated receiver, and the invariants after each: I1, I3 and I6, no slot is lost, every lease ends,
and every refusal has its reason.
"""

from collections import Counter
from typing import Any

from kvtransfer.receiver import _Reception
from kvtransfer.refusals import SegmentRefusal
from tests.conformance.kv_sides import JUNK, RECEIVING, SCATTERED, SCATTERING
from tests.conformance.kv_simulated import Owner
from tests.conformance.kv_world import World, passing_of


def close(world: World, index: int) -> None:
    """Closes a lease, as a cancel and a timeout do at any time."""
    owner: Any = Owner()
    world.owners[index] = owner
    world.receiver.close(index, owner)
    _check_slots(world)
    _check_over(world, index)


def lose(world: World, index: int) -> None:
    """What the transfer thread does when it disconnects a peer."""
    peer = world.numbers[index]
    world.ledger.peers.pop(peer)
    bound = world.receiver.lost(peer)
    assert set(bound) <= {index} - set(world.owners), "its open leases"
    for item in world.receiver._receptions:
        passing = passing_of(item)
        if passing.stage == RECEIVING and item.tag.sender == peer:
            passing.stage += 2
    world.surroundings.queues[peer].clear()
    assert all(tag.sender != peer for tag, _ in world.receiver._parked), "I6: nothing of it waits"
    _check_slots(world)


def look(world: World) -> bool:
    """Whether the receiver had anything to do."""
    world.ledger.refusals.clear()
    world.reported.clear()
    world.surroundings.discarded.clear()
    before = tuple(world.receiver._receptions)
    moved = world.receiver.step()
    _check_slots(world)
    _check_refusals(world, [item for item in before if item not in world.receiver._receptions])
    for index in world.owners:
        _check_over(world, index)
    return moved


def _check_slots(world: World) -> None:
    """A slot is free or taken by exactly one message in flight; a slot in use is never free."""
    pool, receptions = world.pool, world.receiver._receptions
    taken = {item.slot.index for item in receptions}
    assert len(taken) == len(receptions), "a slot is given to one message at a time"
    assert pool._taken == taken, "no slot is lost, and none is given back before its message is over"
    assert len(pool._free) + len(taken) == pool.slots
    for slot in pool._free:
        passing = world.surroundings.by_slot[slot.index]
        assert passing is None or passing.stage % 2, "a slot is not given back while it is used"


def _check_over(world: World, index: int) -> None:
    """A closed lease ends as soon as none of its scatters runs, and nothing of it is left."""
    receiver = world.receiver
    scatters = any(
        passing_of(item).stage in (SCATTERING, SCATTERED) and item.tag.lease == index for item in receiver._receptions
    )
    is_over = world.owners[index].totals is not None
    assert is_over != scatters, "I1: a lease's end waits for its scatters, and for nothing else"
    kept = index in receiver._leases._leases, index in receiver._blocks, index in receiver._closing
    assert kept == (scatters,) * 3, "nothing is kept of a lease that is over"


def _check_refusals(world: World, over: list[_Reception]) -> None:
    """Every message that is over was scattered, cancelled with its link, or refused for a reason that was counted."""
    expected: Counter[SegmentRefusal] = Counter()
    for item in over:
        if item.request.failure() is not None:
            assert item.tag.sender not in world.ledger.peers
        elif item.scatter is None:
            is_late = item.tag.lease in world.owners
            assert is_late or _is_claimed(world, item.tag.lease, item.tag.number), "refused for no reason"
            expected[SegmentRefusal.LATE if is_late else SegmentRefusal.DUPLICATE] += 1
        else:
            assert world.blocks[item.tag.lease][item.tag.number] != JUNK
    for message in world.surroundings.discarded:
        is_late = message.side in world.owners
        assert is_late or _is_known(world, message.side, message.number), "refused for no reason"
        expected[SegmentRefusal.LATE if is_late else SegmentRefusal.DUPLICATE] += 1
    assert world.ledger.refusals == expected, "every refusal is counted, with its reason"
    reported = [refused.refusal for refused in world.reported]
    assert reported == [SegmentRefusal.DUPLICATE] * expected[SegmentRefusal.DUPLICATE], (
        "owners are notified of all refusals but late ones"
    )


def check_idle(world: World) -> None:
    """After a step that found nothing to do, the receiver waits only for running operations, so that all waiting
    messages continue when these end."""
    receiver = world.receiver
    receptions = receiver._receptions
    assert all(passing_of(item).stage % 2 == 0 for item in receptions), (
        "finished operations are noticed, and their slots returned"
    )
    assert receiver.in_flight == len(receptions)
    held = Counter(item.tag.sender for item in receptions)
    share = world.ledger.fair_share(world.pool.slots)
    for index, peer in enumerate(world.numbers):
        assert receiver._slots_held[peer] == held[peer], "I6"
        assert receiver.holds(peer) == (held[peer] > 0), "I6"
        if index not in world.owners and peer in world.ledger.peers:
            _check_open(world, index)
    for tag, _ in receiver._parked:
        assert tag.sender in world.ledger.peers, "I6"
        assert not world.pool.available or held[tag.sender] >= max(1, share), "it waits although there is room"
    assert not world.pool.available or not any(world.surroundings.queues.values()), "it waits although there is room"


def _check_open(world: World, index: int) -> None:
    for number in range(1, world.sent[index] + 1):
        assert _is_known(world, index, number), "a segment is lost"
    assert (index in world.filled) == (JUNK not in world.blocks[index]), "its owner is notified when it is filled"


def _is_claimed(world: World, index: int, segment: int) -> bool:
    """Whether a segment is being scattered or has been, from another message than the ones that are over."""
    return world.blocks[index][segment] != JUNK or any(
        (item.tag.lease, item.tag.number) == (index, segment) and item.scatter is not None
        for item in world.receiver._receptions
    )


def _is_known(world: World, index: int, number: int) -> bool:
    """Whether a message is in flight or has arrived."""
    message = world.messages[index][number - 1]
    return (
        world.blocks[index][number - 1] == number
        or any(passing_of(item).message is message for item in world.receiver._receptions)
        or any(arrival is message.arrival for _, arrival in world.receiver._parked)
        or message in world.surroundings.queues[world.numbers[index]]
    )
