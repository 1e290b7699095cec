"""How a decode node becomes a peer or is refused, and the peer's state afterwards."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import grpc
import pytest

from baton.core.errors import Draining, NoNode, PeerRefused, UnknownLease
from baton.node.assembly import Listener
from baton.node.waiting import until
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from prefill_node import decode_peer
from prefill_node.decode_peers import DecodePeers
from prefill_node.events import LeaseEnded, PeerLost
from tests.unit.prefill_node.nodes import decode_node, prefill_node, prefill_settings

MISMATCH = node_status_pb2.Mismatch(field="dtype", ours="float16", theirs="float32", cure="start both alike")


@asynccontextmanager
async def peers(
    *, timeout_s: float = 120.0, **settings: object
) -> AsyncIterator[tuple[DecodePeers, list[LeaseEnded | PeerLost]]]:
    events: list[LeaseEnded | PeerLost] = []
    node = prefill_node(prefill_settings(**settings))
    under_test = DecodePeers(node, timeout_s=timeout_s, deliver=events.append)
    node.listen(Listener(on_step=lambda _: None, on_filled=lambda _: None, on_refused=lambda _: None))
    async with node:
        try:
            yield under_test, events
        finally:
            await under_test.close()


@contextmanager
def closed_addresses(count: int) -> Iterator[list[str]]:
    """Addresses without a listener. They stay taken, so that no other process listens there."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


async def test_a_peer_is_measured_and_ready() -> None:
    async with decode_node() as decode, peers() as (known, _):
        state = await known.connect(decode.address)
        assert (state.name, state.incarnation) == ("decode-0", decode.node.incarnation)
        assert (state.phase, state.transport) == (node_status_pb2.PEER_PHASE_READY, "loopback")
        assert state.gigabytes_per_s > 0
        peer = await known.for_ticket(await decode.ticket(1, 10))
        assert peer.link is not None
        assert (peer.facts.transport, peer.facts.sender_number) == ("loopback", 1)
        assert peer.facts.max_context_tokens == decode.node.max_context_tokens


async def test_connecting_again_gives_the_same_peer() -> None:
    async with decode_node() as decode, peers() as (known, _):
        ticket = await decode.ticket(1, 10)
        first, second = await asyncio.gather(known.for_ticket(ticket), known.for_ticket(ticket))
        assert first is second
        assert await known.connect(decode.address) is first.state
        assert len(known.states({})) == 1


async def test_a_ticket_of_an_earlier_incarnation_is_refused() -> None:
    async with decode_node() as decode, peers() as (known, _):
        ticket = await decode.ticket(1, 10)
        ticket.lease.incarnation += 1
        with pytest.raises(UnknownLease, match="which has incarnation"):
            await known.for_ticket(ticket)


async def test_a_decode_node_that_refuses_is_shown_with_its_reasons() -> None:
    async with decode_node(mismatches=(MISMATCH,)) as decode, peers() as (known, _):
        state = await known.connect(decode.address)
        assert (state.phase, list(state.mismatches)) == (node_status_pb2.PEER_PHASE_REFUSED, [MISMATCH])
        with pytest.raises(PeerRefused, match="dtype: ours float16, theirs float32"):
            await known.for_ticket(await decode.ticket(1, 10))


async def test_a_link_under_the_floor_is_refused_and_the_decode_node_gets_the_reason() -> None:
    async with decode_node() as decode, peers(link_floor_gb_per_s=1e6) as (known, _):
        connecting = asyncio.create_task(known.connect(decode.address))
        refused = (await decode.message("refused")).refused
        decode.hang_up()
        state = await connecting
        assert state.phase == node_status_pb2.PEER_PHASE_REFUSED
        assert list(refused.mismatches) == list(state.mismatches)
        assert [mismatch.field for mismatch in state.mismatches] == ["link"]


async def test_an_address_without_a_listener_is_a_lost_peer(caplog: pytest.LogCaptureFixture) -> None:
    async with decode_node() as decode, peers() as (known, events):
        ticket = await decode.ticket(1, 10)
        with closed_addresses(1) as (ticket.decode_address,), pytest.raises(NoNode, match="decode-0 cannot be reached"):
            await known.for_ticket(ticket)
        (state,) = known.states({})
        assert state.phase == node_status_pb2.PEER_PHASE_LOST
        assert [type(event) for event in events] == [PeerLost]
    assert not [record for record in caplog.records if record.exc_info]


