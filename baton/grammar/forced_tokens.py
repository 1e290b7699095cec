"""Follows outputs through their grammars to find which tokens are forced, apart from the matchers that steps are masked
by: those belong to another thread. What is found here is only used for drafts, so nothing fails here.

Used on one thread. A grammar whose masks take long is not followed any more, because a step waits meanwhile.
"""

import time
from collections.abc import Callable

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from baton.core.types import Grammar
from baton.grammar.choices import Choices, choices_of
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import Matcher

# If more tokens are allowed, nothing is forced.
_MOST_ALLOWED = 256
# A call may take this long on average, and all of an output this much longer. Of a JSON schema, a mask takes 11 us on
# average with 4,096 tokens and 31 us with 262,144, and up to 0.5 ms the first time.
_CALL_S = 0.0003
_MORE_S = 0.01
_CACHED = 4096


class ForcedTokens:
    """Starts outputs of one engine.

    Args:
        compiler: compiles the grammars elsewhere; here nothing is compiled.
        clock: CPU time of the calling thread in seconds.
    """

    def __init__(self, compiler: GrammarCompiler, *, clock: Callable[[], float] = time.thread_time) -> None:
        self._compiler = compiler
        self._clock = clock
        self._choices: dict[bytes, Choices] = {}

    def start(self, grammar: Grammar) -> "ForcedState | None":
        """An output's state at the start of its grammar. Returns None if the grammar is not compiled."""
        ready = self._compiler.ready(grammar)
        if ready is None:
            return None
        matcher, tokenizer = ready
        return ForcedState(matcher, tokenizer, self._compiler.eos_token_ids, self._choices, self._clock)


class ForcedState:
    """Where an output is in its grammar.

    Args:
        matcher: at the start of the grammar; this object owns it.
        cached: choices by allowed tokens, for all outputs.
    """

    def __init__(
        self,
        matcher: Matcher,
        tokenizer: LLTokenizer,
        eos_token_ids: tuple[int, ...],
        cached: dict[bytes, Choices],
        clock: Callable[[], float],
    ) -> None:
        self._matcher = matcher
        self._state = matcher.state
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._cached = cached
        self._clock = clock
        self._excess_s = 0.0
        self._mask_W = np.empty(matcher.words, np.int32)

    def consume(self, token_id: int) -> bool:
        """Takes the next token. Returns False if the output cannot be followed any more, such as after its end."""
        started_s = self._clock()
        taken = token_id not in self._eos_token_ids and bool(self._state.consume_token(token_id))
        return self._charge(started_s) and taken

    def choices(self) -> Choices | None:
        """What may come next. Returns None if more than 256 tokens may, or the grammar takes too long."""
        if self._state.is_error():
            return None
        if self._matcher.is_ended:
            return Choices(0, self._eos_token_ids[0]) if self._eos_token_ids else None
        started_s = self._clock()
        self._state.unsafe_compute_mask_ptr(self._mask_W.ctypes.data, self._mask_W.nbytes)
        found = self._find() if not self._state.is_error() else None
        return found if self._charge(started_s) else None

    def rollback(self, num_tokens: int) -> bool:
        """Takes back so many tokens. Returns False if the output cannot be followed any more."""
        self._state.rollback(num_tokens)
        return not self._state.is_error()

    def _find(self) -> Choices | None:
        words = self._mask_W.view(np.uint32)
        if int(np.bitwise_count(words).sum()) > _MOST_ALLOWED:
            return None
        filled = np.flatnonzero(words)
        bits = words[filled]
        key = filled.tobytes() + bits.tobytes()
        if (found := self._cached.get(key)) is None:
            if len(self._cached) >= _CACHED:
                self._cached.clear()
            allowed = [token for token in _tokens(filled, bits) if token < self._matcher.num_tokens]
            found = choices_of({token: self._tokenizer.decode_bytes([token]) for token in allowed})
            self._cached[key] = found
        return found

    def _charge(self, started_s: float) -> bool:
        """Charges a call's time. Returns False if the grammar takes too long."""
        self._excess_s = max(0.0, self._excess_s + self._clock() - started_s - _CALL_S)
        return self._excess_s <= _MORE_S


def _tokens(filled: NDArray[np.int64], bits: NDArray[np.uint32]) -> list[int]:
    """The token ids of the bits that are set in these words of a mask."""
    return [
        word * 32 + bit for word, each in zip(filled.tolist(), bits.tolist(), strict=True) for bit in _set_bits(each)
    ]


def _set_bits(word: int) -> list[int]:
    return [bit for bit in range(32) if word >> bit & 1]
