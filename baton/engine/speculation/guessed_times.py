"""Learns what guesses really take and bring, from the end of one step to the end of the next. Pure.

A step with guesses is prepared only when the step before has ended, and a plain step after it is too. It may copy
states, and a guess may cost more than the decode row that the cost model counts. All of that is in the time between the
ends of two steps. So two things are learned from it, for each size of batch:

- the wait: by how much steps with guesses exceed their prediction, as a line over the number of guesses;
- the balance: how many plain steps guesses have won or lost. Where they have lost what they may, they rest.

A rest ends when the time that may be lost has come together again, and what was learned is forgotten then.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.costs import StepWork
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.limits import assumed_wait_s

# Part of the time of plain steps that guesses may lose, and most plain steps that they may lose at once.
_LOST_SHARE = 0.005
_MOST_LOST = 6.0
# After so many plain steps in a row, what was learned is forgotten and guesses are tried again. It takes twice as many
# each time that this brings nothing.
_REST_STEPS = 400
_LONGEST_REST = 16 * _REST_STEPS
_SAMPLES = 32
# Steps of other sizes say something about a batch when there are so many.
_SAMPLES_ELSEWHERE = 8
# Plain steps over which their own error is averaged, and how many steps without error are assumed before.
_PLAIN_MEMORY, _PLAIN_ASSUMED = 64, 4
# A step that took so many times as long as expected was disturbed by something else.
_MOST_RATIO = 3.0


class EndedStep(NamedTuple):
    """A step that has ended.

    Args:
        plain: the step without guesses.
        work: with them.
        tokens: tokens that its decodes got.
        seconds: from the end of the step before to its end, with all that the device waited.
        passes_s: part of that in which the model's own layer guessed for the next step.
        late: whether it was prepared only when the step before had ended, because of guesses.
    """

    plain: StepWork
    work: StepWork
    tokens: int
    seconds: float
    passes_s: float = 0.0
    late: bool = False

    @property
    def guesses(self) -> int:
        return self.work.decode_rows - self.plain.decode_rows


class _Line(NamedTuple):
    """The wait of steps with guesses, and what each of them makes plain steps lose."""

    step_s: float
    guess_s: float
    lost_s: float = 0.0


@dataclass(eq=False)
class _Sample:
    step: EndedStep
    lost_s: float = 0.0  # by plain steps after it


@dataclass(eq=False)
class _Batch:
    """What is known about steps with about the same number of decodes."""

    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    plain_count: int = _PLAIN_ASSUMED
    plain_ratio: float = 1.0  # of measured to predicted time of plain steps
    plain_since: int = 0  # plain steps since the last guesses
    rest_steps: int = _REST_STEPS
    balance: float = _MOST_LOST
    resting: bool = False
    line: _Line | None = None
    line_costs: StepTimes | None = None  # with which `line` was fitted


class GuessedTimes:
    """The times of one engine's steps with guesses."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._decided_for = 0  # decodes

    def may_guess(self, decode_rows: int) -> bool:
        """Whether guesses have not lost more than they may, next to so many decodes."""
        return not self._batch(decode_rows).resting

    def decided(self, decode_rows: int) -> None:
        """Notes that guesses were decided on for a step with so many decodes. What the next steps lose counts there:
        they may have some more or fewer."""
        self._decided_for = decode_rows

    def wait_s(self, decode_rows: int, costs: StepTimes) -> Callable[[int], float]:
        """By how much a step exceeds its prediction, from its decodes and guesses together; and what plain steps lose.

        Args:
            decode_rows: decodes of the step.
        """
        line = self._line(decode_rows, costs)
        return lambda rows: line.step_s + line.guess_s * (rows - decode_rows)

    def lost_s(self, decode_rows: int, costs: StepTimes) -> float:
        """The part of `wait_s` that is lost by plain steps after one with guesses."""
        return self._line(decode_rows, costs).lost_s

    def ended(self, step: EndedStep, costs: StepTimes) -> None:
        """Learns from a step."""
        decodes, same = StepWork(step.plain.decode_rows, step.plain.keys), self._batch(step.plain.decode_rows)
        plain_s = same.plain_ratio * costs.seconds(step.plain)
        if not (step.guesses or step.late or step.passes_s):
            self._plain_ended(same, step.seconds / costs.seconds(step.plain))
            return
        seconds = min(step.seconds, _MOST_RATIO * self._expected_s(step, costs))
        decodes_s = same.plain_ratio * costs.seconds(decodes)
        won_s = plain_s + decodes_s * (step.tokens / decodes.decode_rows - 1) - seconds
        batch = same if step.guesses else self._batch(self._decided_for)
        batch.balance = min(_MOST_LOST, batch.balance + won_s / decodes_s)
        if batch.balance <= 0.0:
            batch.resting = True
        elif batch.balance == _MOST_LOST:
            batch.rest_steps = _REST_STEPS
        if step.guesses:
            batch.plain_since = 0
            batch.samples.append(_Sample(step._replace(seconds=seconds - step.passes_s)))
        elif batch.samples:
            batch.samples[-1].lost_s += seconds - step.passes_s - plain_s
        batch.line = None

    def _plain_ended(self, batch: _Batch, ratio: float) -> None:
        batch.plain_count = min(batch.plain_count + 1, _PLAIN_MEMORY)
        error = min(ratio, _MOST_RATIO * batch.plain_ratio) - batch.plain_ratio
        batch.plain_ratio += error / batch.plain_count
        batch.balance = min(_MOST_LOST, batch.balance + _LOST_SHARE)
        batch.plain_since += 1
        if batch.plain_since >= batch.rest_steps:
            if batch.samples or batch.resting:
                batch.rest_steps = min(2 * batch.rest_steps, _LONGEST_REST)
            batch.plain_since, batch.resting, batch.line = 0, False, None
            batch.samples.clear()

    def _expected_s(self, step: EndedStep, costs: StepTimes) -> float:
        line = self._line(step.plain.decode_rows, costs)
        return costs.seconds(step.work) + line.step_s + line.guess_s * step.guesses + step.passes_s

    def _batch(self, decode_rows: int) -> _Batch:
        return self._batches.setdefault(decode_rows.bit_length(), _Batch())

    def _line(self, decode_rows: int, costs: StepTimes) -> _Line:
        """The line through what was measured. Returns the assumed one if nothing was."""
        batch = self._batch(decode_rows)
        if batch.line is None or batch.line_costs is not costs:
            batch.line_costs = costs
            batch.line = self._fit(decode_rows, batch, costs)
        return batch.line

    def _fit(self, decode_rows: int, batch: _Batch, costs: StepTimes) -> _Line:
        """Fits the line by least squares to the samples and to the assumed wait for no guesses: where all steps had
        about as many guesses, what they took beyond that is a cost of each guess, and fewer guesses are tried."""
        step_s, guess_s = self._assumed(decode_rows)
        if not batch.samples:
            return _Line(step_s, guess_s)
        points = [
            (each.step.guesses, each.step.seconds / batch.plain_ratio - costs.seconds(each.step.work))
            for each in batch.samples
        ]
        assumed_s = sum([step_s + guess_s * guesses for guesses, _ in points])
        step_s *= min(1.0, max(0.0, sum([seconds for _, seconds in points]) / assumed_s))
        count = 1 + len(points)
        mean_guesses = sum([guesses for guesses, _ in points]) / count
        mean_s = (step_s + sum([seconds for _, seconds in points])) / count
        spread = mean_guesses**2 + sum([(guesses - mean_guesses) ** 2 for guesses, _ in points])
        product = -mean_guesses * (step_s - mean_s)
        product += sum([(guesses - mean_guesses) * (seconds - mean_s) for guesses, seconds in points])
        slope_s = max(0.0, product / spread)
        lost_s = sum([each.lost_s for each in batch.samples]) / count
        return _Line(mean_s - slope_s * mean_guesses, slope_s, max(0.0, lost_s))

    def _assumed(self, decode_rows: int) -> tuple[float, float]:
        """The wait for no guesses and for each guess: what limits say, or what is known of the nearest size of batch
        if that is less. It is tried whether more are really needed."""
        step_s = assumed_wait_s(decode_rows)
        guess_s = assumed_wait_s(decode_rows + 1) - step_s
        size = decode_rows.bit_length()
        known = [at for at, each in self._batches.items() if len(each.samples) >= _SAMPLES_ELSEWHERE and at != size]
        line = self._batches[min(known, key=lambda at: abs(at - size))].line if known else None
        if line is not None:
            step_s, guess_s = min(step_s, line.step_s), min(guess_s, line.guess_s)
        return step_s, guess_s
