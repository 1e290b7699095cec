"""Target: messages of gateways and prefill nodes to a decode node's machine, without sockets: thousands a second."""

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from random import Random

from google.protobuf.message import DecodeError

from baton.core.errors import DataLoss, Overloaded
from baton.core.types import FinishReason, TokenOutput
from baton.engine.events import StepEvents, TokenSampled
from baton.engine.request import Reservation
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from decode_node.commands import Abort, Admit, CloseLease, Command, ExtendReserved, OpenLease, PrefillHere, Reserve
from decode_node.events import (
    Aborted,
    Admitted,
    EngineRefused,
    Event,
    HandOverReceived,
    LeaseClosed,
    LeaseOpened,
    QuietReceived,
    Reserved,
    SegmentRefused,
    SessionClosed,
    SessionMessage,
    SessionOpened,
    StepDone,
    TimePassed,
)
from decode_node.local_prefill import UNKNOWN, local_prefill_reason
from decode_node.machine import DecodeMachine
from decode_node.rules import DecodeRules
from kvtransfer.leases import LeaseTotals
from tests.fuzz import mutate
from tests.fuzz.target import Case, Target, Targets

_SESSION = 1
_SUBMITS = (
    pb.SubmitRequest(key=1, request_id="r", prompt_token_ids=range(3, 40), policy=pb.LOCAL_POLICY_LOCAL),
    pb.SubmitRequest(key=2, prompt_token_ids=range(3, 99), prefill_available=True, max_queue_s=1.0, budget_s=5.0),
    pb.SubmitRequest(key=1, prompt_token_ids=range(9), output_token_ids=[5, 6], placement=pb.PLACEMENT_LOCAL),
)
_SESSION_MESSAGES = (
    *(pb.SessionRequest(submit=submit) for submit in _SUBMITS),
    *(pb.SessionRequest(submit=submit) for submit in _SUBMITS),
    pb.SessionRequest(renew=pb.RenewTicket(key=2, failed_lease=1, output_token_ids=[7])),
    pb.SessionRequest(here=pb.PrefillHere(key=2, failed_lease=1)),
    pb.SessionRequest(cancel=pb.CancelRequest(key=1)),
)
_HAND_OVER = pb.HandOver(lease=1, first_token=common_pb2.Token(token_id=5))
_QUIET = pb.Quiet(lease=1, error=common_pb2.ErrorDetail(message="m"))
# Besides messages: time passes, a segment is refused, the session ends.
_OTHERS = (b"time", b"refused", b"closed", b"step")


def make(random: Random) -> Case:
    """Pairs of a kind of event and its message."""
    parts: list[bytes] = [bytes([random.randrange(2)])]
    for _ in range(random.choice((1, 2, 4, 8))):
        match random.randrange(6):
            case 0:
                parts += [b"hand_over", mutate.changed_message(random, _HAND_OVER).SerializeToString()]
            case 1:
                parts += [b"quiet", mutate.changed_message(random, _QUIET).SerializeToString()]
            case 2:
                parts += [random.choice(_OTHERS), b""]
            case _:
                sample = random.choice(_SESSION_MESSAGES)
                changed = sample if random.random() < 0.3 else mutate.changed_message(random, sample)
                parts += [b"session", changed.SerializeToString()]
    return tuple(parts)


class _Node:
    """The machine, and an engine and a lease table that answer every command at once.

    Args:
        gives_leases: as of a decode node; else as of a prefill node that also decodes.
    """

    def __init__(self, *, gives_leases: bool) -> None:
        rules = DecodeRules(
            name="decode-0",
            address="127.0.0.1:7002",
            incarnation=77,
            lease_s=30.0,
            why_local=partial(local_prefill_reason, 32, streams=UNKNOWN),
            block_size=4,
            waiting_max=8,
            lease_secret=bytes(64),
            gives_leases=gives_leases,
        )
        self._machine = DecodeMachine(rules, itertools.count(1))
        self._now_s = 1000.0
        self._reserved = 0
        self.computing: list[str] = []
        self.on(SessionOpened(_SESSION))

    @property
    def busy(self) -> bool:
        return self._machine.busy

    def on(self, event: Event) -> None:
        events = deque([event])
        while events:
            for command in self._machine.handle(events.popleft(), self._now_s):
                events.extend(self._answers(command))

    def let_time_pass(self) -> None:
        self._now_s += 10.0
        self.on(TimePassed())

    def _answers(self, command: Command) -> Iterator[Event]:
        match command:
            case Reserve(request=request):
                self._reserved += 1
                if self._reserved % 4 == 0:
                    yield EngineRefused(request.request_id, Overloaded("no room"))
                else:
                    yield Reserved(request.request_id, Reservation(request.request_id, (1, 2), 0, 0))
            case ExtendReserved(engine_id=engine_id):
                yield Reserved(engine_id, Reservation(engine_id, (1, 2), 0, 0))
            case OpenLease(grant=grant):
                yield LeaseOpened(grant.number)
            case CloseLease(lease=lease):
                yield LeaseClosed(LeaseTotals(lease, 10, 1, 0.1))
            case Abort(engine_id=engine_id):
                yield Aborted(engine_id)
            case PrefillHere(engine_id=engine_id):
                self.computing.append(engine_id)
            case Admit(engine_id=engine_id):
                self.computing.append(engine_id)
                yield Admitted(engine_id, None)


def node_messages(case: Case) -> str | None:
    node = _Node(gives_leases=case[0] != b"\1")
    for kind, data in zip(case[1::2], case[2::2], strict=False):
        try:
            _deliver(node, kind, data)
        except DecodeError:
            return "malformed"
    node.on(SessionClosed(_SESSION))
    assert not node.busy, "a request outlives its session"
    return None


def _deliver(node: _Node, kind: bytes, data: bytes) -> None:
    match kind:
        case b"session":
            node.on(SessionMessage(_SESSION, pb.SessionRequest.FromString(data)))
        case b"hand_over":
            node.on(HandOverReceived(1, pb.HandOver.FromString(data), 5))
        case b"quiet":
            node.on(QuietReceived(1, pb.Quiet.FromString(data), 5))
        case b"time":
            node.let_time_pass()
        case b"refused":
            node.on(SegmentRefused(1, DataLoss("digest")))
        case b"step":
            sampled = tuple(TokenSampled(each, TokenOutput(5, 0), FinishReason.STOP, "") for each in node.computing)
            node.computing.clear()
            node.on(StepDone(StepEvents(1, 0.1, tokens=sampled)))
        case _:
            node.on(SessionClosed(_SESSION))
            node.on(SessionOpened(_SESSION))


def machine_targets() -> AbstractContextManager[Targets]:
    return nullcontext({"node_messages": Target(make, node_messages)})
