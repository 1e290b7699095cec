"""Pair streams with real transfers on both sides: accepted and refused peers, delivered messages, lost peers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from baton.core.errors import DataLoss, NoNode, Overloaded, PeerRefused
from baton.engine.build import BuiltRunner
from baton.node.assembly import Listener, Node
from baton.node.describe import from_addresses, from_info, from_warm_ups, to_addresses
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from decode_node import prefill_peer, prefill_peers
from decode_node.events import Event, HandOverReceived, PeerLost, QuietReceived
from decode_node.prefill_peers import PrefillPeers
from kvtransfer.pair_ends import MOST_RANKS
from kvtransfer.plan import links_between
from tests.unit.decode_node.nodes import decode_node, decode_settings, load_demo, prefill_node
from tests.unit.decode_node.streams import DEADLINE_S, Stream, until

PairStream = Stream[pb.PairRequest, pb.PairResponse]


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    return load_demo()


@dataclass
class Peers:
    """A decode node's peers, and the events that they have delivered."""

    node: Node
    all: PrefillPeers = field(init=False)
    delivered: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = PrefillPeers(self.node, self.delivered.append)

    def serve(self, stream: PairStream) -> "asyncio.Task[None]":
        return asyncio.create_task(self.all.serve(stream.incoming, stream.write))

    def phases(self) -> list[str]:
        names = [node_status_pb2.PeerPhase.Name(state.phase) for state in self.all.states({})]
        return [name.removeprefix("PEER_PHASE_") for name in names]


@asynccontextmanager
async def decode_peers(built: BuiltRunner, **settings: object) -> AsyncIterator[Peers]:
    node = decode_node(built, decode_settings(**settings))
    node.listen(Listener(on_step=lambda _: None, on_filled=lambda _: None, on_refused=lambda _: None))
    async with node.transfer:
        yield Peers(node)


@asynccontextmanager
async def sender(built: BuiltRunner, *, address: str = "127.0.0.1:2") -> AsyncIterator[Node]:
    node = prefill_node(built, address=address)
    async with node.transfer:
        yield node


def hello(node: Node) -> pb.PairRequest:
    return pb.PairRequest(hello=pb.PairHello(info=node.info))


async def pair(stream: PairStream, node: Node) -> pb.PairAccepted:
    """The prefill node's side of the handshake, up to its warm-up messages."""
    stream.send(hello(node))
    accepted = (await stream.receive()).accepted
    await link(stream, node, accepted, number=1)
    return accepted


async def link(stream: PairStream, node: Node, accepted: pb.PairAccepted, *, number: int) -> None:
    """What follows a hello that was accepted; `number` is the prefill node's for this pair."""
    flows = links_between(node.description, from_info(accepted.info))
    addresses = await node.transfer.listen(number, flows, sends=True)
    stream.send(pb.PairRequest(linked=pb.PairLinked(worker_addresses=from_addresses(addresses))))
    assert (await stream.receive()).HasField("connected")
    await node.transfer.connect(number, to_addresses(accepted.worker_addresses), message_bytes=accepted.message_bytes)
    warm = await node.transfer.warm_up(number, accepted.sender_number)
    stream.send(pb.PairRequest(warmed_up=from_warm_ups(warm)))


