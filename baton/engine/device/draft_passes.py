"""The passes of the layer that drafts tokens, outside of graphs: after steps with prompts, and wherever graphs of the
passes are missing (`draft_graphs`). The layer is an MTP layer (`baton.models.layers.mtp`) or an EAGLE-3 head
(`baton.models.layers.eagle`).

The layer's KV of a position depends on the token after it. So it is computed at the end of the step, when the rows'
tokens are drawn, for the same tokens and into the same slots as the model's own KV.

The same pass gives each sampled row's first draft token. Each further one takes one more pass, of one token a row,
which writes to the slots after the row's own. They are overwritten when the tokens there are known. A row drafts no
further than its blocks reach.

A block's last position has the KV for the token that followed when it was computed. A request that finds the block in
the prefix cache may go on otherwise, and drafts a little worse from there; that is all.

A row with drafts is several rows here (`unfolded`), and only the one with the last kept draw leads on (`draft_leads`).
Only that one writes KV beyond its own position: the others would write to positions whose tokens are known.

With attention data parallelism each rank computes the layer for its own rows, and gets the hidden states of all rows,
because all ranks draw the drafts together. Ranks make the same passes with the same rows; one without rows in a pass
computes a placeholder.

Suffixes: T token of this rank's rows, X place of a token of any rank, S row that is sampled, A sampled row that is
still drafting, D hidden channel, V vocabulary, P pass of the layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.backend import AttentionBackend
from attention.host_to_device import to_device
from attention.metadata import HostBatch, plan_batch
from baton.engine.batch import BatchRow
from baton.engine.device.draft_leads import draft_links, find_leads
from baton.engine.device.inputs import TABLE_MULTIPLE, RowPlaces, place_rows
from baton.engine.device.unfolded import Unfolded
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.sampler import sample
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.token_exchange import TokenShares

_NONE = -1
_NO_HISTORY = int_array()


@dataclass(frozen=True)
class StepDraws:
    """The rows of a step as they were computed, and their tokens.

    Args:
        tokens: int32, on the device; the drawn tokens are among them.
        places: of each sampled row, where its token is in `tokens`.
        unfolded: how rows with drafts were computed; None: there are none.
    """

    rows: Sequence[BatchRow]
    tokens: Tensor
    places: Sequence[int]
    unfolded: Unfolded | None

    @cached_property
    def sampled(self) -> list[int]:
        """The rows that are sampled."""
        return [place for place, row in enumerate(self.rows) if row.sample is not None]


class DraftsOnHost:
    """Draft tokens, in host memory that a queued copy fills.

    Args:
        words_PN: int32; -1 where a row drafts no further.
        columns: of each sampled row of the step, its column.
    """

    def __init__(self, words_PN: Tensor, columns: Mapping[int, int]) -> None:
        self._words_PN = words_PN
        self._columns = columns

    def outputs(self) -> dict[int, tuple[int, ...]]:
        """The drafts after each row, in order. Call it after the copy is done."""
        by_column = self._words_PN.T.tolist()
        return {place: _until_none(by_column[column]) for place, column in self._columns.items()}


def _until_none(words: list[int]) -> tuple[int, ...]:
    return tuple(words[: words.index(_NONE)] if _NONE in words else words)


def fetch_drafts(drafts_PN: Tensor, columns: Mapping[int, int]) -> DraftsOnHost:
    """Queues the copy of drafts to the host, which does not wait.

    Args:
        drafts_PN: int32, contiguous; a later pass may overwrite it.
        columns: as in `DraftsOnHost`.
    """
    on_host = torch.empty(drafts_PN.shape, dtype=torch.int32, pin_memory=drafts_PN.is_cuda)
    return DraftsOnHost(on_host.copy_(drafts_PN, non_blocking=True), columns)


class DraftPasses:
    """The passes of the layer that drafts for one model, for the thread that launches its steps."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, cache: PagedKVCache) -> None:
        self._model = model
        self._builder = (backend if model.eagle is None else model.eagle.backend).builder
        self._cache = cache
        self._device = cache.view.device
        self._block_size = cache.shape.block_size

    def write_kv(self, draws: StepDraws, states_TD: Tensor) -> Tensor:
        """Queues the layer's pass over all tokens of a step. Returns its hidden states [S,D] after the sampled rows'
        last tokens.

        Args:
            states_TD: what `CausalLM.draft_states` returned, with this rank's tokens of the step first.
        """
        rows = draws.rows
        lengths = [len(row.token_ids) for row in rows]
        batch, places = self._plan(rows, lengths, [row.token_start for row in rows])
        last_S = (places.starts + np.array(lengths, np.int64))[draws.sampled] - 1
        next_ids_X = _next_tokens(rows, places)
        arrays = *batch.to_copy, next_ids_X, last_S, np.array(draws.places, np.int64)
        *copied, next_ids_d_X, last_d_S, places_S = to_device(arrays, self._device)
        drawn_S = draws.tokens.index_select(0, places_S).to(torch.int64)
        next_ids_d_X.index_copy_(0, last_d_S, drawn_S.clamp_(min=0))  # NO_TOKEN of a row that has failed
        common, positions_T = batch.common(copied)
        metadata, states_TD = self._builder.build(0, common), states_TD[: len(positions_T)]
        drafted_XD = self._model.compute_drafts(
            next_ids_d_X, states_TD, positions_T, self._cache, metadata, places.shares
        )
        return drafted_XD.index_select(0, last_d_S)

    def draft(self, draws: StepDraws, drafted_SD: Tensor, count: int) -> DraftsOnHost:
        """Queues the drafts after each sampled row, and their copy to the host.

        Args:
            drafted_SD: what `write_kv` returned for the step.
            count: most drafts after each row, at least one.
        """
        rows = [draws.rows[place] for place in draws.sampled]
        drafts_PS = torch.full((count, len(rows)), _NONE, dtype=torch.int32, device=self._device)
        drafts_PS[0] = self._draw(drafted_SD, rows, 1)
        leads_S = self._leads(draws) if count > 1 else None
        active, hidden_AD = list(range(len(rows))), drafted_SD
        for passed in range(1, count):
            reaching = [place for place, each in enumerate(active) if self._reaches(rows[each], passed)]
            if not reaching:
                break
            active = [active[place] for place in reaching]
            kept_A, active_A = to_device((np.array(reaching, np.int64), np.array(active, np.int64)), self._device)
            drafts_A = drafts_PS[passed - 1].index_select(0, active_A)
            leads_A = None if leads_S is None else leads_S.index_select(0, active_A)
            chosen = [rows[each] for each in active]
            hidden_AD = self._pass(chosen, hidden_AD.index_select(0, kept_A), drafts_A, passed, leads_A)
            drafts_PS[passed].index_copy_(0, active_A, self._draw(hidden_AD, chosen, passed + 1))
        return fetch_drafts(drafts_PS, {place: column for column, place in enumerate(draws.sampled)})

    def _plan(
        self, rows: Sequence[BatchRow], lengths: Sequence[int], starts: Sequence[int]
    ) -> tuple[HostBatch, RowPlaces]:
        """Plans a pass over the next tokens of each row: the batch of this rank's rows, and all rows' places.

        Args:
            lengths, starts: number of tokens of each row, and the position of the first one.
        """
        places = place_rows(rows, self._model.exchange, lengths)
        own = self._own(rows)
        batch = plan_batch(
            query_lens=[lengths[index] for index in own] or [1],
            context_lens=[starts[index] for index in own] or [0],
            block_tables=[row.block_ids for row in places.own],
            block_size=self._block_size,
            width_multiple=TABLE_MULTIPLE,
        )
        return replace(batch, slots_T=np.full_like(batch.slots_T, _NONE)) if places.is_idle else batch, places

    def _own(self, rows: Sequence[BatchRow]) -> Sequence[int]:
        """The rows whose attention this rank computes, by their places among these rows."""
        exchange = self._model.exchange
        if exchange is None:
            return range(len(rows))
        return [index for index, row in enumerate(rows) if row.owner == exchange.parallel.rank]

    def _reaches(self, row: BatchRow, passed: int) -> bool:
        """Whether the row's blocks have a slot for one more pass after `passed` ones."""
        return row.token_stop + passed <= len(row.block_ids) * self._block_size

    def _pass(
        self, rows: Sequence[BatchRow], hidden_AD: Tensor, drafts_A: Tensor, passed: int, leads_A: Tensor | None
    ) -> Tensor:
        """Queues the layer's pass over the newest draft token of each row, one position after that of the last pass."""
        batch, places = self._plan(rows, [1] * len(rows), [row.token_stop + passed - 1 for row in rows])
        next_ids_A = drafts_A.to(torch.int64).clamp_(min=0)
        if places.shares is None:
            copied = to_device(batch.to_copy, self._device)
            return self._compute(batch, copied, next_ids_A, hidden_AD, leads_A, None)
        own = np.array(self._own(rows) or [0], np.int64)  # a rank without rows computes anything
        *copied, own_T, places_A = to_device((*batch.to_copy, own, places.starts), self._device)
        next_ids_X = next_ids_A.new_zeros(places.num_places).index_copy_(0, places_A, next_ids_A)
        leads_T = None if leads_A is None else leads_A.index_select(0, own_T)
        read_TD = hidden_AD.index_select(0, own_T)
        return self._compute(batch, copied, next_ids_X, read_TD, leads_T, places.shares).index_select(0, places_A)

    def _compute(
        self,
        batch: HostBatch,
        copied: Sequence[Tensor],
        next_ids_X: Tensor,
        read_TD: Tensor,
        leads_T: Tensor | None,
        shares: TokenShares | None,
    ) -> Tensor:
        common, positions_T = batch.common(copied)
        if leads_T is not None:
            common = replace(common, slot_mapping=common.slot_mapping.masked_fill(~leads_T, _NONE))
        metadata = self._builder.build(0, common)
        return self._model.compute_drafts(next_ids_X, read_TD, positions_T, self._cache, metadata, shares)

    def _draw(self, hidden_AD: Tensor, rows: Sequence[BatchRow], count: int) -> Tensor:
        """Draws a draft token for each row from the layer's logits, with the random numbers by which the model's token
        in that place will be drawn: logits that are nearly the model's then give the model's token. Returns int32."""
        return sample(self._model.compute_draft_logits(hidden_AD), [_sample_row(row, count) for row in rows]).chosen_R

    def _leads(self, draws: StepDraws) -> Tensor | None:
        """Whether each sampled row leads on, [S] bool. Returns None if all do."""
        if draws.unfolded is None:
            return None
        order = {place: index for index, place in enumerate(draws.sampled)}
        links_3S = draft_links(draws.unfolded, order, len(order))
        if links_3S is None:
            return None
        places_S, links_d_3S = to_device((np.array(draws.places, np.int64), links_3S), self._device)
        return find_leads(draws.tokens.index_select(0, places_S), links_d_3S)


def _next_tokens(rows: Sequence[BatchRow], places: RowPlaces) -> NDArray[np.int64]:
    """The token after each token of the rows, in their places. A sampled row's last one is drawn by the step. Its own
    token stands in for it, and also where nobody knows the next token, as at the end of a prompt that is pooled."""
    following_X = np.zeros(places.num_places, np.int64)
    for row, start in zip(rows, places.starts.tolist(), strict=True):
        last = start + len(row.token_ids) - 1
        following_X[start:last] = row.token_ids[1:]
        following_X[last] = row.next_token if row.next_token >= 0 else row.token_ids[-1]
    return following_X


def _sample_row(row: BatchRow, count: int) -> SampleRow:
    """How the token `count` places after the row's own is drawn. What edits logits is left out of drafts."""
    assert row.sample is not None
    params = row.sample.params
    if params.logprobs is not None or params.grammar is not None or params.logit_bias:
        params = replace(params, logprobs=None, grammar=None, logit_bias={})
    return SampleRow(params, row.sample.output_index + count, (), _NO_HISTORY, 0)
