"""The state machine of one request: events in, commands out. Pure: no clock, task or socket.

    choose a decode node, submit      `attempts`: again whenever a decode node refuses or is lost
      ticket: call a prefill node     `hand_over`: on failure again, or prefill on the decode node
        tokens                        `output`: until the output ends
          last message                waits for the prefill node's count of what it sent, for the receipt

A prefill node that also decodes may take the decode node's place, for a request without a ticket.

Prefill and decode nodes answer on different connections, so no order of their events is assumed.
"""

from collections.abc import Sequence
from math import inf

from baton.core.errors import BatonError, InternalError, NoNode
from baton.core.types import Path
from baton.gateway.core.events import (
    ClientCancelled,
    DecodeReplied,
    DecodeReply,
    Event,
    FleetChanged,
    PrefillEnded,
    PrefillReplied,
    SessionLost,
    Started,
    TimePassed,
    TokensCame,
)
from baton.gateway.core.request import Request, Rules, deadline_exceeded
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.request.attempt import Attempt, PrefillCall
from baton.gateway.request.attempts import Attempts
from baton.gateway.request.commands import CancelPrefill, Command, Finish, LoseNode
from baton.gateway.request.hand_over import HandOver
from baton.gateway.request.journal import LocalPrefillDone
from baton.gateway.request.node_messages import step_token
from baton.gateway.request.output import Ended, NoMeter, TokenMeter
from baton.gateway.request.receipt import Retry
from baton.gateway.request.smooth_start import SmoothStart
from baton.gateway.request.state import GatewayRequestState
from baton.gateway.text.reply import Detokenizing
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.rpc.error_detail import from_detail

# Time for which a finished request's receipt waits for the prefill node's report of sent tokens and bytes.
_RECEIPT_WAIT_S = 5.0


