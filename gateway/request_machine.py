"""One request on its way through the nodes: events in, commands out. Pure: no clock, task or socket.

    choose a decode node, submit      again whenever a decode node refuses or is lost
      ticket: call a prefill node     again, or on the decode node itself, whenever a hand-over fails
        tokens                        until the output ends
          the last message            after the prefill node's own count, for the receipt

Prefill and decode node answer on different connections, so nothing is assumed about the order of their events.
"""

from collections.abc import Sequence

from baton.error_detail import from_detail
from baton.errors import (
    BatonError,
    DataLoss,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoNode,
    Overloaded,
    PeerRefused,
    UnknownLease,
)
from baton.types import LocalPolicy, Path, Slo, Usage
from gateway.attempt import Attempt, PrefillCall
from gateway.commands import (
    AskDecode,
    CallPrefill,
    CancelPrefill,
    Command,
    Finish,
    LeaveDecode,
    LoseNode,
    Respond,
    SubmitToDecode,
)
from gateway.events import (
    Cancelled,
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
from gateway.fleet import Fleet
from gateway.node_choice import NodeChoice, prefill_failure
from gateway.node_messages import Due, NodeMessages
from gateway.prefix_index import PromptBlocks
from gateway.receipt import ReceiptDraft
from gateway.reply import Detokenizing, OutputEnd, Reply
from gateway.request import Request, Rules, deadline_exceeded
from gateway.token_order import TokenOrder
from protos.baton.v1 import common_pb2, decode_pb2, prefill_pb2
from protos.baton.v1 import generation_pb2 as pb

# How long a finished request's receipt may wait for the prefill node's count of what it sent.
_RECEIPT_WAIT_S = 1.0
_SOON_S = 1e-3


class RequestMachine:
    """One request from its check to its last message."""

    def __init__(self, request: Request, rules: Rules, fleet: Fleet, detokenizer: Detokenizing) -> None:
        self._request = request
        self._rules = rules
        # A prompt whose logprobs are wanted is computed as a whole.
        scored = request.sampling.prompt_logprobs is not None
        prompt = None if scored else PromptBlocks(request.prompt, cache_salt=request.cache_salt)
        self._choice = NodeChoice(rules, fleet, prompt=prompt, session_id=request.session_id)
        self._messages = NodeMessages(request, rules.local_policy)
        self._slo = request.slo.over(rules.slo)
        self._reply = Reply(request.request_id, request.sampling, detokenizer)
        self._receipt = ReceiptDraft()
        self._order = TokenOrder()
        self._attempt: Attempt | None = None
        self._num_attempts = self._num_calls = 0
        self._losses = 0  # decode nodes lost in a row, without a token between
        self._gone = ""  # what became of the last decode node
        self._waits_for_node_until_s: float | None = None
        self._first_token_at_s: float | None = None
        self._end: OutputEnd | None = None
        self._receipt_waits_until_s = 0.0
        self._over = False
        self._must_check = False  # an event may have made a wait shorter; tokens never do
        self._check_at_s = request.deadline_s
        self._now_s = request.started_at_s
        self._commands: list[Command] = []

    # ---- what the shell sees

    def handle(self, events: Sequence[Event], now_s: float) -> list[Command]:
        """Reacts to events in their order, at `now_s`, which never decreases.

        Pass all pending events at once: the tokens of one call are sent to the client in one message.
        """
        self._now_s = now_s
        commands: list[Command] = []
        self._commands = commands
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
        self._respond_with_tokens()
        return commands

    @property
    def deadline_s(self) -> float | None:
        """When `TimePassed` is due: the request's deadline or the end of a shorter wait. None: the request is over.

        A later sign of life may prolong the wait; the machine checks that when the time has come.
        """
        return None if self._over else self._check_at_s

    @property
    def waits_for_fleet(self) -> bool:
        """Whether the request waits for a decode node, so that `FleetChanged` matters."""
        return self._attempt is None and not self._over

    @property
    def path(self) -> Path:
        """Where the prompt was prefilled, as far as is known."""
        return self._receipt.path

    @property
    def completion_tokens(self) -> int:
        return self._reply.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        return len(self._request.prompt)

    @property
    def max_tokens(self) -> int:
        return self._request.sampling.max_tokens

    @property
    def first_token_at_s(self) -> float | None:
        """When the first token was passed on; None: not yet."""
        return self._first_token_at_s

    @property
    def failures(self) -> str:
        """What has failed so far, as one sentence."""
        return self._receipt.failures

    # ---- events

    def _react(self, event: Event) -> None:
        attempt = self._attempt
        if isinstance(event, TokensCame):  # first, and by itself: there is one for nearly every message
            if attempt is not None and event.attempt == attempt.number:
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
                if attempt is not None and number == attempt.number and self._end is None:
                    self._lose_attempt(attempt, reason)
            case Started() | FleetChanged():
                if attempt is None:
                    self._choose_decode_node()
            case Cancelled(error):
                self._finish(error)
            case TimePassed():
                pass  # `_check` looks at the time

    def _tokens_came(self, attempt: Attempt, tokens: Sequence[decode_pb2.StepToken]) -> None:
        attempt.waiting_since_s = self._now_s
        for step_token in tokens:
            if step_token.finish_reason:
                attempt.ended_by_node = self._must_check = True
            if step_token.HasField("prefill_s"):
                self._receipt.prefilled(step_token.prefill_s, step_token.queue_s)
            self._pass_on(attempt, step_token)

    def _decode_replied(self, attempt: Attempt, message: DecodeReply) -> None:
        self._must_check = True
        match message:
            case decode_pb2.Released():
                # The request continues if this arrives first: the first token may also be the last one, and still be
                # on its way from the prefill node.
                attempt.ended_by_node = True
            case decode_pb2.Failed():
                attempt.ended_by_node = True
                if self._end is None:
                    self._decode_failed(attempt, from_detail(message.error))
            case decode_pb2.Admitted():
                # NOTE: this may also answer a request for another ticket: a hand-over that was given up has succeeded.
                attempt.waiting_since_s = self._now_s
                attempt.answered = attempt.admitted = True
                self._receipt.admitted(message)
                self._check_first_token(attempt)
            case decode_pb2.Reserved() if not attempt.answered:
                attempt.waiting_since_s = self._now_s
                attempt.answered = True
                attempt.lease = message.ticket.lease.number
                self._receipt.reserved(attempt.node.name, message)
                self._call_prefill_node(attempt, message.ticket)
            case decode_pb2.Accepted() if not attempt.answered:
                attempt.waiting_since_s = self._now_s
                attempt.answered = True
                self._receipt.accepted(attempt.node.name, message)
            case decode_pb2.HandOverFailed():
                call = attempt.call
                if message.lease == attempt.lease and call is not None and not attempt.admitted and self._end is None:
                    self._hand_over_failed(attempt, call.node.name, from_detail(message.error))

    def _prefill_replied(self, attempt: Attempt, call: PrefillCall, reply: prefill_pb2.PrefillEvent) -> None:
        attempt.waiting_since_s = call.last_message_at_s = self._now_s
        match reply.WhichOneof("event"):
            case "scheduled":
                call.scheduled = True
                self._receipt.scheduled(reply.scheduled)
            case "first_token":
                first = reply.first_token
                attempt.first_token_passed = True
                self._receipt.prefilled(first.prefill_s)
                step_token = decode_pb2.StepToken(
                    token=first.token,
                    finish_reason=first.finish_reason,
                    stop_reason=first.stop_reason,
                    prompt_logprobs=first.prompt_logprobs,
                )
                self._pass_on(attempt, step_token)
            case "sent":
                call.sent = True
                self._receipt.sent(reply.sent)

    def _prefill_ended(self, attempt: Attempt, call: PrefillCall, error: BatonError | None) -> None:
        call.running = False
        if call.sent or self._end is not None:
            return
        if attempt.admitted:  # so only the first token still needs the call
            self._check_first_token(attempt)
            return
        error = error or InternalError("the prefill node ended the call before everything was sent")
        self._hand_over_failed(attempt, call.node.name, error)

    # ---- decode nodes

    def _choose_decode_node(self) -> None:
        """Submits to a decode node. A request that has begun waits for one, and its client is informed.

        Raises:
            BatonError: there is none for a new request, or all have refused it.
        """
        begun = self._losses > 0 or bool(self._order.token_ids)
        due = self._due
        # A token that is late already is due as soon as possible.
        ttft_s = None if due.first_token_s is None else max(due.first_token_s, _SOON_S)
        chosen = self._choice.decode_node(
            self._num_tokens,
            begun=begun,
            now_s=self._now_s,
            slo=Slo(ttft_s, due.tpot_s),
            splittable=self._request.sampling.prompt_logprobs is None or begun,
        )
        if chosen is None:
            self._wait_for_node()
            return
        node, placement = chosen
        if self._refuses_late and not placement.meets:
            raise self._too_late(placement.predicted_ttft_s)
        self._waits_for_node_until_s = None
        self._num_attempts += 1
        attempt = Attempt(self._num_attempts, node, len(self._order.token_ids), self._now_s)
        self._attempt = attempt
        attempt.prefill_noted = self._choice.note_placed(node, placement, self._num_tokens, self._now_s)
        self._receipt.placed(placement, waited_s=self._now_s - self._request.started_at_s)
        submission = self._messages.submit(
            self._order.token_ids,
            placement,
            due=due,
            budget_s=self._remaining_s,
            queue_s=min(self._rules.queue_s, self._remaining_s),
        )
        self._commands.append(SubmitToDecode(self._num_attempts, node.address, submission))

    def _wait_for_node(self) -> None:
        if self._waits_for_node_until_s is not None:
            return
        wait_s = min(self._rules.failover_wait_s, self._remaining_s)
        self._waits_for_node_until_s = self._now_s + wait_s
        self._respond_with_tokens()
        notice = f"{self._gone}; waiting up to {wait_s:.3g} s for another one"
        self._commands.append(Respond(pb.GenerateResponse(notice=notice)))

    def _decode_failed(self, attempt: Attempt, error: BatonError) -> None:
        """After a refusal or a lost hand-over another decode node is tried; any other error ends the request.

        Raises:
            BatonError: the error that ends the request, or as `_choose_decode_node`.
        """
        if isinstance(error, Overloaded | Draining):
            self._choice.refused(attempt.node, error)
            self._receipt.failed(f"{attempt.node.name} refused it ({error.message})")
            self._gone = f"the decode node {attempt.node.name} takes no more requests"
            self._leave(attempt)
            self._choose_decode_node()
        # NOTE: our own deadline ends the request elsewhere; a node's DeadlineExceeded is about its lease.
        elif isinstance(error, DataLoss | UnknownLease | PeerRefused | DeadlineExceeded):
            self._lose_attempt(attempt, str(error))
        else:
            raise error

    def _lose_attempt(self, attempt: Attempt, reason: str) -> None:
        """Continues the request in a new attempt, on another decode node or on the same one.

        Raises:
            BatonError: too many nodes in a row were lost, or as `_choose_decode_node`.
        """
        name = attempt.node.name
        self._losses = 1 if len(self._order.token_ids) > attempt.num_given else self._losses + 1
        self._receipt.failed(f"{name} was lost ({reason})")
        self._gone = f"the decode node {name} was lost"
        self._leave(attempt)
        if self._losses > self._rules.max_attempts:
            what = f"{self._losses} decode nodes in a row were lost, the last one {name}: {reason}"
            raise NoNode(what, cure="see the nodes' logs")
        self._choose_decode_node()

    def _leave(self, attempt: Attempt) -> None:
        self._drop_call(attempt)
        self._commands.append(LeaveDecode(attempt.number, cancel=not attempt.ended_by_node))
        self._attempt = None
        self._order.forget_early()

    # ---- prefill nodes

    def _call_prefill_node(self, attempt: Attempt, ticket: common_pb2.Ticket) -> None:
        """Calls a prefill node with the ticket."""
        node = self._choice.prefill_node(attempt, self._num_tokens)
        if node is None:
            self._hand_over_failed(attempt, "", self._choice.no_prefill_node())
            return
        attempt.excluded.add(node.incarnation)
        pair = node.peers[attempt.node.incarnation]
        self._receipt.calling(node.name, pair.transport, pair.kv_converted)
        self._num_calls += 1
        attempt.call = PrefillCall(self._num_calls, node, self._now_s)
        attempt.first_token_passed = ticket.first_part  # the decode node draws it
        refuse_late = self._refuses_late
        request = self._messages.prefill(self._order.token_ids, ticket, due=self._due, refuse_late=refuse_late)
        node.note_sent(self._num_tokens, cached_tokens=node.cached_tokens)
        if attempt.prefill_noted != node.incarnation:
            node.note_prompt(node.cached_tokens, ticket.token_stop, self._now_s)
        attempt.prefill_noted = None
        self._commands.append(CallPrefill(self._num_calls, node.address, request, timeout_s=self._remaining_s))

    def _hand_over_failed(self, attempt: Attempt, prefill_node: str, error: BatonError) -> None:
        """Asks for a ticket for another prefill node, or the decode node to prefill the prompt itself.

        Args:
            prefill_node: empty when no node could be called.

        Raises:
            BatonError: the failure is the client's doing, or no prefill node is left under policy strict.
        """
        self._drop_call(attempt)
        if isinstance(error, InvalidRequest | DeadlineExceeded):
            raise error
        strict = self._rules.local_policy is LocalPolicy.STRICT
        if prefill_node:
            attempt.failed_calls += 1
            attempt.last_error = error
            self._receipt.failed(f"{prefill_node} failed ({error.message})")
        elif strict:
            raise prefill_failure(attempt, error)
        attempt.answered = False
        attempt.waiting_since_s = self._now_s
        # NOTE: policy strict asks for a ticket even when no prefill node is left: the last one may have failed only
        # because the decode node is gone, and this message finds that out.
        renew = strict or self._choice.prefill_node(attempt, self._num_tokens) is not None
        if self._refuses_late and isinstance(error, Overloaded) and not renew:
            raise error  # prefilled here, it would be late too
        question = (decode_pb2.RenewTicket if renew else decode_pb2.PrefillHere)(
            failed_lease=attempt.lease, output_token_ids=self._order.token_ids
        )
        self._commands.append(AskDecode(attempt.number, question))

    def _drop_call(self, attempt: Attempt) -> None:
        if attempt.call is not None and attempt.call.running:
            self._commands.append(CancelPrefill(attempt.call.number))
        attempt.call = None

    # ---- tokens

    def _pass_on(self, attempt: Attempt, step_token: decode_pb2.StepToken) -> None:
        if self._end is not None:
            return
        for due in self._order.offer(step_token, hold=attempt.first_token_owed):
            self._end = self._reply.add(due)
            if self._end is not None:
                self._must_check = True
                self._receipt_waits_until_s = self._now_s + _RECEIPT_WAIT_S
                return

    def _check_first_token(self, attempt: Attempt) -> None:
        if attempt.first_token_lost and self._end is None:
            self._lose_attempt(attempt, "the first token was lost with its prefill node")

    def _respond_with_tokens(self) -> None:
        message = self._reply.take()
        if message is None:
            return
        if self._first_token_at_s is None:
            self._first_token_at_s = self._now_s
        self._commands.append(Respond(message))

    # ---- waits

    def _check(self) -> None:
        """After events: whether the output is complete, or an answer is owed for too long, and when to look again."""
        self._must_check = False
        if self._attempt is not None:
            self._check_attempt(self._attempt)
        if self._over:
            return
        if self._now_s >= self._request.deadline_s:
            raise deadline_exceeded(self._request.timeout_s, self._receipt.failures)
        self._check_at_s = self._request.deadline_s
        if self._attempt is not None:
            self._check_at_s = min(self._check_at_s, self._wait_ends_at_s(self._attempt))
        elif self._waits_for_node_until_s is not None:
            if self._now_s >= self._waits_for_node_until_s:
                raise self._choice.no_decode_node(self._receipt.failures, self._rules.failover_wait_s)
            self._check_at_s = min(self._check_at_s, self._waits_for_node_until_s)

    def _check_attempt(self, attempt: Attempt) -> None:
        if self._end is not None:
            if not attempt.awaits_sent or self._now_s >= self._receipt_waits_until_s:
                self._complete(attempt, self._end)
        elif attempt.ended_by_node and not attempt.first_token_owed:
            self._lose_attempt(attempt, "it released the request unfinished")
        elif self._now_s >= self._wait_ends_at_s(attempt):
            self._stalled(attempt)

    def _wait_ends_at_s(self, attempt: Attempt) -> float:
        if self._end is not None:
            return self._receipt_waits_until_s
        return attempt.stalls_at_s(
            prefill_stall_s=self._rules.prefill_stall_s,
            decode_stall_s=self._rules.decode_stall_s,
            queue_s=self._rules.queue_s,
        )

    def _stalled(self, attempt: Attempt) -> None:
        """Gives up the node that owes the next answer."""
        if not attempt.prefill_node_owes:
            reason = f"no sign of life for {self._rules.decode_stall_s:g} s"
            self._commands.append(LoseNode(common_pb2.ROLE_DECODE, attempt.node.address, reason))
            self._choice.losing(attempt.node)
            self._lose_attempt(attempt, reason)
            self._choice.fleet_is_current()
            return
        call = attempt.call
        assert call is not None
        reason = f"no sign of life for {self._rules.prefill_stall_s:g} s"
        self._commands.append(LoseNode(common_pb2.ROLE_PREFILL, call.node.address, reason))
        self._commands.append(CancelPrefill(call.number))
        self._choice.losing(call.node)
        self._prefill_ended(attempt, call, NoNode(reason))
        self._choice.fleet_is_current()

    @property
    def _due(self) -> Due:
        if self._slo.ttft_s is None:
            return Due(None, self._slo.tpot_s)
        if self._order.token_ids:
            return Due(0.0, self._slo.tpot_s)
        return Due(max(0.0, self._request.started_at_s + self._slo.ttft_s - self._now_s), self._slo.tpot_s)

    @property
    def _refuses_late(self) -> bool:
        """Only a request that has not begun: to lose tokens is worse than to be late."""
        return self._rules.refuse_late and not self._order.token_ids and self._losses == 0

    def _too_late(self, predicted_s: float | None) -> Overloaded:
        assert self._slo.ttft_s is not None, "without a TTFT nothing is late"
        assert predicted_s is not None, "only predictions are late"
        what = f"the first token would take {predicted_s:.3g} s more, and is due {self._slo.ttft_s:.3g} s after arrival"
        return Overloaded(what, cure="try again later, or allow it more time", retry_after_s=max(0.1, predicted_s))

    @property
    def _remaining_s(self) -> float:
        return max(0.0, self._request.deadline_s - self._now_s)

    # ---- the end

    def _complete(self, attempt: Attempt, end: OutputEnd) -> None:
        self._leave(attempt)
        self._respond_with_tokens()
        usage = Usage(
            prompt_tokens=len(self._request.prompt),
            completion_tokens=self._reply.completion_tokens,
            cached_tokens=min(self._receipt.cached_tokens, len(self._request.prompt)),
        )
        assert self._first_token_at_s is not None, "an output ends with a token"
        started_at_s = self._request.started_at_s
        receipt = self._receipt.finish(
            first_token_s=self._first_token_at_s - started_at_s, total_s=self._now_s - started_at_s
        )
        self._commands.append(Respond(self._reply.last(end, usage, receipt)))
        self._finish(None)

    def _finish(self, error: BatonError | None) -> None:
        if self._attempt is not None:
            self._leave(self._attempt)
        self._respond_with_tokens()
        self._over = True
        self._commands.append(Finish(error))

    @property
    def _num_tokens(self) -> int:
        return len(self._request.prompt) + len(self._order.token_ids)
