"""What the scheduler keeps of one live request: its tokens, its blocks, how far its KV is, when it ends. Pure."""

from enum import Enum
from typing import NamedTuple

from baton.types import FinishReason
from engine.batch import BatchRow, SampleRow
from engine.request import EngineRequest, IntArray, check_continuation, check_output, int_array
from engine.scheduling.block_manager import KeyChain

# Shared by all rows that have no more to say; nobody writes to them.
_UNKNOWN_TOKEN = int_array([0])
_NO_HISTORY = int_array()


class Phase(Enum):
    """WAITING holds no blocks. RUNNING is scheduled. RESERVED waits for KV, HELD for its release; both keep blocks.

    ENDED keeps blocks only while a step in flight has a row of it.
    """

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    HELD = "held"
    ENDED = "ended"


class End(NamedTuple):
    """Why a request ends, and with which of its own stop tokens, as text."""

    reason: FinishReason | None
    stop_reason: str


NO_END = End(None, "")


class RequestState:
    """One live request.

    Attributes:
        arrival: its number in order of arrival.
        tokens: prompt and output, as far as they are known.
        blocks: its blocks in order; empty while it waits.
        num_computed: leading tokens whose KV is in `blocks`.
        num_scheduled: leading tokens whose KV is in `blocks` or is being computed by a step in flight.
        num_pending: tokens behind `tokens` that steps in flight are drawing.
        row_index: where its row is in the last step that has one.
        shared_row: that row, if the next step may have it too, at the same place; None: it has to be made.
        prefill_stop: tokens that are computed as prompt; those behind it are decoded one by one.
        decode_stop: tokens that are ever computed, if it decodes at all.
        steady_stop: for as long as fewer are scheduled, it decodes, and has a slot for that; 0 where that is not known.
        end_token_ids: those that may end it.
        num_registered: leading blocks that were offered to the prefix cache, or came from it.
        windows_from: layers with a sliding window may lack the KV of the tokens before this one.
    """

    def __init__(
        self,
        request: EngineRequest,
        *,
        queued_at: float,
        keys: KeyChain,
        eos_token_ids: tuple[int, ...],
        max_context_tokens: int,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prefill_only = request.prefill_only
        self.arrival = 0
        self.queued_at = queued_at
        self.keys = keys
        self.phase = Phase.WAITING
        self.tokens = int_array([*request.prompt, *request.output])
        self.blocks: IntArray = int_array()
        self.num_cached = 0
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.row_index = 0
        self.shared_row: BatchRow | None = None
        self.steady_stop = 0
        self.num_registered = 0
        self.windows_from = 0
        self.prefill_stop = len(self.tokens)
        self.started = False
        sampling = request.sampling
        self._prompt_tokens = len(request.prompt)
        self._min_tokens = sampling.min_tokens
        context_tokens = request.decode_context_tokens or max_context_tokens
        self._max_tokens = min(self._prompt_tokens + sampling.max_tokens, context_tokens)
        # The last token is never computed.
        self.decode_stop = 0 if self.prefill_only else self._max_tokens - 1
        self._row_blocks: IntArray = int_array()
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self.end_token_ids = self._eos_token_ids.union(sampling.stop_token_ids)
        self._forbidden_early = tuple(sorted(self.end_token_ids))
        self._penalised = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self._prompt_tokens

    @property
    def prefilling(self) -> bool:
        """Some of its prompt is in no step yet."""
        return self.num_scheduled < self.prefill_stop

    @property
    def decoding(self) -> bool:
        """Its next row is a decode: its prompt is scheduled, and what is being drawn cannot be its last token."""
        return self.prefill_stop <= self.num_scheduled < self.decode_stop

    @property
    def prompt_remaining(self) -> int:
        """Tokens of its prompt whose KV is still to be computed."""
        return max(0, self.prefill_stop - self.num_computed)

    def hold(self, blocks: list[int], *, num_cached_blocks: int, block_size: int) -> None:
        """It has these blocks now; the first `num_cached_blocks` of them came from the prefix cache."""
        self.blocks = int_array(blocks)
        self._row_blocks = int_array()
        self.num_registered = num_cached_blocks
        self.num_computed = self.num_scheduled = num_cached_blocks * block_size
        self.prefill_stop = len(self.tokens)
        if not self.started:
            self.num_cached = self.num_computed

    def drop_blocks(self) -> IntArray:
        """It has no blocks now, and no KV; returns those that it had."""
        blocks, self.blocks = self.blocks, int_array()
        self.num_computed = self.num_scheduled = self.num_registered = self.windows_from = self.steady_stop = 0
        self.shared_row = None
        self.prefill_stop = len(self.tokens)
        return blocks

    def fill(self) -> None:
        """The KV of all its tokens has come into its blocks."""
        self.num_computed = self.num_scheduled = self.prefill_stop = len(self.tokens)
        self.started = True

    def replace_output(self, output: tuple[int, ...]) -> None:
        self.tokens = int_array([*self.request.prompt, *output])
        self.prefill_stop = len(self.tokens)

    def next_decode(self, place: int, *, step: int, block_size: int) -> BatchRow:
        """`next_row` of one token, at that place of that step. Becomes its `shared_row` if it is the same in the steps
        behind, one token further on, until its blocks change."""
        row = self.next_row(1, block_size=block_size, since=step if place == self.row_index else None)
        self.row_index = place
        if row.since is not None:
            self.shared_row = row
        return row

    def next_row(self, num_tokens: int, *, block_size: int, since: int | None = None) -> BatchRow:
        """Its part of the next step, which computes `num_tokens` more of its tokens; they count as scheduled now.

        Behind the known tokens comes the one that the step in front draws.

        Args:
            since: the row's own, where it may have one.
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
        if stop == known + self.num_pending:
            self.num_pending += 1
            output_index = stop - self._prompt_tokens
            forbidden = self._forbidden_early if output_index < self._min_tokens else ()
            history = self.tokens[:] if self._penalised else _NO_HISTORY
            sample = SampleRow(self.request.sampling, output_index, forbidden, history, self._prompt_tokens)
            if forbidden or self._penalised:
                since = None
        if not pending:
            return BatchRow(self.request_id, self.tokens[start:stop], start, self._row_blocks, sample)
        return BatchRow(self.request_id, _UNKNOWN_TOKEN, start, self._row_blocks, sample, self.row_index, since)

    def append(self, token_id: int) -> End:
        """Its next token is known; NO_END when more will follow."""
        self.tokens.append(token_id)
        return self.end_at(token_id)

    def end_at(self, token_id: int) -> End:
        """Whether and why it ends with that token, its last so far."""
        if token_id in self.end_token_ids and self.num_output > self._min_tokens:
            return End(FinishReason.STOP, "" if token_id in self._eos_token_ids else str(token_id))
        return End(FinishReason.LENGTH, "") if len(self.tokens) >= self._max_tokens else NO_END

    def check_continuation(self, output: tuple[int, ...], *, vocab_size: int, max_context_tokens: int) -> None:
        """Raises InvalidRequest when `output`, all of it so far, does not continue what the request had."""
        check_continuation(tuple(self.tokens[self._prompt_tokens :]), output)
        check_output(self.request, output, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
