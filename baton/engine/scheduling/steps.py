"""Steps from their making to their end: the next step, and the steps in flight. Pure.

The oldest step in flight runs while the next one is prepared, so there are at most two.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.core.block_keys import BlockKey
from baton.core.costs import StepWork, chunk_pairs
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import Batch, BatchRow, RowResult, ScoreRow
from baton.engine.events import LayersComputed, PromptScored, RequestStarted, StepEvents
from baton.engine.pooling import PooledRows, PoolRow
from baton.engine.request import EngineLimits
from baton.engine.scheduling.slices import StepBound
from baton.engine.scheduling.state import RequestPhase, RequestState
from baton.engine.speculation.depth import Draft, speculative_work

STEPS_MAX = 2


class StepSnapshot(NamedTuple):
    """A snapshot of a request's recurrent state that a step leaves.

    Attributes:
        token_stop: number of tokens in the state.
        key: key of the last block of these tokens.
        slot: -1: there is a snapshot already, or there is no room.
    """

    state: RequestState
    token_stop: int
    key: BlockKey
    slot: int


class NextStep:
    """A step in the making: first all decodes, then chunks of prompts while there is budget.

    Attributes:
        number: number of the step.
        states: the requests of the rows, in the order of the rows.
        rows: rows of a single token come first.
        budget: tokens that still fit.
        started: the requests whose first row is in this step, by id.
        scores: the requests whose prompt logprobs this step computes.
        pools: the requests whose hidden states this step pools.
        num_decodes: rows of `add_decodes`; they come before all others.
        unfolds: whether a row has drafts.
        late: whether it was prepared only when the step before had ended, because one of the two unfolds or might.
        work: what the step computes.
        plain: its decodes without drafts.
        wait_s: for how long the device waits for it, because drafts were prepared late or might have been.
        bound: on the step's time; None: there is none.
        has_skipped: whether the first prompt got no token of this step for lack of room.
        layers_per_group: the smallest number that a prompt of the step asks for; 0: no prompt asks for marks.
        restores, copies: recurrent states, (from slot, to slot), that are copied before and after the step.
        snapshots: snapshots of recurrent states, usable once the step has ended.
        num_layer_drafts: how many tokens the model's own layer drafts at most, see `Batch`.
        waits_for_layer: whether they are for the next step, which must wait for them.
        writes_draft_kv: as in `Batch`.
        has_chunks: whether it computes known tokens of a request, such as a part of its prompt.

    Args:
        state_unit: chunks should end at multiples of this many tokens, if the model has recurrent states; 0: it has
            none.
    """

    def __init__(self, number: int, limits: EngineLimits, *, block_size: int, now: float, state_unit: int = 0) -> None:
        self.number = number
        self.states: list[RequestState] = []
        self.rows: list[BatchRow] = []
        self.started: dict[str, RequestStarted] = {}
        self.scores: list[tuple[RequestState, ScoreRow]] = []
        self.pools: list[tuple[RequestState, PoolRow]] = []
        self.budget = limits.max_batch_tokens
        self.num_decodes = 0
        self.unfolds = False
        self.late, self.wait_s = False, 0.0
        self.work = self.plain = StepWork()
        self.bound: StepBound | None = None
        self.has_skipped = False
        self.layers_per_group = 0
        self.restores: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.snapshots: list[StepSnapshot] = []
        self.num_layer_drafts = 0
        self.waits_for_layer = False
        self.writes_draft_kv = True
        self.has_chunks = False
        self._state_unit = state_unit
        self._num_single = 0
        self._chunks: dict[RequestState, int] = {}  # planned tokens of prompts that have no row yet
        self._num_more = 0  # rows in which the step is computed besides `rows`, see `unfolds`
        self._limits = limits
        self._block_size = block_size
        self._now = now

    def add_decodes(self, states: list[RequestState], work: StepWork, *, ahead: bool) -> None:
        """Adds the next token of each request, in this order. Call it before `plan_chunk`.

        Args:
            work: theirs.
            ahead: whether the previous step, whose tokens come before these, is still in flight.
        """
        append = self.rows.append
        for place, state in enumerate(states):
            row = state.shared_row
            if ahead and row is not None and place == state.row_index:
                state.num_scheduled += 1  # the row of the previous step, one token further on
            else:
                row = state.next_decode(place, step=self.number, block_size=self._block_size)
            append(row)
        self.states += states
        self.num_decodes = self._num_single = len(states)
        self.budget -= len(states)
        self.work = self.plain = work

    def add_drafts(self, drafts: Mapping[RequestState, Draft]) -> None:
        """Adds the next token of each request and the drafts after it. Call it after `add_decodes`, and before
        `plan_chunk`."""
        if not drafts:
            return
        self.unfolds = True
        newest = [(state.num_scheduled - 1, 1) for state in drafts]
        drafted = [(state.num_scheduled - 1, 1 + len(draft)) for state, draft in drafts.items()]
        self.plain, self.work = speculative_work(self.plain, newest), speculative_work(self.work, drafted)
        self.rows += [state.next_drafts(draft, block_size=self._block_size) for state, draft in drafts.items()]
        self.states += drafts
        num_drafts = sum(map(len, drafts.values()))
        self.budget -= len(drafts) + num_drafts
        self._num_more += num_drafts

    def chunk_tokens(self, state: RequestState, start: int, *, others: int = 0, most: int | None = None) -> int:
        """How many tokens of the request from `start` on still fit. Returns 0 if it waits.

        Args:
            others: requests that must find a row after this one.
            most: tokens that the request may have; None: any number.
        """
        num_rows = len(self.rows) + len(self._chunks) + self._num_more
        if self._num_more and state not in self._chunks and self._limits.seats <= num_rows + others:
            return 0
        wanted = state.prefill_stop - start
        num_tokens = min(self.budget, wanted if most is None else min(wanted, most))
        if self.bound is not None and num_tokens > 0:
            num_tokens = self.bound.tokens(self.work, start, start + num_tokens)
        if num_tokens < wanted and self._state_unit:
            aligned = (start + num_tokens) // self._state_unit * self._state_unit - start
            num_tokens = aligned if aligned > 0 else num_tokens
        if not num_tokens and not self.work.prompt_tokens:
            self.has_skipped = True
        return num_tokens

    def plan_chunk(self, state: RequestState, *, others: int = 0, most: int | None = None) -> int:
        """Plans as much of the request's prompt as fits, after what is planned already; see `chunk_tokens`. Returns the
        number of tokens that were added."""
        start = state.num_scheduled + self._chunks.get(state, 0)
        num_tokens = self.chunk_tokens(state, start, others=others, most=most)
        if num_tokens:
            self._chunks[state] = self._chunks.get(state, 0) + num_tokens
            self.budget -= num_tokens
            work, pairs = self.work, chunk_pairs(start, start + num_tokens)
            self.work = StepWork(work.decode_rows, work.keys, work.prompt_tokens + num_tokens, work.pairs + pairs)
        return num_tokens

    def left_of(self, state: RequestState) -> int:
        """How many tokens of the request's prompt are in no step and not planned."""
        return state.prefill_stop - state.num_scheduled - self._chunks.get(state, 0)

    def add_planned(self) -> None:
        """Adds a row for each planned chunk."""
        for state, num_tokens in self._chunks.items():
            self._add_chunk(state, num_tokens)
        self._chunks = {}

    def _add_chunk(self, state: RequestState, num_tokens: int) -> None:
        start = state.num_scheduled
        self.has_chunks = True
        if not state.started:
            state.started = True
            queue_s = self._now - state.queued_at
            self.started[state.request_id] = RequestStarted(state.request_id, state.num_cached, queue_s)
        if state.restore_from not in (-1, state.state_slot) and start == state.num_computed:
            self.restores.append((state.restore_from, state.state_slot))
        index = self._num_single if num_tokens == 1 else len(self.rows)
        self.states.insert(index, state)
        row = state.next_row(num_tokens, block_size=self._block_size)
        self.rows.insert(index, row)
        if (score := state.score_row(row)) is not None:
            self.scores.append((state, score))
        if state.pooling is not None and (pool := state.pooling.row(row.token_start, row.token_stop)) is not None:
            self.pools.append((state, pool))
        self._num_single += num_tokens == 1
        if wanted := state.request.layers_per_group:
            self.layers_per_group = min(wanted, self.layers_per_group or wanted)


