"""Chooses how many draft tokens of each request a step takes: those that bring more tokens a second. Pure.

Each draft token is one more decode row of the step, which reads its request's context once more
(`baton.engine.device.unfolded`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from baton.core.costs import StepWork, chunk_pairs
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.limits import LEAST_GAIN
from baton.engine.speculation.wait_bounds import NO_BOUND, WaitBounds

# Draft tokens of one request, in order.
Draft: TypeAlias = "tuple[int, ...]"

# Of numbers that bring nearly as much as the best one, the largest is taken: the drafts that it leaves out would need
# another step with drafts.
_NEARLY = 0.99
# Numbers of draft tokens that are tried grow by this ratio; costs are flat or straight between captured sizes.
_TRIED_RATIO = 1.3


class Proposal(NamedTuple):
    """What could be drafted for one request.

    Args:
        tokens: drafts for its next tokens, in order; may be empty.
        chances: of each token, the chance that it and all before it are kept; never rises.
        context: tokens before the first draft token, without the request's newest token.
    """

    tokens: Draft
    chances: tuple[float, ...]
    context: int


NO_PROPOSAL = Proposal((), (), 0)


def choose_depths(
    proposals: Sequence[Proposal],
    work: StepWork,
    costs: StepTimes | None,
    *,
    room: int,
    wait_s: Callable[[int], float] = lambda _: 0.0,
    lost_s: float = 0.0,
    bounds: WaitBounds = NO_BOUND,
) -> list[int]:
    """How many tokens of each proposal the next step should take.

    Args:
        work: the step without drafts: one token of each of these requests and of the others that decode.
        costs: None: unknown; then nothing is drafted.
        room: most draft tokens of the step.
        wait_s: for how long the device waits for a step of so many rows with drafts, because it is prepared only when
            the one before has ended.
        lost_s: by how much longer plain steps take because of a step with drafts.
        bounds: of the step's requests, which all wait for the drafts of all.
    """
    if costs is None or room <= 0 or not work.decode_rows:
        return [0] * len(proposals)
    ranked = _Ranked(proposals, room)
    least_rate = LEAST_GAIN * work.decode_rows / costs.seconds(work)
    best, best_rate = 0, 0.0
    for count in _counts(len(ranked)):
        tokens, keys = ranked.sums(count)
        drafted = StepWork(work.decode_rows + count, work.keys + keys, work.prompt_tokens, work.pairs)
        seconds = costs.seconds(drafted) + wait_s(drafted.decode_rows)
        rate = (work.decode_rows + tokens) / (seconds + lost_s)
        if rate <= max(least_rate, _NEARLY * best_rate):
            continue
        if seconds <= ranked.longest_s(count, bounds):
            best, best_rate = count, max(rate, best_rate)
    return ranked.depths(best)


def all_depths(proposals: Sequence[Proposal], *, room: int) -> list[int]:
    """As many tokens of each proposal as there is room for, the most likely ones first."""
    ranked = _Ranked(proposals, max(0, room))
    return ranked.depths(len(ranked))


def could_pay(work: StepWork, costs: StepTimes, *, most_each: int, wait_s: Callable[[int], float]) -> bool:
    """Whether drafts that are all accepted, up to `most_each` for each decode row, would pay. At saturation they do
    not, and nothing needs to be looked up."""
    rows = work.decode_rows
    best_rate = LEAST_GAIN * rows / costs.seconds(work)
    for count in _counts(rows * most_each, ratio=2.0):
        drafted = StepWork(rows + count, work.keys * (rows + count) // rows, work.prompt_tokens, work.pairs)
        if rows + count > best_rate * (wait_s(rows + count) + costs.seconds(drafted)):
            return True
    return False


def speculative_work(work: StepWork, drafts: Iterable[tuple[int, int]]) -> StepWork:
    """The work of a step with drafts.

    Args:
        work: the step without drafts.
        drafts: of each row with drafts, its context as in `Proposal` and how many there are.
    """
    rows, keys = work.decode_rows, work.keys
    for context, count in drafts:
        rows += count
        keys += chunk_pairs(context + 1, context + 1 + count)
    return StepWork(rows, keys, work.prompt_tokens, work.pairs)


class _Ranked:
    """The tokens of all proposals, the most likely ones first. A proposal's tokens keep their order, because chances
    never rise.

    Args:
        most: no more tokens than this are kept.
    """

    def __init__(self, proposals: Sequence[Proposal], most: int) -> None:
        self._num_proposals = len(proposals)
        lengths = np.array([len(proposal.chances) for proposal in proposals], np.int64)
        chance_T = np.array([chance for proposal in proposals for chance in proposal.chances], float)
        order_T = np.argsort(-chance_T, kind="stable")[:most]
        self._place_T = np.repeat(np.arange(len(proposals)), lengths)[order_T]
        # The first draft token comes after a request's newest token, and sees itself and all before it.
        firsts = np.array([proposal.context + 2 for proposal in proposals], np.int64) - np.cumsum(lengths) + lengths
        keys_T = np.repeat(firsts, lengths) + np.arange(len(chance_T))
        self._chance_T = chance_T[order_T]
        self._tokens_T = np.cumsum(self._chance_T)
        self._keys_T = np.cumsum(keys_T[order_T])

    def __len__(self) -> int:
        return len(self._place_T)

    def sums(self, count: int) -> tuple[float, int]:
        """Expected tokens from the first `count` drafts, at least one, and the keys that these read."""
        return float(self._tokens_T[count - 1]), int(self._keys_T[count - 1])

    def longest_s(self, count: int, bounds: WaitBounds) -> float:
        """How long the requests let a step take that has the first `count` drafts."""
        tokens = np.ones(self._num_proposals)
        if bounds.all_bear:
            tokens += np.bincount(self._place_T[:count], self._chance_T[:count], minlength=self._num_proposals)
        return bounds.longest_s(tokens)

    def depths(self, count: int) -> list[int]:
        """How many of the first `count` tokens each proposal has."""
        depths: list[int] = np.bincount(self._place_T[:count], minlength=self._num_proposals).tolist()
        return depths


def _counts(most: int, *, ratio: float = _TRIED_RATIO) -> Iterable[int]:
    """Numbers from 1 to `most`."""
    count = 1
    while count < most:
        yield count
        count = max(count + 1, int(count * ratio))
    if most:
        yield most
