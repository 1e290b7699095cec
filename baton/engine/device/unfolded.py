"""Computes rows with drafts as rows of single tokens, and folds their draws into one result per row. Pure.

Each draft is computed like the token of a decode, by a row of its own with the same blocks. It sees the drafts before
it, because each layer writes the KV of all rows before it attends. So drafts run in the captured steps of decodes, and
their draws are those of decodes: kernels for prompts give other last bits, and see new tokens of a latent fp8 cache
before these are rounded.

A recurrent state takes one token after the other: each row says which one continues its state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

from baton.core.errors import BatonError
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow, RowResult
from baton.engine.request import IntArray
from baton.models.kernels.recurrent.state_rows import continuing

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Unfolded:
    """A step in which drafts have rows of their own.

    Args:
        batch: the step without such rows.
        drafts: of each row of the given step.
        places: of each row of the given step, its rows in `batch`, in the order of their draws.
    """

    batch: Batch
    drafts: Sequence[IntArray]
    places: Sequence[Sequence[int]]

    def results(self, draws: Sequence[RowResult]) -> list[RowResult]:
        """The result of each row of the given step.

        A draft token is accepted if it is the token drawn in its place. The draws up to that of the first rejected one
        are those that decoding would give; later ones follow a wrong token and are dropped, whatever they are. An error
        fails the row only in place of its first draw. After that it may come from a draft token alone, and draws before
        it count: if decoding meets it too, the next step does.

        Args:
            draws: the results of the rows of `batch`.
        """
        return [
            _kept([draws[place] for place in places], drafts) if drafts else draws[places[0]]
            for places, drafts in zip(self.places, self.drafts, strict=True)
        ]

    def by_row(self, found: Mapping[int, _Found]) -> dict[int, _Found]:
        """What `batch` gives for some rows without drafts, by their places in the given step."""
        return {row: found[places[0]] for row, places in enumerate(self.places) if places[0] in found}


def unfolds(rows: Sequence[BatchRow]) -> bool:
    """Whether a row has drafts. Rows of a single token come first and have none, so none of them is looked at."""
    for row in reversed(rows):
        if row.num_drafts:
            return True
        if len(row.token_ids) == 1:
            return False
    return False


def unfold(batch: Batch) -> Unfolded:
    """Makes rows of single tokens from rows with drafts.

    Rows of single tokens come first, then drafts, then longer rows. Other rows keep their places among one another, and
    so do the first tokens of rows with drafts: places that have the same request as in the step before keep their
    blocks on the device.
    """
    rows = batch.shared_rows
    single_rows: list[BatchRow] = []
    draft_rows: list[BatchRow] = []
    long_rows: list[BatchRow] = []
    num_single = sum([len(row.token_ids) - row.num_drafts == 1 for row in rows])
    first_long = num_single + sum([row.num_drafts for row in rows])
    places: list[list[int]] = []
    for row in rows:
        if row.num_drafts:
            begin, drafts = _parts(row)
        else:
            begin, drafts = row, []
        if len(begin.token_ids) == 1:
            place = len(single_rows)
            single_rows.append(begin)
        else:
            place = first_long + len(long_rows)
            long_rows.append(begin)
        next_draft = num_single + len(draft_rows)
        of_row = [place, *range(next_draft, next_draft + len(drafts))]
        draft_rows += drafts
        places.append(of_row)
    unfolded_rows = [*single_rows, *draft_rows, *long_rows]
    for row, of_row in zip(rows, places, strict=True):
        if row.state_slot >= 0:
            for place, following in pairwise(of_row):
                unfolded_rows[place] = unfolded_rows[place]._replace(state_next=following)
    firsts = [each[0] for each in places]
    unfolded = replace(
        batch,
        shared_rows=tuple(unfolded_rows),
        scores=tuple(sorted(((firsts[index], score) for index, score in batch.scores), key=itemgetter(0))),
        pools=tuple(sorted(((firsts[index], pool) for index, pool in batch.pools), key=itemgetter(0))),
    )
    return Unfolded(unfolded, [row.drafts for row in rows], places)


def _parts(row: BatchRow) -> tuple[BatchRow, list[BatchRow]]:
    """A row without its drafts, and one for each of these."""
    sample, drafts, draft_slots = row.sample, row.drafts, row.draft_slots
    assert sample is not None, "a row with drafts is sampled"
    assert row.since is None, "a row with drafts is for one step only"
    first = len(row.token_ids) - row.num_drafts
    assert len(draft_slots) == (len(drafts) if row.state_slot >= 0 else 0), "each draft has a slot for its state"
    assert first == 1 or not draft_slots, "only a decode's state is continued in the same step"
    begin = row._replace(token_ids=row.token_ids[:first], num_drafts=0, draft_slots=())
    start, slots = row.token_start + first, [continuing(slot) for slot in draft_slots] or [row.state_slot] * len(drafts)
    # A step may have hundreds of drafts while the device waits, so each row is made by one call.
    name, _, _, blocks, _, source, since, adapter, *_ = begin
    rest = begin.owner, begin.snapshots, begin.num_drafts, begin.draft_slots, begin.state_next, begin.next_token
    return begin, [
        BatchRow(name, drafts[at : at + 1], start + at, blocks, how, source, since, adapter, slot, *rest)
        for at, (slot, how) in enumerate(zip(slots, sample.after_each(drafts), strict=True))
    ]


def _kept(draws: Sequence[RowResult], drafts: IntArray) -> tuple[TokenOutput, ...] | BatonError:
    kept: list[TokenOutput] = []
    for draw, draft in zip(draws, (*drafts, None), strict=True):
        if isinstance(draw, BatonError):
            return tuple(kept) if kept else draw
        assert isinstance(draw, TokenOutput), "a row with drafts is sampled"
        kept.append(draw)
        if draw.token_id != draft:
            break
    return tuple(kept)