class Step(NamedTuple):
    """A launched step.

    Attributes:
        states: the requests of the rows, in the order of the rows.
        started: the requests whose first row is in this step, by id.
        work: what the step computes.
        plain: the same without drafts.
        scores: whether it computes prompt logprobs too.
        snapshots: snapshots of recurrent states, usable once the step has ended.
        unfolds: whether it is computed in other rows than these, so that the next step must wait for its tokens.
        late: as in `NextStep`.
        ahead: whether it was prepared while the step before ran.
        waits_for_layer: whether the model's own layer drafts tokens after it for the next step, which must wait.
    """

    number: int
    states: list[RequestState]
    rows: tuple[BatchRow, ...]
    started: dict[str, RequestStarted]
    work: StepWork
    scores: bool
    snapshots: tuple[StepSnapshot, ...] = ()
    unfolds: bool = False
    late: bool = False
    waits_for_layer: bool = False
    plain: StepWork = StepWork()
    ahead: bool = False

    def layers_computed(self, layer_stop: int, index_stop: int) -> StepEvents:
        """The events of the running step when its first layers are computed, for requests that ask for marks."""
        layers = []
        for state, row in zip(self.states, self.rows, strict=True):
            start = state.num_computed
            if state.request.layers_per_group and start < state.prefill_stop and state.phase is not RequestPhase.ENDED:
                stop = start + len(row.token_ids)
                blocks = tuple(state.blocks)
                layers.append(
                    LayersComputed(state.request_id, start, stop, layer_stop, blocks, state.owner, index_stop)
                )
        return StepEvents(self.number, 0.0, layers=tuple(layers))

    def collect_scores(
        self, results: Sequence[RowResult], scores: Mapping[int, Sequence[PromptLogprob]]
    ) -> tuple[PromptScored, ...]:
        """Adds the prompt logprobs of the step to its requests; returns those of the prompts that are complete."""
        complete: list[PromptScored] = []
        for index, logprobs in scores.items():
            state = self.states[index]
            if state.phase is not RequestPhase.RUNNING:
                continue
            assert state.scored is not None, "prompt logprobs are computed only for requests that collect them"
            state.scored += logprobs
            if isinstance(results[index], TokenOutput):
                complete.append(PromptScored(state.request_id, state.take_scores()))
        return tuple(complete)

    def collect_pools(self, pools: PooledRows) -> None:
        """Adds the step's pooled hidden states to its requests."""
        for index, values in pools.items():
            state = self.states[index]
            if state.phase is RequestPhase.RUNNING:
                assert state.pooling is not None, "hidden states are pooled only for requests that collect them"
                state.pooling.add(values)


