"""A decode node's machine under any order of events keeps the invariants I1, I3, I5 and I6 of the design."""

import itertools
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import BatonError, DataLoss, InternalError, InvalidRequest, Overloaded
from baton.core.types import FinishReason, TokenOutput
from baton.engine.events import RequestFailed, StepEvents, TokenSampled
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from decode_node.events import (
    Closing,
    DrainStarted,
    HandOverReceived,
    PeerLost,
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
from tests.unit.decode_node.environment import Environment, Request

NUM_BLOCKS = 12
POLICIES = st.sampled_from([pb.LOCAL_POLICY_STRICT, pb.LOCAL_POLICY_PREFER, pb.LOCAL_POLICY_LOCAL])
BUDGETS_S = st.sampled_from([None, 20.0, 5.0, 0.0])
QUEUE_S = st.sampled_from([5.0, 20.0, 0.0, None])
REFUSALS: st.SearchStrategy[BatonError] = st.sampled_from(
    [Overloaded("no room"), InvalidRequest("it could never run"), InternalError("KeyError on the decode node")]
)


class DecodeNode(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        rules = DecodeRules(
            "decode-0",
            "a:1",
            incarnation=7,
            lease_secret=b"a secret of tests",
            lease_s=10.0,
            why_local=partial(local_prefill_reason, 20, streams=UNKNOWN),
            waiting_max=4,
            block_size=4,
        )
        self.machine = DecodeMachine(rules, itertools.count(1))
        self.env = Environment(self.machine, num_blocks=NUM_BLOCKS)
        self.open_sessions: list[int] = []
        self.sessions = 0
        self.keys = 0
        self.open_session()

    # ---- gateways

    @rule()
    def open_session(self) -> None:
        self.sessions += 1
        self.open_sessions.append(self.sessions)
        self.env.on(SessionOpened(self.sessions))

    @precondition(lambda self: len(self.open_sessions) > 1)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.open_sessions))
        self.open_sessions.remove(session)
        for engine_id, request in self.env.requests.items():
            request.over |= engine_id.startswith(f"{session}.")
        self.env.on(SessionClosed(session))

    @precondition(lambda self: self.open_sessions)
    @rule(
        data=st.data(),
        num_tokens=st.sampled_from([30, 60, 100, 1, 200]),
        policy=POLICIES,
        budget_s=BUDGETS_S,
        max_queue_s=QUEUE_S,
        temperature=st.sampled_from([0.0] * 7 + [-1.0]),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.none() | st.just(0),
    )
    def submit(
        self,
        data: st.DataObject,
        num_tokens: int,
        policy: pb.LocalPolicy.ValueType,
        budget_s: float | None,
        max_queue_s: float | None,
        temperature: float,
        priority: int,
        prompt_logprobs: int | None,
    ) -> None:
        session = data.draw(st.sampled_from(self.open_sessions))
        self.keys += 1
        deadline_s = None if budget_s is None else self.env.now_s + budget_s
        self.env.requests[f"{session}.{self.keys}"] = Request(deadline_s)
        submit = pb.SubmitRequest(
            key=self.keys,
            prompt_token_ids=range(num_tokens),
            sampling=common_pb2.SamplingParams(max_tokens=9, temperature=temperature, prompt_logprobs=prompt_logprobs),
            policy=policy,
            prefill_available=True,
            budget_s=budget_s,
            max_queue_s=max_queue_s,
            priority=priority,
        )
        self.env.on(SessionMessage(session, pb.SessionRequest(submit=submit)))

    @precondition(lambda self: self.env.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        session, key = self._any_request(data)
        self.env.requests[f"{session}.{key}"].over = True
        self.env.on(SessionMessage(session, pb.SessionRequest(cancel=pb.CancelRequest(key=key))))

    @precondition(lambda self: self.env.requests)
    @rule(data=st.data(), renews=st.booleans())
    def answer_a_loss(self, data: st.DataObject, renews: bool) -> None:
        session, key = self._any_request(data)
        lease = data.draw(st.sampled_from([self.env.requests[f"{session}.{key}"].lease or 0, 1]))
        message = (
            pb.SessionRequest(renew=pb.RenewTicket(key=key, failed_lease=lease, output_token_ids=[7]))
            if renews
            else pb.SessionRequest(here=pb.PrefillHere(key=key, failed_lease=lease))
        )
        self.env.on(SessionMessage(session, message))

    def _any_request(self, data: st.DataObject) -> tuple[int, int]:
        session, _, key = data.draw(st.sampled_from(list(self.env.requests))).partition(".")
        return int(session), int(key)

    # ---- prefill nodes and the transfer

    @precondition(lambda self: self.env.leases)
    @rule(data=st.data(), finished=st.booleans())
    def hand_over(self, data: st.DataObject, finished: bool) -> None:
        # Mostly for an open lease, sometimes for an older one.
        lease = data.draw(st.sampled_from([*self.env.numbers("open"), *self.env.leases]))
        reason = common_pb2.FINISH_REASON_STOP if finished else common_pb2.FINISH_REASON_UNSPECIFIED
        first = common_pb2.Token(token_id=7)
        self.env.on(HandOverReceived(1, pb.HandOver(lease=lease, first_token=first, finish_reason=reason)))

    @precondition(lambda self: self._fillable())
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.env.fill(data.draw(st.sampled_from(self._fillable())))

    def _fillable(self) -> list[int]:
        return [number for number in self.env.numbers("opening", "open") if not self.env.leases[number].filled]

    @precondition(lambda self: self.env.leases)
    @rule(data=st.data(), refused=st.booleans())
    def lose(self, data: st.DataObject, refused: bool) -> None:
        lease = data.draw(st.sampled_from(list(self.env.leases)))
        self.env.on(
            SegmentRefused(lease, DataLoss("its digest does not match"))
            if refused
            else PeerLost(1, "prefill-0", (lease,))
        )

    @precondition(lambda self: self.env.numbers("opening"))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_opening(self, data: st.DataObject, fails: bool) -> None:
        self.env.end_opening(data.draw(st.sampled_from(self.env.numbers("opening"))), fails=fails)

    @precondition(lambda self: self.env.numbers("closing"))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_closing(self, data: st.DataObject, fails: bool) -> None:
        self.env.end_closing(data.draw(st.sampled_from(self.env.numbers("closing"))), fails=fails)

    # ---- the engine

    @precondition(lambda self: self.env.aborting)
    @rule(data=st.data())
    def end_abort(self, data: st.DataObject) -> None:
        self.env.end_abort(data.draw(st.sampled_from(list(self.env.aborting))))

    @precondition(lambda self: self.env.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        tokens, failed = [], []
        for engine_id in sorted(self.env.running):
            outcome = data.draw(st.sampled_from(["goes on", "goes on", "finishes", "fails"]))
            if outcome == "fails":
                failed.append(RequestFailed(engine_id, InternalError("a step failed")))
            else:
                reason = FinishReason.STOP if outcome == "finishes" else None
                tokens.append(TokenSampled(engine_id, TokenOutput(7, 0), reason, ""))
            if outcome != "goes on":
                self.env.finish(engine_id)
        self.env.on(StepDone(StepEvents(1, 0.01, tokens=tuple(tokens), failed=tuple(failed))))

    @rule(finish_first=st.booleans(), refuse_next=st.none() | REFUSALS)
    def choose_answers(self, finish_first: bool, refuse_next: BatonError | None) -> None:
        self.env.finish_first, self.env.refuse_next = finish_first, refuse_next

    # ---- time

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        until_s = self.env.now_s + seconds
        while (deadline_s := self.machine.deadline_s) is not None and deadline_s <= until_s:
            self.env.now_s = max(self.env.now_s, deadline_s)
            for request in self.env.requests.values():
                request.over |= request.deadline_s is not None and request.deadline_s <= self.env.now_s
            self.env.on(TimePassed())
            assert self.machine.deadline_s is None or self.machine.deadline_s > self.env.now_s
        self.env.now_s = until_s

    @precondition(lambda self: self.keys > 5)
    @rule()
    def drain(self) -> None:
        self.env.on(DrainStarted())

    # ---- invariants

    @invariant()
    def waiting_requests_hold_nothing(self) -> None:
        assert self.machine.waiting <= 4

    def teardown(self) -> None:
        """I1, I5 and I6 after the end of all requests."""
        for request in self.env.requests.values():
            request.over = True
        self.env.on(Closing())
        self.env.settle()
        assert sorted(self.env.free) == list(range(NUM_BLOCKS))
        assert self.env.numbers("opening", "open", "closing", "broken") == []
        assert [request.sent.count("released") for request in self.env.requests.values()] == [1] * self.keys
        assert not self.machine.busy
        assert self.machine.waiting == 0
        assert self.machine.deadline_s is None
        assert dict(self.env.ended_sessions) == dict.fromkeys(self.open_sessions, 1)


DecodeNode.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestDecodeNode = DecodeNode.TestCase
