"""Manages the recurrent states of one engine's requests: their slots, and the snapshots they start from and leave.
Pure.

A prompt that is computed here starts after a block with a snapshot. Snapshots are taken at multiples of `unit` tokens:
the last one before a prompt's end, so that the same prompt finds it; where a prompt departs from a prefix whose blocks
are cached but whose state is not, so that the next one finds it; and where a chunk ends. The layers write the first two
within a chunk, which is not cut for them. While a request decodes, each multiple of `unit` gets a snapshot, for its
recomputation and for the next turn of a conversation.
"""

import math
from collections.abc import Iterable, Sequence

from baton.core.block_keys import BlockKey
from baton.core.errors import BatonError
from baton.engine.batch import BatchRow, RowResult
from baton.engine.request import ModelFacts
from baton.engine.scheduling.state import RequestPhase, RequestState
from baton.engine.scheduling.state_slots import NO_SLOT, StateSlots
from baton.engine.scheduling.steps import NextStep, Step, StepSnapshot

# Slots that snapshots of decoding requests, and drafts, leave free: theirs cannot be taken until the step has ended.
_SPARE_SLOTS = 1
# States after drafts take at most this part of all slots, so that most snapshots of prefixes stay.
_DRAFT_SHARE = 4


class RequestStates:
    """Assigns state slots to requests and plans snapshots. Does nothing for models without states.

    Args:
        entry_tokens: of entries of stores outside of the cache, which keep states after an entry; 1: there are none.

    Attributes:
        unit: snapshots are taken at multiples of this many tokens; 0: the model has no states.
    """

    def __init__(self, facts: ModelFacts, *, prefix_cache: bool, entry_tokens: int = 1) -> None:
        self.slots = StateSlots(facts.state_slots)
        unit = math.lcm(facts.block_size, facts.scan_tokens, entry_tokens)
        self.unit = unit if facts.state_slots else 0
        self._block_size = facts.block_size
        self._keeps = prefix_cache and self.unit > 0

    def has_room(self, *, others: int = 0) -> bool:
        """Whether a slot is left for a request after `others` other requests."""
        return not self.unit or self.slots.num_available > others

    def resumes_after(self, state: RequestState, index: int) -> bool:
        """Whether there is a snapshot after this block of the request."""
        return self.slots.has(state.keys.key(index, state.tokens))

    def take(self, state: RequestState, cached_blocks: int, known_blocks: int) -> None:
        """Gives the request a slot. Its next step starts from the state after the cached blocks.

        Args:
            known_blocks: leading blocks whose KV is cached, with or without their state.
        """
        if not self.unit:
            return
        source = state.keys.key(cached_blocks - 1, state.tokens) if cached_blocks else None
        state.state_slot, state.restore_from = self.slots.take(source)
        state.state_tokens = cached_blocks * self._block_size
        if self._keeps:
            last = (state.prefill_stop - 1) // self.unit * self.unit
            departs = min(known_blocks * self._block_size // self.unit * self.unit, last)
            state.snapshot_stops = tuple(stop for stop in sorted({departs, last}) if stop > state.state_tokens)

    def received(self, state: RequestState) -> None:
        """Records that the request's state has arrived from elsewhere."""
        self._unpin(state)

    def restored(self, state: RequestState) -> None:
        """Records that the request's first step has ended."""
        self._unpin(state)

    def give_back(self, state: RequestState) -> None:
        if state.state_slot == NO_SLOT:
            return
        self._unpin(state)
        self.slots.give_back(state.state_slot)
        state.drop_state()

    def forget(self, state: RequestState) -> None:
        """Drops the snapshots of the request's prefixes."""
        for index in range(state.state_tokens // self._block_size if self._keeps else 0):
            self.slots.forget(state.keys.key(index, state.tokens))

    # ---- steps

    def begin_decoded(self, step: NextStep, decoding: Iterable[RequestState]) -> None:
        """Adds snapshots that are taken before the step, for requests that decode in it and have no row in it yet."""
        if not self._keeps:
            return
        for state in decoding:
            stop = state.num_scheduled
            if stop % self.unit:
                continue
            # NOTE: before the step and not after the one that ends here, because that one's token may still be unknown.
            key = state.keys.key(stop // self._block_size - 1, state.tokens)
            slot = self.slots.begin_snapshot(key, spare=_SPARE_SLOTS)
            if slot != NO_SLOT:
                step.restores.append((state.state_slot, slot))
                step.snapshots.append(StepSnapshot(state, stop, key, slot))

    def begin_snapshots(self, step: NextStep) -> None:
        """Adds the snapshots of prompts that are taken within the step and after it."""
        if not self._keeps:
            return
        for index in range(step.num_decodes, len(step.states)):
            state, row = step.states[index], step.rows[index]
            if row.num_drafts:  # `end_drafts` finds its snapshots
                continue
            within: list[tuple[int, int]] = []
            for stop in self._stops(state, row):
                key = state.keys.key(stop // self._block_size - 1, state.tokens)
                slot = self.slots.begin_snapshot(key)
                step.snapshots.append(StepSnapshot(state, stop, key, slot))
                if slot == NO_SLOT:
                    continue
                if stop < row.token_stop:
                    within.append((stop - row.token_start, slot))
                else:
                    step.copies.append((state.state_slot, slot))
            if within:
                step.rows[index] = row._replace(snapshots=tuple(within))

    def _stops(self, state: RequestState, row: BatchRow) -> list[int]:
        """The token counts after which the row leaves snapshots, in order."""
        stops = [stop for stop in state.snapshot_stops if row.token_start < stop < row.token_stop]
        if row.token_stop % self.unit == 0:
            stops.append(row.token_stop)
        return stops

    def end_snapshots(self, step: Step, results: Sequence[RowResult] | None) -> list[tuple[RequestState, int]]:
        """Keeps or drops the snapshots of an ended step, before its requests are updated.

        Returns the requests that have left one which other requests are likely to use, each with its number of tokens.

        Args:
            results: the results of the step's rows; None: the step has failed.
        """
        likely: list[tuple[RequestState, int]] = []
        for state, stop, key, slot in step.snapshots:
            # The rows of requests that have failed or ended meanwhile computed nothing useful.
            written = (
                results is not None
                and state.phase is RequestPhase.RUNNING
                and state.is_shared
                and not isinstance(results[step.states.index(state)], BatonError)
            )
            if slot != NO_SLOT:
                self.slots.end_snapshot(key, slot, written=written, root=state.keys.root)
            if not written or not self.slots.has(key):
                continue
            is_likely = stop in state.snapshot_stops
            self._pass(state, stop, key if slot != NO_SLOT and not is_likely else None)
            if is_likely:
                likely.append((state, stop))
        if results is None:
            for row in step.rows:
                self.drop_drafts(row)
        return likely

    def _pass(self, state: RequestState, stop: int, passing: BlockKey | None) -> None:
        """Records the request's last snapshot."""
        if state.passing is not None:  # the one before served only this request, should it be preempted
            self.slots.demote(state.passing)
        state.passing = passing
        state.state_tokens = stop

    # ---- drafts

    @property
    def draft_room(self) -> int | None:
        """Most drafts of the next step; each leaves a state in a slot of its own. None: there are no states."""
        if not self.unit:
            return None
        return max(0, min(self.slots.num_available - _SPARE_SLOTS, self.slots.num_slots // _DRAFT_SHARE))

    def begin_drafts(self, step: NextStep) -> None:
        """Gives the drafts of the step slots for the states after them."""
        for index in range(step.num_decodes, len(step.rows) if self.unit else 0):
            row = step.rows[index]
            step.rows[index] = row._replace(draft_slots=self.slots.lend(row.num_drafts))

    def end_drafts(self, state: RequestState, row: BatchRow, num_kept: int) -> None:
        """Gives the request the state after its last known token but one, when a step with drafts has ended. A state
        before that, where snapshots are taken, becomes a snapshot.

        Args:
            num_kept: leading drafts that are tokens of the request now.
        """
        slots = (state.state_slot, *row.draft_slots)
        if len(slots) == 1:
            return
        state.state_slot = slots[num_kept]
        for place, slot in enumerate(slots):
            stop = row.token_start + place + 1
            if place < num_kept and self._keeps and stop % self.unit == 0:
                key = state.keys.key(stop // self._block_size - 1, state.tokens)
                is_new = state.is_shared and not self.slots.has(key)
                self.slots.end_snapshot(key, slot, written=state.is_shared, root=state.keys.root)
                if state.is_shared:
                    self._pass(state, stop, key if is_new else None)
            elif place != num_kept:
                self.slots.take_back(slot)

    def drop_drafts(self, row: BatchRow) -> None:
        """Frees the slots of a row with drafts whose request has ended."""
        for slot in row.draft_slots:
            self.slots.take_back(slot)

    def _unpin(self, state: RequestState) -> None:
        if state.restore_from not in (NO_SLOT, state.state_slot):
            self.slots.unpin(state.restore_from)
        state.restore_from = NO_SLOT