class RequestMachine:
    """One validated request until its last message.

    Attributes:
        local_prefill: the last prompt, or rest of one, that the decode node computed; None: there was none.
    """

    def __init__(
        self, request: Request, rules: Rules, fleet: Fleet, detokenizer: Detokenizing, meter: TokenMeter | None = None
    ) -> None:
        self._state = state = GatewayRequestState(request, rules, fleet, detokenizer, meter or NoMeter())
        self._output, self._receipt = state.output, state.receipt
        self._hand_over = HandOver(state)
        self._attempts = Attempts(state, self._hand_over)
        self._start = SmoothStart(state)
        if state.resumed:
            self._attempts.note_failure("the client's gateway was lost")
        self._receipt_waits_until_s = 0.0
        self.local_prefill: LocalPrefillDone | None = None
        self._over = False
        self._must_check = False  # set by events that may shorten a wait; tokens never do
        self._check_at_s = request.deadline_s

    # ---- for the driver

    def resume(self) -> list[str]:
        """Continues after the request's `output`. Call it before the first event.

        Returns the text that each of these tokens added to the client's text; the last one may be missing.

        Raises:
            InvalidRequest: the output would have ended before all of these tokens.
        """
        self._receipt.failed(f"continued after {len(self._state.request.output)} tokens that the client had")
        return self._output.resume()

    def handle(self, events: Sequence[Event], now_s: float) -> list[Command]:
        """Handles events in their order and returns commands. `now_s` must never decrease.

        Pass all pending events at once: the tokens of one call are sent to the client in one message.
        """
        state = self._state
        state.now_s = now_s
        commands: list[Command] = []
        state.commands = commands
        if self._over:
            return commands
        try:
            for event in events:
                self._react(event)
                if self._over:
                    return commands
            if self._must_check or now_s >= self._check_at_s:
                self._check()
        except BatonError as error:
            self._finish(error)
        if self._start.until_s == inf or self._start.ended(self._attempts.present):
            state.respond()
        return commands

    @property
    def deadline_s(self) -> float | None:
        """Time at which `TimePassed` is due: the request's deadline or the end of a shorter wait.

        A later sign of life may extend the wait, which the machine checks then. None if the request is over.
        """
        return None if self._over else min(self._check_at_s, self._start.until_s)

    @property
    def waits_for_fleet(self) -> bool:
        """Whether the request waits for a node that decodes it, so that `FleetChanged` matters."""
        return self._attempts.present is None and not self._over

    @property
    def is_new(self) -> bool:
        """Whether no node has had the request, and its client has no part of the answer."""
        return self.began_at_s is None and not self._state.resumed

    @property
    def path(self) -> Path:
        """The place where the prompt was prefilled, as far as it is known."""
        return self._receipt.path

    @property
    def completion_tokens(self) -> int:
        return self._output.completion_tokens

    @property
    def new_tokens(self) -> int:
        """Number of output tokens that were computed for this request, without those that the client sent."""
        return self._output.completion_tokens - len(self._state.request.output)

    @property
    def prompt_tokens(self) -> int:
        return len(self._state.request.prompt)

    @property
    def max_tokens(self) -> int:
        return self._state.request.sampling.max_tokens

    @property
    def began_at_s(self) -> float | None:
        """Time at which the first attempt began; None: no node was there so far."""
        return self._attempts.began_at_s

    @property
    def first_token_at_s(self) -> float | None:
        """Time at which the first token was passed on; None: not yet."""
        return self._output.first_token_at_s

    @property
    def first_token_came_at_s(self) -> float | None:
        """Time at which the first token came from its node; None: not yet."""
        return self._output.first_token_at_s if self._start.came_at_s is None else self._start.came_at_s

    def missed_slo(self, ended_at_s: float) -> bool:
        """Whether this output, which ended at that time, came later than the request's TTFT or TPOT."""
        first_at_s = ended_at_s if self.first_token_at_s is None else self.first_token_at_s
        ttft_s = first_at_s - self._state.request.started_at_s
        return self._state.slo.missed(ttft_s, ended_at_s - first_at_s, self.new_tokens)

    @property
    def failures(self) -> str:
        """The failures so far, as text."""
        return self._receipt.failures

    @property
    def retries(self) -> Sequence[Retry]:
        """The failures so far that were followed by another attempt."""
        return self._receipt.retries

    @property
    def ended(self) -> Ended | None:
        """End, usage and receipt of the output; None until it was served to its end."""
        return self._output.ended

    # ---- events

    def _react(self, event: Event) -> None:
        attempt = self._attempts.present
        if isinstance(event, TokensCame):  # tested first: nearly every message comes with one
            if attempt is not None and event.attempt == attempt.number:
                if self._start.awaits_second:
                    self._start.second_came(attempt, event.came_at_s)
                self._tokens_came(attempt, event.tokens)
            return
        if isinstance(event, DecodeReplied):
            if attempt is not None and event.attempt == attempt.number:
                self._decode_replied(attempt, event.message)
            return
        self._must_check = True
        match event:
            case PrefillReplied(number, reply):
                if attempt is not None and attempt.call is not None and number == attempt.call.number:
                    self._prefill_replied(attempt, attempt.call, reply)
            case PrefillEnded(number, error):
                if attempt is not None and attempt.call is not None and number == attempt.call.number:
                    self._prefill_ended(attempt, attempt.call, error)
            case SessionLost(number, reason):
                if attempt is not None and number == attempt.number and self._output.end is None:
                    self._attempts.lose(attempt, reason)
            case Started() if self._output.end is not None:
                self._end()  # the client lacks only the last message
            case Started() | FleetChanged():
                if attempt is None:
                    self._attempts.begin()
            case ClientCancelled(error):
                self._finish(error)
            case TimePassed():
                pass  # `_check` compares the time

    def _tokens_came(self, attempt: Attempt, tokens: Sequence[decode_pb2.StepToken]) -> None:
        attempt.waiting_since_s = self._state.now_s
        first, last = tokens[0], tokens[-1]
        if last.finish_reason:
            attempt.ended_by_node = self._must_check = True
        if first.HasField("prefill_s"):
            self._receipt.prefilled(first.prefill_s, first.queue_s)
            self.local_prefill = LocalPrefillDone.reported(self._state.now_s, first)
        for token in tokens:
            if token.drafted_tokens:
                self._receipt.drafted(token.drafted_tokens, token.accepted_tokens)
        self._pass_on(attempt, tokens)

    def _decode_replied(self, attempt: Attempt, message: DecodeReply) -> None:
        self._must_check = True
        match message:
            case decode_pb2.Released():
                # The request continues: its first token may also be the last one and may still arrive from the prefill
                # node.
                attempt.ended_by_node = True
            case decode_pb2.Failed():
                attempt.ended_by_node = True
                if self._output.end is None:
                    self._attempts.failed(attempt, from_detail(message.error))
            case decode_pb2.Admitted():
                # NOTE: this may answer a request for another ticket, if the hand-over that was given up has succeeded.
                attempt.waiting_since_s = self._state.now_s
                attempt.answered = attempt.admitted = True
                self._receipt.admitted(message)
                self._check_first_token(attempt)
            case decode_pb2.Reserved() if not attempt.answered:
                attempt.waiting_since_s = self._state.now_s
                attempt.answered = True
                attempt.lease = message.ticket.lease.number
                self._receipt.reserved(attempt.node.name, message)
                self._check_hand_over(attempt, self._hand_over.call(attempt, message.ticket))
            case decode_pb2.Accepted() if not attempt.answered:
                attempt.waiting_since_s = self._state.now_s
                attempt.answered = True
                self._receipt.accepted(attempt.node.name, message)
            case decode_pb2.HandOverFailed():
                call = attempt.call
                present = message.lease == attempt.lease and not attempt.admitted
                if present and call is not None and self._output.end is None:
                    self._hand_over_failed(attempt, call, from_detail(message.error))

    def _prefill_replied(self, attempt: Attempt, call: PrefillCall, reply: prefill_pb2.PrefillEvent) -> None:
        attempt.waiting_since_s = call.last_message_at_s = self._state.now_s
        match reply.WhichOneof("event"):
            case "scheduled":
                call.scheduled = True
                self._receipt.scheduled(reply.scheduled)
            case "first_token":
                first = reply.first_token
                attempt.first_token_passed = True
                self._receipt.prefilled(first.prefill_s)
                self._pass_on(attempt, (step_token(first),))
                self._start.first_came(attempt)
            case "sent":
                call.sent = True
                self._receipt.sent(reply.sent)

    def _prefill_ended(self, attempt: Attempt, call: PrefillCall, error: BatonError | None) -> None:
        call.running = False
        if call.sent or self._output.end is not None:
            return
        if attempt.admitted:  # only the first token may still be missing
            self._check_first_token(attempt)
            return
        error = error or InternalError("the prefill node ended the call before everything was sent")
        self._hand_over_failed(attempt, call, error)

    def _hand_over_failed(self, attempt: Attempt, call: PrefillCall, error: BatonError) -> None:
        self._check_hand_over(attempt, self._hand_over.failed(attempt, call.node.name, error))

    def _check_hand_over(self, attempt: Attempt, error: BatonError | None) -> None:
        """Leaves the attempt if no node can prefill for it; `error` is the reason, or None if the attempt continues."""
        if error is not None:
            self._attempts.without_prefill(attempt, error)

    # ---- tokens

    def _pass_on(self, attempt: Attempt, step_tokens: Sequence[decode_pb2.StepToken]) -> None:
        if self._output.add(step_tokens, hold=attempt.first_token_owed):
            self._must_check = True
            self._receipt_waits_until_s = self._state.now_s + _RECEIPT_WAIT_S

    def _check_first_token(self, attempt: Attempt) -> None:
        if attempt.first_token_lost and self._output.end is None:
            self._attempts.lose(attempt, "the first token was lost with its prefill node")

    # ---- waits

    def _check(self) -> None:
        """Checks whether the output is complete or a wait has ended, and sets the time of the next check."""
        self._must_check = False
        attempts, request = self._attempts, self._state.request
        if attempts.present is not None:
            self._check_attempt(attempts.present)
        if self._over:
            return
        if self._state.now_s >= request.deadline_s:
            raise deadline_exceeded(request.timeout_s, self._receipt.failures)
        if attempts.present is None:
            attempts.check_wait()
        self._check_at_s = request.deadline_s
        if attempts.present is not None:
            self._check_at_s = min(self._check_at_s, self._wait_ends_at_s(attempts.present))
        elif attempts.due_at_s is not None:
            self._check_at_s = min(self._check_at_s, attempts.due_at_s)

    def _check_attempt(self, attempt: Attempt) -> None:
        now_s = self._state.now_s
        if self._output.end is not None:
            if not attempt.awaits_sent or now_s >= self._receipt_waits_until_s:
                self._complete(attempt)
        elif attempt.ended_by_node and not attempt.first_token_owed:
            self._attempts.lose(attempt, "it released the request unfinished")
        elif now_s >= self._wait_ends_at_s(attempt):
            self._stalled(attempt)

    def _wait_ends_at_s(self, attempt: Attempt) -> float:
        if self._output.end is not None:
            return self._receipt_waits_until_s
        rules = self._state.rules
        return attempt.stalls_at_s(
            prefill_stall_s=rules.prefill_stall_s, decode_stall_s=rules.decode_stall_s, max_queue_s=rules.max_queue_s
        )

    def _stalled(self, attempt: Attempt) -> None:
        """Marks the node that owes the next answer as lost, and continues without it."""
        state = self._state
        call = attempt.call if attempt.prefill_node_owes else None
        node = attempt.node if call is None else call.node
        stall_s = state.rules.decode_stall_s if call is None else state.rules.prefill_stall_s
        reason = f"no sign of life for {stall_s:g} s"
        state.commands.append(LoseNode(node.role, node.address, reason))
        state.choice.mark_silent(node)
        if call is None:
            self._attempts.lose(attempt, reason)
        else:
            state.commands.append(CancelPrefill(call.number))
            self._prefill_ended(attempt, call, NoNode(reason))
        state.choice.clear_silent()

    # ---- the end

    def _complete(self, attempt: Attempt) -> None:
        state = self._state
        state.choice.answered(attempt.node, *([attempt.call.node] if attempt.call else []))
        self._attempts.leave(attempt)
        state.respond()
        self._end()
        state.learn(self.first_token_came_at_s)

    def _end(self) -> None:
        self._state.commands.append(self._output.last_message(self._receipt, self._state.now_s))
        self._finish(None)

    def _finish(self, error: BatonError | None) -> None:
        if self._attempts.present is not None:
            self._attempts.leave(self._attempts.present)
        self._state.respond()
        self._over = True
        self._state.commands.append(Finish(error))
