"""A decode step's rows as the host keeps them from step to step, in the bytes that are copied to the device.

A row that the step in front has at the same place is the same object, and costs no more than a look at that: numpy
moves all of them on by a token. Knows neither model nor device. Legend: N most rows, C rows that have changed.
"""

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.errors import InternalError
from baton.types import SamplingParams
from engine.batch import BatchRow, SampleRow
from engine.request import IntArray, int_array
from engine.sampling.choice import SamplingArrays
from engine.sampling.sampler import has_edits

# Triton compiles a kernel anew for a pointer that is not a multiple of 16, and wide loads want more: with so many rows,
# every field begins at a multiple of 256 bytes.
ROWS_MULTIPLE = 64
# What the host writes for each row beside the numbers for sampling, and what padding holds.
_FIELDS = (
    ("token_ids", np.int32, 0),
    ("token_source", np.int32, 0),
    ("seq_lens", np.int32, 0),
    ("new_block", np.int32, 0),
    ("new_block_place", np.int64, 0),
    ("positions", np.int64, 0),
    ("slot_mapping", np.int64, -1),
)
# Those that are one more for each token that a row is further on. A slot too: a row with another block is another row.
_GROWING = "seq_lens", "positions", "slot_mapping", "output_index_R"
_NO_BLOCKS = int_array()
# Stands for a row that is not sampled; what is drawn for it counts for nothing.
_NOT_SAMPLED = SampleRow(SamplingParams(temperature=0.0), 0, (), int_array(), 0)


class Kinds:
    """The rows for which the token that a step draws is not all.

    Attributes:
        unsampled: the token counts for nothing.
        edited: it must be drawn outside of the graph, from edited logits.
        told: its logprobs are wanted beside it.
    """

    def __init__(self) -> None:
        self.unsampled: set[int] = set()
        self.edited: set[int] = set()
        self.told: set[int] = set()

    def note(self, row: int, sample: SampleRow | None) -> None:
        for rows in (self.unsampled, self.edited, self.told):
            rows.discard(row)
        if sample is None:
            self.unsampled.add(row)
        elif has_edits(sample):
            self.edited.add(row)
        elif sample.params.logprobs is not None:
            self.told.add(row)

    def forget(self, rows: range) -> None:
        for kind in (self.unsampled, self.edited, self.told):
            kind.difference_update(rows)