async def test_whoever_waits_for_a_peer_that_is_closed_before_it_has_begun_gets_its_state() -> None:
    with closed_addresses(1) as (address,):
        async with peers() as (known, events):
            connecting = asyncio.create_task(known.connect(address))
            await asyncio.sleep(0)  # it has made the peer, whose own task comes next
            await known.close()
            state = await asyncio.wait_for(connecting, 60.0)
            assert state.phase == node_status_pb2.PEER_PHASE_LOST
            assert [type(event) for event in events] == [PeerLost]


async def test_a_stream_that_has_ended_before_it_is_written_to_says_why() -> None:
    """gRPC itself says no more than that it has ended."""
    with closed_addresses(1) as (address,):
        async with connect(address) as channel:
            call = decode_pb2_grpc.DecodeStub(channel).Pair()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(pb.PairRequest())
            await decode_peer._write(call, pb.PairRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="refused"):
                await decode_peer._read(call, "decode-0")


async def test_a_decode_node_that_gives_up_while_links_are_made_says_why() -> None:
    """Its error is the cause: the link that it could not open, or a limit of its own."""
    with closed_addresses(1) as (address,):
        async with connect(address) as channel:
            call = decode_pb2_grpc.DecodeStub(channel).Pair()
            links = asyncio.Event()
            with pytest.raises(grpc.aio.AioRpcError, match="refused"):
                await decode_peer._unless_ended(call, "decode-0", links.wait())


async def test_a_decode_node_that_hangs_up_in_the_handshake() -> None:
    async with decode_node(hangs_up=True) as decode, peers() as (known, _):
        state = await known.connect(decode.address)
        assert state.phase == node_status_pb2.PEER_PHASE_LOST
        assert "ended the stream during the handshake" in state.detail


async def test_a_decode_node_that_does_not_answer_is_given_up() -> None:
    async with decode_node(is_silent=True) as decode, peers(timeout_s=0.1) as (known, _):
        state = await known.connect(decode.address)
        assert (state.phase, state.detail) == (node_status_pb2.PEER_PHASE_LOST, "no connection within 0.1 s")


async def test_leases_that_end_are_reported_with_their_peer() -> None:
    async with decode_node() as decode, peers() as (known, events):
        peer = await known.for_ticket(await decode.ticket(1, 10))
        decode.end_lease(1)
        assert await until(lambda: bool(events), timeout_s=120.0)
        assert events == [LeaseEnded(peer.number, 1)]


async def test_a_lost_peer_is_reported_once_and_connecting_again_makes_another() -> None:
    async with decode_node() as decode, peers() as (known, events):
        ticket = await decode.ticket(1, 10)
        before = await known.for_ticket(ticket)
        decode.hang_up()
        assert await until(lambda: bool(events), timeout_s=120.0)
        (lost,) = events
        assert isinstance(lost, PeerLost)
        assert (lost.peer, str(lost.error)) == (before.number, "decode-0 is gone: the stream ended")

        after = await known.for_ticket(ticket)
        assert after.number != before.number
        assert [state.phase for state in known.states({})] == [node_status_pb2.PEER_PHASE_READY]


async def test_a_stream_that_breaks_is_reported_with_its_cause() -> None:
    async with decode_node() as decode, peers() as (known, events):
        await known.connect(decode.address)
        decode.hang_up(grpc.StatusCode.UNAVAILABLE)
        assert await until(lambda: bool(events), timeout_s=120.0)
        (lost,) = events
        assert isinstance(lost, PeerLost)
        assert "as the test wants it" in str(lost.error)


async def test_messages_arrive_in_order_and_those_for_a_lost_peer_are_dropped() -> None:
    async with decode_node() as decode, peers() as (known, events):
        peer = await known.for_ticket(await decode.ticket(1, 10))
        messages = [pb.PairRequest(quiet=pb.Quiet(lease=lease)) for lease in (3, 1, 2)]
        for message in messages:
            known.send(peer.number, message)
        known.send(peer.number + 1, messages[0])
        assert await until(lambda: len(decode.received) == 3, timeout_s=120.0)
        decode.hang_up()
        assert await until(lambda: bool(events), timeout_s=120.0)
        known.send(peer.number, messages[0])
        assert decode.received == messages


async def test_the_latest_lost_peers_stay_in_the_status() -> None:
    with closed_addresses(40) as addresses:
        async with peers() as (known, _):
            for address in addresses:
                await known.connect(address)
            assert [state.address for state in known.states({})] == addresses[-33:]


async def test_after_the_close_no_connection_is_made() -> None:
    """A call that came late would leave a pair that nobody ends: a node that changes its role closes only its role."""
    async with decode_node() as decode, peers() as (known, _):
        await known.connect(decode.address)
        await known.close()
        with pytest.raises(Draining):
            await known.connect(decode.address)
        assert [state.phase for state in known.states({})] == [node_status_pb2.PEER_PHASE_LOST]
