"""Pulls of entries over real UCX between two processes, one of which may stop, die, restart, forget or be damaged. The
other never waits for long, holds nothing afterwards, and loads only what was computed."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core import pull_costs
from baton.core.errors import InternalError, InvalidRequest, Overloaded
from baton.core.kv_entries import EntryBlocks, KeptPrefix
from baton.kvcache.layout import KVCacheLayout
from baton.node import pull_link, pull_owner, pulls
from baton.node.pull_messages import wanted_entries
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.internal.v1 import node_pb2_grpc
from baton.rpc.channels import connect
from baton.security.certificates import write_set
from baton.security.tls import InternalTls
from kvtransfer.flows import RankPair
from tests.conformance.kv import DEADLINE_S, eventually
from tests.conformance.kv_child import Child, child
from tests.conformance.pulling import (
    ENTRIES,
    KEYS,
    OWNER,
    READER,
    PullingNode,
    a_reader,
    a_reader_elsewhere,
    an_owner,
    computed,
    is_stopped,
    lift_limits,
    until_stopped,
)
from tests.unit.kvtransfer.offloading import MemoryStore, blocks_of, keys_of
from tests.unit.security.settings import TlsSettings


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lift_limits(monkeypatch)


@asynccontextmanager
async def owner_elsewhere() -> AsyncIterator[tuple[Child, KeptPrefix]]:
    """A process that keeps the entries, and what a gateway says of it."""
    async with child(an_owner) as owner:
        assert await owner.call("keep") == ENTRIES
        yield owner, await owner.call("kept")


async def until_only_the_link_is_held(reader: PullingNode, links: int = 0) -> None:
    await eventually(lambda: len(reader.held()) == links)
    assert all(each.startswith("link") for each in reader.held())


async def test_entries_of_another_process_arrive_bit_for_bit_in_another_layout_and_block_size() -> None:
    async with owner_elsewhere() as (owner, kept), a_reader() as reader:
        assert await reader.pull(kept, KEYS[:5]) == 5
        assert await reader.pull(kept, KEYS[5:]) == ENTRIES - 5
        count, found = await reader.load()
        assert count == ENTRIES
        assert torch.equal(found, computed(ENTRIES))
        assert reader.transfer.counters().entries.loaded == {"peer": ENTRIES}
        await reader.load()
        assert reader.transfer.counters().entries.loaded == {"peer": ENTRIES, "host": ENTRIES}
        assert reader.pulls.failures == 0
        assert await owner.call("count_served") == ENTRIES
        # Both pulls went over one link, and nothing but the link is left.
        await until_only_the_link_is_held(reader, links=1)
        assert len(await owner.call("held")) == 1


async def test_what_is_here_already_is_not_received_again() -> None:
    async with owner_elsewhere() as (_, kept), a_reader() as reader:
        assert await reader.pull(kept, KEYS[:3]) == 3
        assert await reader.pull(kept) == ENTRIES
        assert reader.transfer.counters().entries.stores["peer"].hits == ENTRIES


async def test_two_nodes_pull_from_each_other_at_once() -> None:
    async with owner_elsewhere() as (owner, kept), a_reader() as reader:
        await owner.call("forget", 8)
        assert await reader.keep(seed=4) == ENTRIES
        await reader.forget(0)
        assert await reader.pull(kept) == 8
        owner.begin("pull", reader.kept())
        assert await reader.pull(kept) == 8
        assert await owner.answer() == ("pull", 8)


async def test_an_owner_that_has_forgotten_entries_sends_those_before_them() -> None:
    async with owner_elsewhere() as (owner, kept), a_reader() as reader:
        await owner.call("forget", 7)
        assert await reader.pull(kept) == 7
        await owner.call("forget", 0)
        assert await reader.pull(kept, KEYS[7:]) == 0
        assert reader.pulls.failures == 0
        await until_only_the_link_is_held(reader, links=1)


@pytest.mark.parametrize("found", [0, 2])
async def test_what_the_owner_does_not_have_makes_nothing_leave_the_readers_full_memory(found: int) -> None:
    reader = PullingNode(READER, KVCacheLayout.HND, 32, places=ENTRIES)
    others = EntryBlocks(keys_of(ENTRIES, seed=1), blocks_of(reader.cache, ENTRIES, 1))
    async with owner_elsewhere() as (owner, kept), reader:
        assert await reader.transfer.entries.save_entries(others) == (ENTRIES,)
        await owner.call("forget", found)
        assert await reader.pull(kept) == found
        entries = reader.transfer.counters().entries
        assert (entries.evicted, entries.entries) == (found, ENTRIES)
        assert reader.pulls.failures == 0
        await until_only_the_link_is_held(reader, links=1)


@pytest.mark.parametrize("wants", [12, 9, 0])
async def test_an_owner_saves_what_only_its_cache_has_once_a_reader_wants_it(
    monkeypatch: pytest.MonkeyPatch, wants: int
) -> None:
    """The reader asks first how many there are, has room for some, or finds then that computing is faster."""
    places = {12: 3 * ENTRIES, 9: 2 * 9, 0: 3 * ENTRIES}[wants]
    async with an_owner() as owner, a_reader(places=places) as reader:
        assert await owner.keep() == ENTRIES
        await owner.forget_but_in_cache(5)
        is_worth = iter([True, wants > 0])
        monkeypatch.setattr(reader.pulls, "_is_worth", lambda *_: next(is_worth))
        assert await reader.pull(owner.kept()) == wants
        assert list(owner.only_cached[0].values()) == [int(number < wants) for number in range(5, ENTRIES)]
        assert owner.transfer.counters().entries.entries == max(5, wants)
        count, found = await reader.load()
        assert count == wants
        assert torch.equal(found, computed(wants))


async def test_an_entry_that_is_damaged_in_the_owners_memory_ends_the_load_before_it() -> None:
    async with owner_elsewhere() as (owner, kept), a_reader() as reader:
        await owner.call("damage", 4)
        assert await reader.pull(kept) == ENTRIES
        count, found = await reader.load()
        assert count == 4
        assert torch.equal(found, computed(4))
        assert reader.transfer.counters().entries.damaged_from == {"peer": 1}
        assert await reader.transfer.entries.find_entries(KEYS) == 4


async def test_a_reader_with_little_room_pulls_what_fits() -> None:
    async with owner_elsewhere() as (_, kept), PullingNode(0xB, KVCacheLayout.HND, 32, places=8) as reader:
        assert await reader.pull(kept) == 4
        await until_only_the_link_is_held(reader, links=1)


async def test_an_owner_sends_what_only_its_store_has() -> None:
    store = MemoryStore()
    owner = PullingNode(OWNER, KVCacheLayout.NHD, 16, places=64, stores=(lambda *_: store,))
    async with owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        await eventually(lambda: len(store.kept) == ENTRIES)
        await owner.forget(0)
        assert await reader.pull(owner.kept()) == ENTRIES
        count, found = await reader.load()
        assert count == ENTRIES
        assert torch.equal(found, computed(ENTRIES))


async def test_an_owner_that_dies_during_a_pull_costs_that_pull() -> None:
    async with owner_elsewhere() as (owner, kept), a_reader() as reader:
        owner.begin("stop_after", 2)
        await owner.answer()
        pull = asyncio.create_task(reader.pull(kept))
        await until_stopped(owner.pid)
        os.kill(owner.pid, signal.SIGKILL)
        assert await pull == 0
        assert reader.pulls.failures == 1
        await until_only_the_link_is_held(reader)
        count, found = await reader.load()
        assert count < ENTRIES
        assert torch.equal(found, computed(count))


async def test_an_owner_that_stops_during_a_pull_costs_the_time_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner_elsewhere() as (owner, kept), a_reader() as reader:
        assert await reader.pull(kept, KEYS[:1]) == 1
        await owner.call("stop_after", 2)
        bound_s = 0.1
        while not is_stopped(owner.pid):  # on a busy machine the first bounds are too short for two entries
            bound_s *= 2
            monkeypatch.setattr(pulls, "PULL_S_MIN", bound_s)
            assert await reader.pull(kept) == 0
        assert reader.pulls.failures
        await until_only_the_link_is_held(reader)
        count, found = await reader.load()
        assert torch.equal(found, computed(count))
        # It goes on: its link has ended too, and a new one is made.
        os.kill(owner.pid, signal.SIGCONT)
        monkeypatch.setattr(pulls, "PULL_S_MIN", DEADLINE_S)
        while await owner.call("held"):
            pass
        assert await reader.pull(kept) == ENTRIES


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_reader_that_dies_or_stops_during_a_pull_leaves_nothing_at_the_owner(
    signal_number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_owner, "_SERVE_S", 0.3 if signal_number == signal.SIGSTOP else DEADLINE_S)
    async with an_owner() as owner, child(a_reader_elsewhere) as reader:
        assert await owner.keep() == ENTRIES
        await reader.call("stop_after", 2)
        reader.begin("pull", owner.kept())
        await until_stopped(reader.pid)
        if signal_number == signal.SIGKILL:
            os.kill(reader.pid, signal.SIGKILL)
        await eventually(lambda: not owner.held())
        assert not owner.pulls.owner._readers


async def test_a_node_of_another_kind_refuses_and_names_both(caplog: pytest.LogCaptureFixture) -> None:
    async with an_owner() as owner, PullingNode(0xB, KVCacheLayout.NHD, 16, namespace=b"another") as reader:
        assert await owner.keep() == ENTRIES
        reader.info.cache_spec.dtype, owner.info.cache_spec.dtype = "bfloat16", "float32"
        assert await reader.pull(owner.kept()) == 0
        assert reader.pulls.failures == 1
        refused = "entries of node-a and of node-b are of different kinds: KV dtype is float32 and bfloat16"
        assert refused in caplog.text
        await until_only_the_link_is_held(reader)


async def test_a_node_of_another_kind_is_asked_once_and_again_when_it_has_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with an_owner() as owner, PullingNode(0xB, KVCacheLayout.NHD, 16, namespace=b"another") as reader:
        assert await owner.keep() == ENTRIES
        assert [await reader.pull(owner.kept()) for _ in range(3)] == [0, 0, 0]
        assert reader.pulls.failures == 1
        assert caplog.text.count("could not pull") == 1
        assert "not asked again before it restarts" in caplog.text
        owner.info.incarnation = 0xA1
        assert await reader.pull(owner.kept()) == 0
        assert reader.pulls.failures == 2


async def test_a_refusal_is_remembered_of_the_latest_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_FAILED_MAX", 2)
    monkeypatch.setattr(pulls, "_BACK_OFF_S", DEADLINE_S)
    async with a_reader() as reader:
        for port in (1, 2, 3):
            assert await reader.pull(KeptPrefix(f"127.0.0.1:{port}", 7, 640)) == 0
        assert [address for address, _ in reader.pulls._not_before_s] == ["127.0.0.1:2", "127.0.0.1:3"]


async def test_another_incarnation_of_the_owner_refuses(caplog: pytest.LogCaptureFixture) -> None:
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        assert await reader.pull(replace(owner.kept(), incarnation=0x99)) == 0
        assert "incarnation 99 of node-a is over; it has incarnation a now" in caplog.text


async def test_a_node_whose_pull_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_BACK_OFF_S", DEADLINE_S)
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        other = replace(owner.kept(), incarnation=0x99)
        assert [await reader.pull(other), await reader.pull(other)] == [0, 0]
        assert reader.pulls.failures == 1
        assert await reader.pull(owner.kept()) == ENTRIES  # of the incarnation that is there


async def test_nobody_listens_at_the_address() -> None:
    async with a_reader() as reader:
        assert await reader.pull(KeptPrefix("127.0.0.1:1", 7, 640)) == 0
        assert await reader.pull(KeptPrefix("unix:/tmp/socket", 7, 640)) == 0
        assert reader.pulls.failures == 2
        await until_only_the_link_is_held(reader)


async def test_closed_links_are_made_again_after_a_switch_of_roles() -> None:
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        assert await reader.pull(owner.kept(), KEYS[:4]) == 4
        await owner.pulls.close()
        assert not owner.held()
        assert await reader.pull(owner.kept()) == 0
        await owner.transfer.reopen(incarnation=OWNER, receive_bytes_per_s=None)
        owner.pulls.reopen()
        assert await reader.pull(owner.kept()) == ENTRIES


async def test_a_link_that_is_not_used_ends_and_the_next_pull_makes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_link, "_IDLE_S", 0.05)
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        pulled = 0
        while pulled < 3:  # on a busy machine a link may end before its first pull has begun
            pulled = max(pulled, await reader.pull(owner.kept(), KEYS[:3]))
        await until_only_the_link_is_held(reader)
        await eventually(lambda: not owner.held())
        monkeypatch.setattr(pull_link, "_IDLE_S", DEADLINE_S)
        assert await reader.pull(owner.kept()) == ENTRIES


async def test_nodes_pull_over_mutual_tls_and_nobody_else_does(tmp_path: Path) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)

    def node(incarnation: int, role: str) -> PullingNode:
        tls = InternalTls.read(TlsSettings.of(tmp_path, role), None)
        return PullingNode(incarnation, KVCacheLayout.NHD, 16, tls=tls)

    async with node(0xA, "decode") as owner, node(0xB, "prefill") as reader, node(0xC, "gateway") as gateway:
        assert await owner.keep() == ENTRIES
        assert await reader.pull(owner.kept()) == ENTRIES
        assert await gateway.pull(owner.kept()) == 0
        async with a_reader() as stranger:
            assert await stranger.pull(owner.kept()) == 0


async def test_a_node_pulls_nothing_from_itself() -> None:
    async with an_owner() as owner:
        assert await owner.pull(owner.kept()) == 0
        assert owner.pulls.failures == 0


async def test_a_node_that_has_too_many_pulls_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_owner, "_PULLS_MAX", 0)
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        assert await reader.pull(owner.kept()) == 0
        await until_only_the_link_is_held(reader, links=1)
        assert reader.pulls.failures == 0


async def test_messages_that_are_impossible_end_their_stream_alone() -> None:
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        assert await reader.pull(owner.kept(), KEYS[:2]) == 2
        good = wanted_entries(1, KEYS)
        bad = pb.WantedEntries(number=1, root=good.root, parent=good.parent, digests=good.digests, tokens=b"12")
        for first in (pb.PullRequest(wanted=good), pb.PullRequest(wanted=bad), pb.PullRequest()):
            async with connect(owner.address) as channel:
                call = node_pb2_grpc.NodeStub(channel).Pull()
                await call.write(first)
                assert (await call.code()).name == "INVALID_ARGUMENT"
        assert await reader.pull(owner.kept()) == ENTRIES


async def test_an_impossible_message_after_the_hello_is_refused_by_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with an_owner() as owner, a_reader() as reader:
        assert await owner.keep() == ENTRIES
        assert await reader.pull(owner.kept(), KEYS[:2]) == 2
        link = reader.pulls._links[owner.address]
        link._outbox.put_nowait(pb.PullRequest(wanted=pb.WantedEntries(number=1, digests=bytes(3))))
        await link.wait_closed()
        with pytest.raises(InvalidRequest, match="digests has 3 bytes"):
            raise link.close(InternalError("it goes on"))
        await eventually(lambda: not owner.held())
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert await reader.pull(owner.kept()) == ENTRIES


async def test_two_requests_pull_the_same_entries_at_once_and_the_link_stays() -> None:
    async with owner_elsewhere() as (_, kept), a_reader() as reader:
        pulled = await asyncio.gather(*(reader.pull(kept, KEYS[:stop]) for stop in (ENTRIES, ENTRIES, 5)))
        assert pulled == [ENTRIES, ENTRIES, 5]
        assert reader.pulls.failures == 0
        await until_only_the_link_is_held(reader, links=1)


async def test_a_node_that_answers_too_late_for_any_pull_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request would wait for it again otherwise."""
    monkeypatch.setattr(pulls, "PULL_S_MIN", 0.01)
    monkeypatch.setattr(pull_costs, "PULL_S_MAX", 0.01)
    monkeypatch.setattr(pulls, "_BACK_OFF_S", DEADLINE_S)
    monkeypatch.setattr(pull_link, "_OPEN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        kept = KeptPrefix(f"127.0.0.1:{silent.getsockname()[1]}", 7, ENTRIES * 64)
        async with a_reader() as reader:
            assert await reader.pull(kept) == 0
            assert reader.pulls.failures == 0  # the link is still being made
            await until_only_the_link_is_held(reader)
            await eventually(lambda: reader.pulls._links[kept.address].is_over)
            assert await reader.pull(kept) == 0
            assert reader.pulls.failures == 1
            assert not reader.pulls._links
            assert await reader.pull(kept) == 0
            assert not reader.pulls._links


async def test_a_link_that_is_used_makes_no_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_LINKS_MAX", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        first, third = (KeptPrefix(f"127.0.0.1:{each.getsockname()[1]}", 7, ENTRIES * 64) for each in (silent, other))
        async with an_owner() as owner, a_reader() as reader:
            assert await owner.keep() == ENTRIES
            waiting = [asyncio.create_task(reader.pull(first))]
            assert await reader.pull(owner.kept(), KEYS[:2]) == 2
            waiting.append(asyncio.create_task(reader.pull(third)))
            await eventually(lambda: third.address in reader.pulls._links)
            assert list(reader.pulls._links) == [first.address, third.address]
            await reader.pulls.close()
            assert await asyncio.gather(*waiting) == [0, 0]


@pytest.mark.parametrize("asks", [1, 1000])
async def test_a_reader_that_takes_no_answers_loses_its_link(asks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers would fill the owner's memory, and a switch of roles would wait for the end of the link."""
    monkeypatch.setattr(pull_owner, "_PULLS_MAX", 0)
    monkeypatch.setattr(pull_owner, "_SERVE_S", 0.2 if asks == 1 else DEADLINE_S)
    accepted = asyncio.Event()

    async def write(_: pb.PullResponse) -> None:
        if accepted.is_set():
            await asyncio.Event().wait()
        accepted.set()

    async def asking(hello: pb.PullHello) -> AsyncIterator[pb.PullRequest]:
        yield pb.PullRequest(hello=hello)
        for _ in range(asks):
            yield pb.PullRequest(wanted=wanted_entries(1, KEYS[:1]))
        await asyncio.Event().wait()

    async with an_owner() as owner, a_reader() as reader:
        addresses = await reader.transfer.listen(1 << 50, {RankPair(0, 0): ()}, sends=False)
        hello = pb.PullHello(info=reader.info, incarnation=OWNER, namespace=b"one model")
        hello.worker_addresses.extend(addresses.values())
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(owner.pulls.owner.serve(asking(hello), write), DEADLINE_S)
        assert isinstance(ended.value.exceptions[0], Overloaded)
        assert not owner.held()
        await reader.transfer.disconnect(1 << 50)


async def test_a_pull_that_fails_because_its_node_has_restarted_leaves_the_new_link_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = KeptPrefix(f"127.0.0.1:{silent.getsockname()[1]}", 7, ENTRIES * 64)
        async with a_reader() as reader:
            old = asyncio.create_task(reader.pull(before))
            await eventually(lambda: before.address in reader.pulls._links)
            new = asyncio.create_task(reader.pull(replace(before, incarnation=8)))
            assert await old == 0
            assert reader.pulls._links[before.address].incarnation == 8
            assert not reader.pulls._links[before.address].is_over
            assert reader.pulls.failures == 1
            await reader.pulls.close()
            assert await new == 0
