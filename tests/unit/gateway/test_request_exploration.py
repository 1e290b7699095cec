"""One request among nodes that answer in any order, fail at any point, and whose late messages still come.

Nodes are scripts: each stream keeps its own order, and nothing is assumed about the order between streams.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import DataLoss, NoNode, Overloaded
from baton.types import LocalPolicy
from gateway.commands import (
    AskDecode,
    CallPrefill,
    CancelPrefill,
    Command,
    Finish,
    LeaveDecode,
    SubmitToDecode,
)
from gateway.events import (
    Cancelled,
    DecodeReplied,
    Event,
    FleetChanged,
    PrefillEnded,
    PrefillReplied,
    SessionLost,
    Started,
    TimePassed,
)
from protos.baton.v1 import decode_pb2
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
        self.stream.extend(DecodeReplied(self.number, message) for message in messages)  # type: ignore[arg-type]

    def reserve(self) -> None:
        self.lease += 1
        self.send(reserved(self.lease))

    def prefill_here(self) -> None:
        self.decoding = True
        self.send(accepted())
        self.decode_from(self.num_given)

    def admit(self, first: int) -> None:
        """All KV up to the first token, which the prefill node sends, has come."""
        self.decoding = True
        self.send(decode_pb2.Admitted())
        self.decode_from(first + 1)

    def decode_from(self, index: int) -> None:
        last = NUM_TOKENS - 1
        self.send(*(token(each, LENGTH) if each == last else token(each) for each in range(index, NUM_TOKENS)))
        self.send(decode_pb2.Released())


class World:
    """The nodes of one request, and the request."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.served = Served(prefills=2, decodes=2, policy=policy, timeout_s=TIMEOUT_S, start=False)
        self.stays: dict[int, Stay] = {}
        self.calls: dict[int, deque[Event]] = {}
        self.ended_calls: set[int] = set()
        self.delivered: list[Event] = []
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
        if served.error is None:
            assert len(served.token_ids) == NUM_TOKENS

    # ---- nodes

    def obey(self, command: Command) -> None:
        match command:
            case SubmitToDecode(attempt, address, request):
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
                self.calls[call] = deque(
                    [
                        *(PrefillReplied(call, reply) for reply in (SCHEDULED, PROGRESS, last, SENT)),
                        PrefillEnded(call, None),
                    ]
                )

    def compute(self, call: int) -> None:
        """The prefill node's next event arrives; once everything was sent the decode node admits the request."""
        stream = self.calls[call]
        event = stream.popleft()
        self.give(event)
        if isinstance(event, PrefillReplied) and event.event.HasField("first_token"):
            self.hand_over(event.event.first_token.token.index)

    def hand_over(self, first: int) -> None:
        stay = self.stays[max(self.stays)]
        if not stay.decoding and stay.stream == deque():
            if first == NUM_TOKENS - 1:
                stay.decoding = True
                stay.send(decode_pb2.Admitted(), decode_pb2.Released())
            else:
                stay.admit(first)

    # ---- one step of the world

    def step(self, action: int, which: int) -> None:
        stays = [stay for stay in self.stays.values() if stay.stream]
        calls = [call for call, stream in self.calls.items() if stream]
        match action:
            case 0 | 1 | 2 if stays:
                self.give(stays[which % len(stays)].stream.popleft())
            case 3 | 4 | 5 if calls:
                self.compute(calls[which % len(calls)])
            case 6 if stays:  # everything of one stream at once
                events = tuple(stays[which % len(stays)].stream)
                stays[which % len(stays)].stream.clear()
                self.give(*events)
            case 7 if calls:  # the prefill node dies
                call = calls[which % len(calls)]
                self.calls[call].clear()
                self.give(PrefillEnded(call, NoNode("connection refused")))
            case 8 if self.stays:  # the decode node dies
                stay = list(self.stays.values())[which % len(self.stays)]
                stay.stream.clear()
                self.served.fleet.lose(stay.address)
                self.give(SessionLost(stay.number, "gone"))
            case 9 if self.stays:
                stay = self.stays[max(self.stays)]
                if not stay.decoding and stay.stream == deque():
                    self.give(DecodeReplied(stay.number, hand_over_failed(DataLoss("digest"), stay.lease)))
            case 10 if self.stays:
                stay = self.stays[max(self.stays)]
                stay.stream.clear()
                error = (Overloaded("full"), DataLoss("damaged"))[which % 2]
                self.give(DecodeReplied(stay.number, failed(error)))
            case 11 if self.delivered:  # late: an older message, once more, if its attempt or call is over
                event = self.delivered[which % len(self.delivered)]
                old_attempt = isinstance(event, DecodeReplied | SessionLost) and event.attempt < max(self.stays)
                old_call = isinstance(event, PrefillReplied | PrefillEnded) and event.call < max(self.calls)
                if old_attempt or old_call:
                    self.give(event)
            case 12:  # duplicate tokens of the decode node
                tokens = [event for event in self.delivered if is_current_token(event, max(self.stays, default=0))]
                self.give(*tokens[:which])
            case 13:
                address = ("d1", "d2", "p1", "p2")[which % 4]
                self.served.fleet.connect(address, self.served.now_s, restarts=which % 3)
                if self.served.machine.waits_for_fleet:
                    self.give(FleetChanged())
            case 14:
                self.pass_time(1.0 + which)

    def pass_time(self, seconds: float) -> None:
        until_s = self.served.now_s + seconds
        while (deadline_s := self.served.machine.deadline_s) is not None and deadline_s <= until_s:
            self.give(TimePassed(), after_s=max(0.0, deadline_s - self.served.now_s))
        self.served.now_s = max(until_s, self.served.now_s)

    def finish(self) -> None:
        """No more faults: whatever state it is in, the request ends."""
        for _ in range(500):
            if not self.live:
                return
            if self.served.machine.waits_for_fleet:
                self.step(13, 0)
            before = len(self.delivered)
            for action in (0, 3):
                if self.live:
                    self.step(action, 0)
            if len(self.delivered) == before:
                self.pass_time(5.0)
        raise AssertionError("the request did not end")


def is_current_token(event: Event, attempt: int) -> bool:
    return (
        isinstance(event, DecodeReplied)
        and event.attempt == attempt
        and isinstance(event.message, decode_pb2.StepToken)
        and not event.message.finish_reason
    )


steps = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 20)), max_size=60)


@settings(max_examples=400, deadline=None)
@given(policy=st.sampled_from([LocalPolicy.PREFER, LocalPolicy.STRICT]), steps=steps)
def test_any_interleaving_gives_every_token_once_and_one_end(policy: LocalPolicy, steps: list[tuple[int, int]]) -> None:
    world = World(policy)
    for action, which in steps:
        if world.live:
            world.step(action, which)
    world.finish()


@settings(max_examples=200, deadline=None)
@given(steps=steps)
def test_without_faults_any_order_and_batching_serves_the_request(steps: list[tuple[int, int]]) -> None:
    world = World(LocalPolicy.PREFER)
    for action, which in steps:
        if world.live and action <= 6:
            world.step(action, which)
    world.finish()
    assert world.served.error is None


@settings(max_examples=100, deadline=None)
@given(steps=steps)
def test_cancelling_at_any_point_closes_everything(steps: list[tuple[int, int]]) -> None:
    world = World(LocalPolicy.PREFER)
    for action, which in steps:
        if world.live:
            world.step(action, which)
    if world.live:
        world.give(Cancelled(NoNode("the client is gone")))
    assert not world.live
