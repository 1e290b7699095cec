"""The host's record of how each row of a decode step is sampled, kept from step to step."""

from collections.abc import Sequence

from baton.core.sampling import ResolvedSampling
from baton.engine.sampling.choice import SamplingArrays
from baton.engine.sampling.row import GREEDY_ROW, SampleRow


class DecodeSampling:
    """The numbers of all rows, and which rows need more than the token that the step draws.

    Args:
        arrays: views of the memory that is copied to the device.

    Attributes:
        unsampled: rows whose token is discarded.
        edited: rows whose token is drawn outside of the graph, from edited logits.
        with_logprobs: rows whose logprobs are wanted in addition to the graph's token.
    """

    def __init__(self, arrays: SamplingArrays) -> None:
        self.arrays = arrays
        self.unsampled: set[int] = set()
        self.edited: set[int] = set()
        self.with_logprobs: set[int] = set()
        self._params: list[ResolvedSampling] = [GREEDY_ROW.params] * len(arrays.temperature_R)

    def write(self, places: Sequence[int], rows: Sequence[SampleRow | None]) -> None:
        """Puts `rows` at `places`; None is a row that is not sampled."""
        if self.unsampled or self.edited or self.with_logprobs:
            for special in (self.unsampled, self.edited, self.with_logprobs):
                special.difference_update(places)
        known = self._params
        for place, row in zip(places, rows, strict=True):
            self._classify(place, row)
            sample = GREEDY_ROW if row is None else row
            # A request's params stay the same object, so an unchanged row costs one comparison.
            if sample.params is not known[place]:
                self.arrays.put(place, sample)
                known[place] = sample.params
        self.arrays.output_index_R[places] = [0 if row is None else row.output_index for row in rows]

    def pad(self, rows: range) -> None:
        """Makes these rows padding. It is greedy, which is the fastest draw."""
        padded = slice(rows.start, rows.stop)
        self.arrays.temperature_R[padded] = 0
        self._params[padded] = [GREEDY_ROW.params] * len(rows)
        for special in (self.unsampled, self.edited, self.with_logprobs):
            special.difference_update(rows)

    def _classify(self, place: int, row: SampleRow | None) -> None:
        if row is None:
            self.unsampled.add(place)
        elif row.edits_logits:
            self.edited.add(place)
        elif row.params.logprobs is not None:
            self.with_logprobs.add(place)
