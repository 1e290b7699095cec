"""Learns step costs from the steps that a node serves. Pure: times come from the caller.

It keeps a few recent steps of each kind, so that many equal decode steps do not displace the rare prompt steps, and
refits the model from time to time.
"""

import struct
from statistics import median

import numpy as np

from baton.core.costs import StepCosts, StepWork, chunk_pairs, fit_table

# Steps of one kind have about the same numbers of rows, keys, tokens and pairs.
_KINDS = 96
_RECENT = 4
_FIRST_FIT, _FIT_EVERY, _FIT_AFTER_NEW = 4, 512, 32
# A kind that is no longer served loses half of its weight in this many steps.
_HALF_LIFE = 2048
_LEAST_WEIGHT = 0.05
# The first step of a kind may have compiled kernels.
_SINGLE_WEIGHT = 0.25
_START_WEIGHT = 0.02
# When this many more steps are off their prediction by this factor, all to one side, than are not, the machine has
# become busier or quieter. Earlier measurements are then scaled, and count less.
_OFF_FACTOR, _OFF_STEPS = 1.5, 8
_SCALED_WEIGHT = 0.1
# Longer than any step: the device or its clock was disturbed.
_LONGEST_S = 600.0
_COLUMNS = 6
_ROW = struct.Struct(f"{_COLUMNS}d")
_CONTEXTS = (128, 2048)
_MOST_START_ROWS = 512


class StepMeter:
    """The step costs of one node, learned from the steps that it serves, in bounded memory. Equal steps lead to equal
    costs.

    Args:
        start: costs that a profile measured; they decide while no such steps are served. None: nothing is known.
    """

    def __init__(self, start: StepCosts | None = None) -> None:
        self._costs = start
        self._start = np.empty((0, _COLUMNS)) if start is None else _start_rows(start)
        self._memory = bytearray(_KINDS * _RECENT * _ROW.size)
        self._table = np.frombuffer(self._memory).reshape(_KINDS * _RECENT, _COLUMNS)
        # Places by kind, least recently served first, and the number of steps of each place.
        self._places: dict[int, int] = {}
        self._counts = [0] * _KINDS
        self._steps = 0
        self._next_fit = _FIRST_FIT
        # Ratios of measured to predicted time of steps off their prediction; each other step since removes one.
        self._off: list[float] = []
        self._scaled = 0  # steps up to this number are scaled

    @property
    def costs(self) -> StepCosts | None:
        """The cost model. Returns None while nothing is known."""
        return self._costs

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a step that ended undisturbed."""
        if not 0.0 < seconds < _LONGEST_S:
            return
        rows, keys, prompt_tokens, pairs = work.decode_rows, work.keys, work.prompt_tokens, work.pairs
        kind = (
            rows.bit_length() >> 1
            | keys.bit_length() >> 1 << 6
            | prompt_tokens.bit_length() << 12
            | pairs.bit_length() >> 1 << 18
        )
        place = self._places.pop(kind, None)
        if place is None:
            place = self._new_place()
        self._places[kind] = place
        count = self._counts[place]
        self._counts[place] = count + 1
        offset = (place * _RECENT + count % _RECENT) * _ROW.size
        self._steps = steps = self._steps + 1
        _ROW.pack_into(self._memory, offset, rows, keys, prompt_tokens, pairs, seconds, steps)
        self._compare(work, seconds)
        if steps >= self._next_fit:
            self._fit()

    def _compare(self, work: StepWork, seconds: float) -> None:
        """Compares a step with its prediction, and rescales older steps if the machine has changed."""
        if self._costs is None:
            return
        ratio = seconds / self._costs.seconds(work)
        off = self._off
        if 1 / _OFF_FACTOR <= ratio <= _OFF_FACTOR:
            del off[-1:]
            return
        if off and (off[0] > 1.0) != (ratio > 1.0):
            off.clear()
        off.append(ratio)
        if len(off) >= _OFF_STEPS:
            # The steps that are off were measured as the machine is now.
            self._scaled = self._steps - len(off)
            self._table[self._table[:, 5] <= self._scaled, 4] *= median(off)
            off.clear()
            self._next_fit = self._steps

    def _new_place(self) -> int:
        place = len(self._places)
        if place < _KINDS:
            self._next_fit = min(self._next_fit, self._steps + max(_FIT_AFTER_NEW, self._steps >> 2))
            return place
        place = self._places.pop(next(iter(self._places)))
        self._counts[place] = 0
        self._table[place * _RECENT : (place + 1) * _RECENT] = 0.0
        return place

    def _fit(self) -> None:
        self._next_fit = self._steps + min(self._steps, _FIT_EVERY)
        used = self._table[:, 5] > 0.0
        served = self._table[used]
        weights = np.maximum(0.5 ** ((self._steps - served[:, 5]) / _HALF_LIFE), _LEAST_WEIGHT)
        single = np.repeat(np.array(self._counts) == 1, _RECENT)[used]
        weights[single] *= _SINGLE_WEIGHT
        weights[served[:, 5] <= self._scaled] *= _SCALED_WEIGHT
        weights = np.concatenate([weights, np.full(len(self._start), _START_WEIGHT)])
        self._costs = fit_table(np.concatenate([served, self._start])[:, :5], weights)


def _start_rows(start: StepCosts) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Makes steps whose costs are those of the model, as rows of the table."""
    works = [StepWork(prompt_tokens=tokens, pairs=chunk_pairs(0, tokens)) for tokens, _ in start.points]
    works += [
        StepWork(decode_rows=tokens, keys=tokens * context)
        for tokens, _ in start.points
        for context in _CONTEXTS
        if tokens <= _MOST_START_ROWS
    ]
    works += [StepWork(prompt_tokens=tokens, pairs=chunk_pairs(8192, 8192 + tokens)) for tokens, _ in start.points]
    return np.array([(w.decode_rows, w.keys, w.prompt_tokens, w.pairs, start.seconds(w), 0.0) for w in works])
