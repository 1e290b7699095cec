"""What the scheduler asks about speculation: whether to wait for the newest tokens, what to draft, what was kept. Pure.

Only a request whose tokens are all known can be drafted for, so no step may be in flight then. That costs the time in
which the next step is otherwise prepared. `pays` says whether drafts are worth it, from tokens that are known already.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from baton.core.costs import StepWork
from baton.core.decode_pace import DRAFTS_SHARE
from baton.core.types import Grammar
from baton.engine.batch import LayerDrafts
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.depth import Draft, Proposal, all_depths, choose_depths, could_pay
from baton.engine.speculation.grammar_drafts import GrammarStates
from baton.engine.speculation.layer_drafting import MOST_LAYER_DRAFTS, LayerDrafting
from baton.engine.speculation.limits import MOST_DRAFTS, assumed_wait_s
from baton.engine.speculation.pace_meter import PaceMeter
from baton.engine.speculation.proposer import Proposer
from baton.engine.speculation.speculating import Speculating
from baton.engine.speculation.speculative_times import EndedStep, SpeculativeTimes
from baton.engine.speculation.wait_bounds import NO_BOUND, WaitBound, WaitBounds

# That all requests get more than one token is counted on if it is as likely as this.
_LIKELY = 0.2


class Speculator:
    """Speculative decoding of one engine.

    Args:
        grammars: where outputs are in their grammars; None: grammars are not looked at.
        always: take all drafts, also where they do not pay or costs are unknown.

    Attributes:
        proposer: proposes the drafts among which the speculator chooses.
        pace: of decode steps.
    """

    def __init__(
        self,
        *,
        grammars: GrammarStates | None = None,
        always: bool = False,
    ) -> None:
        self.proposer = Proposer(grammars=grammars, looks_always=always)
        self._times = SpeculativeTimes()
        self.pace = PaceMeter()
        # The requests for which something could be drafted when `pays` was asked last, if it does.
        self._hopeful: set[str] | None = None
        self._always = always
        self._layer = LayerDrafting(always=always)
        # Requests that decoded without the layer's KV of their tokens: its drafts for them would be worse.
        self._with_hole: set[str] = set()

    def begin(
        self, request: Speculating, *, root: bytes | None, grammar: Grammar | None, tpot_s: float | None = None
    ) -> None:
        """A request begins to decode here. Later calls for it do nothing.

        Args:
            root: of its tenant's KV, see `baton.core.block_keys`: only outputs with the same root are looked at. None:
                no other outputs are, and its own is not kept.
            tpot_s: see `RequestDrafts`.
        """
        self.proposer.begin(request, root=root, grammar=grammar, tpot_s=tpot_s)

    def end(self, request: Speculating) -> None:
        """The request has ended. Its output may help others with the same root."""
        self._with_hole.discard(request.request_id)
        self.proposer.end(request.request_id)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets the outputs with these roots, also those of live requests."""
        self.proposer.drop_roots(roots)

    def pays(self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None) -> bool:
        """Whether to let the steps in flight end before the next one, because drafts would then bring more tokens.
        The newest token of a request may be unknown.

        Args:
            work: one token of each request that decodes.
        """
        self._hopeful = None
        if not self._could_pay(work, costs):
            return False
        # The first draft token is for the token that a step in flight draws.
        proposals, hopeful, all_right = [], set(), 1.0
        for request, proposal in zip(requests, self.proposer.propose(requests, pending=1), strict=True):
            if len(proposal.tokens) > 1:
                if self._always:
                    return True
                hopeful.add(request.request_id)
                all_right *= proposal.chances[0]
                proposals.append(Proposal(proposal.tokens[1:], proposal.chances[1:], proposal.context + 1))
        room = MOST_DRAFTS * len(proposals)
        asked = [request for request in requests if request.request_id in hopeful]
        bounds = self._wait_bounds(requests, asked, work, costs, all_bear=all_right >= _LIKELY)
        wasted_s = self._times.wasted_s(work.decode_rows)
        if not any(self._depths(proposals, work, costs, bounds, room=room, wasted_s=wasted_s)):
            return False
        self._hopeful = hopeful
        self._times.decided(work.decode_rows)
        return True

    def choose(
        self,
        requests: Sequence[Speculating],
        work: StepWork,
        costs: StepTimes | None,
        *,
        room: int,
        prompts: bool = False,
    ) -> dict[str, Draft]:
        """The drafts that the next step takes, by request; only requests with some. All tokens of the requests are
        known.

        Args:
            room: most draft tokens of the step.
            prompts: whether prompts share the step. Drafts leave them half of the time that there is.
        """
        if room <= 0 or not self._could_pay(work, costs):
            return {}
        hopeful, self._hopeful = self._hopeful, None
        everyone = requests
        if hopeful is not None:  # the device waits, so nothing is looked up for the others
            requests = [request for request in requests if request.request_id in hopeful]
        proposals = self.proposer.propose(requests, pending=0)
        if self._always:
            depths = all_depths(proposals, room=room)
        else:
            share = DRAFTS_SHARE if prompts else 1.0
            bounds = self._wait_bounds(everyone, requests, work, costs, share=share)
            depths = self._depths(proposals, work, costs, bounds, room=room)
            if any(depths):
                self._times.decided(work.decode_rows)
        return {
            request.request_id: proposal.tokens[:depth]
            for request, proposal, depth in zip(requests, proposals, depths, strict=True)
            if depth
        }

    def count_layer_drafts(
        self,
        requests: Sequence[Speculating],
        work: StepWork,
        costs: StepTimes | None,
        *,
        room: int,
        prompts: bool = False,
        prompts_next: bool = False,
    ) -> int:
        """How many tokens of each request the model's own layer should draft after a step, for the next one.

        Args:
            requests: those that decode in the next step; some may not have begun yet.
            work: the next step without drafts.
            room: most draft tokens of the next step.
            prompts: whether prompts share the step.
            prompts_next: whether prompts want to share the next one, as in `choose`.
        """
        if costs is not None and not self._could_pay(work, costs):
            self._layer.refuse()
            return 0
        now: list[list[float]] = []
        everyone: list[list[float]] = []
        asked: list[Speculating] = []
        for request in requests:
            drafts = self.proposer.get(request.request_id)
            most = min(MOST_LAYER_DRAFTS, request.most_drafts)
            own = self.proposer.unknown_layer_chances(most) if drafts is None else drafts.layer_chances(most)
            everyone.append(own)
            if request.request_id not in self._with_hole:
                now.append([] if drafts is not None and drafts.has_long_match else own)
                asked.append(request)
        wait_s = assumed_wait_s if costs is None else self._whole_wait_s(work, costs)
        share = DRAFTS_SHARE if prompts_next else 1.0
        bounds = self._wait_bounds(requests, asked, work, costs, share=share)
        count = self._layer.count(
            now, work, costs, room=room, wait_s=wait_s, everyone=everyone, prompts=prompts, bounds=bounds
        )
        if count:
            self._times.decided(work.decode_rows)
        return count

    def writes_layer_kv(self, requests: Sequence[Speculating]) -> bool:
        """Whether the model's own layer computes the tokens of a step that has only decodes and asks for no drafts. If
        not, it drafts for none of these requests any more."""
        if self._layer.pays and any(request.request_id not in self._with_hole for request in requests):
            return True
        self._with_hole.update([request.request_id for request in requests])
        return False

    def has_hole(self, request: Speculating) -> None:
        """The model's own layer has no KV of some of a request's tokens, so it drafts nothing for the request."""
        self._with_hole.add(request.request_id)

    def take_layer_drafts(self, request: Speculating, tokens: Sequence[int]) -> None:
        """Takes the drafts of the model's own layer after the known tokens of a request that has begun."""
        if request.request_id not in self._with_hole:
            drafts = self.proposer.get(request.request_id)
            assert drafts is not None, "a request begins before it gets drafts"
            drafts.take_layer_drafts(tokens)

    def observe_layer(self, drafts: LayerDrafts, *, prompts: bool = False) -> None:
        """Learns what the drafts of the model's own layer after a step took.

        Args:
            prompts: whether prompts shared the step.
        """
        self._layer.observe(drafts, prompts=prompts)

    def ended(self, step: EndedStep, costs: StepTimes | None, got: Iterable[tuple[str, int]] = ()) -> None:
        """Learns what a step took.

        Args:
            got: the requests that got tokens of it, and how many. Others, as those that wait for a seat, do not wait
                because of drafts.
        """
        if costs is None or not step.plain.decode_rows:
            return
        steps = self._times.ended(step, costs)
        if steps is not None or not step.drafts:
            ratio, tokens = 1.0 if steps is None else steps, step.tokens / step.plain.decode_rows
            self.pace.add(ratio, tokens, drafts=step.drafts > 0, prompts=step.plain.prompt_tokens > 0)
        if steps is not None:
            for request_id, tokens in got:
                if (drafts := self.proposer.get(request_id)) is not None:
                    drafts.charge_wait(tokens, steps)

    def _depths(
        self,
        proposals: Sequence[Proposal],
        work: StepWork,
        costs: StepTimes | None,
        bounds: WaitBounds,
        *,
        room: int,
        wasted_s: float = 0.0,
    ) -> list[int]:
        """How many drafts of each proposal to take.

        Args:
            wasted_s: by earlier waits.
        """
        if costs is None:
            return [0] * len(proposals)
        wait_s = self._times.wait_s(work.decode_rows, costs)
        lost_s = self._times.lost_s(work.decode_rows, costs) + wasted_s
        return choose_depths(proposals, work, costs, room=room, wait_s=wait_s, lost_s=lost_s, bounds=bounds)

    def _wait_bounds(
        self,
        everyone: Sequence[Speculating],
        asked: Sequence[Speculating],
        work: StepWork,
        costs: StepTimes | None,
        *,
        share: float = 1.0,
        all_bear: bool = True,
    ) -> WaitBounds:
        """How long the requests of a step let it take.

        Args:
            asked: the requests with a proposal each, in its order.
            share: part of the time above that of the plain step which drafts may take.
            all_bear: as in `WaitBounds`.
        """
        plain_s = 0.0 if costs is None else costs.seconds(work)
        if not plain_s > 0.0:
            return NO_BOUND
        waits = {request.request_id: self._wait_bound(request, plain_s, share) for request in everyone}
        own = [waits.pop(request.request_id) for request in asked]
        return WaitBounds(own, min(map(sum, waits.values()), default=inf), all_bear)

    def _wait_bound(self, request: Speculating, plain_s: float, share: float) -> WaitBound:
        drafts = self.proposer.get(request.request_id)
        return WaitBound(plain_s, 0.0) if drafts is None else drafts.wait_bound(plain_s, share)

    def _could_pay(self, work: StepWork, costs: StepTimes | None) -> bool:
        if self._always:
            return True
        if costs is None or not work.decode_rows or not self._times.may_draft(work.decode_rows):
            return False
        if not costs.seconds(work) > 0.0:  # costs of no time say nothing
            return False
        return could_pay(work, costs, most_each=MOST_DRAFTS, wait_s=self._whole_wait_s(work, costs))

    def wait_s(self, decode_rows: int, rows: int, costs: StepTimes) -> float:
        """For how long the device waits for a step of so many rows, drafts included, because of drafts."""
        return self._times.wait_s(decode_rows, costs)(rows)

    def _whole_wait_s(self, work: StepWork, costs: StepTimes) -> Callable[[int], float]:
        """The wait for a step with drafts, with what plain steps after it lose."""
        wait_s, lost_s = self._times.wait_s(work.decode_rows, costs), self._times.lost_s(work.decode_rows, costs)
        return lambda rows: wait_s(rows) + lost_s
