"""Learns for how long a device waits for the host because of guesses. Pure.

The step before guesses and the step after them cannot be prepared while another one runs, so the device waits each
time: for the end of one step, and for the rows of the next. Guesses that follow one another cost one wait for each
step, single ones two, and a wait that ends without guesses is lost. So all waits are counted against the steps that had
guesses.
"""

import numpy as np

from baton.engine.speculation.limits import ASSUMED_WAITS

# Each of the assumed waits counts as so many steps, and as many steps as this are remembered.
_ASSUMED_WEIGHT = 4.0
_MEMORY = 256.0
# Steps without any wait after which half of what was learned is forgotten, so that guesses are tried again.
_HALF_LIFE = 8192
_LONGEST_S = 0.1  # a machine that stood still for longer says nothing about guesses


class HostGaps:
    """The waits of one engine's device: a part for each step, and one for each of its rows."""

    def __init__(self) -> None:
        # Sums of 1, rows, rows², seconds and rows * seconds over steps with guesses, and seconds of all other waits.
        self._sums = np.zeros(6)
        self._assumed = sum(_terms(rows, seconds) for rows, seconds in ASSUMED_WAITS) * _ASSUMED_WEIGHT
        self._step_s = self._row_s = 0.0
        self._fit()

    def seconds(self, rows: int) -> float:
        """The wait to expect from a step with guesses.

        Args:
            rows: decodes and guesses of the step.
        """
        return self._step_s + self._row_s * rows

    def late(self, rows: int, seconds: float, *, guesses: bool) -> None:
        """Learns from a step that was prepared only when the one before had ended.

        Args:
            rows: decodes and guesses of the step.
            seconds: from the end of the step before to the end of this one, less the device's time for this one.
            guesses: whether it had any.
        """
        if not 0.0 <= seconds < _LONGEST_S:
            return
        if guesses:
            self._sums *= 1.0 - 1.0 / _MEMORY
            self._sums += _terms(rows, seconds)
        else:
            self._sums[5] += seconds
        self._fit()

    def on_time(self) -> None:
        """Notes a step that the device did not wait for."""
        self._sums *= 0.5 ** (1 / _HALF_LIFE)
        self._fit()

    def _fit(self) -> None:
        steps, rows, squares, seconds, products, lost_s = (self._sums + self._assumed).tolist()
        slope = (steps * products - rows * seconds) / (steps * squares - rows * rows)
        self._row_s = max(0.0, min(slope, products / squares))
        self._step_s = (seconds - self._row_s * rows + lost_s) / steps


def _terms(rows: int, seconds: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array((1.0, rows, rows * rows, seconds, rows * seconds, 0.0))
