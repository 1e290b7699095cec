"""Which of a step's draws are kept where rows have drafts. Pure."""

from collections.abc import Sequence

from baton.core.errors import BatonError
from baton.core.types import TokenOutput
from baton.engine.batch import RowResult
from baton.engine.request import IntArray


def keep_draws(draws: Sequence[RowResult], drafts: Sequence[IntArray]) -> list[RowResult]:
    """Makes one result for each row of a step.

    A draft is right if it is the token that is drawn in its place. The draws up to that of the first wrong draft are
    those that decoding would give; later ones follow a wrong token and are dropped, whatever they are.

    Args:
        draws: the results of the rows that `drawn_rows` makes of the step's.
        drafts: the drafts of each row of the step.
    """
    results: list[RowResult] = []
    place = 0
    for guesses in drafts:
        stop = place + len(guesses) + 1
        results.append(_kept(draws[place:stop], guesses) if guesses else draws[place])
        place = stop
    assert place == len(draws), "each row has one draw more than drafts"
    return results


def _kept(draws: Sequence[RowResult], guesses: IntArray) -> tuple[TokenOutput, ...] | BatonError:
    kept = []
    for draw, guess in zip(draws, (*guesses, None), strict=True):
        if isinstance(draw, BatonError):
            return draw
        assert isinstance(draw, TokenOutput), "a row with drafts is sampled"
        kept.append(draw)
        if draw.token_id != guess:
            break
    return tuple(kept)
