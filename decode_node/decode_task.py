"""One request on the decode node, from its submission to `Released`: this side of the hand-over, top to bottom. Pure.

    waiting ──► opening ──► filling ──► closing ──┬─ all KV is here ──────► decoding
       │           ▲                              ├─ RenewTicket ─┐             ▲
       │           └────────── extending ◄────────┼───────────────┘             │
       └─ prefilled here ─────────────────────────┴─ PrefillHere ───────────────┘
    any of these ── finished, failed, cancelled ──► ending ──► over

Decoding begins with what is left to compute of the prompt: all of it, nothing, or, if the prompt is split, the part
after the lease's tokens.

A lease is closed before its blocks are used or given back, and `Released` is the last message of every request.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

from baton.core.errors import BatonError, DataLoss, DeadlineExceeded, Overloaded
from baton.core.types import NOTHING_LOADED, FinishReason
from baton.engine.events import ChunkComputed
from baton.engine.request import EngineRequest, Reservation
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.rpc.convert import loaded_to_proto
from baton.rpc.error_detail import to_detail
from decode_node.admission import no_room
from decode_node.commands import (
    Abort,
    Admit,
    CloseLease,
    Command,
    ExtendReserved,
    OpenLease,
    PrefillHere,
    Reserve,
    Send,
    SendLeaseEnded,
)
from decode_node.lease_events import Filled, HandedOver, LeaseEvent, LeaseLost, LocalPrefill, Renewal
from decode_node.lease_offer import LeaseOffer
from decode_node.local_prefill import requested_local_reason, split_tokens
from decode_node.rules import DecodeRules
from decode_node.task_times import TaskTimes
from kvtransfer.leases import LeaseTotals


class DecodePhase(Enum):
    """The state of a request: what it waits for, or what is done for it."""

    WAITING = "waits for blocks"
    OPENING = "its lease is being opened"
    FILLING = "waits for its KV"
    CLOSING = "its lease is being closed"
    EXTENDING = "waits for blocks for tokens that another node generated"
    DECODING = "runs in the engine"
    ENDING = "gives back what it holds"
    OVER = "holds nothing"


class DecodeTask:
    """What one request holds (blocks, at most one lease, a place in the batch) and what it waits for.

    Every method that reacts to an event returns the commands that follow. The request begins in the queue for blocks.

    Args:
        submit: the gateway's message; `request` is its form for the engine.
        lease_numbers: shared by all requests of the node; each number is drawn once.
    """

    def __init__(
        self,
        session: int,
        submit: pb.SubmitRequest,
        request: EngineRequest,
        *,
        rules: DecodeRules,
        lease_numbers: Iterator[int],
        now_s: float,
    ) -> None:
        self.session = session
        self.key = submit.key
        self.request_id = submit.request_id  # the client's, for the log
        self.engine_id = request.request_id
        self.phase = DecodePhase.WAITING
        self.prefill_started_s: float | None = None  # set while a prefill here has sampled no token
        self.loaded = NOTHING_LOADED  # read from stores before blocks were reserved
        self.prefill_queue_s = 0.0  # how long this prefill waited in the engine
        self._request = request
        self._policy = submit.policy
        self.prefill_incarnation = submit.prefill_incarnation  # of the node that may fill the lease; 0: any node
        self._requested_local_reason = requested_local_reason(submit)
        self._split_tokens = split_tokens(submit, request, rules)
        self._rules = rules
        self._lease_numbers = lease_numbers
        self.times = TaskTimes(submit, now_s)
        self._reserving = False  # an answer of the engine is outstanding
        self._reservation: Reservation | None = None
        self.lease: int | None = None
        self._offer: LeaseOffer | None = None  # the last one
        self._early: list[LeaseEvent] = []
        self._handed_over: HandedOver | None = None
        self._filled = False
        self._loss_reported = False
        self._lease_closing = False
        self._decision: HandedOver | Renewal | LocalPrefill | None = None

    # ---- waiting for blocks

    def reserve(self) -> list[Command]:
        """Reserves blocks at this request's turn. Does nothing while an earlier attempt is unanswered."""
        if self._reserving:
            return []
        self._reserving = True
        return [Reserve(self._request, self._split_tokens)]

    def reserved(self, reservation: Reservation, now_s: float) -> list[Command]:
        """Handles a reservation, for a new request or one that continues after another node's tokens."""
        self._reserving = False
        self._reservation = reservation
        match self.phase:
            case DecodePhase.WAITING:
                self.times.queued_s = now_s - self.times.submitted_s
                why = self._local_prefill_reason(reservation)
                return self._prefill_here(self._request.output, why, now_s) if why else self._open_lease()
            case DecodePhase.EXTENDING:
                return self._open_lease()
            case DecodePhase.ENDING:
                return self._give_back()
        return []

    def refused(self, error: BatonError) -> list[Command]:
        """Handles the engine's refusal of the last command."""
        was_reserving, self._reserving = self._reserving, False
        if self.phase is DecodePhase.ENDING:
            return self._give_back() if was_reserving else []
        if self.phase is DecodePhase.WAITING and isinstance(error, Overloaded) and self.times.max_queue_s > 0:
            return []  # asked again when blocks have become free
        return self.fail(error)

    def _local_prefill_reason(self, reservation: Reservation) -> str:
        """The reason to prefill the request on this node; empty if a prefill node should."""
        if self._requested_local_reason or self._policy == pb.LOCAL_POLICY_STRICT:
            return self._requested_local_reason
        cached = self._skipped_tokens(reservation)
        if 0 < self._split_tokens <= cached:
            return f"the first {cached} tokens, which a prefill node would compute, are cached"
        return self._rules.why_local(self.num_tokens - cached, cached)

    # ---- receiving KV under a lease

    def _open_lease(self) -> list[Command]:
        assert self._reservation is not None
        self._enter(DecodePhase.OPENING)
        self.lease = next(self._lease_numbers)
        self._handed_over, self._filled, self._loss_reported, self._lease_closing = None, False, False, False
        self._offer = LeaseOffer(
            self.lease, self._reservation, self._split_tokens, self.num_tokens, self.prefill_incarnation, self._rules
        )
        return [OpenLease(self._offer.grant())]

    def lease_opened(self, now_s: float) -> list[Command]:
        """Sends the gateway its ticket, now that every rank accepts KV for the lease."""
        if self.phase is DecodePhase.ENDING:
            return [self._close()]
        self._enter(DecodePhase.FILLING, deadline_s=now_s + self._rules.lease_s)
        assert self._offer is not None
        ticket, cached_tokens = self._offer.ticket(), self._offer.reservation.cached_tokens
        reserved = pb.Reserved(
            key=self.key,
            ticket=ticket,
            cached_tokens=cached_tokens,
            queue_s=self.times.queued_s,
            loaded_tokens=self.loaded.at_most(cached_tokens).total,
            loaded=loaded_to_proto(self.loaded.at_most(cached_tokens)),
        )
        self.times.trace_reserved(reserved, now_s)
        commands: list[Command] = [self._send(pb.SessionResponse(reserved=reserved))]
        early, self._early = self._early, []
        for event in early:
            commands += self.lease_event(event, now_s)
        return commands

    def lease_event(self, event: LeaseEvent, now_s: float) -> list[Command]:
        """Reacts to an event of the lease. Events of an earlier lease, or after the decision, are ignored."""
        if event.lease != self.lease:
            return []
        if self.phase is DecodePhase.OPENING:
            # A lease without tokens is filled before it is known to be open; the ticket must be sent first.
            self._early.append(event)
            return []
        if self.phase is not DecodePhase.FILLING:
            return []
        match event:
            case HandedOver(lease=lease, first=first):
                if (first is None) != (self._split_tokens > 0):
                    return self._report_loss(lease, DataLoss("the hand-over does not fit its ticket"))
                self._handed_over, self.times.handed_over_s = event, now_s
            case Filled():
                self._filled, self.times.filled_s = True, now_s
            case LeaseLost(lease=lease, error=error):
                return self._report_loss(lease, error)
            case Renewal() | LocalPrefill():
                return self._decide(event)
        sent = self._handed_over
        if sent is None or not (self._filled or sent.finished):
            return []
        waited_s = now_s - self.times.handed_over_s
        return self._decide(replace(sent, sampled_ago_s=sent.sampled_ago_s + waited_s))

    def _report_loss(self, lease: int, error: BatonError) -> list[Command]:
        """Reports a lost lease. The gateway then renews the ticket, leaves the prompt to this node, or cancels."""
        if self._loss_reported:
            return []
        self._loss_reported = True
        failed = pb.HandOverFailed(key=self.key, lease=lease, error=to_detail(error))
        return [self._send(pb.SessionResponse(hand_over_failed=failed))]

    def _decide(self, decision: HandedOver | Renewal | LocalPrefill) -> list[Command]:
        self._enter(DecodePhase.CLOSING)
        self._decision = decision
        return [self._close()]

    def lease_closed(self, totals: LeaseTotals, now_s: float) -> list[Command]:
        """Uses the blocks as decided, now that nothing writes to them any more."""
        self.lease = None
        if self.phase is DecodePhase.ENDING:
            return self._give_back()
        match self._decision:
            case HandedOver(finished=True):
                return self._end()
            case HandedOver(sampled_ago_s=transfer_s) as handed_over:
                self._enter(DecodePhase.DECODING)
                admitted = pb.Admitted(
                    key=self.key, transfer_s=transfer_s, bytes_received=totals.bytes, segments=totals.segments
                )
                self.times.trace_admitted(admitted, now_s)
                return [self._send(pb.SessionResponse(admitted=admitted)), self._admit(handed_over, now_s)]
            case Renewal(output=output, prefill_incarnation=incarnation):
                self._enter(DecodePhase.EXTENDING)
                self.prefill_incarnation = incarnation
                self._request = replace(self._request, output=output)
                self._reserving = True
                return [ExtendReserved(self.engine_id, output)]
            case LocalPrefill(output=output):
                return self._prefill_here(output, "no prefill node could do it", now_s)
        raise AssertionError(f"lease {totals.number} was closed without a decision")

    def lease_failed(self, error: BatonError) -> list[Command]:
        """Handles a failure of the transfer to open or close the lease.

        A lease that failed to open may be open on some ranks, so it is closed. One that failed to close is gone.
        """
        commands = self.fail(error)
        if not self._lease_closing:
            return [*commands, self._close()]
        self.lease = None
        return [*commands, *self._give_back()]

    # ---- computing here

    def _prefill_here(self, output: tuple[int, ...], why: str, now_s: float) -> list[Command]:
        assert self._reservation is not None
        self._enter(DecodePhase.DECODING)
        self.prefill_started_s = now_s
        cached_tokens = self._skipped_tokens(self._reservation)
        accepted = pb.Accepted(
            key=self.key,
            why=why,
            cached_tokens=cached_tokens,
            queue_s=self.times.queued_s,
            loaded_tokens=self.loaded.at_most(cached_tokens).total,
            loaded=loaded_to_proto(self.loaded.at_most(cached_tokens)),
        )
        self.times.trace_accepted(accepted, now_s)
        return [self._send(pb.SessionResponse(accepted=accepted)), PrefillHere(self.engine_id, output)]

    def _admit(self, sent: HandedOver, now_s: float) -> Command:
        """Continues after the tokens of the lease, which have arrived."""
        if sent.first is not None:
            return Admit(self.engine_id, sent.first, sent.drafts, sent.has_draft)
        assert self._offer is not None
        self.prefill_started_s = now_s
        return PrefillHere(self.engine_id, self._request.output, self._offer.token_stop, sent.has_draft)

    def chunk_computed(self, chunk: ChunkComputed, now_s: float) -> None:
        """Records that the engine has computed a part of the prompt, before the first token."""
        if self.prefill_started_s is not None:
            self.times.trace_chunk(chunk, now_s)

    def _skipped_tokens(self, reservation: Reservation) -> int:
        """Number of tokens that need not be computed if the prompt is prefilled here."""
        return 0 if self._request.scores_prompt else reservation.skipped_tokens

    def admitted(self, finish_reason: FinishReason | None) -> list[Command]:
        """Starts decoding, unless the first token was also the last one."""
        return [] if finish_reason is None else self.finished()

    def finished(self) -> list[Command]:
        """Ends the request after its last token was sent."""
        return self._end() if self.phase is DecodePhase.DECODING else []

    def engine_failed(self, error: BatonError) -> list[Command]:
        """Handles a failure in the engine. A request that is waiting for its KV fails at `Admit`, which is refused."""
        return self.fail(error) if self.phase is DecodePhase.DECODING else []

    # ---- the end

    @property
    def deadline_s(self) -> float | None:
        """When `time_passed` is due."""
        if self.phase in (DecodePhase.ENDING, DecodePhase.OVER):
            return None
        return self.times.deadline_s

    def time_passed(self, now_s: float) -> list[Command]:
        """Ends the request at its deadline."""
        if self.times.budget_is_over(now_s):
            return self.fail(DeadlineExceeded(f"the request's budget of {self.times.budget_s:g} s is over"))
        if self.phase is DecodePhase.WAITING:
            return self.fail(no_room(self.times.max_queue_s))
        late = f"the prompt's KV did not arrive within the lease's {self._rules.lease_s:g} s"
        return self.fail(DeadlineExceeded(late))

    def fail(self, error: BatonError) -> list[Command]:
        """Ends the request with an error for the gateway, unless it is ending already."""
        if self.phase in (DecodePhase.ENDING, DecodePhase.OVER):
            return []
        failed = pb.Failed(key=self.key, error=to_detail(error))
        return [self._send(pb.SessionResponse(failed=failed)), *self._end()]

    def cancel(self) -> list[Command]:
        """Ends the request without an error: its gateway no longer needs it. No effect if it is ending already."""
        return [] if self.phase in (DecodePhase.ENDING, DecodePhase.OVER) else self._end()

    def _end(self) -> list[Command]:
        """Stops prefill nodes, closes the lease once it is open, and only then gives the blocks back."""
        was = self.phase
        self._enter(DecodePhase.ENDING)
        if self.lease is None:
            return self._give_back()
        commands: list[Command] = [SendLeaseEnded(self.lease)]
        return [*commands, self._close()] if was is DecodePhase.FILLING else commands

    def _close(self) -> CloseLease:
        assert self.lease is not None
        self._lease_closing = True
        return CloseLease(self.lease)

    def _give_back(self) -> list[Command]:
        # A reservation that is on its way must arrive first: aborting before it would leave its blocks held.
        return [] if self._reserving else [Abort(self.engine_id)]

    def aborted(self) -> list[Command]:
        """Records that the engine holds nothing for the request any more."""
        if self.phase is not DecodePhase.ENDING:
            return []
        self._enter(DecodePhase.OVER)
        return [self._send(pb.SessionResponse(released=pb.Released(key=self.key)))]

    # ---- parts

    @property
    def num_tokens(self) -> int:
        return len(self._request.prompt) + len(self._request.output)

    def _enter(self, phase: DecodePhase, *, deadline_s: float | None = None) -> None:
        self.phase, self.times.phase_deadline_s = phase, deadline_s

    def _send(self, message: pb.SessionResponse) -> Send:
        return Send(self.session, message)
