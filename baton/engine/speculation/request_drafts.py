"""The guesses for one request, each with its chance. Pure.

They continue the longest match of its last tokens, in its own sequence or in outputs of its tenant, after what its
grammar forces. Each guess is compared with the token that came, whether or not a step took it, so that chances are
learned at no cost. Where nothing can be guessed for long, only every few tokens are looked up.
"""

from typing import Protocol

from baton.engine.request import IntArray, int_array
from baton.engine.speculation.acceptance import Acceptance, Basis, OwnAcceptance, class_of
from baton.engine.speculation.depth import NO_PROPOSAL, Proposal
from baton.engine.speculation.grammar_drafts import GrammarDrafts
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.sequence_index import LONG, Ending, Match, SequenceIndex

# Most guesses for one request and step.
MOST_GUESSES = 16
# Guesses that are less likely cannot pay in any step.
_LEAST_CHANCE = 0.05
# After so many lookups that brought nothing, the next token is not looked up; after twice as many, the next two.
_PATIENCE = 8
_MOST_SKIPPED = 4
_WORTH_LOOKING = 0.3  # after guesses as likely as this, the next token is looked up in any case


class _Source(Protocol):
    def continuation(self, end: int, count: int) -> IntArray: ...


class RequestDrafts:
    """Guesses for one request.

    Args:
        tokens: its prompt and output as far as they are known, which grow at their end.
        prompt_tokens: number of tokens of the prompt.
        root: of its tenant's KV.
        looks_always: look up each token, however little that has brought.
    """

    def __init__(
        self,
        tokens: IntArray,
        *,
        prompt_tokens: int,
        root: bytes,
        recent: RecentOutputs,
        grammar: GrammarDrafts | None,
        acceptance: Acceptance,
        looks_always: bool,
    ) -> None:
        self.root: bytes | None = root
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._recent = recent
        self._grammar = grammar
        self._acceptance = OwnAcceptance(acceptance)
        self._looks_always = looks_always
        self._index = SequenceIndex(tokens)
        self._source: _Source | None = None
        self._match = Match(0, 0)
        self._looked_at = -1  # number of tokens at the last lookup
        self._look_from = 0
        self._misses = 0
        self._guesses = int_array()  # of the last lookup
        self._bases: list[int] = []
        self._proposal = NO_PROPOSAL

    @property
    def output(self) -> IntArray:
        return self._tokens[self._prompt_tokens :]

    def forget_root(self) -> None:
        """Its output is kept for no other request, and it uses no other's."""
        self.root = None
        if self._source is not self._index:
            self._source = None

    def propose(self, most: int) -> Proposal:
        """The guesses after the tokens that are known, at most so many, of which a step may take 16."""
        count = len(self._tokens)
        if count < self._look_from:
            return NO_PROPOSAL
        if count != self._looked_at:
            self._learn(count)
            self._look(count)
        proposal = self._proposal
        if most < len(proposal.tokens):
            return Proposal(proposal.tokens[: max(0, most)], proposal.chances[: max(0, most)], proposal.context)
        return proposal

    def _learn(self, count: int) -> None:
        """Compares the last guesses with the tokens that came."""
        if self._looked_at < 0:
            return
        known = self._tokens[self._looked_at : count]
        num_right, most = 0, min(len(known), len(self._guesses))
        while num_right < most and known[num_right] == self._guesses[num_right]:
            num_right += 1
        if most:
            self._acceptance.learn(self._bases[:most], num_right)
        if num_right:
            self._misses = 0
        else:
            self._misses += 1
        if num_right == len(known) and self._source is not None and self._match.length >= LONG:
            # The longest match stays the longest one.
            self._match = Match(self._match.length + num_right, self._match.end + num_right)
        else:
            self._source = None

    def _look(self, count: int) -> None:
        self._looked_at = count
        if self._source is None:
            self._search(count)
        guesses, bases = self._continued(MOST_GUESSES + 1, count)
        if self._grammar is not None:
            guesses, bases = self._with_grammar(guesses, bases)
        chance, chances = 1.0, []
        for basis in bases:
            chance *= self._acceptance.chance(basis)
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        self._guesses, self._bases = guesses, bases
        if not self._looks_always and (not chances or chances[0] < _WORTH_LOOKING):
            self._look_from = count + min(_MOST_SKIPPED, self._misses // _PATIENCE)
        self._proposal = Proposal(tuple(guesses[: len(chances)]), tuple(chances), count - 1)

    def _search(self, count: int) -> None:
        ending = Ending(self._tokens)
        self._index.extend(count - 1)
        match = self._index.longest(ending)
        if match is not None:
            self._source, self._match = self._index, match
        if self.root is not None and (match is None or match.length < LONG):
            found = self._recent.longest(self.root, ending)
            if found is not None and (match is None or found[1].length > match.length):
                self._source, self._match = found

    def _continued(self, most: int, count: int) -> tuple[IntArray, list[int]]:
        """The tokens after the match, and the basis of each."""
        if self._source is None:
            return int_array(), []
        length, end = self._match
        guesses = self._source.continuation(end, most)
        own = self._source is self._index
        if own and len(guesses) < most:  # what follows the end of the sequence repeats, as if it were guessed there
            period = count - end
            guesses = (guesses * (most // period + 1))[:most]
        basis = Basis.OWN if own else Basis.OTHERS
        return guesses, [basis + class_of(length + place) for place in range(len(guesses))]

    def _with_grammar(self, guesses: IntArray, bases: list[int]) -> tuple[IntArray, list[int]]:
        """The guesses of the grammar, and then those of the match if it agrees."""
        assert self._grammar is not None
        forced, forced_bases = self._grammar.guesses(self._tokens, self._prompt_tokens, MOST_GUESSES + 1)
        if not forced:
            return guesses, bases
        if guesses[: len(forced)] == forced:
            return guesses, [*forced_bases, *bases[len(forced) :]]
        return forced, forced_bases
