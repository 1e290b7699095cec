"""Learns what steps with drafts really take, from the end of the step before to their end. Pure.

A step with drafts is prepared only when the step before has ended, and so is a plain step after it. It may copy
states, and a draft token may cost more than the decode row that the cost model counts. All of that is in the time
between the ends of two steps. For each size of batch, the time beyond the prediction is learned as a line over the
number of drafts, and compared with what plain steps of that batch really take. What drafts win and lose is in a
`Balance`: when they have rested, what was learned is forgotten, and they are tried again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.costs import StepWork
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.balance import Balance
from baton.engine.speculation.limits import assumed_wait_s

# Steps with drafts that are remembered.
_SAMPLES = 32
# Steps of other sizes say something about a batch when there are so many.
_SAMPLES_ELSEWHERE = 8
# Plain steps that were prepared late, over which what they lose is averaged.
_LATE_MEMORY = 8
# Plain steps over which their own error is averaged, and how many steps without error are assumed before.
_PLAIN_MEMORY, _PLAIN_ASSUMED = 64, 4
# A step that took so many times as long as expected was disturbed by something else.
_MOST_RATIO, _LEAST_RATIO = 3.0, 0.01
# Longer than any step: the device or its clock was disturbed.
_LONGEST_S = 600.0


class EndedStep(NamedTuple):
    """A step that has ended.

    Args:
        plain: the step without drafts.
        work: with them.
        tokens: tokens that its decodes got.
        seconds: the device's time for it.
        waited_s: the rest of the time from the end of the step before to its end.
        passes_s: part of `waited_s` in which the model's own layer drafted for the next step.
        late: whether it was prepared only when the step before had ended, because of drafts.
    """

    plain: StepWork
    work: StepWork
    tokens: int
    seconds: float
    waited_s: float
    passes_s: float = 0.0
    late: bool = False

    @property
    def drafts(self) -> int:
        return self.work.decode_rows - self.plain.decode_rows


class _Line(NamedTuple):
    """The wait of steps with drafts, and what each of them makes plain steps lose."""

    step_s: float
    draft_s: float
    lost_s: float = 0.0


@dataclass(eq=False)
class _Sample:
    """A step with drafts.

    Attributes:
        seconds: from the end of the step before to its end, without passes of the model's own layer.
        predicted_s: by `_Batch.costs`.
        lost_s: by plain steps after it.
    """

    work: StepWork
    drafts: int
    seconds: float
    predicted_s: float
    lost_s: float = 0.0


@dataclass(eq=False)
class _Batch:
    """What is known about steps with about the same number of decodes."""

    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    plain_count: int = _PLAIN_ASSUMED
    plain_ratio: float = 1.0  # of measured to predicted time of plain steps
    balance: Balance = field(default_factory=Balance)
    late_s: float | None = None  # by which plain steps that were prepared late take longer; None: there was none
    wasted_s: float = 0.0  # by waits without drafts, since the last drafts
    mean_wasted_s: float = 0.0  # before each step with drafts
    line: _Line | None = None
    costs: StepTimes | None = None  # for which `line` was fitted


class SpeculativeTimes:
    """The times of one engine's steps with drafts."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._decided_for = 0  # decodes
        self._was_drafted = False  # the step before, or its layer has drafted

    def may_draft(self, decode_rows: int) -> bool:
        """Whether drafts have not lost more than they may, next to so many decodes."""
        return not self._batch(decode_rows).balance.resting

    def decided(self, decode_rows: int) -> None:
        """Notes that drafts were decided on for a step with so many decodes. What the next steps lose counts there:
        they may have some more or fewer."""
        self._decided_for = decode_rows

    def wait_s(self, decode_rows: int, costs: StepTimes) -> Callable[[int], float]:
        """By how much a step with drafts exceeds its prediction, from the number of its decodes and drafts.

        Args:
            decode_rows: decodes of the step.
        """
        line = self._line(decode_rows, costs)
        return lambda rows: line.step_s + line.draft_s * (rows - decode_rows)

    def lost_s(self, decode_rows: int, costs: StepTimes) -> float:
        """By how much longer plain steps take after a step with drafts."""
        return self._line(decode_rows, costs).lost_s

    def wasted_s(self, decode_rows: int) -> float:
        """How long devices wait for nothing for each time that they wait for drafts. Each wait for nothing makes the
        next one less likely, until drafts come."""
        batch = self._batch(decode_rows)
        return max(batch.wasted_s, batch.mean_wasted_s)

    def ended(self, step: EndedStep, costs: StepTimes) -> float | None:
        """Learns from a step. Returns how many plain steps of its decodes would have taken its time, but for that of
        its prompts; None if drafts had nothing to do with it, or the time says nothing."""
        plain, same = step.plain, self._batch(step.plain.decode_rows)
        if not 0.0 < step.seconds + step.waited_s < _LONGEST_S or not costs.seconds(plain) > 0.0:
            return None
        follows, self._was_drafted = self._was_drafted, step.drafts > 0 or step.passes_s > 0.0
        # How long prompts take is no matter of drafts.
        device_s = same.plain_ratio * costs.seconds(step.work) if plain.prompt_tokens else step.seconds
        if not (step.drafts or step.late or step.passes_s):
            self._plain_ended(same, None if plain.prompt_tokens else (step.waited_s + device_s) / costs.seconds(plain))
            return None
        seconds = min(step.waited_s + device_s, _MOST_RATIO * self._expected_s(step, costs))
        plain_s = same.plain_ratio * costs.seconds(plain)
        decodes_s = same.plain_ratio * costs.seconds(StepWork(plain.decode_rows, plain.keys))
        if not decodes_s > 0.0:
            return None
        won_s = plain_s + decodes_s * (step.tokens / plain.decode_rows - 1) - seconds
        batch = same if step.drafts else self._batch(self._decided_for)
        batch.balance.add(won_s / decodes_s, drafts=step.drafts > 0)
        if step.drafts:
            batch.samples.append(_Sample(step.work, step.drafts, seconds - step.passes_s, costs.seconds(step.work)))
            batch.mean_wasted_s += (batch.wasted_s - batch.mean_wasted_s) / _LATE_MEMORY
            batch.wasted_s = 0.0
        else:
            late_s = max(0.0, seconds - step.passes_s - plain_s)
            if step.late:
                batch.late_s = late_s if batch.late_s is None else batch.late_s + (late_s - batch.late_s) / _LATE_MEMORY
            if not follows and step.late:
                batch.wasted_s += late_s
            elif batch.samples:
                batch.samples[-1].lost_s += late_s
        batch.line = None
        return 1.0 + (seconds - plain_s) / decodes_s

    def _plain_ended(self, batch: _Batch, ratio: float | None) -> None:
        """Learns from a plain step; `ratio` of its measured to its predicted time, None: it says nothing."""
        if ratio is not None:
            batch.plain_count = min(batch.plain_count + 1, _PLAIN_MEMORY)
            error = min(ratio, _MOST_RATIO * batch.plain_ratio) - batch.plain_ratio
            batch.plain_ratio = max(_LEAST_RATIO, batch.plain_ratio + error / batch.plain_count)
        if batch.balance.add_plain():
            batch.line = None
            batch.wasted_s, batch.mean_wasted_s, batch.late_s = 0.0, 0.0, None
            batch.samples.clear()

    def _expected_s(self, step: EndedStep, costs: StepTimes) -> float:
        line = self._line(step.plain.decode_rows, costs)
        return costs.seconds(step.work) + line.step_s + line.draft_s * step.drafts + step.passes_s

    def _batch(self, decode_rows: int) -> _Batch:
        return self._batches.setdefault(decode_rows.bit_length(), _Batch())

    def _line(self, decode_rows: int, costs: StepTimes) -> _Line:
        """The line through what was measured. Returns the assumed one if nothing was."""
        batch = self._batch(decode_rows)
        if batch.costs is not costs:
            # The cost model may have learned from the same steps, so they are compared with what it says now.
            batch.costs, batch.line = costs, None
            for sample in batch.samples:
                sample.predicted_s = costs.seconds(sample.work)
        if batch.line is None:
            batch.line = self._fit(decode_rows, batch)
        return batch.line

    def _fit(self, decode_rows: int, batch: _Batch) -> _Line:
        """Fits the line by least squares to the samples and to the wait for no drafts, which late plain steps show or
        `limits` says: where all steps had about as many drafts, what they took beyond that is a cost of each draft
        token, and fewer drafts are tried."""
        step_s, draft_s = self._assumed(decode_rows)
        step_s = step_s if batch.late_s is None else batch.late_s
        if not batch.samples:
            return _Line(step_s, draft_s)
        points = [(each.drafts, each.seconds / batch.plain_ratio - each.predicted_s) for each in batch.samples]
        assumed_s = sum([step_s + draft_s * drafts for drafts, _ in points])
        measured_s = sum([seconds for _, seconds in points])
        if assumed_s > max(0.0, measured_s) and batch.late_s is None:
            step_s *= max(0.0, measured_s) / assumed_s
        count = 1 + len(points)
        mean_drafts = sum([drafts for drafts, _ in points]) / count
        mean_s = (step_s + measured_s) / count
        spread = mean_drafts**2 + sum([(drafts - mean_drafts) ** 2 for drafts, _ in points])
        product = -mean_drafts * (step_s - mean_s)
        product += sum([(drafts - mean_drafts) * (seconds - mean_s) for drafts, seconds in points])
        slope_s = product / spread
        if mean_s >= 0.0:  # below: the cost model counts too much for each draft token
            slope_s = max(0.0, slope_s)
        lost_s = sum([each.lost_s for each in batch.samples]) / count
        return _Line(max(0.0, mean_s - slope_s * mean_drafts), slope_s, max(0.0, lost_s))

    def _assumed(self, decode_rows: int) -> tuple[float, float]:
        """The wait for no drafts and for each draft token: what `limits` says, or what is known of the nearest size of
        batch if that is less. More is assumed only once it is measured."""
        step_s = assumed_wait_s(decode_rows)
        draft_s = assumed_wait_s(decode_rows + 1) - step_s
        size = decode_rows.bit_length()
        known = [at for at, each in self._batches.items() if len(each.samples) >= _SAMPLES_ELSEWHERE and at != size]
        line = self._batches[min(known, key=lambda at: abs(at - size))].line if known else None
        if line is not None:
            step_s, draft_s = min(step_s, line.step_s), max(0.0, min(draft_s, line.draft_s))
        return step_s, draft_s
