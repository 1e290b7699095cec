"""The scheduler's state of one live request: tokens, blocks, how much KV is computed, when it ends. Pure."""

from enum import Enum
from typing import NamedTuple

from baton.core.block_keys import BlockKey, KeyChain
from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.types import FinishReason, PromptLogprob
from baton.engine.batch import BatchRow, ScoreRow
from baton.engine.pooling import PoolSum
from baton.engine.request import EngineRequest, IntArray, QueuePlace, int_array
from baton.engine.request_checks import check_continuation, check_output
from baton.engine.sampling.row import SampleRows

# Shared by all rows whose token the host does not know yet; nobody writes to it.
_UNKNOWN_TOKEN = int_array([0])


class RequestPhase(Enum):
    """The phase of a request. WAITING holds no blocks. RUNNING is scheduled. RESERVED waits for KV, READY for a seat,
    HELD for its release; all three keep blocks.

    ENDED keeps blocks only while a step in flight has a row of the request.
    """

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    READY = "ready"
    HELD = "held"
    ENDED = "ended"


class End(NamedTuple):
    """Why a request ends. `stop_reason` is the id of its own stop token as text, if one ended it."""

    reason: FinishReason | None
    stop_reason: str


NO_END = End(None, "")


class RequestState:
    """One live request.

    Attributes:
        place: among the waiting requests, and among the running ones.
        queued_at: when it began to wait for computation here.
        waited_s: how long its client had waited by then.
        due_s: when its first token is due; None: never, or it is late already, or it has been sampled.
        tokens: prompt and output as far as they are known.
        blocks: the request's blocks in order; empty while it waits.
        owner: the rank that has the blocks; None: every rank has blocks of these numbers, or it has none.
        num_cached: leading tokens whose KV came from the prefix cache, when it first got blocks.
        restart_at: first token to compute here if no state arrives; less than `num_cached` if the recurrent state after
            the cached tokens is not kept.
        num_computed: leading tokens whose KV is in `blocks`.
        num_scheduled: leading tokens whose KV is in `blocks` or is being computed by a step in flight.
        row_index: place of the request's row in the last step that has one.
        shared_row: this row, if the next step may share it at the same place; None: the next step needs a new row.
        prompt_tokens: the length of its prompt, without any output.
        prefill_stop: number of tokens computed as prompt; later ones are decoded one by one, or elsewhere.
        splits: the request ends before its last known token or with it, without a sampled one.
        decode_stop: total number of tokens to compute, if the request decodes; else 0.
        steady_stop: while fewer tokens are scheduled, the request decodes and has a slot for its next token; 0: not
            known.
        end_token_ids: token ids that may end the request.
        num_registered: leading blocks that were offered to the prefix cache, or came from it.
        is_shared: later requests may use its blocks; False from the time when its tenant's KV is dropped, or when the
            layer that drafts no longer computes its tokens.
        entry_keys: keys of its entries, from the time when the first is offered to the stores outside of the cache.
        num_offered: leading entries that were offered to these stores, or came from the prefix cache.
        num_shown: leading entries that followers of the prefix cache have seen; only for models with states.
        num_reported: leading blocks that followers of the prefix cache have seen; only for models with states.
        windows_from: layers with a sliding window may lack the KV of tokens before this one.
        state_slot: slot of its recurrent state, from the time when it holds blocks; -1: none.
        restore_from: the slot with the state that it continues from, until its first step has ended; its own slot if
            that has the state already; -1: none.
        state_tokens: longest known prefix after which there is a snapshot of its state.
        passing: key of its last snapshot, if no other request is likely to have that prefix.
        snapshot_stops: token counts after which to take snapshots, in order, because a later prompt is likely to share
            these prefixes.
        scored: logprobs of the prompt's tokens from the second on, as far as they are computed; None: none are wanted,
            or all have been reported.
        pooling: the sum of the prompt's hidden states that are pooled; None: nothing is pooled.
        is_followed: whether tokens are drafted from its sequence.
    """

    # NOTE: Python keeps more than 30 attributes in a slower dictionary, and every step reads several of each request.
    __slots__ = (
        "_adapter", "_eos_token_ids", "_grammar_ends", "_max_tokens", "_min_tokens", "_row_blocks", "_samples",
        "_stop_token_ids", "blocks", "decode_stop", "due_s", "end_token_ids", "entry_keys", "is_followed",
        "is_shared", "keys", "num_cached", "num_computed", "num_offered", "num_registered",
        "num_reported", "num_scheduled", "num_shown", "owner", "passing", "phase", "place", "pooling",
        "prefill_only", "prefill_stop", "prompt_tokens", "queued_at", "request", "request_id", "restart_at",
        "restore_from", "row_index", "scored", "shared_row", "snapshot_stops", "splits", "started",
        "state_slot", "state_tokens", "steady_stop", "tokens", "waited_s", "windows_from",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        *,
        place: QueuePlace,
        queued_at: float,
        keys: KeyChain,
        eos_token_ids: tuple[int, ...],
        max_context_tokens: int,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prefill_only = request.prefill_only
        self._adapter = request.adapter_slot
        self.place = place
        self.queued_at, self.waited_s = queued_at, request.waited_s
        self.due_s = None if request.output else request.due_s
        self.splits = request.stop_tokens is not None or request.pool is not None
        self.pooling = None if request.pool is None else PoolSum(request.pool)
        self.keys = keys
        self.phase = RequestPhase.WAITING
        self.tokens = request.tokens
        self.blocks: IntArray = int_array()
        self.owner: int | None = None
        self.num_cached = self.restart_at = 0
        self.num_computed = 0
        self.num_scheduled = 0
        self.row_index = 0
        self.shared_row: BatchRow | None = None
        self.steady_stop = 0
        self.num_registered = self.num_reported = 0
        self.is_shared = True
        self.entry_keys: KeyChain | None = None
        self.num_offered = self.num_shown = 0
        self.windows_from = 0
        self.state_slot = self.restore_from = -1
        self.state_tokens = 0
        self.passing: BlockKey | None = None
        self.snapshot_stops: tuple[int, ...] = ()
        self.prefill_stop = self._prompt_stop
        self.started = False
        self.is_followed = False
        self.scored: list[PromptLogprob] | None = None
        sampling = request.sampling
        self.prompt_tokens = len(request.prompt)
        self._min_tokens = sampling.min_tokens
        context_tokens = request.decode_context_tokens or max_context_tokens
        self._max_tokens = min(self.prompt_tokens + sampling.max_tokens, context_tokens)
        # The KV of the last token is never computed.
        self.decode_stop = 0 if self.prefill_only else self._max_tokens - 1
        self._row_blocks: IntArray = int_array()
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self.end_token_ids = self._eos_token_ids | self._stop_token_ids
        # A grammar allows these tokens only where the output may end, and such a token must end it.
        self._grammar_ends = frozenset() if sampling.grammar is None else frozenset(eos_token_ids)
        self._samples = SampleRows(sampling, prompt_tokens=self.prompt_tokens, end_token_ids=self.end_token_ids)
        self.end_token_ids |= self._grammar_ends

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def _prompt_stop(self) -> int:
        return self.request.stop_tokens or len(self.tokens)

    @property
    def prefilling(self) -> bool:
        """Whether part of its prompt is in no step yet."""
        return self.num_scheduled < self.prefill_stop

    @property
    def decoding(self) -> bool:
        """Whether its next row is a decode: the prompt is scheduled, and the last possible token is not being drawn
        yet."""
        return self.prefill_stop <= self.num_scheduled < self.decode_stop

    @property
    def most_drafts(self) -> int:
        """Most tokens that may be drafted for its next step: more could not be part of its output."""
        return max(0, self.decode_stop - self.num_scheduled - 1)

    @property
    def prompt_remaining(self) -> int:
        """Tokens of the prompt whose KV is not computed yet."""
        return max(0, self.prefill_stop - self.num_computed)

    @property
    def reusable_tokens(self) -> int:
        """Number of leading tokens whose KV may come from the prefix cache: all but one, or only those whose logprobs
        are known, because logprobs come from the hidden states of the tokens before, or only those before a pooled
        span."""
        if self.pooling is not None:
            return self.pooling.span.start
        return self.prefill_stop - 1 if self.scored is None else len(self.scored)

    @property
    def pool(self) -> int:
        """Number of the pool that the blocks are from."""
        return self.owner or 0

    def hold(
        self, blocks: list[int], *, owner: int | None, num_cached_blocks: int, restart_at: int, block_size: int
    ) -> None:
        """Gives it blocks of one owner; the first `num_cached_blocks` come from the prefix cache."""
        self.blocks, self.owner = int_array(blocks), owner
        self._row_blocks = int_array()
        self.num_registered = num_cached_blocks
        self.num_offered = self.num_shown = num_cached_blocks * block_size // ENTRY_TOKENS
        self.num_computed = self.num_scheduled = num_cached_blocks * block_size
        self.restart_at = restart_at
        self.prefill_stop = self._prompt_stop
        if self.scored is not None:
            del self.scored[self.num_computed :]  # computed again
        if self.pooling is not None:
            self.pooling.restart()
        if not self.started:
            self.num_cached = self.num_computed

    def restart(self, blocks: list[int], *, block_size: int) -> None:
        """Lets it compute its tokens from `restart_at` on here. These blocks replace the cached ones from there on; it
        has no row yet."""
        first = self.restart_at // block_size
        self.blocks[first : first + len(blocks)] = int_array(blocks)
        self.num_registered = first
        self.num_offered = self.num_shown = self.restart_at // ENTRY_TOKENS
        self.num_cached = self.num_computed = self.num_scheduled = self.restart_at

    def drop_blocks(self) -> IntArray:
        """Takes all blocks and their KV away; returns the blocks."""
        blocks, self.blocks = self.blocks, int_array()
        self.num_computed = self.num_scheduled = self.num_registered = self.num_reported = 0
        self.num_offered = self.num_shown = 0
        self.windows_from = self.steady_stop = 0
        self.shared_row = None
        self.prefill_stop = self._prompt_stop
        return blocks

    def drop_state(self) -> None:
        self.state_slot = self.restore_from = -1
        self.state_tokens, self.passing, self.snapshot_stops = 0, None, ()

    def fill(self) -> None:
        """Records that the KV of all its tokens has arrived in its blocks."""
        self.num_computed = self.num_scheduled = self.prefill_stop = len(self.tokens)
        self.started = True

    def receive(self, num_tokens: int) -> None:
        """Records that the KV of `num_tokens` leading tokens is in its blocks, cached or received."""
        self.num_computed = self.num_scheduled = num_tokens

    def replace_output(self, output: tuple[int, ...]) -> None:
        self.tokens = int_array(self.request.prompt) + int_array(output)
        self.prefill_stop = len(self.tokens)
        if output:
            self.due_s, self.place = None, self.place.as_begun()

    def score_prompt(self) -> None:
        """Starts to collect prompt logprobs, if they are wanted, because its prompt is computed here."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.num_output == 0
        self.scored = [] if wanted else None

    def score_row(self, row: BatchRow) -> ScoreRow | None:
        """The prompt logprobs that this row computes. Returns None if none are wanted."""
        alternatives = self.request.sampling.prompt_logprobs
        if self.scored is None or alternatives is None:
            return None
        return ScoreRow(self.tokens[row.token_start + 1 : row.token_stop + 1], alternatives)

    def take_scores(self) -> tuple[PromptLogprob, ...]:
        """Takes the logprobs of the whole prompt; no more are collected."""
        assert self.scored is not None
        scored, self.scored = self.scored, None
        return PromptLogprob(self.tokens[0], None), *scored

    def next_decode(self, place: int, *, step: int, block_size: int) -> BatchRow:
        """Makes its `next_row` of one token, at this place of this step. The row becomes `shared_row` if later steps
        can share it until the request's blocks change."""
        row = self.next_row(1, block_size=block_size, since=step if place == self.row_index else None)
        self.row_index = place
        if row.since is not None:
            self.shared_row = row
        return row

    def next_row(self, num_tokens: int, *, block_size: int, since: int | None = None) -> BatchRow:
        """Makes its row of the next step, which computes `num_tokens` more tokens. They count as scheduled from now on.

        After the known tokens comes the one that the previous step draws.

        Args:
            since: the step that makes the row, if later steps may share it.
        """
        self.shared_row = None
        start, known = self.num_scheduled, len(self.tokens)
        self.num_scheduled = stop = start + num_tokens
        pending = start == known
        num_blocks = -(-stop // block_size)
        # NOTE: blocks are copied only when they change. The device thread reads this array while `blocks` may grow.
        if len(self._row_blocks) != num_blocks:
            self._row_blocks = self.blocks[:num_blocks]
        sample = None
        if stop >= known and self.pooling is None:
            output_index = stop - self.prompt_tokens
            sample = self._samples.row(output_index, self.tokens)
            if sample.forbidden or sample.history:  # the next row differs in more than its index
                since = None
        tokens, source = (_UNKNOWN_TOKEN, self.row_index) if pending else (self.tokens[start:stop], None)
        since = since if pending else None
        shared = self._row_blocks, sample, source, since, self._adapter, self.state_slot, self.pool
        next_token = self.tokens[stop] if sample is None and stop < known else -1
        return BatchRow(self.request_id, tokens, start, *shared, next_token=next_token)

    def next_drafts(self, draft: tuple[int, ...], *, block_size: int) -> BatchRow:
        """Makes its row of the next step, which computes its newest token, and these drafts after it. Only the newest
        token counts as scheduled."""
        assert self.num_scheduled == len(self.tokens) - 1, "a draft token follows tokens that are known"
        row = self.next_row(1, block_size=block_size)
        stop = row.token_start + 1 + len(draft)
        blocks = self.blocks[: -(-stop // block_size)]
        return row._replace(token_ids=row.token_ids + int_array(draft), block_ids=blocks, num_drafts=len(draft))

    def append(self, token_id: int) -> End:
        """Adds its next token. Returns NO_END when more tokens follow."""
        self.tokens.append(token_id)
        return self.end_at(token_id)

    def end_at(self, token_id: int) -> End:
        """Whether and why it ends with this token, the last of `tokens`."""
        if token_id in self._grammar_ends or (token_id in self.end_token_ids and self.num_output > self._min_tokens):
            own = token_id in self._stop_token_ids and token_id not in self._eos_token_ids
            return End(FinishReason.STOP, str(token_id) if own else "")
        return End(FinishReason.LENGTH, "") if len(self.tokens) >= self._max_tokens else NO_END

    def check_continuation(self, output: tuple[int, ...], *, vocab_size: int, max_context_tokens: int) -> None:
        """Checks that `output`, the whole output so far, continues the request's tokens; raises InvalidRequest
        otherwise."""
        check_continuation(tuple(self.tokens[self.prompt_tokens :]), output)
        check_output(self.request, output, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
