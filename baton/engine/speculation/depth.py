"""Chooses how many guessed tokens of each request a step takes: those that bring more tokens a second. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from baton.core.costs import StepWork
from baton.engine.scheduling.slices import StepTimes

# Guessed tokens of one request, in order.
Draft: TypeAlias = "tuple[int, ...]"


class Proposal(NamedTuple):
    """What could be guessed for one request.

    Args:
        tokens: guesses for its next tokens, in order; may be empty.
        chances: of each token, the chance that it and all before it are kept; never rises.
        context: tokens before the first guess, without the request's newest token.
    """

    tokens: Draft
    chances: tuple[float, ...]
    context: int


def choose_depths(
    proposals: Sequence[Proposal], work: StepWork, costs: StepTimes | None, *, room: int, overhead_s: float = 0.0
) -> list[int]:
    """How many tokens of each proposal the next step should take.

    Args:
        work: the step without guesses: one token of each of these requests and of the others that decode.
        costs: None: unknown; then nothing is guessed.
        room: most guessed tokens of the step.
        overhead_s: what the host adds to a step with guesses, because no step can be prepared while it runs.
    """
    raise NotImplementedError
