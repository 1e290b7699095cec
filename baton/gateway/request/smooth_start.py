"""Holds the first token of a hand-over for a moment, so that the second one follows it without a long gap. Pure.

Only the message to the client waits. For retries, journals and a resumed request, the first token has come. Whatever
else happens to the output or its attempt ends the wait: the next token, the end, a failure.
"""

from math import inf

from baton.core.costs import StepWork
from baton.core.types import Path
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.second_token import HOLD_S_MIN, hold_s, longest_gap_s
from baton.gateway.request.attempt import Attempt, PrefillCall
from baton.gateway.request.state import GatewayRequestState


class SmoothStart:
    """The beginning of one output that a prefill node and a decode node share.

    Attributes:
        until_s: time until which the first token waits; infinite: it does not wait.
        came_at_s: arrival of the first token of a hand-over; None: none has come.
        awaits_second: whether the arrival of the second token is still to be recorded.
    """

    def __init__(self, state: GatewayRequestState) -> None:
        self.until_s = inf
        self.came_at_s: float | None = None
        self.awaits_second = False
        self._state = state
        self._attempt: Attempt | None = None
        self._call: PrefillCall | None = None

    def first_came(self, attempt: Attempt) -> None:
        """Records a prefill node's first token, after it has joined the output, and may begin to hold it."""
        state = self._state
        if self.came_at_s is not None or attempt.num_given:
            return
        self.came_at_s, self._attempt, self._call = state.now_s, attempt, attempt.call
        if not self._undisturbed or state.output.end is not None:
            return
        if len(state.output.token_ids) > 1:  # the decode node was faster
            attempt.node.second_token.add(0.0, state.now_s)
            return
        self.awaits_second = True
        waited_s = state.now_s - state.request.started_at_s
        gap_s = longest_gap_s(_plain_step_s(attempt.node, state.num_tokens), state.slo, state.rules.objective)
        further_s = hold_s(attempt.node.second_token.at(state.now_s), gap_s, state.slo, waited_s=waited_s)
        if further_s:
            self.until_s = state.now_s + further_s
            state.receipt.first_token_waits(waited_s)

    def second_came(self, attempt: Attempt, came_at_s: float | None) -> None:
        """Records the arrival of the token after the first one; None: it has come just now."""
        self.awaits_second = False
        if self._continues(attempt) and self._undisturbed:
            assert self.came_at_s is not None
            now_s = self._state.now_s
            delay_s = (now_s if came_at_s is None else came_at_s) - self.came_at_s
            attempt.node.second_token.add(max(0.0, delay_s), now_s)

    def ended(self, attempt: Attempt | None) -> bool:
        """Whether the first token need not wait any longer. Called after each batch of events while it waits.

        Args:
            attempt: the present one.
        """
        # Timers of an event loop fire up to 1 ms too early.
        in_time = self._state.now_s <= self.until_s - HOLD_S_MIN
        if in_time and self._continues(attempt) and len(self._state.output.token_ids) == 1:
            return False
        self.until_s = inf
        return True

    def _continues(self, attempt: Attempt | None) -> bool:
        """Whether this is the attempt that brought the first token, and its hand-over has not failed since."""
        return attempt is not None and attempt is self._attempt and attempt.call is self._call

    @property
    def _undisturbed(self) -> bool:
        """Whether the hand-over is the only one, and nothing has failed before it."""
        receipt = self._state.receipt
        return receipt.path is Path.REMOTE and receipt.attempts == 1 and not receipt.failures


def _plain_step_s(node: FleetNode, num_tokens: int) -> float:
    """Predicted time of a step of the node's present batch and this request, without prompts; infinite if unknown."""
    view = node.view()
    if view.costs is None:
        return inf
    return view.costs.seconds(StepWork(view.decode_rows + 1, view.context_tokens + num_tokens))
