"""Decides which requests a step drafts tokens for, and takes the step's draws after them. Pure.

Drafts follow a request's newest token, which the host must know. So a step with drafts is prepared when no step is in
flight, and none is prepared while it runs, for how many tokens it keeps is not known either. All requests of the step
bear that, so `baton.engine.speculation` weighs it against the tokens that drafts bring.
"""

from collections.abc import Sequence

from baton.core.costs import StepWork
from baton.core.decode_pace import DecodePace
from baton.core.types import FinishReason, TokenOutput
from baton.engine.batch import LayerDrafts
from baton.engine.events import DraftsChecked, TokensDrafted
from baton.engine.scheduling.costs import Costs
from baton.engine.scheduling.request_blocks import RequestBlocks
from baton.engine.scheduling.roster import Roster
from baton.engine.scheduling.state import RequestPhase, RequestState
from baton.engine.scheduling.steps import NextStep, Step
from baton.engine.speculation.depth import Draft
from baton.engine.speculation.layer_drafting import MOST_LAYER_DRAFTS
from baton.engine.speculation.speculative_times import EndedStep
from baton.engine.speculation.speculator import Speculator

# Drafts after a prompt for the node that decodes it, whose first step they join. The first token waits for them.
_HANDED_OVER = 2
# A token of a request, with its end if it is the last one: the fields of `TokenSampled`.
Sampled = tuple[str, TokenOutput, FinishReason | None, str]


