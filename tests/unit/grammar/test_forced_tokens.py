"""Which tokens a grammar forces, apart from the matchers that steps are masked by."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.choices import Choices, choices_of
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forced_tokens import ForcedState, ForcedTokens
from baton.grammar.matcher import MaskFiller
from tests.unit.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE

PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"full_name": {"type": "string"}, "age": {"type": "integer"}, "member": {"type": "boolean"}},
            "required": ["full_name", "age", "member"],
            "additionalProperties": False,
        }
    ),
)
TEXT = '{"full_name": "Ada Lovelace", "age": 36, "member": true}'


@pytest.fixture
def states(compiler: GrammarCompiler) -> ForcedTokens:
    compiler.check(PERSON)
    return ForcedTokens(compiler)


def started(states: ForcedTokens, grammar: Grammar = PERSON) -> ForcedState:
    state = states.start(grammar)
    assert state is not None
    return state


def test_a_token_is_forced_if_all_others_are_its_prefixes() -> None:
    assert choices_of({1: b"n", 2: b"name", 3: b"na"}).forced == 2
    assert choices_of({1: b"name"}).forced == 1
    assert choices_of({1: b"name", 2: b"age"}).forced == -1
    assert choices_of({1: b"na", 2: b"name", 3: b"no"}).forced == -1


def test_white_space_hides_what_is_forced() -> None:
    assert choices_of({1: b":", 2: b" ", 3: b"\n"})._replace(key=0) == Choices(0, spaced=1)
    assert choices_of({1: b'"', 2: b' "', 3: b" "})._replace(key=0) == Choices(0, spaced=2)
    assert choices_of({1: b"}", 2: b",", 3: b" "}).spaced == -1
    assert choices_of({1: b" ", 2: b"\n"}).spaced == -1


def test_equal_tokens_have_equal_keys() -> None:
    first, second = {1: b":", 2: b" "}, {1: b":", 3: b"\n"}
    assert choices_of(first).key == choices_of(dict(first)).key
    assert choices_of(first).key != choices_of(second).key


def test_what_is_found_agrees_with_the_masks(
    compiler: GrammarCompiler, states: ForcedTokens, tokenizer: Tokenizer
) -> None:
    state, matcher = started(states), compiler.matcher(PERSON)
    mask = np.empty((1, matcher.words), np.int32)
    num_forced = 0
    for token in tokenizer.encode(TEXT, add_special_tokens=False).ids:
        assert MaskFiller().fill([matcher], mask) == [None]
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        choices = state.choices()
        assert (choices is None) == (len(allowed) > 256)
        if choices is not None:
            texts = [tokenizer.decode([each]) for each in allowed]
            longest = max(texts, key=len)
            is_forced = all(longest.startswith(text) for text in texts)
            assert (choices.forced >= 0) == is_forced
            if is_forced:
                num_forced += 1
                assert tokenizer.decode([choices.forced]) == longest
        matcher.consume(token)
        assert state.consume(token)
    assert num_forced >= 8


def test_the_end_is_forced_where_the_grammar_is_complete(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    state = started(states)
    for token in tokenizer.encode(TEXT, add_special_tokens=False).ids:
        assert state.consume(token)
    choices = state.choices()
    assert choices is not None
    assert choices.forced == EOS
    assert not state.consume(EOS)


def test_tokens_are_taken_back(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    state, other = started(states), started(states)
    for token in tokens[:2]:
        assert state.consume(token)
        assert other.consume(token)
    for token in tokens[2:9]:
        assert state.consume(token)
    assert state.rollback(7)
    for token in tokens[2:]:
        assert state.choices() == other.choices()
        assert state.consume(token)
        assert other.consume(token)


def test_a_token_that_breaks_the_grammar_raises_nothing(states: ForcedTokens) -> None:
    state = started(states)
    assert not state.consume(5)
    assert state.choices() is None
    assert not started(states).consume(10**6)


def test_nothing_is_compiled_or_waited_for() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,))
    states = ForcedTokens(compiler)
    assert states.start(PERSON) is None
    assert compiler.is_pending(PERSON) is False
    future = compiler.prepare(PERSON)
    states.start(PERSON)
    future.result(timeout=60)
    assert states.start(PERSON) is not None
    refused = Grammar(GrammarKind.REGEX, "(")
    with pytest.raises(InvalidRequest):
        compiler.check(refused)
    assert states.start(refused) is None


@pytest.mark.parametrize("call", [ForcedState.choices, lambda state: state.consume(EOS)])
def test_a_grammar_that_takes_long_is_not_followed(
    compiler: GrammarCompiler, call: Callable[[ForcedState], object]
) -> None:
    compiler.check(PERSON)
    times = iter(range(10**6))
    state = started(ForcedTokens(compiler, clock=lambda: next(times) * 0.006))
    assert state.choices() is not None
    assert not call(state)
    assert not call(state)


def test_tokens_beyond_the_tokenizer_are_never_forced(compiler: GrammarCompiler, states: ForcedTokens) -> None:
    state = started(states)
    choices = state.choices()
    assert choices is not None
    assert 0 <= choices.forced < VOCAB_SIZE - 4
