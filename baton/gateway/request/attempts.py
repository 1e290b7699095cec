"""Which node decodes one request: the choice of the first, and of the next whenever one refuses it or is lost. Pure."""

from zlib import crc32

from baton.core.errors import (
    BatonError,
    DataLoss,
    DeadlineExceeded,
    Draining,
    InternalError,
    NoNode,
    Overloaded,
    PeerRefused,
    PermissionDenied,
    UnknownLease,
    UnknownModel,
)
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.commands import LeaveDecode, Respond, SubmitToDecode
from baton.gateway.request.hand_over import HandOver
from baton.gateway.request.node_choice import prefill_failure
from baton.gateway.request.receipt import DECODE
from baton.gateway.request.state import GatewayRequestState
from baton.protos.v1 import generation_pb2 as pb

_FIRST_S, _MOST_S = 0.1, 2.0


class BackOff:
    """The pauses between the attempts of one request: each about twice as long as the one before, up to a bound.

    They are jittered by the request's id, so that requests that failed together do not come back together.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._pauses = 0
        self._most_s = _FIRST_S

    def next_s(self) -> float:
        """The next pause: between half of its bound and all of it."""
        self._pauses += 1
        jitter = crc32(f"{self._request_id}/{self._pauses}".encode(errors="replace")) / (1 << 32)
        pause_s = self._most_s * (1 + jitter) / 2
        self._most_s = min(2 * self._most_s, _MOST_S)
        return pause_s

    def reset(self) -> None:
        """The request has gone on: the next pause is a first one again."""
        self._most_s = _FIRST_S


class Attempts:
    """The attempts of one request, one after the other.

    Attributes:
        present: None before the first one, while the request waits for a node, and after the last one.
        wait_ends_at_s: until when a request without a node waits for one; None: it does not.
        retry_at_s: when the next attempt begins after a pause; None: there is none.
    """

    def __init__(self, state: GatewayRequestState, hand_over: HandOver) -> None:
        self.present: Attempt | None = None
        self.wait_ends_at_s: float | None = None
        self.retry_at_s: float | None = None
        self._state = state
        self._hand_over = hand_over
        self._back_off = BackOff(state.request.request_id)
        self._started = 0
        self._begun = False  # a node has had the request, and has lost it
        # In a row, without a token between: incarnations of decode nodes whose sessions ended, and numbers below 0
        # for attempts that a node has failed.
        self._lost: set[int] = set()
        self._prefills: set[int] = set()  # likewise: incarnations of prefill nodes that failed the hand-over
        self._internal = 0  # likewise: hand-overs that failed inside a prefill node
        self._gone = ""  # what became of the last node

    def note_gone(self, gone: str) -> None:
        """Tells what became of whoever had the request before its first attempt here."""
        self._gone = gone

    def begin(self) -> None:
        """Submits to a node that decodes. A request that has begun waits for one, and its client is informed; a new one
        waits while pairs are being made. No effect during a pause.

        Raises:
            BatonError: there is none for a new request, or all have refused it.
        """
        state = self._state
        if self.retry_at_s is not None and state.now_s < self.retry_at_s:
            return
        self.retry_at_s = None
        output = state.output.token_ids
        begun = self._begun or bool(output)
        expected = begun or bool(state.request.revision)  # its client has some of the answer, or knows that it began
        chosen = state.choice.decode_node(
            state.num_tokens,
            begun=expected,
            now_s=state.now_s,
            slo=state.slo_left,
            splittable=state.request.sampling.prompt_logprobs is None or begun,
        )
        if chosen is None:
            self._wait(begun=expected)
            return
        node, placement = chosen
        attempt = Attempt(self._started + 1, node, len(output), state.now_s, begun=begun)
        if state.refuses_late(attempt) and not placement.meets:
            raise state.too_late(placement.predicted_ttft_s)
        self.wait_ends_at_s = None
        self._started += 1
        self.present = attempt
        attempt.ticket_for = 0 if placement.prefill is None else placement.prefill.incarnation
        attempt.placed_prefill = state.choice.note_placed(node, placement, state.num_tokens, state.now_s)
        state.output.revision = node.revision
        state.receipt.submitted(revision=node.revision, revision_name=node.revision_name, decode_version=node.version)
        state.receipt.placed(placement, waited_s=state.now_s - state.request.started_at_s)
        submission = state.messages.submit(
            output,
            placement,
            due=state.due,
            budget_s=state.remaining_s,
            max_queue_s=min(state.rules.max_queue_s, state.remaining_s),
            prefill_incarnation=attempt.ticket_for,
        )
        state.commands.append(SubmitToDecode(attempt.number, node.role, node.address, submission, node.name))

    def failed(self, attempt: Attempt, error: BatonError) -> None:
        """After a refusal or a lost hand-over another node is tried; any other error ends the request.

        Raises:
            BatonError: the error that ends the request, or as `begin`.
        """
        name = attempt.node.name
        if isinstance(error, Overloaded | Draining | UnknownModel):
            self._state.choice.refused(attempt.node, error)
            self._state.receipt.failed(f"{name} refused it ({error.message})", DECODE, error)
            self._gone = f"the node {name} takes no more requests"
            self.leave(attempt)
            self.begin()
        # NOTE: our own deadline ends the request elsewhere; a node's DeadlineExceeded is about its lease.
        # Another node is asked as long as the client has nothing: what fails there too is the request's own doing.
        elif isinstance(error, InternalError) and not self._state.output.token_ids:
            self._state.choice.failed(attempt.node, error, self._state.now_s)
            self._state.choice.refused(attempt.node, error)
            self._state.receipt.failed(f"{name} failed ({error.message})", DECODE, error)
            self._gone = f"the node {name} failed"
            self.leave(attempt)
            self.begin()
        elif isinstance(error, DataLoss | UnknownLease | PeerRefused | DeadlineExceeded):
            self._lose(attempt, str(error), -attempt.number, error)
        else:
            self._state.choice.failed(attempt.node, error, self._state.now_s)
            raise error

    def lose(self, attempt: Attempt, reason: str) -> None:
        """Continues the request in a new attempt, on another node or on the same one.

        A node that is lost again and again, and comes back as it was, has a bad link: that ends no request.

        Raises:
            BatonError: too many nodes in a row were lost, or as `begin`.
        """
        self._lose(attempt, reason, attempt.node.incarnation)

    def _lose(self, attempt: Attempt, reason: str, what: int, error: BatonError | None = None) -> None:
        state, name = self._state, attempt.node.name
        self._note_progress(attempt)
        again = what in self._lost
        self._lost.add(what)
        state.receipt.failed(f"{name} was lost ({reason})", DECODE, error)
        self._gone = f"the node {name} was lost"
        self.leave(attempt)
        if len(self._lost) > state.rules.max_attempts:
            nodes = f"{len(self._lost)} nodes in a row were lost, the last one {name}: {reason}"
            raise NoNode(nodes, cure="see the nodes' logs")
        if again:
            self._pause()
        self.begin()

    def without_prefill(self, attempt: Attempt, error: BatonError) -> None:
        """No prefill node can hand over to the attempt's decode node, and none else may prefill: leaves that node, and
        begins again after a pause, perhaps elsewhere.

        A link that breaks, and a prefill node that comes back, end no request before its deadline.

        Raises:
            BatonError: the error that ends the request: nodes have refused it, or it has failed or ended too many.
        """
        state = self._state
        self._note_progress(attempt)
        self._prefills |= attempt.excluded
        if isinstance(error, InternalError):
            self._internal += attempt.failed_calls
        most = state.rules.max_attempts
        too_many = self._internal >= most or state.choice.num_gone(self._prefills) > most
        if too_many or isinstance(error, Overloaded | PermissionDenied):
            raise prefill_failure(attempt, error)
        self._gone = "no prefill node could hand over"
        self.leave(attempt)
        self._pause()

    def _note_progress(self, attempt: Attempt) -> None:
        self._begun = True
        if self._has_progressed(attempt):
            self._lost.clear()
            self._prefills.clear()
            self._internal = 0
            self._back_off.reset()

    def _has_progressed(self, attempt: Attempt) -> bool:
        return len(self._state.output.token_ids) > attempt.num_given

    def _pause(self) -> None:
        self.retry_at_s = self._state.now_s + self._back_off.next_s()

    def leave(self, attempt: Attempt) -> None:
        """Ends the attempt."""
        self._hand_over.drop(attempt)
        if self._has_progressed(attempt):
            self._state.choice.generated(attempt.node)
        self._state.commands.append(LeaveDecode(attempt.number, cancel=not attempt.ended_by_node))
        self.present = None
        self._state.output.forget_early()

    @property
    def due_at_s(self) -> float | None:
        """When `check_wait` is due, while there is no attempt."""
        return self.wait_ends_at_s if self.retry_at_s is None else self.retry_at_s

    def check_wait(self) -> None:
        """Without an attempt: begins one when a pause is over.

        Raises:
            NoNode: no node came in time, or as `begin`.
        """
        state = self._state
        if self.retry_at_s is not None:
            self.begin()
        elif self.wait_ends_at_s is not None and state.now_s >= self.wait_ends_at_s:
            raise state.choice.no_decode_node(state.receipt.failures, state.rules.failover_wait_s)

    def _wait(self, *, begun: bool) -> None:
        if self.wait_ends_at_s is not None:
            return
        state = self._state
        wait_s = min(state.rules.failover_wait_s, state.remaining_s)
        self.wait_ends_at_s = state.now_s + wait_s
        if not begun:  # its client expects no answer yet
            return
        state.respond()
        notice = f"{self._gone}; waiting up to {wait_s:.3g} s for another one"
        state.commands.append(Respond(pb.GenerateResponse(notice=notice)))
