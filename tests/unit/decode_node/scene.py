"""A decode node's machine with the messages around it, for tests that are lists of events."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from baton.core.errors import BatonError, DataLoss
from baton.core.types import TokenOutput
from baton.engine.events import StepEvents, TokenSampled
from baton.engine.request import Reservation
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from decode_node.commands import CloseLease, Command, OpenLease, Send
from decode_node.events import (
    Aborted,
    Admitted,
    Event,
    HandOverReceived,
    LeaseClosed,
    LeaseFilled,
    LeaseOpened,
    Prefetched,
    Reserved,
    SegmentRefused,
    SessionMessage,
    SessionOpened,
    StepDone,
    TimePassed,
)
from decode_node.local_prefill import UNKNOWN, local_prefill_reason
from decode_node.machine import DecodeMachine
from decode_node.rules import DecodeRules
from kvtransfer.leases import LeaseTotals

LEASE_S = 30.0
SESSION = 1


class Scene:
    """One machine and the present time. `on` delivers an event; the other methods are events with short names."""

    def __init__(
        self,
        *,
        waiting_max: int = 8,
        local_prefill_tokens: int = 32,
        gives_leases: bool = True,
        prefetches: bool = False,
    ) -> None:
        rules = DecodeRules(
            name="decode-0",
            address="127.0.0.1:7002",
            incarnation=77,
            lease_secret=b"a secret of tests",
            lease_s=LEASE_S,
            why_local=partial(local_prefill_reason, local_prefill_tokens, streams=UNKNOWN),
            block_size=4,
            waiting_max=waiting_max,
            gives_leases=gives_leases,
            prefetches=prefetches,
        )
        self.machine = DecodeMachine(rules, itertools.count(1))
        self.now_s = 1000.0
        self.on(SessionOpened(SESSION))

    def on(self, event: Event) -> list[Command]:
        return self.machine.handle(event, self.now_s)

    # ---- from gateways

    def submit(
        self,
        key: int,
        *,
        session: int = SESSION,
        num_tokens: int = 100,
        output: Iterable[int] = (),
        policy: pb.LocalPolicy.ValueType = pb.LOCAL_POLICY_PREFER,
        prefill_available: bool = True,
        placement: pb.Placement.ValueType = pb.PLACEMENT_UNSPECIFIED,
        budget_s: float | None = None,
        max_queue_s: float | None = None,
        temperature: float = 0.0,
        priority: int = 0,
        prompt_logprobs: int | None = None,
        traceparent: str = "",
        to_prefill_node: bool = False,
    ) -> list[Command]:
        submit = pb.SubmitRequest(
            key=key,
            request_id=f"request-{key}",
            prompt_token_ids=range(num_tokens),
            output_token_ids=output,
            sampling=common_pb2.SamplingParams(max_tokens=50, temperature=temperature, prompt_logprobs=prompt_logprobs),
            policy=policy,
            prefill_available=prefill_available,
            placement=placement,
            budget_s=budget_s,
            max_queue_s=max_queue_s,
            priority=priority,
            traceparent=traceparent,
            to_prefill_node=to_prefill_node,
        )
        return self.on(SessionMessage(session, pb.SessionRequest(submit=submit)))

    def renew(self, key: int, lease: int, output: Iterable[int] = ()) -> list[Command]:
        renew = pb.RenewTicket(key=key, failed_lease=lease, output_token_ids=output)
        return self.on(SessionMessage(SESSION, pb.SessionRequest(renew=renew)))

    def prefill_here(self, key: int, lease: int, output: Iterable[int] = ()) -> list[Command]:
        here = pb.PrefillHere(key=key, failed_lease=lease, output_token_ids=output)
        return self.on(SessionMessage(SESSION, pb.SessionRequest(here=here)))

    def cancel(self, key: int, session: int = SESSION) -> list[Command]:
        return self.on(SessionMessage(session, pb.SessionRequest(cancel=pb.CancelRequest(key=key))))

    # ---- from prefill nodes

    def hand_over(
        self, lease: int, *, finished: bool = False, sampled_ago_s: float = 0.25, drafts: Iterable[int] = ()
    ) -> list[Command]:
        message = pb.HandOver(
            lease=lease,
            first_token=common_pb2.Token(token_id=7, index=0),
            finish_reason=common_pb2.FINISH_REASON_STOP if finished else common_pb2.FINISH_REASON_UNSPECIFIED,
            sampled_ago_s=sampled_ago_s,
            guesses=drafts,
        )
        return self.on(HandOverReceived(1, message))

    def refuse_segment(self, lease: int, error: BatonError | None = None) -> list[Command]:
        return self.on(SegmentRefused(lease, error or DataLoss("its digest does not match")))

    # ---- from the engine

    def reserved(self, key: int, *, cached_tokens: int = 16, restart_at: int | None = None) -> list[Command]:
        held = replace(reservation(key, cached_tokens=cached_tokens), restart_at=restart_at)
        return self.on(Reserved(f"{SESSION}.{key}", held))

    def prefetched(self, key: int) -> list[Command]:
        return self.on(Prefetched(f"{SESSION}.{key}"))

    def admitted(self, key: int) -> list[Command]:
        return self.on(Admitted(f"{SESSION}.{key}", None))

    def aborted(self, key: int) -> list[Command]:
        return self.on(Aborted(f"{SESSION}.{key}"))

    def step(self, *tokens: TokenSampled) -> list[Command]:
        return self.on(StepDone(StepEvents(1, 0.01, tokens=tokens)))

    # ---- from the transfer

    def opened(self, lease: int) -> list[Command]:
        return self.on(LeaseOpened(lease))

    def filled(self, lease: int) -> list[Command]:
        return self.on(LeaseFilled(totals(lease)))

    def closed(self, lease: int) -> list[Command]:
        return self.on(LeaseClosed(totals(lease)))

    # ---- time

    def after(self, seconds: float) -> list[Command]:
        """Time passes; the timer fires if it is due."""
        self.now_s += seconds
        deadline_s = self.machine.deadline_s
        return self.on(TimePassed()) if deadline_s is not None and deadline_s <= self.now_s else []

    # ---- requests in a given state

    def opening(self, key: int, *, budget_s: float | None = None) -> int:
        assert names(self.submit(key, budget_s=budget_s)) == ["Reserve"]
        (command,) = self.reserved(key)
        assert isinstance(command, OpenLease)
        return command.grant.number

    def filling(self, key: int, *, budget_s: float | None = None) -> int:
        lease = self.opening(key, budget_s=budget_s)
        assert names(self.opened(lease)) == ["Send reserved"]
        return lease

    def closing(self, key: int, *, budget_s: float | None = None) -> int:
        lease = self.filling(key, budget_s=budget_s)
        assert self.filled(lease) == []
        assert self.hand_over(lease) == [CloseLease(lease)]
        return lease

    def decoding(self, key: int, *, budget_s: float | None = None) -> None:
        lease = self.closing(key, budget_s=budget_s)
        assert names(self.closed(lease)) == ["Send admitted", "Admit"]
        assert self.admitted(key) == []

    def prefilling_here(self, key: int, *, budget_s: float | None = None) -> None:
        self.submit(key, policy=pb.LOCAL_POLICY_LOCAL, budget_s=budget_s)
        assert names(self.reserved(key)) == ["Send accepted", "PrefillHere"]


def reservation(key: int, *, cached_tokens: int = 16, session: int = SESSION) -> Reservation:
    return Reservation(f"{session}.{key}", (3, 4, 5), cached_tokens, resume_at=90)


def totals(lease: int) -> LeaseTotals:
    return LeaseTotals(lease, bytes=4096, segments=2, seconds=0.1)


def token(key: int, index: int, *, session: int = SESSION) -> TokenSampled:
    return TokenSampled(f"{session}.{key}", TokenOutput(100 + index, index), None, "")


def names(commands: list[Command]) -> list[str]:
    """The commands in words; for a `Send` with its message's kind."""
    return [
        f"Send {command.message.WhichOneof('message')}" if isinstance(command, Send) else type(command).__name__
        for command in commands
    ]


def sent(commands: list[Command]) -> list[pb.SessionResponse]:
    return [command.message for command in commands if isinstance(command, Send)]
