"""Compiles grammars for one tokenizer, with bounded cost, and keeps the latest ones."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from baton.core.errors import InternalError
from baton.core.types import Grammar, GrammarKind
from baton.grammar.budget import MaskBudget
from baton.grammar.gbnf import lark_from_gbnf
from baton.grammar.lark import one_of, read_choices, readable_lark, regex
from baton.grammar.library_refusal import library_refusal
from baton.grammar.limits import check_size, check_usable
from baton.grammar.matcher import MaskFiller, Matcher, mask_words
from baton.grammar.refusal import refusal
from baton.grammar.schema import readable_schema
from baton.grammar.tags import lark_from_tags

# Bounds of one grammar. They bound most of the work, and `baton.grammar.checker` the rest.
_LEXER_STATES = 50_000
_GRAMMAR_SIZE = 100_000
# Bounds of one mask, by count, so the same on every node. A mask of M items in rows of N takes up to M x N x N x 8 ps
# where the grammar is ambiguous, and 100 ns an item where it is not. Only rules of a grammar's own make rows grow with
# the output. Others are as long as their lists of names, and an object of 100 optional ones needs all of these items.
_SCHEMA_ITEMS, _SCHEMA_ROW_ITEMS = 50_000, 2000
_MIXED_ITEMS, _MIXED_ROW_ITEMS = 50_000, 1000
_RULE_ITEMS, _RULE_ROW_ITEMS = 20_000, 500
_WITH_RULES = {GrammarKind.LARK, GrammarKind.GBNF, GrammarKind.STRUCTURAL_TAG}
_CACHED_GRAMMARS = 64
# Without this option the library writes out what the grammar forces before each mask, and tokenizes it. That takes 70
# ms for each token of a text of 200 kB, and never ends if the grammar forces one byte for ever: in `a+ a+`, the first
# part takes all.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_THREADS = 4  # that compile


class GrammarCompiler:
    """Compiles grammars and keeps the latest ones. Safe to use from any thread. The tokenizer is read on first use.

    Args:
        tokenizer_json: a tokenizer of the `tokenizers` library.
        vocab_size: size of the model's vocabulary; ids that the tokenizer lacks are never allowed.
        eos_token_ids: the ids that end a sequence.
        clock: CPU time of the calling thread in seconds, by which outputs whose grammar takes too much are ended; None:
            none is ended. Only one rank may end outputs: ranks take different times, and must draw the same tokens.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        clock: Callable[[], float] | None = time.thread_time,
    ) -> None:
        self._clock = clock
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = Lock()
        self._tokenizer: Future[_Tokenizer] | None = None
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._background: ThreadPoolExecutor | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence."""
        return self._eos_token_ids

    def load(self) -> None:
        """Reads the tokenizer, if there is one.

        Raises:
            InternalError: it cannot be used for grammars.
        """
        if self._path.is_file():
            self._read_tokenizer()

    def check(self, grammar: Grammar) -> None:
        """Compiles the grammar, which may take a second; call it on a thread of its own.

        Raises:
            InvalidRequest: the grammar cannot be followed; names the keyword of a JSON Schema, or the line.
        """
        self._compile_once(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of an output. Compiles the grammar unless it was compiled lately.

        Raises:
            InvalidRequest: as `check`.
        """
        state = self._compile_once(grammar).deep_copy()
        return self._matcher(state, self._read_tokenizer(), MaskBudget(self._clock))

    def _matcher(self, state: LLMatcher, tokenizer: "_Tokenizer", budget: MaskBudget) -> Matcher:
        ends, words = self._eos_token_ids, tokenizer.mask_words
        return Matcher(state, ends, num_tokens=tokenizer.num_tokens, words=words, budget=budget)

    def prepare(self, grammar: Grammar) -> "Future[LLMatcher]":
        """Compiles the grammar in the background, so that `matcher` need not. The future gets any error.

        Raises:
            InvalidRequest: no grammar can be followed here.
        """
        check_usable(self._path, self._eos_token_ids)
        compiled, is_new = self._enter(grammar)
        if is_new:
            self._threads().submit(self._compile_into, compiled, grammar)
        return compiled

    def is_pending(self, grammar: Grammar) -> bool:
        """Whether `matcher` would wait for `prepare`."""
        with self._lock:
            return grammar in self._compiled and not self._compiled[grammar].done()

    def ready(self, grammar: Grammar) -> tuple[Matcher, LLTokenizer] | None:
        """A matcher at the start of an output, and the grammar library's tokenizer. Takes no time to compile or to
        wait: returns None if the grammar is not compiled, or was refused."""
        with self._lock:
            compiled, tokenizer = self._compiled.get(grammar), self._tokenizer
        if compiled is None or tokenizer is None or not compiled.done() or compiled.exception() is not None:
            return None
        read = tokenizer.result()
        return self._matcher(compiled.result().deep_copy(), read, MaskBudget(self._clock)), read.library

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            self._background = self._background or ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
            return self._background

    def _compile_once(self, grammar: Grammar) -> LLMatcher:
        compiled, is_new = self._enter(grammar)
        if is_new:
            self._compile_into(compiled, grammar)
        return compiled.result()

    def _enter(self, grammar: Grammar) -> "tuple[Future[LLMatcher], bool]":
        """The place for the grammar's compiled form, and whether the caller has to fill it."""
        with self._lock:
            if (compiled := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return compiled, False
            compiled = self._compiled[grammar] = Future[LLMatcher]()
            while len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return compiled, True

    def _compile_into(self, compiled: "Future[LLMatcher]", grammar: Grammar) -> None:
        try:
            compiled.set_result(self.compile(grammar))
        except BaseException as error:  # noqa: BLE001  every thread that waits for it gets it
            with self._lock:
                self._compiled.pop(grammar, None)
            compiled.set_exception(error)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The grammar library's state at the start of an output; it is not kept.

        Raises:
            InvalidRequest: as `check`.
        """
        check_usable(self._path, self._eos_token_ids)
        check_size(grammar)
        tokenizer = self._read_tokenizer()
        try:
            text = _READERS[grammar.kind](grammar.text, tokenizer)
        except UnicodeEncodeError:
            raise refusal("the grammar has half of a surrogate pair, which is not a character") from None
        state = LLMatcher(tokenizer.library, text, log_level=0, limits=_limits(grammar.kind, text))
        if state.is_error():
            raise library_refusal(grammar, str(state.get_error()))
        self._check_start(state.deep_copy(), tokenizer)
        return state

    def _check_start(self, state: LLMatcher, tokenizer: "_Tokenizer") -> None:
        """Makes the first mask: it is often the slowest one, and shows whether there is any output at all."""
        matcher = self._matcher(state, tokenizer, MaskBudget(self._clock))
        (failed,) = MaskFiller().fill([matcher], np.empty((1, matcher.words), np.int32))
        if failed is not None:
            raise refusal(f"no output can follow the grammar: {failed.message}", cure=failed.cure)

    def _read_tokenizer(self) -> "_Tokenizer":
        with self._lock:
            waiting = self._tokenizer
            if waiting is None:
                mine = self._tokenizer = Future["_Tokenizer"]()
        if waiting is not None:
            return waiting.result()
        try:
            mine.set_result(_Tokenizer(self._path, self._vocab_size, self._eos_token_ids))
        except BaseException as error:  # noqa: BLE001  as above
            self._tokenizer = None
            mine.set_exception(error)
        return mine.result()


def _limits(kind: GrammarKind, text: str) -> LLParserLimits:
    items, row_items = _SCHEMA_ITEMS, _SCHEMA_ROW_ITEMS
    if kind in _WITH_RULES:
        items, row_items = (_MIXED_ITEMS, _MIXED_ROW_ITEMS) if "%json" in text else (_RULE_ITEMS, _RULE_ROW_ITEMS)
        row_items = min(_SCHEMA_ROW_ITEMS, row_items + text.count("|"))
    return LLParserLimits(
        max_items_in_row=row_items,
        step_max_items=items,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SIZE,
        verbose_errors=False,
    )


class _Tokenizer:
    """The grammar library's tokenizer.

    Attributes:
        num_tokens: ids below this one have a token.
        mask_words: words of one mask.
        special: ids of special tokens by their text.
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            content = path.read_bytes()
            tokenizer = Tokenizer.from_buffer(content)  # the library opens no path that is not UTF-8
            added = tokenizer.get_added_tokens_decoder()
            self.special = {token.content: token_id for token_id, token in added.items() if token.special}
            self.num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
            size = max(vocab_size, self.num_tokens)
            self.mask_words = mask_words(size)
            self.library = LLTokenizer(content.decode(), n_vocab=size, eos_token=list(eos_token_ids))
        except Exception as error:
            raise InternalError(f"{path} cannot be used for grammars: {error}") from error

    def split(self, text: str) -> list[str | int]:
        """The text, cut at special tokens, which become ids."""
        pieces: list[str | int] = []
        while text:
            found = [(text.find(token), -len(token), token) for token in self.special if token in text]
            if not found:
                return [*pieces, text]
            start, _, token = min(found)
            pieces += [text[:start], self.special[token]] if start else [self.special[token]]
            text = text[start + len(token) :]
        return pieces


def _lark_grammar(text: str) -> str:
    return text + _NO_FORCING


def _json_object(text: str, tokenizer: _Tokenizer) -> str:
    del text
    return _json_schema('{"type": "object"}', tokenizer)


def _json_schema(text: str, tokenizer: _Tokenizer) -> str:
    del tokenizer
    schema = readable_schema(text)
    schema.encode()  # the library's error for half of a surrogate pair is none of a schema
    return _lark_grammar(f"start: %json {schema}")


def _regex(text: str, tokenizer: _Tokenizer) -> str:
    del tokenizer
    return _lark_grammar(f"start: {regex(text)}")


def _choice(text: str, tokenizer: _Tokenizer) -> str:
    del tokenizer
    return _lark_grammar(one_of(read_choices(text)))


def _lark(text: str, tokenizer: _Tokenizer) -> str:
    del tokenizer
    if text.lstrip().startswith("{"):  # the library's own form, which `readable_lark` does not see through
        raise refusal("the grammar is JSON, not Lark", value=text, cure='write rules, such as start: "yes" | "no"')
    return _lark_grammar(readable_lark(text))


def _gbnf(text: str, tokenizer: _Tokenizer) -> str:
    del tokenizer
    return _lark_grammar(readable_lark(lark_from_gbnf(text)))


def _structural_tag(text: str, tokenizer: _Tokenizer) -> str:
    return _lark_grammar(lark_from_tags(text, tokenizer.split))


_READERS: Mapping[GrammarKind, Callable[[str, _Tokenizer], str]] = MappingProxyType(
    {
        GrammarKind.JSON_OBJECT: _json_object,
        GrammarKind.JSON_SCHEMA: _json_schema,
        GrammarKind.REGEX: _regex,
        GrammarKind.CHOICE: _choice,
        GrammarKind.LARK: _lark,
        GrammarKind.GBNF: _gbnf,
        GrammarKind.STRUCTURAL_TAG: _structural_tag,
    }
)