class StepsInFlight:
    """Steps that were launched and have not ended, oldest first. They are numbered from 1 and end in launch order."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._launched = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        return len(self._steps) == STEPS_MAX

    @property
    def launched(self) -> int:
        """Number of all steps launched so far."""
        return self._launched

    def launch(self, step: NextStep) -> Batch:
        """Puts a step after the others."""
        assert not self.full, f"{STEPS_MAX} steps are in flight"
        assert step.number == self._launched + 1, f"step {step.number} after step {self._launched}"
        self._launched = number = step.number
        # `next_decode` has set the places of the decodes.
        for index in range(step.num_decodes, len(step.states)):
            step.states[index].row_index = index
        rows, snapshots = tuple(step.rows), tuple(step.snapshots)
        scored = bool(step.scores)
        plain = StepWork(step.plain.decode_rows, step.plain.keys, step.work.prompt_tokens, step.work.pairs)
        prepared = step.unfolds, step.late, step.waits_for_layer, plain, bool(self._steps)
        launched = Step(number, step.states, rows, step.started, step.work, scored, snapshots, *prepared)
        self._steps.append(launched)
        scores = tuple(sorted((state.row_index, score) for state, score in step.scores))
        restores, copies = tuple(step.restores), tuple(step.copies)
        pools = tuple(sorted((state.row_index, pool) for state, pool in step.pools))
        others = scores, restores, copies, pools, step.num_layer_drafts, step.writes_draft_kv
        return Batch(number, launched.rows, step.layers_per_group, *others)

    @property
    def oldest(self) -> Step:
        """The step that runs, or that has ended and is not removed yet."""
        return self._steps[0]

    def end_oldest(self) -> Step:
        """Removes the oldest step."""
        return self._steps.popleft()

    def has_row_of(self, state: RequestState) -> bool:
        """Whether a step in flight has a row of the request."""
        return any(state in step.states for step in self._steps)
