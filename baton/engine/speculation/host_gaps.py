"""Learns for how long a device waits for the host because of guesses. Pure.

The step before guesses and the step after them cannot be prepared while another one runs, so the device waits each
time. Guesses that follow one another cost one wait for each step, single ones two, and a wait that ends without guesses
is lost. So all waits are counted against the steps that had guesses. More rows take the host longer.
"""

# Until it is measured: what the host takes besides its guesses, and for each row with guesses, whose lookup takes 7 to
# 22 us.
_STEP_S, _ROW_S = 0.0005, 15e-6
# What is assumed counts as so many steps with guesses, and as many as this are remembered.
_PRIOR_WEIGHT = 8.0
_MEMORY = 256.0
# Steps without any wait after which half of what was learned is forgotten, so that guesses are tried again.
_HALF_LIFE = 8192
_LONGEST_S = 0.1  # a machine that stood still for longer says nothing about guesses
_CLASSES = 16


class HostGaps:
    """The waits of one engine's device, by number of decode rows: those of similar steps teach each other."""

    def __init__(self) -> None:
        self._waited_s = [0.0] * _CLASSES
        self._guessed = [0.0] * _CLASSES
        self._forget = 0.5 ** (1 / _HALF_LIFE)

    def seconds(self, rows: int) -> float:
        """The wait to expect from a step with guesses.

        Args:
            rows: number of requests that decode.
        """
        place = _class_of(rows)
        assumed_s = _STEP_S + _ROW_S * rows
        return (_PRIOR_WEIGHT * assumed_s + self._waited_s[place]) / (_PRIOR_WEIGHT + self._guessed[place])

    def late(self, rows: int, seconds: float, *, guesses: bool) -> None:
        """Learns from a step that was prepared only when the one before had ended.

        Args:
            seconds: from the end of the step before to the end of this one, less the device's time for this one.
        """
        if not 0.0 <= seconds < _LONGEST_S:
            return
        place = _class_of(rows)
        keep = 1.0 - guesses / _MEMORY
        self._waited_s[place] = keep * self._waited_s[place] + seconds
        self._guessed[place] = keep * self._guessed[place] + guesses

    def on_time(self, rows: int) -> None:
        """Notes a step that the device did not wait for."""
        place = _class_of(rows)
        self._waited_s[place] *= self._forget
        self._guessed[place] *= self._forget


def _class_of(rows: int) -> int:
    return min(rows.bit_length(), _CLASSES - 1)
