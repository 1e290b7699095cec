"""The attempts of one request: submits it to a node, and to another one whenever a node refuses it or is lost. Pure."""

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
from baton.gateway.fleet.placement import Route
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.commands import LeaveDecode, Respond, SubmitToDecode
from baton.gateway.request.hand_over import HandOver
from baton.gateway.request.node_choice import prefill_failure
from baton.gateway.request.receipt import DECODE
from baton.gateway.request.state import GatewayRequestState
from baton.protos.v1 import generation_pb2 as pb

_PAUSE_S_MIN, _PAUSE_S_MAX = 0.1, 2.0


class BackOff:
    """Pauses between the attempts of one request. They double up to a maximum.

    Pauses are jittered by the request's id, so that requests that failed together do not return together.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._pauses = 0
        self._bound_s = _PAUSE_S_MIN

    def next_s(self) -> float:
        """The next pause, between half of the present bound and all of it."""
        self._pauses += 1
        jitter = crc32(f"{self._request_id}/{self._pauses}".encode(errors="replace")) / (1 << 32)
        pause_s = self._bound_s * (1 + jitter) / 2
        self._bound_s = min(2 * self._bound_s, _PAUSE_S_MAX)
        return pause_s

    def reset(self) -> None:
        """Restarts with the shortest pause, after the request has made progress."""
        self._bound_s = _PAUSE_S_MIN


class Attempts:
    """The attempts of one request, one after the other.

    Attributes:
        present: the running attempt; None while the request waits for a node, before the first and after the last one.
        wait_ends_at_s: time until which the request waits for a node; None: it does not wait.
        retry_at_s: time at which a pause ends and the next attempt begins; None: there is no pause.
        began_at_s: when the first attempt began; None: no node was there so far.
    """

    def __init__(self, state: GatewayRequestState, hand_over: HandOver) -> None:
        self.present: Attempt | None = None
        self.wait_ends_at_s: float | None = None
        self.retry_at_s: float | None = None
        self.began_at_s: float | None = None
        self._state = state
        self._hand_over = hand_over
        self._back_off = BackOff(state.request.request_id)
        self._started = 0
        self._begun = False  # whether an attempt was lost before
        # Failures since the last token: incarnations of decode nodes whose sessions ended, and negative attempt numbers
        # for attempts that failed on a node.
        self._lost: set[int] = set()
        self._failed_prefills: set[int] = set()  # also since the last token: prefill nodes that failed a hand-over
        self._internal_failures = 0  # also since the last token: hand-overs that failed inside a prefill node
        self._last_failure = ""  # for the notice to the client

    def note_failure(self, what: str) -> None:
        """Records a failure from before the first attempt, for the notice to the client."""
        self._last_failure = what

    def begin(self) -> None:
        """Submits the request to a node that decodes, or waits for one. Has no effect during a pause.

        A begun request waits for a node and its client gets a notice. A new request waits only while nodes are expected
        or pairs are being connected.

        Raises:
            BatonError: there is no node for a new request, or all nodes have refused it.
        """
        state = self._state
        if self.retry_at_s is not None and state.now_s < self.retry_at_s:
            return
        self.retry_at_s = None
        output = state.output.token_ids
        begun = self._begun or bool(output)
        resumed = begun or bool(state.request.revision)  # the client has a part of the answer, perhaps an empty one
        chosen = state.choice.decode_node(
            state.num_tokens,
            begun=resumed,
            now_s=state.now_s,
            slo=state.slo_left,
            splittable=state.request.sampling.prompt_logprobs is None or begun,
        )
        if chosen is None:
            self._wait(begun=resumed)
            return
        node, placement = chosen
        attempt = Attempt(self._started + 1, node, len(output), state.now_s, begun=begun)
        if state.refuses_late(attempt) and not placement.meets:
            raise state.too_late(placement.predicted_ttft_s)
        self.wait_ends_at_s = None
        self._started += 1
        self.present = attempt
        if self.began_at_s is None:
            self.began_at_s = state.now_s
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
            kept_elsewhere=state.kept_elsewhere(node) if placement.route is Route.LOCAL else None,
        )
        state.commands.append(SubmitToDecode(attempt.number, node.role, node.address, submission, node.name))

    def failed(self, attempt: Attempt, error: BatonError) -> None:
        """Handles an attempt that the node has failed: tries another node after a refusal or a lost hand-over.

        Raises:
            BatonError: any other error, which ends the request, or an error of `begin`.
        """
        name = attempt.node.name
        if isinstance(error, Overloaded | Draining | UnknownModel):
            self._state.choice.refused(attempt.node, error)
            self._state.receipt.failed(f"{name} refused it ({error.message})", DECODE, error)
            self._last_failure = f"the node {name} takes no more requests"
            self.leave(attempt)
            self.begin()
        # NOTE: a node's DeadlineExceeded is about its lease; the request's deadline is checked elsewhere.
        # After an internal error another node is tried while the client has no token. If all nodes fail, the request
        # itself is the cause.
        elif isinstance(error, InternalError) and not self._state.output.token_ids:
            self._state.choice.failed(attempt.node, error, self._state.now_s)
            self._state.choice.refused(attempt.node, error)
            self._state.receipt.failed(f"{name} failed ({error.message})", DECODE, error)
            self._last_failure = f"the node {name} failed"
            self.leave(attempt)
            self.begin()
        elif isinstance(error, DataLoss | UnknownLease | PeerRefused | DeadlineExceeded):
            self._lose(attempt, str(error), -attempt.number, error)
        else:
            self._state.choice.failed(attempt.node, error, self._state.now_s)
            raise error

    def lose(self, attempt: Attempt, reason: str) -> None:
        """Continues the request in a new attempt, on another node or on the same one.

        The same node counts only once: one that is lost repeatedly and returns has a bad link, which must not end the
        request.

        Raises:
            BatonError: too many different nodes were lost in a row, or an error of `begin`.
        """
        self._lose(attempt, reason, attempt.node.incarnation)

    def _lose(self, attempt: Attempt, reason: str, key: int, error: BatonError | None = None) -> None:
        state, name = self._state, attempt.node.name
        self._note_progress(attempt)
        again = key in self._lost
        self._lost.add(key)
        state.receipt.failed(f"{name} was lost ({reason})", DECODE, error)
        self._last_failure = f"the node {name} was lost"
        self.leave(attempt)
        if len(self._lost) > state.rules.max_attempts:
            nodes = f"{len(self._lost)} nodes in a row were lost, the last one {name}: {reason}"
            raise NoNode(nodes, cure="see the nodes' logs")
        if again:
            self._pause()
        self.begin()

    def without_prefill(self, attempt: Attempt, error: BatonError) -> None:
        """Leaves the attempt's decode node and begins again after a pause, perhaps on another node.

        Called under policy strict when no prefill node can hand over to the decode node. A broken link, or a prefill
        node that returns, does not end a request before its deadline.

        Raises:
            BatonError: prefill nodes have refused the request, or too many have failed or disappeared with it.
        """
        state = self._state
        self._note_progress(attempt)
        self._failed_prefills |= attempt.excluded
        if isinstance(error, InternalError):
            self._internal_failures += attempt.failed_calls
        limit = state.rules.max_attempts
        too_many = self._internal_failures >= limit or state.choice.num_unreachable(self._failed_prefills) > limit
        if too_many or isinstance(error, Overloaded | PermissionDenied):
            raise prefill_failure(attempt, error)
        self._last_failure = "no prefill node could hand over"
        self.leave(attempt)
        self._pause()

    def _note_progress(self, attempt: Attempt) -> None:
        self._begun = True
        if self._has_progressed(attempt):
            self._lost.clear()
            self._failed_prefills.clear()
            self._internal_failures = 0
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
        """Time at which `check_wait` is due while there is no attempt."""
        return self.wait_ends_at_s if self.retry_at_s is None else self.retry_at_s

    def check_wait(self) -> None:
        """Begins an attempt when a pause or a wait for a place is over. Called while there is no attempt.

        Raises:
            NoNode: no node became available in time.
            BatonError: an error of `begin`.
        """
        state = self._state
        if self.retry_at_s is not None:
            self.begin()
        elif self.wait_ends_at_s is not None and state.now_s >= self.wait_ends_at_s:
            if state.choice.serves():  # nodes came, and were full
                self.begin()
            if self.present is None:
                raise state.choice.no_decode_node(state.receipt.failures, state.rules.failover_wait_s)

    def _wait(self, *, begun: bool) -> None:
        if self.wait_ends_at_s is not None:
            return
        state = self._state
        wait_s = min(state.rules.failover_wait_s, state.remaining_s)
        self.wait_ends_at_s = state.now_s + wait_s
        if not begun:  # a client without any answer gets no notice
            return
        state.respond()
        notice = f"{self._last_failure}; waiting up to {wait_s:.3g} s for another one"
        state.commands.append(Respond(pb.GenerateResponse(notice=notice)))
