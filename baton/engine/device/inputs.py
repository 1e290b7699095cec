"""Tensors on the device for a step that runs outside of a graph, made from its rows in one copy.

With attention data parallelism, tokens and sampled rows are those of all ranks, and metadata and positions those of
this rank. Suffixes: T token of the step, S row that is sampled, P row whose token the host does not know yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata, plan_batch
from baton.engine.batch import MOST_SNAPSHOTS, BatchRow
from baton.engine.request import int_array
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.token_exchange import TokenExchange, TokenShares

# Triton compiles a kernel again for a stride of 1 and for one that is not a multiple of 16; no step may wait for that.
TABLE_MULTIPLE = 16


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step.

    Attributes:
        token_ids_T, positions_T: int64.
        adapters_T: int32, the slot of each token's adapter, -1 for none; None: no token has one.
        states: the recurrent states of the rows; None: the model has none.
        sampled: the rows that are sampled, on the host.
        sampled_S: int64, the same rows.
        last_S: int64, the last token of each sampled row.
        starts: the first token of each row, on the host.
        shares: number of tokens of each rank; None: all ranks have all of them.
    """

    common: CommonAttentionMetadata
    token_ids_T: Tensor
    positions_T: Tensor
    adapters_T: Tensor | None
    states: StateRows | None
    sampled: list[int]
    sampled_S: Tensor
    last_S: Tensor
    starts: Sequence[int]
    shares: TokenShares | None


def stage_step(
    rows: Sequence[BatchRow],
    last_tokens: Tensor,
    *,
    block_size: int,
    with_states: bool = False,
    rows_in_order: bool = False,
    exchange: TokenExchange | None = None,
) -> StepInputs:
    """Makes the inputs of a step. The host does not wait for the copy.

    Args:
        with_states: the model has recurrent states.
        rows_in_order: `ModelFacts.rows_in_order`.
        last_tokens: int32, the tokens of the previous step, row by row; `token_source` is an index into it.
        exchange: the model's, with attention data parallelism.

    Raises:
        InternalError: a row without tokens, or with too few blocks.
    """
    own, is_idle, starts, num_places, shares = place_rows(rows, exchange)
    batch = plan_batch(
        query_lens=[len(row.token_ids) for row in own],
        context_lens=[row.token_start for row in own],
        block_tables=[row.block_ids for row in own],
        block_size=block_size,
        width_multiple=TABLE_MULTIPLE,
    )
    if is_idle:
        batch = replace(batch, slots_T=np.full_like(batch.slots_T, -1))
    token_ids = np.zeros(num_places, np.int64)
    for row, start in zip(rows, starts.tolist(), strict=True):
        token_ids[start : start + len(row.token_ids)] = row.token_ids
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    sampled = [index for index, row in enumerate(rows) if row.sample is not None]
    pending = [index for index, row in enumerate(rows) if row.token_source is not None]
    *copied, token_ids_T, sampled_S, last_S, places_P, sources_P = to_device(
        (
            *batch.to_copy,
            token_ids,
            np.array(sampled, np.int64),
            (starts + lengths)[sampled] - 1,
            starts[pending],
            np.array([rows[index].token_source for index in pending], np.int64),
        ),
        last_tokens.device,
    )
    if pending:
        token_ids_T.index_copy_(0, places_P, last_tokens.index_select(0, sources_P).to(torch.int64).clamp_(min=0))
    common, positions_T = batch.common(copied)
    adapters_T = _adapters(rows, last_tokens.device)
    states = _states(rows, last_tokens.device, in_order=rows_in_order) if with_states else None
    return StepInputs(
        common, token_ids_T, positions_T, adapters_T, states, sampled, sampled_S, last_S, starts.tolist(), shares
    )


def count_decodes(rows: Sequence[BatchRow]) -> int:
    """The number of single-token rows, which come first."""
    for place, row in enumerate(rows):
        if len(row.token_ids) > 1:
            return place
    return len(rows)


