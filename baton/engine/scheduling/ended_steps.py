"""What a step's end means for its requests: their tokens, what they leave in the prefix cache, and which of them end.
Pure."""

from collections.abc import Mapping, Sequence

from baton.core.errors import BatonError
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import BatchRow, LayerDrafts, RowResult
from baton.engine.events import (
    ChunkComputed,
    DraftsChecked,
    PromptPooled,
    RequestFailed,
    RequestStarted,
    StepEvents,
    token_sampled,
)
from baton.engine.pooling import PooledRows
from baton.engine.scheduling.costs import Costs
from baton.engine.scheduling.drafts import Drafts, Sampled
from baton.engine.scheduling.request_table import RequestTable
from baton.engine.scheduling.state import RequestPhase, RequestState


class EndedSteps:
    """Ends the steps of one scheduler, oldest first.

    Args:
        drafts: None: no step has drafts.
    """

    def __init__(self, requests: RequestTable, meter: Costs, drafts: Drafts | None, *, block_size: int) -> None:
        self._requests = requests
        self._blocks = requests.blocks
        self._meter = meter
        self._drafts = drafts
        self._block_size = block_size

    def complete(
        self,
        results: Sequence[RowResult],
        seconds: float,
        scores: Mapping[int, Sequence[PromptLogprob]],
        pools: PooledRows,
        layer_drafts: LayerDrafts | None,
        waited_s: float | None,
        *,
        shares_keys: bool,
    ) -> StepEvents:
        """Ends the oldest step in flight as `Scheduler.complete` says."""
        started: list[RequestStarted] = []
        chunks: list[ChunkComputed] = []
        sampled: list[Sampled] = []
        failed: list[RequestFailed] = []
        pooled: list[RequestState] = []
        checked: list[DraftsChecked] = []
        block_size, running = self._block_size, RequestPhase.RUNNING  # locals are looked up faster for every row
        step = self._requests.end_oldest_step()
        likely = self._blocks.states.end_snapshots(step, results)
        for snapshot in step.snapshots:
            self._blocks.report(snapshot.state)
        self._blocks.offer_states(likely)
        scored = step.collect_scores(results, scores) if scores else ()
        step.collect_pools(pools)
        for state, row, token in zip(step.states, step.rows, results, strict=True):
            if state.phase is not running:  # a void row
                self._blocks.states.drop_drafts(row)
                continue
            start = state.num_computed
            # Nearly every row of a decode node takes this path, so it has only what a decode needs.
            if row.since is not None and token.__class__ is TokenOutput:
                state.num_computed = stop = start + 1
                state.tokens.append(token.token_id)
                if not stop % block_size:
                    self._blocks.register(state)
                if stop < state.decode_stop and token.token_id not in state.end_token_ids:
                    sampled.append((state.request_id, token, None, ""))
                else:
                    sampled.append(self._last_token(state, token))
                continue
            if row.num_drafts:
                self._check_drafts(state, row, token, checked, sampled, failed)
                continue
            state.num_computed = stop = start + len(row.token_ids)
            if start < state.prefill_stop:
                blocks = tuple(state.blocks)
                chunks.append(ChunkComputed(state.request_id, start, stop, blocks, state.state_slot, state.owner))
                self._blocks.states.restored(state)
                if state.request_id in step.started:
                    started.append(step.started[state.request_id])
                if state.splits and stop == state.prefill_stop:
                    if state.pooling is None:
                        self._requests.stop_running(state)
                    elif token is None:
                        pooled.append(state)
            if isinstance(token, BatonError):
                failed.append(self._failed(state, token))
                continue
            if stop // block_size > start // block_size:
                self._blocks.register(state)
            if token is None:
                continue
            assert isinstance(token, TokenOutput), "only rows with drafts yield several tokens"
            state.tokens.append(token.token_id)
            if stop >= state.decode_stop or token.token_id in state.end_token_ids:
                sampled.append(self._last_token(state, token))
            else:
                sampled.append((state.request_id, token, None, ""))
            if start < state.prefill_stop and state.phase is running:
                self._requests.begin(state)
        for_others = (
            () if layer_drafts is None or self._drafts is None else self._drafts.layer_ended(step, layer_drafts)
        )
        pooled_events = tuple(map(self._end_pooled, pooled))
        self._requests.fill_seats()
        if self._drafts is not None:
            passes_s = 0.0 if layer_drafts is None else layer_drafts.seconds
            self._drafts.ended(step, seconds, waited_s, checked, passes_s)
        if not (step.scores or shares_keys) and (not step.late or step.work.prompt_tokens):
            # A step that reads shared keys once would make steps that share none seem cheap. The device's time for a
            # late step has a part in which it waited for the host to queue the step.
            self._meter.observe(step.work, seconds)
        tokens = tuple(map(token_sampled, sampled))
        return StepEvents(
            step.number,
            seconds,
            tuple(started),
            tuple(chunks),
            tokens,
            failed=tuple(failed),
            scored=scored,
            pooled=pooled_events,
            drafts=tuple(checked),
            drafted=for_others,
        )

    def fail(self, error: BatonError, seconds: float) -> StepEvents:
        """Fails the oldest step in flight as `Scheduler.fail` says."""
        step = self._requests.end_oldest_step()
        self._blocks.states.end_snapshots(step, None)
        failed = [state for state in step.states if state.phase is RequestPhase.RUNNING]
        for state in failed:
            self._requests.stop_running(state)
        self._requests.fill_seats()
        events = tuple(RequestFailed(state.request_id, error) for state in failed)
        return StepEvents(step.number, seconds, failed=events)

    def _last_token(self, state: RequestState, token: TokenOutput) -> Sampled:
        """Ends a request if this token, its newest one, ends it. A `prefill_only` request has no other token."""
        reason, stop_reason = state.end_at(token.token_id)
        if reason is not None or state.prefill_only:
            self._requests.stop_running(state)
        return state.request_id, token, reason, stop_reason

    def _check_drafts(
        self,
        state: RequestState,
        row: BatchRow,
        drawn: RowResult,
        checked: list[DraftsChecked],
        sampled: list[Sampled],
        failed: list[RequestFailed],
    ) -> None:
        """Ends a row with drafts: adds what it has drawn to the step's events."""
        if isinstance(drawn, BatonError):
            state.num_computed = row.token_start + 1
            self._blocks.states.end_drafts(state, row, 0)
            failed.append(self._failed(state, drawn))
            return
        assert self._drafts is not None, "only a scheduler with drafts makes such rows"
        assert isinstance(drawn, tuple), "a row with drafts yields several tokens"
        was = state.num_computed
        drafts, tokens = self._drafts.checked(state, row.num_drafts, drawn)
        checked.append(drafts)
        sampled += tokens
        self._blocks.states.end_drafts(state, row, len(tokens) - 1)
        if state.num_computed // self._block_size > was // self._block_size:
            self._blocks.register(state)
            if row.draft_slots:
                self._blocks.report(state)
        if tokens[-1][2] is not None:
            self._requests.stop_running(state)

    def _failed(self, state: RequestState, error: BatonError) -> RequestFailed:
        self._blocks.forget(state)
        self._requests.stop_running(state)
        return RequestFailed(state.request_id, error)

    def _end_pooled(self, state: RequestState) -> PromptPooled:
        """Ends a request whose span is pooled. Nobody reads its KV, so its blocks are free at once."""
        assert state.pooling is not None
        self._requests.end(state)
        return PromptPooled(state.request_id, state.pooling.mean())
