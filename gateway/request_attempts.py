"""Which node decodes one request: the choice of the first, and of the next whenever one refuses it or is lost. Pure."""

from baton.errors import (
    BatonError,
    DataLoss,
    DeadlineExceeded,
    Draining,
    InternalError,
    NoNode,
    Overloaded,
    PeerRefused,
    UnknownLease,
)
from gateway.attempt import Attempt
from gateway.commands import LeaveDecode, Respond, SubmitToDecode
from gateway.receipt import DECODE
from gateway.request_hand_over import HandOver
from gateway.request_state import RequestState
from protos.baton.v1 import generation_pb2 as pb


class Attempts:
    """The attempts of one request, one after the other.

    Attributes:
        present: None before the first one, while the request waits for a node, and after the last one.
        wait_ends_at_s: until when a request that lost its node waits for another one; None: it does not.
    """

    def __init__(self, state: RequestState, hand_over: HandOver) -> None:
        self.present: Attempt | None = None
        self.wait_ends_at_s: float | None = None
        self._state = state
        self._hand_over = hand_over
        self._started = 0
        self._losses = 0  # nodes lost in a row, without a token between
        self._gone = ""  # what became of the last node

    def note_gone(self, gone: str) -> None:
        """Tells what became of whoever had the request before its first attempt here."""
        self._gone = gone

    def begin(self) -> None:
        """Submits to a node that decodes. A request that has begun waits for one, and its client is informed.

        Raises:
            BatonError: there is none for a new request, or all have refused it.
        """
        state = self._state
        output = state.output.token_ids
        begun = self._losses > 0 or bool(output)
        chosen = state.choice.decode_node(
            state.num_tokens,
            begun=begun,
            now_s=state.now_s,
            slo=state.slo_left,
            splittable=state.request.sampling.prompt_logprobs is None or begun,
        )
        if chosen is None:
            self._wait()
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
        state.receipt.placed(placement, waited_s=state.now_s - state.request.started_at_s)
        submission = state.messages.submit(
            output,
            placement,
            due=state.due,
            budget_s=state.remaining_s,
            queue_s=min(state.rules.queue_s, state.remaining_s),
            prefill_incarnation=attempt.ticket_for,
        )
        state.commands.append(SubmitToDecode(attempt.number, node.role, node.address, submission))

    def failed(self, attempt: Attempt, error: BatonError) -> None:
        """After a refusal or a lost hand-over another node is tried; any other error ends the request.

        Raises:
            BatonError: the error that ends the request, or as `begin`.
        """
        name = attempt.node.name
        if isinstance(error, Overloaded | Draining):
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
            self.lose(attempt, str(error), error)
        else:
            self._state.choice.failed(attempt.node, error, self._state.now_s)
            raise error

    def lose(self, attempt: Attempt, reason: str, error: BatonError | None = None) -> None:
        """Continues the request in a new attempt, on another node or on the same one.

        Args:
            error: the node's; None: it has sent none.

        Raises:
            BatonError: too many nodes in a row were lost, or as `begin`.
        """
        state, name = self._state, attempt.node.name
        self._losses = 1 if len(state.output.token_ids) > attempt.num_given else self._losses + 1
        state.receipt.failed(f"{name} was lost ({reason})", DECODE, error)
        self._gone = f"the node {name} was lost"
        self.leave(attempt)
        if self._losses > state.rules.max_attempts:
            what = f"{self._losses} nodes in a row were lost, the last one {name}: {reason}"
            raise NoNode(what, cure="see the nodes' logs")
        self.begin()

    def leave(self, attempt: Attempt) -> None:
        """Ends the attempt."""
        self._hand_over.drop(attempt)
        self._state.commands.append(LeaveDecode(attempt.number, cancel=not attempt.ended_by_node))
        self.present = None
        self._state.output.forget_early()

    def check_wait(self) -> None:
        """Raises:
        NoNode: no node came in time.
        """
        state = self._state
        if self.wait_ends_at_s is not None and state.now_s >= self.wait_ends_at_s:
            raise state.choice.no_decode_node(state.receipt.failures, state.rules.failover_wait_s)

    def _wait(self) -> None:
        if self.wait_ends_at_s is not None:
            return
        state = self._state
        wait_s = min(state.rules.failover_wait_s, state.remaining_s)
        self.wait_ends_at_s = state.now_s + wait_s
        state.respond()
        notice = f"{self._gone}; waiting up to {wait_s:.3g} s for another one"
        state.commands.append(Respond(pb.GenerateResponse(notice=notice)))
