"""Follows one output through its grammar, token by token, and computes the masks of token ids that may come next.

A mask has one bit for each token id, in words of 32 bits, the lowest id in the lowest bit.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from baton.core.errors import InvalidRequest
from baton.grammar.budget import CURE, MaskBudget
from baton.grammar.refusal import refusal

Mask = NDArray[np.int32]
_WORD_BITS = 32
# More than a step's drafts. Only so far back are states kept.
_TAKEN_BACK_MAX = 64
_BROKEN = "doesn't satisfy the grammar"  # a part of the library's message
_DEAD_END = "NoExtensionBias"  # the library's word for a grammar that allows no token, not even the end
# After masks that take longer together, the next ones are timed one by one. Of 64 outputs on 2 cores, they take 1 ms.
_SLOW_S = 0.004
_TIMED_FILLS = 256
_TIMING_THREADS = 8


def mask_words(vocab_size: int) -> int:
    """Words of one row's mask."""
    return -(-vocab_size // _WORD_BITS)


class Matcher:
    """One output's state in its grammar. A complete grammar allows only the tokens that end the sequence. Not
    thread-safe.

    Args:
        state: the library's state at the start of the grammar; this object owns it.
        eos_token_ids: end the output where the grammar is complete.
        num_tokens: tokens of the tokenizer; the model's ids from this one on are never allowed.
        words: words of a mask.
        budget: bound of the time to follow the output.
    """

    def __init__(
        self, state: LLMatcher, eos_token_ids: Sequence[int], *, num_tokens: int, words: int, budget: MaskBudget
    ) -> None:
        self.budget = budget
        self._state = state
        self._eos_token_ids = eos_token_ids
        self._num_tokens = num_tokens
        self._words = words
        # Tokens at the end of the output that the library has not taken: those that end the sequence.
        self._num_ends = 0
        # NOTE: a grammar may name a token that ends the sequence, and what the library then takes back it does not take
        # back whole. So a copy of the state is kept from before each such token, with the number of tokens before it.
        self._num_taken = 0
        self._before_ends: list[tuple[int, LLMatcher]] = []

    @property
    def words(self) -> int:
        """Words of a mask, which may have more bits than the model has tokens."""
        return self._words

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tokenizer; bits of a mask from this one on are 0."""
        return self._num_tokens

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._num_ends > 0 or bool(self._state.is_accepting())

    @property
    def is_ended(self) -> bool:
        """Whether nothing may follow but the end of the sequence."""
        return self._num_ends > 0 or (bool(self._state.is_stopped()) and not self._state.is_error())

    @property
    def state(self) -> LLMatcher:
        """The grammar library's state, on which the mask depends until the output is ended."""
        return self._state

    def consume(self, token_id: int) -> None:
        """Takes the next token of the output.

        Raises:
            InvalidRequest: the grammar does not allow this token here, or it became too complex or too expensive.
        """
        clock = self.budget.clock
        started_s = 0.0 if clock is None else clock()
        if token_id in self._eos_token_ids and self.is_accepting:
            self._num_ends += 1
        elif self.is_ended or not self._take(token_id):
            if _BROKEN not in str(self._state.get_error()):
                self.check()
            raise refusal(f"token {token_id} breaks the grammar of the output", value=token_id)
        if clock is not None:
            self.budget.charge_token(clock() - started_s)
            self.budget.check()

    def _take(self, token_id: int) -> bool:
        if token_id in self._eos_token_ids:
            self._before_ends.append((self._num_taken, self._state.deep_copy()))
        taken = bool(self._state.consume_token(token_id))
        self._num_taken += taken
        while self._before_ends and self._before_ends[0][0] < self._num_taken - _TAKEN_BACK_MAX:
            del self._before_ends[0]
        return taken

    def take_back(self, num_tokens: int) -> bool:
        """Takes back the newest tokens of the output. Their time stays charged.

        Returns:
            Whether this matcher can be used further: not after an error in the grammar, nor if too many are taken back.
        """
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if self._state.is_error() or num_tokens - ends > _TAKEN_BACK_MAX:
            return False
        kept = self._num_taken - (num_tokens - ends)
        while self._before_ends and self._before_ends[-1][0] >= kept:
            self._num_taken, self._state = self._before_ends.pop()
        taken, self._num_taken = self._num_taken - kept, kept
        return not taken or bool(self._state.rollback(taken))

    def check(self) -> None:
        """Checks that the grammar can still be followed.

        Raises:
            InvalidRequest: the grammar allows nothing more, or became too complex to be followed, or too expensive.
        """
        if self._state.is_error():
            why = str(self._state.get_error()).splitlines()[0]
            if why == _DEAD_END:
                cure = "let every rule and $ref come to an end, and every character class have a character"
                raise refusal("the grammar allows nothing here, not even an end", cure=cure)
            raise refusal(f"the grammar became too complex to be followed: {why}", cure=CURE)
        self.budget.check()

    def fill(self, mask_W: Mask) -> None:
        """Writes the mask of a grammar that is not complete, and charges its time. Releases the interpreter lock."""
        clock = self.budget.clock
        started_s = 0.0 if clock is None else clock()
        self._state.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if clock is not None:
            self.budget.charge_mask(clock() - started_s)

    def fill_ended(self, mask_W: Mask) -> None:
        """Writes the mask of a complete grammar."""
        mask_W[:] = 0
        for token_id in self._eos_token_ids:
            allow(mask_W, token_id)


class MaskFiller:
    """Fills masks, many at once on the machine's cores. Releases the interpreter lock meanwhile.

    The library does not say what each of many masks took, so after slow ones, each one is timed for a while.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._executor: LLExecutor | None = None
        self._timers: ThreadPoolExecutor | None = None
        self._timed_fills = 0  # number of fills that are still timed

    def fill(self, matchers: Sequence[Matcher], masks_RW: Mask) -> list[InvalidRequest | None]:
        """Writes each matcher's mask to its row. Returns why a row's grammar cannot be followed; its mask is all ones.

        Args:
            masks_RW: contiguous, of as many words as every matcher has.
        """
        assert masks_RW.flags.c_contiguous, "the masks are adjacent"
        assert all(matcher.words == masks_RW.shape[1] for matcher in matchers), "the masks have other sizes"
        unfinished = []
        for row, matcher in enumerate(matchers):
            if matcher.is_ended:
                matcher.fill_ended(masks_RW[row])
            else:
                unfinished.append((matcher, row))
        self._fill(unfinished, masks_RW)
        if matchers:
            _drop_tail(masks_RW, matchers[0].num_tokens)
        failed: list[InvalidRequest | None] = [None] * len(matchers)
        alive_R: NDArray[np.bool_] = np.asarray(masks_RW.any(axis=1))
        for row, matcher in enumerate(matchers):
            try:
                matcher.check()
                if not alive_R[row]:
                    raise refusal("no token of this model continues the output as its grammar asks")
            except InvalidRequest as error:
                failed[row] = error
                masks_RW[row] = -1
        return failed

    def _fill(self, unfinished: Sequence[tuple[Matcher, int]], masks_RW: Mask) -> None:
        if len(unfinished) == 1:
            ((matcher, row),) = unfinished
            matcher.fill(masks_RW[row])
        elif unfinished:
            started_s = self._clock()
            if self._timed_fills:
                self._timed_fills -= 1
                self._timers = self._timers or ThreadPoolExecutor(min(_TIMING_THREADS, os.cpu_count() or 1))
                list(self._timers.map(lambda each: each[0].fill(masks_RW[each[1]]), unfinished))
            else:
                self._executor = self._executor or LLExecutor()
                states = [(matcher.state, row) for matcher, row in unfinished]
                row_bytes = masks_RW.strides[0]
                self._executor.unsafe_compute_mask_ptr(states, masks_RW.ctypes.data, row_bytes, len(masks_RW))
            if self._clock() - started_s > _SLOW_S:
                self._timed_fills = _TIMED_FILLS


def allow(mask_W: Mask, token_id: int) -> None:
    """Sets a token's bit."""
    _bits(mask_W)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def allows(mask_W: Mask, token_id: int) -> bool:
    """Whether a token's bit is set."""
    return bool(_bits(mask_W)[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))


def forbid(mask_W: Mask, token_ids: Sequence[int]) -> None:
    """Clears tokens' bits, unless no token would be left."""
    before_W = mask_W.copy()
    bits_W = _bits(mask_W)
    for token_id in token_ids:
        bits_W[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
    if not bits_W.any():
        mask_W[:] = before_W


def _drop_tail(masks_RW: Mask, num_tokens: int) -> None:
    """Clears the bits from `num_tokens` on."""
    word, bit = divmod(num_tokens, _WORD_BITS)
    if word < masks_RW.shape[1]:
        masks_RW[:, word] &= np.int32((1 << bit) - 1)
        masks_RW[:, word + 1 :] = 0


def _bits(mask_W: Mask) -> NDArray[np.uint32]:
    return mask_W.view(np.uint32)
