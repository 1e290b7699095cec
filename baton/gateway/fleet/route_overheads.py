"""Learns how much later first tokens come than their nodes' step costs say: messages, hosts and hand-overs. Pure.

A prompt of a few hundred tokens takes about as long on these ways as in its step, and the nodes report neither.
"""

from typing import NamedTuple

# Only prompts that take less than this show it; of longer ones, the error of the step costs is larger.
_SHORT_S = 0.1
# Each request moves an overhead towards its own by so much, or by this share of it.
_STEP_S, _STEP_SHARE = 0.00025, 1 / 16


class RouteOverheads(NamedTuple):
    """Time to the first token beyond the predicted queues and steps.

    Args:
        remote_s: of requests whose prompt a prefill node computes for another node, or a part of it.
        local_s: of requests that one node serves whole.
    """

    remote_s: float = 0.0
    local_s: float = 0.0


NO_OVERHEADS = RouteOverheads()


class LearnedOverheads:
    """The overheads of one gateway: half of the first tokens of each route come earlier than predicted with them."""

    def __init__(self) -> None:
        self.present = NO_OVERHEADS

    def add(self, *, remote: bool, predicted_s: float, ttft_s: float) -> None:
        """Records a request's first token; the prediction contains the overhead."""
        name, now_s = ("remote_s", self.present.remote_s) if remote else ("local_s", self.present.local_s)
        if predicted_s - now_s > _SHORT_S or ttft_s == predicted_s:
            return
        step_s = max(_STEP_S, _STEP_SHARE * now_s)
        learned_s = max(0.0, now_s + (step_s if ttft_s > predicted_s else -step_s))
        self.present = self.present._replace(**{name: learned_s})
