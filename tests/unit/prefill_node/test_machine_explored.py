"""The machine next to a model engine and a model transfer, in any order of events: every call ends exactly once, its
blocks are freed only when nothing reads them, and the decode node gets either one hand-over after all KV or one
`Quiet`.
"""

from dataclasses import dataclass, field
from itertools import product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import BatonError, DataLoss, InternalError, NoNode, Overloaded
from baton.engine.events import ChunkComputed, LayersComputed, RequestFailed, RequestStarted, TokenSampled
from baton.protos.internal.v1 import decode_pb2
from kvtransfer.records import SendJob
from prefill_node.commands import Abort, Command, EndCall, Respond, SendKV, SendToPeer, StopSending, Submit
from prefill_node.events import (
    Aborted,
    BecameQuiet,
    CallCancelled,
    Closing,
    DrainStarted,
    EngineRefused,
    Event,
    LeaseEnded,
    PeerFacts,
    PeerLost,
    SendFailed,
    Sent,
)
from tests.unit.prefill_node.calls import (
    BLOCKS,
    LAYERS,
    OTHER_PEER,
    PEER,
    PROMPT,
    called,
    machine,
    sampled,
    segments_of,
    started,
    step,
    ticket,
)

PEERS = (PEER, OTHER_PEER)
PICKS = st.integers(0, 1 << 16)
FAILURES = (
    *("gateway cancels", "lease ends", "decode node is lost", "engine step fails", "job fails") * 3,
    *("node drains", "node closes"),
)


@dataclass
class Call:
    """The state of one call in engine, transfer, decode node and gateway."""

    number: int
    lease: int
    peer: PeerFacts
    wanted: set[tuple[int, int]]  # (layer, token) that the decode node lacks
    submitted: bool = False
    computing: bool = False
    computed_tokens: int = 0
    computed_layers: int = 0  # of the chunk that computes
    computed: set[tuple[int, int]] = field(default_factory=set)
    sampled: bool = False
    job: SendJob | None = None
    sent: set[tuple[int, int]] = field(default_factory=set)
    next_segment: int = 0
    stopping: bool = False
    quiet: bool = False
    handed_over: bool = False
    reported_quiet: bool = False
    aborting: bool = False
    freed: bool = False
    ends: list[BatonError | None] = field(default_factory=list)


def cells(job: SendJob) -> set[tuple[int, int]]:
    assert job.layers is not None
    return set(product(job.layers, range(job.token_start, job.token_stop)))


class PrefillNodeStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = machine()
        self.calls: dict[int, Call] = {}
        self.refuses = False
        self.now_s = 0.0

    # ---- commands: their effects, and when they are allowed

    def deliver(self, event: Event) -> None:
        self.now_s += 1.0
        commands = list(self.machine.handle(event, self.now_s))
        while commands:
            answer = self.execute(commands.pop(0))
            if answer is not None:
                commands += self.machine.handle(answer, self.now_s)

    def execute(self, command: Command) -> Event | None:
        call = self.concerned(command)
        assert call.ends == [], f"{command} after the end of the call"
        match command:
            case Submit():
                assert not call.submitted
                call.submitted = True
                if self.refuses:
                    return EngineRefused(call.number, Overloaded("no room"))
                call.computing = True
            case SendKV(job=job):
                assert call.job is None, "one job at a time"
                assert not call.stopping
                assert cells(job) <= call.computed - call.sent, "computed, and sent once"
                assert job.first_segment == call.next_segment
                assert (job.peer, job.lease, job.block_ids) == (call.peer.number, call.lease, BLOCKS)
                call.job = job
            case StopSending(peer=peer, lease=lease):
                assert (peer, lease) == (call.peer.number, call.lease)
                assert not call.stopping
                assert not call.aborting
                call.stopping = True
            case SendToPeer(message=message):
                self.receive(call, message)
            case Respond():
                assert not call.stopping
                assert not call.aborting
            case Abort():
                assert not call.aborting
                assert call.job is None, "its blocks are read"
                assert call.reported_quiet or (call.handed_over and call.sent == call.wanted)
                call.aborting, call.computing = True, False
            case EndCall(error=error):
                was_refused = not call.submitted and not call.stopping
                assert call.freed or was_refused
                assert call.handed_over or error is not None
                assert call.reported_quiet == (error is not None and not was_refused)
                call.ends.append(error)
        return None

    def concerned(self, command: Command) -> Call:
        match command:
            case Submit(request=request):
                return self.calls[int(request.request_id)]
            case SendToPeer(peer=peer, message=message):
                which = message.WhichOneof("message")
                lease = message.hand_over.lease if which == "hand_over" else message.quiet.lease
                (found,) = (c for c in self.calls.values() if (c.peer.number, c.lease) == (peer, lease))
                return found
            case _:
                return self.calls[command.call]

    def receive(self, call: Call, message: decode_pb2.PairRequest) -> None:
        assert not call.reported_quiet
        if message.WhichOneof("message") == "hand_over":
            assert not call.handed_over
            assert not call.stopping
            assert call.sampled
            assert call.computed == call.wanted, "every layer of every token"
            call.handed_over = True
        else:
            assert call.job is None, "segments are in flight"
            assert call.quiet
            assert message.quiet.HasField("error")
            call.reported_quiet = True

    # ---- the gateway

    @rule(
        peer=st.sampled_from(PEERS),
        token_start=st.integers(0, len(PROMPT) - 1),
        layers_per_group=st.integers(1, LAYERS),
        refuses=st.sampled_from((False, False, False, True)),
    )
    def call_comes(self, peer: PeerFacts, token_start: int, layers_per_group: int, refuses: bool) -> None:
        number = len(self.calls) + 1
        wanted = set(product(range(LAYERS), range(token_start, len(PROMPT))))
        # Leases of one decode node have different numbers; those of two may be equal.
        lease = sum(1 for other in self.calls.values() if other.peer is peer)
        self.calls[number] = Call(number, lease, peer, wanted)
        self.refuses = refuses
        granted = ticket(lease, token_start=token_start)
        self.deliver(called(number, granted, peer=peer, layers_per_group=layers_per_group))

    # ---- the engine

    @precondition(lambda self: self.computing())
    @rule(tokens=st.lists(st.integers(0, 5), min_size=1, max_size=4), layer_stops=st.lists(st.integers(1, LAYERS - 1)))
    def engine_computes(self, tokens: list[int], layer_stops: list[int]) -> None:
        """One step: each call takes part with its number of tokens, and is first reported by layers."""
        parts = [(call, count) for call, count in zip(self.computing(), tokens, strict=False) if count]
        stops = {call.number: min(call.computed_tokens + count, len(PROMPT)) for call, count in parts}
        for layer_stop in sorted(layer_stops):
            computing = [call for call, _ in parts if call.computing]
            for call in computing:
                self.compute(call, stops[call.number], layer_stop)
            events = [
                LayersComputed(str(c.number), c.computed_tokens, stops[c.number], layer_stop, BLOCKS) for c in computing
            ]
            if events:
                self.deliver(step(*events))
        events_of_step: list[RequestStarted | ChunkComputed | TokenSampled] = []
        for call in (call for call, _ in parts if call.computing):
            start, stop = call.computed_tokens, stops[call.number]
            self.compute(call, stop, LAYERS)
            if start == 0:
                events_of_step.append(started(call.number))
            events_of_step.append(ChunkComputed(str(call.number), start, stop, BLOCKS))
            call.computed_tokens = stop
            if stop == len(PROMPT):
                call.sampled, call.computing = True, False
                events_of_step.append(sampled(call.number))
        if events_of_step:
            self.deliver(step(*events_of_step))

    def compute(self, call: Call, token_stop: int, layer_stop: int) -> None:
        call.computed |= {
            cell for cell in call.wanted if cell[0] < layer_stop and call.computed_tokens <= cell[1] < token_stop
        }

    @precondition(lambda self: self.aborting())
    @rule(pick=PICKS)
    def engine_frees(self, pick: int) -> None:
        call = self.picked(self.aborting(), pick)
        call.freed = True
        self.deliver(Aborted(call.number))

    # ---- the transfer

    @precondition(lambda self: self.sending())
    @rule(pick=PICKS, pieces=st.integers(1, 3))
    def job_completes(self, pick: int, pieces: int) -> None:
        call = self.picked(self.sending(), pick)
        assert call.job is not None
        segments = segments_of(call.job, pieces=pieces)
        call.sent |= cells(call.job)
        call.next_segment += len(segments)
        call.job = None
        self.deliver(Sent(call.number, segments))

    @precondition(lambda self: self.stopping())
    @rule(pick=PICKS)
    def lease_becomes_quiet(self, pick: int) -> None:
        call = self.picked(self.stopping(), pick)
        call.job, call.quiet = None, True
        self.deliver(BecameQuiet(call.number))

    # ---- failures: one rule, so that most calls get far

    @precondition(lambda self: self.calls)
    @rule(pick=PICKS, failure=st.sampled_from(FAILURES))
    def fails(self, pick: int, failure: str) -> None:
        call = self.picked(list(self.calls.values()), pick)
        match failure:
            case "gateway cancels":
                self.deliver(CallCancelled(call.number))
            case "lease ends":
                self.deliver(LeaseEnded(call.peer.number, call.lease))
            case "decode node is lost":
                self.deliver(PeerLost(call.peer.number, NoNode("gone")))
            case "engine step fails" if call.computing:
                call.computing = False
                self.deliver(step(RequestFailed(str(call.number), InternalError("an engine step failed"))))
            case "job fails" if call.job is not None:
                call.job = None
                self.deliver(SendFailed(call.number, DataLoss("the link failed")))
            case "node drains":
                self.deliver(DrainStarted())
            case "node closes":
                self.deliver(Closing())

    # ---- invariants, at any time and at the end

    @invariant()
    def calls_end_once(self) -> None:
        assert all(len(call.ends) <= 1 for call in self.calls.values())
        assert self.machine.busy == any(not call.ends for call in self.calls.values())

    def teardown(self) -> None:
        """Engine and transfer answer everything that is open: then every call ends."""
        while any(not call.ends for call in self.calls.values()):
            before = self.now_s
            if self.computing():
                self.engine_computes([3], [2])
            if self.sending():
                self.job_completes(0, 2)
            if self.stopping():
                self.lease_becomes_quiet(0)
            if self.aborting():
                self.engine_frees(0)
            assert self.now_s > before, "a call waits for nothing"
        assert not self.machine.busy

    def computing(self) -> list[Call]:
        return [call for call in self.calls.values() if call.computing]

    def sending(self) -> list[Call]:
        return [call for call in self.calls.values() if call.job is not None]

    def stopping(self) -> list[Call]:
        return [call for call in self.calls.values() if call.stopping and not call.quiet]

    def aborting(self) -> list[Call]:
        return [call for call in self.calls.values() if call.aborting and not call.freed]

    def picked(self, calls: list[Call], pick: int) -> Call:
        return calls[pick % len(calls)]


TestPrefillNodeStates = PrefillNodeStates.TestCase
TestPrefillNodeStates.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
