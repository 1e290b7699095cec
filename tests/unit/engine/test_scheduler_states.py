"""I1, I2 and I5 by model checking: whatever clients, peers and devices do, in whatever order.

The model keeps for every cache slot the token sequence whose KV was last written there. A row may only read slots that
hold exactly its own sequence.
"""

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import InternalError, Overloaded
from baton.types import SamplingParams, TokenOutput
from engine.batch import Batch
from engine.events import StepEvents
from engine.request import EngineLimits, EngineRequest, IntArray, ModelFacts, Reservation
from engine.scheduler import Scheduler
from engine.state import Phase, RequestState

BLOCK_SIZE = 2
NUM_BLOCKS = 9
MAX_CONTEXT = 16
BUDGET = 5
SEATS = 4
EOS = 3
TOKENS = st.integers(0, EOS)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        limits = EngineLimits(max_batch_tokens=BUDGET, max_batch_requests=SEATS, max_waiting=3)
        facts = ModelFacts(
            NUM_BLOCKS, BLOCK_SIZE, vocab_size=4, max_context_tokens=MAX_CONTEXT, eos_token_ids=(EOS,), identity=""
        )
        self.scheduler = Scheduler(limits, facts)
        self.written: dict[int, bytes] = {}
        self.in_flight: Batch | None = None
        self.names = 0
        self.live: set[str] = set()  # taken in, and neither told to have ended nor aborted
        self.reserved: dict[str, Reservation] = {}
        self.held: set[str] = set()

    # ---- what clients and peers do

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 8), prefill_only=st.booleans())
    def submit(self, prompt: tuple[int, ...], max_tokens: int, prefill_only: bool) -> None:
        request = self.request(prompt, max_tokens, prefill_only=prefill_only)
        try:
            self.scheduler.submit(request, 0.0)
        except Overloaded:
            return
        self.live.add(request.request_id)

    @rule(prompt=PROMPTS, max_tokens=st.integers(3, 8), output=st.sampled_from([(), (1,), (1, 0)]))
    def reserve(self, prompt: tuple[int, ...], max_tokens: int, output: tuple[int, ...]) -> None:
        request = self.request(prompt, max_tokens, output=output)
        promised = self.scheduler.can_reserve(request)
        try:
            reservation = self.scheduler.reserve(request, 0.0)
        except Overloaded:
            assert not promised
            return
        assert promised
        assert reservation.cached_tokens % BLOCK_SIZE == 0
        assert reservation.cached_tokens < len(prompt) + len(output) < len(reservation.block_ids) * BLOCK_SIZE
        self.live.add(request.request_id)
        self.reserved[request.request_id] = reservation

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), token_id=TOKENS)
    def admit(self, data: st.DataObject, token_id: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        reservation = self.reserved.pop(name)
        state = self.states()[name]
        self.write(state.tokens, reservation.block_ids, reservation.cached_tokens, state.num_tokens)
        if self.scheduler.admit(name, TokenOutput(token_id, state.num_output)) is not None:
            self.live.remove(name)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), here=st.booleans())
    def more_output(self, data: st.DataObject, here: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        state = self.states()[name]
        output = (*state.tokens[len(state.request.prompt) :], 1)
        if len(output) >= state.request.sampling.max_tokens or state.num_tokens + 1 >= MAX_CONTEXT:
            return
        if here:
            self.scheduler.prefill_here(name, output, 0.0)
            del self.reserved[name]
            return
        try:
            self.reserved[name] = self.scheduler.extend_reserved(name, output)
        except Overloaded:
            return

    @precondition(lambda self: self.states())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.states())))
        later = self.scheduler.abort(name)
        assert later == (self.in_flight is not None and any(row.request_id == name for row in self.in_flight.rows))
        assert (name in self.states()) == later
        self.live.discard(name)
        self.held.discard(name)
        self.reserved.pop(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(name)
        self.scheduler.release(name)

    # ---- what the run loop does

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self) -> None:
        prefilling = [state for state in self.states().values() if state.phase is Phase.RUNNING and state.prefilling]
        preemptions = self.scheduler.load().preemptions
        self.in_flight = batch = self.scheduler.schedule(0.0)
        if batch is None:
            assert not any(state.phase is Phase.RUNNING for state in self.states().values())
            return
        lengths = [len(row.token_ids) for row in batch.rows]
        assert sum(lengths) <= BUDGET
        assert len(lengths) <= SEATS
        assert min(lengths) > 0
        assert [length > 1 for length in lengths] == sorted(length > 1 for length in lengths)
        for row in batch.rows:
            tokens = self.states()[row.request_id].tokens
            assert row.token_ids == tokens[row.token_start : row.token_stop]
            assert (row.sample is not None) == (row.token_stop == len(tokens))
            for position in range(row.token_start):
                assert self.written[self.slot(row.block_ids, position)] == tokens[: position + 1].tobytes()
        if prefilling and self.scheduler.load().preemptions == preemptions:
            assert any(row.request_id == prefilling[0].request_id for row in batch.rows)

    @precondition(lambda self: self.in_flight is not None)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        batch = self.take_in_flight()
        for row in batch.rows:
            self.write(self.states()[row.request_id].tokens, row.block_ids, row.token_start, row.token_stop)
        results = [
            TokenOutput(data.draw(TOKENS), row.sample.output_index) if row.sample else None for row in batch.rows
        ]
        self.hear(self.scheduler.complete(results, 0.0))

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def fail(self) -> None:
        batch = self.take_in_flight()
        for row in batch.rows:
            for position in range(row.token_start, row.token_stop):
                self.written.pop(self.slot(row.block_ids, position), None)
        self.hear(self.scheduler.fail(InternalError("the device failed"), 0.0))

    # ---- what always holds

    @invariant()
    def references_equal_holders(self) -> None:
        held = Counter(block_id for state in self.states().values() for block_id in state.blocks)
        manager = self.scheduler._blocks._blocks
        assert [manager.references(block_id) for block_id in range(NUM_BLOCKS)] == [
            held[block_id] for block_id in range(NUM_BLOCKS)
        ]
        assert self.scheduler.load().blocks_free == NUM_BLOCKS - len(held)

    @invariant()
    def nobody_writes_to_a_block_that_another_holds(self) -> None:
        held = Counter(block_id for state in self.states().values() for block_id in state.blocks)
        for state in self.states().values():
            if state.phase is not Phase.HELD:
                assert all(held[block_id] == 1 for block_id in state.blocks[state.num_computed // BLOCK_SIZE :])

    @invariant()
    def who_has_not_ended_is_known(self) -> None:
        ending = {state.request_id for state in self.states().values() if state.ending}
        assert set(self.states()) - ending == self.live | self.held

    def teardown(self) -> None:
        """Without reservations and held blocks in the way, everybody who is left comes to an end."""
        for name in self.reserved:
            self.scheduler.abort(name)
            self.live.remove(name)
        for _ in range(200):
            for name in self.held:
                self.scheduler.release(name)
            self.held.clear()
            batch = self.take_in_flight() if self.in_flight is not None else self.scheduler.schedule(0.0)
            if batch is None:
                break
            results = [TokenOutput(0, row.sample.output_index) if row.sample else None for row in batch.rows]
            self.hear(self.scheduler.complete(results, 0.0))
        assert self.live == set()
        assert self.states() == {}
        assert self.scheduler.load().blocks_free == NUM_BLOCKS

    # ---- helpers

    def request(
        self, prompt: tuple[int, ...], max_tokens: int, *, output: tuple[int, ...] = (), prefill_only: bool = False
    ) -> EngineRequest:
        self.names += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return EngineRequest(f"r{self.names}", prompt, sampling, output=output, prefill_only=prefill_only)

    def states(self) -> dict[str, RequestState]:
        return self.scheduler._requests

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def write(self, tokens: IntArray, block_ids: Sequence[int], start: int, stop: int) -> None:
        for position in range(start, stop):
            self.written[self.slot(block_ids, position)] = tokens[: position + 1].tobytes()

    def take_in_flight(self) -> Batch:
        assert self.in_flight is not None
        batch, self.in_flight = self.in_flight, None
        return batch

    def hear(self, events: StepEvents) -> None:
        for told in events.tokens:
            state = self.states().get(told.request_id)
            if state is not None and state.phase is Phase.HELD:
                self.live.remove(told.request_id)
                self.held.add(told.request_id)
            elif told.finish_reason is not None:
                self.live.remove(told.request_id)
        for failed in events.failed:
            self.live.remove(failed.request_id)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
