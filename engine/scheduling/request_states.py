"""The recurrent states of one engine's requests: their slots, the snapshots they begin from and leave. Pure.

A prompt that is computed here begins after a block with a snapshot. Snapshots are taken where a chunk of a prompt ends
at a multiple of `unit` tokens. So a prompt is cut at such a place before its end, and where it departs from a prefix
whose blocks are cached but whose state is not: the next request with that prefix then finds the state too. While a
request decodes, each multiple of `unit` gets a snapshot, for its recomputation and for the next turn of a conversation.
"""

import math
from collections.abc import Iterable, Sequence

from baton.errors import BatonError
from engine.batch import RowResult
from engine.request import ModelFacts
from engine.scheduling.state import Phase, RequestState
from engine.scheduling.state_slots import NO_SLOT, StateSlots
from engine.scheduling.steps import NextStep, Step, StepSnapshot

# A cut before its end costs a prompt one more step, about as much as the tokens of a shorter prefix, in units. Such a
# prefix gets a cut when it comes again.
_LEAST_CUT_UNITS = 4
# Slots that snapshots of decoding requests leave free: until its step has ended, nobody can have a snapshot's slot.
_SPARE_SLOTS = 1


class RequestStates:
    """Does nothing for models without states.

    Args:
        align_tokens: of `EngineLimits.chunk_align_tokens`, or 1. Above 1 chunks end at its multiples only, and states
            after decoded tokens are not kept: they differ in their last bits from those after a prompt's.

    Attributes:
        unit: of how many tokens a place with a snapshot is a multiple; 0: the model has no states.
    """

    def __init__(self, facts: ModelFacts, *, prefix_cache: bool, align_tokens: int) -> None:
        self.slots = StateSlots(facts.state_slots)
        self.unit = math.lcm(facts.block_size, facts.scan_tokens, align_tokens) if facts.state_slots else 0
        self._block_size = facts.block_size
        self._keeps = prefix_cache and self.unit > 0
        self._aligned = align_tokens > 1

    def has_room(self, *, others: int = 0) -> bool:
        """Whether a request finds a slot after so many others."""
        return not self.unit or self.slots.num_available > others

    def resumes_after(self, state: RequestState, index: int) -> bool:
        """Whether there is a snapshot after this block of the request."""
        return self.slots.has(state.keys.key(index, state.tokens))

    def take(self, state: RequestState, cached_blocks: int, known_blocks: int) -> None:
        """Gives the request a slot; its state before the next step is that after the cached blocks.

        Args:
            known_blocks: leading blocks whose KV is cached, whether their state is or not.
        """
        if not self.unit:
            return
        source = state.keys.key(cached_blocks - 1, state.tokens) if cached_blocks else None
        state.state_slot, state.restore_from = self.slots.take(source)
        state.state_tokens = cached_blocks * self._block_size
        if self._keeps and not self._aligned:
            last = (state.prefill_stop - 1) // self.unit * self.unit
            departs = min(known_blocks * self._block_size // self.unit * self.unit, last)
            cuts = {departs, last} if last >= _LEAST_CUT_UNITS * self.unit else {departs}
            state.cuts = tuple(sorted(cut for cut in cuts if cut > state.state_tokens))

    def received(self, state: RequestState) -> None:
        """The request's state has come from elsewhere."""
        self._unpin(state)

    def restored(self, state: RequestState) -> None:
        """The request's first step has ended."""
        self._unpin(state)

    def give_back(self, state: RequestState) -> None:
        if state.state_slot == NO_SLOT:
            return
        self._unpin(state)
        self.slots.give_back(state.state_slot)
        state.drop_state()

    def forget(self, state: RequestState) -> None:
        """Offers no state of the request to later ones."""
        for index in range(state.state_tokens // self._block_size if self._keeps else 0):
            self.slots.forget(state.keys.key(index, state.tokens))

    # ---- steps

    def begin_decoded(self, step: NextStep, decoding: Iterable[RequestState]) -> None:
        """Adds snapshots that are taken before the step, of requests that decode in it and have no row in it yet."""
        if not self._keeps or self._aligned:
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
                step.snapshots.append(StepSnapshot(state, stop, key, slot, before=True))

    def begin_snapshots(self, step: NextStep) -> None:
        """Adds the snapshots that are taken after the step, of prompts."""
        if not self._keeps:
            return
        for state, row in zip(step.states[step.num_decodes :], step.rows[step.num_decodes :], strict=True):
            stop = row.token_stop
            if stop % self.unit or (self._aligned and stop > state.prompt_tokens):
                continue
            key = state.keys.key(stop // self._block_size - 1, state.tokens)
            slot = self.slots.begin_snapshot(key)
            step.snapshots.append(StepSnapshot(state, stop, key, slot))

    def end_snapshots(self, step: Step, results: Sequence[RowResult] | None) -> None:
        """The step has ended, before its requests take note of it.

        Args:
            results: None: it has failed.
        """
        for state, stop, key, slot, _ in step.snapshots:
            # The step of a request that has failed or ended meanwhile computed nothing of use.
            written = (
                results is not None
                and state.phase is Phase.RUNNING
                and not isinstance(results[step.states.index(state)], BatonError)
            )
            if slot != NO_SLOT:
                self.slots.end_snapshot(key, slot, written=written)
            if not written or not self.slots.has(key):
                continue
            if state.passing is not None:  # the one before served only this request, should it be preempted
                self.slots.demote(state.passing)
            state.passing = key if slot != NO_SLOT and stop not in state.cuts else None
            state.state_tokens = stop

    def _unpin(self, state: RequestState) -> None:
        if state.restore_from not in (NO_SLOT, state.state_slot):
            self.slots.unpin(state.restore_from)
        state.restore_from = NO_SLOT
