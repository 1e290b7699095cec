"""What watchers of a node's status get: changes, repetitions, and no part that they have already."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from baton.node.status_feed import StatusFeed, StatusLog
from baton.protos.v1 import node_status_pb2 as pb
from baton.rpc.convert_node import take_unchanged

BOUND_S = 60.0


def idle() -> pb.NodeStatus:
    """The status of an idle node with every part."""
    return pb.NodeStatus(
        info=pb.NodeInfo(name="p", incarnation=7),
        peers=[pb.PeerState(incarnation=21, phase=pb.PEER_PHASE_READY)],
        step_costs=pb.StepCosts(points=[pb.TokensCost(tokens=1, seconds=0.1)]),
        adapters=[pb.Adapter(name="sql", revision="1")],
        gpus=[pb.GpuState(name="H100", power_w=70.0)],
        blocks_free=9,
    )


def changed(status: pb.NodeStatus, **fields: int) -> pb.NodeStatus:
    copy = pb.NodeStatus.FromString(status.SerializeToString())
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def received(log: StatusLog, version: int, last: pb.NodeStatus) -> pb.NodeStatus:
    """The status as a watcher of this version completes it."""
    message = pb.NodeStatus.FromString(log.since(version).SerializeToString())
    take_unchanged(message, last)
    return message


def test_a_watcher_gets_only_parts_that_it_does_not_have() -> None:
    log, first = StatusLog(), idle()
    log.take(first, 0.0)
    assert log.since(0) == first
    second = changed(first, blocks_free=8)
    log.take(second, 0.1)
    sent = log.since(1)
    assert (sent.blocks_free, sent.HasField("info"), len(sent.peers)) == (8, False, 0)
    assert sent.ByteSize() * 4 < second.ByteSize()
    assert received(log, 1, first) == second


def test_every_part_that_changes_is_sent_and_one_that_becomes_empty_stays_empty() -> None:
    log, first = StatusLog(), idle()
    log.take(first, 0.0)
    second = changed(first)
    second.info.incarnation = 8
    second.ClearField("adapters")
    second.ClearField("step_costs")
    second.peers[0].phase = pb.PEER_PHASE_LOST
    log.take(second, 0.1)
    assert received(log, 1, first) == second
    assert received(log, 2, second) == second


def test_a_watcher_that_missed_versions_gets_all_that_changed_since_its_own() -> None:
    log, statuses = StatusLog(), [idle()]
    log.take(statuses[0], 0.0)
    for number in range(1, 4):
        following = changed(statuses[-1], blocks_free=9 - number)
        if number == 2:
            following.peers.add(incarnation=22, phase=pb.PEER_PHASE_READY)
        statuses.append(following)
        log.take(following, number / 10)
    for version, status in enumerate(statuses, start=1):
        assert received(log, version, status) == statuses[-1]


def test_power_and_traffic_alone_are_no_news() -> None:
    log, status = StatusLog(), idle()
    log.take(status, 0.0)
    status = changed(status)
    status.gpus[0].power_w = 71.0
    status.peers[0].bytes_total = 1 << 30
    assert log.take(status, 0.1)
    assert (log.version, log.choice_version) == (2, 1)
    assert received(log, 1, idle()) == status


def test_traffic_of_pairs_is_sent_once_a_second_and_never_lost() -> None:
    log, status = StatusLog(), idle()
    log.take(status, 0.0)
    sent = []
    for number in range(1, 10):
        status = changed(status)
        status.peers[0].bytes_total = number
        log.take(status, number / 10)
        sent += [peer.bytes_total for peer in log.since(log.version - 1).peers]
    assert sent == [1]
    assert log.take(status, 5.0)
    assert log.since(log.version - 1).peers[0].bytes_total == 9
    assert not log.take(status, 50.0)


async def collect(stream: AsyncIterator[pb.NodeStatus], count: int) -> list[pb.NodeStatus]:
    async with asyncio.timeout(BOUND_S):
        return [await anext(stream) for _ in range(count)]


async def test_many_watchers_cost_one_reading_for_each_interval() -> None:
    reads, status = 0, idle()

    def read() -> pb.NodeStatus:
        nonlocal reads
        reads += 1
        return changed(status, blocks_free=reads)

    feed, interval_s = StatusFeed(read), 0.02
    streams = [
        feed.watch(interval_s=interval_s, repeat_s=BOUND_S, while_loading=False, without_unchanged=True)
        for _ in range(20)
    ]
    started_s = time.monotonic()
    await asyncio.gather(*(collect(stream, 4) for stream in streams))
    intervals = (time.monotonic() - started_s) / interval_s
    assert reads <= 20 + intervals + 1  # each reads once at its beginning
    feed.close()
    assert [[each async for each in stream] for stream in streams] == [[]] * 20


async def test_an_error_of_a_reading_ends_every_stream_and_the_next_one_reads_again() -> None:
    error: Exception | None = None

    def read() -> pb.NodeStatus:
        if error is not None:
            raise error
        return idle()

    def watch() -> AsyncIterator[pb.NodeStatus]:
        return feed.watch(interval_s=0.02, repeat_s=BOUND_S, while_loading=False, without_unchanged=False)

    feed = StatusFeed(read)
    streams = [watch(), watch()]
    assert await asyncio.gather(*(collect(stream, 1) for stream in streams)) == [[idle()]] * 2
    error = RuntimeError("the engine is gone")
    for stream in streams:
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await collect(stream, 1)
    error = None
    assert await collect(watch(), 1) == [idle()]
    feed.close()


async def test_a_slow_watcher_does_not_slow_a_fast_one_down() -> None:
    status = idle()
    feed = StatusFeed(lambda: changed(status))
    slow = feed.watch(interval_s=3600.0, repeat_s=3600.0, while_loading=False, without_unchanged=True)
    fast = feed.watch(interval_s=0.02, repeat_s=3600.0, while_loading=False, without_unchanged=True)
    await collect(slow, 1)
    await collect(fast, 1)
    status.blocks_free = 5
    assert (await collect(fast, 1))[0].blocks_free == 5
    feed.close()


def test_a_field_that_is_no_part_or_unknown_is_left_as_it_is() -> None:
    message = pb.NodeStatus(blocks_free=3, unchanged_fields=[4, 10, 9999])
    take_unchanged(message, idle())
    assert (message.blocks_free, len(message.peers), len(message.unchanged_fields)) == (3, 1, 0)
