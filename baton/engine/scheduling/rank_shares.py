"""Levels the tokens of a step over ranks, with attention data parallelism. Pure.

A step takes as long as its busiest rank: the others wait, and captured steps pad every rank's tokens to the largest
share. So prompts get tokens in rounds. In each round a rank may have tokens up to one level, at which the ranks that
still have prompts take the rest of the step together. A rank whose prompts end below the level leaves its part to the
next round. So a step has as many tokens as without levels, and none of a rank's prompts waits for those of another.
"""

from collections.abc import Collection, Iterable
from typing import TypeAlias

# Priority, and whether the client still waits for its first token; lower ones are computed first.
PromptClass: TypeAlias = tuple[int, bool]

# After so many rounds no part of a step is kept for later requests. Each round searches the prefix cache for the first
# waiting request.
_SPARING_ROUNDS = 8


class RankShares:
    """The tokens of each rank in a step in the making, and the level up to which prompts may add to them.

    Attributes:
        served: prompts of other classes get no tokens in this round.
        deferred: whether the first waiting request got no tokens in this round, but may in another.
    """

    def __init__(self, num_ranks: int) -> None:
        self.served: PromptClass = (0, False)
        self.deferred = self._is_wide = False
        self._tokens = [0] * num_ranks
        self._level = self._rounds = self._added = 0
        self._deferred_on: int | None = None

    def room(self, rank: int) -> int:
        """How many tokens the rank may still get in this round."""
        return max(0, self._level - self._tokens[rank])

    def add(self, rank: int, num_tokens: int) -> None:
        """Counts tokens that the rank got."""
        self._tokens[rank] += num_tokens
        self._added += num_tokens

    def defer(self, rank: int) -> None:
        """Records that the first waiting request found no room on its rank."""
        self.deferred, self._deferred_on = True, rank

    @property
    def is_held_back(self) -> bool:
        """Whether this round kept parts for all ranks, which the first waiting request could not use."""
        return self._is_wide and self._deferred_on is not None

    def begin_round(self, num_tokens: int, ranks: Collection[int], *, waiting: bool) -> None:
        """Raises the level, so that some ranks may get about `num_tokens` together, those with fewest tokens first.

        Args:
            ranks: ranks with prompts that run.
            waiting: whether a request waits that may run. It and later ones may go to any rank. If none of them could
                in the last round, its own rank gets a part, so that later ones have their turn.
        """
        is_stuck = self._deferred_on is not None and (not self._added or self._rounds >= _SPARING_ROUNDS)
        self._is_wide = waiting and not is_stuck
        if self._is_wide:
            ranks = range(len(self._tokens))
        elif waiting and self._deferred_on is not None:
            ranks = {*ranks, self._deferred_on}
            if self._rounds < _SPARING_ROUNDS:
                num_tokens = -(-num_tokens // len(self._tokens))
        self._level = water_level([self._tokens[rank] for rank in ranks], num_tokens)
        self._rounds += 1
        self._added, self.deferred, self._deferred_on = 0, False, None


def water_level(held: Iterable[int], added: int) -> int:
    """The lowest level to which all can be filled with `added` more together."""
    level = total = 0
    for count, amount in enumerate(sorted(held), 1):
        if count > 1 and level <= amount:
            break
        total += amount
        level = -(-(total + added) // count)
    return level
