"""What the scheduler asks about guesses: whether to wait for the newest tokens, what to guess, and what was kept. Pure.

Only a request whose tokens are all known can be guessed for, so no step may be in flight then. That costs the time in
which the next step is otherwise prepared. `pays` says whether guesses are worth it, from tokens that are known already.
"""

from collections.abc import Sequence
from typing import Protocol

from baton.core.costs import StepWork
from baton.core.types import Grammar
from baton.engine.batch import Guessed
from baton.engine.request import IntArray
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.acceptance import Acceptance, OwnAcceptance, layer_bases
from baton.engine.speculation.depth import NO_PROPOSAL, Draft, Proposal, all_depths, choose_depths, could_pay
from baton.engine.speculation.grammar_drafts import GrammarDrafts, GrammarStates, MaskAllowance
from baton.engine.speculation.layer_guesses import MOST_LAYER_GUESSES, LayerGuesses
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.request_drafts import MOST_GUESSES, RequestDrafts

# What a step with guesses takes longer than its work, because the host prepares the next step only when it has ended:
# guesses of 32 requests take 0.5 to 1 ms of it, those of one request 0.05 ms, and the step's rows and messages take the
# rest. It is not measured on a device yet.
DEFAULT_OVERHEAD_S = 0.0005
# Masks of grammars for one step, over all requests. One takes 10 to 30 us, and up to 0.5 ms when its grammar is new.
_MASKS = 64


class Speculating(Protocol):
    """A decoding request, as the scheduler has it."""

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> IntArray:
        """Prompt and output as far as they are known. Grows at its end only, while the request decodes."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def most_drafts(self) -> int:
        """Most tokens that may be guessed: more could not be part of its output."""


class Speculator:
    """The guesses of one engine.

    Args:
        grammars: where outputs are in their grammars; None: grammars are not looked at.
        overhead_s: what the host adds to a step with guesses.
        always: take all guesses, also where they do not pay or costs are unknown.

    Attributes:
        drafted, accepted: guessed tokens that steps have taken so far, and those of them that were kept.
    """

    def __init__(
        self,
        *,
        grammars: GrammarStates | None = None,
        overhead_s: float = DEFAULT_OVERHEAD_S,
        always: bool = False,
        recent: RecentOutputs | None = None,
    ) -> None:
        self.drafted = self.accepted = 0
        self._grammars = grammars
        self._overhead_s = overhead_s
        self._always = always
        self._recent = RecentOutputs() if recent is None else recent
        self._acceptance = Acceptance()
        self._masks = MaskAllowance(_MASKS)
        self._layer = LayerGuesses(always=always)
        self._drafts: dict[str, RequestDrafts] = {}

    @property
    def num_requests(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._drafts)

    def begin(self, request: Speculating, *, root: bytes | None, grammar: Grammar | None) -> None:
        """A request begins to decode here. Later calls for it do nothing.

        Args:
            root: of its tenant's KV, see `baton.core.block_keys`: only outputs with the same root are looked at. None:
                no other outputs are, and its own is not kept.
        """
        if request.request_id in self._drafts:
            return
        states = None if grammar is None else self._grammars
        self._drafts[request.request_id] = RequestDrafts(
            request.tokens,
            prompt_tokens=request.prompt_tokens,
            root=root,
            recent=self._recent,
            grammar=None if grammar is None or states is None else GrammarDrafts(grammar, states, self._masks),
            acceptance=self._acceptance,
            looks_always=self._always,
        )

    def end(self, request: Speculating) -> None:
        """The request has ended. Its output may help others with the same root."""
        drafts = self._drafts.pop(request.request_id, None)
        if drafts is not None and drafts.root is not None:
            self._recent.add(drafts.root, drafts.output)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets the outputs with these roots, also those of live requests."""
        self._recent.drop(roots)
        for drafts in self._drafts.values():
            if drafts.root in roots:
                drafts.forget_root()

    def pays(self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None) -> bool:
        """Whether to let the steps in flight end before the next one, because guesses would then bring more tokens.
        The newest token of a request may be unknown.

        Args:
            work: one token of each request that decodes.
        """
        if not self._could_pay(work, costs):
            return False
        # The first guess is for the token that a step in flight draws.
        proposals = []
        for proposal in self._proposals(requests, pending=1):
            if len(proposal.tokens) > 1:
                if self._always:
                    return True
                proposals.append(Proposal(proposal.tokens[1:], proposal.chances[1:], proposal.context + 1))
        room = MOST_GUESSES * len(proposals)
        return any(choose_depths(proposals, work, costs, room=room, overhead_s=self._overhead_s))

    def choose(
        self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None, *, room: int
    ) -> dict[str, Draft]:
        """The guesses that the next step takes, by request; only requests with some. All tokens of the requests are
        known.

        Args:
            room: most guessed tokens of the step.
        """
        if room <= 0 or not self._could_pay(work, costs):
            return {}
        proposals = self._proposals(requests, pending=0)
        if self._always:
            depths = all_depths(proposals, room=room)
        else:
            depths = choose_depths(proposals, work, costs, room=room, overhead_s=self._overhead_s)
        return {
            request.request_id: proposal.tokens[:depth]
            for request, proposal, depth in zip(requests, proposals, depths, strict=True)
            if depth
        }

    def count_guesses(
        self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None, *, room: int
    ) -> int:
        """How many tokens of each request the model's own layer should guess after a step, for the next one.

        Args:
            requests: those that decode in the next step; some may not have begun yet.
            work: the next step without guesses.
            room: most guessed tokens of the next step.
        """
        if room <= 0 or not self._could_pay(work, costs):
            return 0
        chances = []
        for request in requests:
            drafts = self._drafts.get(request.request_id)
            most = min(MOST_LAYER_GUESSES, request.most_drafts)
            own = self._unknown_chances(most) if drafts is None else drafts.layer_chances(most)
            chances.append(own)
        return self._layer.count(chances, work, costs, room=room, overhead_s=self._overhead_s)

    def guessed(self, request: Speculating, tokens: Sequence[int]) -> None:
        """Takes the guesses of the model's own layer after the known tokens of a request that has begun."""
        self._drafts[request.request_id].guessed(tokens)

    def observe_guesses(self, guessed: Guessed) -> None:
        """Learns what the guesses of the model's own layer after a step took."""
        self._layer.observe(guessed)

    def _unknown_chances(self, count: int) -> list[float]:
        """The chances of a request about which nothing is known."""
        return OwnAcceptance(self._acceptance).chances(layer_bases(count), least=0.0)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """A step has taken `drafted` guessed tokens of a request and kept the first `accepted` ones."""
        del request_id  # its chances are learned from its tokens
        self.drafted += drafted
        self.accepted += accepted

    def _could_pay(self, work: StepWork, costs: StepTimes | None) -> bool:
        if self._always:
            return True
        if costs is None or not work.decode_rows:
            return False
        return could_pay(work, costs, most_each=MOST_GUESSES, overhead_s=self._overhead_s)

    def _proposals(self, requests: Sequence[Speculating], *, pending: int) -> list[Proposal]:
        """The proposal of each request; those of requests that have not begun are empty.

        Args:
            pending: guesses beyond those that a step may take.
        """
        self._masks.refill()
        most = MOST_GUESSES + pending
        proposals = []
        for request in requests:
            drafts = self._drafts.get(request.request_id)
            most_here = min(most, request.most_drafts + pending)
            proposals.append(NO_PROPOSAL if drafts is None else drafts.propose(most_here))
        return proposals
