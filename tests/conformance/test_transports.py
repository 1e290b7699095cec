"""The behaviour of every transport, in one suite: two ends in this process, driven by hand."""

import gc
import select
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.core.errors import ConfigError, DataLoss, PeerRefused
from kvtransfer.transports import ucx_address
from kvtransfer.transports.table import TRANSPORTS, open_transport
from kvtransfer.transports.transport import Arrival, TransferRequest, Transport

NAMES = tuple(TRANSPORTS)
# Long enough for any machine: only a hanging test takes that long.
DEADLINE_S = 60.0
# After so many rounds of progress without an event, no event comes by itself.
ROUNDS = 2000


@dataclass(frozen=True)
class Link:
    """A sender's and a receiver's end, which are peers 1 and 2 to each other, and a third end without peers."""

    sender: Transport
    receiver: Transport
    third: Transport

    def progress(self) -> None:
        for end in (self.sender, self.receiver, self.third):
            end.progress()

    def pump(self, until: Callable[[], bool]) -> bool:
        """Drives all ends until something holds; False at the deadline."""
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            self.progress()
            if until():
                return True
        return False

    def settle(self) -> None:
        """Drives all ends until nothing more happens by itself."""
        for _ in range(ROUNDS):
            self.progress()

    def arrivals(self, count: int) -> list[Arrival]:
        found: list[Arrival] = []

        def probe() -> bool:
            arrival = self.receiver.probe()
            if arrival is not None:
                found.append(arrival)
            return len(found) == count

        assert self.pump(probe)
        return found

    def complete(self, *requests: TransferRequest) -> None:
        assert self.pump(lambda: all(request.done for request in requests))
        assert [request.failure() for request in requests] == [None] * len(requests)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def link(name: str) -> Iterator[Link]:
    ends = sender, receiver, _ = open_transport(name), open_transport(name), open_transport(name)
    join(sender, 2, receiver, 1)
    yield Link(*ends)
    for end in ends:
        end.close()


def join(one: Transport, peer_of_one: int, other: Transport, peer_of_other: int) -> None:
    one_address, other_address = one.listen(peer_of_one), other.listen(peer_of_other)
    one.connect(peer_of_one, other_address)
    other.connect(peer_of_other, one_address)


