"""The Prefill calls of one request: sends a decode node's ticket to a prefill node, on failure to the next. Pure."""

from baton.core.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded
from baton.core.types import LocalPolicy
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.request.attempt import Attempt, PrefillCall
from baton.gateway.request.commands import AskDecode, CallPrefill, CancelPrefill
from baton.gateway.request.receipt import PREFILL
from baton.gateway.request.state import GatewayRequestState
from baton.protos.internal.v1 import decode_pb2, lease_pb2


class HandOver:
    """Makes prefill nodes send the prompt's KV to the decode node of the present attempt."""

    def __init__(self, state: GatewayRequestState) -> None:
        self._state = state
        self._num_calls = 0

    def call(self, attempt: Attempt, ticket: lease_pb2.Ticket) -> BatonError | None:
        """Calls a prefill node with the ticket, preferably the one that was placed with the decode node.

        If there is no prefill node, returns the result of `failed`.
        """
        state = self._state
        node = self._next_node(attempt)
        if node is None:
            return self.failed(attempt, "", state.choice.no_prefill_node())
        if attempt.ticket_for not in (0, node.incarnation):
            self._renew(attempt, node)  # the decode node would refuse KV from this node with the present ticket
            return None
        attempt.excluded.add(node.incarnation)
        pair = node.peers[attempt.node.incarnation]
        state.receipt.calling(node.name, pair.transport, pair.kv_converted, node.version)
        self._num_calls += 1
        attempt.call = PrefillCall(self._num_calls, node, state.now_s)
        attempt.first_token_passed = ticket.first_part  # the decode node samples the first token of a split prompt
        request = state.messages.prefill(
            state.output.token_ids,
            ticket,
            due=state.due,
            refuse_late=state.refuses_late(attempt),
            kept_elsewhere=state.kept_elsewhere(node),
        )
        node.note_sent(state.num_tokens, cached_tokens=node.cached_tokens, decodes=False)
        if attempt.placed_prefill != node.incarnation:
            node.note_prompt(node.cached_tokens, ticket.token_stop, state.now_s)
        attempt.placed_prefill = None
        state.commands.append(CallPrefill(self._num_calls, node.address, request, state.remaining_s, node.name))
        return None

    def failed(self, attempt: Attempt, prefill_node: str, error: BatonError) -> BatonError | None:
        """Handles a failed hand-over: asks for a ticket for another prefill node, or for a prefill on the decode node.

        Returns the error if the attempt has to end: under policy strict, when no prefill node is left.

        Args:
            prefill_node: name of the node that failed; empty if no node could be called.

        Raises:
            BatonError: another node would fail too: the client's mistake, its deadline, or a TTFT that cannot be met.
        """
        state = self._state
        if attempt.call is not None:
            state.choice.failed(attempt.call.node, error, state.now_s)
        self.drop(attempt)
        if isinstance(error, InvalidRequest | DeadlineExceeded):
            raise error
        if prefill_node:
            attempt.failed_calls += 1
            attempt.last_error = error
            state.receipt.failed(f"{prefill_node} failed ({error.message})", PREFILL, error)
        attempt.answered = False
        attempt.waiting_since_s = state.now_s
        following = self._next_node(attempt) if prefill_node else None
        if following is not None:
            self._renew(attempt, following)
            return None
        if state.rules.local_policy is LocalPolicy.STRICT:
            return error
        if state.refuses_late(attempt) and isinstance(error, Overloaded):
            raise error  # prefilled on the decode node, the first token would be late too
        here = decode_pb2.PrefillHere(failed_lease=attempt.lease, output_token_ids=state.output.token_ids)
        state.commands.append(AskDecode(attempt.number, here))
        return None

    def _renew(self, attempt: Attempt, node: FleetNode) -> None:
        """Asks the decode node for a ticket for this prefill node."""
        state = self._state
        attempt.answered = False
        attempt.waiting_since_s = state.now_s
        attempt.ticket_for = node.incarnation
        renew = decode_pb2.RenewTicket(
            failed_lease=attempt.lease,
            output_token_ids=state.output.token_ids,
            prefill_incarnation=attempt.ticket_for,
        )
        state.commands.append(AskDecode(attempt.number, renew))

    def _next_node(self, attempt: Attempt) -> FleetNode | None:
        state = self._state
        return state.choice.prefill_node(attempt, state.num_tokens, state.now_s, state.slo_left)

    def drop(self, attempt: Attempt) -> None:
        """Ends the attempt's call if there is one."""
        if attempt.call is not None and attempt.call.running:
            self._state.commands.append(CancelPrefill(attempt.call.number))
        attempt.call = None
