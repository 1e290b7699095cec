"""Decides how many tokens the model's own layer guesses after a step, and learns what that takes. Pure.

Unlike other guesses, these cost time before anything is known about them: the layer guesses at the end of one step for
the next one, and each token takes one more pass. The next step also waits for them.
"""

from collections.abc import Callable, Sequence

from baton.core.costs import StepWork
from baton.engine.batch import Guessed
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.depth import guessed_work
from baton.engine.speculation.limits import LEAST_GAIN

# Most tokens that the layer guesses for one request. It was trained for the first; later ones are less often right.
MOST_LAYER_GUESSES = 4
# After so many steps in which guesses seemed not to pay, one is tried, so that chances do not stay at what they were.
_RETRY_STEPS = 64
# Times of passes are learned by powers of two of their rows.
_MEMORY = 16


class PassTimes:
    """The time of one pass of the layer, by its number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}  # number of steps, and the mean

    def seconds(self, rows: int) -> float:
        """The time of one guess of each row, from the nearest known number of rows; 0 while nothing is known, so that
        it becomes known."""
        if not self._seconds:
            return 0.0
        kind = rows.bit_length()
        nearest = min(self._seconds, key=lambda known: (abs(known - kind), known))
        return self._seconds[nearest][1]

    def observe(self, rows: int, passes: int, seconds: float) -> None:
        count, mean = self._seconds.get(rows.bit_length(), (0, 0.0))
        count = min(count + 1, _MEMORY)
        self._seconds[rows.bit_length()] = count, mean + (seconds / passes - mean) / count


class LayerGuesses:
    """The choices of one engine.

    Args:
        always: guess as many as there is room for.
    """

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._times = PassTimes()
        self._refused = 0  # steps since the last guess

    def count(
        self,
        chances: Sequence[Sequence[float]],
        work: StepWork,
        costs: StepTimes | None,
        *,
        room: int,
        wait_s: Callable[[int], float],
    ) -> int:
        """How many tokens of each request to guess for the next step.

        Args:
            chances: of each request, for its guesses in order, the chance that one and all before it are kept.
            work: the next step without guesses.
            room: most guessed tokens of the next step.
            wait_s: as in `baton.engine.speculation.depth`.
        """
        most = min(MOST_LAYER_GUESSES, room)
        if most <= 0 or not chances:
            return 0
        if self._always:
            return most
        if costs is None:
            return 0
        found = self._best(chances, work, costs, most=most, room=room, wait_s=wait_s)
        if found:
            self._refused = 0
            return found
        self._refused += 1
        if self._refused < _RETRY_STEPS:
            return 0
        self._refused = 0
        certain = [[1.0]] * len(chances)
        return self._best(certain, work, costs, most=1, room=room, wait_s=wait_s)

    def observe(self, guessed: Guessed) -> None:
        """Learns from the guesses after a step."""
        passes = max(map(len, guessed.tokens.values()), default=0)
        if passes and guessed.rows:
            self._times.observe(guessed.rows, passes, guessed.seconds)

    def _best(
        self,
        chances: Sequence[Sequence[float]],
        work: StepWork,
        costs: StepTimes,
        *,
        most: int,
        room: int,
        wait_s: Callable[[int], float],
    ) -> int:
        """The number of guesses for each request that brings the most tokens a second; 0 if none brings enough."""
        rows, context = work.decode_rows, work.keys // max(1, work.decode_rows)
        best, best_rate = 0, LEAST_GAIN * rows / costs.seconds(work)
        pass_s = self._times.seconds(rows)
        for count in range(1, most + 1):
            taken = min(room, count * len(chances))
            share = taken / (count * len(chances))
            tokens = share * sum(sum(each[:count]) for each in chances)
            each = [(context, count)] * len(chances) if share == 1.0 else [(context, 1)] * taken
            guessed = guessed_work(work, each)
            step_s = costs.seconds(guessed) + wait_s(guessed.decode_rows) + count * pass_s
            if (rate := (rows + tokens) / step_s) > best_rate:
                best, best_rate = count, rate
        return best