class HostRows:
    """Args:
        max_rows: a multiple of ROWS_MULTIPLE.
        max_blocks: of a row.
        table_width: of the table that the device keeps of all rows' blocks, which has one row more.

    Attributes:
        memory: all fields, one behind the other, as bytes.
        fields: views of it, [N] each.
        num_computed: [N] int32, which only the host reads.
        kinds: of the rows.
    """

    def __init__(self, max_rows: int, *, max_blocks: int, table_width: int, block_size: int) -> None:
        sampling = SamplingArrays.empty(max_rows)
        sampling.fill(())
        padding: dict[str, NDArray[Any]] = {name: np.full(max_rows, value, dtype) for name, dtype, value in _FIELDS}
        padding |= sampling._asdict()
        self.memory = np.concatenate([values.view(np.uint8) for values in padding.values()])
        self.fields: dict[str, NDArray[Any]] = {}
        start = 0
        for name, values in padding.items():
            self.fields[name] = self.memory[start : start + values.nbytes].view(values.dtype)
            start += values.nbytes
        self.num_computed = np.zeros(max_rows, np.int32)
        self.kinds = Kinds()
        self._growing = [self.num_computed, *(self.fields[name] for name in _GROWING)]
        self._sampling = SamplingArrays(*(self.fields[name] for name in sampling._fields))
        self._max_blocks = max_blocks
        self._table_width = table_width
        self._nowhere = max_rows * table_width
        self._padding = {name: value for name, _, value in _FIELDS} | {"new_block_place": self._nowhere}
        self.fields["new_block_place"][:] = self._nowhere
        self._block_size = block_size
        self._step = self._size = 0
        # None where there is no row, or one that the next step cannot share.
        self._rows: list[BatchRow | None] = [None] * max_rows
        self._params: list[SamplingParams] = [_NOT_SAMPLED.params] * max_rows
        # What the device has of each row's blocks, what it still has to get, and which rows get one block with a step.
        self._blocks: list[IntArray] = [_NO_BLOCKS] * max_rows
        self._missing: dict[int, IntArray] = {}
        self._growing_rows: list[int] = []

    def take(self, rows: Sequence[BatchRow], *, step: int) -> dict[int, IntArray]:
        """Takes over the rows of a step; returns the blocks of those of which the device has others. A row that has
        one block more than there is not among them: that one comes with the step.

        Raises:
            InternalError: more rows, or longer ones, than there is room for; then nothing is taken.
        """
        size, max_rows = len(rows), len(self._rows)
        if size > max_rows:
            raise _no_room(f"{size} rows", "rows", size, max_rows)
        changed = list(compress(count(), map(is_not, rows, self._rows)))
        longest = max([len(rows[place].block_ids) for place in changed], default=0)
        if longest > self._max_blocks:
            raise _no_room(f"a row of {longest} blocks", "block_ids", longest, self._max_blocks)
        for values in self._growing:
            values[:size] += step - self._step
        if size < self._size:
            self._pad(range(size, self._size))
        self._step, self._size = step, size
        if changed:
            self._write(changed, [rows[place].at(step) for place in changed])
            for place in changed:
                self._rows[place] = None if rows[place].since is None else rows[place]
        return self._grow() if self._missing or self._growing_rows else {}

    def copied(self) -> None:
        """The step is queued: from then on the device has all rows' blocks. A request's array is another one as soon as
        its blocks are, so that it is enough to remember whose it is."""
        if self._missing:
            for place, ids in self._missing.items():
                self._blocks[place] = ids
            self._missing = {}

    def _grow(self) -> dict[int, IntArray]:
        """Puts the rows that have one block more into the step; returns the others of which the device has too few."""
        new_block, new_block_place = self.fields["new_block"], self.fields["new_block_place"]
        new_block_place[self._growing_rows] = self._nowhere
        growing, others = [], {}
        for place, ids in self._missing.items():
            known = len(ids) - 1
            if ids[:known] == self._blocks[place]:
                new_block[place], new_block_place[place] = ids[known], place * self._table_width + known
                growing.append(place)
            else:
                others[place] = ids
        self._growing_rows = growing
        return others

    def _write(self, places: list[int], rows: list[BatchRow]) -> None:
        fields, max_rows, places_C = self.fields, len(self._rows), np.array(places)
        _, tokens, starts, blocks, samples, sources, _ = zip(*rows, strict=True)
        sources_C = [
            max_rows + place if source is None else source for place, source in zip(places, sources, strict=True)
        ]
        assert max(sources_C) < 2 * max_rows, "a token source is no row of a step"
        starts_C = np.array(starts)
        columns_C, offsets_C = np.divmod(starts_C, self._block_size)
        blocks_C = np.array([ids[column] for ids, column in zip(blocks, columns_C.tolist(), strict=True)])
        fields["token_ids"][places_C] = [ids[0] for ids in tokens]
        fields["token_source"][places_C] = sources_C
        fields["positions"][places_C] = self.num_computed[places_C] = starts_C
        fields["seq_lens"][places_C] = starts_C + 1
        fields["slot_mapping"][places_C] = blocks_C * self._block_size + offsets_C
        self._write_sampling(places, [_NOT_SAMPLED if sample is None else sample for sample in samples])
        for place, ids, sample in zip(places, blocks, samples, strict=True):
            self.kinds.note(place, sample)
            if ids is not self._blocks[place]:
                self._missing[place] = ids
            else:
                self._missing.pop(place, None)

    def _write_sampling(self, places: list[int], samples: list[SampleRow]) -> None:
        known = self._params
        others = [
            (place, sample) for place, sample in zip(places, samples, strict=True) if sample.params is not known[place]
        ]
        if others:
            numbers = SamplingArrays.empty(len(others))
            numbers.fill([sample for _, sample in others])
            for array, values in zip(self._sampling, numbers, strict=True):
                array[[place for place, _ in others]] = values
            for place, sample in others:
                known[place] = sample.params
        self._sampling.output_index_R[places] = [sample.output_index for sample in samples]

    def _pad(self, rows: range) -> None:
        padded = slice(rows.start, rows.stop)
        for name, value in self._padding.items():
            self.fields[name][padded] = value
        self.num_computed[padded] = 0
        # Greedy, which is drawn fastest.
        self._sampling.temperature_R[padded] = 0
        self._params[padded] = [_NOT_SAMPLED.params] * len(rows)
        self._rows[padded] = [None] * len(rows)
        self.kinds.forget(rows)
        for place in [place for place in self._missing if place in rows]:
            del self._missing[place]


def _no_room(what: str, field: str, value: int, most: int) -> InternalError:
    return InternalError(f"a decode step has {what}", field=field, value=value, allowed=(f"at most {most}",))
