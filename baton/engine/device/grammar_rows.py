"""Follows the grammars of a step's rows, with a matcher for each row, and makes the masks for the step's draw.

A row's newest token may still be on the device when the next step is launched. So masks are made after a step's forward
pass is queued and before its draw is: this waits for the previous step's tokens while the device computes.

A row with drafts is drawn once after each of them. Its matcher takes the drafts one by one, each if the mask before it
allows it, and takes back the wrong ones with the next step. The time for drafts is bounded apart, so that wrong ones
never use up what the output may take.

NOTE: a captured step cannot apply them. It is replayed before the mask of its own draw can be known, and would have to
wait in its middle; the rows with a grammar are drawn by a few kernels after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.errors import BatonError, InternalError
from baton.core.types import Grammar
from baton.engine.batch import BatchRow
from baton.engine.request import IntArray, int_array
from baton.engine.sampling.choice import NO_TOKEN
from baton.engine.sampling.masks import Masks
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.sampler import SampledOnHost
from baton.grammar.budget import MaskBudget
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import Mask, MaskFiller, Matcher, allows, forbid


class GrammarRows:
    """Keeps the matchers of the newest step's rows, and no others: a request that leaves is forgotten by the next step,
    and one that comes back, such as after a preemption, is followed anew from its output. Every rank of a node computes
    the same. Used by the thread that launches steps.
    """

    def __init__(self, compiler: GrammarCompiler, device: torch.device) -> None:
        self._compiler = compiler
        self._device = device
        self._filler = MaskFiller()
        self._followed: dict[str, _Followed] = {}
        self._drawn: _Drawn | None = None

    @property
    def num_matchers(self) -> int:
        """Number of matchers that are kept."""
        return len(self._followed)

    def masks(self, rows: Sequence[BatchRow]) -> "tuple[Masks | None, dict[int, BatonError]]":
        """The masks of a step's draw, and the errors of rows that cannot be drawn, by place in `rows`. Waits for the
        previous step.

        Args:
            rows: all rows with a grammar that the step draws, as they are in this step; rows without one are skipped.
        """
        before, self._followed = self._followed, {}
        drawn, self._drawn = self._drawn, None
        places = [place for place, row in enumerate(rows) if _grammar_of(row) is not None]
        if not places:
            return None, {}
        tokens = {} if drawn is None else drawn.tokens()
        failed: dict[int, BatonError] = {}
        filled: list[Masks] = []
        # Each request's remaining draws. A pass of this loop takes the first one of each.
        left = _draws_of_requests(places, rows)
        drafted = False
        while left:
            masks = self._fill([draws[0] for draws in left], rows, before, tokens, failed, drafted=drafted)
            if masks is not None:
                filled.append(masks)
            left = _allowed(left, rows, masks, failed)
            before, drafted = self._followed, True
        if not filled:
            return None, failed
        if len(filled) == 1:
            return filled[0], failed
        rows_G = np.concatenate([masks.rows_G for masks in filled])
        return Masks(rows_G, np.concatenate([masks.masks_GW for masks in filled])), failed

    def _fill(
        self,
        places: Sequence[int],
        rows: Sequence[BatchRow],
        before: "Mapping[str, _Followed]",
        tokens: Mapping[str, int],
        failed: dict[int, BatonError],
        *,
        drafted: bool,
    ) -> Masks | None:
        """The masks of one draw of each of some requests. Adds errors to `failed`, by place in `rows`.

        Args:
            places: of the draws in `rows`.
            before: the requests that were followed up to now.
            tokens: what the previous step has drawn.
            drafted: whether these draws follow drafts.
        """
        matched: list[tuple[int, Matcher, SampleRow]] = []
        for place in places:
            row = rows[place]
            sample = row.sample
            assert sample is not None, "rows with a grammar are drawn"
            try:
                newest = tokens.get(row.request_id)
                followed = self._follow(row, sample, before.get(row.request_id), newest, drafted=drafted)
            except BatonError as error:
                failed[place] = error
                continue
            self._followed[row.request_id] = followed
            matched.append((place, followed.matcher, sample))
        if not matched:
            return None
        rows_G = np.array([place for place, _, _ in matched], np.int64)
        masks_GW = np.empty((len(matched), matched[0][1].words), np.int32)
        errors = self._filler.fill([matcher for _, matcher, _ in matched], masks_GW)
        for (place, _, sample), refused, mask_W in zip(matched, errors, masks_GW, strict=True):
            if refused is not None:
                failed[place] = refused
            self._forbid(mask_W, sample)
        return Masks(rows_G, masks_GW)

    def drawn(self, rows: Sequence[BatchRow], on_host: SampledOnHost) -> None:
        """Records that the draw of the rows of `masks` is queued, together with its copy to the host."""
        if self._followed:
            self._drawn = _Drawn([row.request_id for row in rows], on_host, _event(self._device))

    def _follow(
        self, row: BatchRow, sample: SampleRow, followed: "_Followed | None", newest: int | None, *, drafted: bool
    ) -> "_Followed":
        """The row's matcher after all of its output.

        Raises:
            BatonError: the output breaks the grammar, or not all of it is known here.
        """
        grammar = sample.params.grammar
        assert grammar is not None
        if row.token_source is not None:
            if followed is None or newest is None or newest == NO_TOKEN:
                # The step before has failed, and this row with it; otherwise the request must fail now.
                raise InternalError("the tokens of a constrained output are not known here")
            followed.charge(drafts=False)
            followed.consume(newest)
        else:
            output = sample.output
            if followed is None or followed.grammar != grammar or not output:  # of a request before, with the same id
                followed = _Followed(grammar, self._compiler.matcher(grammar))
            elif not followed.go_back(output):
                followed = followed.anew(self._compiler.matcher(grammar))
            followed.charge(drafts=drafted)
            for token_id in output[len(followed.tokens) :]:
                followed.consume(token_id)
        if len(followed.tokens) != sample.output_index:
            raise InternalError(
                f"{len(followed.tokens)} tokens of a constrained output are known, token {sample.output_index} is next"
            )
        return followed

    def _forbid(self, mask_W: Mask, sample: SampleRow) -> None:
        """Forbids end tokens that the request does not want yet, unless the grammar allows nothing else."""
        unwanted = sample.forbidden
        if sample.params.ignore_eos:
            unwanted = (*unwanted, *self._compiler.eos_token_ids)
        if unwanted:
            forbid(mask_W, unwanted)


class _Followed:
    """One request's output and its matcher."""

    def __init__(self, grammar: Grammar, matcher: Matcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.tokens = int_array()
        self._budget = matcher.budget
        self._drafts_budget = MaskBudget(matcher.budget.clock)

    def anew(self, matcher: Matcher) -> "_Followed":
        """The same output from its start, with another matcher. What it has taken stays charged."""
        followed = _Followed(self.grammar, matcher)
        followed._budget, followed._drafts_budget = self._budget, self._drafts_budget
        return followed

    def charge(self, *, drafts: bool) -> None:
        """Charges the tokens and masks from now on to the drafts, or to the output."""
        self.matcher.budget = self._drafts_budget if drafts else self._budget

    def consume(self, token_id: int) -> None:
        """Takes the next token. After an error because of its time, the matcher has taken it, too."""
        self.tokens.append(token_id)
        self.matcher.consume(token_id)

    def go_back(self, output: IntArray) -> bool:
        """Takes back the tokens with which `output` does not begin. Returns whether the matcher can be used further."""
        kept = len(self.tokens)
        while output[:kept] != self.tokens[:kept]:  # only wrong drafts at the end, so a few times at most
            kept -= 1
        wrong = len(self.tokens) - kept
        del self.tokens[kept:]
        return self.matcher.take_back(wrong)


@dataclass(frozen=True)
class _Drawn:
    """Tokens of the previous step that a queued copy brings to the host."""

    request_ids: list[str]
    on_host: SampledOnHost
    arrived: torch.cuda.Event | None

    def tokens(self) -> dict[str, int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        words = self.on_host.words[: len(self.request_ids)].tolist()
        return dict(zip(self.request_ids, words, strict=True))


def _draws_of_requests(places: Sequence[int], rows: Sequence[BatchRow]) -> list[list[int]]:
    """The places of each request's draws, in their order."""
    by_request: dict[str, list[int]] = {}
    for place in places:
        by_request.setdefault(rows[place].request_id, []).append(place)
    draws = list(by_request.values())
    for several in draws:
        if len(several) > 1:
            several.sort(key=lambda place: len(_output_of(rows[place])))
    return draws


def _allowed(
    left: Sequence[list[int]], rows: Sequence[BatchRow], masks: Masks | None, failed: Mapping[int, BatonError]
) -> list[list[int]]:
    """The draws after the first one of each request, while the first one may give the draft that they follow. A draw
    after any other draft is never kept, so it needs no mask."""
    several = [draws for draws in left if len(draws) > 1 and draws[0] not in failed]
    if not several or masks is None:
        return []
    by_place = dict(zip(masks.rows_G.tolist(), masks.masks_GW, strict=True))
    drafts = [_output_of(rows[draws[1]])[-1] for draws in several]
    return [draws[1:] for draws, draft in zip(several, drafts, strict=True) if allows(by_place[draws[0]], draft)]


def _output_of(row: BatchRow) -> IntArray:
    assert row.sample is not None, "rows with a grammar are drawn"
    return row.sample.output


def _grammar_of(row: BatchRow) -> Grammar | None:
    return None if row.sample is None else row.sample.params.grammar


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
