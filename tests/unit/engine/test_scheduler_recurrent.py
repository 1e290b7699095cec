"""Slots of recurrent states by model checking: as `test_scheduler_states`, for a model that has them.

The device also keeps for every slot the token sequence that is in the state there. A row may only continue a state of
exactly its own tokens. Steps copy states before and after their rows, and rows leave snapshots; what arrives from
elsewhere is written at once, whatever steps are queued.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.core.errors import Overloaded
from baton.engine.batch import MOST_SNAPSHOTS, BatchRow
from baton.engine.request import Reservation
from baton.engine.scheduling.state_slots import NO_SLOT
from tests.unit.engine.test_scheduler_states import BLOCK_SIZE, Running, SchedulerMachine, Tokens


class RecurrentMachine(SchedulerMachine):
    state_slots = 6

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tokens | None] = {}  # None: no state of any sequence
        self.parts: dict[str, int] = {}  # of reserved requests, how many tokens arrive

    @rule(length=st.integers(3, 9), last=st.integers(0, 1), count=st.integers(1, 3), elsewhere=st.booleans())
    def come_again(self, length: int, last: int, count: int, elsewhere: bool) -> None:
        """Prompts with common prefixes come, and some steps run."""
        prompt = (0,) * (length - 1) + (last,)
        if elsewhere:
            self.reserve_plain(prompt)
        else:
            self.submit(prompt=prompt, max_tokens=2, prefill_only=False)
        for _ in range(count):
            self.schedule()
            if self.in_flight:
                self.finish(1)

    @rule(length=st.integers(3, 9), blocks=st.integers(1, 3))
    def reserve_part(self, length: int, blocks: int) -> None:
        """A prompt whose first part alone is to be computed."""
        part = blocks * BLOCK_SIZE
        if part < length:
            self.reserve_plain((0,) * length, part=part)

    @precondition(lambda self: self.parts.keys() & self.reserved.keys())
    @rule(data=st.data(), arrives=st.booleans())
    def end_part(self, data: st.DataObject, arrives: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.parts.keys() & self.reserved.keys())))
        part, reservation, sequence = self.parts.pop(name), self.reserved.pop(name), self.sequences[name]
        here = not arrives or reservation.skipped_tokens >= part
        if not here:
            self.write(sequence, reservation, reservation.cached_tokens, part)
        self.receive_state(name, reservation, 0 if here else part)
        output = sequence[self.prompts[name] :]
        self.scheduler.reservations.prefill_here(name, output, self.now, received_tokens=0 if here else part)

    def reserve_plain(self, prompt: Tokens, *, part: int = 0) -> None:
        request = self.request(prompt, 3)
        try:
            reservation = self.scheduler.reservations.reserve(request, self.now, arriving_tokens=part)
        except Overloaded:
            return
        assert reservation.skipped_tokens <= reservation.cached_tokens
        assert not part or reservation.cached_tokens < part or reservation.skipped_tokens == reservation.cached_tokens
        self.live.add(request.request_id)
        self.reserved[request.request_id] = reservation
        if part:
            self.parts[request.request_id] = part

    def run(self, step: Running, drawn: list[int]) -> None:
        assert not {target for _, target in step.batch.restores} & {source for source, _ in step.batch.restores}
        for source, target in step.batch.restores:
            self.kept[target] = self.kept[source]
        for row in step.batch.rows:
            if row.request_id in self.doomed:
                self.kept[row.state_slot] = None
        super().run(step, drawn)
        targets = [target for _, target in step.batch.copies]
        targets += [target for row in step.batch.rows for _, target in row.snapshots]
        assert len(set(targets)) == len(targets)
        assert not {row.state_slot for row in step.batch.rows} & set(targets)
        assert not {slot for pair in step.batch.restores for slot in pair} & set(targets)
        for source, target in step.batch.copies:
            self.kept[target] = self.kept[source]

    def run_row(self, row: BatchRow, token_ids: Tokens, drawn: int) -> None:
        before = self.sequences[row.request_id]
        assert row.state_slot != NO_SLOT
        if row.token_start:
            assert self.kept[row.state_slot] == before[: row.token_start]
        super().run_row(row, token_ids, drawn)
        self.kept[row.state_slot] = before[: row.token_stop]
        assert len(row.snapshots) <= MOST_SNAPSHOTS
        for num_tokens, slot in row.snapshots:
            assert 0 < num_tokens < len(token_ids)
            self.kept[slot] = before[: row.token_start + num_tokens]

    def receive_state(self, name: str, reservation: Reservation, stop: int) -> None:
        assert reservation.state_slot != NO_SLOT
        self.kept[reservation.state_slot] = self.sequences[name][:stop] if stop else None

    @invariant()
    def every_request_with_blocks_has_a_slot_of_its_own(self) -> None:
        holders = [state for state in self.holders() if state.blocks]
        slots = [state.state_slot for state in holders]
        assert len(set(slots)) == len(slots)
        assert NO_SLOT not in slots
        manager = self.scheduler._blocks.states.slots
        assert manager.num_held == len(slots)
        snapshots = [slot for _, slot, _ in manager._snapshots.values()]
        assert not set(slots) & set(snapshots)
        assert len(set(manager._free)) == len(manager._free)
        assert not set(manager._free) & {*slots, *snapshots}

    @invariant()
    def snapshots_hold_the_states_of_their_prefixes(self) -> None:
        for key, slot, _ in self.scheduler._blocks.states.slots._snapshots.values():
            kept = self.kept[slot]
            assert kept is not None
            assert [*memoryview(key.tokens).cast("i")] == [*kept[-BLOCK_SIZE:]]

    def teardown(self) -> None:
        super().teardown()
        slots = self.scheduler._blocks.states.slots
        assert (slots.num_held, slots.num_pinned, slots.num_available) == (0, 0, self.state_slots)


class FewSlotsMachine(RecurrentMachine):
    state_slots = 2


TestRecurrentMachine = RecurrentMachine.TestCase
TestRecurrentMachine.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestFewSlotsMachine = FewSlotsMachine.TestCase
TestFewSlotsMachine.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
