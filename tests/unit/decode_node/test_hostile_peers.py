"""No message of one gateway or prefill node changes another request's tokens, or ends it: machine and lease table
against every order of events, with a hostile gateway and a hostile prefill node that knows every number.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import DataLoss
from baton.engine.request import Reservation
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.error_detail import to_detail
from decode_node import commands as c
from decode_node import events as e
from decode_node.machine import DecodeMachine
from decode_node.rules import DecodeRules
from decode_node.tag_numbers import lease_numbers
from kvtransfer.leases import LeaseTable
from kvtransfer.parts import parts_of
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import PING, WARM_UP, Segment, Tag, lease_field

SPEC = KVCacheSpec(KVKind.MLA, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
INCARNATION = 77
HONEST, HOSTILE = 1, 2  # sessions of gateways, and numbers of prefill nodes
INCARNATIONS = {HONEST: 101, HOSTILE: 666}
TOKENS = 3
WRONG = -1


@dataclass
class Victim:
    """A request of the honest gateway, whose KV and first token the honest prefill node sends.

    Attributes:
        sent: how many of its tokens' KV have been sent under the present lease.
    """

    key: int
    lease: int = 0
    sent: int = 0
    handed_over: bool = False
    replies: list[str] = field(default_factory=list)


class HostilePeers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        rules = DecodeRules(
            "decode-0",
            "a:1",
            incarnation=INCARNATION,
            lease_secret=b"a secret of tests",
            lease_s=1e6,
            why_local=lambda uncached, cached: "",
            waiting_max=100,
            block_size=1,
        )
        self.machine = DecodeMachine(rules, lease_numbers(Random(0).getrandbits))
        self.table = LeaseTable(parts_of(SPEC, (range(1),)), incarnation=INCARNATION)
        self.victims: dict[int, Victim] = {}
        self.cells: dict[int, int] = {}  # block -> the key whose KV it has
        self.blocks: dict[str, tuple[int, ...]] = {}  # of the requests that hold some
        self.num_blocks = 0
        self.decoding: set[int] = set()
        self.numbers: set[int] = set()  # of all leases so far
        for session in (HONEST, HOSTILE):
            self.on(e.SessionOpened(session))

    # ---- the node around the machine; everything is answered at once

    def on(self, event: e.Event) -> None:
        events = deque([event])
        while events:
            for command in self.machine.handle(events.popleft(), 0.0):
                events += self.execute(command)

    def execute(self, command: c.Command) -> list[e.Event]:
        match command:
            case c.Send(session=session, message=message):
                if session == HONEST:
                    self.replied(message)
            case c.Reserve(request=request):
                engine_id = request.request_id
                assert engine_id not in self.blocks, "no two requests have one name"
                first, self.num_blocks = self.num_blocks, self.num_blocks + TOKENS
                self.blocks[engine_id] = tuple(range(first, first + TOKENS))
                return [e.Reserved(engine_id, self.reservation(engine_id))]
            case c.ExtendReserved(engine_id=engine_id):
                return [e.Reserved(engine_id, self.reservation(engine_id))]
            case c.OpenLease(grant=grant):
                self.numbers.add(grant.number)
                self.table.open(grant)
                return [e.LeaseOpened(grant.number)]
            case c.CloseLease(lease=lease):
                totals = self.table.close(lease)
                assert totals is not None
                return [e.LeaseClosed(totals)]
            case c.Admit(engine_id=engine_id, first=first):
                self.admitted(engine_id, first.token_id)
                return [e.Admitted(engine_id, None)]
            case c.Abort(engine_id=engine_id):
                del self.blocks[engine_id]
                return [e.Aborted(engine_id)]
        return []

    def reservation(self, engine_id: str) -> Reservation:
        return Reservation(engine_id, self.blocks[engine_id], cached_tokens=0, resume_at=TOKENS)

    def replied(self, message: pb.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        victim = self.victims[getattr(message, kind).key]
        victim.replies.append(kind)
        if kind == "reserved":
            victim.lease, victim.sent, victim.handed_over = message.reserved.ticket.lease.number, 0, False

    def admitted(self, engine_id: str, first_token: int) -> None:
        session, key = map(int, engine_id.split("."))
        if session != HONEST:
            return
        assert first_token == 1000 + key, "the first token is the honest prefill node's"
        assert [self.cells.get(block) for block in self.blocks[engine_id]] == [key] * TOKENS
        self.decoding.add(key)

    def arrives(self, sender: int, tag: Tag, segment: Segment, content: int) -> None:
        """As the receiver does: looks the tag up, checks the trailer, scatters, and reports what it costs."""
        incarnation = INCARNATIONS[sender]
        refusal = SegmentRefusal.UNKNOWN_SENDER if tag.sender != sender else None
        refusal = refusal or self.table.arrival(tag, 0.0, group=sender, incarnation=incarnation)
        refusal = refusal or self.table.start_scatter(tag, segment)
        if refusal is None:
            engine_id = next(name for name, _ in self.blocks.items() if self.lease_of(name) == segment.lease)
            for token in range(segment.token_start, segment.token_stop):
                self.cells[self.blocks[engine_id][token]] = content
            outcome = self.table.finish_scatter(segment, 0.0)
            if outcome.filled is not None:
                self.on(e.LeaseFilled(outcome.filled))
        elif refusal is not SegmentRefusal.LATE and tag.number < PING:
            own = Tag(sender, tag.lease, tag.number)
            if (lease := self.table.filled_by(own, group=sender, incarnation=incarnation)) is not None:
                self.on(e.SegmentRefused(lease, DataLoss(str(refusal))))

    def lease_of(self, engine_id: str) -> int | None:
        task = self.machine._by_engine_id.get(engine_id)
        return None if task is None else task.lease

    # ---- the honest gateway and its prefill node

    @precondition(lambda self: len(self.victims) < 4)
    @rule()
    def submit(self) -> None:
        victim = Victim(len(self.victims) + 1)
        self.victims[victim.key] = victim
        self.on(e.SessionMessage(HONEST, submission(victim.key, INCARNATIONS[HONEST])))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.waiting))
        renew = pb.RenewTicket(key=victim.key, failed_lease=victim.lease, prefill_incarnation=INCARNATIONS[HONEST])
        self.on(e.SessionMessage(HONEST, pb.SessionRequest(renew=renew)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def send_and_hand_over(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.waiting))
        if victim.sent < TOKENS:
            number = victim.sent
            victim.sent += 1
            segment = a_segment(victim.lease, number, number, number + 1)
            self.arrives(HONEST, Tag.of(HONEST, segment), segment, victim.key)
        elif not victim.handed_over:
            victim.handed_over = True
            self.on(e.HandOverReceived(HONEST, hand_over(victim.lease, 1000 + victim.key), INCARNATIONS[HONEST]))

    # ---- the hostile ones, which know every number

    @rule(data=st.data(), number=st.sampled_from([0, 1, 2, PING, WARM_UP]), sender=st.sampled_from([HONEST, HOSTILE]))
    def send_anything(self, data: st.DataObject, number: int, sender: int) -> None:
        lease, named = self.a_lease(data), self.a_lease(data)
        start = data.draw(st.integers(0, TOKENS - 1))
        self.arrives(
            HOSTILE, Tag(sender, lease_field(lease), number), a_segment(named, number, start, start + 1), WRONG
        )

    @rule(data=st.data(), what=st.sampled_from(["hand_over", "first_part", "quiet"]))
    def report_anything(self, data: st.DataObject, what: str) -> None:
        lease, incarnation = self.a_lease(data), INCARNATIONS[HOSTILE]
        if what == "quiet":
            quiet = pb.Quiet(lease=lease, error=to_detail(DataLoss("lost")))
            self.on(e.QuietReceived(HOSTILE, quiet, incarnation))
        else:
            message = hand_over(lease, 5) if what == "hand_over" else pb.HandOver(lease=lease)
            self.on(e.HandOverReceived(HOSTILE, message, incarnation))

    @rule(data=st.data(), what=st.sampled_from(["submit", "renew", "here", "cancel"]), key=st.integers(1, 4))
    def ask_anything(self, data: st.DataObject, what: str, key: int) -> None:
        """Its keys are the victims' keys; those in use are refused."""
        lease = self.a_lease(data)
        match what:
            case "submit":
                message = submission(key, data.draw(st.sampled_from([0, *INCARNATIONS.values()])))
            case "renew":
                message = pb.SessionRequest(renew=pb.RenewTicket(key=key, failed_lease=lease))
            case "here":
                message = pb.SessionRequest(here=pb.PrefillHere(key=key, failed_lease=lease))
            case _:
                message = pb.SessionRequest(cancel=pb.CancelRequest(key=key))
        self.on(e.SessionMessage(HOSTILE, message))

    @rule()
    def leave(self) -> None:
        """Its pair and its session end, and begin again."""
        self.on(e.PeerLost(HOSTILE, "hostile", self.table.bound_to(HOSTILE)))
        self.on(e.SessionClosed(HOSTILE))
        self.on(e.SessionOpened(HOSTILE))

    # ---- parts

    @property
    def waiting(self) -> list[Victim]:
        return [victim for victim in self.victims.values() if victim.key not in self.decoding]

    def a_lease(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.numbers)) if self.numbers else st.integers(0, (1 << 63) - 1))

    @invariant()
    def no_victim_is_harmed(self) -> None:
        for victim in self.victims.values():
            assert set(victim.replies) <= {"reserved", "admitted"}
            assert not (victim.handed_over and victim.key not in self.decoding), "what is complete decodes"


def submission(key: int, prefill_incarnation: int) -> pb.SessionRequest:
    submit = pb.SubmitRequest(
        key=key,
        prompt_token_ids=range(TOKENS),
        sampling=common_pb2.SamplingParams(max_tokens=50),
        policy=pb.LOCAL_POLICY_STRICT,
        prefill_available=True,
        max_queue_s=1.0,
        prefill_incarnation=prefill_incarnation,
    )
    return pb.SessionRequest(submit=submit)


def hand_over(lease: int, token_id: int) -> pb.HandOver:
    return pb.HandOver(lease=lease, first_token=common_pb2.Token(token_id=token_id, index=0))


def a_segment(lease: int, number: int, start: int, stop: int) -> Segment:
    return Segment(INCARNATION, lease, number, 0, 1, start, stop, 0, 1, payload_bytes=4 * (stop - start))


HostilePeers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostilePeers = HostilePeers.TestCase
