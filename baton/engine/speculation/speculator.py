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
from baton.engine.speculation.acceptance import Acceptance, OwnAcceptance, layer_bases
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.depth import NO_PROPOSAL, Draft, Proposal, all_depths, choose_depths, could_pay
from baton.engine.speculation.grammar_drafts import GrammarDrafts, GrammarStates
from baton.engine.speculation.layer_drafting import MOST_LAYER_DRAFTS, LayerDrafting
from baton.engine.speculation.limits import MOST_DRAFTS, assumed_wait_s
from baton.engine.speculation.pace_meter import PaceMeter
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.request_drafts import RequestDrafts
from baton.engine.speculation.sequence_index import PLACES_PER_STEP
from baton.engine.speculation.speculating import Speculating
from baton.engine.speculation.speculative_times import EndedStep, SpeculativeTimes
from baton.engine.speculation.wait_bounds import NO_BOUND, WaitBound, WaitBounds

# What all requests together may take for one step. A mask of a grammar takes 10 to 30 us, and up to 0.5 ms when the
# grammar is new; a search takes up to 22 us.
_MASKS = 64
_SEARCHES = 64
# That all requests get more than one token is counted on if it is as likely as this.
_LIKELY = 0.2


class Speculator:
    """Speculative decoding of one engine.

    Args:
        grammars: where outputs are in their grammars; None: grammars are not looked at.
        always: take all drafts, also where they do not pay or costs are unknown.

    Attributes:
        recent: outputs that ended lately.
        pace: of decode steps.
    """

    def __init__(
        self,
        *,
        grammars: GrammarStates | None = None,
        always: bool = False,
    ) -> None:
        self._grammars = grammars
        self._times = SpeculativeTimes()
        self.pace = PaceMeter()
        # The requests for which something could be drafted when `pays` was asked last, if it does.
        self._hopeful: set[str] | None = None
        self._always = always
        self._acceptance = Acceptance()
        self._places = Allowance(PLACES_PER_STEP)
        self._masks = Allowance(_MASKS)
        self._searches = Allowance(_SEARCHES)
        self._turn = 0
        self.recent = RecentOutputs(self._places)
        self._layer = LayerDrafting(always=always)
        # Requests that decoded without the layer's KV of their tokens: its drafts for them would be worse.
        self._with_hole: set[str] = set()
        self._drafts: dict[str, RequestDrafts] = {}

    @property
    def num_requests(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._drafts)

    def begin(
        self, request: Speculating, *, root: bytes | None, grammar: Grammar | None, tpot_s: float | None = None
    ) -> None:
        """A request begins to decode here. Later calls for it do nothing.

        Args:
            root: of its tenant's KV, see `baton.core.block_keys`: only outputs with the same root are looked at. None:
                no other outputs are, and its own is not kept.
            tpot_s: see `RequestDrafts`.
        """
        if request.request_id in self._drafts:
            return
        states = None if grammar is None else self._grammars
        self._drafts[request.request_id] = RequestDrafts(
            request.tokens,
            prompt_tokens=request.prompt_tokens,
            root=root,
            recent=self.recent,
            grammar=None if grammar is None or states is None else GrammarDrafts(grammar, states, self._masks),
            acceptance=self._acceptance,
            places=self._places,
            searches=self._searches,
            looks_always=self._always,
            tpot_s=tpot_s,
        )

    def end(self, request: Speculating) -> None:
        """The request has ended. Its output may help others with the same root."""
        self._with_hole.discard(request.request_id)
        drafts = self._drafts.pop(request.request_id, None)
        if drafts is not None and drafts.root is not None:
            self.recent.add(drafts.root, drafts.output)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets the outputs with these roots, also those of live requests."""
        self.recent.drop(roots)
        for drafts in self._drafts.values():
            if drafts.root in roots:
                drafts.forget_root()

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
        for request, proposal in zip(requests, self._proposals(requests, pending=1), strict=True):
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
        proposals = self._proposals(requests, pending=0)
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
            drafts = self._drafts.get(request.request_id)
            most = min(MOST_LAYER_DRAFTS, request.most_drafts)
            own = self._unknown_chances(most) if drafts is None else drafts.layer_chances(most)
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
            self._drafts[request.request_id].take_layer_drafts(tokens)

    def observe_layer(self, drafts: LayerDrafts, *, prompts: bool = False) -> None:
        """Learns what the drafts of the model's own layer after a step took.

        Args:
            prompts: whether prompts shared the step.
        """
        self._layer.observe(drafts, prompts=prompts)

    def _unknown_chances(self, count: int) -> list[float]:
        """The chances of a request about which nothing is known."""
        return OwnAcceptance(self._acceptance).chances(layer_bases(count), least=0.0)

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
                if (drafts := self._drafts.get(request_id)) is not None:
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
        drafts = self._drafts.get(request.request_id)
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

    def _proposals(self, requests: Sequence[Speculating], *, pending: int) -> list[Proposal]:
        """The proposal of each request; those of requests that have not begun are empty.

        Args:
            pending: drafts beyond those that a step may take.
        """
        for allowance in (self._places, self._searches, self._masks):
            allowance.refill()
        most = MOST_DRAFTS + pending
        proposals = [NO_PROPOSAL] * len(requests)
        # Each step begins with another request, so that the first ones do not take the allowances of all others.
        self._turn += 1
        for place in range(self._turn, self._turn + len(requests)):
            request = requests[place % len(requests)]
            drafts = self._drafts.get(request.request_id)
            if drafts is not None:
                proposals[place % len(requests)] = drafts.propose(min(most, request.most_drafts + pending))
        return proposals
