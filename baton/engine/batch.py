"""The message from scheduler to runner: one step's rows as plain integers.

Most rows repeat from step to step, one token further on. They stay the same objects, so nobody makes or reads them
again. Rows are named tuples, which are several times faster to make than frozen dataclasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from baton.core.errors import BatonError
from baton.core.types import TokenOutput
from baton.engine.pooling import PoolRow
from baton.engine.request import IntArray
from baton.engine.sampling.row import SampleRow

# Snapshots within a row: where a prompt departs from a known prefix, and before its end.
MOST_SNAPSHOTS = 2

# What a step yields for a row: its token, None where nothing was sampled, or the error with which its request fails. A
# row with drafts yields at least one token: one after each draft that is kept, and the one that differs from the next.
RowResult: TypeAlias = TokenOutput | tuple[TokenOutput, ...] | BatonError | None


class BatchRow(NamedTuple):
    """One request's part of a step.

    Args:
        token_ids: tokens to compute; the first one has position `token_start`.
        block_ids: blocks of positions 0 up to the last token to compute.
        token_source: the row of the previous step that samples this row's only token, which the host does not know
            yet; `token_ids` then holds a 0 in its place. None: `token_ids` are known.
        sample: None while known tokens of the sequence remain to be computed.
        since: the first step with this row. Later steps may share the row at the same place; in each of them it is one
            token further on. None: the row is for one step only.
        adapter: slot of the request's adapter; -1: it has none.
        state_slot: slot of the request's recurrent state; -1: the model has none. Below -1: `StateRows.decode_slots_N`
            says what.
        owner: the rank that has the blocks, where each has blocks of its own.
        snapshots: up to MOST_SNAPSHOTS pairs (tokens, slot): the slot gets the recurrent state after this many of the
            row's tokens, fewer than all.
        num_drafts: the last so many of `token_ids` are drafts. The token before them is known, and a token is drawn
            after it and after each draft token; `sample` is for the first of these draws. A step with drafts is
            computed in other rows than these (`unfolded`), so the next one has no `token_source`.
        draft_slots: slots of the recurrent states after each draft token; `state_slot` gets the one before them. Empty:
            the model has none.
        state_next: the row of the step that continues this one's recurrent state; -1: none does.
        next_token: the token after these, if the host knows it and the row is not sampled; else -1. A layer that drafts
            tokens reads it.
    """

    request_id: str
    token_ids: IntArray
    token_start: int
    block_ids: IntArray
    sample: SampleRow | None
    token_source: int | None = None
    since: int | None = None
    adapter: int = -1
    state_slot: int = -1
    owner: int = 0
    snapshots: tuple[tuple[int, int], ...] = ()
    num_drafts: int = 0
    draft_slots: tuple[int, ...] = ()
    state_next: int = -1
    next_token: int = -1

    @property
    def token_stop(self) -> int:
        return self.token_start + len(self.token_ids)

    @property
    def drafts(self) -> IntArray:
        """The drafts at the end of `token_ids`."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def at(self, step: int) -> "BatchRow":
        """The row at a given step."""
        if self.since is None or self.since == step:
            return self
        further, sample = step - self.since, self.sample
        if sample is not None:
            sample = sample._replace(output_index=sample.output_index + further)
        return self._replace(token_start=self.token_start + further, sample=sample, since=None)


class LayerDrafts(NamedTuple):
    """What the model's own layer drafts after a step.

    Args:
        tokens: the drafts for the tokens after each row's, by row.
        rows: rows that were computed for it.
        seconds: the time that they took after the step. The layer's pass over the step's tokens is a part of it, except
            after a step with prompts, which computes that pass in any case.
    """

    tokens: Mapping[int, tuple[int, ...]]
    rows: int
    seconds: float


class ScoreRow(NamedTuple):
    """The prompt tokens whose logprobs a row computes.

    Args:
        targets: the tokens that follow the row's tokens in the prompt. The prompt's last token has none, because the
            token that follows it is sampled.
        alternatives: how many of the most probable tokens are wanted at each place.
    """

    targets: IntArray
    alternatives: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows of a single token come first: attention splits decodes from prefills by query length.

    Args:
        shared_rows: the step's rows; other steps may share some of them, see `BatchRow.since`.
        layers_per_group: number of layers between marks; 0: no marks.
        scores: the rows whose prompt logprobs are wanted, by place, in order.
        restores, copies: recurrent states, (from slot, to slot), that are copied before and after the step.
        pools: the rows whose hidden states are pooled, by place, in order.
        num_layer_drafts: how many tokens after each row's the model's own layer drafts at most; 0: none.
        writes_draft_kv: whether that layer computes the step's tokens, so that its KV is complete. A step without has
            no prompts and no drafts, and its requests are not drafted for by the layer any more.
    """

    step: int
    shared_rows: tuple[BatchRow, ...]
    layers_per_group: int = 0
    scores: tuple[tuple[int, ScoreRow], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    pools: tuple[tuple[int, PoolRow], ...] = ()
    num_layer_drafts: int = 0
    writes_draft_kv: bool = True

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the step reads hidden states other than those of sampled rows."""
        return bool(self.scores or self.pools)

    def of_owners(self, count: int) -> "Batch":
        """The rows repeated for each of `count` owners, for warm-up steps."""
        rows = tuple(row._replace(owner=owner) for row in self.shared_rows for owner in range(count))
        scores = tuple((place * count, score) for place, score in self.scores)
        pools = tuple((place * count, pool) for place, pool in self.pools)
        return Batch(self.step, rows, scores=scores, pools=pools, num_layer_drafts=self.num_layer_drafts)

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """The rows as they are in this step. Makes new rows; hot paths use `shared_rows`."""
        return tuple(row.at(self.step) for row in self.shared_rows)
