"""Encodes batches for the ranks that do not schedule, as bytes that hold only what has changed.

An unchanged row is the same object as at the same place of the previous step and is not sent. A changed row is sent
without the blocks and the history that it had before. So writer and readers must see every batch in the same order.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

from baton.core.sampling import ResolvedSampling
from baton.engine.batch import Batch, BatchRow
from baton.engine.request import IntArray, int_array
from baton.engine.sampling.row import SampleRow

_PARAMS = tuple(field.name for field in fields(ResolvedSampling))
_params_of = attrgetter(*_PARAMS)
_NO_ROW = BatchRow("", int_array(), 0, int_array(), None)

# The number of leading values that equal those of the known array, and the bytes of the others.
_Tail: TypeAlias = tuple[int, bytes]


class BatchWriter:
    """Encodes batches for one or more readers."""

    def __init__(self) -> None:
        self._rows: list[BatchRow] = []

    def write(self, batch: Batch) -> bytes:
        rows, known = batch.shared_rows, self._rows
        known += [_NO_ROW] * (len(rows) - len(known))
        places = [place for place, (row, was) in enumerate(zip(rows, known, strict=False)) if row is not was]
        changed = [_encode_row(rows[place], known[place]) for place in places]
        for place in places:
            known[place] = rows[place]
        others = batch.scores, batch.restores, batch.copies, batch.pools, batch.num_layer_drafts, batch.writes_draft_kv
        message = batch.step, len(rows), places, changed, *others
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class BatchReader:
    """Decodes the batches of one writer. Rows that were not sent again are the same objects as in the previous step."""

    def __init__(self) -> None:
        self._rows: list[BatchRow] = []

    def read(self, message: bytes) -> Batch:
        step, num_rows, places, changed, *others = pickle.loads(message)
        scores, restores, copies, pools, num_layer_drafts, writes_draft_kv = others
        known = self._rows
        known += [_NO_ROW] * (num_rows - len(known))
        for place, row in zip(places, changed, strict=True):
            known[place] = _decode_row(row, known[place])
        rows = tuple(known[:num_rows])
        return Batch(
            step,
            rows,
            scores=scores,
            restores=restores,
            copies=copies,
            pools=pools,
            num_layer_drafts=num_layer_drafts,
            writes_draft_kv=writes_draft_kv,
        )


def _encode_row(row: BatchRow, known: BatchRow) -> tuple[Any, ...]:
    """The row's fields; the request id is None where the known row has the same one."""
    return (
        None if row.request_id == known.request_id else row.request_id,
        row.token_ids.tobytes(),
        row.token_start,
        _encode_tail(row.block_ids, known.block_ids),
        None if row.sample is None else _encode_sample(row.sample, known.sample),
        row.token_source,
        row.since,
        row.adapter,
        row.state_slot,
        row.owner,
        row.snapshots,
        row.num_drafts,
        row.draft_slots,
        row.state_next,
        row.next_token,
    )


def _decode_row(encoded: Sequence[Any], known: BatchRow) -> BatchRow:
    request_id, token_ids, token_start, blocks, sample, *others = encoded
    return BatchRow(
        known.request_id if request_id is None else request_id,
        _array(token_ids),
        token_start,
        _decode_tail(blocks, known.block_ids),
        None if sample is None else _decode_sample(sample, known.sample),
        *others,
    )


def _encode_sample(sample: SampleRow, known: SampleRow | None) -> tuple[Any, ...]:
    """The sample row's fields; `params` is None where the known row has the same ones."""
    params = None
    if known is None or sample.params is not known.params:
        # A read-only view of a dict cannot be pickled.
        params = tuple(dict(value) if isinstance(value, Mapping) else value for value in _params_of(sample.params))
    history = _encode_tail(sample.history, int_array() if known is None else known.history)
    return params, sample.output_index, sample.forbidden, history, sample.prompt_tokens, sample.output.tobytes()


def _decode_sample(encoded: Sequence[Any], known: SampleRow | None) -> SampleRow:
    params, output_index, forbidden, history, prompt_tokens, output = encoded
    if params is None:
        assert known is not None, "the writer leaves params out only where the known row has them"
        params = known.params
    else:
        params = ResolvedSampling(**dict(zip(_PARAMS, params, strict=True)))
    history = _decode_tail(history, int_array() if known is None else known.history)
    return SampleRow(params, output_index, forbidden, history, prompt_tokens, _array(output))


def _encode_tail(array: IntArray, known: IntArray) -> _Tail:
    count = len(known)
    if not count or array[:count] != known:
        return 0, array.tobytes()
    return count, array[count:].tobytes()


def _decode_tail(tail: _Tail, known: IntArray) -> IntArray:
    """The known array itself where nothing was added: the runner then need not copy it to the device again."""
    count, numbers = tail
    if not count:
        return _array(numbers)
    return known + _array(numbers) if numbers else known


def _array(numbers: bytes) -> IntArray:
    array = int_array()
    array.frombytes(numbers)
    return array
