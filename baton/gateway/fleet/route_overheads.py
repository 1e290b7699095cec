"""Learns how much later first tokens come than their nodes' step costs say: messages, hosts and hand-overs. Pure.

A prompt of a few hundred tokens takes about as long on these ways as in its step, and the nodes report neither.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Only prompts that take less than this show it; of longer ones, the error of the step costs is larger. It is also the
# largest overhead: whatever delays first tokens further is not a message.
_SHORT_S = 0.1
# Each request moves an overhead towards its own by so much, or by this share of it.
_STEP_S, _STEP_SHARE = 0.00025, 1 / 16
# A route that is not chosen shows nothing, so what made it slow is forgotten: half of it in this time.
_HALF_LIFE_S = 60.0


class RouteOverheads(NamedTuple):
    """Time to the first token beyond the predicted queues and steps.

    Args:
        remote_s: of requests whose prompt a prefill node computes for another node, or a part of it.
        local_s: of requests that one node serves whole.
    """

    remote_s: float = 0.0
    local_s: float = 0.0


NO_OVERHEADS = RouteOverheads()


@dataclass
class _Learned:
    """One route's overhead, and when a request last showed it."""

    seconds: float = 0.0
    shown_s: float = 0.0

    def at(self, now_s: float) -> float:
        return float(self.seconds * 0.5 ** (max(0.0, now_s - self.shown_s) / _HALF_LIFE_S))


class LearnedOverheads:
    """The overheads of one gateway: half of the first tokens of each route come earlier than predicted with them."""

    def __init__(self) -> None:
        self._remote, self._local = _Learned(), _Learned()

    def at(self, now_s: float) -> RouteOverheads:
        """What is known now."""
        return RouteOverheads(self._remote.at(now_s), self._local.at(now_s))

    def add(self, *, remote: bool, predicted_s: float, ttft_s: float, now_s: float) -> None:
        """Records a request's first token.

        Args:
            predicted_s: its prediction without an overhead. Many requests end after the overhead that they were placed
                with has changed, so that one says nothing.
        """
        if predicted_s > _SHORT_S:
            return
        learned = self._remote if remote else self._local
        present_s = learned.at(now_s)
        step_s = max(_STEP_S, _STEP_SHARE * present_s)
        missing_s = ttft_s - predicted_s - present_s
        found_s = present_s + (step_s if missing_s > 0.0 else -step_s)
        learned.seconds, learned.shown_s = min(max(0.0, found_s), _SHORT_S), now_s
