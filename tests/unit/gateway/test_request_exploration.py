"""One request on nodes that answer in any order and fail at any point. Late messages still arrive.

Nodes are scripts: each stream keeps its own order, and nothing is assumed about the order between streams.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import DataLoss, InternalError, NoNode, Overloaded
from baton.core.types import NO_SLO, LocalPolicy, Slo
from baton.gateway.core.events import (
    ClientCancelled,
    DecodeReplied,
    Event,
    FleetChanged,
    PrefillEnded,
    PrefillReplied,
    SessionLost,
    Started,
    TimePassed,
)
from baton.gateway.request.commands import (
    AskDecode,
    CallPrefill,
    CancelPrefill,
    Command,
    Finish,
    LeaveDecode,
    SubmitToDecode,
)
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway.served import (
    LENGTH,
    PROGRESS,
    SCHEDULED,
    SENT,
    Served,
    accepted,
    failed,
    first_token,
    hand_over_failed,
    of,
    replied,
    reserved,
    token,
)

NUM_TOKENS = 5
TIMEOUT_S = 100.0


@dataclass
class Stay:
    """One attempt as its decode node sees it."""

    number: int
    address: str
    num_given: int
    lease: int = 0
    decoding: bool = False
    stream: deque[Event] = field(default_factory=deque)

    def send(self, *messages: object) -> None:
        self.stream.extend(replied(self.number, message) for message in messages)  # type: ignore[arg-type]

    def reserve(self) -> None:
        self.lease += 1
        self.send(reserved(self.lease))

    def prefill_here(self) -> None:
        self.decoding = True
        self.send(accepted())
        self.decode_from(self.num_given)

    def admit(self, first: int) -> None:
        """All KV has arrived; the first token comes from the prefill node."""
        self.decoding = True
        self.send(decode_pb2.Admitted())
        self.decode_from(first + 1)

    def decode_from(self, index: int) -> None:
        last = NUM_TOKENS - 1
        self.send(*(token(each, LENGTH) if each == last else token(each) for each in range(index, NUM_TOKENS)))
        self.send(decode_pb2.Released())


class World:
    """The nodes of one request, and the request."""

    def __init__(self, policy: LocalPolicy, *, also_decode: bool, slo: Slo = NO_SLO) -> None:
        self.served = Served(
            prefills=2, decodes=2, policy=policy, timeout_s=TIMEOUT_S, also_decode=also_decode, slo=slo, start=False
        )
        self.stays: dict[int, Stay] = {}
        self.calls: dict[int, deque[Event]] = {}
        self.requests: dict[int, prefill_pb2.PrefillRequest] = {}  # by call
        self.ended_calls: set[int] = set()
        self.delivered: list[Event] = []
        self.late: deque[Event] = deque()  # from nodes that have died since
        self.give(Started())

    # ---- the request

    @property
    def live(self) -> bool:
        return not of(self.served.commands, Finish)

    def give(self, *events: Event, after_s: float = 0.0) -> None:
        self.delivered += events
        self.ended_calls |= {event.call for event in events if isinstance(event, PrefillEnded)}
        was_live = self.live
        commands = self.served.handle(*events, after_s=after_s)
        assert was_live or commands == [], "nothing is done after the end"
        for command in commands:
            self.obey(command)
        self.check()

    def check(self) -> None:
        served = self.served
        assert served.token_ids == [100 + index for index in range(len(served.token_ids))]
        deadline_s = served.machine.deadline_s
        if self.live:
            assert deadline_s is not None
            assert served.now_s < deadline_s <= TIMEOUT_S
            return
        assert deadline_s is None
        assert isinstance(served.commands[-1], Finish)
        assert len(of(served.commands, Finish)) == 1
        assert sorted(each.attempt for each in of(served.commands, LeaveDecode)) == sorted(self.stays)
        cancelled = {each.call for each in of(served.commands, CancelPrefill)}
        assert cancelled | self.ended_calls >= self.calls.keys()
        assert not isinstance(served.error, InternalError)
        if served.error is None:
            assert len(served.token_ids) == NUM_TOKENS

    # ---- nodes

    def obey(self, command: Command) -> None:
        match command:
            case SubmitToDecode(attempt, role, address, request):
                if role == node_status_pb2.ROLE_PREFILL:
                    assert request.placement == decode_pb2.PLACEMENT_LOCAL
                    assert request.policy != decode_pb2.LOCAL_POLICY_STRICT
                stay = self.stays[attempt] = Stay(attempt, address, len(request.output_token_ids))
                if request.prefill_available:
                    stay.reserve()
                else:
                    stay.prefill_here()
            case AskDecode(attempt, message):
                stay = self.stays[attempt]
                assert message.failed_lease == stay.lease
                if stay.decoding:
                    return  # the hand-over has succeeded meanwhile
                stay.num_given = len(message.output_token_ids)
                if isinstance(message, decode_pb2.RenewTicket):
                    stay.reserve()
                else:
                    stay.prefill_here()
            case CallPrefill(call, _, request):
                first = len(request.output_token_ids)
                finish = LENGTH if first == NUM_TOKENS - 1 else 0
                last = first_token(first, finish)  # type: ignore[arg-type]
                self.requests[call] = request
                self.calls[call] = deque(
                    [
                        *(PrefillReplied(call, reply) for reply in (SCHEDULED, PROGRESS, last, SENT)),
                        PrefillEnded(call, None),
                    ]
                )

    def kv_arrives(self) -> None:
        """The decode node has all KV of the last call; its first token may not have reached the gateway yet."""
        stay = self.stays[max(self.stays)]
        call = self.requests.get(max(self.calls, default=0))
        if call is None or stay.decoding or stay.stream or call.ticket.lease.number != stay.lease:
            return
        first = len(call.output_token_ids)
        if first == NUM_TOKENS - 1:
            stay.decoding = True
            stay.send(decode_pb2.Admitted(), decode_pb2.Released())
        else:
            stay.admit(first)

    # ---- one step of the world

    def step(self, action: str, which: int) -> None:
        stays = [stay for stay in self.stays.values() if stay.stream]
        calls = [stream for stream in self.calls.values() if stream]
        stay = self.stays[max(self.stays)]
        match action:
            case "decode node sends" if stays:
                self.give(stays[which % len(stays)].stream.popleft())
            case "prefill node sends" if calls:
                self.give(calls[which % len(calls)].popleft())
            case "all come together":
                streams = [each.stream for each in stays] + calls
                self.give(*(event for stream in streams for event in stream))
                for stream in streams:
                    stream.clear()
            case "KV arrives":
                self.kv_arrives()
            case "prefill node dies" if calls:
                stream = calls[which % len(calls)]
                call = next(number for number, each in self.calls.items() if each is stream)
                self.late += stream
                stream.clear()
                self.give(PrefillEnded(call, NoNode("connection refused")))
            case "decode node dies":
                self.late += stay.stream
                stay.stream.clear()
                self.served.fleet.lose(stay.address)
                self.give(SessionLost(stay.number, "gone"))
            case "hand-over fails" if stay.lease and not stay.decoding and not stay.stream:
                self.give(DecodeReplied(stay.number, hand_over_failed(DataLoss("digest"), stay.lease)))
            case "decode node fails":
                self.late += stay.stream
                stay.stream.clear()
                self.give(DecodeReplied(stay.number, failed((Overloaded("full"), DataLoss("damaged"))[which % 2])))
            case "late message" if self.late:
                event = self.late.popleft()
                old_attempt = isinstance(event, DecodeReplied) and event.attempt < stay.number
                old_call = isinstance(event, PrefillReplied) and event.call in self.ended_calls
                if old_attempt or old_call:
                    self.give(event)
            case "tokens twice":
                self.give(*(event for event in self.delivered if is_token_of(event, stay.number)))
            case "node is back":
                address = ("d1", "d2", "p1", "p2")[which % 4]
                self.served.fleet.connect(address, self.served.now_s, restarts=which % 3)
                if self.served.machine.waits_for_fleet:
                    self.give(FleetChanged())
            case "time passes":
                self.pass_time(1.0 + which)

    def pass_time(self, seconds: float) -> None:
        until_s = self.served.now_s + seconds
        while (deadline_s := self.served.machine.deadline_s) is not None and deadline_s <= until_s:
            self.give(TimePassed(), after_s=max(0.0, deadline_s - self.served.now_s))
        self.served.now_s = max(until_s, self.served.now_s)

    def finish(self) -> None:
        """Without further faults the request ends from any state."""
        for _ in range(500):
            if not self.live:
                return
            if self.served.machine.waits_for_fleet:
                self.step("node is back", 0)
            before = len(self.delivered)
            for action in ("decode node sends", "prefill node sends", "KV arrives"):
                if self.live:
                    self.step(action, 0)
            if len(self.delivered) == before:
                self.pass_time(5.0)
        raise AssertionError("the request did not end")


def is_token_of(event: Event, attempt: int) -> bool:
    return (
        isinstance(event, DecodeReplied)
        and event.attempt == attempt
        and isinstance(event.message, decode_pb2.StepToken)
        and not event.message.finish_reason
    )


ORDERLY = ["decode node sends"] * 6 + ["prefill node sends"] * 6 + ["KV arrives"] * 3 + ["all come together"]
FAULTS = [
    "prefill node dies",
    "decode node dies",
    "hand-over fails",
    "decode node fails",
    "late message",
    "tokens twice",
    "node is back",
    "time passes",
]


def steps_of(actions: list[str]) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 20)), min_size=30, max_size=60)


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from([LocalPolicy.PREFER, LocalPolicy.STRICT]),
    also_decode=st.booleans(),
    steps=steps_of(ORDERLY + FAULTS),
)
def test_any_interleaving_gives_every_token_once_and_one_end(
    policy: LocalPolicy, also_decode: bool, steps: list[tuple[str, int]]
) -> None:
    world = World(policy, also_decode=also_decode)
    for action, which in steps:
        if world.live:
            world.step(action, which)
    world.finish()


@settings(max_examples=150, deadline=None)
@given(steps=steps_of([*ORDERLY, "tokens twice"]))
def test_without_faults_any_order_and_batching_serves_the_request(steps: list[tuple[str, int]]) -> None:
    world = World(LocalPolicy.PREFER, also_decode=True)
    for action, which in steps:
        if world.live:
            world.step(action, which)
    world.finish()
    assert world.served.error is None


@settings(max_examples=100, deadline=None)
@given(steps=steps_of(ORDERLY + FAULTS))
def test_cancelling_at_any_point_closes_everything(steps: list[tuple[str, int]]) -> None:
    world = World(LocalPolicy.PREFER, also_decode=True)
    for action, which in steps:
        if world.live:
            world.step(action, which)
    if world.live:
        world.give(ClientCancelled(NoNode("the client is gone")))
    assert not world.live