class Drafts:
    """The drafts of one engine's steps.

    Args:
        seats: most rows of a step that draw a token.
        has_layer: the model has a layer of its own that drafts tokens.
    """

    def __init__(
        self,
        speculator: Speculator,
        roster: Roster,
        blocks: RequestBlocks,
        meter: Costs,
        *,
        seats: int,
        has_layer: bool = False,
    ) -> None:
        self._speculator = speculator
        self._roster = roster
        self._blocks = blocks
        self._meter = meter
        self.seats = seats
        self._has_layer = has_layer
        # The step in flight for which `_waits` was found out.
        self._asked = 0
        self._waits = False

    def waits(self, oldest: Step) -> bool:
        """Whether the next step is better prepared when this one, the only one in flight, has ended."""
        if oldest.number != self._asked:
            self._asked = oldest.number
            decoding = self._decoding()
            may_draft = bool(decoding) and self._room > 0
            self._waits = may_draft and self._speculator.pays(decoding, _work(decoding), self._meter.costs)
        return self._waits

    def choose(self, decoding: Sequence[RequestState]) -> dict[RequestState, Draft]:
        """The drafts of the next step for these requests, which all decode in it, as far as there are blocks for them.
        No step is in flight."""
        self._begin(decoding)
        costs, roster = self._meter.costs, self._roster
        prompts = len(decoding) < len(roster.running) or bool(roster.waiting and roster.free_seats)
        work, room = _work(decoding), self._room
        chosen = self._speculator.choose(decoding, work, costs, room=room, prompts=prompts)
        if not chosen:
            return {}
        drafts = {state: chosen[state.request_id] for state in decoding if state.request_id in chosen}
        fitting = {state: draft[: self._blocks.draft_room(state, len(draft))] for state, draft in drafts.items()}
        return {state: draft for state, draft in fitting.items() if draft}

    def wait_s(self, step: NextStep) -> float:
        """For how long the device waits for a step that has its decodes and drafts, or that waited for some."""
        costs, rows = self._meter.costs, step.plain.decode_rows
        return 0.0 if costs is None or not rows else self._speculator.wait_s(rows, step.work.decode_rows, costs)

    def checked(
        self, state: RequestState, drafted: int, drawn: Sequence[TokenOutput]
    ) -> tuple[DraftsChecked, list[Sampled]]:
        """Takes the draws of a step: one after each draft token that is kept, and one more. Returns them up to the
        request's last token, if that is among them."""
        sampled: list[Sampled] = []
        for token in drawn:
            end = state.append(token.token_id)
            sampled.append((state.request_id, token, end.reason, end.stop_reason))
            if end.reason is not None:
                break
        state.num_computed = state.num_scheduled = state.num_tokens - 1
        return DraftsChecked(state.request_id, drafted, len(sampled) - 1), sampled

    def ended(
        self, step: Step, seconds: float, waited_s: float | None, checked: Sequence[DraftsChecked], passes_s: float
    ) -> None:
        """A step has ended.

        Args:
            seconds, waited_s: as in `Scheduler.complete`.
            checked: its drafts.
            passes_s: the time in which the model's own layer drafted for the next step.
        """
        costs, plain = self._meter.costs, step.plain
        if costs is None or waited_s is None or not (step.late or step.ahead):
            return
        tokens = plain.decode_rows + sum([each.accepted for each in checked])
        passes_s = passes_s if step.waits_for_layer else 0.0
        ended = EndedStep(plain, step.work, tokens, seconds, waited_s, passes_s, late=step.late)
        if bool(ended.drafts) == bool(checked):
            right = {each.request_id: each.accepted for each in checked}
            sampled = (state for state, row in zip(step.states, step.rows, strict=True) if row.sample is not None)
            got = ((state.request_id, 1 + right.get(state.request_id, 0)) for state in sampled)
            self._speculator.ended(ended, costs, got)

    def ask_layer(self, step: NextStep) -> None:
        """Sets how many tokens the model's own layer should draft after this step: for the next step, and for the nodes
        that decode its prompts."""
        if not self._has_layer:
            return
        rows = zip(step.states, step.rows, strict=True)
        sampled = [state for state, row in rows if row.sample is not None]
        prompts = step.work.prompt_tokens > 0
        step.num_layer_drafts = self._layer_drafts_here([state for state in sampled if state.decoding], prompts=prompts)
        step.waits_for_layer = step.num_layer_drafts > 0
        if any(state.prefill_only for state in sampled):
            step.num_layer_drafts = max(step.num_layer_drafts, _HANDED_OVER)
        if not step.num_layer_drafts and not step.has_chunks:
            step.writes_draft_kv = self._speculator.writes_layer_kv(step.states)
        if not step.writes_draft_kv:
            for state in step.states:
                # The layer's part of its blocks has what another request left there.
                state.is_shared = False

    def _layer_drafts_here(self, sampled: Sequence[RequestState], *, prompts: bool) -> int:
        """How many tokens to draft for the next step here, of requests whose last tokens are sampled now.

        Args:
            prompts: whether prompts share the step.
        """
        if not sampled:
            return 0
        keys = sum([state.num_scheduled for state in sampled]) + len(sampled)
        # As in `choose`; requests that wait may take seats of the next step.
        room = self.seats - len(self._roster.running) - bool(self._roster.waiting)
        work, costs = StepWork(len(sampled), keys), self._meter.costs
        roster = self._roster
        prompts_next = len(sampled) < len(roster.running) or bool(roster.waiting and roster.free_seats)
        return self._speculator.count_layer_drafts(
            sampled, work, costs, room=room, prompts=prompts, prompts_next=prompts_next
        )

    def layer_ended(self, step: Step, layer_drafts: LayerDrafts) -> tuple[TokensDrafted, ...]:
        """Takes the drafts of the model's own layer after a step that has ended. Returns those for other nodes."""
        self._speculator.observe_layer(layer_drafts, prompts=step.work.prompt_tokens > 0)
        for_others = []
        for place, tokens in layer_drafts.tokens.items():
            state = step.states[place]
            if state.phase is RequestPhase.RUNNING and state.decoding:
                self.take_layer_drafts(state, tokens)
            elif state.phase is RequestPhase.HELD and tokens:
                for_others.append(TokensDrafted(state.request_id, tokens))
        return tuple(for_others)

    def take_layer_drafts(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Takes drafts after a request's known tokens, from the layer here or on the node that computed its prompt."""
        self._begin([state])
        if tokens and self._has_layer:
            self._speculator.take_layer_drafts(state, tokens[:MOST_LAYER_DRAFTS])

    def lacks_layer_kv(self, state: RequestState) -> None:
        """A request's KV comes without that of the model's own layer, from a node that has none."""
        if self._has_layer:
            self._speculator.has_hole(state)
            # As in `ask_layer`.
            state.is_shared = False

    def end(self, state: RequestState) -> None:
        """The request has ended."""
        self._speculator.end(state)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets the outputs with these roots."""
        self._speculator.drop_roots(roots)

    @property
    def pace(self) -> DecodePace:
        """What speculation makes of the present decode steps."""
        return self._speculator.pace.pace

    @property
    def _room(self) -> int:
        """Most drafts of the next step. Each takes a row, but a request that waits for a seat could take one; and each
        takes a slot for its state, if the model has states."""
        rows = self.seats - len(self._roster.running) - bool(self._roster.waiting)
        slots = self._blocks.states.draft_room
        return rows if slots is None else min(rows, slots)

    def _decoding(self) -> list[RequestState]:
        decoding = [state for state in self._roster.running if state.decoding]
        self._begin(decoding)
        return decoding

    def _begin(self, decoding: Sequence[RequestState]) -> None:
        for state in decoding:
            if not state.is_followed:
                state.is_followed = True
                # What a tenant's request began before its KV was dropped is for no other request.
                root = state.keys.root if state.is_shared else None
                request = state.request
                self._speculator.begin(state, root=root, grammar=request.sampling.grammar, tpot_s=request.tpot_s)


def _work(decoding: Sequence[RequestState]) -> StepWork:
    return StepWork(len(decoding), sum([state.num_scheduled for state in decoding]) + len(decoding))
