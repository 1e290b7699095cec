"""Writes prompt logprobs into messages.

A long prompt has hundreds of thousands of logprobs. Making a message object of each takes over a second for 32,768
tokens with 20 alternatives, during which the node's event loop does nothing else. So numpy writes their wire form, as
records of equal size, and protobuf parses it, in a fifth of the time.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.core.sampling import MAX_LOGPROBS
from baton.core.types import PromptLogprob
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import common_pb2

_TOKEN_BYTES = 5  # of any uint32 as a varint
_LENGTH_BYTES = 2  # of the size of any PromptLogprob as a varint
_VARINT, _FIXED64, _BYTES = 0, 1, 2  # wire types of protobuf

_TOP = common_pb2.TokenLogprob.DESCRIPTOR.fields_by_name
_SCORED = common_pb2.PromptLogprob.DESCRIPTOR.fields_by_name
_FIELD = "prompt_logprobs"


def add_prompt_logprobs(
    message: prefill_pb2.PrefillFirstToken | decode_pb2.StepToken, logprobs: Iterable[PromptLogprob]
) -> None:
    """Appends to the message's `prompt_logprobs`. No token has more than MAX_LOGPROBS alternatives."""
    number = message.DESCRIPTOR.fields_by_name[_FIELD].number
    for (known, count), alike in groupby(logprobs, key=lambda each: (each.logprob is not None, len(each.top_logprobs))):
        assert count <= MAX_LOGPROBS
        message.MergeFromString(_records(number, list(alike), known=known, count=count).tobytes())


def _records(number: int, logprobs: Sequence[PromptLogprob], *, known: bool, count: int) -> NDArray[Any]:
    """One record per token, each with `count` alternatives.

    Args:
        number: number of the field that holds the records.
        known: whether the tokens have logprobs.
    """
    token = [("token_tag", "u1"), ("token_id", "u1", _TOKEN_BYTES)]
    value = [("value_tag", "u1"), ("value", "<f8")]
    top = np.dtype([("tag", "u1"), ("length", "u1"), *token, *value])
    record = np.dtype(
        [("tag", "u1"), ("length", "u1", _LENGTH_BYTES), *token, *(value if known else ()), ("top", top, count)]
    )
    records = np.zeros(len(logprobs), record)
    records["tag"] = _tag(number, _BYTES)
    _write_varint(records["length"], np.array(record.itemsize - 1 - _LENGTH_BYTES))
    records["token_tag"] = _tag(_SCORED["token_id"].number, _VARINT)
    _write_varint(records["token_id"], np.array([each.token_id for each in logprobs]))
    if known:
        records["value_tag"] = _tag(_SCORED["logprob"].number, _FIXED64)
        records["value"] = [each.logprob for each in logprobs]
    if count:
        pairs = chain.from_iterable(chain.from_iterable(each.top_logprobs for each in logprobs))
        # Token ids are whole in float64.
        numbers = np.fromiter(pairs, np.float64, 2 * count * len(logprobs)).reshape(len(logprobs), count, 2)
        tops = records["top"]
        tops["tag"] = _tag(_SCORED["top_logprobs"].number, _BYTES)
        tops["length"] = top.itemsize - 2
        tops["token_tag"] = _tag(_TOP["token_id"].number, _VARINT)
        _write_varint(tops["token_id"], numbers[..., 0].astype(np.int64))
        tops["value_tag"] = _tag(_TOP["logprob"].number, _FIXED64)
        tops["value"] = numbers[..., 1]
    return records


def _write_varint(out: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
    """Fills the last axis of `out`. Parsers accept varints with leading zeros, so all of them have the same size."""
    last = out.shape[-1] - 1
    for place in range(last + 1):
        out[..., place] = numbers >> 7 * place & 127 | (128 if place < last else 0)


def _tag(number: int, wire_type: int) -> int:
    return number << 3 | wire_type
