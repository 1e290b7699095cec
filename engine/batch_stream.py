"""Batches on their way from the rank that schedules to the others, as bytes that say only what is new.

A row that the step in front has at the same place is the same object, and is not sent; of one that is another, the
blocks and the history that it had are not. So writer and readers see every batch, in one order. Knows no socket.
"""

import pickle
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

from baton.types import SamplingParams
from engine.batch import Batch, BatchRow, SampleRow
from engine.request import IntArray, int_array

_PARAMS = tuple(field.name for field in fields(SamplingParams))
_params_of = attrgetter(*_PARAMS)
_LOGIT_BIAS = _PARAMS.index("logit_bias")
_UNKNOWN = BatchRow("", int_array(), 0, int_array(), None)

# How many numbers of the array known at the same place come first, and the bytes of the others.
_Tail: TypeAlias = tuple[int, bytes]


class BatchWriter:
    """For one or more readers."""

    def __init__(self) -> None:
        self._rows: list[BatchRow] = []

    def write(self, batch: Batch) -> bytes:
        rows, known = batch.shared_rows, self._rows
        known += [_UNKNOWN] * (len(rows) - len(known))
        places = [place for place, (row, was) in enumerate(zip(rows, known, strict=False)) if row is not was]
        told = [_told(rows[place], known[place]) for place in places]
        for place in places:
            known[place] = rows[place]
        return pickle.dumps((batch.step, len(rows), places, told), protocol=pickle.HIGHEST_PROTOCOL)


class BatchReader:
    """Reads what one writer wrote. Rows that were not sent anew are the same objects as in the step in front."""

    def __init__(self) -> None:
        self._rows: list[BatchRow] = []

    def read(self, message: bytes) -> Batch:
        step, num_rows, places, told = pickle.loads(message)
        known = self._rows
        known += [_UNKNOWN] * (num_rows - len(known))
        for place, row in zip(places, told, strict=True):
            known[place] = _understood(row, known[place])
        return Batch(step, tuple(known[:num_rows]))


def _told(row: BatchRow, known: BatchRow) -> tuple[Any, ...]:
    """None for what is as it is known."""
    return (
        None if row.request_id == known.request_id else row.request_id,
        row.token_ids.tobytes(),
        row.token_start,
        _tail(row.block_ids, known.block_ids),
        None if row.sample is None else _told_sample(row.sample, known.sample),
        row.token_source,
        row.since,
    )


def _understood(told: Sequence[Any], known: BatchRow) -> BatchRow:
    request_id, token_ids, token_start, blocks, sample, token_source, since = told
    return BatchRow(
        known.request_id if request_id is None else request_id,
        _array(token_ids),
        token_start,
        _with_tail(blocks, known.block_ids),
        None if sample is None else _understood_sample(sample, known.sample),
        token_source,
        since,
    )


def _told_sample(sample: SampleRow, known: SampleRow | None) -> tuple[Any, ...]:
    params = None
    if known is None or sample.params is not known.params:
        values = list(_params_of(sample.params))
        values[_LOGIT_BIAS] = dict(sample.params.logit_bias)  # a read-only view has no pickle
        params = tuple(values)
    history = _tail(sample.history, int_array() if known is None else known.history)
    return params, sample.output_index, sample.forbidden, history, sample.prompt_tokens


def _understood_sample(told: Sequence[Any], known: SampleRow | None) -> SampleRow:
    params, output_index, forbidden, history, prompt_tokens = told
    if params is None:
        assert known is not None, "the writer told that they are known"
        params = known.params
    else:
        params = SamplingParams(**dict(zip(_PARAMS, params, strict=True)))
    history = _with_tail(history, int_array() if known is None else known.history)
    return SampleRow(params, output_index, forbidden, history, prompt_tokens)


def _tail(array: IntArray, known: IntArray) -> _Tail:
    count = len(known)
    if not count or array[:count] != known:
        return 0, array.tobytes()
    return count, array[count:].tobytes()


def _with_tail(tail: _Tail, known: IntArray) -> IntArray:
    """The known array itself where nothing is behind it: whoever has copied that need not copy it again."""
    count, numbers = tail
    if not count:
        return _array(numbers)
    return known + _array(numbers) if numbers else known


def _array(numbers: bytes) -> IntArray:
    array = int_array()
    array.frombytes(numbers)
    return array
