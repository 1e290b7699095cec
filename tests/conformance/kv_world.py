"""One receiver in a world in which everything happens only when it is told to: messages arrive, requests and copies
end, peers vanish. The receiver, its lease table and its staging are the real ones; a world can be copied at any
moment, so that every order of events can be tried.
"""

import copy
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention.cache import PagedKVCache
from attention.layout import KVCacheLayout
from attention.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.errors import BatonError, DataLoss
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.movers import CpuMover, Done, DoneReading, Pending
from kvtransfer.receiver import Receiver
from kvtransfer.records import Ledger, Peer, SegmentRefused
from kvtransfer.segments import TRAILER_BYTES, Segment, Tag
from kvtransfer.staging import Pools, Slot, StagingPool
from kvtransfer.transport import Arrival

SPEC = KVCacheSpec(KVKind.MLA, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
INCARNATION = 5
SLOT_BYTES = SPEC.bytes_per_token + TRAILER_BYTES
POISON = -1.0
# Events by which the world goes on without anybody's doing.
_COMING = ("arrive", "end", "copy")

Event = tuple[str, int]


def value_of(lease: int, token: int) -> float:
    """What the sender's cache has there; no two tokens have the same."""
    return 100.0 * lease + token


@dataclass(eq=False)
class Network:
    """A transport whose messages wait until they are taken, and whose receives end when they are told to."""

    queues: dict[int, deque[tuple[int, bytes]]]
    requests: "list[Receive]" = field(default_factory=list)

    def probe(self) -> Arrival | None:
        for peer, queue in self.queues.items():
            if queue:
                tag, message = queue.popleft()
                return Arrival(peer, tag, len(message), message)
        return None

    def receive(self, arrival: Arrival, into: Tensor) -> "Receive":
        assert isinstance(arrival.handle, bytes)
        request = Receive(arrival.peer, arrival.tag, arrival.handle, into)
        self.requests.append(request)
        return request

    def discard(self, arrival: Arrival) -> None:
        """Nothing waits for it."""

    def disconnect(self, peer: int) -> None:
        self.queues.pop(peer, None)
        for request in self.requests:
            request.cancelled = request.cancelled or request.peer == peer


@dataclass(eq=False)
class Receive:
    """A message on its way into a slot. Its bytes are written when it ends, so a slot used by another one is found."""

    peer: int
    tag: int
    message: bytes
    into: Tensor
    done: bool = False
    cancelled: bool = False

    def failure(self) -> BatonError | None:
        return DataLoss("the link was closed") if self.cancelled else None

    def end(self) -> None:
        if not self.cancelled:
            self.into.copy_(torch.frombuffer(bytearray(self.message), dtype=torch.uint8))
        self.done = True


@dataclass(eq=False)
class Copy:
    """A reading or a scatter, which happens when it is told to."""

    slot: Slot
    num_bytes: int
    segment: Segment | None = None
    block_ids: Tensor | None = None
    result: Done | DoneReading | None = None

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def digest(self) -> int:
        return 0

    @property
    def trailer(self) -> bytes:
        assert isinstance(self.result, DoneReading)
        return self.result.trailer

    @property
    def extremes(self) -> tuple[int, int]:
        return (0, 0)


@dataclass(eq=False)
class Copies:
    """A mover for a CPU's cache whose operations wait."""

    cpu: CpuMover
    waiting: list[Copy] = field(default_factory=list)
    on_gpu: bool = False

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> Copy:
        assert not with_digest
        assert not with_extremes
        self.waiting.append(Copy(slot, num_bytes))
        return self.waiting[-1]

    def scatter(self, slot: Slot, block_ids: Tensor, segment: Segment) -> Copy:
        self.waiting.append(Copy(slot, segment.payload_bytes, segment, block_ids))
        return self.waiting[-1]

    def end(self, operation: Copy) -> None:
        self.waiting.remove(operation)
        if operation.segment is None or operation.block_ids is None:
            operation.result = self.cpu.read(
                operation.slot, operation.num_bytes, with_digest=False, with_extremes=False
            )
        else:
            operation.result = self.cpu.scatter(operation.slot, operation.block_ids, operation.segment)


@dataclass(eq=False)
class Closing:
    """What a lease's owner waits on after `close`."""

    lease: int
    totals: LeaseTotals | None = None

    def set_result(self, totals: LeaseTotals) -> None:
        assert self.totals is None
        self.totals = totals

    def set_exception(self, error: Exception) -> None:
        raise error


def _nothing() -> None:
    """Between parts of a digest, and when the receiver wants to catch up with calls: there is nothing else to do."""


class World:
    """A receiver with one lease for each peer, each of as many segments of one token.

    Events: ("arrive", peer), ("again", peer) for a message sent twice, ("step", 0), ("end", request), ("copy",
    operation), ("close", lease), ("lose", peer). Leases are numbered like the peers that fill them.
    """

    def __init__(self, peers: tuple[int, ...], *, segments: int, slots: int, repeats: int) -> None:
        self.segments = segments
        self.cache = PagedKVCache(SPEC, KVCacheShape(KVCacheLayout.NHD, 1, len(peers) * segments))
        self.cache.view.fill_(POISON)
        self.network = Network({peer: deque() for peer in peers})
        self.copies = Copies(CpuMover(self.cache, _nothing))
        self.ledger = Ledger(peers={peer: Peer(peer, SLOT_BYTES, "simulated") for peer in peers})
        self.pool = StagingPool(slot_bytes=SLOT_BYTES, slots=slots, device=torch.device("cpu"))
        self.sent = dict.fromkeys(peers, 0)
        self.repeats = repeats
        self.filled: set[int] = set()
        self.closing: dict[int, Closing] = {}
        self.closed: dict[int, list[float]] = {}  # lease: what its blocks held when it was over
        # Of mover and transport, they do what a receiver asks for.
        mover: Any = self.copies
        transport: Any = self.network
        self.receiver = Receiver(
            self.cache,
            mover,
            transport,
            self.ledger,
            Pools(direct=self._the_pool, in_host=self._the_pool),
            slot_bytes=SLOT_BYTES,
            incarnation=INCARNATION,
            digests=False,
            on_filled=self._on_filled,
            on_refused=self._on_refused,
            catch_up=_nothing,
        )
        for index, peer in enumerate(peers):
            self.receiver.open(LeaseGrant(peer, self._blocks(index), 0, segments))
        self.lost: set[int] = set()
        self.refused: Counter[str] = Counter()

    def _the_pool(self) -> StagingPool:
        return self.pool

    def _blocks(self, index: int) -> tuple[int, ...]:
        return tuple(range(index * self.segments, (index + 1) * self.segments))

    def _held(self, lease: int) -> list[float]:
        start = list(self.sent).index(lease) * self.segments
        values: list[float] = self.cache.view.flatten()[start : start + self.segments].tolist()
        return values

    def _on_filled(self, totals: LeaseTotals) -> None:
        lease = totals.number
        assert lease not in self.filled, "told once"
        assert lease not in self.closing, "nobody waits for it any more"
        assert self._held(lease) == [value_of(lease, token) for token in range(self.segments)], "I2"
        self.filled.add(lease)

    def _on_refused(self, refused: SegmentRefused) -> None:
        self.refused[refused.refusal.name] += 1

    # ---- events

    def possible(self) -> Iterator[Event]:
        """Events that can happen now, apart from a step, which always can."""
        for peer in self.sent:
            if peer not in self.lost:
                if self.sent[peer] < self.segments:
                    yield "arrive", peer
                if self.repeats and self.sent[peer]:
                    yield "again", peer
                yield "lose", peer
            if peer not in self.closing:
                yield "close", peer
        yield from (("end", index) for index in range(len(self.network.requests)))
        yield from (("copy", index) for index in range(len(self.copies.waiting)))

    def happen(self, event: Event) -> None:
        kind, number = event
        match kind:
            case "arrive":
                self.network.queues[number].append(self._message(number, self.sent[number]))
                self.sent[number] += 1
            case "again":
                self.network.queues[number].append(self._message(number, self.sent[number] - 1))
                self.repeats -= 1
            case "step":
                self.receiver.step()
            case "end":
                self.network.requests.pop(number).end()
            case "copy":
                self.copies.end(self.copies.waiting[number])
            case "close":
                future: Any = Closing(number)
                self.closing[number] = future
                self.receiver.close(number, future)
            case "lose":
                self.lost.add(number)
                self.ledger.peers.pop(number)
                self.receiver.lost(number)
                self.network.disconnect(number)
        self._check()

    def _message(self, peer: int, token: int) -> tuple[int, bytes]:
        size = SPEC.bytes_per_token
        segment = Segment(INCARNATION, peer, token, 0, 1, token, token + 1, 0, 1, size)
        payload = torch.tensor([value_of(peer, token)]).view(torch.uint8).numpy().tobytes()
        return Tag(peer, peer, token).pack(), payload + segment.encode()

    def _check(self) -> None:
        for lease, closing in self.closing.items():
            if closing.totals is not None:
                held = self._held(lease)
                assert self.closed.setdefault(lease, held) == held, "I3: written to after its lease was over"
        for lease in self.sent:
            wrong = {POISON, *(value_of(lease, token) for token in range(self.segments))}
            assert wrong.issuperset(self._held(lease)), "I3: another lease's tokens"

    def check_end(self) -> None:
        """Nothing is under way and nothing can come: no slot is lost, and nothing of lost peers is kept."""
        assert self.pool.available == self.pool.slots, "no slot is lost"
        assert self.receiver.in_flight == 0
        assert all(closing.totals is not None for closing in self.closing.values())
        for peer in self.lost:
            assert not self.receiver.holds(peer), "I6"
            assert all(tag.sender != peer for tag, _ in self.receiver._parked), "I6"
        for lease in set(self.sent) - set(self.closing) - self.lost:
            assert lease in self.filled, "a lease whose sender lives and sent all is filled"

    # ---- exploring

    def key(self) -> Any:
        """Equal for worlds that behave alike."""
        receiver = self.receiver
        stages = tuple(
            (item.tag.pack(), item.request.done, self._stage(item.reading), self._stage(item.scatter))
            for item in receiver._receptions
        )
        leases = tuple(
            (number, lease.sender, lease.closing, lease.scattering, lease.cells_missing, tuple(sorted(lease.seen)))
            for number, lease in receiver._leases._leases.items()
        )
        queues = tuple((peer, tuple(tag for tag, _ in queue)) for peer, queue in self.network.queues.items())
        return (
            stages,
            leases,
            queues,
            tuple(tag.pack() for tag, _ in receiver._parked),
            tuple((request.tag, request.cancelled) for request in self.network.requests),
            tuple((copy.slot.index, copy.segment is None) for copy in self.copies.waiting),
            tuple(self.sent.values()),
            self.repeats,
            frozenset(self.filled),
            frozenset(self.lost),
            tuple(sorted((lease, closing.totals is None) for lease, closing in self.closing.items())),
            tuple(self.cache.view.flatten().tolist()),
        )

    @staticmethod
    def _stage(operation: Pending | None) -> bool | None:
        return None if operation is None else operation.done

    def copied(self) -> "World":
        constants: list[object] = [SPEC, _nothing, self.cache.spec, self.cache.shape, *self.ledger.peers.values()]
        for item in self.receiver._receptions:
            constants += [item.tag, item.segment]
        for lease in self.receiver._leases._leases.values():
            constants += [lease.grant, self.receiver._block_ids[lease.grant.number]]
        return copy.deepcopy(self, {id(value): value for value in constants})


@dataclass(frozen=True)
class Explored:
    """How many worlds differ, and in how many of them nothing can come any more."""

    worlds: int
    ends: int


def explore(world: World) -> Explored:
    """Tries every order of events, the receiver looking after each; calls that end a lease or a link also come between
    another event and the look, as they do when both happened since the last one."""
    seen = {world.key()}
    frontier = [(world, False)]
    ends = 0
    while frontier:
        here, is_behind = frontier.pop()
        possible = list(here.possible())
        if is_behind:
            nexts = [[event] for event in possible if event[0] in ("close", "lose")]
        else:
            nexts = [[event] for event in possible]
            ends += _is_over(here, possible)
        for events in [*nexts, []]:
            looked = here.copied()
            for event in events:
                looked.happen(event)
            if events and not is_behind:
                unseen = looked.copied()
                if _new(seen, unseen.key(), "behind"):
                    frontier.append((unseen, True))
            looked.happen(("step", 0))
            if _new(seen, looked.key(), ""):
                frontier.append((looked, False))
    return Explored(len(seen), ends)


def _is_over(world: World, possible: list[Event]) -> bool:
    """Checks a world in which, once the receiver has looked, only owners of leases and links could do anything."""
    if any(kind in _COMING for kind, _ in possible):
        return False
    settled = world.copied()
    while settled.receiver.step():
        """It looks again for as long as that brings anything."""
    over = all(kind not in _COMING for kind, _ in settled.possible())
    if over:
        settled.check_end()
    return over


def _new(seen: set[Any], key: Any, kind: str) -> bool:
    before = len(seen)
    seen.add((kind, key))
    return len(seen) > before
