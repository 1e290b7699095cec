"""Proposes draft tokens for all requests that decode, within what one step may look up. Pure.

It does not know what steps cost: how many of the draft tokens a step takes is the speculator's choice.
"""

from collections.abc import Sequence

from baton.core.types import Grammar
from baton.engine.speculation.acceptance import Acceptance, OwnAcceptance, layer_bases
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.depth import NO_PROPOSAL, Proposal
from baton.engine.speculation.grammar_drafts import GrammarDrafts, GrammarStates
from baton.engine.speculation.limits import MOST_DRAFTS
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.request_drafts import RequestDrafts
from baton.engine.speculation.sequence_index import PLACES_PER_STEP
from baton.engine.speculation.speculating import Speculating

# What all requests together may take for one step. A mask of a grammar takes 10 to 30 us, and up to 0.5 ms when the
# grammar is new; a search takes up to 22 us.
_MASKS = 64
_SEARCHES = 64


class Proposer:
    """The drafts of all requests that decode.

    Args:
        grammars: where outputs are in their grammars; None: grammars are not looked at.
        looks_always: look up each token, however little that has brought.

    Attributes:
        recent: outputs that ended lately.
    """

    def __init__(self, *, grammars: GrammarStates | None, looks_always: bool) -> None:
        self._grammars = grammars
        self._looks_always = looks_always
        self._acceptance = Acceptance()
        self._places = Allowance(PLACES_PER_STEP)
        self._masks = Allowance(_MASKS)
        self._searches = Allowance(_SEARCHES)
        self._step = 0
        self._drafts: dict[str, RequestDrafts] = {}
        self.recent = RecentOutputs(self._places)

    def __len__(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._drafts)

    def get(self, request_id: str) -> RequestDrafts | None:
        """The drafts of a request. Returns None if it has not begun."""
        return self._drafts.get(request_id)

    def begin(self, request: Speculating, *, root: bytes | None, grammar: Grammar | None, tpot_s: float | None) -> None:
        """A request begins to decode here; arguments as of `Speculator.begin`. Later calls for it do nothing."""
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
            looks_always=self._looks_always,
            tpot_s=tpot_s,
        )

    def end(self, request_id: str) -> None:
        """The request has ended. Its output may help others with the same root."""
        drafts = self._drafts.pop(request_id, None)
        if drafts is not None and drafts.root is not None:
            self.recent.add(drafts.root, drafts.output)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets the outputs with these roots, also those of live requests."""
        self.recent.drop(roots)
        for drafts in self._drafts.values():
            if drafts.root in roots:
                drafts.forget_root()

    def propose(self, requests: Sequence[Speculating], *, pending: int) -> list[Proposal]:
        """The proposal of each request for the next step; those of requests that have not begun are empty.

        Args:
            pending: drafts beyond those that a step may take.
        """
        for allowance in (self._places, self._searches, self._masks):
            allowance.refill()
        most = MOST_DRAFTS + pending
        proposals = [NO_PROPOSAL] * len(requests)
        # Each step begins with another request, so that the first ones do not take the allowances of all others.
        self._step += 1
        for place in range(self._step, self._step + len(requests)):
            request = requests[place % len(requests)]
            drafts = self._drafts.get(request.request_id)
            if drafts is not None:
                proposals[place % len(requests)] = drafts.propose(min(most, request.most_drafts + pending))
        return proposals

    def unknown_layer_chances(self, count: int) -> list[float]:
        """`RequestDrafts.layer_chances` of a request about which nothing is known."""
        return OwnAcceptance(self._acceptance).chances(layer_bases(count), least=0.0)