def _states(rows: Sequence[BatchRow], device: torch.device, *, in_order: bool) -> StateRows:
    num_decodes = count_decodes(rows)
    slots = np.array([row.state_slot for row in rows], np.int32)
    context = np.array([row.token_start for row in rows], np.int32)
    lengths = [len(row.token_ids) for row in rows[num_decodes:]]
    starts = num_decodes + np.array([0, *accumulate(lengths)], np.int32)
    following = np.array([row.state_next for row in rows[:num_decodes]], np.int32)
    decodes = slots[:num_decodes], context[:num_decodes] + 1, following
    prompts = slots[num_decodes:], starts, context[num_decodes:]
    copied = to_device((*decodes, *prompts, *snapshots_of(rows[num_decodes:])), device)
    decode_slots_N, decode_lens_N, next_N, prompt_slots_P, starts_P1, context_P, *snapshots = copied
    snapshot_slots_PM, snapshot_lens_PM = snapshots
    return StateRows(
        decode_slots_N,
        decode_lens_N,
        prompt_slots_P,
        starts_P1,
        context_P,
        snapshot_slots_PM,
        snapshot_lens_PM,
        max_prompt_tokens=max(lengths, default=0),
        decode_next_N=next_N,
        in_order=in_order,
    )


def snapshots_of(rows: Sequence[BatchRow]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`StateRows.snapshot_slots_PM` and `snapshot_lens_PM` of these prompts."""
    slots_PM = np.full((len(rows), MOST_SNAPSHOTS), -1, np.int32)
    lens_PM = np.zeros_like(slots_PM)
    for place, row in enumerate(rows):
        for index, (num_tokens, slot) in enumerate(row.snapshots):
            slots_PM[place, index], lens_PM[place, index] = slot, num_tokens
    return slots_PM, lens_PM


def _adapters(rows: Sequence[BatchRow], device: torch.device) -> Tensor | None:
    slots = [row.adapter for row in rows]
    if max(slots, default=-1) < 0:
        return None
    slots_T = np.repeat(np.array(slots, np.int32), [len(row.token_ids) for row in rows])
    (on_device,) = to_device((slots_T,), device)
    return on_device


def pending_tokens(rows: Sequence[BatchRow], token_ids_S: Tensor) -> Tensor | None:
    """The sampled rows' tokens that the host lacks, int32, else -1. Returns None if no row with penalties has one.

    Args:
        token_ids_S: the rows' last tokens on the device.
    """
    if not any(row.token_source is not None and row.sample is not None and row.sample.history for row in rows):
        return None
    known = np.array([row.token_source is None for row in rows])
    (known_S,) = to_device((known,), token_ids_S.device)
    return token_ids_S.to(torch.int32).masked_fill_(known_S, -1)


# The placeholder of a rank without requests in a step: collectives need a token from each rank. Its KV is not written.
_IDLE_ROW = BatchRow("", int_array([0]), 0, int_array([0]), None)


class RowPlaces(NamedTuple):
    """The rows whose attention this rank computes, and where every row's tokens lie in the tensors of all ranks.
    Without attention data parallelism these are all rows, one after another.

    Attributes:
        own: the rows whose attention is computed here.
        is_idle: whether `own` holds only the placeholder of a rank without rows.
        starts: place of each row's first token, of all rows.
        num_places: number of places of all tokens.
        shares: number of tokens of each rank; None: all ranks have all rows.
    """

    own: Sequence[BatchRow]
    is_idle: bool
    starts: NDArray[np.int64]
    num_places: int
    shares: TokenShares | None


def place_rows(
    rows: Sequence[BatchRow],
    exchange: TokenExchange | None,
    lengths: Sequence[int] | None = None,
    *,
    width: int | None = None,
) -> RowPlaces:
    """Places the rows of a step, or of a pass over other numbers of tokens of the same rows.

    Args:
        lengths: number of tokens of each row; None: its own.
        width: each rank's tokens are padded to this many; None: as is best for them.
    """
    lengths = [len(row.token_ids) for row in rows] if lengths is None else lengths
    if exchange is None:
        starts = np.array([0, *accumulate(lengths)], np.int64)
        return RowPlaces(rows, is_idle=False, starts=starts[:-1], num_places=int(starts[-1]), shares=None)
    parallel = exchange.parallel
    filled = [0] * parallel.size
    within: list[int] = []
    for row, length in zip(rows, lengths, strict=True):
        within.append(filled[row.owner])
        filled[row.owner] += length
    shares = TokenShares.of([max(1, count) for count in filled])
    if width is not None:
        shares = TokenShares.equal(width, parallel.size)
    firsts = [shares.start(rank) for rank in range(parallel.size)]
    starts = np.array([firsts[row.owner] + place for row, place in zip(rows, within, strict=True)], np.int64)
    own = [row for row in rows if row.owner == parallel.rank]
    return RowPlaces(own or [_IDLE_ROW], not own, starts, shares.num_places, shares)
