"""A small engine, a lease table and gateways around a decode node's machine. They check every command."""

from collections import Counter, deque
from dataclasses import dataclass, field

from baton.core.errors import BatonError, InternalError, Overloaded
from baton.core.types import FinishReason
from baton.engine.request import Reservation
from decode_node.commands import (
    Abort,
    Admit,
    CloseLease,
    Command,
    EndSession,
    ExtendReserved,
    OpenLease,
    PrefillHere,
    Reserve,
    Send,
    SendLeaseEnded,
)
from decode_node.events import (
    Aborted,
    Admitted,
    EngineRefused,
    Event,
    LeaseClosed,
    LeaseFailed,
    LeaseFilled,
    LeaseOpened,
    Reserved,
)
from decode_node.machine import DecodeMachine
from kvtransfer.leases import LeaseTotals

BLOCK_SIZE = 16


@dataclass
class Request:
    """The environment's record of one request.

    Attributes:
        deadline_s: end of its budget; None: it has none.
        over: the request has failed, finished or been cancelled.
    """

    deadline_s: float | None = None
    over: bool = False
    sent: list[str] = field(default_factory=list)
    lease: int | None = None


@dataclass
class Lease:
    request: str
    state: str = "opening"
    filled: bool = False


class Environment:
    """Engine commands are answered at once; aborts and leases when the test says so.

    Attributes:
        held: the blocks of each request that the engine knows.
        aborting: requests whose abort the engine has not answered.
        finish_first: the next admitted request ends with its first token.
        refuse_next: the engine refuses its next command.
    """

    def __init__(self, machine: DecodeMachine, *, num_blocks: int) -> None:
        self.machine = machine
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.free = list(range(num_blocks))
        self.held: dict[str, tuple[int, ...]] = {}
        self.running: set[str] = set()
        self.aborting: dict[str, None] = {}
        self.aborted: Counter[str] = Counter()
        self.leases: dict[int, Lease] = {}
        self.ended_sessions: Counter[int] = Counter()
        self.finish_first = False
        self.refuse_next: BatonError | None = None

    def on(self, event: Event) -> None:
        events = deque([event])
        while events:
            for command in self.machine.handle(events.popleft(), self.now_s):
                answer = self._execute(command)
                if answer is not None:
                    events.append(answer)
        self._check_deadlines()

    def _check_deadlines(self) -> None:
        """I5: no request waits past its budget without a timer."""
        for request in self.requests.values():
            if request.deadline_s is not None and not request.over:
                assert self.machine.deadline_s is not None
                assert self.machine.deadline_s <= request.deadline_s

    # ---- commands of the machine

    def _execute(self, command: Command) -> Event | None:
        match command:
            case Send():
                self._sent(command)
            case EndSession(session=session):
                self.ended_sessions[session] += 1
            case SendLeaseEnded(lease=lease):
                assert lease in self.leases
            case OpenLease():
                self._open(command)
            case CloseLease(lease=lease):
                assert self.leases[lease].state in ("open", "broken"), "a lease is closed once, after it is open"
                self.leases[lease].state = "closing"
            case Abort(engine_id=engine_id):
                self._abort(engine_id)
            case Reserve():
                return self._reserve(command)
            case ExtendReserved(engine_id=engine_id):
                self._check_exclusive(engine_id)
                refused = self._refusal(engine_id)
                return refused or Reserved(engine_id, self._reservation(engine_id))
            case Admit(engine_id=engine_id):
                return self._admit(engine_id)
            case PrefillHere(engine_id=engine_id):
                self._check_exclusive(engine_id)
                if refused := self._refusal(engine_id):
                    return refused
                self.running.add(engine_id)
        return None

    def _refusal(self, engine_id: str) -> EngineRefused | None:
        error, self.refuse_next = self.refuse_next, None
        return None if error is None else EngineRefused(engine_id, error)

    def _reserve(self, command: Reserve) -> Event:
        engine_id = command.request.request_id
        assert engine_id not in self.held
        assert not self.aborted[engine_id], "an ended request takes no blocks"
        if refused := self._refusal(engine_id):
            return refused
        needed = 1 + len(command.request.prompt) // BLOCK_SIZE
        if needed > len(self.free):
            return EngineRefused(engine_id, Overloaded("no room for the request's blocks"))
        self.held[engine_id] = tuple(self.free.pop() for _ in range(needed))
        return Reserved(engine_id, self._reservation(engine_id))

    def _reservation(self, engine_id: str) -> Reservation:
        return Reservation(engine_id, self.held[engine_id], cached_tokens=0, resume_at=0)

    def _check_exclusive(self, engine_id: str) -> None:
        """I3: nothing may write to the blocks from elsewhere when the engine is given them."""
        assert engine_id in self.held
        assert engine_id not in self.running
        assert all(lease.state == "closed" for lease in self.leases.values() if lease.request == engine_id)

    def _admit(self, engine_id: str) -> Event:
        self._check_exclusive(engine_id)
        lease = self.requests[engine_id].lease
        assert lease is not None
        assert self.leases[lease].filled, "I3: admitted before all KV was there"
        if refused := self._refusal(engine_id):
            return refused
        if self.finish_first:
            self.finish(engine_id)
            return Admitted(engine_id, FinishReason.STOP)
        self.running.add(engine_id)
        return Admitted(engine_id, None)

    def _abort(self, engine_id: str) -> None:
        assert all(lease.state == "closed" for lease in self.leases.values() if lease.request == engine_id), (
            "I3: blocks are given back while a lease is open"
        )
        self.aborted[engine_id] += 1
        assert self.aborted[engine_id] == 1, "I1: blocks are given back once"
        self.aborting[engine_id] = None
        self.requests[engine_id].over = True

    def _open(self, command: OpenLease) -> None:
        grant = command.grant
        assert grant.number == len(self.leases) + 1, "numbers count from 1 and are never used twice"
        (engine_id,) = [engine_id for engine_id, blocks in self.held.items() if blocks == grant.block_ids]
        assert engine_id not in self.running
        self.leases[grant.number] = Lease(engine_id)
        self.requests[engine_id].lease = grant.number

    def _sent(self, command: Send) -> None:
        kind = command.message.WhichOneof("message")
        assert kind is not None
        if kind == "step":
            keys = [token.key for token in command.message.step.tokens]
            assert len(keys) == len(set(keys))
            for key in keys:
                self._note(f"{command.session}.{key}", "token")
            return
        key = getattr(command.message, kind).key
        self._note(f"{command.session}.{key}", kind)

    def _note(self, engine_id: str, kind: str) -> None:
        request = self.requests[engine_id]
        assert "released" not in request.sent, "I5: Released is the last message of a request"
        if kind == "failed":
            assert "failed" not in request.sent
            request.over = True
        if kind == "released":
            assert engine_id not in self.held, "I1: released while blocks are held"
            assert engine_id not in self.aborting
            request.over = True
        request.sent.append(kind)

    # ---- events

    def finish(self, engine_id: str) -> None:
        """The engine ends a request by itself and frees its blocks."""
        self.running.discard(engine_id)
        self.free += self.held.pop(engine_id)
        self.requests[engine_id].over = True

    def end_abort(self, engine_id: str) -> None:
        del self.aborting[engine_id]
        self.running.discard(engine_id)
        self.free += self.held.pop(engine_id, ())
        self.on(Aborted(engine_id))

    def end_opening(self, number: int, *, fails: bool = False) -> None:
        lease = self.leases[number]
        lease.state = "broken" if fails else "open"
        self.on(LeaseFailed(number, InternalError("a rank failed")) if fails else LeaseOpened(number))

    def end_closing(self, number: int, *, fails: bool = False) -> None:
        self.leases[number].state = "closed"
        totals = LeaseTotals(number, 10, 1, 0.1)
        self.on(LeaseFailed(number, InternalError("a rank failed")) if fails else LeaseClosed(totals))

    def fill(self, number: int) -> None:
        self.leases[number].filled = True
        self.on(LeaseFilled(LeaseTotals(number, 10, 1, 0.1)))

    def numbers(self, *states: str) -> list[int]:
        return [number for number, lease in self.leases.items() if lease.state in states]

    def settle(self) -> None:
        """Completes everything that the machine waits for."""
        while self.aborting or self.numbers("opening", "closing"):
            for number in self.numbers("opening"):
                self.end_opening(number)
            for number in self.numbers("closing"):
                self.end_closing(number)
            for engine_id in list(self.aborting):
                self.end_abort(engine_id)
