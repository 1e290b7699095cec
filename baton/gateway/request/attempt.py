"""State of one attempt to decode a request on one node, and of its Prefill calls. Pure.

It knows which node owes the next answer; `baton.gateway.request.machine` decides what to do next.
"""

from dataclasses import dataclass, field

from baton.core.errors import BatonError
from baton.gateway.fleet.fleet_node import FleetNode


@dataclass
class PrefillCall:
    """One Prefill call, until it ends or the gateway cancels it."""

    number: int
    node: FleetNode
    last_message_at_s: float
    running: bool = True
    scheduled: bool = False
    sent: bool = False


@dataclass
class Attempt:
    """One attempt on one node that decodes: a decode node, or a prefill node that serves the request alone.

    Attributes:
        num_given: number of tokens sent to the client before the attempt.
        begun: whether the client had tokens, or a node was lost, before the attempt.
        waiting_since_s: time of the attempt's last event.
        answered: whether the decode node has answered the submission or the last request for another ticket.
        admitted: whether the decode node decodes with KV from a prefill node.
        ended_by_node: whether the decode node has ended the request, so that it needs no cancellation.
        first_token_passed: whether the last call has sent its first token, or its ticket asks for none.
        placed_prefill: incarnation of the prefill node that was placed with the decode node and whose backlog includes
            the prompt; None: there was none, or it has been called.
        ticket_for: incarnation of the only prefill node that can use the ticket; 0: every node can.
        failed_calls: number of failed hand-overs.
        last_error: error of the last failed hand-over.
        excluded: incarnations of the prefill nodes called so far. Each gets only one ticket.
    """

    number: int
    node: FleetNode
    num_given: int
    waiting_since_s: float
    begun: bool = False
    lease: int = 0
    answered: bool = False
    admitted: bool = False
    ended_by_node: bool = False
    first_token_passed: bool = False
    placed_prefill: int | None = None
    ticket_for: int = 0
    call: PrefillCall | None = None
    failed_calls: int = 0
    last_error: BatonError | None = None
    excluded: set[int] = field(default_factory=set)

    @property
    def first_token_owed(self) -> bool:
        """Whether the prefill call will or may still bring the first token."""
        call = self.call
        return call is not None and not self.first_token_passed and call.running

    @property
    def first_token_lost(self) -> bool:
        """Whether decode was admitted but the first token can no longer arrive."""
        return self.admitted and not self.first_token_passed and not self.first_token_owed

    @property
    def awaits_sent(self) -> bool:
        """Whether the prefill node may still report how much it has sent."""
        return self.call is not None and self.call.running and not self.call.sent

    @property
    def prefill_node_owes(self) -> bool:
        """Whether the prefill node owes the next answer; otherwise the decode node does."""
        if self.call is None or not self.call.running or not self.answered:
            return False
        return not self.call.sent and not (self.admitted and self.first_token_passed)

    def stalls_at_s(self, *, prefill_stall_s: float, decode_stall_s: float, max_queue_s: float) -> float:
        """Time at which the node that owes the next answer counts as lost, unless it gives a sign of life before.

        Args:
            max_queue_s: added while the decode node may be waiting for free blocks.
        """
        if self.prefill_node_owes:
            assert self.call is not None
            alive_at_s = self.call.last_message_at_s
            if not self.call.scheduled:  # queued on the node: any sign of life of the node counts
                alive_at_s = max(alive_at_s, self.call.node.last_message_at_s)
            return alive_at_s + prefill_stall_s
        alive_at_s = max(self.waiting_since_s, self.node.last_message_at_s)
        return alive_at_s + decode_stall_s + (0.0 if self.answered else max_queue_s)
