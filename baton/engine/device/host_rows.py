"""The rows of decode steps on the host, kept from step to step in the bytes that are copied to the device.

Unchanged rows are reused by identity, so they cost one comparison; numpy advances all rows by one token at once.
Legend: N most rows, C rows that have changed.
"""

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import InternalError
from baton.engine.batch import BatchRow
from baton.engine.request import IntArray, int_array
from baton.engine.sampling.choice import SamplingArrays
from baton.engine.sampling.decode_rows import DecodeSampling

# Triton compiles a kernel again for a pointer that is not a multiple of 16, and wide loads need more. With this
# multiple every field begins at a multiple of 256 bytes.
ROWS_MULTIPLE = 64
# What the host writes for each row in addition to the numbers for sampling, and the value of padding: first what
# `_numbers` returns for a changed row, in its order. Fields of one type that follow each other are written together.
_FIELDS = (
    ("token_ids", np.int32, 0),
    ("token_source", np.int32, 0),
    ("seq_lens", np.int32, 0),
    ("adapters", np.int32, -1),
    ("state_slots", np.int32, -1),
    ("state_next", np.int32, -1),
    ("next_tokens", np.int32, -1),
    ("num_slots", np.int32, 0),
    ("positions", np.int64, 0),
    ("slot_mapping", np.int64, -1),
)
_NUM_INT32, _NUM_INT64 = 8, 2
# A step brings the device this many blocks more than there are rows. Rows with further ones are copied by themselves,
# which costs the host as much as writing all rows of a step.
_MORE_BLOCKS = 512
# Fields that grow by one with each token of a row. Slots too: a row that gets another block is a changed row.
_GROWING = "seq_lens", "positions", "slot_mapping"
_NO_BLOCKS = int_array()


