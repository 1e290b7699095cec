"""One node's engine: the real scheduler, and in place of a GPU a cache whose cells are compared with the reference.

Steps take virtual time, and the next one is scheduled while one runs, as in `baton.engine.engine`. A block that is
taken anew starts unwritten; every step compares each cell that it reads (I2), and block counts are checked after each
change (I1).
"""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from baton.core.errors import BatonError, InternalError
from baton.core.types import FinishReason, PromptLogprob, TokenOutput
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineLoad, EngineRequest, ModelFacts, Reservation
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.scheduler import Scheduler
from tests.simulation.invariants import violated
from tests.simulation.network import Life
from tests.simulation.reference import (
    EMPTY,
    EOS,
    MAX_CONTEXT_TOKENS,
    NUM_LAYERS,
    UNWRITTEN,
    VOCAB_SIZE,
    follow,
    kv,
    next_token,
    prompt_logprob,
    states_of,
)
from tests.simulation.scenario import Sizes


class _Blocks(BlockManager):
    """The real block manager; reports which blocks are allocated anew."""

    def __init__(self, num_blocks: int, on_fresh: Callable[[int], None]) -> None:
        super().__init__(num_blocks)
        self._on_fresh = on_fresh

    def take(self, cached: Sequence[int], num_fresh: int) -> list[int]:
        blocks = super().take(cached, num_fresh)
        for block in blocks[len(cached) :]:
            self._on_fresh(block)
        return blocks

    @property
    def counts(self) -> list[int]:
        return self._references


class Cache:
    """Cells by layer, block and offset.

    Attributes:
        generations: how often each block has been taken anew.
        counts: references of each block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.generations = [0] * num_blocks
        self.layers = [[[UNWRITTEN] * block_size for _ in range(num_blocks)] for _ in range(NUM_LAYERS)]
        self.counts: list[int] = []

    def renew(self, block: int) -> None:
        self.generations[block] += 1
        for layer in self.layers:
            layer[block] = [UNWRITTEN] * self.block_size

    def held(self, blocks: Sequence[int]) -> list[int]:
        """The generations of these blocks, to be compared with later ones.

        Raises:
            Violation: no request holds one of them.
        """
        for block in blocks:
            if self.counts[block] == 0:
                violated("I1", f"block {block} is used although it is free")
        return [self.generations[block] for block in blocks]


class _Sequence:
    """A request's expected tokens, and the expected content of its cells."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.states = states_of(tokens)

    def append(self, token: int) -> None:
        self.states.append(follow(self.states[-1] if self.states else EMPTY, token))
        self.tokens.append(token)