async def ended(task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(DEADLINE_S):
        await task


async def test_a_ready_peers_messages_are_delivered_until_its_stream_ends(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        number = (await pair(stream, node)).sender_number
        ready = (await stream.receive()).ready
        assert ready.gigabytes_per_s > 0
        assert peers.phases() == ["READY"]
        hand_over, quiet = pb.HandOver(lease=5), pb.Quiet(lease=6)
        stream.send(pb.PairRequest(hand_over=hand_over), pb.PairRequest(quiet=quiet))
        await until(lambda: len(peers.delivered) == 2)
        peers.all.send_lease_ended(6)
        assert (await stream.receive()).lease_ended.lease == 6
        stream.end()
        await ended(serving)
        assert peers.delivered == [
            HandOverReceived(number, hand_over, node.incarnation, has_draft=False),
            QuietReceived(number, quiet, node.incarnation),
            PeerLost(number, node.name, ()),
        ]
        (state,) = peers.all.states({})
        assert (state.phase, state.detail) == (node_status_pb2.PEER_PHASE_LOST, "its stream broke")


async def test_a_broken_link_ends_the_stream_so_that_the_pair_is_made_again(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peer, "_BROKEN_END_S", 0.0)
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        number = (await pair(stream, node)).sender_number
        assert (await stream.receive()).HasField("ready")
        transfer = peers.node.transfer
        transfer._link_failed(transfer._ranks[0], number, DataLoss("the peer is gone"))
        await ended(serving)
        assert peers.delivered == [PeerLost(number, node.name, ())]
        (state,) = peers.all.states({})
        assert (state.phase, state.detail) == (node_status_pb2.PEER_PHASE_LOST, "the peer is gone")
        await node.transfer.disconnect(1)
        again = PairStream()
        serving = peers.serve(again)
        await pair(again, node)
        assert (await again.receive()).HasField("ready")
        again.end()
        await ended(serving)


async def test_a_hello_that_claims_to_be_from_a_paired_node_does_not_hide_it(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream, other = PairStream(), PairStream()
        serving = peers.serve(stream)
        await pair(stream, node)
        assert (await stream.receive()).HasField("ready")
        impostor = hello(node)
        impostor.hello.info.model.weights_digest = "another"
        other.send(impostor)
        await ended(peers.serve(other))
        assert peers.phases() == ["READY"]
        stream.end()
        await ended(serving)


async def test_a_second_stream_of_a_paired_incarnation_is_refused(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peers, "_OLDER_END_S", 0.0)
    async with decode_peers(built) as peers, sender(built) as node:
        first, second = PairStream(), PairStream()
        serving = peers.serve(first)
        number = (await pair(first, node)).sender_number
        assert (await first.receive()).HasField("ready")
        second.send(hello(node))
        with pytest.raises(PeerRefused, match="is paired with this node already"):
            await ended(peers.serve(second))
        assert peers.phases() == ["READY"]
        first.send(pb.PairRequest(quiet=pb.Quiet(lease=6)))
        await until(lambda: bool(peers.delivered))
        assert peers.delivered == [QuietReceived(number, pb.Quiet(lease=6), node.incarnation)]
        first.end()
        await ended(serving)


async def test_a_node_that_makes_its_pair_again_waits_until_the_older_stream_has_ended(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        first, second = PairStream(), PairStream()
        older = peers.serve(first)
        await pair(first, node)
        assert (await first.receive()).HasField("ready")
        await node.transfer.disconnect(1)
        second.send(hello(node))
        newer = peers.serve(second)
        first.end()
        await ended(older)
        assert (await second.receive()).HasField("accepted")
        second.end()
        with pytest.raises(NoNode):
            await ended(newer)


async def test_of_two_handshakes_of_one_incarnation_the_first_to_end_is_the_pair(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        slow, quick = PairStream(), PairStream()
        slow.send(hello(node))
        waiting = peers.serve(slow)
        accepted = (await slow.receive()).accepted
        serving = peers.serve(quick)
        await pair(quick, node)
        assert (await quick.receive()).HasField("ready")
        await link(slow, node, accepted, number=2 * MOST_RANKS)
        with pytest.raises(PeerRefused, match="is paired with this node already"):
            await ended(waiting)
        assert peers.phases() == ["READY"]
        quick.end()
        await ended(serving)


async def test_handshakes_beyond_a_limit_are_refused_until_others_end(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_peers, "_HANDSHAKES_MAX", 1)
    async with decode_peers(built) as peers, sender(built) as node:
        first, second = PairStream(), PairStream()
        first.send(hello(node))
        serving = peers.serve(first)
        await first.receive()
        second.send(hello(node))
        with pytest.raises(Overloaded):
            await ended(peers.serve(second))
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended(serving)
        third = PairStream()
        third.send(hello(node))
        serving = peers.serve(third)
        assert (await third.receive()).HasField("accepted")
        third.end()
        with pytest.raises(NoNode):
            await ended(serving)


async def test_closing_ends_the_streams_after_their_queued_messages(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        await pair(stream, node)
        assert (await stream.receive()).HasField("ready")
        peers.all.send_lease_ended(6)
        peers.all.close()
        await ended(serving)
        assert [response.lease_ended.lease for response in stream.received()] == [6]


async def test_a_stream_without_hello_is_refused(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers:
        stream = PairStream()
        stream.send(pb.PairRequest(quiet=pb.Quiet(lease=1)))
        with pytest.raises(PeerRefused, match="not a hello"):
            await ended(peers.serve(stream))
        assert (peers.all.states({}), peers.delivered) == ([], [])


async def test_a_peer_with_another_model_is_refused_with_the_reason(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        other = hello(node)
        other.hello.info.model.weights_digest = "another"
        stream.send(other)
        await ended(peers.serve(stream))
        (refused,) = stream.received()
        assert [mismatch.field for mismatch in refused.refused.mismatches] == ["weights_digest"]
        (state,) = peers.all.states({})
        assert (state.phase, list(state.mismatches)) == (
            node_status_pb2.PEER_PHASE_REFUSED,
            list(refused.refused.mismatches),
        )


async def test_a_peer_with_a_layout_of_a_newer_version_is_refused(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        newer = hello(node)
        newer.hello.info.cache_shape.layout = "newer"
        stream.send(newer)
        with pytest.raises(PeerRefused, match="layout 'newer'"):
            await ended(peers.serve(stream))
        assert peers.phases() == ["LOST"]


async def test_a_link_below_the_floor_is_refused_with_its_measurement(built: BuiltRunner) -> None:
    async with decode_peers(built, link_floor_gb_per_s=1e6) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        await pair(stream, node)
        (mismatch,) = (await stream.receive()).refused.mismatches
        assert mismatch.field == "link"
        await ended(serving)
        (state,) = peers.all.states({})
        assert state.phase == node_status_pb2.PEER_PHASE_REFUSED
        assert state.gigabytes_per_s > 0


async def test_a_peer_that_refuses_the_link_itself_is_kept_as_refused(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        await pair(stream, node)
        assert (await stream.receive()).HasField("ready")
        stream.send(pb.PairRequest(refused=pb.PairRefused(mismatches=[node_status_pb2.Mismatch(field="link")])))
        await ended(serving)
        (state,) = peers.all.states({})
        assert (state.phase, [each.field for each in state.mismatches]) == (
            node_status_pb2.PEER_PHASE_REFUSED,
            ["link"],
        )


async def test_a_peer_that_sends_no_warm_up_is_lost(built: BuiltRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_peer, "_WARM_UP_TIMEOUT_S", 0.05)
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        stream.send(hello(node))
        await ended(peers.serve(stream))
        (state,) = peers.all.states({})
        assert (state.phase, state.detail) == (node_status_pb2.PEER_PHASE_LOST, "no warm-up within 0.05 s")


async def test_a_cancelled_stream_disconnects_its_peer(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        await pair(stream, node)
        assert (await stream.receive()).HasField("ready")
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended(serving)
        assert isinstance(peers.delivered[-1], PeerLost)
        assert peers.phases() == ["LOST"]


async def test_a_stream_that_is_cancelled_after_its_end_disconnects_its_peer(built: BuiltRunner) -> None:
    """gRPC reports the end of a stream and its cancellation one after the other."""
    async with decode_peers(built) as peers, sender(built) as node:
        stream = PairStream()
        serving = peers.serve(stream)
        first = await pair(stream, node)
        assert (await stream.receive()).HasField("ready")
        stream.end()
        while peers.phases() == ["READY"]:  # noqa: ASYNC110  until it disconnects, which takes longer
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended(serving)
        await until(lambda: peers.delivered == [PeerLost(first.sender_number, node.name, ())])


async def test_a_stream_that_ends_during_the_handshake_has_a_typed_error(built: BuiltRunner) -> None:
    async with decode_peers(built) as peers, sender(built) as node:
        for requests in ([], [hello(node)]):
            stream = PairStream()
            stream.send(*requests)
            stream.end()
            with pytest.raises(NoNode, match="during the handshake"):
                await ended(peers.serve(stream))
        assert peers.phases() == ["LOST"]


async def test_lost_peers_are_forgotten_when_there_are_many(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6, but for a few lines in the status."""
    monkeypatch.setattr(prefill_peers, "_PAST_MAX", 3)
    async with decode_peers(built) as peers, sender(built) as node:
        for port in range(5):
            stream = PairStream()
            request = hello(node)
            request.hello.info.address = f"127.0.0.1:{port}"
            request.hello.info.incarnation = 100 + port
            stream.send(request)
            serving = peers.serve(stream)
            await stream.receive()
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ended(serving)
        assert [state.address for state in peers.all.states({})] == ["127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4"]