class HostRows:
    """The rows of the current decode step, updated in place for each next one.

    Args:
        max_rows: a multiple of ROWS_MULTIPLE.
        max_blocks: most blocks of a row.
        table_width: width of the device's block table, which has one more row than there are rows.

    Attributes:
        memory: all fields concatenated, as bytes.
        fields: views of `memory`, [N] each; [M] for new blocks, as in `DecodeBuffers`.
        num_computed: [N] int32, read by the host only.
        sampling: how the rows are sampled; its arrays are views of `memory`.
    """

    def __init__(self, max_rows: int, *, max_blocks: int, table_width: int, block_size: int) -> None:
        sampling = SamplingArrays.empty(max_rows)
        sampling.fill(())
        padding: dict[str, NDArray[Any]] = {name: np.full(max_rows, value, dtype) for name, dtype, value in _FIELDS}
        padding |= sampling._asdict()
        self._nowhere = max_rows * table_width
        padding["new_block"] = np.zeros(max_rows + _MORE_BLOCKS, np.int32)
        padding["new_block_place"] = np.full(max_rows + _MORE_BLOCKS, self._nowhere, np.int64)
        self.memory = np.concatenate([values.view(np.uint8) for values in padding.values()])
        self.fields: dict[str, NDArray[Any]] = {}
        start = 0
        for name, values in padding.items():
            self.fields[name] = self.memory[start : start + values.nbytes].view(values.dtype)
            start += values.nbytes
        self.num_computed = np.zeros(max_rows, np.int32)
        self.sampling = DecodeSampling(SamplingArrays(*(self.fields[name] for name in sampling._fields)))
        int32_bytes, int64_bytes = 4 * _NUM_INT32 * max_rows, 8 * _NUM_INT64 * max_rows
        self._int32 = self.memory[:int32_bytes].view(np.int32).reshape(_NUM_INT32, max_rows)
        self._int64 = self.memory[int32_bytes : int32_bytes + int64_bytes].view(np.int64).reshape(-1, max_rows)
        self._growing = [
            self.num_computed,
            *(self.fields[name] for name in _GROWING),
            self.sampling.arrays.output_index_R,
        ]
        self._max_blocks = max_blocks
        self._table_width = table_width
        self._block_size = block_size
        self._step = self._size = 0
        # None: no row, or one that the next step cannot share.
        self._rows: list[BatchRow | None] = [None] * max_rows
        # The blocks that the device has of each row, those that it lacks, and how many blocks the step brings it.
        self._blocks: list[IntArray] = [_NO_BLOCKS] * max_rows
        self._missing: dict[int, IntArray] = {}
        self._num_new_blocks = 0

    def take(self, rows: Sequence[BatchRow], *, step: int, prompts: Sequence[BatchRow] = ()) -> dict[int, IntArray]:
        """Takes over the rows of a step. Returns the blocks of rows that the step itself cannot bring to the device,
        because there are too many.

        Args:
            prompts: rows that follow; only their sampling is taken, and otherwise they are padding.

        Raises:
            InternalError: too many rows, or a row with too many blocks; then nothing is taken.
        """
        size, max_rows = len(rows), len(self._rows)
        if (all_rows := size + len(prompts)) > max_rows:
            raise _no_room(f"{all_rows} rows", "rows", all_rows, max_rows)
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
        if prompts:
            self.sampling.write(range(size, all_rows), [row.sample for row in prompts])
            self._size = all_rows
        return self._bring_blocks() if self._missing or self._num_new_blocks else {}

    @property
    def has_adapters(self) -> bool:
        """Whether a row of the step has an adapter."""
        return bool((self.fields["adapters"] >= 0).any())

    def copied(self) -> None:
        """Records that the step is queued, so that the device has all rows' blocks. A request whose blocks change has a
        new array, so arrays are compared by identity."""
        if self._missing:
            for place, ids in self._missing.items():
                self._blocks[place] = ids
            self._missing = {}

    def _bring_blocks(self) -> dict[int, IntArray]:
        """Adds the blocks that the device lacks to the step: often just the last one of a row. Returns the blocks of
        rows for which it has no room."""
        new_block, new_block_place = self.fields["new_block"], self.fields["new_block_place"]
        places: list[int] = []
        blocks: list[int] = []
        others: dict[int, IntArray] = {}
        for row, ids in self._missing.items():
            last, start = len(ids) - 1, row * self._table_width
            first = last if ids[:last] == self._blocks[row] else 0
            # If the step fails before `copied`, the device may have some of these or the former ones.
            self._blocks[row] = _NO_BLOCKS
            if len(blocks) + len(ids) - first > len(new_block):
                others[row] = ids
                continue
            places += range(start + first, start + len(ids))
            blocks += ids[first:]
        new_block[: len(blocks)], new_block_place[: len(places)] = blocks, places
        new_block_place[len(places) : self._num_new_blocks] = self._nowhere
        self._num_new_blocks = len(places)
        return others

    def _write(self, places: list[int], rows: list[BatchRow]) -> None:
        numbers = np.array([self._numbers(place, row) for place, row in zip(places, rows, strict=True)], np.int64).T
        places_C = np.array(places)
        self._int32[:, places_C] = numbers[:_NUM_INT32]
        self._int64[:, places_C] = numbers[_NUM_INT32:]
        self.num_computed[places_C] = [row.token_start for row in rows]
        self.sampling.write(places, [row.sample for row in rows])
        for place, row in zip(places, rows, strict=True):
            if row.block_ids is not self._blocks[place]:
                self._missing[place] = row.block_ids
            else:
                self._missing.pop(place, None)

    def _numbers(self, place: int, row: BatchRow) -> tuple[int, ...]:
        """The first fields of a row, in their order."""
        start, blocks, source = row.token_start, row.block_ids, row.token_source
        assert source is None or source < 2 * len(self._rows), "a token source is not a row of a step"
        source = len(self._rows) + place if source is None else source
        slot = blocks[start // self._block_size] * self._block_size + start % self._block_size
        state = row.state_slot, row.state_next, known_next_token(row)
        num_slots = len(blocks) * self._block_size
        return row.token_ids[0], source, start + 1, row.adapter, *state, num_slots, start, slot

    def _pad(self, rows: range) -> None:
        padded = slice(rows.start, rows.stop)
        for name, _, value in _FIELDS:
            self.fields[name][padded] = value
        self.num_computed[padded] = 0
        self.sampling.pad(rows)
        self._rows[padded] = [None] * len(rows)
        for place in [place for place in self._missing if place in rows]:
            del self._missing[place]


def known_next_token(row: BatchRow) -> int:
    """The token after the row's last one, as the layer that drafts reads it; -1: the step draws it. The last one stands
    in for it where nobody knows it, as at the end of a prompt that is pooled."""
    if row.sample is not None:
        return -1
    return row.next_token if row.next_token >= 0 else row.token_ids[-1]


def _no_room(what: str, field: str, value: int, most: int) -> InternalError:
    return InternalError(f"a decode step has {what}", field=field, value=value, allowed=(f"at most {most}",))
