"""I1, I2 and I5 by model checking: clients, peers and devices act in any order.

The model is a device that runs steps in order, at any moment between their launch and their end, and draws any tokens.
It keeps for every cache slot the token sequence whose KV was last written there. A row may only read slots that hold
exactly its own sequence, and no other request may hold a slot that a step in flight writes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import InternalError, Overloaded
from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import Batch, BatchRow
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts, Reservation
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.state import RequestPhase, RequestState

BLOCK_SIZE = 2
NUM_BLOCKS = 9
MAX_CONTEXT = 16
SEATS = 4
EOS = 3
TOKENS = st.integers(0, EOS)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
PRIORITIES = st.integers(-1, 1)
ALTERNATIVES = st.sampled_from([None, None, 0, 2])
TPOTS = st.sampled_from([None, 1.0, 3.0])

Tokens = tuple[int, ...]


@dataclass
class Running:
    """A step in flight. `drawn` has a token per row, once the device has run the step."""

    batch: Batch
    drawn: list[int] | None = None


class KnownCosts:
    """A second for each token."""

    costs = StepCosts(((1, 1.0), (100, 100.0)))

    def observe(self, work: StepWork, seconds: float) -> None:
        assert work.tokens > 0


class SchedulerMachine(RuleBasedStateMachine):
    """Each scheduled step takes a second.

    Attributes:
        meter: None: step costs are not known.
        state_slots: of a model with recurrent states; 0: it has none.
        owners: ranks that each have a pool of blocks.
    """

    budget = 5
    state_slots = 0
    owners = 1
    meter: KnownCosts | None = None

    def __init__(self) -> None:
        super().__init__()
        limits = EngineLimits(
            max_batch_tokens=self.budget,
            max_batch_requests=SEATS,
            max_waiting=3,
            prefix_cache=True,
        )
        facts = ModelFacts(
            NUM_BLOCKS,
            BLOCK_SIZE,
            vocab_size=4,
            max_context_tokens=MAX_CONTEXT,
            eos_token_ids=(EOS,),
            identity="",
            state_slots=self.state_slots,
            scan_tokens=1,
            num_owners=self.owners,
        )
        self.scheduler = Scheduler(limits, facts, self.meter)
        self.now = 0.0
        self.written: dict[tuple[int, int], Tokens] = {}  # by owner and slot
        self.in_flight: deque[Running] = deque()
        self.front: tuple[int, list[int]] = (0, [])  # the last step that the device ran, and the tokens that it drew
        self.names = 0
        self.prompts: dict[str, int] = {}
        self.sequences: dict[str, Tokens] = {}  # on the device, which has drawn tokens at once
        self.given: dict[str, int] = {}  # output tokens that the owner knows
        self.doomed: set[str] = set()  # requests with a row in a failed step, so their KV has a hole
        self.live: set[str] = set()  # accepted, and neither ended nor aborted
        self.reserved: dict[str, Reservation] = {}
        self.held: set[str] = set()

    # ---- calls of clients and peers

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 8),
        prefill_only=st.booleans(),
        priority=PRIORITIES,
        alternatives=ALTERNATIVES,
        due_in_s=st.sampled_from([None, 1.0, 5.0, 20.0]),
        refuse_late=st.booleans(),
        tpot_s=TPOTS,
        part=st.integers(0, 12),
    )
    def submit(
        self,
        prompt: Tokens,
        max_tokens: int,
        prefill_only: bool,
        priority: int = 0,
        alternatives: int | None = None,
        due_in_s: float | None = None,
        refuse_late: bool = False,
        tpot_s: float | None = None,
        part: int = 0,
    ) -> None:
        request = self.request(
            prompt, max_tokens, prefill_only=prefill_only, priority=priority, alternatives=alternatives
        )
        request = replace(
            request,
            due_s=None if due_in_s is None else self.now + due_in_s,
            refuse_late=refuse_late,
            tpot_s=tpot_s,
            stop_tokens=part if prefill_only and 0 < part < len(prompt) and alternatives is None else None,
        )
        try:
            self.scheduler.submit(request, self.now)
        except Overloaded:
            return
        self.live.add(request.request_id)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(3, 8),
        output=st.sampled_from([(), (), (1,), (1, 0)]),
        priority=PRIORITIES,
        alternatives=ALTERNATIVES,
        tpot_s=TPOTS,
    )
    def reserve(
        self,
        prompt: Tokens,
        max_tokens: int,
        output: Tokens,
        priority: int,
        alternatives: int | None,
        tpot_s: float | None,
    ) -> None:
        request = self.request(prompt, max_tokens, output=output, priority=priority, alternatives=alternatives)
        try:
            reservation = self.scheduler.reservations.reserve(replace(request, tpot_s=tpot_s), self.now)
        except Overloaded:
            return
        assert reservation.cached_tokens % BLOCK_SIZE == 0
        assert reservation.cached_tokens < len(prompt) + len(output) < len(reservation.block_ids) * BLOCK_SIZE
        self.live.add(request.request_id)
        self.reserved[request.request_id] = reservation

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), token_id=TOKENS)
    def admit(self, data: st.DataObject, token_id: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        reservation = self.reserved.pop(name)
        self.write(self.sequences[name], reservation, reservation.cached_tokens, len(self.sequences[name]))
        self.receive_state(name, reservation, len(self.sequences[name]))
        first = TokenOutput(token_id, self.given[name])
        self.sequences[name] += (token_id,)
        self.given[name] += 1
        if self.scheduler.reservations.admit(name, first) is not None:
            self.live.remove(name)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), here=st.booleans(), count=st.integers(0, 1), part=st.integers(0, 12))
    def more_output(self, data: st.DataObject, here: bool, count: int, part: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        state = self.states()[name]
        sequence = self.sequences[name] + (1,) * count
        output = sequence[self.prompts[name] :]
        if len(output) >= state.request.sampling.max_tokens or len(sequence) >= MAX_CONTEXT:
            return
        if here:
            reservation = self.reserved.pop(name)
            part -= part % BLOCK_SIZE
            if not reservation.cached_tokens <= part < len(self.sequences[name]) or state.request.scores_prompt:
                part = 0
            self.write(self.sequences[name], reservation, reservation.cached_tokens, part)
            self.receive_state(name, reservation, part)
            self.scheduler.reservations.prefill_here(name, output, self.now, received_tokens=part)
        else:
            try:
                self.reserved[name] = self.scheduler.reservations.extend(name, output)
            except Overloaded:
                return
        self.sequences[name] = sequence
        self.given[name] = len(output)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        later = self.scheduler.abort(name)
        assert later == any(row.request_id == name for row in self.rows())
        assert name not in self.states()
        self.live.discard(name)
        self.held.discard(name)
        self.reserved.pop(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(name)
        self.scheduler.abort(name)

    # ---- the run loop

    @rule()
    def schedule(self) -> None:
        running = [state for state in self.states().values() if state.phase is RequestPhase.RUNNING]
        prefilling = [state for state in running if state.prefilling]
        waiting = [state for state in self.states().values() if state.phase is RequestPhase.WAITING]
        before, free = self.scheduler.load(), [pool.num_free for pool in self.pools()]
        self.now += 1
        batch = self.scheduler.schedule(self.now)
        if (refused := self.scheduler.take_refused()) is not None:
            for failed in refused.failed:
                assert isinstance(failed.error, Overloaded)
                self.live.remove(failed.request_id)
                if failed.request_id in self.states():
                    self.held.add(failed.request_id)
        prefilling = [
            state
            for state in prefilling
            if state.phase is not RequestPhase.HELD and state.phase is not RequestPhase.ENDED
        ]
        left = [state.place for state in waiting if state.phase is RequestPhase.WAITING]
        assert not any(state.place > min(left) for state in waiting if left and state.phase is RequestPhase.RUNNING)
        sent_back = self.scheduler.load().preemptions - before.preemptions
        if len(self.in_flight) == 2 or any(row.num_drafts for step in self.in_flight for row in step.batch.rows):
            assert batch is None
            return
        if self.in_flight:
            assert sent_back == 0
        if batch is None:
            able = [
                state
                for state in running
                if state.phase is RequestPhase.RUNNING and (state.prefilling or state.decoding)
            ]
            wanted = Counter(state.pool for state in able)
            assert not able or (self.in_flight and any(free[owner] < count for owner, count in wanted.items()))
            return
        lengths = [len(row.token_ids) for row in batch.rows]
        assert sum(lengths) <= self.budget
        assert len(lengths) <= SEATS
        assert min(lengths) > 0
        assert [length > 1 for length in lengths] == sorted(length > 1 for length in lengths)
        if prefilling and not sent_back and self.meter is None:
            last = min(state.place for state in prefilling)
            first = {state.request_id for state in (*prefilling, *waiting) if state.place <= last}
            assert any(row.request_id in first for row in batch.rows)
        self.in_flight.append(Running(batch))

    @precondition(lambda self: any(step.drawn is None for step in self.in_flight))
    @rule(data=st.data())
    def run_on_the_device(self, data: st.DataObject) -> None:
        step = next(step for step in self.in_flight if step.drawn is None)
        self.run(step, [data.draw(TOKENS) for _ in step.batch.rows])

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if self.in_flight[0].drawn is None:
            self.run(self.in_flight[0], [data.draw(TOKENS) for _ in self.in_flight[0].batch.rows])
        self.complete_oldest()

    @rule(lengths=st.lists(st.integers(1, 5), max_size=3), count=st.integers(2, 20))
    def go_on(self, lengths: list[int], count: int) -> None:
        """Runs steps while no request arrives: decodes get far, and where blocks run out, the latest request is
        preempted and runs again."""
        for token_id, length in enumerate(lengths):
            self.submit(prompt=(token_id,) * length, max_tokens=8, prefill_only=False)
        for _ in range(count):
            self.schedule()
            self.schedule()
            if self.in_flight:
                self.finish(0)

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        step = self.in_flight.popleft()
        if step.drawn is None:
            self.front = (step.batch.step, [0] * len(step.batch.rows))
        for row in step.batch.rows:
            self.doomed.add(row.request_id)
            for position in range(row.token_start, row.token_stop):
                self.written.pop(self.slot(row, position), None)
        expected = [row.request_id for row in step.batch.rows if row.request_id in self.live]
        events = self.scheduler.fail(InternalError("the device failed"), 0.0)
        assert events.step == step.batch.step
        assert [failed.request_id for failed in events.failed] == expected
        self.live.difference_update(expected)
        self.held.update(name for name in expected if self.scheduler._roster.find(name) is not None)

    # ---- invariants

    @invariant()
    def references_equal_holders(self) -> None:
        held = Counter((state.pool, block_id) for state in self.holders() for block_id in state.blocks)
        for owner, pool in enumerate(self.pools()):
            assert pool._references == [held[owner, block_id] for block_id in range(NUM_BLOCKS)]
        assert self.scheduler.load().blocks_free == self.owners * NUM_BLOCKS - len(held)

    @invariant()
    def blocks_leak_only_with_requests_that_nobody_knows(self) -> None:
        known = sum(len(state.blocks) + (state.state_slot >= 0) for state in self.states().values())
        assert self.scheduler.leaked_blocks(lambda _: True) == 0
        assert self.scheduler.leaked_blocks(lambda _: False) == known

    @invariant()
    def no_request_writes_to_a_block_that_another_holds(self) -> None:
        for state in self.holders():
            if state.phase is not RequestPhase.HELD:
                for block_id in state.blocks[state.num_computed // BLOCK_SIZE :]:
                    assert self.pools()[state.pool]._references[block_id] == 1

    @invariant()
    def a_step_in_flight_reads_what_is_held_and_writes_what_nobody_can_match(self) -> None:
        for row in self.rows():
            pool = self.pools()[row.owner]
            assert all(pool._references[block_id] for block_id in row.block_ids)
            for block_id in row.block_ids[row.token_start // BLOCK_SIZE :]:
                assert pool._references[block_id] == 1
                assert pool._keys[block_id] is None

    @invariant()
    def what_can_be_matched_is_computed(self) -> None:
        for owner, pool in enumerate(self.pools()):
            for block_id, key in enumerate(pool._keys):
                if key is not None:
                    last = self.written[owner, block_id * BLOCK_SIZE + BLOCK_SIZE - 1]
                    assert [*memoryview(key.tokens).cast("i")] == [*last[-BLOCK_SIZE:]]

    @invariant()
    def live_requests_are_known(self) -> None:
        assert set(self.states()) == self.live | self.held

    def teardown(self) -> None:
        """Without reservations and held blocks, all remaining requests end."""
        for name in self.reserved:
            self.scheduler.abort(name)
            self.live.remove(name)
        for _ in range(400):
            for name in self.held:
                self.scheduler.abort(name)
            self.held.clear()
            self.schedule()
            if self.in_flight:
                self.finish(0)
            elif not self.held and not self.live:
                break
        assert self.live == set()
        assert self.states() == {}
        assert self.scheduler.load().blocks_free == self.owners * NUM_BLOCKS

    # ---- the device

    def run(self, step: Running, drawn: list[int]) -> None:
        number, tokens_in_front = self.front
        assert step.batch.step == number + 1
        for row, token_id in zip(step.batch.rows, drawn, strict=True):
            if row.request_id in self.doomed:
                continue
            token_ids = tuple(row.token_ids)
            if row.token_source is not None:
                assert token_ids == (0,)
                token_ids = (tokens_in_front[row.token_source],)
            self.run_row(row, token_ids, token_id)
        step.drawn = drawn
        self.front = (step.batch.step, drawn)

    def run_row(self, row: BatchRow, token_ids: Tokens, drawn: int) -> None:
        sequence = self.sequences[row.request_id]
        assert token_ids == sequence[row.token_start : row.token_stop]
        for position in range(row.token_start):
            assert self.written[self.slot(row, position)] == sequence[: position + 1]
        self.write(sequence, row, row.token_start, row.token_stop)
        assert (row.sample is not None) == (row.token_stop == len(sequence))
        if row.sample is not None:
            assert row.sample.output_index == len(sequence) - self.prompts[row.request_id]
            self.sequences[row.request_id] = (*sequence, drawn)

    def finish(self, drawn: int) -> None:
        if self.in_flight[0].drawn is None:
            self.run(self.in_flight[0], [drawn] * len(self.in_flight[0].batch.rows))
        self.complete_oldest()

    def complete_oldest(self) -> None:
        step = self.in_flight.popleft()
        assert step.drawn is not None
        rows = [(row, token_id) for row, token_id in zip(step.batch.rows, step.drawn, strict=True)]
        results = [TokenOutput(token_id, row.sample.output_index) if row.sample else None for row, token_id in rows]
        expected = [
            (row.request_id, token_id, self.given[row.request_id])
            for row, token_id in rows
            if row.sample and row.request_id in self.live
        ]
        scores = {place: self.scores(step.batch.rows[place], score.targets) for place, score in step.batch.scores}
        scored = [
            (row.request_id, self.prompt_logprobs(row.request_id))
            for row, _ in rows
            if row.sample and row.sample.output_index == 0 and row.request_id in self.live and self.scored(row)
        ]
        events = self.scheduler.complete(results, 1.0, scores)
        assert [(each.request_id, each.logprobs) for each in events.scored] == scored
        assert events.step == step.batch.step
        assert [
            (sampled.request_id, sampled.token.token_id, sampled.token.index) for sampled in events.tokens
        ] == expected
        self.record(events)

    def record(self, events: StepEvents) -> None:
        for chunk in events.chunks:
            part = self.states().get(chunk.request_id)
            if part is not None and chunk.token_stop == part.request.stop_tokens:
                assert part.phase is RequestPhase.HELD
                assert chunk.block_ids == tuple(part.blocks)
                self.live.remove(chunk.request_id)
                self.held.add(chunk.request_id)
        for sampled in events.tokens:
            self.given[sampled.request_id] += 1
            state = self.states().get(sampled.request_id)
            if state is not None and state.phase is RequestPhase.HELD:
                self.live.remove(sampled.request_id)
                self.held.add(sampled.request_id)
            elif sampled.finish_reason is not None:
                self.live.remove(sampled.request_id)

    # ---- helpers

    def request(
        self,
        prompt: Tokens,
        max_tokens: int,
        *,
        output: Tokens = (),
        prefill_only: bool = False,
        priority: int = 0,
        alternatives: int | None = None,
    ) -> EngineRequest:
        self.names += 1
        name = f"r{self.names}"
        self.prompts[name] = len(prompt)
        self.sequences[name] = (*prompt, *output)
        self.given[name] = len(output)
        sampling = ResolvedSampling(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=alternatives)
        return EngineRequest(name, prompt, sampling, output=output, prefill_only=prefill_only, priority=priority)

    def scored(self, row: BatchRow) -> bool:
        """Whether the row samples the first token of a request that wants its prompt's logprobs."""
        assert row.sample is not None
        return row.sample.params.prompt_logprobs is not None and row.token_stop == self.prompts[row.request_id]

    def scores(self, row: BatchRow, targets: Sequence[int]) -> list[PromptLogprob]:
        """A logprob that tells the tokens before it."""
        sequence = self.sequences[row.request_id][: self.prompts[row.request_id]]
        assert tuple(targets) == sequence[row.token_start + 1 : row.token_stop + 1]
        places = range(row.token_start + 1, row.token_start + 1 + len(targets))
        return [self.logprob(sequence, place) for place in places]

    def prompt_logprobs(self, name: str) -> tuple[PromptLogprob, ...]:
        sequence = self.sequences[name][: self.prompts[name]]
        return PromptLogprob(sequence[0], None), *(self.logprob(sequence, place) for place in range(1, len(sequence)))

    def logprob(self, sequence: Tokens, place: int) -> PromptLogprob:
        return PromptLogprob(sequence[place], -float(hash(sequence[:place]) % 10_000))

    def pools(self) -> tuple[BlockManager, ...]:
        return self.scheduler._blocks._pools

    def states(self) -> dict[str, RequestState]:
        return {state.request_id: state for state in self.scheduler._roster.everyone()}

    def holders(self) -> list[RequestState]:
        """All live requests, and ended ones with rows in flight."""
        rows = [state for step in self.scheduler._in_flight._steps for state in step.states]
        return list({id(state): state for state in (*self.states().values(), *rows)}.values())

    def rows(self) -> Iterator[BatchRow]:
        return (row for step in self.in_flight for row in step.batch.rows)

    def receive_state(self, name: str, reservation: Reservation, stop: int) -> None:
        """The state after `stop` tokens has come; 0: part of one."""

    def slot(self, of: BatchRow | Reservation, position: int) -> tuple[int, int]:
        return of.owner or 0, of.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def write(self, sequence: Tokens, of: BatchRow | Reservation, start: int, stop: int) -> None:
        for position in range(start, stop):
            self.written[self.slot(of, position)] = sequence[: position + 1]


class OwnersSchedulerMachine(SchedulerMachine):
    owners = 2


class BoundedSchedulerMachine(SchedulerMachine):
    meter = KnownCosts()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestOwnersSchedulerMachine = OwnersSchedulerMachine.TestCase
TestOwnersSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestBoundedSchedulerMachine = BoundedSchedulerMachine.TestCase
TestBoundedSchedulerMachine.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
