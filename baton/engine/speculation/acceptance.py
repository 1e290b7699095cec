"""Learns how often drafts are accepted, by what they come from. Pure.

A draft token after a longer match is more often accepted. All requests of a node teach the chances of each match
length; each request has one number of its own, which raises or lowers all of its chances.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import exp

from baton.engine.speculation.sequence_index import COMPARED, SHORT


class Basis(IntEnum):
    """What a draft token comes from: a match of so many tokens with the same sequence, one with another output, or a
    grammar that allows one continuation, one besides white space, or a few tokens among which the output took this one
    before: after the same two tokens, or after others. Where a long match has just ended, what followed it is drafted
    from fewer tokens than a match has: from none to two. LAYER is the first draft token of the model's own layer; its
    further ones follow."""

    OWN = 0
    OTHERS = 10
    FORCED = 20
    SPACED = 21
    REPEATED = 22
    SIMILAR = 23
    RESUMED = 24
    LAYER = 27


# The first length of each class of match lengths. Accepted draft tokens make a match longer than is compared.
_CLASSES = (SHORT, 4, 5, 7, 10, 14, 20, COMPARED, 2 * COMPARED)
_NUM_BASES = 31
# Shares of accepted drafts, counted where this project's source files are edited, where they and its pages come after
# others, and where JSON follows a schema. What a node counts itself soon outweighs them.
_OWN_PRIORS = (0.5, 0.6, 0.68, 0.74, 0.78, 0.82, 0.88, 0.94, 0.97)
_GRAMMAR_PRIORS = {Basis.FORCED: 0.95, Basis.SPACED: 0.5, Basis.REPEATED: 0.9, Basis.SIMILAR: 0.6}
_RESUMED_PRIORS = (0.4, 0.6, 0.8)
# DeepSeek-V3's report has 0.85 to 0.9 for the first; the others are where learning starts.
_LAYER_PRIORS = (0.85, 0.6, 0.5, 0.4)
# A prior counts as so many drafts, and as many drafts as this are remembered.
_PRIOR_WEIGHT = 20.0
_MEMORY = 1000.0
# How much one draft token moves the request's own number, and how far it goes.
_STEP = 0.12
_LOWEST, _HIGHEST = -4.0, 1.5


def bases_of(basis: Basis, length: int, count: int) -> list[int]:
    """The bases of drafts that follow one another.

    Args:
        basis: OWN or OTHERS.
        length: length of the match before the first draft token.
        count: number of drafts, at most 32.
    """
    first = min(length, _CLASSES[-1])
    return (_OWN_BASES if basis is Basis.OWN else _OTHERS_BASES)[first : first + count]


def layer_bases(count: int) -> list[int]:
    """The bases of the first drafts of the model's own layer, at most four."""
    return list(range(Basis.LAYER, min(Basis.LAYER + count, _NUM_BASES)))


def _bases_by_length(basis: Basis) -> list[int]:
    """The basis of a draft token after each match length."""
    classes = [sum(length >= first for first in _CLASSES) - 1 for length in range(_CLASSES[-1] + COMPARED)]
    return [basis + each if each >= 0 else Basis.RESUMED + length for length, each in enumerate(classes)]


_OWN_BASES, _OTHERS_BASES = _bases_by_length(Basis.OWN), _bases_by_length(Basis.OTHERS)


class Acceptance:
    """How often drafts of each basis were accepted lately, on this node."""

    def __init__(self) -> None:
        self._prior = [0.5] * _NUM_BASES
        for place, prior in enumerate(_OWN_PRIORS):
            self._prior[Basis.OWN + place] = self._prior[Basis.OTHERS + place] = prior
        for place, prior in enumerate(_RESUMED_PRIORS):
            self._prior[Basis.RESUMED + place] = prior
        for place, prior in enumerate(_LAYER_PRIORS):
            self._prior[Basis.LAYER + place] = prior
        for basis, prior in _GRAMMAR_PRIORS.items():
            self._prior[basis] = prior
        self._right = [0.0] * _NUM_BASES
        self._all = [0.0] * _NUM_BASES

    def chance(self, basis: int) -> float:
        """The share of accepted drafts, each after accepted ones."""
        return (_PRIOR_WEIGHT * self._prior[basis] + self._right[basis]) / (_PRIOR_WEIGHT + self._all[basis])

    def learn(self, basis: int, *, right: int, wrong: int = 0) -> None:
        """Counts drafts after accepted ones."""
        if self._all[basis] >= _MEMORY:
            self._all[basis] /= 2
            self._right[basis] /= 2
        self._all[basis] += right + wrong
        self._right[basis] += right


class OwnAcceptance:
    """The chances of one request's drafts."""

    def __init__(self, shared: Acceptance) -> None:
        self._shared = shared
        self._shift = 0.0  # of the logarithm of the odds
        self._chances: dict[int, float] = {}

    def chance(self, basis: int) -> float:
        """The chance that a draft token is accepted if all before it are."""
        chance = self._chances.get(basis)
        if chance is None:
            mean = min(0.995, max(0.005, self._shared.chance(basis)))
            chance = self._chances[basis] = 1 / (1 + (1 - mean) / mean * exp(-self._shift))
        return chance

    def chances(self, bases: Iterable[int], *, least: float) -> list[float]:
        """For each of some drafts that follow one another, the chance that it and all before it are accepted, up to the
        first one that is less likely than `least`."""
        known, product, chances = self._chances, 1.0, []
        for basis in bases:
            product *= known.get(basis) or self.chance(basis)
            if product < least:
                break
            chances.append(product)
        return chances

    def learn(self, bases: Sequence[int], num_accepted: int) -> None:
        """Learns from drafts: the first `num_accepted` were accepted, and the one after them, if any, was not."""
        right = bases[:num_accepted]
        for basis in set(right):
            count = right.count(basis)
            self._shift += _STEP * count * (1 - self.chance(basis))
            self._shared.learn(basis, right=count)
        if num_accepted < len(bases):
            self._shift -= _STEP * self.chance(bases[num_accepted])
            self._shared.learn(bases[num_accepted], right=0, wrong=1)
        self._shift = min(_HIGHEST, max(_LOWEST, self._shift))
        self._chances.clear()
