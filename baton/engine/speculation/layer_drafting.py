"""Decides how many tokens the model's own layer drafts after a step, and learns what that takes. Pure.

Unlike other drafts, these cost time before anything is known about them: the layer drafts at the end of one step for
the next one, and each token takes one pass. The next step also waits for them. Where they do not pay for long, as at
saturation, the layer no longer computes the tokens of decodes either. Its KV of a request then has a hole, and it
drafts for new requests only.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median_low

import numpy as np

from baton.core.costs import StepWork
from baton.engine.batch import LayerDrafts
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.depth import speculative_work
from baton.engine.speculation.limits import LEAST_GAIN
from baton.engine.speculation.wait_bounds import NO_BOUND, WaitBounds

# Most tokens that the layer drafts for one request. It was trained for the first; later ones are accepted less often.
MOST_LAYER_DRAFTS = 4
# After so many steps in which drafts seemed not to pay, the layer no longer computes the tokens of decodes; and one
# draft token is tried, so that chances do not stay at what they were.
RETRY_STEPS = 64
# Times of passes are learned by powers of two of their rows, from so many of the last ones.
_MEMORY = 7


class PassTimes:
    """The time of one pass of the layer, by its number of rows. It is a median, because the first pass of a kind may
    have compiled kernels."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def seconds(self, rows: int) -> float:
        """The time of one draft token of each row, from the nearest known number of rows; 0 while nothing is known, so
        that it becomes known."""
        if not self._seconds:
            return 0.0
        kind = rows.bit_length()
        nearest = min(self._seconds, key=lambda known: (abs(known - kind), known))
        return median_low(self._seconds[nearest])

    def observe(self, rows: int, passes: int, seconds: float) -> None:
        self._seconds.setdefault(rows.bit_length(), deque(maxlen=_MEMORY)).append(seconds / passes)


class LayerDrafting:
    """The choices of one engine.

    Args:
        always: draft as many as there is room for.
    """

    def __init__(self, *, always: bool) -> None:
        self._always = always
        # After steps with prompts the passes are queued outside of graphs, which takes longer.
        self._times = {prompts: PassTimes() for prompts in (False, True)}
        # Steps since drafts for all requests would have paid, and since there was a draft token.
        self._unpaid = self._untried = 0

    @property
    def pays(self) -> bool:
        """Whether drafts have paid lately, so that it is worth while to keep the layer's KV complete."""
        return self._always or self._unpaid < RETRY_STEPS

    def refuse(self) -> None:
        """Notes a step at saturation, where no draft token can pay."""
        self._unpaid += 1

    def count(
        self,
        chances: Sequence[Sequence[float]],
        work: StepWork,
        costs: StepTimes | None,
        *,
        room: int,
        wait_s: Callable[[int], float],
        everyone: Sequence[Sequence[float]] | None = None,
        prompts: bool = False,
        bounds: WaitBounds = NO_BOUND,
    ) -> int:
        """How many tokens of each request to draft for the next step.

        Args:
            chances: of each request, for its drafts in order, the chance that one and all before it are kept.
            work: the next step without drafts.
            room: most draft tokens of the next step.
            wait_s: as in `baton.engine.speculation.depth`.
            everyone: the chances if the layer drafted for all requests, also for those whose KV has a hole; None: it
                does.
            prompts: whether prompts share the step after which the layer drafts.
            bounds: of the next step's requests, which all wait for passes and drafts; `own` is that of `chances`.
        """
        most = min(MOST_LAYER_DRAFTS, room)
        if self._always:
            return max(0, most) if chances else 0
        everyone = chances if everyone is None else everyone
        if costs is None or not everyone:
            return 0
        if most <= 0:
            self.refuse()
            return 0
        choose = partial(
            self._best, work=work, costs=costs, room=room, wait_s=wait_s, pass_s=self._times[prompts].seconds
        )
        found = choose(chances, most=most, bounds=bounds)
        # A bound passes, and the layer's KV stays complete until then.
        if found or choose(everyone, most=most):
            self._unpaid = 0
        else:
            self._unpaid += 1
        self._untried += 1
        if found:
            self._untried = 0
        elif any(chances) and self._untried >= RETRY_STEPS:
            self._untried = 0
            found = choose([[1.0]] * len(chances), most=1, bounds=bounds)
        return found

    def observe(self, drafts: LayerDrafts, *, prompts: bool = False) -> None:
        """Learns from the drafts after a step.

        Args:
            prompts: whether prompts shared the step.
        """
        passes = max(map(len, drafts.tokens.values()), default=0)
        if passes and drafts.rows:
            self._times[prompts].observe(drafts.rows, passes, drafts.seconds)

    @staticmethod
    def _best(
        chances: Sequence[Sequence[float]],
        *,
        most: int,
        work: StepWork,
        costs: StepTimes,
        room: int,
        wait_s: Callable[[int], float],
        pass_s: Callable[[int], float],
        bounds: WaitBounds = NO_BOUND,
    ) -> int:
        """The number of drafts for each request that brings the most tokens a second; 0 if none brings enough."""
        if not chances:
            return 0
        rows, context = work.decode_rows, work.keys // max(1, work.decode_rows)
        best, best_rate = 0, LEAST_GAIN * rows / costs.seconds(work)
        each_pass_s = pass_s(rows)
        for count in range(1, most + 1):
            taken = min(room, count * len(chances))
            share = taken / (count * len(chances))
            own = [share * sum(each[:count]) for each in chances]
            each = [(context, count)] * len(chances) if share == 1.0 else [(context, 1)] * taken
            drafted = speculative_work(work, each)
            step_s = costs.seconds(drafted) + wait_s(drafted.decode_rows) + count * each_pass_s
            rate = (rows + sum(own)) / step_s
            if rate > best_rate and step_s <= bounds.longest_s(1.0 + np.array(own)):
                best, best_rate = count, rate
        return best
