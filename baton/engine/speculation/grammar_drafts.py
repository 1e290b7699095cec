"""Drafts what a grammar leaves no choice about, such as the keys of an object in JSON. Pure.

Where a grammar allows one continuation, the longest token for it is drafted. Where it allows a few tokens, such as a
colon and white space, the draft is what the output had the last time when the same tokens were allowed after the
same token. The drafts follow one another until the grammar allows many tokens, such as within a string.

Output tokens are followed in a state of our own: that of the step's masks is used on another thread, and is not there
before the step.
"""

from typing import NamedTuple, Protocol, TypeAlias

from baton.core.types import Grammar
from baton.engine.request import IntArray, int_array
from baton.engine.speculation.acceptance import Basis
from baton.engine.speculation.allowance import Allowance
from baton.grammar.choices import Choices

# More drafts at a time are rarely accepted, and each one takes a mask.
_MOST_DRAFTS = 8
_CHOICES = 256
_NONE = -1


class GrammarState(Protocol):
    """Where an output is in its grammar, such as `baton.grammar.forced_tokens.ForcedTokens` finds it."""

    def consume(self, token_id: int) -> bool:
        """Takes the next token. Returns False if the output cannot be followed any more."""

    def choices(self) -> Choices | None:
        """What may come next. Returns None if too many tokens may, or this cannot be found out."""

    def rollback(self, num_tokens: int) -> bool:
        """Takes back so many tokens. Returns False if the output cannot be followed any more."""


class GrammarStates(Protocol):
    """Makes the states of new outputs."""

    def start(self, grammar: Grammar) -> GrammarState | None:
        """The state at the start of an output. Returns None if that would take long, because the grammar is not
        compiled."""


_Place: TypeAlias = "tuple[int, int, int]"


class _DraftToken(NamedTuple):
    """A draft token, and which choice it makes.

    Args:
        token: -1: there are a few possible tokens, and nothing says which.
        places: which tokens were allowed, after which two tokens, after which token, and after any.
    """

    token: int
    basis: Basis
    places: tuple[_Place, ...]


class GrammarDrafts:
    """Drafts for one output."""

    def __init__(self, grammar: Grammar, states: GrammarStates, allowance: Allowance) -> None:
        self._grammar = grammar
        self._states = states
        self._allowance = allowance
        self._state: GrammarState | None = None
        self._is_dead = False
        self._consumed = 0
        self._drafts: list[_DraftToken] = []  # after the consumed tokens
        self._is_whole = False  # whether no more could be drafted after `_drafts`
        self._taken: dict[_Place, int] = {}  # the choices of this output

    def propose(self, tokens: IntArray, prompt_tokens: int, most: int) -> tuple[IntArray, list[int]]:
        """Proposes the next tokens, at most so many, and the basis of each.

        Args:
            tokens: prompt and output.
        """
        if self._is_dead or (self._state is None and not self._start()):
            return int_array(), []
        self._follow(tokens, prompt_tokens)
        if not self._is_dead and not self._is_whole and len(self._drafts) < min(most, _MOST_DRAFTS):
            self._extend(tokens[max(prompt_tokens, len(tokens) - 2) :], min(most, _MOST_DRAFTS))
        known = [each for each in self._drafts[:most] if each.token >= 0]
        return int_array([each.token for each in known]), [each.basis for each in known]

    def _start(self) -> bool:
        self._state = self._states.start(self._grammar)
        return self._state is not None

    def _follow(self, tokens: IntArray, prompt_tokens: int) -> None:
        """Consumes new tokens of the output, and learns its choices."""
        assert self._state is not None
        for token in tokens[prompt_tokens + self._consumed :]:
            if not self._state.consume(token):
                self._is_dead = True
                self._drafts = []
                return
            self._consumed += 1
            draft = self._drafts.pop(0) if self._drafts else None
            if draft is not None:
                if len(self._taken) >= _CHOICES:
                    self._taken.clear()
                for place in draft.places:
                    self._taken[place] = token
            if draft is None or draft.token != token:
                self._drafts, self._is_whole = [], False

    def _extend(self, newest: IntArray, most: int) -> None:
        """Adds drafts while the grammar leaves few choices.

        Args:
            newest: the last two tokens of the output, if it has so many.
        """
        state = self._state
        assert state is not None
        before, last = [_NONE, _NONE, *newest][-2:]
        walked = 0
        for each in self._drafts:
            if not state.consume(each.token):
                self._is_dead = True
                return
            before, last = last, each.token
            walked += 1
        while len(self._drafts) < most and self._allowance.take():
            choices = state.choices()
            if choices is None:
                self._is_whole = True
                break
            draft = self._draft(choices, before, last)
            self._drafts.append(draft)
            if draft.token < 0 or not state.consume(draft.token):
                self._is_whole = True
                break
            before, last = last, draft.token
            walked += 1
        if walked and not state.rollback(walked):
            self._is_dead = True

    def _draft(self, choices: Choices, before: int, last: int) -> _DraftToken:
        key = choices.key
        places = ((key, before, last), (key, _NONE, last), (key, _NONE, _NONE))
        if choices.forced >= 0:
            return _DraftToken(choices.forced, Basis.FORCED, ())
        for place, basis in zip(places, (Basis.REPEATED, Basis.SIMILAR, Basis.SIMILAR), strict=True):
            if (taken := self._taken.get(place)) is not None:
                return _DraftToken(taken, basis, places)
        return _DraftToken(choices.spaced, Basis.SPACED, places)
