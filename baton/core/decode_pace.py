"""How draft tokens change the time and the tokens of decode steps. Pure: nodes measure it, gateways predict by it."""

from typing import NamedTuple

# Where prompts share a step, drafts take this part of the time for which requests wait beyond the plain step.
DRAFTS_SHARE = 0.5


class DecodePace(NamedTuple):
    """Means over a node's latest decode steps.

    Args:
        step_ratio: time of a step with its drafts and its wait for the host, by that of the same step without drafts.
        tokens: tokens that a step gives each of its requests.
        prompt_step_ratio: `step_ratio` of the steps that also compute prompts. The time of the prompts does not count.
    """

    step_ratio: float = 1.0
    tokens: float = 1.0
    prompt_step_ratio: float = 1.0

    @property
    def token_ratio(self) -> float:
        """Time per token of a request, by the time of a step without drafts."""
        return self.step_ratio / self.tokens


PLAIN_PACE = DecodePace()
