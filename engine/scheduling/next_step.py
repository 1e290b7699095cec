"""A step in the making: first everybody's decodes, then chunks of prompts for as long as there is budget. Pure."""

from engine.batch import BatchRow
from engine.events import RequestStarted
from engine.request import EngineLimits
from engine.scheduling.state import RequestState


class NextStep:
    """Its rows, those of a single token first, and whose they are.

    Attributes:
        number: of the step.
        budget: tokens that still fit.
        started: of requests whose first row is in this step, by name.
        num_decodes: rows that `add_decodes` has made; they stand in front.
        layers_per_group: the smallest that one of the prompts wants; 0: none wants any.
    """

    def __init__(self, number: int, limits: EngineLimits, *, block_size: int, now: float) -> None:
        self.number = number
        self.states: list[RequestState] = []
        self.rows: list[BatchRow] = []
        self.started: dict[str, RequestStarted] = {}
        self.budget = limits.max_batch_tokens
        self.num_decodes = 0
        self.layers_per_group = 0
        self._num_single = 0
        self._limits = limits
        self._block_size = block_size
        self._now = now

    def add_decodes(self, states: list[RequestState]) -> None:
        """The next token of each, in that order. First of all."""
        rows = self.rows
        for place, state in enumerate(states):
            row = state.shared_row
            if row is None or place != state.row_index or not state.num_pending:
                row = state.next_decode(place, step=self.number, block_size=self._block_size)
            else:  # as in the step in front, one token further on
                state.num_scheduled += 1
                state.num_pending += 1
            rows.append(row)
        self.states += states
        self.num_decodes = self._num_single = len(states)
        self.budget -= len(states)

    def add_chunk(self, state: RequestState) -> None:
        """As much of the request's prompt as fits, which may be nothing."""
        num_tokens = self._limits.chunk_tokens(state.num_scheduled, state.prefill_stop, self.budget)
        if not num_tokens:
            return
        if not state.started:
            state.started = True
            queue_s = self._now - state.queued_at
            self.started[state.request_id] = RequestStarted(state.request_id, state.num_cached, queue_s)
        index = self._num_single if num_tokens == 1 else len(self.rows)
        self.states.insert(index, state)
        self.rows.insert(index, state.next_row(num_tokens, block_size=self._block_size))
        self.budget -= num_tokens
        self._num_single += num_tokens == 1
        if wanted := state.request.layers_per_group:
            self.layers_per_group = min(wanted, self.layers_per_group or wanted)