def message(num_bytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_bytes", [1, 71, 8191, 8192, 100_000, 6 << 20])
def test_a_message_arrives_with_its_tag_size_and_bytes(link: Link, num_bytes: int) -> None:
    sent = message(num_bytes)
    request = link.sender.send(2, 2**64 - num_bytes, sent)
    (arrival,) = link.arrivals(1)
    assert (arrival.tag, arrival.num_bytes) == (2**64 - num_bytes, num_bytes)
    into = torch.zeros(num_bytes, dtype=torch.uint8)
    link.complete(request, link.receiver.receive(arrival, into))
    assert torch.equal(into, sent)


def test_memory_that_was_made_for_one_message_is_freed_after_it(link: Link) -> None:
    sent, into = message(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    kept = weakref.ref(sent), weakref.ref(into)
    request = link.sender.send(2, 1, sent)
    link.complete(request, link.receiver.receive(link.arrivals(1)[0], into))
    del sent, into, request
    # Ends of requests may be noticed with the next event only.
    link.sender.send(2, 2, message(8))
    link.receiver.send(1, 2, message(8))
    assert link.pump(lambda: (arrival := link.sender.probe()) is not None and arrival.tag == 2)
    link.receiver.discard(link.arrivals(1)[0])
    link.settle()
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_messages_may_be_taken_in_any_order(link: Link) -> None:
    sizes = [5, 300_000, 70, 20_000, 1 << 20]
    sent = {tag: message(size, seed=tag) for tag, size in enumerate(sizes)}
    requests = [link.sender.send(2, tag, sent[tag]) for tag in sent]
    arrivals = link.arrivals(len(sizes))
    into = {arrival.tag: torch.zeros(arrival.num_bytes, dtype=torch.uint8) for arrival in arrivals}
    receives = [link.receiver.receive(arrival, into[arrival.tag]) for arrival in reversed(arrivals)]
    link.complete(*requests, *receives)
    assert all(torch.equal(into[tag], sent[tag]) for tag in sent)


def test_a_large_message_waits_at_its_sender_until_it_is_taken(link: Link) -> None:
    sent = message(4 << 20)
    request = link.sender.send(2, 1, sent)
    (arrival,) = link.arrivals(1)
    link.settle()
    assert not request.done
    into = torch.zeros(arrival.num_bytes, dtype=torch.uint8)
    link.complete(request, link.receiver.receive(arrival, into))
    assert torch.equal(into, sent)


@pytest.mark.parametrize("num_bytes", [71, 5000, 100_000, 4 << 20])
def test_a_discarded_message_frees_its_sender(link: Link, num_bytes: int) -> None:
    request = link.sender.send(2, 1, message(num_bytes))
    link.receiver.discard(link.arrivals(1)[0])
    link.complete(request)


def test_a_message_of_a_peer_that_was_never_connected_can_be_discarded(link: Link) -> None:
    link.third.listen(9)
    link.third.connect(9, link.receiver.listen(4))
    requests = [link.third.send(9, 77, message(num_bytes)) for num_bytes in (71, 5000, 1 << 20)]
    for arrival in link.arrivals(3):
        assert (arrival.peer, arrival.tag) == (4, 77)
        link.receiver.discard(arrival)
    link.complete(*requests)


def test_disconnecting_cancels_sends_that_are_not_received(link: Link) -> None:
    requests = [link.sender.send(2, tag, message(1 << 20)) for tag in range(3)]
    link.arrivals(3)
    link.sender.disconnect(2)
    assert link.pump(lambda: all(request.done for request in requests))
    assert all(isinstance(request.failure(), DataLoss) for request in requests)


def test_disconnecting_ends_the_receives_under_way(link: Link) -> None:
    link.sender.send(2, 1, message(16 << 20))
    (arrival,) = link.arrivals(1)
    receive = link.receiver.receive(arrival, torch.zeros(arrival.num_bytes, dtype=torch.uint8))
    link.receiver.disconnect(1)
    assert link.pump(lambda: receive.done)
    assert isinstance(receive.failure(), DataLoss)


def test_a_message_of_a_peer_that_was_disconnected_since_can_be_discarded(link: Link) -> None:
    request = link.sender.send(2, 1, message(1 << 20))
    (arrival,) = link.arrivals(1)
    link.receiver.disconnect(1)
    link.receiver.discard(arrival)
    link.sender.disconnect(2)
    assert link.pump(lambda: request.done)


def test_other_peers_do_not_notice_a_disconnect(link: Link) -> None:
    join(link.third, 2, link.receiver, 3)
    link.sender.send(2, 1, message(1 << 20))
    (lost,) = link.arrivals(1)
    link.receiver.disconnect(1)
    sent = message(3 << 20, seed=5)
    request = link.third.send(2, 2, sent)
    (arrival,) = link.arrivals(1)
    into = torch.zeros(arrival.num_bytes, dtype=torch.uint8)
    link.complete(request, link.receiver.receive(arrival, into))
    assert torch.equal(into, sent)
    link.receiver.discard(lost)


def test_disconnecting_twice_or_from_an_unknown_peer_has_no_effect(link: Link) -> None:
    link.receiver.disconnect(1)
    link.receiver.disconnect(1)
    link.receiver.disconnect(12345)


def test_a_peer_can_be_connected_again(link: Link) -> None:
    link.receiver.disconnect(1)
    link.sender.disconnect(2)
    join(link.sender, 2, link.receiver, 1)
    request = link.sender.send(2, 8, message(100_000))
    (arrival,) = link.arrivals(1)
    into = torch.zeros(arrival.num_bytes, dtype=torch.uint8)
    link.complete(request, link.receiver.receive(arrival, into))


@pytest.mark.parametrize("address", [b"", b"somewhere", b"baton-ucx-1:1234damaged"])
def test_an_invalid_address_is_refused(link: Link, address: bytes) -> None:
    link.sender.listen(5)
    with pytest.raises(PeerRefused, match="address"):
        link.sender.connect(5, address)


@pytest.mark.parametrize("content", [b"", bytes(5), b"\x0c" + bytes(200)])
def test_an_address_of_no_worker_of_ucx_is_refused_although_its_checksum_is_right(content: bytes) -> None:
    """UCX itself would end the process."""
    end = open_transport("ucx")
    end.listen(5)
    with pytest.raises(PeerRefused, match="address"):
        end.connect(5, ucx_address.wrap(content, on_gpu=False))
    end.close()


def test_it_reports_the_lanes_that_carry_the_bytes(link: Link, name: str) -> None:
    assert link.sender.carrier(2) in TRANSPORTS[name].carriers


def test_a_wait_ends_when_a_message_arrives(link: Link) -> None:
    poll = select.poll()
    poll.register(link.receiver.fileno(), select.POLLIN)
    link.settle()
    for tag in range(3):
        assert link.pump(link.receiver.arm)
        assert poll.poll(0) == []
        request = link.sender.send(2, tag, message(300))
        end_s = time.monotonic() + DEADLINE_S
        while not poll.poll(0):
            link.sender.progress()
            assert time.monotonic() < end_s
        (arrival,) = link.arrivals(1)
        into = torch.zeros(arrival.num_bytes, dtype=torch.uint8)
        link.complete(request, link.receiver.receive(arrival, into))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="ucx") as error:
        open_transport("pigeon")
    assert set(error.value.allowed) == set(NAMES)


def test_messages_from_new_and_from_reused_memory_have_the_last_written_bytes(link: Link) -> None:
    kept, into = message(100), torch.zeros(100, dtype=torch.uint8)
    for tag in range(150):
        sent = kept if tag % 2 else message(100, seed=tag)
        kept.fill_(tag)
        request = link.sender.send(2, tag, sent)
        (arrival,) = link.arrivals(1)
        link.complete(request, link.receiver.receive(arrival, into))
        assert (arrival.tag, into.tolist()) == (tag, sent.tolist())