class Device:
    """The engine of one node.

    Args:
        on_step: gets each step's events.
        on_freed: called when blocks may have become free.
    """

    def __init__(
        self,
        life: Life,
        random: Random,
        sizes: Sizes,
        *,
        stream_share: float,
        on_step: Callable[[StepEvents], None],
        on_change: Callable[[], None],
    ) -> None:
        self.cache = Cache(sizes.num_blocks, sizes.block_size)
        self.slow = 1.0
        self.steps_to_fail = 0
        self._life = life
        self._random = random
        self._on_step = on_step
        self._on_change = on_change
        limits = EngineLimits(
            max_batch_tokens=sizes.batch_tokens,
            max_batch_requests=sizes.batch_tokens,
            max_waiting=sizes.max_waiting,
            prefix_cache=True,
            stream_share=stream_share,
        )
        facts = ModelFacts(sizes.num_blocks, sizes.block_size, VOCAB_SIZE, MAX_CONTEXT_TOKENS, (EOS,), "model")
        self.scheduler = Scheduler(limits, facts)
        blocks = _Blocks(sizes.num_blocks, self.cache.renew)
        self.cache.counts = blocks.counts
        # The scheduler makes its block manager itself.
        self.scheduler._blocks._pools = self.scheduler._blocks.search._pools = (blocks,)
        self._launched: deque[Batch] = deque()
        self._drawn: list[TokenOutput | None] = []  # of the last completed step
        self._sequences: dict[str, _Sequence] = {}
        self._failed: set[str] = set()
        self._aborting: list[tuple[str, Callable[[], None]]] = []

    # ---- commands of machines

    def submit(self, request: EngineRequest, now_s: float) -> None:
        self.scheduler.submit(request, now_s)
        self._begin(request.request_id, (*request.prompt, *request.output))

    def reserve(self, request: EngineRequest, now_s: float) -> Reservation:
        reservation = self.scheduler.reservations.reserve(request, now_s)
        self._begin(request.request_id, (*request.prompt, *request.output))
        return reservation

    def extend_reserved(self, request_id: str, output: tuple[int, ...]) -> Reservation:
        reservation = self.scheduler.reservations.extend(request_id, output)
        self._extend(request_id, output)
        return reservation

    def prefill_here(self, request_id: str, output: tuple[int, ...], now_s: float, *, received_tokens: int) -> None:
        self.scheduler.reservations.prefill_here(request_id, output, now_s, received_tokens=received_tokens)
        self._extend(request_id, output)

    def admit(self, request_id: str, first: TokenOutput) -> FinishReason | None:
        reason = self.scheduler.reservations.admit(request_id, first)
        self._sequences[request_id].append(first.token_id)
        self._changed()
        return reason

    def abort(self, request_id: str, on_done: Callable[[], None]) -> None:
        """`on_done` is called when the request's blocks are free, which may take the step that runs."""
        in_step = self.scheduler.abort(request_id)
        self._changed()
        if in_step:
            self._aborting.append((request_id, on_done))
        else:
            self._life.after(0.0, on_done)

    def blocks_of(self, request_id: str) -> tuple[int, ...]:
        state = self.scheduler._roster.find(request_id)
        return () if state is None else tuple(state.blocks)

    @property
    def load(self) -> EngineLoad:
        return self.scheduler.load()

    # ---- steps

    def _begin(self, request_id: str, tokens: tuple[int, ...]) -> None:
        self._sequences[request_id] = _Sequence(tokens)
        self._changed()

    def _extend(self, request_id: str, output: tuple[int, ...]) -> None:
        state = self.scheduler._roster.find(request_id)
        assert state is not None
        self._begin(request_id, (*state.request.prompt, *output))

    def _changed(self) -> None:
        """Schedules what can run, after whatever is being done now."""
        self._on_change()
        if not self._launched:
            self._life.after(0.0, self._launch)

    def _launch(self) -> None:
        while (batch := self.scheduler.schedule(self._life.now_s)) is not None:
            self._launched.append(batch)
            if len(self._launched) == 1:
                self._run(batch)

    def _run(self, batch: Batch) -> None:
        seconds = self.slow * (0.002 + 0.004 * self._random.random())
        if batch.layers_per_group:
            self._life.after(seconds / 2, self._first_layers)
        self._life.after(seconds, self._land)

    def _first_layers(self) -> None:
        batch = self._launched[0]
        stop = batch.layers_per_group
        for row in batch.rows:
            self._write(row, range(stop), self._tokens(row))
        self._on_step(self.scheduler.layers_computed(stop))

    def _land(self) -> None:
        batch = self._launched.popleft()
        if self.steps_to_fail:
            self.steps_to_fail -= 1
            # Their rows in the next step are void: their results are ignored.
            self._failed.update(row.request_id for row in batch.shared_rows)
            self._drawn = [None] * len(batch.shared_rows)
            events = self.scheduler.fail(InternalError("an engine step failed"), 0.0)
        else:
            self._drawn = [self._compute(row) for row in batch.rows]
            scores = {place: self._score(batch.rows[place], score) for place, score in batch.scores}
            events = self.scheduler.complete(self._drawn, 0.0, scores)
        self._on_change()
        if self._launched:
            self._run(self._launched[0])
        self._launch()
        waiting, self._aborting = self._aborting, []
        for request_id, on_done in waiting:
            if self.scheduler.abort(request_id):
                self._aborting.append((request_id, on_done))
            else:
                self._life.after(0.0, on_done)
        self._on_step(events)

    def _tokens(self, row: BatchRow) -> list[int] | None:
        """The tokens that the row computes; None when a step of its request has failed."""
        if row.request_id in self._failed:
            return None
        if row.token_source is None:
            return list(row.token_ids)
        drawn = self._drawn[row.token_source]
        assert drawn is not None, "only failed requests have drawn nothing"
        return [drawn.token_id]

    def _compute(self, row: BatchRow) -> TokenOutput | None:
        """Reads the cells before the row, writes the row's, and draws the next token."""
        tokens = self._tokens(row)
        if tokens is None:
            return TokenOutput(0, row.sample.output_index) if row.sample is not None else None
        self._read(row)
        self._write(row, range(NUM_LAYERS), tokens)
        if row.sample is None:
            return None
        sequence = self._sequences[row.request_id]
        token = next_token(sequence.states[row.token_stop - 1])
        if len(sequence.tokens) == row.token_stop:
            sequence.append(token)
        return TokenOutput(token, row.sample.output_index)

    def _score(self, row: BatchRow, score: ScoreRow) -> list[PromptLogprob]:
        """The logprobs of the tokens that follow those of the row."""
        states = self._sequences[row.request_id].states[row.token_start : row.token_stop]
        return [
            prompt_logprob(state, target, score.alternatives)
            for state, target in zip(states, score.targets, strict=False)
        ]

    def _read(self, row: BatchRow) -> None:
        states = self._sequences[row.request_id].states
        size = self.cache.block_size
        for layer, blocks in enumerate(self.cache.layers):
            for index in range(-(-row.token_start // size)):
                stop = min(size, row.token_start - index * size)
                first = index * size
                right = [kv(state, layer) for state in states[first : first + stop]]
                if blocks[row.block_ids[index]][:stop] != right:
                    found = blocks[row.block_ids[index]][:stop]
                    wrong = next(offset for offset in range(stop) if found[offset] != right[offset])
                    what = "was not written" if found[wrong] == UNWRITTEN else "was written for something else"
                    violated(
                        "I2",
                        f"{self._life.address}: request {row.request_id} reads token {first + wrong}, layer {layer}, "
                        f"block {row.block_ids[index]}, which {what}",
                    )

    def _write(self, row: BatchRow, layers: range, tokens: list[int] | None) -> None:
        if tokens is None:
            return
        sequence, size = self._sequences[row.request_id], self.cache.block_size
        if sequence.tokens[row.token_start : row.token_stop] != tokens:
            violated("I4", f"{self._life.address}: request {row.request_id} computes {tokens} at {row.token_start}")
        for position in range(row.token_start, row.token_stop):
            block, offset = row.block_ids[position // size], position % size
            for layer in layers:
                self.cache.layers[layer][block][offset] = kv(sequence.states[position], layer)

    # ---- invariants

    def check_blocks(self) -> None:
        """I1: every block's count is the number of requests that hold it."""
        holders = [0] * len(self.cache.counts)
        for states in (self.scheduler._roster.everyone(), self.scheduler._requests.void):
            for state in states:
                for block in state.blocks:
                    holders[block] += 1
        if holders != self.cache.counts:
            violated("I1", f"{self._life.address}: blocks have {self.cache.counts} references and {holders} holders")

    def check_free(self) -> None:
        """I1, when nothing runs."""
        load = self.load
        if load.blocks_free != load.blocks_total:
            names = [state.request_id for state in self.scheduler._roster.everyone()]
            violated("I1", f"{self._life.address}: {load.blocks_free} of {load.blocks_total} blocks are free; {names}")


def refused_by(action: Callable[[], object]) -> BatonError | None:
    """The error that the engine raises."""
    try:
        action()
    except BatonError as error:
        return error
    return None
