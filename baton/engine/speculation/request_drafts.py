"""The drafts for one request, each with its chance. Pure.

They continue the longest match of its last tokens, in its own sequence or in outputs of its tenant, after what its
grammar forces. Where the model's own layer has drafted too, those that bring more tokens are taken. Each draft token is
compared with the token that came, whether or not a step took it, so that chances are learned at no cost. Where nothing
can be drafted for long, only every few tokens are looked up.

A request whose drafts are accepted takes 7 us a step. Source code unlike the prompt takes 22 us each time that it is
looked up, with outputs of its tenant; half of that is for these.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.engine.request import IntArray, int_array
from baton.engine.speculation.acceptance import Acceptance, Basis, OwnAcceptance, bases_of, layer_bases
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.depth import NO_PROPOSAL, Proposal
from baton.engine.speculation.grammar_drafts import GrammarDrafts
from baton.engine.speculation.limits import MOST_DRAFTS
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.sequence_index import LONG, SHORT, LastTokens, Match, SequenceIndex
from baton.engine.speculation.wait_bounds import WaitBound, WaitCredit

# Drafts that are less likely cannot pay in any step.
_LEAST_CHANCE = 0.05
# After so many lookups that brought nothing, the next token is not looked up; after twice as many, the next two.
_PATIENCE = 8
_MOST_SKIPPED = 4
_OWN_ENOUGH = 7  # after a match in its own sequence as long as this, other outputs are not looked up
_RESUME_TOKENS = 12  # an edit that is longer is not bridged
_WORTH_LOOKING = 0.3  # after drafts as likely as this, the next token is looked up in any case


class _Source(Protocol):
    def continuation(self, end: int, count: int) -> IntArray: ...


class _EndedMatch(NamedTuple):
    """A long match that has ended: something else was said here, and the rest may follow as it did there.

    Args:
        place: of the token that did not come.
        at: number of tokens before the one that came in its place.
    """

    source: _Source
    place: int
    at: int

    def resume(self, tokens: IntArray) -> Match | None:
        """The place that the sequence may be at now. Returns None if nothing says where, or it ended long ago."""
        further = len(tokens) - self.at
        window = self.source.continuation(self.place, _RESUME_TOKENS)
        if further > _RESUME_TOKENS or not window:
            return None
        newest = tokens[-1]
        if newest in window:
            return Match(1, self.place + window.index(newest) + 1)
        # One token in place of another.
        return Match(0, self.place + 1) if further == 1 else None


class RequestDrafts:
    """Drafts for one request.

    Args:
        tokens: its prompt and output as far as they are known, which grow at their end.
        prompt_tokens: number of tokens of the prompt.
        root: of its tenant's KV; None: it uses no other's output, and no other uses its.
        places, searches: places that may be indexed, and searches for matches, for one step.
        looks_always: look up each token, however little that has brought.
        tpot_s: the mean time per token that it must keep; None: there is none.
    """

    def __init__(
        self,
        tokens: IntArray,
        *,
        prompt_tokens: int,
        root: bytes | None,
        recent: RecentOutputs,
        grammar: GrammarDrafts | None,
        acceptance: Acceptance,
        places: Allowance,
        searches: Allowance,
        looks_always: bool,
        tpot_s: float | None = None,
    ) -> None:
        self.root = root
        self._tokens = tokens
        self._credit = WaitCredit(len(tokens), tpot_s)
        self._prompt_tokens = prompt_tokens
        self._recent = recent
        self._grammar = grammar
        self._acceptance = OwnAcceptance(acceptance)
        self._searches = searches
        self._looks_always = looks_always
        self._index = SequenceIndex(tokens, places)
        self._source: _Source | None = None
        self._match = Match(0, 0)
        self._ended: _EndedMatch | None = None
        self._looked_at = -1  # number of tokens at the last lookup
        self._look_from = 0
        self._misses = 0
        self._drafts = int_array()  # of the last lookup
        self._bases: list[int] = []
        self._proposal = NO_PROPOSAL
        self._layer_drafts = int_array()
        self._layer_at = -1  # number of tokens before these

    @property
    def output(self) -> IntArray:
        return self._tokens[self._prompt_tokens :]

    @property
    def _basis(self) -> Basis:
        return Basis.OWN if self._source is self._index else Basis.OTHERS

    def wait_bound(self, plain_s: float, share: float) -> WaitBound:
        """How long it lets a step take for others' drafts; arguments as of `WaitCredit.bound`."""
        return self._credit.bound(len(self._tokens), plain_s, share)

    def charge_wait(self, tokens: int, steps: float) -> None:
        """Counts its newest tokens, so many, of a step as long as so many plain steps."""
        self._credit.charge(tokens, len(self._tokens), steps)

    def forget_root(self) -> None:
        """Its output is kept for no other request, and it uses no other's."""
        self.root = self._source = self._ended = None
        self._drafts, self._bases, self._proposal = int_array(), [], NO_PROPOSAL

    def take_layer_drafts(self, tokens: Sequence[int]) -> None:
        """Takes the drafts of the model's own layer after the known tokens."""
        self._learn_layer(len(self._tokens))
        self._layer_drafts, self._layer_at = int_array(list(tokens)), len(self._tokens)

    @property
    def has_long_match(self) -> bool:
        """Whether a long match goes on, whose drafts cost nothing. The layer need not draft then."""
        return self._source is not None and self._match.length >= LONG

    def layer_chances(self, count: int) -> list[float]:
        """For each of so many drafts of the model's own layer, the chance that it and all before it are accepted."""
        return self._acceptance.chances(layer_bases(count), least=_LEAST_CHANCE)

    def propose(self, most: int) -> Proposal:
        """The drafts after the known tokens, at most so many. A step takes at most 16 of them."""
        count = len(self._tokens)
        self._learn_layer(count)
        proposal = NO_PROPOSAL
        if count >= self._look_from:
            if count != self._looked_at:
                self._learn(count)
                self._look(count)
            proposal = self._proposal
        if self._layer_at == count:
            chances = self._acceptance.chances(layer_bases(len(self._layer_drafts)), least=_LEAST_CHANCE)
            if sum(chances) > sum(proposal.chances):
                proposal = Proposal(tuple(self._layer_drafts[: len(chances)]), tuple(chances), count - 1)
        if most < len(proposal.tokens):
            return Proposal(proposal.tokens[: max(0, most)], proposal.chances[: max(0, most)], proposal.context)
        return proposal

    def _learn_layer(self, count: int) -> None:
        """Compares the last drafts of the model's own layer with the tokens that came."""
        if not self._layer_drafts or count <= self._layer_at:
            return
        known, drafts = self._tokens[self._layer_at : count], self._layer_drafts
        most = min(len(known), len(drafts))
        self._acceptance.learn(layer_bases(most), _num_equal(known, drafts))
        self._layer_drafts = int_array()

    def _learn(self, count: int) -> None:
        """Compares the last drafts with the tokens that came."""
        if self._looked_at < 0:
            return
        known = self._tokens[self._looked_at : count]
        most = min(len(known), len(self._drafts))
        num_accepted = _num_equal(known, self._drafts)
        if most:
            self._acceptance.learn(self._bases[:most], num_accepted)
        if num_accepted:
            self._misses = 0
        else:
            self._misses += 1
        if self._source is None:
            return
        length, end = self._match.length + num_accepted, self._match.end + num_accepted
        if num_accepted == len(known):
            self._match = Match(length, end)
            if SHORT <= length < LONG:  # there may be a longer one now
                self._source = None
        else:
            if length >= LONG:
                self._ended = _EndedMatch(self._source, end, self._looked_at + num_accepted)
            self._source = None

    def _look(self, count: int) -> None:
        self._looked_at = count
        if self._source is None and self._searches.take():
            self._search(count)
        drafts, bases = self._continued(MOST_DRAFTS + 1, count)
        if self._grammar is not None:
            drafts, bases = self._with_grammar(drafts, bases)
        chances = self._acceptance.chances(bases, least=_LEAST_CHANCE)
        self._drafts, self._bases = drafts, bases
        if not self._looks_always and (not chances or chances[0] < _WORTH_LOOKING):
            self._look_from = count + min(_MOST_SKIPPED, self._misses // _PATIENCE)
        self._proposal = Proposal(tuple(drafts[: len(chances)]), tuple(chances), count - 1)

    def _search(self, count: int) -> None:
        """Finds the longest match. The longest of before stays the longest while its drafts are accepted."""
        last = LastTokens(self._tokens)
        self._index.extend(count - 1)
        match = self._index.longest(last)
        if match is not None:
            self._source, self._match = self._index, match
        if self.root is not None and (match is None or match.length < _OWN_ENOUGH):
            found = self._recent.longest(self.root, last)
            if found is not None and (match is None or found[1].length > match.length):
                self._source, self._match = found
        if self._ended is not None and (self._source is None or self._match.length < LONG):
            self._resume(self._ended)

    def _resume(self, ended: _EndedMatch) -> None:
        """Goes on after a long match that has ended, unless a short match is more likely right."""
        match = ended.resume(self._tokens)
        if match is None or (ended.source is self._index and match.end >= len(self._tokens)):
            if len(self._tokens) - ended.at > _RESUME_TOKENS:
                self._ended = None
            return
        if self._source is not None:
            resumed, found = bases_of(Basis.OWN, match.length, 1), bases_of(self._basis, self._match.length, 1)
            if self._acceptance.chance(found[0]) >= self._acceptance.chance(resumed[0]):
                return
        self._source, self._match = ended.source, match

    def _continued(self, most: int, count: int) -> tuple[IntArray, list[int]]:
        """The tokens after the match, and the basis of each."""
        if self._source is None:
            return int_array(), []
        length, end = self._match
        drafts = self._source.continuation(end, most)
        own = self._source is self._index
        if own and len(drafts) < most:  # what follows the end of the sequence repeats, as if it were drafted there
            period = count - end
            drafts = (drafts * (most // period + 1))[:most]
        return drafts, bases_of(self._basis, length, len(drafts))

    def _with_grammar(self, drafts: IntArray, bases: list[int]) -> tuple[IntArray, list[int]]:
        """The drafts of the match and of the grammar as far as they agree, and then the more likely ones."""
        assert self._grammar is not None
        forced, forced_bases = self._grammar.propose(self._tokens, self._prompt_tokens, MOST_DRAFTS + 1)
        chance, agreed = self._acceptance.chance, _num_equal(drafts, forced)
        both = [max(pair, key=chance) for pair in zip(bases[:agreed], forced_bases[:agreed], strict=True)]
        goes_on = agreed < len(drafts)
        if agreed == len(forced) or (goes_on and chance(bases[agreed]) > chance(forced_bases[agreed])):
            return drafts, [*both, *bases[agreed:]]
        self._source = None
        return forced, [*both, *forced_bases[agreed:]]


def _num_equal(first: IntArray, second: IntArray) -> int:
    """How many tokens two sequences have in common at their start."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(place for place in range(most) if first[place] != second[place])
