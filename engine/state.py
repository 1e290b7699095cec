"""What the scheduler keeps of one live request: its tokens, its blocks, how far its KV is, when it ends. Pure."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from baton.types import FinishReason
from engine.batch import BatchRow, SampleRow
from engine.block_manager import KeyChain
from engine.events import RequestStarted
from engine.request import EngineRequest, IntArray, Reservation, check_continuation, check_output, int_array


class Phase(Enum):
    """WAITING holds no blocks. RUNNING is scheduled. RESERVED waits for KV, HELD for its release; both keep blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    HELD = "held"


class RequestState:
    """One live request.

    Attributes:
        arrival: its number in order of arrival.
        tokens: prompt and output so far.
        blocks: its blocks in order; empty while it waits.
        num_computed: leading tokens whose KV is in `blocks`.
        prefill_stop: tokens that are computed as prompt; those behind it are decoded one by one.
        num_registered: leading blocks that were offered to the prefix cache, or came from it.
        ending: aborted while in the step in flight; it goes when that step is over.
    """

    def __init__(
        self, request: EngineRequest, *, queued_at: float, keys: KeyChain, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.request = request
        self.arrival = 0
        self.queued_at = queued_at
        self.keys = keys
        self.phase = Phase.WAITING
        self.tokens = int_array([*request.prompt, *request.output])
        self.blocks: IntArray = int_array()
        self.num_cached = 0
        self.num_computed = 0
        self.num_registered = 0
        self.prefill_stop = len(self.tokens)
        self.started = False
        self.ending = False
        sampling = request.sampling
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._forbidden_early = tuple(sorted(self._eos_token_ids | self._stop_token_ids))
        self._penalised = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_remaining(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_stop

    def hold(self, blocks: list[int], *, num_cached_blocks: int, block_size: int) -> None:
        """It has these blocks now; the first `num_cached_blocks` of them came from the prefix cache."""
        self.blocks = int_array(blocks)
        self.num_registered = num_cached_blocks
        self.num_computed = num_cached_blocks * block_size
        self.prefill_stop = len(self.tokens)
        if not self.started:
            self.num_cached = self.num_computed

    def drop_blocks(self) -> IntArray:
        """It has no blocks now, and no KV; returns those that it had."""
        blocks, self.blocks = self.blocks, int_array()
        self.num_computed = self.num_registered = 0
        self.prefill_stop = len(self.tokens)
        return blocks

    def replace_output(self, output: tuple[int, ...]) -> None:
        self.tokens = int_array([*self.request.prompt, *output])
        self.prefill_stop = len(self.tokens)

    def row(self, num_tokens: int, *, block_size: int) -> BatchRow:
        """Its part of a step that computes `num_tokens` more of its tokens."""
        start, stop = self.num_computed, self.num_computed + num_tokens
        return BatchRow(
            self.request.request_id,
            token_ids=self.tokens[start:stop],
            token_start=start,
            block_ids=self.blocks[: -(-stop // block_size)],
            sample=self._sample_row() if stop == len(self.tokens) else None,
        )

    def reservation(self) -> Reservation:
        return Reservation(self.request_id, tuple(self.blocks), self.num_cached)

    def check_continuation(self, output: tuple[int, ...], *, vocab_size: int, max_context_tokens: int) -> None:
        """Raises InvalidRequest when `output`, all of it so far, does not continue what the request had."""
        check_continuation(tuple(self.tokens[len(self.request.prompt) :]), output)
        check_output(self.request, output, vocab_size=vocab_size, max_context_tokens=max_context_tokens)

    def end_of(self, token_id: int, *, max_context_tokens: int) -> tuple[FinishReason | None, str]:
        """Whether `token_id`, already the last of `tokens`, ends the request, and which stop token did."""
        sampling = self.request.sampling
        if self.num_output > sampling.min_tokens:
            if token_id in self._eos_token_ids:
                return FinishReason.STOP, ""
            if token_id in self._stop_token_ids:
                return FinishReason.STOP, str(token_id)
        if self.num_output >= sampling.max_tokens or len(self.tokens) >= max_context_tokens:
            return FinishReason.LENGTH, ""
        return None, ""

    def _sample_row(self) -> SampleRow:
        sampling = self.request.sampling
        index = self.num_output
        return SampleRow(
            params=sampling,
            output_index=index,
            forbidden=self._forbidden_early if index < sampling.min_tokens else (),
            history=self.tokens[:] if self._penalised else int_array(),
            prompt_tokens=len(self.request.prompt),
        )


class Scheduled(NamedTuple):
    state: RequestState
    row: BatchRow
    started: RequestStarted | None


def num_leased(states: Iterable[RequestState]) -> int:
    """Distinct blocks of requests whose KV is on its way, in or out."""
    leased: set[int] = set()
    for state in states:
        if state.phase in (Phase.RESERVED, Phase.HELD):
            leased.update(state.blocks)
    return len(leased)


def tokens_waiting(waiting: Iterable[RequestState], running: Iterable[RequestState]) -> int:
    """Prompt tokens that are still to be computed."""
    prefilling = (state for state in running if state.prefilling)
    return sum(state.num_remaining for state in (*waiting, *prefilling))
