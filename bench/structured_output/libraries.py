"""One interface to the two libraries: llguidance, as Baton uses it, and XGrammar."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import MaskFiller
from bench.structured_output.tokenizer import EOS
from bench.structured_output.works import Json, Work


@dataclass
class Times:
    """Seconds of one library on one schema, or on all."""

    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)

    def add(self, other: "Times") -> None:
        self.compile_s += other.compile_s
        self.mask_s += other.mask_s


class Llguidance:
    """Baton's own compiler and matchers."""

    name = "llguidance"

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._fill = MaskFiller().fill
        self.compiler = GrammarCompiler(path, tokenizer.get_vocab_size(), (tokenizer.get_vocab()[EOS],))
        self.compiler.check(Grammar(GrammarKind.JSON_OBJECT))  # reads the tokenizer

    def times(self, work: Work) -> Times:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(work.schema))
        start_s = time.perf_counter()
        matcher = self.compiler.matcher(grammar)
        times = Times([time.perf_counter() - start_s])
        masks = np.empty((1, matcher.words), np.int32)
        for token_id in token_ids(self._tokenizer, work.output):
            start_s = time.perf_counter()
            (failed,) = self._fill([matcher], masks)
            times.mask_s.append(time.perf_counter() - start_s)
            assert failed is None
            matcher.consume(token_id)
        assert matcher.is_accepting
        return times

    def verdicts(self, schema: Json, instances: Sequence[Json]) -> list[bool] | None:
        """Which instances are accepted; None: the schema is refused."""
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        try:
            self.compiler.check(grammar)
        except InvalidRequest:
            return None
        return [self._accepts(grammar, instance) for instance in instances]

    def _accepts(self, grammar: Grammar, instance: Json) -> bool:
        matcher = self.compiler.matcher(grammar)
        try:
            for token_id in token_ids(self._tokenizer, instance):
                matcher.consume(token_id)
        except InvalidRequest:
            return False
        return matcher.is_accepting


class XGrammar:
    """XGrammar with the whitespace of its default."""

    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        self._tokenizer = tokenizer
        vocab = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        info = xgrammar.TokenizerInfo(
            vocab,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=len(vocab),
            stop_token_ids=[tokenizer.get_vocab()[EOS]],
        )
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def times(self, work: Work) -> Times:
        start_s = time.perf_counter()
        compiled = self._compiler.compile_json_schema(json.dumps(work.schema), strict_mode=False)
        matcher = self._library.GrammarMatcher(compiled)
        times = Times([time.perf_counter() - start_s])
        mask = self._library.allocate_token_bitmask(1, self._tokenizer.get_vocab_size())
        for token_id in token_ids(self._tokenizer, work.output):
            start_s = time.perf_counter()
            matcher.fill_next_token_bitmask(mask)
            times.mask_s.append(time.perf_counter() - start_s)
            assert matcher.accept_token(token_id)
        return times

    def verdicts(self, schema: Json, instances: Sequence[Json]) -> list[bool] | None:
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except Exception:  # noqa: BLE001  the library's own errors, and those of its C++
            return None
        verdicts = []
        for instance in instances:
            matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=True)
            text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
            verdicts.append(bool(matcher.accept_string(text) and matcher.is_completed()))
        return verdicts


def token_ids(tokenizer: Tokenizer, output: Json) -> list[int]:
    text = json.dumps(output, ensure_ascii=False, separators=(",", ":"))
    return tokenizer.encode(text, add_special_tokens=False).ids
