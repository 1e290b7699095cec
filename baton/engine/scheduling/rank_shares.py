"""Levels the tokens of a step over ranks, with attention data parallelism. Pure.

A step takes as long as its busiest rank: the others wait, and captured steps pad every rank's tokens to the largest
share. So prompts get tokens in rounds. In each round a rank may have tokens up to one level, at which the ranks that
still have prompts take the rest of the step together. A rank whose prompts end below the level leaves its part to the
next round. So a step has as many tokens as without levels, and none of a rank's prompts waits for those of another.
"""

from collections.abc import Collection, Sequence
from typing import TypeAlias

# Priority, and whether the client still waits for its first token; lower ones are computed first.
PromptClass: TypeAlias = tuple[int, bool]


class RankShares:
    """The tokens of each rank in a step in the making, and the level up to which prompts may add to them.

    Args:
        tokens: of each rank, before prompts.

    Attributes:
        served: prompts of other classes get no tokens in this round.
        was_full: whether the first waiting request got no tokens in this round, but may in another.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.served: PromptClass = (0, False)
        self.was_full = False
        self._tokens = list(tokens)
        self._level = 0

    def room(self, rank: int) -> int:
        """How many tokens the rank may still get in this round."""
        return max(0, self._level - self._tokens[rank])

    def add(self, rank: int, num_tokens: int) -> None:
        self._tokens[rank] += num_tokens

    def raise_level(self, num_tokens: int, ranks: Collection[int]) -> None:
        """Begins a round in which these ranks may get about `num_tokens` together, those with fewest tokens first."""
        held = sorted(self._tokens[rank] for rank in ranks)
        level = total = 0
        for count, tokens in enumerate(held, 1):
            if count > 1 and level <= tokens:
                break
            total += tokens
            level = -(-(total + num_tokens) // count)
        self._level, self.was_full = level, False
